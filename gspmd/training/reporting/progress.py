"""Progress of what takes long before the first step, so that nothing is silent for more than three seconds."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from gspmd.display.units import amount_of_bytes

_EVERY, _LIVE = 2.0, 0.1
"""Seconds between two lines where there is no terminal, and between two changes of a line where there is."""


class Progress:
    """Say how far something is: on a terminal in a line that changes, elsewhere in a line every few seconds.

    Args:
        console: where; None for nowhere.
        doing: what is done at first.
    """

    def __init__(self, console: Console | None, doing: str):
        self._console, self._said = console, time.monotonic()
        self._live = console is not None and console.is_terminal
        self._status: Any = console.status(f"{doing} …") if self._live else nullcontext()

    def note(self, sentence: str) -> None:
        """Print a line that stays."""
        if self._console is not None:
            self._console.print(sentence, soft_wrap=True, markup=False)

    def say(self, what: Callable[[], str]) -> None:
        """Say what is being done, if it is time; only then is it asked for."""
        now = time.monotonic()
        if self._console is None or now - self._said < (_LIVE if self._live else _EVERY):
            return
        self._said = now
        if self._live:
            self._status.update(f"{what()} …")
        else:
            self.note(f"{what()} …")

    def counter(self, doing: str, whole: int) -> Callable[[int], None]:
        """Return a function that is told, again and again, how many more bytes of the whole are done."""
        done, began = 0, time.monotonic()

        def read(count: int) -> None:
            nonlocal done
            done += count
            self.say(said)

        def said() -> str:
            speed = done / max(1e-3, time.monotonic() - began)
            of = f" of {amount_of_bytes(whole)}" if done <= whole else ""  # what is compressed is more
            return f"{doing}: {amount_of_bytes(done)}{of}, {amount_of_bytes(speed)} per second"

        return read

    def __enter__(self) -> "Progress":
        self._status.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(*error)
