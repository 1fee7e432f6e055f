"""The cheapest chain of collectives from one spec of a tensor to another, found as a shortest path.

The nodes of the graph are all placements of the tensor. Its arcs are all slices and collectives between placements
(`transitions`). So the path contains a slice, a scatter or a detour wherever this makes the chain cheaper.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.hardware.chips import Chip
from gspmd.planner.graph.paths import FAR, shortest_paths
from gspmd.planner.steps import Step
from gspmd.planner.unknown import UnknownMove, UnknownStep, is_unknown


def move(
    src: Spec,
    dst: Spec,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    itemsize: int,
    chip: Chip,
    operand: str = "",
    reduce: str = "sum",
) -> tuple[Step, ...]:
    """Plan the collectives that bring a tensor from `src` to `dst`.

    A move never costs more than two moves through a third placement. It also never costs more than the same move of a
    larger tensor, if the same mesh axes divide the dimensions of both tensors.

    Args:
        src: the current spec of the tensor.
        dst: the target spec, with the same dimensions. It may be a partial sum only over mesh axes over which `src` is
            a partial sum too.
        sizes: the size of each dimension of the whole tensor.
        mesh: the size of each mesh axis.
        itemsize: bytes per element on the wire.
        chip: the chip whose links determine the seconds.
        operand: the name of the tensor in the steps.
        reduce: how a partial sum is reduced, `"sum"` or `"max"`; a reduce-scatter cannot take a maximum.

    Returns:
        The chain with the fewest seconds, in whole picoseconds. Of several such chains, it is the one with the fewest
        bytes, and then with the fewest steps.

    Raises:
        PlanError: the target is a partial sum over a mesh axis over which the source is no partial sum, or the mesh
            axes of a spec do not divide the sizes.

    Example:
        >>> from gspmd.hardware.chips import chip
        >>> specs = Spec.parse("BE_z"), Spec.parse("B_zxE")
        >>> steps = move(*specs, {"B": 4096, "E": 4096}, {"x": 4, "y": 4, "z": 4}, 2, chip("tpu-v4"))
        >>> [f"{step.kind} {''.join(step.axes)}" for step in steps]
        ['slice x', 'all-to-all zx']
    """
    if src == dst:
        return ()
    if is_unknown(mesh):
        shape = tuple(sizes[dim] for dim in src.dims)
        return (UnknownStep.of(UnknownMove((src,), dst, shape, itemsize, reduce), src, dst, operand),)
    return chain(*_on_mesh(src, dst, sizes, mesh), itemsize, chip, operand, reduce)


def cost(
    src: Spec, dst: Spec, sizes: Mapping[str, int], mesh: Mapping[str, int], itemsize: int, chip: Chip, *, by: str
) -> complex:
    """Return the cost of a `move` in the units of `paths`, without the steps of the move.

    The cost is infinite if there is no such move.

    Args:
        src, dst, sizes, mesh, itemsize, chip: the same as the arguments of `move`.
        by: `"source"` or `"target"`, the end that is the same in most calls. Paths are searched once from this end.
    """
    src, target, shape, real = _on_mesh(src, dst, sizes, mesh)
    if not set(target.partial) <= set(src.partial):
        return FAR
    paths = shortest_paths(shape, real, itemsize, chip, frozenset(src.partial))
    here, there = paths.number(src), paths.number(target)
    if min(here, there) < 0:
        return FAR
    return complex(paths.costs_from(here)[there] if by == "source" else paths.costs_to(there)[here])


def _on_mesh(
    src: Spec, dst: Spec, sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> tuple[Spec, Spec, tuple[int, ...], tuple[tuple[str, int], ...]]:
    """Return the specs of a move, the tensor's shape, and the mesh, all without mesh axes of size 1.

    The two specs have their dimensions in the order of `src`.
    """
    src, dst = src.without_trivial(mesh), dst.without_trivial(mesh)
    target = Spec(src.dims, tuple([dst.axes_of(dim) for dim in src.dims]), dst.partial)
    real = tuple((axis, size) for axis, size in mesh.items() if size > 1)
    return src, target, tuple([sizes[dim] for dim in src.dims]), real


@lru_cache(maxsize=1 << 14)
def chain(src: Spec, dst: Spec, shape: tuple[int, ...], mesh, itemsize: int, chip: Chip, operand: str, reduce: str):
    """Plan a move from hashable arguments.

    The dimensions of `dst` must be in the order of `src`, and no mesh axis may have size 1.
    """
    if not set(dst.partial) <= set(src.partial):
        missing = ", ".join(sorted(set(dst.partial) - set(src.partial)))
        raise PlanError(f"cannot move '{src}' to '{dst}'\n  the source is not a partial sum over mesh axis {missing}.")
    paths = shortest_paths(shape, mesh, itemsize, chip, frozenset(src.partial), reduce == "sum")
    here, there = paths.number(src), paths.number(dst)
    if min(here, there) < 0:
        raise PlanError(f"cannot move '{src}' to '{dst}': their mesh axes do not divide the sizes {shape} evenly.")
    rest = paths.costs_to(there)
    if not np.isfinite(rest[here].real):
        paths.refuse_left_out(operand)
    return paths.steps(paths.path(rest, here), src.dims, operand)
