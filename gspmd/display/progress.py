"""Progress of long tasks.

No command is silent for longer than three seconds or 1% of its run so far, whichever is longer.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import Event, Thread
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from gspmd.display.notebook import Cell
from gspmd.display.units import amount_of_bytes

_EVERY, _SOON, _POLL = 2.0, 0.8, 0.2
"""Without a terminal, the seconds between two lines, before the first line, and between two checks of the clock."""
_IN_PLACE = 1.0
"""In a notebook, the seconds between two changes of the line."""
_SHARE, _SELDOM = 1 / 150, 60.0
"""The wait between two reports of a long task: a fraction of the elapsed time, and the largest number of seconds."""

What = str | Callable[[], str]


class Progress:
    """Report the current task and how long it has taken.

    On a terminal and in a notebook, the report is one line that changes. Elsewhere, the report is a new line every few
    seconds, and a task that takes less time has no line. While one `Progress` is inside another, only the inner one
    reports.

    Args:
        console: the console to print to; None to print nothing.
        doing: the first task: a text, or a function that returns the text each time that it is shown.
    """

    _open: ClassVar[list["Progress"]] = []
    _said: ClassVar[float] = time.monotonic()

    def __init__(self, console: Console | None, doing: What):
        self._console, self._what = console, doing
        self._since = self._began = time.monotonic()
        self._live = console is not None and console.is_terminal
        self._last: tuple[str, float] | None = None
        self._cell = Cell() if console is not None and console.is_jupyter else None
        self._status: Any = console.status(self) if console is not None and self._live else nullcontext()
        self._over = Event()
        self._watcher: Thread | None = None

    def note(self, sentence: str) -> None:
        """Print a line that stays on the screen."""
        Progress._said = time.monotonic()
        if self._console is not None:
            self._console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    def report(self, sentence: str, share: float) -> None:
        """Print a line that stays; in a notebook, replace the last line of `report` instead, and show a progress bar.

        Args:
            sentence: the line.
            share: the fraction of the whole that is done, from 0 to 1.
        """
        if self._cell is None:
            self.note(sentence)
            return
        Progress._said, self._last = time.monotonic(), (sentence, share)
        self._cell.show(*self._last)

    def say(self, doing: What) -> None:
        """Change the description of the task, and report the task if a line is due.

        If `doing` is a function, it is called only when its text is shown.
        """
        self._what = doing
        if not self._live and self.due:
            self._line()

    def begin(self, doing: What) -> None:
        """Begin a new task, whose time counts from now."""
        self._what, self._began = doing, time.monotonic()

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last report for a new line."""
        now = time.monotonic()
        if self._cell is not None:
            return now - Progress._said >= _IN_PLACE
        return now - Progress._said >= max(_EVERY, min(_SELDOM, _SHARE * (now - self._since)))

    def counter(self, doing: str, whole: int) -> Callable[[int], None]:
        """Return a function that reports the progress of a task with `whole` bytes.

        Each call of the function passes the number of bytes that were done since the last call.
        """
        done, began = 0, time.monotonic()

        def read(count: int) -> None:
            nonlocal done
            done += count
            self.say(said)

        def said() -> str:
            speed = done / max(1e-3, time.monotonic() - began)
            of = f" of {amount_of_bytes(whole)}" if done <= whole else ""  # There are more bytes after decompression.
            return f"{doing}: {amount_of_bytes(done)}{of}, {amount_of_bytes(speed)} per second"

        return read

    def __enter__(self) -> "Progress":
        self._since = self._began = time.monotonic()
        # The first line comes soon, because the time since the last output is not known: tables are printed without
        # this class.
        Progress._said = max(Progress._said, self._began - max(0.0, _EVERY - _SOON))
        Progress._open.append(self)
        self._status.__enter__()
        if self._console is not None and not self._live:
            self._watcher = Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()  # It may be writing a line, which must come before anything that is printed next.
        Progress._open.remove(self)
        self._status.__exit__(*error)
        if self._cell is not None and self._last is not None:
            self._cell.show(*self._last)
        elif self._cell is not None:
            self._cell.clear()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(str(self), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)  # The text may change between measuring and drawing.

    def __str__(self) -> str:
        what = self._what if isinstance(self._what, str) else self._what()
        seconds = time.monotonic() - self._began
        return f"{what} …" if seconds < 1 else f"{what} … {seconds:.0f} s"

    def _watch(self) -> None:
        """Repeat the report while the task itself does not report, for example during a call that takes minutes."""
        while not self._over.wait(_POLL):
            if Progress._open[-1:] == [self] and self.due:
                self._line()

    def _line(self) -> None:
        if self._cell is None:
            self.note(str(self))
        else:
            Progress._said = time.monotonic()
            self._cell.show(str(self))
