"""The folder of a run: a given, the newest or a new folder, locked so that only one run uses the folder at a time."""

import errno
import fcntl
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gspmd.reading import new_folder_fault
from gspmd.training.checkpoints import check_step, has_settings, newest
from gspmd.training.toml import ConfigError

RUNS = Path("runs")
# Conditions under which a run can continue, by the error number of a write that the operating system refused.
_CONDITIONS = {
    errno.ENOSPC: "once there is room",
    errno.EDQUOT: "once there is room",
    errno.EFBIG: "once files may be larger",
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY), "once that is moved away"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "once it may be written"),
    errno.ENOENT: "",  # A missing folder is created again.
}
# Files that a run replaces, and those that it writes anew. layout.toml is not among them, since --layout may name it.
_REPLACED = ("config.json", "metrics.jsonl", "loss.png", "experts.png", "sample.txt")
_WRITTEN = (*_REPLACED, "events")
_held: dict[Path, int] = {}
"""The folders that this process has locked, each with the file descriptor that holds the lock."""


class Unwritable(Exception):
    """Raised if the run's folder, or another file of the run, can no longer be written or used.

    Attributes:
        step: the step of the newest checkpoint, or None if there is none.
        out: the run's folder.
        once: the condition under which the run can continue, such as "once there is room"; empty if there is no such
            condition.
    """

    def __init__(self, error: OSError, step: int | None, out: Path):
        self.step, self.out = step, out
        named = error.filename2 or error.filename  # for a rename, the existing target
        file, reason = Path(named) if isinstance(named, str) else out, error.strerror or str(error)
        if file.resolve().is_relative_to(out.resolve()):
            self.once = _CONDITIONS.get(error.errno or 0, "once it can be written")
            within = "" if file == out else f"{file.resolve().relative_to(out.resolve())}: "
            fault = f"cannot write to {str(out)!r}: {within}{reason}"
        else:
            self.once, fault = "once it can be used", f"cannot use {named!r}: {reason}"
        saved = "no step is saved" if step is None else f"step {step} is saved"
        super().__init__(f"{fault}; {saved}.")


def choose_out(
    out: str, *, resume: bool, step: int | None = None, tell: Callable[[str], object] = lambda kept: None
) -> Path:
    """Return the run's folder, created if needed, checked to be writable, and locked against other runs.

    A run that ended before it saved a step cannot be resumed. It is begun again in the same folder, since a scheduler
    starts the same command again. Files that it left are moved to a folder earlier-1, earlier-2 and so on.

    Args:
        out: the folder; "" for the newest run if a run is resumed, and otherwise for a new folder under runs/.
        resume: whether a run is resumed. If true, the folder must hold a run with a checkpoint; if false, it must not.
        step: the step of the checkpoint that the folder must hold; None for any step.
        tell: a function that is called with a line of text if files of an earlier run are moved.

    Raises:
        ConfigError: the folder cannot be written, another run writes there, or a run or other files in the folder would
            be overwritten; or there is no checkpoint to resume from.
    """
    path = _named(out, resume)
    _check(path, resume, step)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {str(path)!r}:", [f"{error.strerror}. Choose another --out."]) from None
    _hold(path)
    try:
        _check(path, resume, step)  # Again, since another run may have saved a step before the folder was locked.
        if not resume:
            _set_aside(path, tell)
    except OSError as error:
        with released_after(path):
            raise ConfigError(
                f"cannot move the files of an earlier run in {str(path)!r}:",
                [f"{error.strerror}. Choose another --out."],
            ) from None
    except ConfigError:
        with released_after(path):
            raise
    return path


def check_out(out: str, *, resume: bool, step: int | None = None, reads: Iterable[Path] = ()) -> None:
    """Raise the errors of `choose_out` about a folder, without creating or locking it.

    Args:
        out, resume, step: see `choose_out`.
        reads: the files that the run reads; the run must not move or replace them.

    Raises:
        ConfigError: the folder cannot be created or written, or a run or other files in the folder would be
            overwritten; there is no checkpoint to resume from; or the run would move or replace a file that it reads.
    """
    path = _named(out, resume)
    _check(path, resume, step)
    if fault := new_folder_fault(path):
        raise ConfigError(f"cannot write to {str(path)!r}:", [f"{fault}. Choose another --out."])
    written = [os.path.realpath(path / name) for name in _there(path, _WRITTEN)]
    for file in reads if written else ():
        real = os.path.realpath(file)
        if any(real == each or real.startswith(f"{each}{os.sep}") for each in written):
            remedy = "Give --data without it." if resume else "Choose another --out."
            lost = "replace it" if resume else "replace it or move it away"
            fault = f"the run would read {str(file)!r}, and {lost}. {remedy}"
            raise ConfigError(f"cannot write to {str(path)!r}:", [fault])


def _named(out: str, resume: bool) -> Path:
    return Path(out) if out else newest_run() if resume else _fresh()


def _check(path: Path, resume: bool, step: int | None) -> None:
    """Raise an error if a resumed run has no checkpoint in a folder, or a new run would overwrite files there."""
    at = newest(path)
    if resume and at is None:
        fault = f"there is no checkpoint under {str(path)!r}."
        raise ConfigError("cannot resume:", [f"{fault} Name the folder of a run with --out, or leave --resume out."])
    if step is not None:
        check_step(path, step)
    if at is not None and not resume:
        fault = f"it already holds a run, at step {at}."
        raise ConfigError(f"cannot write to {str(path)!r}:", [fault, "Add --resume to go on, or choose another --out."])
    if not resume and not _is_of_run(path) and (there := _there(path, _REPLACED)):
        those, them = ("is not that", "it") if len(there) == 1 else ("are not those", "them")
        fault = f"its {', '.join(there)} {those} of a run, which would replace {them}. Choose another --out."
        raise ConfigError(f"cannot write to {str(path)!r}:", [fault])


def _is_of_run(path: Path) -> bool:
    """Return whether a folder belongs to a run, with or without a checkpoint."""
    if os.path.lexists(path / "config.json"):
        return has_settings(path)
    return os.path.lexists(path / "metrics.jsonl")


def _there(path: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if os.path.lexists(path / name)]


def _set_aside(path: Path, tell: Callable[[str], object]) -> None:
    """Move the files of an earlier run without a checkpoint to a new folder inside the run's folder."""
    if not _is_of_run(path):
        return
    there = _there(path, _WRITTEN)
    number = next(number for number in itertools.count(1) if not os.path.lexists(path / f"earlier-{number}"))
    earlier = path / f"earlier-{number}"
    earlier.mkdir()
    for name in there:
        (path / name).rename(earlier / name)
    tell(f"{str(path)!r} holds a run without a checkpoint; moved to {str(earlier)!r}: {', '.join(there)}.")


def _hold(path: Path) -> None:
    """Lock the folder itself, which leaves no file behind; the lock ends when the process ends.

    Some file systems, among them some shared ones, cannot lock folders. On these a second run is not detected.
    """
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError:  # The folder may be writable but not readable.
        return
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        remedy = "Wait for its end, or choose another --out."
        raise ConfigError(f"cannot write to {str(path)!r}:", ["another run writes there now.", remedy]) from None
    except OSError:
        os.close(folder)
        return
    _held[path.resolve()] = folder


@contextmanager
def released_after(path: Path) -> Iterator[None]:
    """Release the lock of `choose_out` on a folder at the end of a `with` block."""
    try:
        yield
    finally:
        if (folder := _held.pop(path.resolve(), None)) is not None:
            os.close(folder)


def newest_run() -> Path:
    """Return the folder of the run under runs/ that was started last.

    Raises:
        ConfigError: there is no run under runs/.
    """
    runs = [path for path in _numbered() if newest(path) is not None]
    if not runs:
        raise ConfigError("cannot resume:", [f"there is no run under {str(RUNS)!r}. Name its folder with --out."])
    return runs[-1]


def _fresh() -> Path:
    return RUNS / f"{1 + max((int(path.name) for path in _numbered()), default=0):03d}"


def _numbered() -> list[Path]:
    paths = [path for path in RUNS.iterdir() if re.fullmatch(r"[0-9]+", path.name)] if RUNS.is_dir() else []
    return sorted(paths, key=lambda path: int(path.name))
