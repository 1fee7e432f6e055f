"""The progress of a training run: a bar on a terminal or in a notebook, lines elsewhere, and messages between them."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from rich import progress
from rich.console import Console
from rich.text import Text

from gspmd.display.progress import Progress
from gspmd.display.units import duration


class Display:
    """A display of step, loss, bits per byte, tokens per second, MFU if known, and remaining time.

    Args:
        console: the console to print to.
        steps: the number of steps of the whole run.
        done: the number of steps done before this start of the run, or before a change of layout.
        every: the number of steps between two lines that stay visible. If it is 0, a terminal shows only the progress
            bar, and any other output gets a line every few seconds.
    """

    def __init__(self, console: Console, steps: int, done: int = 0, every: int = 0):
        self._every = every
        self._console, self._steps, self._began, self._done = console, steps, time.monotonic(), done
        self._pace: dict[str, float] = {}  # Averages over about ten steps.
        columns = (
            progress.TextColumn("[bold]step {task.completed}/{task.total}"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeRemainingColumn(compact=True),
        )
        self._bar = progress.Progress(*columns, console=console, expand=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=steps, completed=done, figures="")
        self._line = Progress(console, f"Step {done + 1}/{steps}") if not console.is_terminal else None
        self._stack = ExitStack()

    def update(self, step: int, figures: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""
        shown = [f"loss [cyan]{figures['loss']:.3f}[/]", f"[green]{figures['bits_per_byte']:.3f}[/] bits/byte"]
        shown.append(f"[magenta]{self._average('tokens_per_second', figures):,.0f}[/] tokens/s")
        if "mfu" in figures:
            shown.append(f"[yellow]{self._average('mfu', figures):.1%}[/] MFU")
        self._bar.update(self._task, completed=step, figures="  ".join(shown))
        logged = self._every > 0 and step % self._every == 0
        line = "  ".join([f"step {step}/{self._steps}", *shown])
        if self._line is None:
            if logged:
                self._bar.console.print(line, highlight=False)
            return
        if logged or step in (self._done + 1, self._steps) or (self._line.due and not self._every):
            left = (time.monotonic() - self._began) / (step - self._done) * (self._steps - step)
            said = Text.from_markup(f"{line}  {duration(left)} left").plain
            self._line.report(said, step / self._steps)
        self._line.begin(f"Step {step + 1}/{self._steps}")

    def _average(self, name: str, figures: Mapping[str, float]) -> float:
        self._pace[name] = 0.9 * self._pace.get(name, figures[name]) + 0.1 * figures[name]
        return self._pace[name]

    def __enter__(self) -> "Display":
        self._stack.enter_context(self._bar if self._line is None else self._line)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
