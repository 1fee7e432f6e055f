"""Global value numbering of a jaxpr, to find the collectives and products that the compiler computes only once.

Two operations get the same value number if they are the same primitive, with the same parameters, of operands with the
same numbers: XLA's common subexpression elimination (`HloCSE`) merges them. Numbers pass through calls, recomputation,
and loops of a single trip, which XLA unrolls. If the compiler hoists a loop-invariant operation
(`gspmd.tracing.compilers`), it belongs to the region outside of the loop, and may equal an expression that is available
there. Conditionals and operations with effects make new values, and so do optimization barriers, except that two
barriers of the same values are one. `gspmd.tracing.regions` walks a program by these rules; this file has the tables
that all regions share.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from gspmd.tracing.compilers import Compiler

StepKey = tuple[str, int]
"""An equation and the number of a step in it; ("", 0) for an operation outside of all steps."""


@dataclass
class Numbering:
    """The value numbers of the expressions in one program.

    Attributes:
        compiler: the compiler whose rules for equal values hold.
        numbers: for each expression, its value number (hash-consing).
        expressions: the expressions, at the indices that are their value numbers.
        calls: the numbers of the calls around the current operation, outermost first; None outside of planned programs.
        if_fused: the `barrierless` numbers of values that are merged only if the compiler has fused these values in the
            same way.
        uncertain: pairs of steps (first, later), where the later step is merged only if the compiler has fused them
            alike.
    """

    compiler: Compiler
    numbers: dict[Hashable, int] = field(default_factory=dict)
    expressions: list[Any] = field(default_factory=list)
    calls: list[int | None] = field(default_factory=lambda: [None])
    if_fused: set[int] = field(default_factory=set)
    uncertain: set[tuple[StepKey, StepKey]] = field(default_factory=set)

    def of(self, *key: Hashable) -> int:
        """Return the value number of an expression, a new one if it is new."""
        if key not in self.numbers:
            self.numbers[key] = len(self.expressions)
            self.expressions.append(key)
        return self.numbers[key]

    def inverse(self, made: str, name: str, number: int, *how: str) -> int:
        """Return the value number of operation `name` on a value.

        If operation `made` has made the value, the two cancel, and the result is the operand of `made`.
        """
        made_by = self.expressions[number]
        return made_by[1] if made_by[0] == made and made_by[2:] == how else self.of(name, number, *how)
