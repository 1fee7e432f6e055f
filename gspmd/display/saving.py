"""Say in plain words why a picture could not be written."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath

from gspmd.display.plain import printable


@contextmanager
def saving(path: str | PathLike[str]) -> Iterator[None]:
    """Give the errors of writing a file a message with the name of the file, the reason and a remedy.

    Raises:
        OSError: the file cannot be written; it is of the class that the system raised.
        ValueError: no file can have this name.
    """
    try:
        yield
    except OSError as error:
        why = f"cannot write {printable(fspath(path))}: {error.strerror or error}."
        raise type(error)(f"{why}\n  Name a file in a folder that can be written to.") from None
    except ValueError as error:  # From a null byte, or half of a surrogate pair.
        raise ValueError(f"cannot write {printable(repr(fspath(path)))}: {error}.\n  Give another name.") from None
