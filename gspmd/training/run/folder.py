"""The folder of a run: the one that is named, the newest, or a new one."""

import re
import tempfile
from pathlib import Path

from gspmd.training.checkpoints import check_step, newest
from gspmd.training.toml import ConfigError

RUNS = Path("runs")


def choose_out(out: str, *, resume: bool, step: int | None = None) -> Path:
    """Return the run's folder, created if needed, and checked to be writable.

    Args:
        out: the folder; "" for the newest run on a resume, and for a new folder under runs/ otherwise.
        resume: whether the folder must hold a run, or must not.
        step: of the checkpoint that it must hold; None for any.

    Raises:
        ConfigError: it cannot be written, or holds a run that would be overwritten.
    """
    path = Path(out) if out else newest_run() if resume else _fresh()
    at = newest(path)
    if resume and at is None:
        raise ConfigError("cannot resume:", [f"there is no checkpoint under {str(path)!r}."])
    if step is not None:
        check_step(path, step)
    if at is not None and not resume:
        fault = f"it already holds a run, at step {at}."
        raise ConfigError(f"cannot write to {str(path)!r}:", [fault, "Add --resume to go on, or choose another --out."])
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {str(path)!r}:", [f"{error.strerror}. Choose another --out."]) from None
    return path


def newest_run() -> Path:
    """Return the run under runs/ that was started last.

    Raises:
        ConfigError: there is none.
    """
    runs = [path for path in _numbered() if newest(path) is not None]
    if not runs:
        raise ConfigError("cannot resume:", [f"there is no run under {str(RUNS)!r}. Name its folder with --out."])
    return runs[-1]


def _fresh() -> Path:
    return RUNS / f"{1 + max((int(path.name) for path in _numbered()), default=0):03d}"


def _numbered() -> list[Path]:
    paths = [path for path in RUNS.iterdir() if re.fullmatch(r"\d+", path.name)] if RUNS.is_dir() else []
    return sorted(paths, key=lambda path: int(path.name))
