"""Lowering `blocking`: a plan's steps run in one shard_map, and the steps of its gradient run in another."""

from collections.abc import Callable
from functools import cache

from gspmd.lowerings.blocking.executor import Executor
from gspmd.lowerings.call import Call, Passes
from gspmd.lowerings.program import run


def lower(call: Call) -> Passes:
    """Return the passes that run the steps of a plan one after another."""
    plan = call.plan

    def executor(routine, inputs, outputs, _):
        return Executor(routine, inputs, outputs, plan.sizes, plan.mesh, precision=call.precision)

    return passes(call, executor)


def passes(call: Call, executor: Callable) -> Passes:
    """Return the forward and the backward pass of a plan, which run its routines by a given executor.

    An operand that is moved is kept for the backward pass as it is after the move, so that it is not moved again. But
    if a ring gathers the operand, the shard with which the ring begins is kept. Any other operand is kept as it was
    given.

    Args:
        call: the call whose plan is run.
        executor: a function (routine, inputs, outputs, overlap) -> executor. The executor is a function of local
            arrays, such as an `Executor`.
    """
    plan, ctx, specs = call.plan, call.context, call.operands
    equation, title, moves = plan.equation, str(plan.equation), plan.routine.moves
    moved = [n for n, (move, spec) in enumerate(zip(moves, plan.kept)) if spec != plan.inputs[move.source].spec]
    run_forward = executor(plan.routine, plan.inputs, plan.outputs, plan.loops)

    @cache  # the gradient is planned only when it is needed
    def run_backward():
        residuals = [plan.inputs[move.source] for move in moves]
        return executor(plan.backward, [*plan.outputs, *residuals], plan.inputs, plan.backward_loops)

    def forward_body(*pieces):
        results, kept = run_forward(*pieces)
        return tuple(results), tuple(kept[number] for number in moved)

    def backward_body(*pieces):
        return tuple(run_backward()(*pieces)[0])

    kept_specs = tuple(plan.kept[number] for number in moved)

    def forward(*arrays):
        outs = (equation.outputs, kept_specs)
        what = ctx, title, plan.steps, forward_body, specs, outs
        results, kept = run(*what, *arrays, hidden_seconds=plan.hidden_seconds)
        kept = dict(zip(moved, kept))
        return results, tuple(kept.get(number, arrays[move.source]) for number, move in enumerate(moves))

    def backward(residuals, cotangents):
        held = [plan.kept[n] if n in moved else specs[move.source] for n, move in enumerate(moves)]
        ins = [*(spec.cotangent for spec in equation.outputs), *held]
        outs = tuple(spec.cotangent for spec in specs)
        what = ctx, f"gradient of {title}", plan.backward.steps, backward_body, ins, outs
        return run(*what, *cotangents, *residuals, hidden_seconds=plan.backward_overlap[1])

    if not any(spec.partial for spec in (*specs, *kept_specs)):
        return Passes(forward, backward)
    from gspmd.lowerings.transformations.partial_sums import storable

    return Passes(*storable(forward, backward))
