"""Comparison of the settings of all processes of a run, before anything is compiled.

Each process compiles its own program. If the programs differ in a batch or a collective, the processes wait for each
other forever, or a library aborts. If the programs differ only in a number, such as a learning rate, they run and
compute nonsense.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import gspmd
from gspmd.training.processes.joining import count, gathered, told
from gspmd.training.toml import ConfigError

# Packages whose versions affect programs and the order of batches.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "tokenizers")
# Options of JAX that change what a program computes.
_OPTIONS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_disable_most_optimizations", "jax_numpy_dtype_promotion",
)  # fmt: skip
# Flags of XLA_FLAGS that may differ: the dump folders of each process.
_WHERE = "--xla_dump_to="
_ABSENT = "absent"
_LONGEST = 200
"""Largest number of characters of a value that a message shows."""


def compare(
    facts: Callable[[], Mapping[str, Any]], doing: str = "cannot train: the processes have different settings."
) -> None:
    """Raise an error if the processes have different values; all processes must call this function.

    Args:
        facts: a function that returns values by name, such as settings. The mapping may be nested, and JSON must be
            able to express the values. The function is not called if there is only one process.
        doing: the first words of the error message.

    Raises:
        ConfigError: values differ. The message, which is the same in all processes, says for each name which processes
            have which value.
    """
    if count() == 1:
        return
    own = json.dumps([socket.gethostname(), dict(_flat(facts()))])
    everyone = [json.loads(text) for text in gathered(own)]
    faults = json.loads(told(lambda: json.dumps(differences([host for host, _ in everyone], [f for _, f in everyone]))))
    if faults:
        raise ConfigError(doing, faults)


def differences(hosts: Sequence[str], facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each name whose values differ between processes.

    Args:
        hosts: the name of the machine of each process.
        facts: the values of each process, by name.

    Example:
        >>> differences(["a", "b", "b"], [{"batch": "8"}, {"batch": "8"}, {"batch": "16"}])
        ['batch is 8 in processes 0 and 1, but 16 in process 2 (on b).']
    """
    lines = []
    for name in {name: None for each in facts for name in each}:
        values: dict[str, list[int]] = {}
        for process, each in enumerate(facts):
            values.setdefault(each.get(name, _ABSENT), []).append(process)
        if len(values) > 1:
            # The value of most processes is probably the intended one.
            (usual, these), *others = sorted(values.items(), key=lambda item: -len(item[1]))
            rest = (f"{_short(value)} in {_named(of, hosts)}" for value, of in others)
            lines.append(f"{name} is {_short(usual)} in {_named(these)}, but {', and '.join(rest)}.")
    return lines


def environment(*modules: ModuleType) -> dict[str, Any]:
    """Return the versions of packages, and the options of JAX and XLA that change a program, for `compare`.

    Args:
        modules: packages and modules besides gspmd whose source affects the program, such as the module of the model.
    """
    versions = {"gspmd": gspmd.__version__, "gspmd's source": _source(gspmd, *modules)}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = _ABSENT
    flags = " ".join(sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_WHERE)))
    options = {name: str(getattr(jax.config, name, _ABSENT)) for name in _OPTIONS}
    return {"version": versions, "XLA_FLAGS": flags, "option": options}


def _source(*modules: ModuleType) -> str:
    """Return a hash of the source files of packages and modules, because two checkouts of one version may differ."""
    digest = hashlib.sha256()
    for module in modules:
        file = Path(str(module.__file__))
        folder = file.parent
        for path in sorted(folder.rglob("*.py")) if hasattr(module, "__path__") else [file]:
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _flat(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names of nested values, joined by dots, and the values as text."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _short(value: str) -> str:
    shown = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    return shown or "empty"


def _named(processes: Sequence[int], hosts: Sequence[str] | None = None) -> str:
    """Return process numbers as text, such as `processes 0 to 6`; if `hosts` is given, with the machines' names."""
    where = sorted({hosts[process] for process in processes}) if hosts else []
    on = f" (on {', '.join(where[:4])}{', …' if len(where) > 4 else ''})" if where else ""
    first, last = processes[0], processes[-1]
    if len(processes) == 1:
        return f"process {first}{on}"
    if len(processes) == 2:
        return f"processes {first} and {last}{on}"
    if last - first + 1 == len(processes):
        return f"processes {first} to {last}{on}"
    shown = ", ".join(map(str, processes[:8]))
    return f"processes {shown}{', …' if len(processes) > 8 else ''}{on}"
