"""Errors in notation: what was being done, the notation with a caret under the fault, the fact, the remedy.

Whoever finds a fault writes a `Fault`; the public entry that was called collects them all and raises one error:

    cannot shard 'B_xLE' for an array of shape (6, 128, 512)
        B_xLE
        ^^^
      dimension B has size 6, which mesh axis x (size 4) does not divide.
      Use a size that is a multiple of 4 (4 or 8), or leave B unsharded: 'BLE'.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from gspmd.display.plain import printable

MOST_FAULTS = 12
"""More faults than these are counted, not told one by one; the error's `.faults` has them all."""
_WIDEST = 160  # characters of a notation; of a sentence; of what was given
_LONGEST = 400
_SHOWN = 100
_ARRAYS = {"ndarray": "array", "ArrayImpl": "array"}  # numpy's and JAX's, of which parsing knows neither


class NotationError(ValueError):
    """An error about notation; `.faults` holds every fault that the message lists."""

    def __init__(self, message: str, faults: Iterable["Fault"] = ()):
        super().__init__(message)
        self.faults = tuple(faults)

    def __str__(self) -> str:
        return printable(super().__str__())

    def __repr__(self) -> str:
        return printable(super().__repr__())


class SpecError(NotationError):
    """A spec or an equation that cannot be read, or that does not fit its array, its type or its mesh."""


class PlanError(NotationError):
    """An equation that can be read, but for which no program exists on this mesh."""


class LayoutError(NotationError):
    """A table of specs that is wrong in itself, or does not fit a model or a mesh."""


# Users meet these as gspmd.SpecError, and a traceback should call them so.
for _kind in (SpecError, PlanError, LayoutError):
    _kind.__module__ = "gspmd"


@dataclass(frozen=True)
class Fault:
    """One fault: the notation, the span of it that is wrong, the fact, and the remedy (both whole sentences).

    Faults of many tensors may have one cause; whoever tells several may group them by `cause`, where it is not empty.
    """

    text: str
    start: int
    end: int
    fact: str
    remedy: str = ""
    cause: tuple = ()

    def __str__(self) -> str:
        text, start, end = _window(_one_line(self.text), self.start, max(self.end, self.start + 1))
        lines = [f"    {text}", f"    {' ' * start}{'^' * (end - start)}", f"  {_cut(self.fact)}"]
        lines += [f"  {_cut(self.remedy)}"] if self.remedy else []
        return "\n".join(line.rstrip() for line in lines)


def report(kind: type[NotationError], doing: str, faults: Iterable[Fault]) -> NotationError:
    """The error that lists every fault; the caller raises it, `from None`.

    >>> print(report(SpecError, "cannot read the spec 'B_'", [Fault("B_", 0, 2, "dimension B has no axis.")]))
    cannot read the spec 'B_'
        B_
        ^^
      dimension B has no axis.
    """
    faults = tuple(faults)
    head = _cut(doing) if len(faults) < 2 else f"{_cut(doing)}: {len(faults):,} faults"
    told, more = faults[:MOST_FAULTS], len(faults) - MOST_FAULTS
    rest = [f"  … and {more:,} more."] if more > 0 else []
    return kind("\n".join([head, *map(str, told), *rest]), faults)


def shown(value: object) -> str:
    """What was given, as an error says it: on one line, and never at length.

    >>> shown({"x": 4}), shown(object()), shown(range)
    ("{'x': 4}", 'an object', "<class 'range'>")
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and shape and dtype is not None:
        name = type(value).__name__
        return f"{article(_ARRAYS.get(name, name))} of {dtype}, of shape {shape}"
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else f"{value[: _SHOWN - 1]}…")
    text = repr(value)
    fits = len(text) <= _SHOWN and text.isprintable() and " at 0x" not in text
    return text if fits else article(type(value).__name__)


def article(noun: str) -> str:
    """The noun with its indefinite article.

    >>> article("Mesh"), article("array")
    ('a Mesh', 'an array')
    """
    return f"{'an' if noun[:1] in 'AEIOaeio' else 'a'} {noun}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "Did you mean 'x'? " for the nearest known word, whatever its case, or nothing."""
    by_small = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), list(by_small), n=1, cutoff=0.6)
    return f"Did you mean {by_small[near[0]]!r}? " if near else ""


def listed(words: Iterable[str], conjunction: str = "and") -> str:
    """The words in a sentence: 'x', 'x and y', 'x, y and z'.

    >>> listed(["x", "y", "z"])
    'x, y and z'
    """
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}" if words else "none"


def _window(text: str, start: int, end: int) -> tuple[str, int, int]:
    """The part of a long text around a span, and where the span stands in it."""
    if len(text) <= _WIDEST:
        return text, start, end
    first = max(0, min(start - _WIDEST // 3, len(text) - _WIDEST))
    before, after = "…" * (first > 0), "…" * (first + _WIDEST < len(text))
    shift = first - len(before)
    stop = min(end, first + _WIDEST)
    return f"{before}{text[first : first + _WIDEST]}{after}", start - shift, max(stop, start + 1) - shift


def _cut(text: str) -> str:
    """The two ends of what is too long to be read."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 2 // 3]} … {text[-_LONGEST // 3 :]}"


def _one_line(text: str) -> str:
    # One printed character per character, or the caret would stand under the wrong one.
    return "".join(c if c.isprintable() else " " for c in text)
