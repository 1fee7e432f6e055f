"""How many chunks the slots of a layer are cut into: the all-to-alls of one hide behind the products of the others."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import jax

from gspmd.hardware.chips import chip_of_device
from gspmd.lowerings.plan import make_plan
from gspmd.lowerings.program import Context
from gspmd.moe.experts.work import Work, products
from gspmd.planner.overlap import cut
from gspmd.planner.plan import Plan
from gspmd.planner.steps import Step

CHUNKS = (1, 2, 4, 8)
"""What is tried; on devices that chips.toml does not list, such as host devices, `looped` takes the first but one."""


def chunks_of(work: Work, ctx: Context) -> tuple[int, ...]:
    """The sizes of the chunks that C is cut into.

    One chunk where nothing crosses, and under `blocking` and `xla`. Else the number is the cheapest, the two ways of
    a chunk being a and its products m seconds, of n:

        2 a + max(n m, 2 (n - 1) a + m)

    since links and matrix unit work side by side but for the first way in and the last way out; before that all weights
    are gathered that have to be. Smaller chunks wait for more hops, and read all weights again. `looped` takes no less
    than two; `auto` may take one, whose equations are then looped where that is cheaper.

    Args:
        work: what is cut; its own chunks do not count.
        ctx: chip and lowering.

    Returns:
        Sizes that add up to C, as even as the axes that shard C while it is with the experts allow.
    """
    capacity, kind = work.capacity, ctx.lowering.partition(":")[0]
    tied = work.rows is not None and work.dropout is not None  # a row is known by its place in its expert's whole queue
    if kind not in ("looped", "auto") or tied or not work.crosses(ctx):
        return (capacity,)
    unit = _unit(work, ctx)
    possible = [n for n in CHUNKS if n <= capacity // unit and (n > 1 or kind == "auto")]
    if not possible:
        return (capacity,)
    number = min(possible, key=lambda n: _seconds(work, ctx, n, unit)) if _is_known() else possible[0]
    return tuple(size * unit for _, size in cut(capacity // unit, number))


def _unit(work: Work, ctx: Context) -> int:
    """What sizes of chunks are multiples of: the rows of a token, or the devices that share C out on its way."""
    if work.rows is not None:
        return min(work.rows.choices, dict(work.sizes)["X"] // work.rows.shards)
    specs = [work.there, work.hidden]
    for each in products(work, ctx):
        specs += [found.einsum.before for found in each.plan.routine.products]
    return max(prod(ctx.mesh[axis] for axis in spec.axes_of("C")) for spec in specs)


def _is_known() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and chip_of_device(device.device_kind) is not None


def _seconds(work: Work, ctx: Context, number: int, unit: int) -> float:
    """Of the value, in so many chunks; whole, the equations hide what they can by themselves."""
    chunk = replace(work, sizes=(*work.sizes, ("C", -(-work.capacity // (number * unit)) * unit)))
    there, back = chunk.there_and_back(ctx, chunk.capacity)
    way = sum(step.seconds for step in (*there, *back)) / 2
    plans = [each.plan for each in products(chunk, ctx)]
    if number == 1:
        return 2 * way + sum(_looped(plan, ctx).seconds for plan in plans)
    gathered = sum(step.seconds for plan in plans for step in _moves(plan, of_weights=True))
    steps = (step for plan in plans for found in plan.routine.products for step in found.all_steps)
    moved = (step for plan in plans for step in _moves(plan, of_weights=False))
    multiplied = sum(step.seconds for step in (*moved, *steps))
    return gathered + 2 * way + max(number * multiplied, 2 * (number - 1) * way + multiplied)


def _looped(plan: Plan, ctx: Context) -> Plan:
    """The same equation in the lowering in force."""
    sizes = tuple(plan.sizes.items())
    return make_plan(plan.equation, sizes, ctx.axes, plan.dtypes, plan.chip, ctx.lowering, plan.pinned)


def _moves(plan: Plan, *, of_weights: bool) -> Iterator[Step]:
    """What brings weights, or slots, to their products."""
    return (step for found in plan.routine.moves if bool(found.source) == of_weights for step in found.steps)
