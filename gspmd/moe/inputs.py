"""Checks of the arguments of this package's functions, which run before the functions are traced."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.errors import PlanError, SpecError, shown, suggestion
from gspmd.moe.config import MoEConfig


def choice(doing: str, name: str, value: Any, known: Iterable[str], more: str = "") -> None:
    """Raise an error if a value is not one of the known names.

    Raises:
        PlanError: the value is not a known name; the message proposes a similar one.
    """
    if not isinstance(value, str) or value not in known:
        hint = suggestion(value, known) if isinstance(value, str) else ""
        raise PlanError(f"cannot {doing}: {name} is {shown(value)}.\n  {hint}Choose from {', '.join(known)}{more}.")


def settings(doing: str, config: Any) -> MoEConfig:
    """Return `config` after checking that it is a MoEConfig.

    Raises:
        PlanError: `config` is not a MoEConfig.
    """
    if not isinstance(config, MoEConfig):
        raise PlanError(
            f"cannot {doing}: config is {shown(config)}, which is not a MoEConfig.\n"
            "  Write gspmd.moe.MoEConfig(experts=8, router='switch')."
        )
    return config


def whole(doing: str, name: str, value: Any) -> int:
    """Return the value after checking that it is a whole number, 0 or more.

    Raises:
        SpecError: the value is not a whole number, is negative, or is not known before the program runs.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise SpecError(
            f"cannot {doing}: {name} is {shown(value)}.\n"
            "  Pass a whole number, 0 or more, that is known before the program runs."
        )
    return int(value)


def array(
    doing: str, name: str, value: Any, notation: str, *, real: bool = False, whole: bool = False
) -> jax.Array | np.ndarray:
    """Return the value as an array; lists of numbers are converted.

    Args:
        doing: the operation, for error messages.
        name: the name of the argument, for error messages.
        value: the argument.
        notation: the dimensions that the array must have, one letter each.
        real: whether to accept only floating-point numbers, for values that are multiplied and differentiated.
        whole: whether to accept only integers, for values such as counts.

    Raises:
        SpecError: the value is not an array of this rank, or its elements are not of an accepted kind.
    """
    wanted = f"[{', '.join(notation)}]"
    if isinstance(value, jax.ShapeDtypeStruct):
        raise SpecError(
            f"cannot {doing}: {name} is {shown(value)}, a shape without values.\n"
            "  Call it inside jax.eval_shape, or gspmd.trace, which give the function arrays."
        )
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        try:
            value = jnp.asarray(value)
        except (TypeError, ValueError, OverflowError):
            remedy = f"Pass an array {wanted}."
            raise SpecError(f"cannot {doing}: {name} is {shown(value)}, which is not an array.\n  {remedy}") from None
    if len(value.shape) != len(notation):
        fact = f"{name} must have dimensions {wanted}, but it has shape {tuple(value.shape)}"
        raise SpecError(f"cannot {doing}: {fact}.\n  Pass an array of {len(notation)} dimensions.")
    kinds = ("floating",) if real else ("integer",) if whole else ("floating", "integer", "bool_")
    if not any(jnp.issubdtype(value.dtype, getattr(jnp, kind)) for kind in kinds):
        numbers = "floating-point numbers" if real else "integers" if whole else "real numbers"
        raise SpecError(f"cannot {doing}: {name} has dtype {value.dtype}.\n  Cast it: {name} holds {numbers}.")
    return value


def prng_key(doing: str, key: Any) -> None:
    """Raise an error if a value is neither a random key nor None.

    Raises:
        PlanError: the value is a seed, several keys, or something else.
    """
    if key is None:
        return
    typed = hasattr(key, "dtype") and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    old = hasattr(key, "dtype") and hasattr(key, "shape") and key.dtype == jnp.uint32 and len(key.shape) == 1
    if (typed and key.shape == ()) or old:
        return
    if typed:
        fact, remedy = f"key holds keys {key.shape}, where one is needed", "Pass one of them, or use jax.vmap"
    else:
        seed = key if isinstance(key, Integral) and not isinstance(key, bool) else 0
        fact, remedy = f"key is {shown(key)}, which is not a key", f"Make a key from a seed: jax.random.key({seed})"
    raise PlanError(f"cannot {doing}: {fact}.\n  {remedy}.")


def attributes(doing: str, layout: object, names: Sequence[str]) -> None:
    """Raise an error if the moe section of a layout lacks one of the keys `names`.

    Raises:
        PlanError: keys are missing; the message names them.
    """
    missing = [name for name in names if not hasattr(layout, name)]
    if missing:
        raise PlanError(
            f"cannot {doing}: layout is {shown(layout)}, which lacks {', '.join(missing)}.\n"
            "  Pass the moe section of a layout: gspmd.Layout.load('gshard').section('moe')."
        )


def is_known(value: Any) -> bool:
    """Return whether an array's values can be read, because the array is not traced and this host has all of it."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
    return isinstance(value, np.ndarray)
