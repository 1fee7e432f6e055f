"""A line of progress in a notebook.

Each new text replaces the line, since a line for each text would fill the cell.
"""

from html import escape
from threading import Lock
from typing import Any


class Cell:
    """A part of the output of a notebook cell, whose contents can be replaced.

    `show` may be called from any thread: the kernel finds the cell by the id of this part.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._lock = Lock()  # Two threads that found no place would each make one.

    def show(self, text: str, share: float | None = None) -> None:
        """Show a text and, if `share` is given, a bar of which this fraction (from 0 to 1) is filled."""
        from IPython.display import display

        bar = "" if share is None else f'<progress value="{share:.4f}" max="1" style="width:14em"></progress> '
        data = {"text/plain": text, "text/html": f'<div style="white-space:pre-wrap">{bar}{escape(text)}</div>'}
        with self._lock:
            if self._handle is None:
                self._handle = display(data, raw=True, display_id=True)
            else:
                self._handle.update(data, raw=True)

    def clear(self) -> None:
        """Remove the text that is shown."""
        with self._lock:
            if self._handle is not None:
                self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
