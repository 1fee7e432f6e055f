"""What a planned operation is given: its operands and options, and the dtypes of an einsum, its wire and results."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import isfinite
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError, SpecError, article, shown
from gspmd.hardware.dtypes import dtype_name, no_joint


def flat_operands(equation: Equation, operands: Sequence[Any]) -> list[jax.Array]:
    """The arrays of a call in reading order, group members one by one.

    Raises:
        SpecError: there are more or fewer operands than the equation has, or one is no array, or no tuple of arrays.
    """
    if len(operands) != len(equation.operands):
        equation.sizes([()] * len(operands))  # says what it takes
    flat: list[jax.Array] = []
    for operand, given in zip(equation.operands, operands):
        number = len(flat) + 1
        if not operand.group:
            flat.append(_array(equation, number, given))
            continue
        if not isinstance(given, (tuple, list)) or len(given) != len(operand.specs):
            held = f"a {type(given).__name__} of {len(given)}" if isinstance(given, (tuple, list)) else _kind(given)
            raise SpecError(
                f"cannot apply '{equation}': '{operand}' is a group, and what is given for it is {held}.\n"
                f"  Pass a tuple of {len(operand.specs)} array{'s' * (len(operand.specs) > 1)}."
            )
        flat += [_array(equation, number + place, member) for place, member in enumerate(given)]
    return flat


def _array(equation: Equation, number: int, given: Any) -> jax.Array:
    return array(f"cannot apply '{equation}'", f"operand {number}", given)


def array(doing: str, name: str, given: Any, holds: str = "numbers") -> jax.Array:
    """What is given for an operand, as an array.

    Args:
        doing: what it is given for, which opens the error.
        name: of the operand.
        given: an array, or a number.
        holds: "numbers"; "real numbers", where the arithmetic is float32; or "integers", where it counts.

    Raises:
        SpecError: it is no array, or one of other numbers.
    """
    known = isinstance(given, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
    remedy = "Pass a jax.Array, a numpy array of numbers, or a number."
    if known or hasattr(given, "__jax_array__"):
        with suppress(TypeError):  # an array of objects, or of text
            try:
                x = jnp.asarray(given)
            except OverflowError:
                x, remedy = None, f"No dtype of JAX's holds {given}: pass a floating number."
            if x is not None and any(jnp.issubdtype(x.dtype, kind) for kind in _HELD[holds]):
                return x
            if x is not None and any(jnp.issubdtype(x.dtype, kind) for kind in _HELD["numbers"]):
                remedy = f"Cast it: it holds {holds}."
    if isinstance(given, jax.ShapeDtypeStruct):
        remedy = "It has no numbers: pass it through jax.eval_shape, jax.jit(...).lower or gspmd.trace."
    raise SpecError(f"{doing}: {name} is {_kind(given)}.\n  {remedy}")


_HELD = {
    "numbers": (np.number, np.bool_),
    "real numbers": (jnp.floating, np.integer, np.bool_),
    "integers": (np.integer,),
}


def _kind(given: Any) -> str:
    dtype = getattr(given, "dtype", None)
    noun = article("array" if isinstance(given, (jax.Array, np.ndarray)) else type(given).__name__)
    return noun if dtype is None else f"{noun} of {dtype}"


def number(doing: str, name: str, given: Any) -> float:
    """A number that is known when the program is made.

    Raises:
        PlanError: it is none, is not finite, or is an array or traced.
    """
    if not isinstance(given, Real) or isinstance(given, bool) or not abs(given) < 2**64 or not isfinite(given):
        raise PlanError(
            f"{doing}: {name} is {shown(given)}.\n"
            "  Pass a finite number, which is part of the program: no array, and nothing traced."
        )
    return float(given)


def flag(doing: str, name: str, given: Any) -> bool:
    """True or False.

    Raises:
        PlanError: it is neither.
    """
    if not isinstance(given, (bool, np.bool_)):
        raise PlanError(f"{doing}: {name} is {shown(given)}.\n  It is True or False.")
    return bool(given)


def of_one_kind(equation: Equation, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], str]:
    """The arrays, a Python number in the dtype that it takes on beside the others, and the dtype of their product.

    Raises:
        PlanError: JAX's rules of promotion have no dtype for them together, or XLA has no product of it.
    """
    for number, x in enumerate(arrays, 1):
        if x.dtype.name in ("int1", "uint1", "int2", "uint2"):
            raise PlanError(
                f"cannot compute '{equation}': operand {number} is {x.dtype}, of which XLA makes no products.\n"
                "  Cast it to int8."
            )
    try:
        joint = jnp.result_type(*arrays)
    except (TypeError, ValueError):
        raise PlanError(no_joint(equation, [x.dtype for x in arrays])) from None
    return [x.astype(joint) if jax.typeof(x).weak_type else x for x in arrays], joint.name


def result_dtype(equation: Equation, joint: str, preferred: Any) -> str:
    """The dtype of the results: the one asked for, else the operands' joint one.

    Raises:
        PlanError: JAX has no such dtype as it is configured, or it cannot hold what the results are.
    """
    if preferred is None:
        return joint
    doing = f"cannot give the result of '{equation}'"
    name = _available(doing, "preferred_element_type", preferred)
    if _RANK.index(_numbers(name)) < _RANK.index(_numbers(joint)):
        raise PlanError(
            f"{doing} as {name}: products of {joint} are {_numbers(joint)} numbers, which it cannot hold.\n"
            "  Leave preferred_element_type out and cast the result, if that is meant."
        )
    return name


def refuse_precision(equation: Equation, precision: Any) -> None:
    """Refuse what JAX does not take for the precision of a product.

    Raises:
        PlanError: with what it takes.
    """
    with suppress(TypeError, ValueError):  # of the hash, and of JAX
        _try_precision(precision)
        return
    raise PlanError(
        f"cannot compute '{equation}' with precision {shown(precision)}.\n"
        "  Use None, 'default', 'high', 'highest', or what else jax.lax.dot takes."
    )


@lru_cache(maxsize=64)
def _try_precision(precision: Any) -> None:
    if precision is not None:
        x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        jax.eval_shape(partial(jax.lax.dot, precision=precision), x, x)


def wire_name(equation: Equation, dtypes: Sequence[str], result: str, wire_dtype: Any) -> str | None:
    """The name of the wire's dtype, which has to hold every operand and every result: equal, or both floating.

    Raises:
        PlanError: it holds one of them in another kind of number.
    """
    if wire_dtype is None:
        return None
    wire = _available(f"cannot send '{equation}'", "wire_dtype", wire_dtype)
    named = [*((f"operand {number}", dtype) for number, dtype in enumerate(dtypes, 1)), ("the result", result)]
    for name, dtype in named:
        if dtype == wire or (_numbers(dtype) == "floating" == _numbers(wire) and _travels(wire)):
            continue
        remedy = "Use a floating wire_dtype, such as bfloat16." if _numbers(dtype) == "floating" else "Leave it out."
        raise PlanError(
            f"cannot send '{equation}' as {wire}: {name} is {dtype}, and {wire} does not hold such numbers.\n"
            f"  A wire is narrower for floating numbers alone. {remedy}"
        )
    return wire


_RANK = ("boolean", "whole", "floating", "complex")


def _numbers(dtype: str) -> str:
    dtype = jnp.dtype(dtype)
    kinds = (np.bool_, np.integer, jnp.floating, jnp.complexfloating)
    return next(name for name, kind in zip(_RANK, kinds) if jnp.issubdtype(dtype, kind))


def _travels(dtype: str) -> bool:
    """Whether a floating dtype has a sign and a zero, which scales of eight exponent bits lack, and whole bytes."""
    return float(jnp.finfo(jnp.dtype(dtype)).min) < 0 and jnp.finfo(jnp.dtype(dtype)).bits >= 8


def _available(doing: str, option: str, dtype: Any) -> str:
    name = dtype_name(dtype)
    if name in ("float64", "int64", "uint64", "complex128") and not jax.config.jax_enable_x64:
        raise PlanError(
            f"{doing} as {name}: JAX has no dtypes of 64 bits as it is configured.\n"
            f"  Use a narrower {option}, or jax.config.update('jax_enable_x64', True)."
        )
    if not any(jnp.issubdtype(jnp.dtype(name), kind) for kind in (np.bool_, np.number)):
        raise PlanError(f"{doing} as {name}: it is no dtype of numbers.\n  Use a {option} such as bfloat16.")
    return name
