"""The time for which a plan keeps each resource of a device busy: the matrix unit, main memory and the links."""

from math import prod
from typing import NamedTuple

from gspmd.hardware.dtypes import itemsize
from gspmd.planner.plan import Plan
from gspmd.planner.spans import local_shape


class Roofline(NamedTuple):
    """For each resource of a device, the seconds that a plan would take if this resource were the only limit.

    The resource with the most seconds is the bottleneck.

    Attributes:
        compute: the seconds for the FLOPs of all local einsums, at the chip's peak for their dtypes.
        memory: the seconds for reading the operands and writing the results of local einsums once, at the bandwidth of
            main memory.
        links: the seconds for the collectives of the plan, one after another.
    """

    compute: float
    memory: float
    links: float

    @property
    def bound(self) -> str:
        """The resource that takes the longest: `"compute"`, `"memory"` or `"links"`."""
        return max(self._fields, key=lambda name: getattr(self, name))


def roofline(plan: Plan) -> Roofline:
    """Return the roofline of a plan.

    Args:
        plan: a plan, or the plan of a gradient.

    Example:
        >>> import gspmd
        >>> plan = gspmd.plan("BE, EF -> BF", {"B": 1024, "E": 4096, "F": 4096}, {"x": 1}, chip="tpu-v4")
        >>> [f"{seconds * 1e6:.1f} µs" for seconds in roofline(plan)], roofline(plan).bound
        (['124.9 µs', '41.9 µs', '0.0 µs'], 'compute')

    Source: Williams, Waterman and Patterson 2009, *Roofline*. The links are a third roof, as in the scaling book,
    part 1.
    """
    routine, chip, precision = plan.routine, plan.environment.chip, plan.precision
    sizes, mesh = dict(plan.environment.sizes), dict(plan.environment.mesh)
    held = lambda spec, dtype: itemsize(dtype) * prod(local_shape(spec, sizes, mesh).values())  # noqa: E731
    made = {product: plan.outputs[n].dtype for n, output in enumerate(routine.outputs) for product in output.products}
    compute = memory = 0.0
    for number, product in enumerate(routine.products):
        if product.passes_through:
            continue
        dtypes = [plan.inputs[routine.moves[move].source].dtype for move in product.operands]
        compute += product.einsum.flops / chip.flops(chip.arithmetic(max(dtypes, key=itemsize), precision))
        touched = [*zip(product.einsum.sources, dtypes), (product.einsum.after, made[number])]
        memory += sum(held(spec, dtype) for spec, dtype in touched) / chip.hbm_bandwidth
    return Roofline(compute, memory, sum(step.seconds for step in routine.steps if step.is_collective))
