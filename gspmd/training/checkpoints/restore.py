"""Finding the newest intact checkpoint of a run, and reading it onto any mesh and layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from gspmd.reading import ReadError, read_json
from gspmd.training import processes
from gspmd.training.checkpoints import checksums
from gspmd.training.checkpoints.saved import ANEW, check_step, folder_of, saved_steps
from gspmd.training.state import TrainState, abstract
from gspmd.training.toml import ConfigError

# Largest number of optimizer arrays that a message names.
_SHOWN = 3


def newest_intact(out: str | Path, tell: Callable[[str], None], doing: str = "cannot resume:") -> int:
    """Return the step of the newest checkpoint whose files match their checksums.

    Args:
        out: the run's folder, which is only read.
        tell: a function that is called with a line of text about each newer checkpoint; the line names the damaged
            file.
        doing: the first words of the error message.

    Raises:
        ConfigError: there is no checkpoint, or none is intact.
    """
    faults: list[str] = []
    for step in reversed(saved_steps(out)):
        fault = _fault_of(folder_of(out, step))
        if fault is None:
            for each in faults:
                tell(f"{each}; the checkpoint of step {step} is used instead.")
            return step
        faults.append(f"{str(folder_of(out, step))!r} {fault}")
    if not faults:
        fault = f"there is no checkpoint under {str(folder_of(out))!r}. Name the folder of a run, or {ANEW}."
        raise ConfigError(doing, [fault])
    remedy = f"No checkpoint is intact: use another run, or {ANEW}."
    raise ConfigError(doing, [*(f"{fault}." for fault in faults), remedy])


def check_intact(out: str | Path, step: int) -> None:
    """Raise an error if a checkpoint is missing, or its files do not match their checksums.

    Raises:
        ConfigError: the step has no checkpoint, or a damaged one.
    """
    check_step(out, step)
    if fault := _fault_of(folder_of(out, step)):
        others = [str(other) for other in saved_steps(out) if other != step]
        remedy = f"Name another step: {', '.join(others)}." if others else f"{ANEW.capitalize()}."
        fault = f"{str(folder_of(out, step))!r} {fault}. {remedy}"
        raise ConfigError(f"cannot resume from step {step}:", [fault])


def read_state(out: str | Path, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Read a state, sharded like `like`, and the data that was saved with it, from an intact checkpoint.

    Raises:
        ConfigError: the checkpoint was saved by a model or an optimizer with other arrays.
    """
    doing, folder = f"cannot resume from step {step}", folder_of(out, step)
    run = _read_run(folder)
    if faults := _mismatches(run["shapes"], shapes_of(like.params)):
        remedy = f"Resume with the [model] of the run, or {ANEW}."
        raise ConfigError(f"{doing}: the checkpoint is from a different model.", [*faults, remedy])
    doing, optimizer = f"{doing}: its optimizer state has a different form.", shapes_of(like.optimizer)
    if faults := _mismatches(run.get("optimizer", optimizer), optimizer, "optimizer"):  # Older ones have no entry.
        more = [f"... and {len(faults) - _SHOWN} more."] if len(faults) > _SHOWN else []
        remedy = f"Resume with the [optimizer], lora, frozen and parameter_dtype of the run, or {ANEW}."
        raise ConfigError(doing, [*faults[:_SHOWN], *more, remedy])
    try:
        with ocp.StandardCheckpointer() as reader:
            state = TrainState(**reader.restore(folder / "state", tree_of(abstract(like))))
    except (ValueError, KeyError, TypeError) as error:  # This is not damage, since the files match their checksums.
        remedy = f"Resume with the versions of jax and orbax that wrote it, from another step, or {ANEW}."
        raise ConfigError(doing, [_first_line(error), remedy]) from None
    if int(state.step) != step:  # Older checkpoints have their step only here.
        raise ConfigError(f"cannot resume from step {step}:", [f"{str(folder)!r} {_misnamed(int(state.step))}."])
    return state, run["data"]


def read_data(out: str | Path, step: int) -> dict[str, Any]:
    """Read the data that was saved with a state, from an intact checkpoint."""
    return _read_run(folder_of(out, step))["data"]


def load_parameters(out: str | Path, step: int, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the parameters of a checkpoint with the shardings and dtypes of `like`, without the optimizer's state.

    Args:
        out: the run's folder, which is only read.
        step: the step of an intact checkpoint, for example from `newest_intact`.
        like: a mapping from the path of each parameter to an array, or to a `jax.ShapeDtypeStruct` with a sharding.

    Raises:
        ConfigError: the checkpoint cannot be read, or is from a model of different sizes.
    """
    folder = folder_of(out, step)
    try:
        faults = _mismatches(_read_run(folder)["shapes"], {path: list(leaf.shape) for path, leaf in like.items()})
        if not faults:
            wanted = {"params": abstract(like)}
            with ocp.PyTreeCheckpointer() as reader:
                arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
                options = ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True)
                return reader.restore(folder / "state", args=options)["params"]
        remedy = "Load them into the model of the run."
    except Exception as error:  # Damaged files raise errors of many types.
        faults, remedy = [f"{str(folder)!r} is damaged: {_first_line(error)}."], "Use another step of the run."
    raise ConfigError("cannot load the parameters:", [*faults, remedy])


def tree_of(state: TrainState) -> dict[str, Any]:
    """Return the parts of a state by name, in the form in which they are saved."""
    return {field.name: getattr(state, field.name) for field in fields(state)}


def shapes_of(tree: Any) -> dict[str, list[int]]:
    """Return the shape of every array by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): list(leaf.shape) for path, leaf in leaves}


def _fault_of(folder: Path) -> str | None:
    """Return the fault of a checkpoint, or None if it has none.

    Each process reads a share of the files, and all processes return the same answer.
    """
    own = checksums.fault_of(folder, processes.index(), processes.count())
    # The answers are not exchanged over devices: one process may finish long before another, and Gloo does not wait.
    damages = processes.gathered(own or "")

    def fault() -> str:
        damage = next(filter(None, damages), "")
        # The step is read once all files are known to be intact: its file may be in another process's share.
        return f"is damaged: {damage}" if damage else _fault_of_name(folder) or ""

    return processes.told(fault) or None


def _fault_of_name(folder: Path) -> str | None:
    """Return a fault if the folder of an intact checkpoint is not named after its step, and None otherwise."""
    step = _read_run(folder).get("step")
    return None if step is None or step == int(folder.name) else _misnamed(step)


def _misnamed(step: int) -> str:
    return f"is the checkpoint of step {step}, but its name is not {step}: rename the folder"


def _read_run(folder: Path) -> dict[str, Any]:
    """Return the data that was saved with the state; raise ConfigError if no training run wrote it."""
    try:
        run = read_json(folder / "run" / "metadata")
    except ReadError as error:
        fault = f"{error}"
    else:
        if isinstance(run, dict) and all(isinstance(run.get(name), dict) for name in ("shapes", "data")):
            return run
        fault = "it does not have the shapes and data that a run saves"
    remedy = "Use another step, or the folder of another run."
    raise ConfigError("cannot read the checkpoint:", [f"{str(folder / 'run' / 'metadata')!r}: {fault}. {remedy}"])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _mismatches(
    saved: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], of: str = "model"
) -> list[str]:
    faults = [f"{name} is in the checkpoint, but not in the {of}." for name in saved if name not in wanted]
    faults += [f"{name} is in the {of}, but not in the checkpoint." for name in wanted if name not in saved]
    for name in saved:
        if saved[name] != wanted.get(name, saved[name]):
            faults.append(f"{name} is {tuple(saved[name])} in the checkpoint, but {tuple(wanted[name])} in the {of}.")
    return faults
