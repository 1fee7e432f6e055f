"""Checksums of a checkpoint's files: written last, and compared with what is on disk before anything is read.

The first line of the file `checksums` is the SHA-256 of all other lines. Each other line describes one of the
checkpoint's other files, as `SHA256 BYTES PATH`. So a flipped byte in any file, including `checksums` itself, is
noticed. Orbax writes no such checksums, and TensorStore's format has CRCs for its indices, but not for the arrays.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gspmd.training.disk import sync, write_whole

#: The file with the checksums.
FILE = "checksums"
_THREADS = 8


def write(folder: Path) -> None:
    """Write the file `checksums` of a folder, once all other files are on disk.

    The file has the size and the checksum of every other file.
    """
    own = {folder / FILE, folder / f"{FILE}.tmp"}  # A write that was killed may have left the temporary file.
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in own)
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = threads.map(_synced_checksum, paths)
        lines = [f"{found} {path.relative_to(folder)}\n" for path, found in zip(paths, sums, strict=True)]
    text = "".join(lines).encode()
    write_whole(folder / FILE, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    for below in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(below)


def fault_of(folder: Path, process: int = 0, processes: int = 1) -> str | None:
    """Describe the first file of a checkpoint that differs from what was saved; return None if no file differs.

    Args:
        folder: the checkpoint.
        process: the index of this process. Each process reads only its share of the files.
        processes: number of processes.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "weights").write_bytes(bytes(100))
        >>> write(folder)
        >>> fault_of(folder) is None
        True
        >>> _ = (folder / "weights").write_bytes(bytes(40))
        >>> fault_of(folder)
        'weights has 40 of its 100 bytes'
    """
    try:
        first, _, text = (folder / FILE).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return f"its file {FILE} is missing"
    except OSError as error:
        return f"its file {FILE} cannot be read: {error.strerror}"
    if hashlib.sha256(text).hexdigest().encode() != first:
        return f"its file {FILE} is damaged"
    rows = [line.split(" ", 2) for line in text.decode().splitlines()]
    # Sizes first: they need no reading.
    for _, size, path in rows:
        if not (folder / path).is_file():
            gone = [part for part in (*reversed(Path(path).parents), Path(path)) if not (folder / part).exists()]
            return f"the folder {gone[0]} is missing" if gone and str(gone[0]) != path else f"{path} is missing"
        if (found := (folder / path).stat().st_size) != int(size):
            return f"{path} has {found:,} of its {int(size):,} bytes"
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            share = rows[process::processes]
            sums = threads.map(lambda row: checksum(folder / row[2]), share)
            changed = [row[2] for row, found in zip(share, sums, strict=True) if found != f"{row[0]} {row[1]}"]
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return f"{changed[0]} differs from the bytes that were saved" if changed else None


def checksum(path: Path) -> str:
    """Return the SHA-256 and the size of a file in bytes, as the text `SHA256 BYTES`."""
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()} {file.tell()}"


def _synced_checksum(path: Path) -> str:
    sync(path)
    return checksum(path)
