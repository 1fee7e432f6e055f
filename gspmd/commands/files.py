"""The files that flags name: they are checked before the work begins, and written after it."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from gspmd.writing import replace_file


def faults_of(flag: str, given: str, suffix: str = "", kind: str = "") -> Iterator[str]:
    """Yield the reasons why a file cannot be written, as far as they are known in advance.

    Args:
        flag: its flag, without hyphens.
        given: the name of the file; empty if the flag is not given.
        suffix: the ending that the name must have; empty if it may have any.
        kind: the kind of file with that ending, such as "a PNG file".
    """
    path = Path(given)
    if not given:
        return
    if suffix and path.suffix != suffix:
        yield f"--{flag} writes {kind}, whose name ends in {suffix}, not {given!r}."
    try:
        if "\0" in given:
            yield f"--{flag} {given!r:.40}: a name cannot have null characters."
        elif given.endswith(os.sep):  # `Path` would leave the slash out.
            yield f"--{flag} {given}: it is a folder; give a file."
        elif not os.path.isdir(path.parent):
            yield f"--{flag} {path}: there is no folder {str(path.parent)!r}."
        elif stat.S_ISDIR(os.stat(path).st_mode):
            yield f"--{flag} {path}: it is a folder; give a file."
        elif not os.access(path, os.W_OK):
            yield f"--{flag} {path}: the file is read-only."
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK):
            yield f"--{flag} {path}: the folder is read-only."
    except OSError as error:  # A name that is too long.
        yield f"--{flag} {path!s:.40}...: {error.strerror}."


def unwritten(flag: str, path: str, write: Callable[[str], object]) -> list[str]:
    """Write the file of a flag; return the fault if that is not possible, and nothing otherwise."""
    try:
        write(path)
    except OSError as error:
        return [f"cannot write --{flag} {path}: {error.strerror}. Name a file elsewhere."]
    return []


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole (`gspmd.writing`), in UTF-8."""
    replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
