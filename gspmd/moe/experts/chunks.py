"""The number of chunks into which slots are cut, so that all-to-alls of one chunk overlap with products of another."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import jax

from gspmd.hardware.chips import chip_of_device
from gspmd.lowerings.call import make_plan
from gspmd.lowerings.program import Context
from gspmd.moe.experts.work import ExpertWork, products
from gspmd.planner.plan import Plan
from gspmd.planner.spans import cut
from gspmd.planner.steps import Environment, Step

CHUNKS = (1, 2, 4, 8)
"""The numbers of chunks to choose from. The smallest allowed number is used for a device that chips.toml does not list.
"""


def chunks_of(work: ExpertWork, ctx: Context) -> tuple[int, ...]:
    """Choose the sizes of the chunks into which C is cut.

    There is a single chunk in four cases: under lowerings `blocking` and `xla`; if no slot leaves its device; for
    dropless rows with dropout; and if C is too small to be cut. Otherwise the number of chunks, n, minimizes the
    seconds

        2 a + max(n m, 2 (n - 1) a + m)

    plus the seconds to gather the weights first. Here a is the time of one all-to-all of a chunk, and m is the time of
    the products of a chunk. Links and matrix unit work at the same time, except during the first and the last
    all-to-all. Smaller chunks mean more hops to wait for, and all weights are read more often. Lowering `looped` uses
    at least two chunks. Lowering `auto` may use a single chunk; its equations are then looped if that is cheaper.

    Args:
        work: the work of the experts; `work.chunks` is ignored.
        ctx: the context of the call, with the chip and the lowering.

    Returns:
        The sizes of the chunks, which add up to C. They are as equal as possible, and each is a multiple of the number
        of devices over which C is sharded or, for dropless rows, of the number of rows of one token.
    """
    capacity, kind = work.capacity, ctx.lowering.partition(":")[0]
    # Dropout identifies a row by its position in the queue of its expert, over all chunks, so rows cannot be cut.
    tied = work.rows is not None and work.dropout is not None
    if kind not in ("looped", "auto") or tied or not work.crosses(ctx):
        return (capacity,)
    unit = _unit(work, ctx)
    possible = [n for n in CHUNKS if n <= capacity // unit and (n > 1 or kind == "auto")]
    if not possible:
        return (capacity,)
    number = min(possible, key=lambda n: _seconds(work, ctx, n, unit)) if _is_known() else possible[0]
    return tuple(size * unit for _, size in cut(capacity // unit, number))


def _unit(work: ExpertWork, ctx: Context) -> int:
    """Return the number of which every chunk size is a multiple.

    For dropless rows, this is the largest number of rows that a token sends to one shard of the experts. For slots, it
    is the largest number of devices over which any spec of the slots or of the hidden activations shards C.
    """
    if work.rows is not None:
        return min(work.rows.choices, dict(work.sizes)["X"] // work.rows.shards)
    specs = [work.there, work.hidden]
    for each in products(work, ctx):
        specs += [product.einsum.before for product in each.plan.routine.products]
    return max(prod(ctx.mesh[axis] for axis in spec.axes_of("C")) for spec in specs)


def _is_known() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and chip_of_device(device.device_kind) is not None


def _seconds(work: ExpertWork, ctx: Context, number: int, unit: int) -> float:
    """Return the seconds of a forward pass in `number` chunks.

    With a single chunk, collectives overlap with products only within each equation.
    """
    chunk = replace(work, sizes=(*work.sizes, ("C", -(-work.capacity // (number * unit)) * unit)))
    there, back = chunk.there_and_back(ctx, chunk.capacity)
    exchange = sum(step.seconds for step in (*there, *back)) / 2
    plans = [each.plan for each in products(chunk, ctx)]
    if number == 1:
        return 2 * exchange + sum(_looped(plan, ctx).seconds for plan in plans)
    gathered = sum(step.seconds for plan in plans for step in _moves(plan, of_weights=True))
    moved = sum(step.seconds for plan in plans for step in _moves(plan, of_weights=False))
    multiplied = moved + sum(map(_multiplied, plans))
    return gathered + 2 * exchange + max(number * multiplied, 2 * (number - 1) * exchange + multiplied)


def _multiplied(plan: Plan) -> float:
    """Return the seconds of a chunk's products and of the steps that follow the products.

    The operands of a product are read while the previous product runs, as in a loop. If products were timed one by one,
    4 chunks would seem best for a layer of 32 experts on 16 TPU v5e. But the layer takes 12.7 ms in 4 chunks and
    11.5 ms in 8.
    """
    from gspmd.lowerings.looped.cost import Costs  # imported here, so that the other lowerings do not need it

    environment = Environment.of(tuple(plan.sizes.items()), tuple(plan.mesh.items()), plan.chip)
    costs = Costs(plan.routine, plan.inputs, plan.outputs, environment)
    found = plan.routine.products
    return sum(costs.product(each, {}) + sum(step.seconds for step in each.steps) for each in found)


def _looped(plan: Plan, ctx: Context) -> Plan:
    """Plan the equation of a plan again, under the lowering in force."""
    sizes = tuple(plan.sizes.items())
    return make_plan(plan.equation, sizes, ctx.axes, plan.dtypes, plan.chip, ctx.lowering, plan.pinned)


def _moves(plan: Plan, *, of_weights: bool) -> Iterator[Step]:
    """Yield the steps that move weights to their products or, if `of_weights` is False, the steps that move slots."""
    return (step for move in plan.routine.moves if bool(move.source) == of_weights for step in move.steps)
