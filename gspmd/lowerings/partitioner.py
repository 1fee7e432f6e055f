"""The limits of XLA's partitioner: meshes on which it may end the process, and dimensions left to the compiler.

docs/compiler.md describes these limits.
"""

from collections.abc import Mapping

from gspmd import jax_internals
from gspmd.annotate.parser import OPEN
from gspmd.annotate.spec import Spec
from gspmd.display import manual


def splits_badly(mesh: Mapping[str, int]) -> bool:
    """Return whether XLA's partitioner, on this mesh, may have to split a mesh axis in a way that is impossible.

    To move a mesh axis from one dimension of an array to another, the partitioner may regroup the devices by the size
    of a different axis. With x=3 and y=2, for example, it treats the six devices as 2 × 3. From jax 0.12 on, shardings
    are expressed by names of mesh axes. Names cannot express this split, because 2 does not divide 3, and the process
    ends with a failed check. If all sizes are powers of one prime, names can express every split. A mesh with a single
    axis never needs a split.

    Steps of a plan never split an axis, because they gather, slice or exchange the last axes of a dimension. So on a
    mesh that splits badly, the lowering named `xla` constrains an array after every step of the plan. It does so under
    every release of JAX, so that the communication of an equation does not depend on the release.

    >>> splits_badly({"x": 3, "y": 2}), splits_badly({"x": 4, "y": 2, "z": 1}), splits_badly({"x": 6})
    (True, False, False)
    """
    sizes = [size for size in mesh.values() if size > 1]
    if len(sizes) < 2:
        return False
    prime = next(n for n in range(2, sizes[0] + 1) if sizes[0] % n == 0)
    return not all(_is_power(size, prime) for size in sizes)


def _is_power(size: int, prime: int) -> bool:
    while size % prime == 0:
        size //= prime
    return size == 1


def may_abort(mesh: Mapping[str, int]) -> bool:
    """Return whether code without a plan may crash the process on this mesh, under the installed release of JAX."""
    return jax_internals.PARTITIONER_KEEPS_AXIS_NAMES and splits_badly(mesh)


# -- messages that say why a dimension cannot be left open
# ---------------------------------------------------------------


def open_where_it_may_abort(spec: Spec, mesh: Mapping[str, int]) -> str:
    """Return the reason why no dimension can be left to the compiler on a mesh where this may crash the process."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    return (
        f"'{spec}' leaves a dimension to the compiler, which may end the process on a mesh of {sizes}: its sizes"
        f" are not all powers of one prime ({manual.page('compiler.md')}).\n"
        f"  Name its mesh axes, or leave it unsharded: '{_closed(spec)}'."
    )


def open_in_shard_map(spec: Spec) -> str:
    """Return the reason why no dimension can be left to the compiler in a shard_map."""
    return (
        f"'{spec}' leaves a dimension to the compiler, which cannot place it inside a shard_map, and the stages"
        f" of a pipeline run in one.\n  Name its mesh axes, or leave it unsharded: '{_closed(spec)}'."
    )


def open_under_explicit(spec: Spec) -> str:
    """Return the reason why no dimension can be left to the compiler under Explicit axes."""
    return (
        f"'{spec}' leaves a dimension to the compiler, but under Explicit mesh axes an array's type has its sharding.\n"
        "  Name its mesh axes, or make the mesh with Auto axes and run it with lowering='xla'."
    )


def _closed(spec: Spec) -> Spec:
    """Return the spec that errors propose, in which dimensions left to the compiler are unsharded."""
    axes = tuple(() if axes == (OPEN,) else axes for axes in spec.axes)
    return Spec(spec.dims, axes, spec.partial, spec.reduced)
