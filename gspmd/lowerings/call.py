"""A resolved call of `gspmd.einsum`, its plan, and its forward and backward pass under a lowering."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax

from gspmd.annotate.equation import Equation, Via
from gspmd.annotate.spec import Spec
from gspmd.hardware.chips import Chip
from gspmd.lowerings.program import Context
from gspmd.planner.overlap import Overlap
from gspmd.planner.plan import Overlapping, Plan, nothing_overlaps, plan_equation


@dataclass(frozen=True)
class Call:
    """A call of `gspmd.einsum`, with everything on which the program of the call depends.

    Attributes:
        equation: the equation to compute.
        sizes: the sizes of the equation's dimensions.
        context: the mesh, the chip, the type of mesh axes and the lowering.
        dtypes: the dtypes of the operands; every member of a group counts as an operand.
        via: the argument `via` of `gspmd.einsum`.
        wire_dtype: the dtype in which every tensor is sent, or None to send every tensor in its own dtype.
        precision: the precision of the local products.
        result_dtype: the dtype of the results.
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
        """The specs of the operands, including every member of a group."""
        return [spec for operand in self.equation.operands for spec in operand.specs]

    @property
    def plan(self) -> Plan:
        """The plan that the program runs."""
        ctx, result = self.context, self.result_dtype
        asked = self.equation, self.sizes, ctx.axes, self.dtypes, ctx.chip, ctx.lowering
        return make_plan(*asked, self.via, self.wire_dtype, result, precision_name(self.precision))


class Passes(NamedTuple):
    """The forward and the backward pass of a program, as functions that JAX calls.

    Attributes:
        forward: a function, operands -> (results, residuals).
        backward: a function, (residuals, cotangents of the results) -> cotangents of the operands. None if JAX
            differentiates the program by itself; in this case `forward` returns only the results.
    """

    forward: Callable
    backward: Callable | None


@lru_cache(maxsize=4096)
def make_plan(
    equation: Equation,
    sizes: tuple[tuple[str, int], ...],
    mesh: tuple[tuple[str, int], ...],
    dtypes: tuple[str, ...],
    chip: Chip,
    lowering: str,
    via: Via | None = None,
    wire_dtype: str | None = None,
    result_dtype: str | None = None,
    precision: str = "default",
) -> Plan:
    """Return the plan of an equation, as `gspmd.plan` does, from resolved and hashable arguments.

    `wire_dtype` is the argument of `gspmd.einsum` with this name, and `result_dtype` is the dtype of the results. By
    default, each follows from the dtypes of the operands. `precision` is a name that `precision_name` returns.
    """
    return plan_equation(
        equation, sizes, mesh, dtypes, chip, lowering, overlapping(lowering), via, wire_dtype, result_dtype, precision
    )


def default_precision() -> Any:
    """Return the precision that `jax.default_matmul_precision` or JAX's configuration sets, or None."""
    config: Any = jax.config  # its type hints in JAX 0.10 leave out the options
    return config.jax_default_matmul_precision


def precision_name(precision: Any) -> str:
    """Return the name that plans use for the precision of a product: `default`, `high` or `highest`.

    Args:
        precision: a precision that `jax.lax.dot` accepts. If it is a pair, with one precision for each operand, the
            higher precision counts.

    Example:
        >>> precision_name(None), precision_name(("high", "highest")), precision_name("BF16_BF16_F32_X3")
        ('default', 'highest', 'high')
    """
    if precision is None:
        return "default"
    if isinstance(precision, (tuple, list)):
        return max(map(precision_name, precision), key=("default", "high", "highest").index)
    name = getattr(precision, "name", str(precision)).lower()
    if name in ("highest", "float32", "f32_f32_f32", "f64_f64_f64") or name.endswith(("_x6", "_x9")):
        return "highest"
    return "high" if name in ("high", "bfloat16_3x", "tensorfloat32") or name.endswith("_x3") else "default"


def overlapping(lowering: str) -> Overlapping:
    """Return the function that chooses which collectives a lowering overlaps with einsums."""
    return nothing_overlaps if lowering in ("xla", "blocking") else partial(_overlap, lowering)


def _overlap(lowering: str, routine, inputs, outputs, environment) -> tuple[Overlap, float]:
    """Return the collectives of a routine that overlap with its einsums, and the seconds that this saves.

    If a dimension has size 0, nothing is sent, so nothing overlaps.
    """
    from gspmd.lowerings.looped.choice import plan_overlap  # imported here, so that the other lowerings do not need it

    if 0 in dict(environment.sizes).values():
        return Overlap(), 0.0
    return plan_overlap(routine, inputs, outputs, environment, lowering)
