"""Writes that survive the end of the process, and a loss of power."""

import os
from pathlib import Path


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file so that it has its old or its complete new contents, whenever the process or the machine ends.

    The text is written to another file, which is renamed once it is on disk. Otherwise the new name may reach the disk
    before the contents, and leave an empty file.
    """
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_bytes(text.encode() if isinstance(text, str) else text)
    sync(beside)
    beside.replace(path)


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk and survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
