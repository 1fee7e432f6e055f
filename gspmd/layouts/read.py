"""Reading the fields of a layout from a preset or a TOML file, without checking them."""

import os
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from gspmd.annotate import LayoutError
from gspmd.annotate.errors import listed, shown, suggestion
from gspmd.annotate.parser import NAME
from gspmd.layouts.rules.keys import OVERRIDES, PHASES, SERVING
from gspmd.layouts.rules.own import declared, is_own_encoder, sections
from gspmd.reading import LARGEST_TOML, ContentError, MissingError, ReadError, parse_toml, read_text, similar_file

_PRESETS = files(__package__).joinpath("presets")

#: The order in which presets are listed, from the simplest to the most specialized.
_ORDER = (
    "replicated", "data-parallel", "zero-1", "zero-2", "zero-3", "megatron-1d", "megatron-sequence",
    "megatron-folded", "context-parallel", "weight-stationary-1d", "weight-stationary-2d", "weight-gathered-x",
    "weight-gathered-xy", "weight-gathered-xyz", "gshard", "switch-expert-model", "pipeline",
)  # fmt: skip

_SEARCHED = "Only --layout of gspmd train and of gspmd generate takes it; gspmd search writes a layout to a file. "
_REMEDY = "Give the path of a TOML file, or the name of a preset: gspmd layouts list."


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets: first the presets that `_ORDER` lists, then any others."""
    there = {entry.name.removesuffix(".toml") for entry in _PRESETS.iterdir() if entry.name.endswith(".toml")}
    return (*(name for name in _ORDER if name in there), *sorted(there.difference(_ORDER)))


def is_path(name: str) -> bool:
    """Return whether the name of a layout is a path, which means that it has a slash or ends in `.toml`.

    >>> is_path("mine.toml"), is_path("megatron-1d")
    (True, False)
    """
    return "/" in name or name.endswith(".toml")


def text_of(name: str | PathLike) -> str:
    """Read the text of a preset, or of the file at a path.

    Raises:
      LayoutError: no preset has this name, or the file does not exist or cannot be read.
    """
    path = fspath(name) if isinstance(name, str | PathLike) else None
    if not isinstance(path, str):
        raise LayoutError(f"cannot load a layout from {shown(name)}.\n  {_REMEDY}")
    if not is_path(path):
        return _preset_text(path)
    try:
        return read_text(path, LARGEST_TOML)
    except ReadError as error:
        near = similar_file(path) if isinstance(error, MissingError) else ""
        raise LayoutError(f"cannot read the layout file '{path}': {error}.\n  {near}{_REMEDY}") from None


def _preset_text(name: str) -> str:
    names = preset_names()
    if name not in names:
        near = _SEARCHED if name == "auto" else suggestion(name, names)
        path = f"./{name}" if os.path.isfile(name) else "the path of a TOML file"
        raise LayoutError(f"no layout is called {shown(name)}.\n  {near}Presets: {', '.join(names)}; or give {path}.")
    return _PRESETS.joinpath(f"{name}.toml").read_text(encoding="utf-8")


def fields(name: str | PathLike, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the fields of `Layout` from a preset or a file, and merge them into the fields of its base.

    `below` has the paths of the files that are built on this file, directly or through other files. None of them can be
    the base of this file.
    """
    document = _document(name)
    base = document.pop("base", None)
    inherited = _empty() if base is None else _base_fields(base, name, below)
    inherited.update(_mesh(document.pop("mesh", {}), name))
    return _merged(inherited, document)


def _document(name: str | PathLike) -> dict[str, Any]:
    try:
        return parse_toml(text_of(name))
    except ReadError as error:
        remedy = "Correct the file." if isinstance(error, ContentError) else _REMEDY
        raise LayoutError(f"cannot read the layout file '{fspath(name)}': {error}.\n  {remedy}") from None


def _base_fields(base: Any, name: str | PathLike, below: tuple[Path, ...]) -> dict[str, Any]:
    """Read the fields of the base of a file; if the base is a path, it is relative to the folder of the file."""
    # os.path.realpath, because Path.resolve raises an error of its own for circular links.
    chain = (*below, Path(os.path.realpath(name)))
    path = Path(name).parent / base if isinstance(base, str) and is_path(base) else None
    if not isinstance(base, str) or "\0" in base or (path and Path(os.path.realpath(path)) in chain):
        raise LayoutError(
            f"the layout '{fspath(name)}' cannot have the base {shown(base)}.\n  Name a preset or another file."
        )
    try:
        return fields(path or base, chain)
    except LayoutError as error:
        raise LayoutError(f"the layout '{fspath(name)}' has the base {base!r}: {error}", error.faults) from None


def _mesh(mesh: Any, name: str | PathLike) -> dict[str, tuple[str, ...]]:
    known = ("axes", "factor")
    for key in mesh if isinstance(mesh, dict) else ():
        if key not in known:
            raise LayoutError(
                f"the layout '{fspath(name)}' has an unknown key {key!r} in [mesh].\n"
                f"  {suggestion(key, known)}It holds {listed(known)}."
            )
    read = {key: _names(value) for key, value in mesh.items()} if isinstance(mesh, dict) else {}
    axes = read.get("axes", ())
    if wrong := next((axis for axis in axes if not NAME.fullmatch(axis)), None):
        raise LayoutError(
            f"the layout '{fspath(name)}' has {shown(wrong)} in axes of [mesh], which is not the name of a mesh axis.\n"
            "  A name is a lower-case letter, then lower-case letters, digits and '_'."
        )
    if again := next((axis for at, axis in enumerate(axes) if axis in axes[:at]), None):
        raise LayoutError(
            f"the layout '{fspath(name)}' names mesh axis {again} twice in axes of [mesh].\n  Name each mesh axis once."
        )
    return read


def _merged(inherited: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    tables = [*document.items()]
    if isinstance(document.get(SERVING), dict):  # applied first, so that lines for one phase override it
        both = document.pop(SERVING)
        tables = [*((phase, both) for phase in PHASES), *document.items()]
    written = {*document, *sections(inherited["table"])}
    for section, entries in tables:
        if not isinstance(entries, dict):
            inherited["table"][section] = entries
        elif section in ("lowering", "dimensions", "padding"):
            inherited[{"lowering": "lowerings"}.get(section, section)].update(entries)
        else:
            for key, spec in _flat(entries).items():
                if section in OVERRIDES and not is_own_encoder(section, key, written):
                    inherited["overrides"].setdefault(section, {})[key] = spec
                else:
                    inherited["table"][f"{section}.{key}"] = spec
    # The base decides the dimensions of user-defined keys: a file with this base may change specs, but not dimensions.
    return inherited | {"own": declared(inherited["table"]) | inherited["own"]}


def _flat(entries: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested tables to keys with dots, and turn lists of strings into tuples.

    A nested table is what TOML reads from an unquoted key such as `ffn.w_in`.
    """
    flat: dict[str, Any] = {}
    for key, value in entries.items():
        alternatives = isinstance(value, list) and value and all(isinstance(text, str) for text in value)
        value = tuple(value) if alternatives else value
        inner = {f"{key}.{k}": v for k, v in _flat(value).items()} if isinstance(value, dict) else {key: value}
        flat.update(inner)
    return flat


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _empty() -> dict[str, Any]:
    return {"table": {}, "overrides": {}, "lowerings": {}, "dimensions": {}, "own": {}, "padding": {}}
