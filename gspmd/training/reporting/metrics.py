"""Metrics of a run: one JSON object per step, TensorBoard events and, on request, Weights & Biases."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gspmd.reading import ReadError, parse_json
from gspmd.training.disk import write_whole
from gspmd.training.reporting.weights_and_biases import WeightsAndBiases, check_installed
from gspmd.training.toml import ConfigError

_FILE = "metrics.jsonl"


class Metrics:
    """The metrics of every step, written to `<out>/metrics.jsonl` and `<out>/events`; each line is flushed.

    Args:
        out: the run's folder.
        resumed_at: the step from which the run resumes; metrics of later steps are removed from the file.
        settings: the settings of the run, which are recorded in the events.
        log: "wandb" to log to Weights & Biases too; None for files only.

    Raises:
        ConfigError: the package that `log` needs is not installed.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        resumed_at: int | None = None,
        settings: Mapping[str, Any] | None = None,
        log: str | None = None,
    ):
        # Imported only here, because tensorboardX imports torch if that is installed, and other commands would start
        # seconds later.
        from gspmd.training.reporting.events import Events

        if log:
            check_installed()
        self._path = Path(out) / _FILE
        kept = [] if resumed_at is None else [row for row in read(out) if row["step"] <= resumed_at]
        self._replace(kept)
        self._digest = hashlib.sha256(_lines(filter(_is_of_update, kept)).encode())
        self._sinks: list[Any] = [Events(out, resumed_at)]
        if log:
            self._sinks.append(WeightsAndBiases(out, settings or {}))
        if settings:
            self.text(resumed_at or 0, "settings", f"```json\n{json.dumps(settings, indent=2)}\n```")

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write the metrics of a step, as a JSON object and as events.

        An object without a loss is a final validation. It replaces an earlier final validation of the same step,
        because a run that is resumed at its end validates again.

        Args:
            step: the step's number.
            figures: the metrics by name. A scalar is one event, and [layers] is an event for each layer. [layers, X] is
                a histogram for each layer, with bucket i for expert i, and an event with the largest value times X,
                which is 1 if the load is balanced. In the file, arrays are lists.

        Raises:
            OSError: the file was deleted or replaced, or cannot be written.
        """
        self._check_there()
        row = {"step": step, **{name: _plain(value) for name, value in figures.items()}}
        line = _lines([row])
        if _is_of_update(row):
            self._digest.update(line.encode())
        else:
            rows = read(self._path.parent)
            others = [other for other in rows if _is_of_update(other) or other["step"] != step]
            if len(others) < len(rows):
                self._file.close()
                self._replace(others)
        self._file.write(line)
        self._file.flush()
        for name, value in figures.items():
            if value is not None:
                for sink in self._sinks:
                    sink.add(step, name, np.asarray(value))

    def digest(self) -> str:
        """Return the SHA-256 of the JSON objects of all updates, once the objects are on disk.

        Checkpoints store the hash, and `lost` compares it with the hash of the objects in the file.
        """
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, in Markdown, to the events."""
        for sink in self._sinks:
            sink.text(step, name, text)

    def picture(self, step: int, name: str, png: Path) -> None:
        """Add a picture to the events."""
        for sink in self._sinks:
            sink.picture(step, name, png)

    def _replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace the file by a new file once the new file is complete, so that a full disk loses no metrics."""
        write_whole(self._path, _lines(rows))
        self._file = self._path.open("a", encoding="utf-8")

    def _check_there(self) -> None:
        """Raise OSError if the file was deleted or replaced, because metrics would then be lost without an error."""
        try:
            there = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError:
            there = False
        if not there:
            reason = "it was deleted or replaced while the run went on"
            raise OSError(errno.ENOENT, reason, str(self._path))

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in (self._file, *self._sinks):
            try:
                each.close()
            except OSError:
                if error is None:  # Otherwise the earlier error says why.
                    raise


def read(out: str | Path) -> list[dict[str, Any]]:
    """Read the objects in `<out>/metrics.jsonl`; an incomplete last line is ignored.

    Raises:
        ConfigError: a line before the last is not an object with a step.
    """
    path = Path(out) / _FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rows = [_object(line) for line in lines]
    if rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        fault = f"line {rows.index(None) + 1} is not a JSON object with a step. Correct or delete that line."
        raise ConfigError(f"cannot read the figures in {str(path)!r}:", [fault])
    return [row for row in rows if row is not None]


def lost(out: str | Path, step: int, digest: str | None = None) -> str | None:
    """Describe which metrics up to a step are lost or changed; return None if all are as they were written.

    Args:
        out: the run's folder.
        step: the step of the checkpoint from which the run resumes.
        digest: the result of `Metrics.digest` at that step; None for a checkpoint of an earlier version, which did not
            store it.

    Raises:
        ConfigError: the file cannot be read; see `read`.
    """
    rows = [row for row in read(out) if _is_of_update(row) and row["step"] <= step]
    if digest is not None and hashlib.sha256(_lines(rows).encode()).hexdigest() == digest:
        return None
    there, path = {row["step"] for row in rows}, str(Path(out) / _FILE)
    if gaps := [each for each in range(1, step + 1) if each not in there]:
        first, last = gaps[0], gaps[-1]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        some = "" if last - first == len(gaps) - 1 else f" for {len(gaps)} steps in"
        return f"{path!r} has no figures{some or ' of'} {steps}: they are lost, and the run goes on without them."
    if digest is None:
        return None
    return f"{path!r} was changed, or is damaged: up to step {step} it does not have the figures that were written."


def _is_of_update(row: Mapping[str, Any]) -> bool:
    """Return whether an object is about an update, and not about a validation at the end."""
    return "loss" in row


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def best_validation(out: str | Path, *, of_updates: bool = False) -> tuple[float | None, int | None]:
    """Return the lowest bits per byte of held-out text in `<out>/metrics.jsonl`, and the step of this validation.

    Both are None if there was no validation.

    Args:
        out: the run's folder.
        of_updates: whether to leave out validations at the end of training, which read more text than those between
            updates.
    """
    rows = [row for row in read(out) if row.get("val_bits_per_byte") is not None]
    scored = [(row["val_bits_per_byte"], row["step"]) for row in rows if _is_of_update(row) or not of_updates]
    return min(scored, default=(None, None))


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ReadError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    # `best_validation` compares these scores, so they must be numbers.
    return row if isinstance(row.get("val_bits_per_byte"), int | float | None) else None


def _plain(value: Any) -> Any:
    """Convert a value to a number or nested lists, or to None where JSON cannot represent it."""
    if value is None:
        return None
    if np.ndim(value):
        return np.asarray(value, dtype=np.float64).round(6).tolist()
    number = np.asarray(value).item()
    return number if math.isfinite(number) else None
