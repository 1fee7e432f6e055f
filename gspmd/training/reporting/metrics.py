"""Metrics of a run: one JSON object per step, TensorBoard events, and Weights & Biases if it is asked for."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gspmd.training.reporting.events import Events
from gspmd.training.reporting.weights_and_biases import WeightsAndBiases, check_installed
from gspmd.training.toml import ConfigError

_FILE = "metrics.jsonl"


class Metrics:
    """Write every step's figures to `<out>/metrics.jsonl` and `<out>/events`, flushing each line.

    Args:
        out: the run's folder.
        resumed_at: the step that the run resumes from; later figures are dropped.
        settings: of the run, for the events.
        log: "wandb" to log to Weights & Biases too.

    Raises:
        ConfigError: what `log` names is not installed.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        resumed_at: int | None = None,
        settings: Mapping[str, Any] | None = None,
        log: str | None = None,
    ):
        if log:
            check_installed()
        path, beside = Path(out) / _FILE, Path(out) / f"{_FILE}.tmp"
        kept = [] if resumed_at is None else [row for row in read(out) if "loss" in row and row["step"] <= resumed_at]
        # Complete before it replaces the old file, so that a full disk loses no figures.
        beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        beside.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._sinks: list[Any] = [Events(out, resumed_at)]
        if log:
            self._sinks.append(WeightsAndBiases(out, settings or {}))
        if settings:
            self.text(resumed_at or 0, "settings", f"```json\n{json.dumps(settings, indent=2)}\n```")

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add one object, and events.

        Args:
            step: the step's number.
            figures: scalars, each an event; [layers], an event per layer; [layers, X], a histogram per layer with
                bucket i for expert i, and an event of the largest value times X, which is 1 if balanced. Arrays are
                lists in the file.
        """
        row = {"step": step, **{name: _plain(value) for name, value in figures.items()}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in figures.items():
            if value is not None:
                for sink in self._sinks:
                    sink.add(step, name, np.asarray(value))

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, in Markdown, to the events."""
        for sink in self._sinks:
            sink.text(step, name, text)

    def picture(self, step: int, name: str, png: Path) -> None:
        """Add a picture to the events."""
        for sink in self._sinks:
            sink.picture(step, name, png)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in (self._file, *self._sinks):
            try:
                each.close()
            except OSError:
                if error is None:  # else the earlier error says why
                    raise


def read(out: str | Path) -> list[dict[str, Any]]:
    """Read the objects of `<out>/metrics.jsonl`, without an incomplete last line.

    Raises:
        ConfigError: another line is not an object with a step.
    """
    path = Path(out) / _FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rows = [_object(line) for line in lines]
    if rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        fault = f"line {rows.index(None) + 1} is no JSON object with a step. Mend that line, or take it out."
        raise ConfigError(f"cannot read the figures in {str(path)!r}:", [fault])
    return [row for row in rows if row is not None]


def best_validation(out: str | Path) -> tuple[float | None, int | None]:
    """The best bits per byte of held-out text in `<out>/metrics.jsonl`, and the step they are of; None without any."""
    scored = [(row["val_bits_per_byte"], row["step"]) for row in read(out) if row.get("val_bits_per_byte") is not None]
    return min(scored, default=(None, None))


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _plain(value: Any) -> Any:
    """Convert to a number or nested lists; None for what JSON cannot represent."""
    if value is None:
        return None
    if np.ndim(value):
        return np.asarray(value, dtype=np.float64).round(6).tolist()
    number = np.asarray(value).item()
    return number if math.isfinite(number) else None
