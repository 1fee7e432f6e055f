"""The program of a call: the chosen lowering makes the forward and the backward pass of one JAX function.

Only the module of the chosen lowering is imported.
"""

from collections.abc import Callable
from functools import lru_cache, partial

from gspmd.annotate.errors import PlanError
from gspmd.lowerings.call import Call, Passes
from gspmd.lowerings.partitioner import open_in_shard_map, open_under_explicit
from gspmd.lowerings.program import partial_under_auto
from gspmd.lowerings.transformations.gradient import with_gradient
from gspmd.planner.unknown import is_unknown


@lru_cache(maxsize=4096)
def program_of_call(call: Call) -> Callable:
    """Return the function that runs a call; it takes the operands as separate arguments and returns a tuple of results.

    The function is cached, so that equal calls share one jitted function.

    Raises:
        SpecError: the mesh axes do not divide the sizes.
        PlanError: the equation has no plan. Or a spec leaves a dimension to the compiler, or is a partial sum, where
            this is not allowed.
    """
    equation, ctx = call.equation, call.context
    equation.check(dict(call.sizes), ctx.mesh)
    for spec in equation.specs:
        if spec.is_open and (ctx.in_shard_map or ctx.explicit):
            raise PlanError((open_in_shard_map if ctx.in_shard_map else open_under_explicit)(spec))
        if not ctx.explicit and (spec.partial or spec.reduced):
            raise PlanError(partial_under_auto(spec))
    forward, backward = lower(call)
    if backward is None:
        return forward
    differentiated = with_gradient(
        lambda _, *arrays: forward(*arrays), lambda _, residuals, cotangents: backward(residuals, cotangents)
    )
    return partial(differentiated, str(equation))


def lower(call: Call) -> Passes:
    """Return the passes of a call, made by the lowering of the call.

    The module of every lowering has a function `lower` with the same argument and result.
    """
    name = call.context.lowering
    if is_unknown(call.context.mesh):
        from gspmd.lowerings.unknown import lower
    elif name == "xla":
        from gspmd.lowerings.xla.lowering import lower
    elif name == "blocking":
        from gspmd.lowerings.blocking.lowering import lower
    else:
        from gspmd.lowerings.looped.lowering import lower
    return lower(call)
