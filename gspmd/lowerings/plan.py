"""The plan of an equation under a lowering."""

from functools import lru_cache, partial

from gspmd.annotate.equation import Equation, Via
from gspmd.hardware.chips import Chip
from gspmd.planner.overlap import Overlap
from gspmd.planner.plan import Overlapping, Plan, nothing_overlaps, plan_equation


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
) -> Plan:
    """`plan` with everything resolved and hashable; the last two are `gspmd.einsum`'s."""
    return plan_equation(
        equation, sizes, mesh, dtypes, chip, lowering, overlapping(lowering), via, wire_dtype, result_dtype
    )


def overlapping(lowering: str) -> Overlapping:
    """Return what a lowering overlaps with the einsums."""
    return nothing_overlaps if lowering in ("xla", "blocking") else partial(_overlap, lowering)


def _overlap(lowering: str, routine, inputs, outputs, environment) -> tuple[Overlap, float]:
    """Return the loops; where a dimension is empty there is nothing to hide."""
    from gspmd.lowerings.looped.choice import plan_overlap  # here alone, so that the other lowerings need none of it

    if 0 in dict(environment.sizes).values():
        return Overlap(), 0.0
    return plan_overlap(routine, inputs, outputs, environment, lowering)
