"""Keep an equation whose result is a partial sum from being hoisted out of a loop.

When a loop is differentiated, JAX 0.10.2 hoists what is loop-invariant: it is computed before the loop and handed in
as a constant. A partial sum that enters a loop so is counted wrongly (docs/compiler.md), so its equation has to stay
inside.

JAX finds what to hoist by partial evaluation: it evaluates the loop's body with the constants known and everything else
unknown, and hoists what is known. So an operand of such an equation passes through the primitive below, whose result is
unknown. But JAX also separates primals from tangents by partial evaluation, and there the same result has to be known.
The primitive itself says which of the two is meant, since JAX caches the jaxprs of called functions whoever calls them:
its JVP rule writes `known=True`, and the partial evaluation of the JVP takes that off again.
"""

import sys
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

NEVER_HOISTED = "gspmd_anew"


def never_hoisted(x: jax.Array) -> jax.Array:
    """The same array; what is computed from it stays in its loop, and is computed at every step."""
    return _never_hoisted.bind(x, known=False)


_never_hoisted = Primitive(NEVER_HOISTED)
_never_hoisted.def_impl(lambda x, *, known: x)
_never_hoisted.def_abstract_eval(lambda x, *, known: x)
mlir.register_lowering(_never_hoisted, lambda _, x, *, known: [x])
ad.primitive_jvps[_never_hoisted] = lambda primals, tangents, *, known: (
    _never_hoisted.bind(*primals, known=True),
    tangents[0],
)
batching.primitive_batchers[_never_hoisted] = lambda xs, dims, *, known: (
    _never_hoisted.bind(*xs, known=known),
    dims[0],
)


def _evaluated(trace: Any, x: Any, *, known: bool) -> Any:
    """The rule of partial evaluation; the trace is JAX's, and so is what it makes of a value that is not known yet."""
    if known and x.is_known():
        return trace.new_const(never_hoisted(x.pval.get_known()))
    return trace.default_process_primitive(_never_hoisted, [trace.instantiate_const(x)], {"known": known})


def _evaluated_in_checkpoint(saveable: Any, unknown: list[bool], there: list[bool], equation: Any) -> tuple:
    """The rule where partial evaluation goes through a `jax.checkpoint`, or a loop in one.

    Returns:
        What is computed now, if it is known; what is computed again; whether the result is unknown; whether it is
        there for what is computed again; what has to be kept for that.
    """
    waits = unknown[0] or (not equation.params["known"] and _is_all_known())
    now = None if waits else equation.replace(params={"known": False})
    return now, equation, [waits], [True], [] if there[0] else list(equation.invars)


def _is_all_known() -> bool:
    """Whether JAX evaluates a `jax.checkpoint` that has no unknown operand: one that it would take out of a loop.

    Only the function of JAX that asks knows that, and it stands further up the stack.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "remat_partial_eval" and frame.f_globals["__name__"] == "jax._src.ad_checkpoint":
            return not any(frame.f_locals["in_unknowns"])
        frame = frame.f_back
    return False


pe.custom_partial_eval_rules[_never_hoisted] = _evaluated
pe.partial_eval_jaxpr_custom_rules[_never_hoisted] = _evaluated_in_checkpoint  # type: ignore[assignment]
