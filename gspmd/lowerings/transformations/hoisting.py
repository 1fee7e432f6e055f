"""A primitive that keeps an equation whose result is a partial sum from being hoisted out of a loop.

When a loop is differentiated, JAX 0.10.2 hoists loop-invariant operations, which means that they are computed before
the loop, and that their results are passed in as constants. A partial sum that enters a loop as a constant is reduced
too early (docs/compiler.md), so its equation must stay inside the loop.

JAX hoists by partial evaluation: it evaluates the loop's body with only the constants known, and hoists the results
that are then known. So the operands of the equation pass through the primitive below, whose results count as unknown.
But JAX also separates primals from tangents by partial evaluation, and there the same results must be known. The
parameter `known` of the primitive distinguishes these two cases. The primitive's JVP rule sets `known=True`, and the
partial evaluation of the JVP resets it. A global flag would not work, because all callers of a function share the
function's cached jaxpr.

One unknown operand would be enough to prevent hoisting. But all operands pass through the primitive together, because
JAX calls a JVP rule only if one of the primitive's operands has a tangent. If only operands outside the primitive had
tangents, `known` would stay False, and values without tangents would be treated as tangents, which JAX cannot
transpose.
"""

from typing import Any

import jax
from jax.interpreters import ad, batching

from gspmd.jax_internals import is_hoisted_from_checkpoint, set_partial_evaluation
from gspmd.lowerings.transformations.passing import passing

NEVER_HOISTED = "gspmd_anew"


def never_hoisted(*arrays: jax.Array) -> list[jax.Array]:
    """Return the arrays unchanged; operations on the results stay inside their loop, and run in every iteration."""
    return _never_hoisted.bind(*arrays, known=False)


_never_hoisted = passing(NEVER_HOISTED)
ad.primitive_jvps[_never_hoisted] = lambda primals, tangents, *, known: (
    _never_hoisted.bind(*primals, known=True),
    tangents,
)
batching.primitive_batchers[_never_hoisted] = lambda xs, dims, *, known: (_never_hoisted.bind(*xs, known=known), dims)


def _evaluated(trace: Any, *xs: Any, known: bool) -> list[Any]:
    """Apply the primitive's rule for partial evaluation to the tracers `xs` of JAX's `trace`."""
    if known and all(x.is_known() for x in xs):
        return [trace.new_const(value) for value in never_hoisted(*(x.pval.get_known() for x in xs))]
    return trace.default_process_primitive(_never_hoisted, [*map(trace.instantiate_const, xs)], {"known": known})


def _evaluated_in_checkpoint(saveable: Any, unknown: list[bool], there: list[bool], equation: Any) -> tuple:
    """Apply the primitive's rule for partial evaluation of a `jax.checkpoint`, or of a loop inside a `jax.checkpoint`.

    Returns:
        A tuple of five: the equation that is computed now, or None if not all operands are known; the equation that is
        recomputed; for each result, whether it is unknown; for each result, whether the recomputed equation has it; and
        the values to be kept for the recomputation.
    """
    hoists = not equation.params["known"] and is_hoisted_from_checkpoint()
    waits, count = hoists or any(unknown), len(unknown)
    now = None if waits else equation.replace(params={"known": False})
    kept = [x for x, each in zip(equation.invars, there) if not each]
    return now, equation, [waits] * count, [True] * count, kept


set_partial_evaluation(_never_hoisted, _evaluated, _evaluated_in_checkpoint)
