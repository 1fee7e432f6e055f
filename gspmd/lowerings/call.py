"""A call of `gspmd.einsum` once it is resolved, and what a lowering makes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gspmd.annotate.equation import Equation, Via
from gspmd.annotate.spec import Spec
from gspmd.lowerings.plan import make_plan
from gspmd.lowerings.program import Context
from gspmd.planner.plan import Plan


@dataclass(frozen=True)
class Call:
    """All that the program of a call depends on.

    Attributes:
        equation: what is computed.
        sizes: of its dimensions.
        context: mesh, chip, type of mesh axes, lowering.
        dtypes: of the operands, group members one by one.
        via: as `gspmd.einsum` takes it.
        wire_dtype: of everything that crosses the wire, if not each tensor's own.
        precision: of the local products.
        result_dtype: of the results.
    """

    equation: Equation
    sizes: tuple[tuple[str, int], ...]
    context: Context
    dtypes: tuple[str, ...]
    via: Via | None
    wire_dtype: str | None
    precision: Any
    result_dtype: str

    @property
    def operands(self) -> list[Spec]:
        """The specs of the operands, group members one by one."""
        return [spec for operand in self.equation.operands for spec in operand.specs]

    @property
    def plan(self) -> Plan:
        """The plan that the program carries out."""
        ctx, result = self.context, self.result_dtype
        asked = self.equation, self.sizes, ctx.axes, self.dtypes, ctx.chip, ctx.lowering
        return make_plan(*asked, self.via, self.wire_dtype, result)


class Passes(NamedTuple):
    """A program as JAX differentiates it.

    Attributes:
        forward: from the operands to (results, residuals).
        backward: from (residuals, cotangents of the results) to the cotangents of the operands. None where JAX
            differentiates the program by itself: `forward` returns the results alone then.
    """

    forward: Callable
    backward: Callable | None
