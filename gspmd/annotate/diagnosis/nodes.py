"""The parts of a text that the diagnosing reader finds: specs, operands and terms, each with its position."""

import re
import string
from dataclasses import dataclass, field

LETTERS = frozenset(string.ascii_lowercase)
CAPITALS = frozenset(string.ascii_uppercase)
ARROW = re.compile(
    r"""
    ->                                # the arrow, and what people write for it:
  | [-=~|−–—]+\s*>+ | >+              # --> => ==> - > |->
  | [-=−–—]*[←→⇒⇐⇨↦⇾⟵⟶⟸⟹⟼⭢➔➙➛➜➝➞➡]\ufe0f?
  | <[-=~−–—]+                        # <-
  | \\(?:to|rightarrow|mapsto)\b
""",
    re.VERBOSE,
)
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
class LocatedSpec:
    """A spec with the positions of its dimensions and mesh axes; the spec is `broken` if a part could not be read."""

    start: int
    end: int = 0
    dims: list[Dim] = field(default_factory=list)
    partial: Dim | None = None
    broken: bool = False

    @property
    def names(self) -> list[str]:
        return [d.name for d in self.dims]


@dataclass
class LocatedOperand:
    """An operand, which is one spec or a group of specs, together with its position in the text."""

    specs: list[LocatedSpec]
    group: bool
    start: int
    end: int = 0

    @property
    def broken(self) -> bool:
        return any(spec.broken for spec in self.specs)


LocatedTerm = list[LocatedOperand]
