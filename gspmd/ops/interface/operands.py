"""The operands of a planned operation, as arrays that are converted to their joint dtype."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError, SpecError, article
from gspmd.hardware.dtypes import no_joint


def flat_operands(equation: Equation, operands: Sequence[Any]) -> list[jax.Array]:
    """Return the operands of a call as a flat list of arrays, in the order of the equation.

    Every member of a group is an array of its own in this list.

    Raises:
        SpecError: the number of operands is wrong, or an operand is neither an array nor a tuple of arrays.
    """
    if len(operands) != len(equation.operands):
        equation.sizes([()] * len(operands))  # raises the error that lists the operands
    flat: list[jax.Array] = []
    for operand, given in zip(equation.operands, operands):
        number = len(flat) + 1
        if not operand.group:
            flat.append(_array(equation, number, given))
            continue
        if not isinstance(given, (tuple, list)) or len(given) != len(operand.specs):
            held = f"a {type(given).__name__} of {len(given)}" if isinstance(given, (tuple, list)) else _kind(given)
            raise SpecError(
                f"cannot apply '{equation}': '{operand}' is a group, but the operand is {held}.\n"
                f"  Pass a tuple of {len(operand.specs)} array{'s' * (len(operand.specs) > 1)}."
            )
        flat += [_array(equation, number + place, member) for place, member in enumerate(given)]
    return flat


def _array(equation: Equation, number: int, given: Any) -> jax.Array:
    return array(f"cannot apply '{equation}'", f"operand {number}", given)


def array(doing: str, name: str, given: Any, holds: str = "numbers") -> jax.Array:
    """Return an operand as an array.

    Args:
        doing: what is being done, for the beginning of an error message.
        name: the name of the operand in an error message.
        given: an array, or a number.
        holds: the kind of elements that the operation takes: "numbers", "integers", or "real numbers" for operations
            that compute in float32.

    Raises:
        SpecError: the operand is not an array, or its elements are not of the kind `holds`.
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
                remedy = f"Cast it to {holds}."
    if isinstance(given, jax.ShapeDtypeStruct):
        remedy = "It has no values: pass it through jax.eval_shape, jax.jit(...).lower or gspmd.trace."
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


def of_one_kind(equation: Equation, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], str]:
    """Return the arrays, with Python numbers converted by JAX's rules of promotion, and the dtype of their product.

    The dtype is returned by name.

    Raises:
        PlanError: JAX cannot promote the arrays to one dtype, or XLA cannot multiply the dtype of one of the arrays.
    """
    for number, x in enumerate(arrays, 1):
        if x.dtype.name in ("int1", "uint1", "int2", "uint2"):
            raise PlanError(
                f"cannot compute '{equation}': operand {number} is {x.dtype}, which XLA cannot multiply.\n"
                "  Cast it to int8."
            )
    try:
        joint = jnp.result_type(*arrays)
    except (TypeError, ValueError):
        raise PlanError(no_joint(equation, [x.dtype for x in arrays])) from None
    return [x.astype(joint) if jax.typeof(x).weak_type else x for x in arrays], joint.name
