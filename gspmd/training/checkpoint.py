"""Checkpoints of state, data position and settings: saved atomically, restored onto any mesh and layout."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from gspmd.training.state import TrainState, abstract
from gspmd.training.toml import ConfigError

_FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of one run, under `<out>/checkpoints/<step>`.

    A save is written to a temporary folder and renamed when complete, so an interrupted one leaves earlier ones intact.
    As a context manager, it waits at the end for the save in progress.

    Args:
        out: the run's folder.
        keep: number of the newest checkpoints to keep.
    """

    def __init__(self, out: str | Path, *, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(Path(out).resolve() / _FOLDER, options=options)

    def save(self, state: TrainState, data: Mapping[str, Any]) -> None:
        """Save the state and the position of the data iterator, in the background."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        run = {"data": dict(data), "shapes": _shapes(state)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(_tree(state)), run=ocp.args.JsonSave(run))
        with _disk_faults():
            self._manager.save(step, args=items, force=True)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Restore the newest state, sharded as `like` is, and the position of the data iterator.

        Raises:
            ConfigError: there is none, it cannot be read, or it is of a model of other sizes.
        """
        step = self._manager.latest_step()
        if step is None:
            raise ConfigError("cannot resume:", [f"there is no checkpoint under {str(self._manager.directory)!r}."])
        run = self._read(step, run=ocp.args.JsonRestore())["run"]
        faults = _mismatches(run["shapes"], _shapes(like))
        if faults:
            raise ConfigError(f"cannot resume from step {step}: the checkpoint is of another model.", faults)
        target = ocp.args.StandardRestore(_tree(abstract(like)))
        return TrainState(**self._read(step, state=target)["state"]), run["data"]

    def _read(self, step: int, **items: Any) -> Mapping[str, Any]:
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
            missing = [name for name in items if restored[name] is None]
        except Exception as error:  # damaged files raise errors of many types
            missing = [str(error).splitlines()[0][:200] if str(error) else type(error).__name__]
        if not missing:
            return restored
        folder = self._manager.directory / str(step)
        before = [other for other in self._manager.all_steps() if other < step]
        remedy = f"go on from step {max(before)}" if before else "start anew"
        faults = [f"{str(folder)!r} is damaged: {missing[0]}.", f"Move that folder away to {remedy}."]
        raise ConfigError(f"cannot resume from step {step}: its checkpoint cannot be read.", faults)

    def wait(self) -> None:
        """Wait until all saves are complete. Raises OSError if one could not be written."""
        with _disk_faults():
            self._manager.wait_until_finished()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _disk_faults():
            self._manager.close()


@contextmanager
def _disk_faults() -> Iterator[None]:
    """Convert disk errors of the array writer to OSError."""
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if not code:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None


def newest(out: str | Path) -> int | None:
    """Return the step of the newest complete checkpoint of a run, or None, from folder names."""
    folder = Path(out) / _FOLDER
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    return max(steps, default=None)


def load_parameters(out: str | Path, like: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the parameters of a run's newest checkpoint, placed and cast as `like` is; of the rest nothing is read.

    Args:
        out: the run's folder, which is only read.
        like: path to array or `jax.ShapeDtypeStruct` with its sharding.

    Raises:
        ConfigError: there is no checkpoint, it cannot be read, or it is of a model of other sizes.
    """
    step, doing = newest(out), "cannot load the parameters:"
    if step is None:
        raise ConfigError(doing, [f"there is no checkpoint under {str(out)!r}."])
    folder = Path(out).resolve() / _FOLDER / str(step)
    try:
        run = json.loads((folder / "run" / "metadata").read_text(encoding="utf-8"))
        faults = _mismatches(run["shapes"], {path: list(leaf.shape) for path, leaf in like.items()})
        if not faults:
            wanted = {"params": abstract(like)}
            with ocp.PyTreeCheckpointer() as reader:
                arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
                options = ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True)
                return reader.restore(folder / "state", args=options)["params"]
    except Exception as error:  # damaged files raise errors of many types
        faults = [f"{str(folder)!r} is damaged: {str(error).splitlines()[0][:200] or type(error).__name__}."]
    raise ConfigError(doing, faults)


def save_settings(out: str | Path, settings: Mapping[str, Any]) -> None:
    """Write the run's settings to `<out>/config.json`, for a resume by folder."""
    path = Path(out) / "config.json"
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def load_settings(out: str | Path) -> dict[str, Any]:
    """Return the settings of a run.

    Raises:
        ConfigError: the folder holds no run.
    """
    path = Path(out) / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("cannot resume:", [f"{str(out)!r} holds no run: there is no {str(path)!r}."]) from None
    except (OSError, ValueError) as error:
        fault = f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}."
        raise ConfigError("cannot resume:", [fault, "Give the run's settings again with --config and flags."]) from None
    if not isinstance(settings, dict):
        raise ConfigError("cannot resume:", [f"{str(path)!r} holds no settings."])
    return settings


def _tree(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "optimizer": state.optimizer}


def _shapes(state: TrainState) -> dict[str, list[int]]:
    """Shape by path of every parameter."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): list(leaf.shape) for path, leaf in leaves}


def _mismatches(saved: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> list[str]:
    faults = [f"{name} is in the checkpoint, but not in the model." for name in saved if name not in wanted]
    faults += [f"{name} is in the model, but not in the checkpoint." for name in wanted if name not in saved]
    for name in saved:
        if saved[name] != wanted.get(name, saved[name]):
            faults.append(f"{name} is {tuple(saved[name])} in the checkpoint, but {tuple(wanted[name])} in the model.")
    return faults
