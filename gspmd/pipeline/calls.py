"""Give each call of a planned program a function of its own, inside a shard_map over some of the mesh axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from gspmd.lowerings.program import program_of
from gspmd.tracing.jaxprs import all_equations, changed_inside, inner_jaxprs


def apart(function: Callable, *arrays: Any) -> Any:
    """Call a function, in which each call of a planned program gets its own copy of the program.

    libtpu 0.0.42 does not inline a function of more than about twenty operations that is called from two places. If
    such a function contains a shard_map inside the manual axes of another shard_map, the partitioner ends the process:
    "Check failed: target.IsManualSubgroup() == sharding().IsManualSubgroup()". A function with a single caller is
    inlined before the partitioner sees it.

    Args:
        function: the function to call.
        *arrays: the arguments, trees of arrays.

    Returns:
        The results of the function.
    """
    traced, results = jax.make_jaxpr(function, return_shape=True)(*arrays)
    copied = ClosedJaxpr(_apart(traced.jaxpr), traced.consts)
    return jax.tree.unflatten(jax.tree.structure(results), jaxpr_as_fun(copied)(*jax.tree.leaves(arrays)))


def _apart(jaxpr: Jaxpr) -> Jaxpr:
    """Copy every inner program that is planned or contains a planned program."""
    return jaxpr.replace(eqns=[changed_inside(each, _apart) if _is_planned(each) else each for each in jaxpr.eqns])


def _is_planned(equation: Any) -> bool:
    inside = (each for inner in inner_jaxprs(equation) for each in all_equations(inner))
    return any(program_of(each) for each in (equation, *inside))
