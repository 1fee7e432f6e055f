"""The functions `annotate`, which places an array by its spec, and `spec_of`, which reads the spec of an array."""

import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd.annotate.arrays import check_type, is_unplaced, mesh_with_devices, placed_spec
from gspmd.annotate.errors import SpecError, shown
from gspmd.annotate.spec import Spec


def annotate(x: Any, spec: str | Spec) -> Any:
    """Place an array on the mesh of `jax.set_mesh` as its spec says.

    A concrete array is placed, or moved if it has a different placement. A traced array under Auto axes gets the spec
    as a constraint, which the compiler satisfies with collectives of its choice. Under Explicit axes the placement of a
    traced array is part of its type. A traced array that no mesh axis shards, such as a new array, is placed. Any other
    traced array is checked against the spec. A `jax.ShapeDtypeStruct` gets the sharding of the spec.

    Args:
      x: an array, a number, or a `jax.ShapeDtypeStruct`, with as many dimensions as the spec.
      spec: the spec, such as `"B_xLE_yz"`. `E_?` is allowed under Auto axes only. A partial sum is allowed under
          Explicit axes only, and only for an array that already is this partial sum. To make a partial sum, write an
          equation.

    Returns:
      The array with that placement.

    Raises:
      SpecError: the spec cannot be read, does not fit the array or the mesh, or differs from the array's type.

    Example:
      >>> mesh = jax.make_mesh((1,), ("x",))
      >>> with jax.set_mesh(mesh):
      ...     print(jax.typeof(annotate(jnp.ones((4, 8)), "B_xE")))
      float32[4@x,8]

    Source: Xu et al. 2021, GSPMD (arXiv 2105.04663), section 3.1; Lepikhin et al. 2020, GShard (arXiv 2006.16668),
      section 3.2.
    Differs: the mesh has named axes, and under Explicit axes a traced array that is sharded already is never moved.
    """
    spec = Spec.parse(spec)
    shape = shape_of(x, "annotate", f" with '{spec}'")
    doing = f"cannot annotate an array of shape {shape} with '{spec}'"
    mesh, traced = jax.sharding.get_abstract_mesh(), isinstance(x, jax.core.Tracer)
    explicit, auto = mesh.are_all_axes_explicit, mesh.are_all_axes_auto
    # Only the types of Explicit axes can say that an array is a partial sum, and they cannot leave a dimension open.
    typed = spec.partial or spec.reduced
    if mesh.empty or not ((auto and not typed) or (explicit and not spec.is_open)) or spec.faults(shape, mesh):
        from gspmd.annotate.diagnosis.placement import unfit_array  # imported here, since most arrays fit

        raise unfit_array(spec, shape, mesh, doing)
    devices, partition = mesh_with_devices(), spec.partition_spec()
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(devices, partition))
    if explicit and (traced or spec.partial):
        if traced and not spec.partial and is_unplaced(x):
            return jax.reshard(x, partition)
        return check_type(x, spec, doing)
    if traced or spec.is_open or (auto and devices is mesh):
        return jax.lax.with_sharding_constraint(x, partition)
    if isinstance(devices, jax.sharding.AbstractMesh):  # a constant inside a traced function
        return jax.reshard(jnp.asarray(x), partition)
    return jax.device_put(x, NamedSharding(devices, partition))


def spec_of(x: Any, dims: str | Sequence[str] | None = None) -> Spec:
    """Return the spec of an array.

    Under Explicit axes it is read from the array's type. For a concrete array it is read from the sharding.

    Args:
      x: an array.
      dims: the letters of its dimensions, `"BLE"`; A, B, C, … by default.

    Returns:
      The spec. A dimension is left open (`E_?`) if the compiler has not chosen its placement yet.

    Raises:
      SpecError: `dims` does not have one letter for each dimension.

    Example:
      >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
      ...     str(spec_of(annotate(np.ones((4, 8)), "B_xE"), "BE"))
      'B_xE'
    """
    shape = shape_of(x, "tell the spec of")
    rank, letters = len(shape), string.ascii_uppercase if dims is None else dims
    dims = tuple(letters[:rank] if dims is None else letters) if isinstance(letters, Sequence) else ()
    if len(dims) != rank or not all(isinstance(dim, str) for dim in dims):
        raise SpecError(
            f"cannot name the dimensions of an array of shape {shape} with {shown(letters)}.\n"
            "  Write one capital letter for each dimension of the array."
        )
    return placed_spec(x, dims)


def shape_of(x: Any, doing: str, how: str = "") -> tuple[int, ...]:
    """Return the shape of an array, a `jax.ShapeDtypeStruct` or a number, without converting it to an array.

    Raises:
        SpecError: the value has no shape.
    """
    shape = getattr(x, "shape", () if isinstance(x, (bool, int, float, complex)) else None)
    no_numbers = isinstance(x, np.ndarray) and x.dtype.kind in "OSUmM"
    if no_numbers or not isinstance(shape, tuple) or abs(x if isinstance(x, int) else 0) >= 2**63:
        raise SpecError(f"cannot {doing} {shown(x)}{how}.\n  Pass one array; use jax.tree.map for a tree of arrays.")
    return shape
