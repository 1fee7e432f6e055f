"""The files that flags name: the faults of a name, known before the work begins, and files that are written whole."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path


def faults_of(flag: str, given: str, suffix: str = "", kind: str = "") -> Iterator[str]:
    """Yield the reasons why a file cannot be written, as far as they are known in advance.

    Args:
        flag: its flag, without hyphens.
        given: its name; empty if the flag is not given.
        suffix: the ending that the name must have; empty for any.
        kind: the kind of file with that ending, such as "a PNG file".
    """
    path = Path(given)
    if not given:
        return
    if suffix and path.suffix != suffix:
        yield f"--{flag} writes {kind}, whose name ends in {suffix}, not {given!r}."
    try:
        if "\0" in given:
            yield f"--{flag} {given!r:.40}: a name has no null characters."
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


def write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Write a file so that it has its old or its complete new contents, for example if the disk is full.

    It is written beside the old one, under a name with the same ending, and renamed. A pipe or a device is written as
    it is, and so is a file in a folder that is read-only.

    Args:
        path: the file.
        write: writes the file of the name that it is given.

    Raises:
        OSError: the file cannot be written.
    """
    stream = (os.path.exists(path) and not os.path.isfile(path)) or str(path).startswith("/dev/")
    file = Path(os.path.realpath(path))  # A link stays one.
    if stream or not os.access(file.parent, os.W_OK):
        write(Path(path))
        return
    beside = file.with_name(f".{file.stem}.part{file.suffix}")
    try:
        write(beside)
        beside.replace(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)


def unwritten(flag: str, path: str, write: Callable[[Path], object]) -> list[str]:
    """Write a file as `write_whole` does; return the fault if that is not possible."""
    try:
        write_whole(path, write)
    except OSError as error:
        return [f"cannot write --{flag} {path}: {error.strerror}. Name a file elsewhere."]
    return []
