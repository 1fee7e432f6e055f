"""Checks of the arguments that several calls of this room take."""

from math import isfinite
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from gspmd.annotate.errors import PlanError, shown


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """The sizes of a mesh's axes, in its order.

    Args:
        mesh: a mesh, or a mapping.

    Raises:
        PlanError: it is neither.
    """
    try:
        sizes = dict(getattr(mesh, "shape", mesh))
    except (TypeError, ValueError):
        sizes = {"": None}
    if not all(isinstance(size, (int, np.integer)) for size in sizes.values()):
        raise PlanError(
            f"cannot name the mesh axes with mesh={shown(mesh)}: it is no mesh.\n"
            "  Give a mesh, or sizes of its axes in its order, such as {'x': 4, 'y': 2}."
        )
    return sizes


def operations(flops: Any) -> float:
    """A number of floating-point operations, 0 or more.

    Raises:
        PlanError: it is no such number.
    """
    if not isinstance(flops, Real) or isinstance(flops, bool) or not isfinite(flops) or flops < 0:
        raise PlanError(f"cannot count {shown(flops)} operations.\n  Give flops= of one execution, as a number.")
    return flops


def file_path(given: Any) -> Path:
    """The path of a file to write.

    Raises:
        PlanError: it is no path.
    """
    if not isinstance(given, str | PathLike):
        raise PlanError(f"cannot write into {shown(given)}: it is no path.\n  Give the name of a file.")
    return Path(given)
