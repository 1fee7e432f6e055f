"""Functions on jaxprs, for the programs that an equation calls, for dead code, and for the operands of loops."""

import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import sha256
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.core.primitives import closed_call_p
from jax.sharding import AbstractMesh, Sharding

from gspmd import jax_internals

_CALLS = ("jit", "pjit", jax_internals.CLOSED_CALL, "shard_map", "custom_partitioning")
_CALLS += tuple(f"custom_{kind}_call" for kind in ("jvp", "vjp", "vmap"))

RECOMPUTED = ("remat2", "checkpoint")
"""The names of primitives that call a program which the backward pass calls again."""


def inner_jaxprs(equation: Any) -> Iterator[Jaxpr]:
    """Yield the programs that an equation calls, such as the bodies of loops, branches and jitted functions."""
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if isinstance(inner, Jaxpr):
                yield inner


def constants_of(equation: Any, inner: Jaxpr) -> Iterator[tuple[Any, Any]]:
    """Yield the constants of a program that an equation calls, each as a pair of a variable and its value."""
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, ClosedJaxpr) and one.jaxpr is inner:
                yield from zip(inner.constvars, one.consts, strict=True)


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield every equation of a program, and every equation of the programs that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner)


_WITH_RULES = {"custom_vmap_call": "call", "custom_vjp_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
"""The names of primitives that call a program and have rules for transforming this program, each with the name of the
parameter that contains the program."""


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Return a program without the operations that no result needs; all arguments of the program are kept."""
    return jax_internals.without_dead_code(_plain(jaxpr, {}))


def _plain(jaxpr: Jaxpr, done: dict[int, Jaxpr]) -> Jaxpr:
    """Return a program in which plain calls replace all calls that have rules for transformations.

    JAX's elimination of dead code does not look into a `custom_vmap_call`. It keeps unused operands of a
    `custom_vjp_call` and of a `custom_jvp_call`. Compilers inline all three kinds of calls.

    Args:
        jaxpr: the program.
        done: the programs replaced so far, indexed by the `id` of the original program; results are added.
    """
    if id(jaxpr) not in done:
        equations = [_plainly_called(equation, done) for equation in jaxpr.eqns]
        same = all(new is old for new, old in zip(equations, jaxpr.eqns))
        done[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=equations)
    return done[id(jaxpr)]


def _plainly_called(equation: Any, done: dict[int, Jaxpr]) -> Any:
    equation = changed_inside(equation, lambda jaxpr: _plain(jaxpr, done))
    called = equation.params.get(_WITH_RULES.get(equation.primitive.name))
    return equation if called is None else equation.replace(primitive=closed_call_p, params={"call_jaxpr": called})


def changed_inside(equation: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """Return an equation with `change` applied to every program that it calls.

    If `change` returns every program unchanged, the result is the same object as `equation`.
    """

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
    """Return the name of an equation's primitive, and the text of its parameters.

    The parameters are sorted by name, because JAX's order varies. If the results for two equations are equal, the
    equations compute the same function of their operands.
    """
    params = sorted(equation.params.items(), key=lambda item: item[0])
    return equation.primitive.name, str([(name, _text(value)) for name, value in params])


def _text(value: Any) -> Any:
    """Return the value of an equation's parameter, in which a string replaces each program."""
    if isinstance(value, (tuple, list)):
        return [_text(one) for one in value] if any(isinstance(one, (ClosedJaxpr, Jaxpr)) for one in value) else value
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return fingerprint(value)
    if isinstance(value, (AbstractMesh, Sharding)):
        return _written(value)
    # Only the name of a function counts: rules of differentiation are new objects at each call, and do not run here.
    is_function = callable(value) and not isinstance(value, type)
    return getattr(value, "__name__", type(value).__name__) if is_function else value


def fingerprint(jaxpr: ClosedJaxpr | Jaxpr) -> str:
    """Return a string that is the same for programs that differ only in the names of variables.

    The string is a hash of a text like JAX's own text of the program, but with a fingerprint in place of each called
    program. JAX's text would repeat a nested loop for every loop around it.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    if jaxpr in _fingerprints:
        return _fingerprints[jaxpr]
    names: dict[Any, int] = {}

    def made(var: Any) -> str:
        return f"{names.setdefault(var, len(names))}:{_type(var.aval)}"

    def used(var: Any) -> str:
        return " ".join(literal(var)) if isinstance(var, Literal) else str(names.get(var, id(var)))

    lines = [" ".join(map(made, (*jaxpr.constvars, *jaxpr.invars)))]
    for equation in jaxpr.eqns:
        operands, (name, params) = [used(var) for var in equation.invars], expression(equation)
        lines.append(f"{' '.join(map(made, equation.outvars))} = {name} {params} {' '.join(operands)}")
    lines.append(" ".join(map(used, jaxpr.outvars)))
    _fingerprints[jaxpr] = sha256("\n".join(lines).encode()).hexdigest()
    return _fingerprints[jaxpr]


_fingerprints: weakref.WeakKeyDictionary[Jaxpr, str] = weakref.WeakKeyDictionary()


def literal(var: Literal) -> tuple[str, str]:
    """Return the type and the value of a literal."""
    # NumPy takes longer to write a number than to compute with it.
    return _type(var.aval), repr(var.val.tolist() if hasattr(var.val, "tolist") else var.val)


@lru_cache(maxsize=1 << 14)
def _type(aval: Any) -> str:
    return str(aval)


@lru_cache(maxsize=1 << 10)
def _written(placement: AbstractMesh | Sharding) -> str:
    return repr(placement)  # a mesh has an axis for every dimension of every line while a layout is searched


def has_effects(equation: Any) -> bool:
    """Return whether an equation has side effects; JAX's effect for the use of a mesh axis's name is ignored."""
    return not {type(effect).__name__ for effect in equation.effects} <= {"NamedAxisEffect"}


def is_call(equation: Any, inner: Jaxpr) -> bool:
    """Return whether an equation only calls the program `inner` with its own operands; compilers inline such calls."""
    return equation.primitive.name in (*_CALLS, *RECOMPUTED) and len(equation.invars) == len(inner.invars)


def runs_once(equation: Any) -> bool:
    """Return whether an equation is a scan with a single iteration, which XLA unrolls."""
    return equation.primitive.name == "scan" and equation.params["length"] == 1


def is_reshape(equation: Any) -> bool:
    """Return whether an equation only reshapes an array in row-major order; some broadcasts do only this."""
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        same_size = equation.invars[0].aval.size == equation.outvars[0].aval.size
        return len(equation.invars) == 1 and same_size and list(places) == sorted(places)
    return name == "squeeze" or (name == "reshape" and params["dimensions"] is None and len(equation.invars) == 1)


def is_stacked(outer: Any, inner: Any) -> bool:
    """Return whether a scan reads or writes a variable slice by slice, rather than as a whole.

    Args:
        outer: the variable outside of the scan.
        inner: the corresponding variable in the body of the scan.
    """
    return len(getattr(outer.aval, "shape", ())) > len(getattr(inner.aval, "shape", ()))


def is_carried_unchanged(body: Jaxpr, place: int, constants: int) -> bool:
    """Return whether a loop's body returns one of its carried arguments unchanged.

    Args:
        body: the body of the loop.
        place: the index of the argument among all arguments of the body.
        constants: number of constants, which are the first arguments of the body.
    """
    carried = place - constants
    return carried < len(body.outvars) and body.outvars[carried] is body.invars[place]
