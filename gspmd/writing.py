"""Write files so that a failure, for example a full disk, leaves the old contents."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Errors of renaming that say nothing about writing: a mounted file, a file of another user in a sticky folder (/tmp).
_NOT_RENAMED = {errno.EBUSY, errno.EPERM, errno.EACCES, errno.EXDEV}
_LONGEST_ENDING = 20
"""Endings with more characters are left out of the temporary name, which could otherwise become too long."""

_MOST_LINKS = 40
"""The maximum number of links that Linux follows; a longer chain is a circle."""


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Write a file whole: if writing fails, the old contents stay, or no file if there was none.

    The contents are written to a temporary file in the same folder, with the same ending and mode, which is renamed at
    the end. Pipes and devices are written directly, and so are files in a read-only folder.

    Args:
        path: the file; of a symbolic link, the target is replaced.
        write: a function that takes a path and writes the file there.

    Raises:
        OSError: the file cannot be written; its `filename` is `path`.
        ValueError: no file can have this name.
    """
    given = os.fspath(path)
    try:
        os.fsencode(given)
        if "\0" in given:
            raise ValueError("a name has no null byte")
    except ValueError as error:  # Also UnicodeEncodeError, for half of a surrogate pair.
        raise ValueError(f"cannot write {given!r}: {error}.\n  Give another name.") from None
    try:
        _replace(given, write)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, given) from None  # Names this file, not the temporary one.


def _replace(given: str, write: Callable[[Path], object]) -> None:
    file = Path(os.path.realpath(given))
    before = os.stat(file) if os.path.exists(file) else None
    is_stream = before is not None and not stat.S_ISREG(before.st_mode)
    if is_stream or _is_open(given) or not os.access(file.parent, os.W_OK):
        write(Path(given))
        return
    if before and not os.access(file, os.W_OK):  # A rename would ignore this protection.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    ending = file.suffix if len(file.suffix) <= _LONGEST_ENDING else ""
    beside = file.with_name(f".part-{secrets.token_hex(6)}{ending}")
    mode = stat.S_IMODE(before.st_mode) if before else 0o666
    try:
        os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        if before:
            with suppress(OSError):
                os.chmod(beside, mode)  # Without the umask.
        write(beside)
        try:
            beside.replace(file)
        except OSError as error:
            if error.errno not in _NOT_RENAMED:
                raise
            shutil.copyfile(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def _is_open(given: str) -> bool:
    """Return whether a name stands for an open file, such as /dev/stdout, or is a link to such a name.

    An open file may have other writers, which a rename would cut off.
    """
    links = 0
    while not os.path.abspath(given).startswith(("/dev/", "/proc/")):
        links += 1
        if not os.path.islink(given) or links > _MOST_LINKS:
            return False
        given = os.path.join(os.path.dirname(given), os.readlink(given))
    return True
