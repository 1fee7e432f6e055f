"""A line of progress in a notebook, and the names of the notebook's cells."""

import sys
from html import escape
from threading import Lock
from typing import Any


class Cell:
    """A part of the output of a notebook cell; the contents of this part can be replaced.

    Each new text of progress replaces the last text, since a line for each text would fill the cell.
    `show` may be called from any thread, because the kernel finds the cell by the id of this part.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._lock = Lock()  # Two threads that found no place would each make one.

    def show(self, text: str, share: float | None = None) -> None:
        """Show a text and, unless `share` is None, a bar; `share` is the filled fraction of the bar, from 0 to 1."""
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


def cell_of(file: str) -> str:
    """Return the notebook cell, such as `In[3]`, whose code has `file` as its file name in Python; "" if there is none.

    The name that a kernel gives to the code of a cell is a path in a temporary folder of the kernel's process, which
    means nothing to the reader of a table.
    """
    if "IPython" not in sys.modules:
        return ""
    from IPython import get_ipython

    # Before version 8, IPython has no such method.
    named = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    found = named(file) if named is not None else None
    return found[1] if found else ""
