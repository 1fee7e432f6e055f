"""Writing what outlasts a loss of power."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk, where they outlast a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
