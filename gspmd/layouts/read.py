"""From a preset's name or a file's path to the fields of a layout; no rule is applied here but TOML's own."""

import tomllib
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from gspmd.annotate import LayoutError
from gspmd.annotate.errors import suggestion
from gspmd.layouts.keys import OVERRIDES

_PRESETS = files(__package__).joinpath("presets")

#: The order in which presets are listed: from no communication to the most particular.
_ORDER = (
    "replicated", "data-parallel", "zero-3", "megatron-1d", "weight-stationary-1d", "weight-stationary-2d",
    "weight-gathered-x", "weight-gathered-xy", "weight-gathered-xyz", "gshard", "switch-expert-model",
)  # fmt: skip


def preset_names() -> tuple[str, ...]:
    """Every preset that is shipped, the known ones in a fixed order."""
    there = {entry.name.removesuffix(".toml") for entry in _PRESETS.iterdir() if entry.name.endswith(".toml")}
    return (*(name for name in _ORDER if name in there), *sorted(there.difference(_ORDER)))


def text_of(name: str | PathLike) -> str:
    """The text of a preset, or of the file at a path.

    Raises:
      LayoutError: there is no such preset, or no such file, or it cannot be read.
    """
    path = fspath(name)
    if "/" not in path and not path.endswith(".toml"):
        return _preset_text(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise LayoutError(
            f"cannot read the layout file '{path}': {reason}.\n  A name without a slash or .toml is a preset."
        ) from None


def _preset_text(name: str) -> str:
    names = preset_names()
    if name not in names:
        near = suggestion(name, names)
        raise LayoutError(
            f"no layout is called {name!r}.\n  {near}Presets: {', '.join(names)}; or give the path of a TOML file."
        )
    return _PRESETS.joinpath(f"{name}.toml").read_text(encoding="utf-8")


def fields(name: str | PathLike, below: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of `Layout` that a preset or a file holds, on top of those of its base."""
    document = _document(name)
    base = document.pop("base", None)
    inherited = _empty() if base is None else _base_fields(base, name, below)
    mesh = document.pop("mesh", {})
    mesh = mesh if isinstance(mesh, dict) else {}
    inherited.update({key: _names(mesh[key]) for key in ("axes", "factor") if key in mesh})
    return _merged(inherited, document)


def _document(name: str | PathLike) -> dict[str, Any]:
    try:
        return tomllib.loads(text_of(name))
    except tomllib.TOMLDecodeError as error:
        raise LayoutError(f"cannot read the layout file '{fspath(name)}': {error}.\n  It has to be TOML.") from None


def _base_fields(base: Any, name: str | PathLike, below: tuple[str, ...]) -> dict[str, Any]:
    chain = (*below, fspath(name))
    if not isinstance(base, str) or base in chain:
        raise LayoutError(
            f"the layout '{fspath(name)}' cannot have the base {base!r}.\n  Name a preset or another file."
        )
    return fields(base, chain)


def _merged(found: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    for section, entries in document.items():
        if not isinstance(entries, dict):
            found["table"][section] = entries
        elif section == "lowering":
            found["lowerings"].update(entries)
        elif section in OVERRIDES:
            found["overrides"].setdefault(section, {}).update(_flat(entries))
        else:
            found["table"].update({f"{section}.{key}": spec for key, spec in _flat(entries).items()})
    return found


def _flat(entries: dict[str, Any]) -> dict[str, Any]:
    """Quoted keys as they are; `ffn.w_in` without quotes, which TOML reads as a table in a table, as if it had them."""
    flat = {}
    for key, value in entries.items():
        inner = {f"{key}.{k}": v for k, v in _flat(value).items()} if isinstance(value, dict) else {key: value}
        flat.update(inner)
    return flat


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _empty() -> dict[str, Any]:
    return {"table": {}, "overrides": {}, "lowerings": {}}
