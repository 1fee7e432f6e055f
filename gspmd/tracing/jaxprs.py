"""Jaxprs: the programs that an equation calls, dead code, and what a loop does with its operands."""

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import partial_eval


def inner_jaxprs(equation: Any) -> Iterator[Jaxpr]:
    """The programs that an equation calls: bodies of loops, branches, jitted functions, ..."""
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if isinstance(inner, Jaxpr):
                yield inner


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a program and of the programs that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner)


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """The program less what none of its results needs."""
    return partial_eval.dce_jaxpr(_plain(jaxpr, {}), [True] * len(jaxpr.outvars))[0]


def _plain(jaxpr: Jaxpr, done: dict[int, Jaxpr]) -> Jaxpr:
    """The program with plain calls instead of `custom_vmap_call`, into which JAX's elimination does not look."""
    if id(jaxpr) not in done:
        equations = [_plainly_called(equation, done) for equation in jaxpr.eqns]
        same = all(new is old for new, old in zip(equations, jaxpr.eqns))
        done[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=equations)
    return done[id(jaxpr)]


def _plainly_called(equation: Any, done: dict[int, Jaxpr]) -> Any:
    equation = changed_inside(equation, lambda jaxpr: _plain(jaxpr, done))
    if equation.primitive.name == "custom_vmap_call":
        return equation.replace(primitive=closed_call_p, params={"call_jaxpr": equation.params["call"]})
    return equation


def changed_inside(equation: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """The equation with every program that it calls changed; the same one where none is another."""

    def changed(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            holds_program = any(isinstance(one, (ClosedJaxpr, Jaxpr)) for one in value)
            return type(value)(map(changed, value)) if holds_program else value
        if isinstance(value, ClosedJaxpr):
            inner = change(value.jaxpr)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        return change(value) if isinstance(value, Jaxpr) else value

    params = {name: changed(value) for name, value in equation.params.items()}
    same = all(params[name] is value for name, value in equation.params.items())
    return equation if same else equation.replace(params=params)


def expression(equation: Any) -> tuple[str, str]:
    """What an equation does to its operands: the primitive, and its parameters in one order (JAX's own varies)."""
    return equation.primitive.name, str(sorted(equation.params.items(), key=lambda item: item[0]))


def has_effects(equation: Any) -> bool:
    """Whether an equation does more than compute its results; naming a mesh axis is no effect."""
    return not {type(effect).__name__ for effect in equation.effects} <= {"NamedAxisEffect"}


def runs_once(equation: Any) -> bool:
    """Whether an equation is a scan of a single trip, which XLA unrolls."""
    return equation.primitive.name == "scan" and equation.params["length"] == 1


def is_stacked(outer: Any, inner: Any) -> bool:
    """Whether a scan takes or makes a variable slice by slice, rather than whole."""
    return len(getattr(outer.aval, "shape", ())) > len(getattr(inner.aval, "shape", ()))


def is_carried_unchanged(body: Jaxpr, place: int, constants: int) -> bool:
    """Whether a loop's body returns its operand at this place as it is; the constants come first."""
    carried = place - constants
    return carried < len(body.outvars) and body.outvars[carried] is body.invars[place]
