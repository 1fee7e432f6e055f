"""A cache on disk of layouts that were found: a layout file, and beside it a file with information on the search."""

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from gspmd import host
from gspmd.commands.automatic.found import FoundLayout
from gspmd.reading import read_json, read_text

_KNOWN = ("mesh", "seconds", "chip", "took")


def load(key: str) -> FoundLayout | None:
    """Return the cached layout for the `LayoutQuestion` with this key, or None if it is missing or damaged."""
    path = _path(key)
    try:
        known, text = read_json(path.with_suffix(".json")), read_text(path)
        if known["digest"] != _digest(text):
            return None
        found = FoundLayout(text, **{name: known[name] for name in _KNOWN}, before=True, place=f"kept in {path}")
        return found if _is_whole(found) else None
    except (ValueError, KeyError, TypeError):  # ReadError is a ValueError.
        return None


def _is_whole(found: FoundLayout) -> bool:
    """Return whether a cached layout has everything that `save` writes."""
    if not (isinstance(found.mesh, str) and isinstance(found.chip, str) and isinstance(found.seconds, dict)):
        return False
    return all(type(each) in (int, float) and 0 <= each < 1e15 for each in (found.took, *found.seconds.values()))


def save(key: str, found: FoundLayout) -> FoundLayout:
    """Cache a layout on disk if possible, and return the layout with a new `place`.

    `place` is the path of the cached file, or the reason why the layout could not be cached.
    """
    path = _path(key)
    known = {name: value for name, value in asdict(found).items() if name in _KNOWN} | {"digest": _digest(found.text)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The second file marks the first as complete.
        for file, text in ((path, found.text), (path.with_suffix(".json"), json.dumps(known))):
            beside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
            beside.write_text(text, encoding="utf-8")
            beside.replace(file)
    except OSError as error:
        return replace(found, place=f"not kept: cannot write to {str(path.parent)!r}: {error.strerror}")
    return replace(found, place=f"kept in {path}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _path(key: str) -> Path:
    return host.cache_folder("layouts") / f"{key}.toml"
