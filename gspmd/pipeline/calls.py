"""Calls of planned programs inside a shard_map over some mesh axes only: each of a function of its own."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from gspmd.lowerings.program import program_of
from gspmd.tracing.jaxprs import all_equations, changed_inside, inner_jaxprs


def apart(function: Callable, *arrays: Any) -> Any:
    """Call a function whose planned programs become one function each, for every place that they are called from.

    libtpu 0.0.42 leaves a function of about twenty operations as it is where two places call it, and then its
    partitioner ends the process at the shard_map inside, which stands in another's manual axes: "Check failed:
    target.IsManualSubgroup() == sharding().IsManualSubgroup()". What one place calls has become a part of it by then.
    """
    traced, results = jax.make_jaxpr(function, return_shape=True)(*arrays)
    copied = ClosedJaxpr(_apart(traced.jaxpr), traced.consts)
    return jax.tree.unflatten(jax.tree.structure(results), jaxpr_as_fun(copied)(*jax.tree.leaves(arrays)))


def _apart(jaxpr: Jaxpr) -> Jaxpr:
    """The program with a copy of every program that it calls and that is planned, or calls one that is."""
    return jaxpr.replace(eqns=[changed_inside(each, _apart) if _is_planned(each) else each for each in jaxpr.eqns])


def _is_planned(equation: Any) -> bool:
    inside = (each for inner in inner_jaxprs(equation) for each in all_equations(inner))
    return any(program_of(each) for each in (equation, *inside))
