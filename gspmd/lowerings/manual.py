"""Calls where mesh axes are manual: in a shard_map of the caller's own, or in the stages of a pipeline."""

from contextlib import AbstractContextManager

import jax

from gspmd.annotate.errors import PlanError
from gspmd.annotate.parser import OPEN
from gspmd.annotate.spec import Spec

_on_no_axes = jax.make_user_context(default_value=False)  # part of jit's cache key, so that the error is always raised


def on_no_axes() -> AbstractContextManager:
    """Allow calls in a shard_map over all mesh axes, where pieces are whole arrays: they are planned on no axis."""
    return _on_no_axes(True)


def check_all_manual() -> None:
    """Check that a call in a shard_map over all mesh axes stands in `on_no_axes`.

    Raises:
        PlanError: it does not.
    """
    if not _on_no_axes.value:
        raise PlanError(
            "cannot plan inside another shard_map: its mesh axes are already manual, so arrays there are pieces.\n"
            "  Call gspmd outside of the shard_map, or use jax.lax collectives inside it."
        )


def open_in_shard_map(spec: Spec) -> str:
    """Say why a dimension cannot be left to the compiler in a shard_map."""
    whole = Spec(spec.dims, tuple(() if axes == (OPEN,) else axes for axes in spec.axes), spec.partial, spec.reduced)
    return (
        f"'{spec}' leaves a dimension to the compiler, which places nothing in a shard_map, as the stages of a pipeline"
        f" are.\n  Name its mesh axes, or leave it whole: '{whole}'."
    )


def open_under_explicit(spec: Spec) -> str:
    """Say why a dimension cannot be left to the compiler under Explicit axes."""
    return (
        f"'{spec}' leaves a dimension to the compiler; under Explicit mesh axes every placement is a type.\n"
        "  Name its mesh axes, or make the mesh with Auto axes and run it with lowering='xla'."
    )
