"""Write files so that the old contents stay if writing fails, for example because the disk is full."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# A file whose renaming fails with one of these errors may still be writable: a mounted file, or another user's file in
# a sticky folder (/tmp).
_NOT_RENAMED = {errno.EBUSY, errno.EPERM, errno.EACCES, errno.EXDEV}
_LONGEST_ENDING = 20
"""A suffix with more characters is left out of the temporary file's name, which could otherwise become too long."""
_OPEN_FILES = ("/dev/fd/", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/proc/")
_MOST_LINKS = 40
"""The maximum number of links that Linux follows; a longer chain of links counts as a circle."""


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Write a file completely; if writing fails, the old contents stay, and no new file appears.

    The contents are written to a temporary file in the same folder, with the same suffix, mode and group. This file is
    renamed at the end. Some files are written directly: pipes, devices, open files such as /dev/stdout, and files in a
    read-only folder. After a failure, they contain what was written until then. Files of another user, and files with a
    second name (a hard link), are also written directly, because a rename would change their owner or their links.

    Args:
        path: the file; if it is a symbolic link, its target is replaced.
        write: a function that takes a path and writes the file there.

    Raises:
        OSError: the file cannot be written; the `filename` of the error is `path`.
        ValueError: no file can have this name.
    """
    given = os.fspath(path)
    try:
        os.fsencode(given)
        if "\0" in given:
            raise ValueError("a name has no null byte")
    except ValueError as error:  # This includes UnicodeEncodeError, for half of a surrogate pair.
        raise ValueError(f"cannot write {given!r}: {error}.\n  Give another name.") from None
    file = Path(os.path.realpath(given))
    ending = file.suffix if len(file.suffix) <= _LONGEST_ENDING else ""
    beside = file.with_name(f".part-{secrets.token_hex(6)}{ending}")
    try:
        _replace(given, file, beside, write)
    except OSError as error:
        if error.errno is None or error.filename not in (None, given, str(file), str(beside)):
            raise
        raise OSError(error.errno, error.strerror, given) from None  # Names this file, not the temporary one.


def _replace(given: str, file: Path, beside: Path, write: Callable[[Path], object]) -> None:
    before = os.stat(file) if os.path.exists(file) else None
    if before is not None and (not stat.S_ISREG(before.st_mode) or _is_open(given)):
        write(Path(given))
        return
    if before and not os.access(file, os.W_OK):  # A rename would ignore this protection.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    would_change = before is not None and (before.st_nlink > 1 or before.st_uid != os.geteuid())
    if would_change or not os.access(file.parent, os.W_OK):
        write(file)
        return
    try:
        if before:
            os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            with suppress(OSError):
                os.chown(beside, -1, before.st_gid)
            os.chmod(beside, stat.S_IMODE(before.st_mode))
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
    while not os.path.abspath(given).startswith(_OPEN_FILES):
        links += 1
        if not os.path.islink(given) or links > _MOST_LINKS:
            return False
        given = os.path.join(os.path.dirname(given), os.readlink(given))
    return True
