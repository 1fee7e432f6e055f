"""Writes that survive a crash of the process and a loss of power."""

import os
from pathlib import Path


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file atomically: if the process or the machine stops, the file has either its old or its new contents.

    The text is written to a temporary file, which is renamed only when its contents are on disk. If the temporary file
    were renamed earlier, the new name might reach the disk before the contents, and an empty file might be left.
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
