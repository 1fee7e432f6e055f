"""The checkpointed steps of a run, from the names of folders, without reading files or importing JAX."""

import os
import re
import threading
from pathlib import Path

from gspmd.training.toml import ConfigError

#: The remedy for a run that cannot be resumed; without --resume, its own folder is refused.
ANEW = "start anew, with the command that began the run and another --out"
_FOLDER = "checkpoints"

renaming = threading.Lock()
"""Held while a save that is complete gets its name and older checkpoints are removed."""
closed: set[Path] = set()
"""The folders of checkpoints that this process no longer changes; read and changed under the lock."""


def folder_of(out: str | Path, step: int | None = None) -> Path:
    """Return the folder of all checkpoints of a run or, given a step, of the checkpoint of this step."""
    # Like Path.resolve, which has an error of its own for circular links.
    folder = Path(os.path.realpath(out)) / _FOLDER
    return folder if step is None else folder / str(step)


def saved_steps(out: str | Path) -> list[int]:
    """Return the steps with a checkpoint, ascending, from the names of folders; damaged ones are included."""
    folder = folder_of(out)
    if not os.path.isdir(folder):  # Raises no error for a name that no file can have.
        return []
    # Only names in the form that a run writes: `int` also reads 007 and digits of other scripts, and str.isdigit
    # accepts ².
    return sorted(int(path.name) for path in folder.iterdir() if re.fullmatch(r"0|[1-9][0-9]*", path.name))


def newest(out: str | Path) -> int | None:
    """Return the step of a run's newest checkpoint from the names of folders, or None."""
    return max(saved_steps(out), default=None)


def last_step(out: str | Path) -> int | None:
    """Return the step of a run's newest checkpoint for the last message of a process, or None.

    A save in the background that is not yet complete stays so: it would remove the checkpoint that the message names,
    if only one is kept.
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
