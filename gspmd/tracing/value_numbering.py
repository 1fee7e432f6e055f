"""Global value numbering of a jaxpr, to find the collectives and products that the compiler computes only once.

Two operations get the same value number if they have the same primitive, the same parameters, and operands with the
same value numbers. XLA's common subexpression elimination (`HloCSE`) merges such operations. Values keep their numbers
in calls, in recomputation, and in loops with a single iteration, which XLA unrolls. If the compiler hoists a
loop-invariant operation (`gspmd.tracing.compilers`), the operation belongs to the region outside of the loop, and may
be equal to an expression that is available there. Conditionals, operations with side effects and optimization barriers
make new values. Two barriers of the same values count as one barrier.

`gspmd.tracing.regions` applies these rules to a program. This module has the tables that all regions share.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from gspmd.tracing.compilers import Compiler

StepKey = tuple[str, int]
"""The planned equation of a step, and the number of the step in this equation; ("", 0) if there is no step."""


@dataclass
class Numbering:
    """The value numbers of the expressions in one program.

    Attributes:
        compiler: the compiler whose rules for equal values are used.
        numbers: a mapping from expressions to value numbers (hash-consing).
        expressions: a list of all expressions; the index of an expression is its value number.
        calls: the numbers of the calls around the current operation, outermost first. The number of a call outside of
            planned programs is None.
        if_fused: the numbers `Value.barrierless` of values that are merged only if the compiler has fused these values
            in the same way.
        uncertain: pairs (first, later) of steps. The later step is merged with the first step only if the compiler has
            fused the two in the same way.
    """

    compiler: Compiler
    numbers: dict[Hashable, int] = field(default_factory=dict)
    expressions: list[Any] = field(default_factory=list)
    calls: list[int | None] = field(default_factory=lambda: [None])
    if_fused: set[int] = field(default_factory=set)
    uncertain: set[tuple[StepKey, StepKey]] = field(default_factory=set)

    def of(self, *key: Hashable) -> int:
        """Return the value number of an expression; an unknown expression gets a new number."""
        if key not in self.numbers:
            self.numbers[key] = len(self.expressions)
            self.expressions.append(key)
        return self.numbers[key]

    def inverse(self, made: str, name: str, number: int, *how: str) -> int:
        """Return the value number of the result of an operation that has an inverse operation.

        If the operand was made by the inverse operation, the two operations cancel. The result is then the value number
        of the inverse operation's operand.

        Args:
            made: the name of the inverse operation.
            name: the name of the operation.
            number: the value number of the operation's operand.
            how: the parameters of the operation, which must be equal for the two operations to cancel.
        """
        made_by = self.expressions[number]
        return made_by[1] if made_by[0] == made and made_by[2:] == how else self.of(name, number, *how)
