"""Checks of arguments, shared by several functions of the audit."""

from collections.abc import Sequence
from math import isfinite
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from gspmd.annotate.errors import PlanError, shown
from gspmd.annotate.validation import whole
from gspmd.display.tables import counted


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Return the sizes of a mesh's axes, in the order of the mesh.

    Args:
        mesh: a mesh, or a mapping from mesh axes to sizes.

    Raises:
        PlanError: `mesh` is neither a mesh nor a mapping of sizes.
    """
    try:
        sizes: dict[str, Any] = dict(getattr(mesh, "shape", mesh))
    except (TypeError, ValueError):
        sizes = {"": None}
    if not all(isinstance(size, (int, np.integer)) for size in sizes.values()):
        raise PlanError(
            f"cannot name the mesh axes with mesh={shown(mesh)}: it is not a mesh.\n"
            "  Give a mesh, or sizes of its axes in its order, such as {'x': 4, 'y': 2}."
        )
    return sizes


def operations(flops: Any) -> float:
    """Return a number of FLOPs, after checking that the number is finite and not negative.

    Raises:
        PlanError: `flops` is not a number, is negative, or is not finite.
    """
    number = isinstance(flops, Real) and not isinstance(flops, bool)
    if not number or not isfinite(flops) or flops < 0:
        raise PlanError(f"flops={shown(flops)} is not a number of FLOPs.\n  Give what one execution has, 0 or more.")
    return flops


def argument_numbers(name: str, given: Any, count: int) -> tuple[int, ...]:
    """Return the positions of arguments that a keyword such as `donate_argnums` gives, counted from 0.

    As for `jax.jit`, positions in `given` may be negative, and then count from the last argument.

    Args:
        name: the name of the keyword, for the error message.
        given: the value of the keyword.
        count: number of arguments of the call.

    Raises:
        PlanError: `given` is not a sequence of integers, or an argument that it names does not exist.
    """
    numbers = [whole(each) for each in given] if isinstance(given, Sequence) and not isinstance(given, str) else [None]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        fact = "is not a sequence of numbers of arguments."
    elif all(-count <= number < count for number in known):
        return tuple(number % count for number in known)
    else:
        fact = f"names an argument that does not exist: the function was given {counted(count, 'argument')}."
    raise PlanError(
        f"{name}={shown(given)} {fact}\n  Give the numbers of arguments, counted from 0, such as {name}=(0,)."
    )


def file_path(given: Any) -> Path:
    """Return the path of a file to be written.

    Raises:
        PlanError: `given` is not a path.
    """
    if not isinstance(given, str | PathLike):
        raise PlanError(f"cannot write into {shown(given)}: it is not a path.\n  Give the name of a file.")
    return Path(given)
