"""Separation of the output of native libraries from the run's output, and messages when a library aborts.

Gloo writes a line for every connection, and JAX aborts with a stack trace in C++ when the first process is lost.
"""

import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import IO

# Number of last bytes of the libraries' output that are shown after an abort.
_SHOWN = 4000
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[object] = []
"""The handler of SIGABRT, kept alive because C holds a pointer to it."""


def keep_apart(aborted: Callable[[str], None]) -> None:
    """Redirect the output of native libraries to a temporary file; if a library aborts, end with a message.

    Args:
        aborted: a function that is called after an abort with the last output of the libraries; the process ends when
            it returns.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        stream.flush()
        kept = open(os.dup(descriptor), "w", encoding=stream.encoding, errors=stream.errors, buffering=1)  # noqa: SIM115
        setattr(sys, name, kept)
        os.dup2(log.fileno(), descriptor)
    _on_abort(log, aborted)


def _on_abort(log: IO[bytes], aborted: Callable[[str], None]) -> None:
    """Handle SIGABRT in the thread that aborts.

    Python's own handlers run in the main thread, which may be blocked.
    """

    @_HANDLER
    def handle(_: int) -> None:
        size = os.fstat(log.fileno()).st_size
        last = os.pread(log.fileno(), _SHOWN, max(0, size - _SHOWN)).decode(errors="replace")
        try:
            aborted(f"A library ended the process. It said:\n{last}")
        finally:
            os._exit(1)

    _kept.append(handle)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, _HANDLER), ctypes.c_void_p
    libc.signal(signal.SIGABRT, handle)
