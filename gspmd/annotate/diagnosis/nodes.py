"""What was written: the pieces of a spec or an equation, each with its place in the text.

A reader fills these in; the rules of an equation look at them; a `Spec` is made of them when there was no fault.
"""

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

OPEN = "?"  # the mark of a dimension left to the compiler
LETTERS = frozenset(string.ascii_lowercase)
CAPITALS = frozenset(string.ascii_uppercase)
NAME = re.compile(r"[a-z][a-z0-9_]*")
ARROW = re.compile(r"""
    ->                                # the arrow, and what is written for it:
  | [-=~|−–—]+\s*>+ | >+              # --> => ==> - > |->
  | [-=−–—]*[←→⇒⇐⇨↦⇾⟵⟶⟸⟹⟼⭢➔➙➛➜➝➞➡]\ufe0f?
  | <[-=~−–—]+                        # <-
  | \\(?:to|rightarrow|mapsto)\b
""", re.VERBOSE)
SEPARATOR = re.compile(f"[,+()]|(?:{ARROW.pattern})", re.VERBOSE)


@dataclass
class Axis:
    name: str
    start: int
    end: int


@dataclass
class Dim:
    name: str
    start: int
    end: int
    axes: list[Axis] = field(default_factory=list)
    braced: bool = False


@dataclass
class SpecNode:
    """A spec as it was written, with the place of everything; `broken` if a part of it could not be read."""

    start: int
    end: int = 0
    dims: list[Dim] = field(default_factory=list)
    partial: Dim | None = None
    broken: bool = False

    @property
    def names(self) -> list[str]:
        return [d.name for d in self.dims]


@dataclass
class OperandNode:
    """An operand as it was written: one spec, or the members of a group."""

    specs: list[SpecNode]
    group: bool
    start: int
    end: int = 0

    @property
    def broken(self) -> bool:
        return any(spec.broken for spec in self.specs)


TermNode = list[OperandNode]


def axes_text(axes: Sequence[str]) -> str:
    """Mesh axes as a suffix: letters side by side, in braces as soon as a name is longer.

    >>> axes_text(["x", "y"]), axes_text(["data", "x"])
    ('xy', '{data,x}')
    """
    return "".join(axes) if all(len(a) == 1 for a in axes) else "{" + ",".join(axes) + "}"


def dim_text(dim: str, axes: Sequence[str]) -> str:
    """A dimension with its mesh axes: `E_xy`, or `E`."""
    return f"{dim}_{axes_text(axes)}" if axes else dim
