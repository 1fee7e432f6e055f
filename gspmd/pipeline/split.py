"""Split a function in two parts; the first part keeps values, from which the second part computes some of the results.

Zero-bubble schedules split a backward pass in this way. The first part computes the gradient of the input, for which
the previous stage waits; the second part computes gradients of weights, for which no stage waits. Only operations that
depend on weights alone are computed in both parts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from gspmd.annotate.errors import PlanError
from gspmd.jax_internals import without_unused_results
from gspmd.lowerings.scopes import innermost
from gspmd.tracing.jaxprs import all_equations, inner_jaxprs

Tree = Any


class Halves(NamedTuple):
    """The two parts of a function (fixed, moving) -> (early, late) that `split` makes.

    Attributes:
        first: (fixed, moving) -> (early, kept), where `kept` are the values that `rest` needs.
        rest: (fixed, kept) -> late.
        kept: the shapes and shardings of the kept values.
    """

    first: Callable[[Tree, Tree], tuple[Tree, list[jax.Array]]]
    rest: Callable[[Tree, list[jax.Array]], Tree]
    kept: list[jax.ShapeDtypeStruct]


def split(f: Callable[[Tree, Tree], tuple[Tree, Tree]], fixed: Tree, moving: Tree) -> Halves:
    """Split a function into two parts, one for each of its two results.

    An operation that both parts need runs in the first part. If the parts need different results of an operation that
    JAX can split, such as the gradient of an equation, each part computes the results that it needs.

    Args:
        f: (fixed, moving) -> (early, late). The first part computes `early`, and the second part computes `late`.
        fixed: arguments of both parts. Operations that use only these arguments run in both parts.
        moving: arguments of the first part only.

    Returns:
        The two parts.

    Raises:
        PlanError: an operation of `f` has lowering `"xla"` under Explicit axes.

    Example:
        >>> halves = split(lambda w, x: (y := w * x, jax.numpy.sin(y)), 2.0, 3.0)
        >>> early, kept = halves.first(2.0, 3.0)
        >>> float(early), [float(x) for x in kept], round(float(halves.rest(2.0, kept)), 3)
        (6.0, [6.0], -0.279)
    """
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(fixed, moving)
    whole = closed.jaxpr
    # Under lowering 'xla' products are in regions of Auto axes, and cannot run outside of these regions. Only planned
    # programs are checked, since random draws have such regions too.
    ours = [each for each in all_equations(whole) if innermost(str(each.source_info.name_stack))[0]]
    made = [var.aval.sharding.mesh for each in ours for var in each.outvars]
    if jax.sharding.get_abstract_mesh().explicit_axes and any(mesh.auto_axes for mesh in made):
        raise PlanError(
            "cannot split a backward pass: an operation has lowering 'xla'.\n  Use 'blocking', or another schedule."
        )
    early: Any
    late: Any
    early, late = (jax.tree.structure(each) for each in shapes)
    held = len(jax.tree.leaves(fixed))
    results, others = whole.outvars[: early.num_leaves], whole.outvars[early.num_leaves :]

    moved = set(whole.invars[held:])
    for equation in whole.eqns:
        if any(not isinstance(var, Literal) and var in moved for var in equation.invars):
            moved |= set(equation.outvars)
    first = _needed(whole, results, set())
    there = {var for equation in first for var in equation.outvars if var in moved} | set(whole.invars[held:])
    rest = _needed(whole, others, there)
    used = [var for equation in rest for var in equation.invars if not isinstance(var, Literal)]
    kept = list(dict.fromkeys(var for var in (*used, *others) if not isinstance(var, Literal) and var in there))

    run_first = _run(closed, whole.invars, [*results, *kept], first)
    run_rest = _run(closed, [*whole.invars[:held], *kept], others, rest)

    def first_half(fixed: Tree, moving: Tree) -> tuple[Tree, list[jax.Array]]:
        found = run_first(*jax.tree.leaves((fixed, moving)))
        return jax.tree.unflatten(early, found[: early.num_leaves]), found[early.num_leaves :]

    def second_half(fixed: Tree, kept: list[jax.Array]) -> Tree:
        return jax.tree.unflatten(late, run_rest(*jax.tree.leaves(fixed), *kept))

    return Halves(first_half, second_half, [var.aval for var in kept])


def _needed(whole: Jaxpr, results: list[Any], there: set[Any]) -> list[Any]:
    """Return only the operations that are needed to compute `results` from the values in `there`."""
    wanted = {var for var in results if not isinstance(var, Literal)} - there
    found: list[Any] = []
    for equation in reversed(whole.eqns):
        used = [var in wanted for var in equation.outvars]
        if not any(used):
            continue
        if not all(used):
            less = without_unused_results(equation, used)
            # If this saves no operation, as for a gathered operand, all results are computed and kept instead.
            equation = less if _operations(less) < _operations(equation) else equation
        found.append(equation)
        wanted |= {var for var in equation.invars if not isinstance(var, Literal)} - there
    return found[::-1]


def _operations(equation: Any) -> int:
    return sum(1 for inner in inner_jaxprs(equation) for _ in all_equations(inner))


def _run(closed: ClosedJaxpr, inputs: list[Any], results: list[Any], equations: list[Any]) -> Callable[..., list[Any]]:
    names = closed.jaxpr.debug_info.with_unknown_names()
    inner = closed.jaxpr.replace(invars=inputs, outvars=results, eqns=equations, debug_info=names)
    return jaxpr_as_fun(ClosedJaxpr(inner, closed.consts))
