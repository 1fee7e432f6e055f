"""Dtypes by name: bytes per element, the dtype in which collectives send values, and the joint dtype of operands."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from gspmd.annotate.errors import PlanError, shown


def dtype_name(dtype: Any) -> str:
    """Return the canonical name of a dtype.

    Args:
        dtype: a name, a numpy dtype or a scalar type; dtypes of ml_dtypes are known too.

    Raises:
        PlanError: no dtype has this name.

    Example:
        >>> dtype_name("bfloat16"), dtype_name(np.float32)
        ('bfloat16', 'float32')
    """
    is_array = hasattr(dtype, "__array__") and not isinstance(dtype, type)  # numpy would accept an array for its dtype
    try:
        found = None if is_array else np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
    except (TypeError, ValueError, SyntaxError):  # numpy parses strings such as "2i," as struct dtypes
        found = None
    if isinstance(dtype, str) and len(dtype) == 1:
        found = None  # a slip rather than numpy's code of a type, in which "b" is int8 and "?" is bool
    numeric = found is not None and (found.kind in "biufc" or hasattr(ml_dtypes, found.name))
    if dtype is None or found is None or not numeric:  # None is float64 to numpy
        raise PlanError(f"no dtype is called {shown(dtype)}.\n  Write 'bfloat16', 'float32', 'int8', ...")
    return found.name


def itemsize(dtype: str) -> int:
    """Return the number of bytes per element of a dtype.

    >>> itemsize("bfloat16"), itemsize("float32")
    (2, 4)
    """
    return np.dtype(getattr(ml_dtypes, dtype_name(dtype), dtype)).itemsize


def wire_of(dtype: str, *, summed: bool) -> str:
    """Return the dtype in which collectives send values of a dtype.

    Collectives send whole bytes. If `summed` is True, booleans are sent as int32, the dtype in which they are summed.

    >>> wire_of("bfloat16", summed=True), wire_of("int4", summed=False), wire_of("bool", summed=True)
    ('bfloat16', 'int8', 'int32')
    """
    if dtype == "bool":
        return "int32" if summed else "bool"
    return _WHOLE_BYTES.get(dtype, dtype)


_WHOLE_BYTES = {"int4": "int8", "uint4": "uint8", "float4_e2m1fn": "float8_e4m3fn"}


def joint_dtype(equation: object, dtypes: Sequence[str]) -> str:
    """Return the dtype of a product by JAX's promotion rules; 64-bit dtypes are kept, even without jax_enable_x64.

    Raises:
        PlanError: JAX's rules of promotion have no joint dtype for these dtypes.
    """
    if len({*dtypes}) == 1:
        return dtype_name(dtypes[0])
    import jax.numpy as jnp  # imported here: planning needs JAX for nothing else

    try:
        return reduce(jnp.promote_types, map(jnp.dtype, dtypes)).name
    except (TypeError, ValueError):
        raise PlanError(no_joint(equation, dtypes)) from None


def no_joint(equation: object, dtypes: Sequence) -> str:
    """Return the error message for operands without a joint dtype."""
    return (
        f"cannot compute '{equation}': by JAX's rules of promotion {', '.join(map(str, dtypes))} have no joint dtype.\n"
        "  Cast the operands to one dtype."
    )
