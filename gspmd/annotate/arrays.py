"""annotate(): a spec put on an array. A concrete array is placed, a traced one is constrained or checked."""

import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from gspmd.annotate.diagnosis.nodes import OPEN
from gspmd.annotate.errors import Fault, SpecError, listed, report, shown
from gspmd.annotate.spec import Spec
from gspmd.annotate.validation import fault_at


def annotate(x: Any, spec: str | Spec) -> Any:
    """Puts a spec on one array, on the mesh of `jax.set_mesh`.

    A concrete array is placed (moved, if it lies elsewhere). Under `jit` and Auto axes the spec is a constraint, which
    the compiler meets by a move of its own choice. Under Explicit axes a traced array has its placement in its type:
    there the spec states that type, and is checked. A `jax.ShapeDtypeStruct` gets the sharding.

    Args:
      x: an array, a number, or a `jax.ShapeDtypeStruct`, with as many dimensions as the spec.
      spec: such as `"B_xLE_yz"`. `E_?` exists under Auto axes only. A partial sum is made by an equation: here it can
        be stated of an array that owes it, under Explicit axes.

    Returns:
      The array with that placement.

    Raises:
      SpecError: for a spec that cannot be read, does not fit the array or the mesh, or is not what the type says.

    Example:
      >>> mesh = jax.make_mesh((1,), ("x",))
      >>> with jax.set_mesh(mesh):
      ...     print(jax.typeof(annotate(np.ones((4, 8), np.float32), "B_xE")))
      float32[4@x,8]

    Source: Xu et al. 2021, GSPMD (arXiv 2105.04663), section 3.1; Lepikhin et al. 2020, GShard (arXiv 2006.16668),
      section 3.2.
    Differs: the mesh has named axes, and an array whose type is known is checked rather than moved.
    """
    spec = Spec.parse(spec)
    mesh = jax.sharding.get_abstract_mesh()
    _refuse_misfit(x, spec, mesh)
    explicit = _axis_type(mesh) == AxisType.Explicit
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(_placing_mesh(), spec.partition_spec()))
    if explicit and (isinstance(x, jax.core.Tracer) or spec.partial):
        return check_type(x, spec, f"cannot annotate an array of shape {np.shape(x)} with '{spec}'")
    if isinstance(x, jax.core.Tracer) or spec.is_open or (not explicit and _placing_mesh() is mesh):
        return jax.lax.with_sharding_constraint(x, spec.partition_spec())
    if isinstance(_placing_mesh(), jax.sharding.AbstractMesh):  # a constant inside a traced function
        return jax.reshard(jnp.asarray(x), spec.partition_spec())
    return jax.device_put(x, NamedSharding(_placing_mesh(), spec.partition_spec()))


def spec_of(x: Any, dims: str | Sequence[str] | None = None) -> Spec:
    """The spec that an array has: by its type under Explicit axes, by where it lies if it is concrete.

    Args:
      x: an array.
      dims: the letters of its dimensions, `"BLE"`; A, B, C, … if they are not given.

    Returns:
      Its spec; a dimension whose placement the compiler has yet to choose is left open.

    Raises:
      SpecError: if there is not one letter for each dimension.

    Example:
      >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
      ...     str(spec_of(annotate(np.ones((4, 8)), "B_xE"), "BE"))
      'B_xE'
    """
    shape = shape_of(x, "tell the spec of")
    rank, letters = len(shape), string.ascii_uppercase if dims is None else dims
    dims = tuple(letters[:rank] if dims is None else letters) if isinstance(letters, Sequence) else ()
    if len(dims) != rank or not all(isinstance(dim, str) for dim in dims):
        raise SpecError(f"cannot name the dimensions of an array of shape {shape} by {shown(letters)}.\n"
                        "  Write one capital letter for each dimension of the array.")
    placed = _partition_spec_of(x)
    if placed is None:
        return Spec(dims, ((OPEN,),) * rank)
    entries = [_axes_of_entry(entry) for entry in placed.partitions] + [()] * (rank - len(placed.partitions))
    return Spec(dims, tuple(entries), tuple(placed.unreduced))


def shape_of(x: Any, doing: str, how: str = "") -> tuple[int, ...]:
    """The shape of what has one: an array, a `jax.ShapeDtypeStruct`, a number; not of what an array would be made of.

    Raises:
      SpecError: it has none.
    """
    shape = getattr(x, "shape", () if isinstance(x, (bool, int, float, complex)) else None)
    wordy = isinstance(x, np.ndarray) and x.dtype.kind in "OSUmM"
    if wordy or not isinstance(shape, tuple) or abs(x if isinstance(x, int) else 0) >= 2**63:
        raise SpecError(f"cannot {doing} {shown(x)}{how}.\n"
                        "  It takes one array; use jax.tree.map for a tree of arrays.")
    return shape


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _refuse_misfit(x: Any, spec: Spec, mesh: Any) -> None:
    how = f" with '{spec}'"
    doing = f"cannot annotate an array of shape {shape_of(x, 'annotate', how)}{how}"
    if mesh.empty:
        raise SpecError(f"{doing}: no mesh is set.\n"
                        "  Call it inside 'with jax.set_mesh(mesh):', where mesh = jax.make_mesh((4, 2), ('x', 'y')).")
    faults = [*_axis_type_faults(x, spec, mesh), *spec.faults(np.shape(x), mesh)]
    if faults:
        raise report(SpecError, doing, faults)


def _axis_type_faults(x: Any, spec: Spec, mesh: Any) -> list[Fault]:
    kind, whole = _axis_type(mesh), (str(spec), 0, len(str(spec)))
    if kind == AxisType.Manual:
        fact = "inside a shard_map over this mesh every array is one device's part."
        return [Fault(*whole, fact, "Annotate the array outside of it.")]
    if kind is None:
        return [Fault(*whole, f"the mesh has axes of several types: {_axis_types_text(mesh)}.",
                      "Make it with Auto axes only, or with Explicit axes only.")]
    if kind == AxisType.Explicit:
        return [fault_at(spec, at, f"dimension {dim} is left open, and Explicit axes place every dimension.",
                         "Name its mesh axes, or make the mesh with Auto axes.")
                for at, dim in enumerate(spec.dims) if spec.axes[at] == (OPEN,)]
    if spec.partial:
        return [fault_at(spec, len(spec.dims), "under Auto axes no array can owe a sum.",
                         "Settle it in the equation that makes it, or make the mesh with Explicit axes.")]
    return []


def check_type(x: Any, spec: Spec, doing: str) -> Any:
    """An array whose type, under Explicit axes, says what the spec does.

    Axes of size 1 make a type but no placement: where only they differ, the array is given the spec's type.

    Raises:
      SpecError: opening with `doing`, if the type says something else, or the array lies elsewhere.
    """
    refuse_elsewhere(x, spec, doing)
    actual, mesh = spec_of(x, spec.dims), dict(jax.sharding.get_abstract_mesh().shape)
    if actual == spec:
        return x
    if actual.without_trivial(mesh) == spec.without_trivial(mesh):
        return jax.reshard(x, spec.partition_spec())
    fact = f"the spec says '{spec}', and the array is '{actual}' by its type."
    remedy = f"Bring it there by gspmd.reshard(x, '{actual} -> {spec}')."
    if actual.is_open:
        fact = f"the spec says '{spec}', and by its type nobody knows where the array lies."
        remedy = f"Place it before, outside of jit: gspmd.annotate(x, '{spec}')."
    elif not set(spec.partial) <= set(actual.partial):
        remedy = "A partial sum is left by an equation; annotate() cannot make one."
    fault = Fault(str(spec), 0, len(str(spec)), fact, remedy)
    raise report(SpecError, doing, [fault])


def refuse_elsewhere(x: Any, spec: Spec, doing: str) -> None:
    """Raises SpecError, opening with `doing`, for an array on other devices, or of a type on another mesh."""
    here, there, placed = jax.sharding.get_abstract_mesh(), _mesh_of(x), _placing_mesh()
    explicit = there is not None and {*there.axis_types, *here.axis_types} == {AxisType.Explicit}
    committed = not isinstance(x, jax.core.Tracer) and getattr(x, "committed", False)
    if explicit and there.shape != here.shape:
        fact = f"the array lies on another mesh, of {_mesh_text(there)}, and the mesh in force has {_mesh_text(here)}."
    elif committed and placed is not here and _devices_of(x) != (held := [d.id for d in placed.devices.flat]):
        fact = f"the array lies on {_devices_text(_devices_of(x))}, and the mesh in force has {_devices_text(held)}."
    else:
        return
    remedy = f"Bring it here before, outside of jit: gspmd.annotate(x, '{spec.without_partial()}'), or jax.device_put."
    raise report(SpecError, doing, [Fault(str(spec), 0, len(str(spec)), fact, remedy)])


def _mesh_of(x: Any) -> Any:
    """The mesh of an array's type or placement; None where it has none."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return None if mesh is None or mesh.empty else mesh


def _mesh_text(mesh: Any) -> str:
    return listed(f"{axis} ({size})" for axis, size in mesh.shape.items())


def _devices_text(devices: Sequence[int]) -> str:
    shown = ", ".join(map(str, devices[:8])) + ", …" * (len(devices) > 8)
    return f"device {shown}" if len(devices) == 1 else f"{len(devices)} devices ({shown})"


def _devices_of(x: Any) -> list[int]:
    """The devices of a concrete array, in their mesh's order where they have one."""
    mesh = _mesh_of(x)
    return sorted(d.id for d in x.sharding.device_set) if mesh is None else [d.id for d in mesh.devices.flat]


# -- what JAX says ----------------------------------------------------------------------------------------------------


def _axis_type(mesh: Any) -> AxisType | None:
    kinds = set(mesh.axis_types)
    return AxisType.Manual if AxisType.Manual in kinds else kinds.pop() if len(kinds) == 1 else None


def _axis_types_text(mesh: Any) -> str:
    return ", ".join(f"{axis} {kind.name}" for axis, kind in zip(mesh.axis_names, mesh.axis_types))


def _placing_mesh() -> Any:
    """The devices of the current mesh; under a trace, where they are not at hand, the abstract mesh."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside jit
        return jax.sharding.get_abstract_mesh()
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def _partition_spec_of(x: Any) -> Any:
    """The `jax.P` of an array; None where nobody knows it yet."""
    sharding: Any = getattr(x, "sharding", None) if not isinstance(x, jax.core.Tracer) else jax.typeof(x).sharding
    if isinstance(x, jax.core.Tracer) and sharding.mesh.empty:  # made outside of any mesh: on no axis of this one
        return jax.P() if jax.sharding.get_abstract_mesh().are_all_axes_explicit else None
    if isinstance(x, jax.core.Tracer) and AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    return jax.P() if sharding is None or len(sharding.device_set) == 1 else None


def _axes_of_entry(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (OPEN,) if entry is jax.P.UNCONSTRAINED else (entry,) if isinstance(entry, str) else tuple(entry)
