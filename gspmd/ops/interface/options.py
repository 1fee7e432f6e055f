"""The options of planned operations: numbers and flags, and the dtypes and the precision of an einsum."""

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
from gspmd.annotate.errors import PlanError, shown
from gspmd.hardware.dtypes import dtype_name


def number(doing: str, name: str, given: Any) -> float:
    """Return the value of a numeric option, after checking that it is a number known when the program is traced.

    Raises:
        PlanError: the option is an array, a traced value or anything else that is not a Python number; or it is not
            finite; or its magnitude is 2^64 or more.
    """
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if not is_number or not abs(given) < 2**64 or not isfinite(given):
        raise PlanError(
            f"{doing}: {name} is {shown(given)}.\n"
            "  It is a constant of the compiled program: pass a finite Python number, not an array or a traced value."
        )
    return float(given)


def flag(doing: str, name: str, given: Any) -> bool:
    """Return the value of a boolean option, after checking that it is True or False.

    Raises:
        PlanError: the option is neither True nor False.
    """
    if not isinstance(given, (bool, np.bool_)):
        raise PlanError(f"{doing}: {name} is {shown(given)}.\n  Pass True or False.")
    return bool(given)


def result_dtype(equation: Equation, joint: str, preferred: Any) -> str:
    """Return the name of the dtype of the results.

    This is the requested dtype `preferred` or, if that is None, the operands' joint dtype `joint`.

    Raises:
        PlanError: `preferred` has 64 bits, and JAX is not configured to use such dtypes; or `preferred` cannot hold the
            results, or is not a dtype of numbers.
    """
    if preferred is None:
        return joint
    doing = f"cannot give the result of '{equation}'"
    name = _available(doing, "preferred_element_type", preferred)
    if _RANK.index(_numbers(name)) < _RANK.index(_numbers(joint)):
        raise PlanError(
            f"{doing} as {name}: products of {joint} are {_numbers(joint)} numbers, which {name} cannot hold.\n"
            f"  If you want {name} anyway, leave out preferred_element_type and cast the result."
        )
    return name


def refuse_precision(equation: Equation, precision: Any) -> None:
    """Raise an error if JAX does not accept `precision` for matrix products.

    Raises:
        PlanError: JAX does not accept `precision`; the message lists the accepted values.
    """
    with suppress(TypeError, ValueError):  # raised by the hash, or by JAX
        _try_precision(precision)
        return
    raise PlanError(
        f"cannot compute '{equation}' with precision {shown(precision)}.\n"
        "  Use None, 'default', 'high', 'highest', or another precision of jax.lax.dot."
    )


@lru_cache(maxsize=64)
def _try_precision(precision: Any) -> None:
    if precision is not None:
        x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        jax.eval_shape(partial(jax.lax.dot, precision=precision), x, x)


def wire_name(equation: Equation, dtypes: Sequence[str], result: str, wire_dtype: Any) -> str | None:
    """Return the name of the dtype in which everything is sent, or None if each array is sent in its own dtype.

    Raises:
        PlanError: an operand or the result has a dtype other than `wire_dtype`, and one of these two dtypes is not
            floating-point; or `wire_dtype` is a floating-point dtype without negative numbers or with less than a byte;
            or it has 64 bits, and JAX is not configured to use such dtypes.
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
            f"  Only floating numbers can be sent in a narrower dtype. {remedy}"
        )
    return wire


_RANK = ("boolean", "whole", "floating", "complex")


def _numbers(dtype: str) -> str:
    dtype = jnp.dtype(dtype)
    kinds = (np.bool_, np.integer, jnp.floating, jnp.complexfloating)
    return next(name for name, kind in zip(_RANK, kinds) if jnp.issubdtype(dtype, kind))


def _travels(dtype: str) -> bool:
    """Return whether a floating-point dtype has whole bytes, a sign and a zero.

    For example, float8_e8m0fnu has neither a sign nor a zero, because its numbers consist of an exponent only.
    """
    return float(jnp.finfo(jnp.dtype(dtype)).min) < 0 and jnp.finfo(jnp.dtype(dtype)).bits >= 8


def _available(doing: str, option: str, dtype: Any) -> str:
    name = dtype_name(dtype)
    config: Any = jax.config  # in JAX 0.10 its type hints lack the options
    if name in ("float64", "int64", "uint64", "complex128") and not config.jax_enable_x64:
        raise PlanError(
            f"{doing} as {name}: JAX has no dtypes of 64 bits as it is configured.\n"
            f"  Use a narrower {option}, or jax.config.update('jax_enable_x64', True)."
        )
    if not any(jnp.issubdtype(jnp.dtype(name), kind) for kind in (np.bool_, np.number)):
        raise PlanError(f"{doing} as {name}: it is not a dtype of numbers.\n  Use a {option} such as bfloat16.")
    return name
