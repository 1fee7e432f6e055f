"""Errors in notation: what was being done, the notation with a caret under the fault, the fact, the remedy.

Code that finds a fault writes a `Fault`; the public function that was called collects them and raises one error:

    cannot shard 'B_xLE' for an array of shape (6, 128, 512)
        B_xLE
        ^^^
      dimension B has size 6, which mesh axis x (size 4) does not divide.
      Use a size that is a multiple of 4 (4 or 8), or leave B unsharded: 'BLE'.

`diagnosis/message.py` draws the messages; it is imported only when there is a message to draw.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

_SHOWN = 100  # characters of a value
_ARRAYS = {"ndarray": "array", "ArrayImpl": "array"}  # numpy's and JAX's, neither of which is imported for parsing


class NotationError(ValueError):
    """An error about notation.

    The attribute `faults` has every fault, including the faults that the message counts but does not list.
    """

    def __init__(self, message: str, faults: Iterable["Fault"] = ()):
        super().__init__(message)
        self.faults = tuple(faults)

    def __str__(self) -> str:
        from gspmd.display.plain import printable  # imported only when there is an error

        return printable(super().__str__())

    def __repr__(self) -> str:
        from gspmd.display.plain import printable

        return printable(super().__repr__())


class SpecError(NotationError):
    """A spec or an equation that cannot be read, or that does not fit its array, its type or its mesh."""


class PlanError(NotationError):
    """An equation that can be read, but for which no program exists on this mesh."""


class LayoutError(NotationError):
    """A table of specs that has faults of its own, or that does not fit a model or a mesh."""


for _kind in (SpecError, PlanError, LayoutError):
    _kind.__module__ = "gspmd"  # tracebacks show the public name, gspmd.SpecError


_Error = TypeVar("_Error", bound=NotationError)


@dataclass(frozen=True)
class Fault:
    """One fault: the notation, its wrong span, the fact, and the remedy. Fact and remedy are whole sentences.

    Faults of several tensors may have the same cause. A caller may report faults with the same nonempty `cause`
    together.
    """

    text: str
    start: int
    end: int
    fact: str
    remedy: str = ""
    cause: tuple = ()

    def __str__(self) -> str:
        from gspmd.annotate.diagnosis.message import drawn

        return drawn(self.text, self.start, self.end, self.fact, self.remedy)


def report(kind: type[_Error], doing: str, faults: Iterable[Fault]) -> _Error:
    """Return the error that lists every fault; the caller raises this error with `from None`."""
    from gspmd.annotate.diagnosis.message import message

    faults = tuple(faults)
    return kind(message(doing, faults), faults)


def shown(value: object) -> str:
    """Return the repr of a value for a message: one line, at most 100 characters.

    >>> shown({"x": 4}), shown(object()), shown(range)
    ("{'x': 4}", 'an object', "<class 'range'>")
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and shape and dtype is not None:
        name = type(value).__name__
        return f"{article(_ARRAYS.get(name, name))} of {dtype}, of shape {shape}"
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else f"{value[: _SHOWN - 1]}…")
    if isinstance(value, int) and value.bit_length() > 300:  # Python itself writes no more than 4,300 digits
        return f"about {'-' * (value < 0)}10^{math.log10(abs(value)):.0f}"
    try:
        text = repr(value)
    except ValueError:  # the value contains such a number
        return article(type(value).__name__)
    fits = len(text) <= _SHOWN and text.isprintable() and " at 0x" not in text
    return text if fits else article(type(value).__name__)


def article(noun: str) -> str:
    """Return the noun with its indefinite article: 'a Mesh', 'an array', 'an ndarray'."""
    return f"{'an' if noun[:1] in 'AEIOaeio' or noun[:2] == 'nd' else 'a'} {noun}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'? " for the nearest known word, or an empty string if none is near.

    Case is ignored, and so is the difference between digits and the letters that look like them.

    >>> suggestion("attention.w_0", ["attention.w_v", "attention.w_o"])
    "Did you mean 'attention.w_o'? "
    """
    by_shape = {_shape(each): each for each in known}
    near = difflib.get_close_matches(_shape(word), list(by_shape), n=1, cutoff=0.6)
    return f"Did you mean {by_shape[near[0]]!r}? " if near else ""


def _shape(word: str) -> str:
    return word.lower().replace("0", "o").replace("1", "l")


def listed(words: Iterable[str], conjunction: str = "and") -> str:
    """Return the words as a list in a sentence: 'x', 'x and y', 'x, y and z'."""
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}" if words else "none"
