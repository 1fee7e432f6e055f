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

from gspmd.annotate.plain import printable


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
        width = max(1, self.end - self.start)
        lines = [f"    {_one_line(self.text)}", f"    {' ' * self.start}{'^' * width}", f"  {self.fact}"]
        lines += [f"  {self.remedy}"] if self.remedy else []
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
    head = doing if len(faults) < 2 else f"{doing}: {len(faults)} faults"
    return kind("\n".join([head, *map(str, faults)]), faults)


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


def _one_line(text: str) -> str:
    # One printed character per character, or the caret would stand under the wrong one.
    return "".join(c if c.isprintable() else " " for c in text)
