"""An operand that JAX may not take for the same at every step of a loop, so that the loop computes with it anew.

When a loop is differentiated, JAX 0.10.2 computes before the loop what no step changes, and hands it in as a constant.
A partial sum that enters so is counted wrongly (docs/compiler.md), so an equation that leaves one has to stay inside.

What JAX takes out it finds by partial evaluation: it evaluates the body with the loop's constants known and everything
else unknown, and takes out what is known. So an operand of such an equation passes through an operation of ours whose
result is unknown. By partial evaluation JAX also parts what is differentiated from its tangents, and there the same
result has to be known. The operation says itself which of the two is meant, for JAX keeps what it finds of a called
program, whoever called it: differentiation writes it as `known`, and parting takes that off again.
"""

import sys
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

ANEW = "gspmd_anew"


def anew(x: jax.Array) -> jax.Array:
    """The same array; what is computed from it stays in the loop in which it stands, and is computed at every step."""
    return _anew.bind(x, known=False)


_anew = Primitive(ANEW)
_anew.def_impl(lambda x, *, known: x)
_anew.def_abstract_eval(lambda x, *, known: x)
mlir.register_lowering(_anew, lambda _, x, *, known: [x])
ad.primitive_jvps[_anew] = lambda primals, tangents, *, known: (_anew.bind(*primals, known=True), tangents[0])
batching.primitive_batchers[_anew] = lambda xs, dims, *, known: (_anew.bind(*xs, known=known), dims[0])


def _evaluated(trace: Any, x: Any, *, known: bool) -> Any:
    """The rule of partial evaluation; the trace is JAX's, and so is what it makes of a value that is not known yet."""
    if known and x.is_known():
        return trace.new_const(anew(x.pval.get_known()))
    return trace.default_process_primitive(_anew, [trace.instantiate_const(x)], {"known": known})


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


pe.custom_partial_eval_rules[_anew] = _evaluated
pe.partial_eval_jaxpr_custom_rules[_anew] = _evaluated_in_checkpoint
