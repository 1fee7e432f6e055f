"""The annotation calls of GShard and of GSPMD, implemented by `annotate`. Messages call the dimensions A, B, C, ….

GShard numbers the devices, and GSPMD arranges their numbers as a mesh. Here the mesh of `jax.set_mesh` has named axes,
and device number i is the i-th device of this mesh, with the last axis fastest.
"""

import itertools
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from gspmd.annotate.annotation import annotate, shape_of
from gspmd.annotate.errors import SpecError, listed, shown
from gspmd.annotate.parser import OPEN, axes_suffix
from gspmd.annotate.spec import Spec
from gspmd.annotate.validation import mesh_sizes, whole


def replicate(tensor: Any) -> Any:
    """Put the whole tensor on every device.

    Source: GShard (arXiv 2006.16668), section 3.2.

    Example:
      >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
      ...     replicate(np.ones((4, 8))).sharding.spec
      P(None, None)
    """
    return annotate(tensor, _spec(tensor, {}, "replicate"))


def split(tensor: Any, split_dimension: int, num_partitions: int) -> Any:
    """Split one dimension into `num_partitions` parts.

    Source: GShard (arXiv 2006.16668), section 3.2.
    Differs: the dimension is split over mesh axes whose sizes multiply to `num_partitions`. If several choices of axes
        have this product, an error asks for `annotate` instead. With fewer parts than devices, the other devices hold
        copies and are not idle.

    Example:
      >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
      ...     split(np.ones((4, 8)), 0, 1).sharding.spec
      P(None, None)
    """
    dim = _dimension(tensor, split_dimension, "split")
    return annotate(tensor, _spec(tensor, {dim: _axes_of_size(num_partitions)}, "split"))


def shard(tensor: Any, device_assignment: Any) -> Any:
    """Split several dimensions of a tensor; part [i, j, …] goes to device number `device_assignment[i, j, …]`.

    Args:
      tensor: the array.
      device_assignment: an array of device numbers with as many dimensions as the tensor. Its shape is the number of
          parts along each dimension. It contains the number of every device of the mesh once.

    Raises:
      SpecError: the arguments do not fit the tensor, or no choice of mesh axes gives each part to its device.

    Source: GShard (arXiv 2006.16668), section 3.2.
    """
    numbers, rank = _numbers(device_assignment, "shard: the device assignment"), len(_shape(tensor, "shard"))
    if numbers.ndim != rank:
        raise SpecError(
            f"shard: the device assignment has {numbers.ndim} dimensions, and the array has {rank}.\n"
            "  Write the device numbers in an array of as many dimensions, with size 1 where the array is not split."
        )
    axes = _axes_of_numbers(numbers, "shard: the device assignment")
    return annotate(tensor, _spec(tensor, dict(enumerate(axes)), "shard"))


def mesh_split(
    tensor: Any,
    device_mesh: Any,
    tensor_split_dims_mapping: Sequence[int],
    unspecified_dims: Sequence[int] | None = (),
    manual_mesh_dims: Sequence[int] | None = (),
) -> Any:
    """Split each dimension of a tensor over one dimension of a device mesh, or leave the dimension whole.

    Args:
      tensor: the array.
      device_mesh: the current mesh, or an array of device numbers. Each dimension of this array is one mesh axis, or
        several mesh axes merged into one; the dimensions may be in any order.
      tensor_split_dims_mapping: for each dimension of the tensor, the index of the dimension of `device_mesh` that
        splits it; -1 if none does.
      unspecified_dims: dimensions of the tensor that are left to the compiler (Auto axes only).
      manual_mesh_dims: must be empty; write programs that are manual over some mesh axes with `jax.shard_map`.

    Raises:
      SpecError: the mapping does not fit the tensor or the device mesh, or the spec does not fit the tensor.

    Source: GSPMD (arXiv 2105.04663), section 3.1, and 3.2 for partial specification.
    Differs: manual subgroups are not supported.

    Example:
      >>> mesh = jax.make_mesh((1, 1), ("x", "y"))
      >>> with jax.set_mesh(mesh):
      ...     mesh_split(np.ones((4, 8)), mesh, [-1, 0]).sharding.spec
      P(None, 'x')
    """
    if manual_mesh_dims:
        raise SpecError(
            "mesh_split: manual_mesh_dims is not supported.\n"
            "  Write the manual part with jax.shard_map(..., axis_names={'x'})."
        )
    axes = _axes_of_device_mesh(device_mesh)
    _refuse_mapping(tensor, tensor_split_dims_mapping, len(axes))
    placed = {at: axes[dim] for at, dim in enumerate(tensor_split_dims_mapping) if dim != -1}
    for dim in unspecified_dims or ():
        at = _dimension(tensor, dim, "mesh_split")
        if placed.get(at):
            raise SpecError(
                f"mesh_split: the mapping splits dimension {dim}, and unspecified_dims leaves it to the compiler.\n"
                "  Write -1 for it in tensor_split_dims_mapping."
            )
        placed[at] = (OPEN,)
    return annotate(tensor, _spec(tensor, placed, "mesh_split"))


# -- from numbers to names --------------------------------------------------------------------------------------------


def _spec(tensor: Any, axes: Mapping[int, tuple[str, ...]], call: str) -> Spec:
    rank = len(_shape(tensor, call))
    if rank > len(string.ascii_uppercase):
        raise SpecError(
            f"{call}: the array has {rank} dimensions, but there are only 26 letters.\n  Merge some of them."
        )
    return Spec(tuple(string.ascii_uppercase[:rank]), tuple(axes.get(at, ()) for at in range(rank)))


def _mesh(call: str) -> dict[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise SpecError(
            f"{call}: no mesh is set.\n"
            "  Call it inside 'with jax.set_mesh(mesh):', where mesh = jax.make_mesh((4, 2), ('x', 'y'))."
        )
    return mesh_sizes(mesh)


def _dimension(tensor: Any, dim: int, call: str) -> int:
    rank, at = len(_shape(tensor, call)), whole(dim)
    if at is None or not -rank <= at < rank:
        raise SpecError(
            f"{call}: the array has no dimension {shown(dim)}.\n  It has {rank} dimensions, numbered from 0."
        )
    return at % rank


def _shape(tensor: Any, call: str) -> tuple[int, ...]:
    return shape_of(tensor, call)


def _numbers(given: Any, what: str) -> np.ndarray:
    """Return device numbers as an array, from an array or from nested sequences."""
    with suppress(TypeError, ValueError):  # numpy raises these for rows of different lengths or a PRNG key
        numbers = np.asarray(given)
        if numbers.dtype.kind in "iu":
            return numbers
    raise SpecError(f"{what} is {shown(given)}.\n  Write device numbers, such as np.arange(8).reshape(2, 4).")


def _axes_of_size(parts: int) -> tuple[str, ...]:
    mesh = _mesh("split")
    real = [axis for axis, size in mesh.items() if size > 1]
    if whole(parts) is None:
        raise SpecError(f"cannot split: num_partitions is {shown(parts)}.\n  Write a whole number.")
    subsets = itertools.chain.from_iterable(itertools.combinations(real, n) for n in range(len(real) + 1))
    found = [axes for axes in subsets if math.prod(mesh[a] for a in axes) == parts]
    if len(found) == 1:
        return found[0]
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    if not found:
        raise SpecError(
            f"split: no mesh axes make {parts} parts; the mesh has {sizes}.\n"
            "  Split into a number of parts that is the product of some of its axes' sizes."
        )
    choices = listed([f"'A_{axes_suffix(axes)}'" for axes in found], "or")
    raise SpecError(
        f"split: several mesh axes make {parts} parts; the mesh has {sizes}.\n  Choose with annotate(), here {choices}."
    )


def _axes_of_device_mesh(device_mesh: Any) -> list[tuple[str, ...]]:
    mesh = _mesh("mesh_split")
    if not hasattr(device_mesh, "axis_names"):
        return _axes_of_numbers(_numbers(device_mesh, "mesh_split: the device mesh"), "mesh_split: the device mesh")
    if mesh_sizes(device_mesh) != mesh or tuple(device_mesh.axis_names) != tuple(mesh):
        raise SpecError(
            f"mesh_split: the device mesh is {mesh_sizes(device_mesh)}, and the current mesh is {mesh}.\n"
            "  Pass the mesh of jax.set_mesh."
        )
    return [(axis,) for axis in mesh]


def _axes_of_numbers(numbers: np.ndarray, what: str) -> list[tuple[str, ...]]:
    """Return, for each dimension of an array of device numbers, the mesh axes that this dimension stands for."""
    mesh = {axis: size for axis, size in _mesh(what.split(":")[0]).items() if size > 1}
    order = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    for axes in _runs(numbers.shape, mesh):
        flat = [list(mesh).index(a) for group in axes for a in group]
        if len(flat) == len(mesh) and np.array_equal(order.transpose(flat).reshape(numbers.shape), numbers):
            return list(axes)
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    raise SpecError(
        f"{what} does not follow the mesh, which has {sizes or 'one device'}.\n"
        f"  It must have each number from 0 to {order.size - 1} once, and its dimensions must run along mesh axes."
    )


def _runs(shape: Sequence[int], mesh: Mapping[str, int], used: tuple[str, ...] = ()) -> Iterator[tuple]:
    """Yield every way to write the sizes in `shape` as products of sizes of mesh axes, with no axis used twice."""
    if not shape:
        yield ()
        return
    free = [axis for axis in mesh if axis not in used]
    for count in range(len(free) + 1):
        for axes in itertools.permutations(free, count):
            if math.prod(mesh[a] for a in axes) == shape[0]:
                yield from ((axes, *rest) for rest in _runs(shape[1:], mesh, (*used, *axes)))


def _refuse_mapping(tensor: Any, mapping: Sequence[int], rank: int) -> None:
    dims = len(_shape(tensor, "mesh_split"))
    if not isinstance(mapping, Sequence) or any(whole(dim) is None for dim in mapping):
        raise SpecError(
            f"mesh_split: the mapping is {shown(mapping)}.\n"
            "  Write a list of dimensions of the device mesh, and -1 where the array is not split."
        )
    if len(mapping) != dims:
        raise SpecError(
            f"mesh_split: the mapping has {len(mapping)} entries, and the array has {dims} dimensions.\n"
            "  Write the dimension of the device mesh for each, and -1 where it is not split."
        )
    used = [dim for dim in mapping if dim != -1]
    for dim in used:
        if not 0 <= dim < rank:
            raise SpecError(
                f"mesh_split: the device mesh has no dimension {dim}.\n  It has {rank} dimensions, numbered from 0."
            )
        if used.count(dim) > 1:
            raise SpecError(
                f"mesh_split: dimension {dim} of the device mesh splits two dimensions of the array.\n"
                "  A dimension of the mesh can split only one dimension of a tensor."
            )
