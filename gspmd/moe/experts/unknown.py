"""Marks in the experts' program for a search, while placements and the number of rows to send are unknown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from gspmd.annotate.equation import Equation, Via
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.hardware.dtypes import itemsize
from gspmd.lowerings.blocking.collectives import After
from gspmd.lowerings.blocking.executor import Executor, Pieces
from gspmd.lowerings.call import make_plan
from gspmd.lowerings.marks import marked
from gspmd.lowerings.program import Context
from gspmd.lowerings.unknown import joint_of, lying, made_of
from gspmd.moe.dropless.rows import RowSizes
from gspmd.planner.graph.resharding import move
from gspmd.planner.plan import Plan, spread_over_groups
from gspmd.planner.steps import Step
from gspmd.planner.unknown import Unknown, UnknownMove, UnknownSteps


@dataclass(frozen=True)
class StageMarks:
    """The marks of every move, product and output of a stage; the mark of a move that does nothing is None."""

    moves: tuple[Unknown | None, ...]
    products: tuple[Unknown, ...]
    outputs: tuple[Unknown, ...]


def marking(marks: StageMarks) -> type[Executor]:
    """Return an executor class that adds these marks to the program."""

    class Marking(Executor):
        def move(self, number: int, pieces: Pieces, stop: int | None = None, after: After = ()) -> jax.Array:
            x, mark = super().move(number, pieces, stop, after), marks.moves[number]
            return x if mark is None else marked(x, mark)

        def multiply(self, number: int, *operands: jax.Array) -> jax.Array:
            return marked(super().multiply(number, *operands), marks.products[number])

        def output(self, number: int, values: Pieces) -> jax.Array:
            return marked(super().output(number, values), marks.outputs[number])

    return Marking


def stage_marks(plan: Plan, sizes: RowSizes, via: Via | None, ctx: Context) -> tuple[StageMarks, StageMarks]:
    """Return the marks of an equation of rows and weights, and the marks of its gradient.

    Raises:
        PlanError: the equation has no via, or the gradient of its rows has summands with different specs.
    """
    equation, routine = plan.equation, plan.routine
    operands, results = equation.specs[: len(plan.inputs)], equation.outputs
    if via is None:
        raise PlanError(f"cannot search the placement of '{equation}': it has no via for its rows.")
    specs = spread_over_groups(equation, via.specs, operands)
    met = [Spec(own.dims, tuple(map(spec.axes_of, own.dims))) for spec, own in zip(specs, operands)]
    joints = [joint_of(met[0], weight) for weight in met[1:]]
    lefts = {made_of(joint, operands[0].dims) for joint in joints}
    if len(lefts) > 1:
        raise PlanError(
            f"cannot search the placement of '{equation}': the gradient of its rows has summands with different specs."
        )

    def rows(before: Spec, after: Spec, width: int) -> UnknownSteps:
        return UnknownSteps(rows_moved, (before, after, sizes, width, ctx), "rows")

    def weight(number: int, before: Spec, after: Spec) -> UnknownMove:
        shape = tuple(dict(sizes.sizes)[dim] for dim in before.dims)
        return UnknownMove((before,), after, shape, plan.inputs[number].itemsize)

    def product(name: str) -> UnknownSteps:
        asked = tuple(met), tuple(spec.dims for spec in results), plan.dtypes, plan.outputs[0].dtype, sizes, ctx
        return UnknownSteps(multiplied if name.startswith("product") else multiplied_back, asked, name, is_product=True)

    moves = [
        weight(m.source, operands[m.source], met[m.source])
        if m.source
        else rows(operands[0], met[0], plan.inputs[0].itemsize)
        for m in routine.moves
    ]
    forward = StageMarks(
        tuple(moves),
        tuple(product(f"product {n}") for n in range(len(routine.products))),
        tuple(
            rows(made_of(joint, result.dims), result, tensor.itemsize)
            for joint, result, tensor in zip(joints, results, plan.outputs)
        ),
    )
    cotangents = {
        n: rows(result.cotangent, lying(joint, result.dims), tensor.itemsize)
        for n, (joint, result, tensor) in enumerate(zip(joints, results, plan.outputs))
    }
    backward = StageMarks(
        tuple(cotangents.get(m.source) for m in plan.backward.moves),
        tuple(product(f"backward {n}") for n in range(len(plan.backward.products))),
        (
            rows(lefts.pop(), operands[0].cotangent, plan.inputs[0].itemsize),
            *(weight(n, made_of(joint, operands[n].dims), operands[n].cotangent) for n, joint in enumerate(joints, 1)),
        ),
    )
    return forward, backward


# -- steps when all placements are known -------------------------------------------------------------------------------


def rows_moved(before: Spec, after: Spec, sizes: RowSizes, width: int, ctx: Context) -> dict[str, tuple[Step, ...]]:
    """Return the steps that move rows after the rows have arrived at their experts; no row may leave its device.

    Raises:
        PlanError: the rows would leave their device.
    """
    if any(before.axes_of(dim) != after.axes_of(dim) for dim in "GX") or before.axes_of("C") or after.axes_of("C"):
        raise PlanError(f"rows at '{before}' would have to leave their device for '{after}'.")
    return {"rows": move(before, after, sizes.sent(after, ctx.mesh), ctx.mesh, width, ctx.chip)}


def rows_sent(dispatched: Spec, there: Spec, sizes: RowSizes, dtype: str, ctx: Context) -> dict[str, tuple[Step, ...]]:
    """Return the steps that send rows to their experts, send the outputs back, and send the counts of rows.

    Raises:
        PlanError: C is sharded, which would divide the rows of one expert between devices.
    """
    if there.axes_of("C"):
        raise PlanError(f"'{there}' shards C, and the rows of one expert cannot be cut.")
    buffers, width = sizes.sent(there, ctx.mesh), itemsize(dtype)
    before, after = (Spec(tuple("GXN"), (*map(spec.axes_of, "GX"), ())) for spec in (dispatched, there))
    counted = dict(sizes.sizes) | {"N": 1}
    return {
        "slots": move(dispatched, there, buffers, ctx.mesh, width, ctx.chip),
        "answers": move(there, dispatched, buffers, ctx.mesh, width, ctx.chip),
        "counts": move(before, after, counted, ctx.mesh, itemsize("int32"), ctx.chip),
    }


def multiplied(*asked: Any) -> dict[str, tuple[Step, ...]]:
    """Return the local products of an equation whose operands and results do not move."""
    plan = _plan_of(*asked)
    return {f"product {n}": (each.einsum,) for n, each in enumerate(plan.routine.products)}


def multiplied_back(*asked: Any) -> dict[str, tuple[Step, ...]]:
    """Return the local products of the gradient of an equation whose operands and results do not move."""
    plan = _plan_of(*asked)
    return {f"backward {n}": (each.einsum,) for n, each in enumerate(plan.backward.products)}


def _plan_of(
    met: tuple[Spec, ...],
    results: Sequence[tuple[str, ...]],
    dtypes: tuple[str, ...],
    dtype: str,
    sizes: RowSizes,
    ctx: Context,
) -> Plan:
    outputs = tuple(lying(joint_of(met[0], weight), dims) for weight, dims in zip(met[1:], results))
    group = len(outputs) > 1
    equation = Equation.product(met[0], met[1:] if group else met[1], outputs if group else outputs[0])
    via, whole = Via.of(met[0], met[1:] if group else met[1]), tuple(sizes.multiplied(met[0], ctx.mesh).items())
    return make_plan(equation, whole, ctx.axes, dtypes, ctx.chip, "blocking", via, None, dtype)
