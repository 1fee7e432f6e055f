"""The files that flags name: checked before the work begins, and written after it."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from gspmd.writing import replace_file


def faults_of(flag: str, given: str, suffix: str = "", kind: str = "") -> Iterator[str]:
    """Yield the reasons why a file cannot be written, as far as they can be known in advance.

    Args:
        flag: the name of the file's flag, without hyphens.
        given: the name of the file, or an empty string if the flag is not given.
        suffix: the ending that the name must have, or an empty string for any ending.
        kind: the kind of file with this ending, such as "a PNG file".
    """
    path = Path(given)
    if not given:
        return
    if suffix and path.suffix.lower() != suffix:
        yield f"--{flag} writes {kind}, whose name ends in {suffix}, not {given!r}."
    shown = f"{given:.40}..." if len(given) > 80 else given
    try:
        if "\0" in given:
            yield f"--{flag} {given!r:.40}: a name cannot have null characters."
            return
        file = Path(os.path.realpath(given))  # the file itself if `given` is a link
        folder = path.parent if file == path.absolute() else file.parent  # the folder as given, if it has no link
        if given.endswith(os.sep):  # `Path` would leave the slash out.
            yield f"--{flag} {shown}: it is a folder; give a file."
        elif not os.path.isdir(file.parent):
            yield f"--{flag} {shown}: there is no folder {str(folder)!r}."
        elif stat.S_ISDIR(os.stat(file).st_mode):
            yield f"--{flag} {shown}: it is a folder; give a file."
        elif not os.access(file, os.W_OK):
            yield f"--{flag} {shown}: the file is read-only."
    except FileNotFoundError:
        if not os.access(file.parent, os.W_OK):
            yield f"--{flag} {shown}: the folder is read-only."
    except OSError as error:  # A name that is too long, or a circle of links.
        yield f"--{flag} {shown}: {error.strerror}."


def unwritten(flag: str, path: str, write: Callable[[str], object]) -> list[str]:
    """Write the file that a flag names, with the function `write`.

    The returned list has the fault if writing fails, and is empty otherwise.
    """
    try:
        write(path)
    except OSError as error:
        return [f"cannot write --{flag} {path}: {error.strerror or error}. Name a file elsewhere."]
    return []


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, completely or not at all (`gspmd.writing`)."""
    replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
