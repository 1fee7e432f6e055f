"""Metrics of a run: one JSON object per step, TensorBoard events, and a progress bar."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gspmd.training.reporting.events import Events
from gspmd.training.toml import ConfigError

_FILE = "metrics.jsonl"
# A terminal gets a bar; a log file gets this many lines.
_LINES = 20


class Metrics:
    """Write every step's figures to `<out>/metrics.jsonl` and `<out>/events`, flushing each line.

    Args:
        out: the run's folder.
        resumed_at: the step that the run resumes from; later figures are dropped.
    """

    def __init__(self, out: str | Path, *, resumed_at: int | None = None):
        path, beside = Path(out) / _FILE, Path(out) / f"{_FILE}.tmp"
        kept = [] if resumed_at is None else [row for row in read(out) if "loss" in row and row["step"] <= resumed_at]
        # Complete before it replaces the old file, so that a full disk loses no figures.
        beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        beside.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._events = Events(out, resumed_at)

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
                self._events.add(step, name, np.asarray(value))

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in (self._file, self._events):
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


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class Display:
    """A progress bar with loss, bits per byte, tokens per second and remaining time."""

    def __init__(self, console: Console, steps: int, done: int = 0):
        self._console, self._steps, self._began, self._done = console, steps, time.monotonic(), done
        self._pace = 0.0  # tokens per second, averaged over about ten steps
        columns = (
            TextColumn("[bold]step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("loss [cyan]{task.fields[loss]}"),
            TextColumn("[green]{task.fields[bits]}[/] bits/byte"),
            TextColumn("[magenta]{task.fields[rate]}[/] tokens/s"),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Progress(*columns, console=console, expand=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=steps, completed=done, loss="–", bits="–", rate="–")

    def update(self, step: int, figures: Mapping[str, Any]) -> None:
        """Show the figures of a step."""
        loss, bits = f"{figures['loss']:.3f}", f"{figures['bits_per_byte']:.3f}"
        self._pace = 0.9 * (self._pace or figures["tokens_per_second"]) + 0.1 * figures["tokens_per_second"]
        rate = f"{self._pace:,.0f}"
        self._bar.update(self._task, completed=step, loss=loss, bits=bits, rate=rate)
        if not self._console.is_terminal and (step % max(1, self._steps // _LINES) == 0 or step in (1, self._steps)):
            left = (time.monotonic() - self._began) / (step - self._done) * (self._steps - step)
            line = f"step {step}/{self._steps}  loss {loss}  {bits} bits/byte  {rate} tokens/s  {left:.0f} s left"
            self._console.print(line)

    def __enter__(self) -> "Display":
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, trace)


def _plain(value: Any) -> Any:
    """Convert to a number or nested lists; None for what JSON cannot represent."""
    if value is None:
        return None
    if np.ndim(value):
        return np.asarray(value, dtype=np.float64).round(6).tolist()
    number = np.asarray(value).item()
    return number if math.isfinite(number) else None
