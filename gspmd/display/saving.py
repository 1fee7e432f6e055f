"""Write a file completely or not at all, and explain in plain words why it could not be written."""

import os
from collections.abc import Callable
from pathlib import Path

from gspmd.display.plain import printable


def write_or_keep(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Write a file atomically: if writing fails, for example because the disk is full, the old contents stay.

    The contents are written into a file in the same folder and with the same ending, which is then renamed. A pipe or a
    device is written directly, and so is a file in a read-only folder.

    Args:
        path: the file.
        write: a function that is called with a path, and writes the file there.

    Raises:
        OSError: the file cannot be written. It is of the class that the system raised, and its `strerror` is the
            system's reason; its message also names the file and a remedy.
        ValueError: no file can have this name, or `write` raised it.
    """
    try:
        file = Path(os.path.realpath(path))  # A link stays a link.
        stream = (os.path.exists(path) and not os.path.isfile(path)) or str(path).startswith("/dev/")
        if stream or not os.access(file.parent, os.W_OK):
            write(Path(path))
            return
        beside = file.with_name(f".part-{os.getpid()}{file.suffix}")
        try:
            write(beside)
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        say = f"cannot write {printable(os.fspath(path))}: {reason}.\n  Name a file in a folder that can be written to."
        explained = type(error)(say)
        explained.strerror = reason  # Without `errno`, which would replace the message.
        raise explained from None
    except ValueError as error:  # From a null byte, or half of a surrogate pair.
        name = printable(repr(os.fspath(path)))
        raise ValueError(f"cannot write {name}: {error}.\n  Give another name.") from None
