"""Writing what outlasts a process that is killed, and a loss of power."""

import os
from pathlib import Path


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file that is there as it was before, or with all of the text, whenever the process or the machine ends.

    The text goes into a file beside it, which takes its name once it is on disk: a system may have the new name on disk
    before the contents, and leave an empty file.
    """
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_bytes(text.encode() if isinstance(text, str) else text)
    sync(beside)
    beside.replace(path)


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk, where they outlast a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
