"""The times at which a plan's steps use the links and the matrix unit of a device, with the overlap of the lowering."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gspmd.planner.plan import Plan
from gspmd.planner.spans import ring_gather, ring_scatter
from gspmd.planner.steps import Step


class Bar(NamedTuple):
    """A bar of the timetable, which is one step with its start and its duration.

    Attributes:
        number: the step's number in `plan.steps`.
        step: the step.
        start: the time at which the bar starts.
        seconds: the duration of the step. If the step runs in a loop, this is its part of the loop's time.
        looped: whether the step runs in a loop, which has a collective and an einsum.
    """

    number: int
    step: Step
    start: float
    seconds: float
    looped: bool

    @property
    def lane(self) -> int:
        """The row of the timetable: 0 for the links, 1 for the matrix unit."""
        return int(not self.step.is_collective)


def bars(plan: Plan) -> list[Bar]:
    """Return the timetable of a plan: a bar for each step.

    Steps outside loops run one after another. All loops are drawn as one block, after the moves outside loops. The
    block has the length that the plan predicts for the loops. Gathers begin with the block, reduce-scatters end with
    the block, and einsums fill the block.

    Args:
        plan: a `gspmd.Plan`.
    """
    looped = set(_looped(plan))
    inside = [(number, step) for number, step in enumerate(plan.steps) if number in looped]
    block = sum(step.seconds for _, step in inside) - plan.hidden_seconds
    moves = sum(len(move.steps) for move in plan.routine.moves)
    alone = [(number, step) for number, step in enumerate(plan.steps) if number not in looped]
    drawn, now = [], 0.0
    for number, step in (each for each in alone if each[0] < moves):
        drawn.append(Bar(number, step, now, step.seconds, False))
        now += step.seconds
    drawn += _together(inside, now, block)
    now += block
    for number, step in (each for each in alone if each[0] >= moves):
        drawn.append(Bar(number, step, now, step.seconds, False))
        now += step.seconds
    return drawn


def _together(inside: Sequence[tuple[int, Step]], start: float, block: float) -> Iterator[Bar]:
    """Yield the bars of all steps in loops, as one block that takes `block` seconds from `start` on."""
    sent = sum(step.seconds for _, step in inside if step.is_collective)
    worked = sum(step.seconds for _, step in inside if not step.is_collective)
    scale = min(1.0, block / sent) if sent else 1.0
    scatters = scale * sum(step.seconds for _, step in inside if step.kind == "reduce-scatter")
    out, last, work = start, start + block - scatters, start
    for number, step in inside:
        if not step.is_collective:
            yield Bar(number, step, work, block * step.seconds / worked, True)
            work += block * step.seconds / worked
        elif step.kind == "reduce-scatter":
            yield Bar(number, step, last, scale * step.seconds, True)
            last += scale * step.seconds
        else:
            yield Bar(number, step, out, scale * step.seconds, True)
            out += scale * step.seconds


def _looped(plan: Plan) -> Iterator[int]:
    """Yield the numbers of the steps that run in loops: collectives, and the einsums with which these overlap."""
    routine, loops, number = plan.routine, plan.loops, 0
    # Rings without axes run before the einsum, unless stripes of the einsum hide them.
    gathers = {at for at, ring in loops.gathers.items() if ring.axes or loops.stripes}
    for at, move in enumerate(routine.moves):
        span = len(ring_gather(move).steps) if at in gathers else 0
        yield from range(number + len(move.steps) - span, number + len(move.steps))
        number += len(move.steps)
    scattered = {p: at for at in loops.scatters for p in routine.outputs[at].products}
    for at, product in enumerate(routine.products):
        if not product.passes_through:
            if at in scattered or set(product.operands) & gathers:
                yield number
            number += 1
        left = len(ring_scatter(routine, scattered[at]).steps) if at in scattered else 0
        yield from range(number, number + min(left, len(product.steps)))
        number += len(product.steps)
    for at, output in enumerate(routine.outputs):
        alone = len(output.products) == 1
        span = len(ring_scatter(routine, at).steps) if at in loops.scatters else 0
        taken = min(span, len(routine.products[output.products[0]].steps)) if alone else 0
        yield from range(number, number + span - taken)
        number += len(output.steps)
