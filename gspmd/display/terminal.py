"""Terminals that are closed while a program runs, so that every later write to such a terminal fails with EIO."""

import os
import stat
from contextlib import suppress

OUT, ERR = 1, 2


def hung_up(descriptor: int) -> bool:
    """Return whether a file descriptor is a terminal that has been closed; False unless it is a character device.

    >>> with open(os.devnull) as nothing, open(__file__) as file:
    ...     hung_up(nothing.fileno()), hung_up(file.fileno())
    (False, False)
    """
    with suppress(OSError):
        found = os.fstat(descriptor)
        nothing = found.st_rdev == os.stat(os.devnull).st_rdev
        return stat.S_ISCHR(found.st_mode) and not nothing and not os.isatty(descriptor)
    return False


def leave() -> None:
    """Redirect standard output and standard error to the null device if they are a closed terminal."""
    for descriptor in (OUT, ERR):
        if hung_up(descriptor):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, descriptor)
            os.close(nothing)
