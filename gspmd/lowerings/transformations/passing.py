"""Primitives that return their operands unchanged, used only for their rules under JAX's transformations."""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from gspmd.jax_internals import set_dce_rule


def passing(name: str) -> Primitive:
    """Return a new primitive that takes any number of arrays and returns them unchanged, and compiles to nothing."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, **_: list(arrays))
    primitive.def_abstract_eval(lambda *arrays, **_: arrays)
    mlir.register_lowering(primitive, lambda _, *arrays, **__: arrays)
    set_dce_rule(primitive, _without_unused)
    return primitive


def _without_unused(used: list[bool], equation: Any) -> tuple[list[bool], Any]:
    """Drop the unused results of the primitive, and the operands of these results.

    Otherwise the results that are used would keep the unused ones alive in `gspmd.trace`.
    """
    if not any(used):
        return used, None
    invars, outvars = ([x for x, each in zip(side, used) if each] for side in (equation.invars, equation.outvars))
    return used, equation.replace(invars=invars, outvars=outvars)
