"""Lowering `looped`: a plan whose gathers and reduce-scatters run inside the einsums beside them."""

from gspmd.lowerings.blocking.lowering import passes
from gspmd.lowerings.call import Call, Passes
from gspmd.lowerings.looped.executor import LoopedExecutor


def lower(call: Call) -> Passes:
    """Run the steps of a plan, those that it overlaps chunk by chunk."""
    plan = call.plan

    def executor(routine, inputs, outputs, overlap):
        return LoopedExecutor(routine, inputs, outputs, plan.sizes, plan.mesh, call.precision, overlap)

    return passes(call, executor)
