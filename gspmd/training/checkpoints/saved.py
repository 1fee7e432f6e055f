"""The checkpointed steps of a run, found by the names of folders, without reading files or importing JAX."""

import os
import re
import threading
from pathlib import Path

from gspmd.training.toml import ConfigError

#: The remedy for a run that cannot be resumed; without --resume, its own folder is refused.
ANEW = "start anew, with the command that began the run and another --out"
_FOLDER = "checkpoints"

renaming = threading.Lock()
"""A lock that is held while a complete save gets its final name and older checkpoints are removed."""
closed: set[Path] = set()
"""The folders of checkpoints that this process no longer changes.

A folder is added or looked up only while `renaming` is held.
"""


def folder_of(out: str | Path, step: int | None = None) -> Path:
    """Return the folder with all checkpoints of a run or, if a step is given, the folder of that step's checkpoint."""
    # Like Path.resolve, which has an error of its own for circular links.
    folder = Path(os.path.realpath(out)) / _FOLDER
    return folder if step is None else folder / str(step)


def saved_steps(out: str | Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending; damaged checkpoints count too, as only names are read."""
    folder = folder_of(out)
    if not os.path.isdir(folder):  # Raises no error for a name that no file can have.
        return []
    # Only names in the form that a run writes: `int` also reads 007 and digits of other scripts, and str.isdigit
    # accepts ².
    return sorted(int(path.name) for path in folder.iterdir() if re.fullmatch(r"0|[1-9][0-9]*", path.name))


def newest(out: str | Path) -> int | None:
    """Return the step of a run's newest checkpoint, or None if no folder has the name of a checkpoint."""
    return max(saved_steps(out), default=None)


def last_step(out: str | Path) -> int | None:
    """Return the step of a run's newest checkpoint, or None if there is none.

    The step is for the last message of a process. After this call, a save that is still running in the background will
    not be completed. If only one checkpoint is kept, completing the save would remove the checkpoint that the message
    names.
    """
    with renaming:
        closed.add(folder_of(out))
        return newest(out)


def check_step(out: str | Path, step: int) -> None:
    """Raise an error if a step has no checkpoint.

    Raises:
        ConfigError: the step has no checkpoint; the message lists the steps that have one.
    """
    if step not in (steps := saved_steps(out)):
        fault = f"there is no checkpoint of this step under {str(folder_of(out))!r}."
        remedy = f"Name a step that has one: {', '.join(map(str, steps))}." if steps else f"No step has one: {ANEW}."
        raise ConfigError(f"cannot resume from step {step}:", [f"{fault} {remedy}"])
