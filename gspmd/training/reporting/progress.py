"""Progress of what takes long before the first step, so that nothing is silent for more than three seconds."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from gspmd.display.units import amount_of_bytes

_EVERY = 2.5
"""Seconds between two lines where there is no terminal."""


class Progress:
    """Say how far something is: on a terminal in a line that changes, elsewhere in a line every few seconds.

    Args:
        console: where; None for nowhere.
        doing: what is done at first.
    """

    def __init__(self, console: Console | None, doing: str):
        self._console, self._said = console, time.monotonic()
        self._status: Any = console.status(f"{doing} …") if console and console.is_terminal else nullcontext()

    def say(self, what: str, *, always: bool = False) -> None:
        """Say what is being done, if it is time; or always, as a sentence of its own."""
        now = time.monotonic()
        if self._console is None:
            return
        if always:
            self._console.print(f"{what}.", soft_wrap=True, markup=False)
        elif self._console.is_terminal:
            self._status.update(f"{what} …")
        elif now - self._said >= _EVERY:
            self._console.print(f"{what} …", soft_wrap=True, markup=False)
            self._said = now

    def counter(self, doing: str, whole: int) -> Callable[[int], None]:
        """Return a function that is told, again and again, how many more bytes of the whole are done."""
        done, began = 0, time.monotonic()

        def read(count: int) -> None:
            nonlocal done
            done += count
            speed = done / max(1e-3, time.monotonic() - began)
            of = f"{amount_of_bytes(done)} of {amount_of_bytes(whole)}" if done <= whole else amount_of_bytes(done)
            self.say(f"{doing}: {of}, {amount_of_bytes(speed)} per second")

        return read

    def __enter__(self) -> "Progress":
        self._status.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(*error)
