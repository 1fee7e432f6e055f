"""The checkpoints of a run: saved in the background, each complete or absent; only the newest are kept."""

import errno
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from gspmd.display.units import amount_of_bytes, duration
from gspmd.training.checkpoints import checksums, restore, saved
from gspmd.training.disk import sync
from gspmd.training.state import TrainState

# Endings of folders that are not checkpoints: half written, half removed, or newer than the step from which a run
# resumed.
_PARTIAL, _ASIDE = ".partial", ".aside"

# Orbax's messages, without the system's error number, for files that it has written and does not find again.
_MISSING = ("does not exist", "No ArrayMetadata found")

# Python's message for an array that orbax has not begun to write.
_NOT_BEGUN = r"coroutine 'async_serialize_from_host\..*' was never awaited"


class Checkpoints:
    """The checkpoints of one run, under `<out>/checkpoints/<step>`.

    A save is written to a temporary folder, given checksums, and then renamed. So if the process is killed during a
    save, earlier checkpoints are unchanged, and nothing is left that could be mistaken for a checkpoint. The object is
    a context manager: at the end of its `with` block it waits for the save in progress.

    Args:
        out: the run's folder.
        keep: number of checkpoints to keep, the newest ones.
        tell: a function that is called with a line of text about every complete save. `check`, `wait` or the next
            `save` calls this function.
    """

    def __init__(self, out: str | Path, *, keep: int = 2, tell: Callable[[str], None] = lambda saved: None):
        self._out, self._keep, self._tell = Path(out), keep, tell
        self._folder = saved.folder_of(out)
        self._folder.mkdir(parents=True, exist_ok=True)
        saved.closed.discard(self._folder)
        # While it is open, no new folder can have its number (its inode), by which `_check_there` knows it.
        self._opened = os.open(self._folder, os.O_RDONLY)
        self._primary = jax.process_index() == 0
        if self._primary:
            self._clear(f"*{_PARTIAL}*")
        _silence_unfinished_writes()
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._saving: Future | None = None
        self._checked: int | None = None  # The step whose files have been compared with their checksums.
        # These are not read from disk again: processes other than the first could look before or after the last save
        # ends.
        self._steps = set(saved.saved_steps(out))

    def save(self, state: TrainState, data: Mapping[str, Any]) -> None:
        """Save the state and the position of the data iterator in the background; first wait for the previous save.

        Args:
            state: the state after a step, whose number names the checkpoint.
            data: the position of the data iterator, and everything else that a resumed run needs, as JSON values.

        Raises:
            OSError: this or the previous save could not be written.
        """
        step, began = int(state.step), time.monotonic()
        self.wait()
        self._check_there()
        if step in self._steps:
            return
        items = {"state": ocp.args.StandardSave(restore.tree_of(state))}
        shapes = {"shapes": restore.shapes_of(state.params), "optimizer": restore.shapes_of(state.optimizer)}
        # The step is saved too: otherwise a renamed folder would be taken for another checkpoint.
        items["run"] = ocp.args.JsonSave({"step": step, "data": dict(data)} | shapes)
        with self._writing(step):
            folder = self._folder / f"{step}{_PARTIAL}"
            self._writer.save(folder, args=ocp.args.Composite(**items), force=True)
        self._steps.add(step)
        self._saving = self._thread.submit(self._complete, step, folder, began)

    def check(self) -> None:
        """Raise OSError if a save has failed or the folder is gone, without waiting for a save in progress."""
        self._check_there()
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is complete, or raise OSError if it could not be written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._tell(saving.result())

    def restore(
        self, like: TrainState, step: int | None = None, tell: Callable[[str], None] = print
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restore a state, sharded like `like`, and the data that was saved with it.

        Args:
            like: a state of the same model on any mesh, as arrays or as shapes with shardings.
            step: the step of the checkpoint, or None for the newest intact one.
            tell: a function that is called with a line of text about every newer checkpoint that is damaged.

        Raises:
            ConfigError: there is no checkpoint, it cannot be read, or it is from a model of different sizes.
            OSError: the save in progress could not be written.
        """
        return restore.read_state(self._out, self.intact(step, tell), like)

    def intact(self, step: int | None = None, tell: Callable[[str], None] = print) -> int:
        """Return the step of the checkpoint that `restore` would read; see `restore` for arguments and errors."""
        self.wait()
        if step is None:
            step = restore.newest_intact(self._out, tell)
        elif step != self._checked:
            restore.check_intact(self._out, step)
        self._checked = step
        return step

    def data(self, step: int) -> dict[str, Any]:
        """Return the data that was saved with the state of a step; `intact` must have returned this step."""
        return restore.read_data(self._out, step)

    def continue_from(self, step: int) -> None:
        """Rename the checkpoints newer than a step to `<step>.aside`; the next save removes them."""
        newer = {other for other in self._steps if other > step}
        self._steps -= newer
        for other in newer if self._primary else ():
            self._clear(f"{other}{_ASIDE}")
            (self._folder / str(other)).rename(self._folder / f"{other}{_ASIDE}")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.wait()
        except OSError:
            if error is None:  # Otherwise the earlier error says why.
                raise
        finally:
            self._thread.shutdown()
            os.close(self._opened)
            self._writer.close()

    def _complete(self, step: int, folder: Path, began: float) -> str:
        with self._writing(step):
            self._writer.wait_until_finished()
            said = f"step {step}: checkpoint saved in {duration(time.monotonic() - began)}"
            if not self._primary:
                return said
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            # The contents come first, then the checksums, then the name: whenever this process is killed, a folder
            # named by a step is complete. Older checkpoints are removed last, once the new one would survive a loss of
            # power.
            checksums.write(folder)
            with saved.renaming:
                if self._folder in saved.closed:
                    return f"step {step}: the run ended before the checkpoint was saved"
                folder.rename(self._folder / str(step))
                sync(self._folder)
                for old in saved.saved_steps(self._out)[: -self._keep]:
                    # It is renamed first: a removal that is killed leaves no checkpoint with files missing.
                    (self._folder / str(old)).rename(self._folder / f"{old}{_PARTIAL}")
            self._clear(f"*{_PARTIAL}*", f"*{_ASIDE}")
            return f"{said}, {amount_of_bytes(size)}"

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """If a save inside the `with` block fails, remove its files and raise an error with the system's reason."""
        try:
            yield
        except Exception as error:
            self._check_there()  # Orbax raises errors of many types for a failed write.
            if not isinstance(error, OSError | ValueError):
                raise
            # The array writer has error codes in its messages.
            written = re.search(r"os_error_code='(\d+)'", str(error))
            code = int(written[1]) if written else getattr(error, "errno", None)
            self._clear(f"{step}{_PARTIAL}*")
            if code == errno.ENOENT or (code is None and any(words in str(error) for words in _MISSING)):
                raise OSError(errno.ENOENT, f"its files were deleted while saving step {step}") from None
            reason = str(error).partition("\n")[0][:200] if code is None else os.strerror(code)
            raise OSError(code or errno.EIO, f"{reason} while saving step {step}") from None

    def _check_there(self) -> None:
        """Raise OSError if the folder was deleted or replaced; orbax would silently create a new one.

        The run's metrics files are in the same folder, and data written to a deleted file is lost without an error.
        """
        if not _is(self._folder, self._opened):
            reason = f"its folder {self._folder.name} was deleted or replaced while the run went on"
            raise OSError(errno.ENOENT, reason)

    def _clear(self, *patterns: str) -> None:
        for path in (path for pattern in patterns for path in self._folder.glob(pattern)):
            shutil.rmtree(path, ignore_errors=True)


def _is(folder: Path, opened: int) -> bool:
    """Return whether a folder is still the one that was opened, neither deleted nor replaced."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(opened))
    except OSError:
        return False


def _silence_unfinished_writes() -> None:
    """Hide the errors about arrays that were not yet written when the write of another array failed.

    Orbax closes its event loop when the write fails. The array writer then reports to the closed loop, in a thread
    where nothing can catch the error. Python also warns about the writes that have not begun, because they are
    coroutines that were never awaited.
    """
    warnings.filterwarnings("ignore", message=_NOT_BEGUN, category=RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _show_unless_unfinished:
        sys.unraisablehook = partial(_show_unless_unfinished, sys.unraisablehook)


def _show_unless_unfinished(show: Callable[[Any], None], raised: Any) -> None:
    error, said = raised.exc_value, str(raised.exc_value)
    closed = isinstance(error, RuntimeError) and said == "Event loop is closed"
    # A warning comes here if warnings are errors.
    if not closed and not (isinstance(error, RuntimeWarning) and re.match(_NOT_BEGUN, said)):
        show(raised)
