"""The spec of an array, read from its type or sharding, and the check that it agrees with a written spec."""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from gspmd.annotate.parser import OPEN
from gspmd.annotate.spec import Spec


def check_type(x: Any, spec: Spec, doing: str) -> Any:
    """Check, under Explicit axes, that the type of an array agrees with the spec, and return the array.

    Mesh axes of size 1 are part of a type but shard nothing. If the type and the spec differ only in such axes, the
    returned array has the type of the spec.

    Raises:
      SpecError: the type differs from the spec, or the array is on other devices; the message begins with `doing`.
    """
    refuse_elsewhere(x, spec, doing)
    actual, mesh = placed_spec(x, spec.dims), dict(jax.sharding.get_abstract_mesh().shape)
    if actual == spec:
        return x
    if actual.without_trivial(mesh) == spec.without_trivial(mesh):
        return jax.reshard(x, spec.partition_spec())
    from gspmd.annotate.diagnosis.placement import other_type  # imported here, as below, since most arrays fit

    raise other_type(spec, actual, doing)


def is_unplaced(x: Any) -> bool:
    """Return whether each device has the whole of a traced array: it is neither sharded nor a partial sum."""
    spec = jax.typeof(x).sharding.spec
    return not any(spec) and not spec.unreduced and not spec.reduced


def refuse_elsewhere(x: Any, spec: Spec, doing: str) -> None:
    """Raise an error if an array's type has a mesh other than the current one, or if it is committed to other devices.

    Raises:
      SpecError: the array is on another mesh or on other devices; the message begins with `doing`.
    """
    here, there, devices = jax.sharding.get_abstract_mesh(), _mesh_of(x), mesh_with_devices()
    differs = there is not None and there is not here and there.shape != here.shape
    if there is not None and differs and {*there.axis_types, *here.axis_types} == {AxisType.Explicit}:
        from gspmd.annotate.diagnosis.placement import on_another_mesh

        raise on_another_mesh(spec, there.shape, here.shape, doing)
    committed = not isinstance(x, jax.core.Tracer) and getattr(x, "committed", False)
    if not committed or devices is here:
        return
    held, wanted = _devices_of(x), [device.id for device in devices.devices.flat]
    if held != wanted:
        from gspmd.annotate.diagnosis.placement import on_other_devices

        raise on_other_devices(spec, held, wanted, doing)


def _mesh_of(x: Any) -> Any:
    """Return the mesh of an array's type or sharding, or None if there is no mesh."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return None if mesh is None or mesh.empty else mesh


def placed_spec(x: Any, dims: tuple[str, ...]) -> Spec:
    """Return the spec of an array, from its type or sharding; a dimension is left open if its placement is unknown."""
    partition = _partition_spec_of(x)
    if partition is None:
        return Spec(dims, ((OPEN,),) * len(dims))
    entries = (*partition.partitions, *[None] * len(dims))[: len(dims)]
    return Spec(dims, tuple(map(_axes_of_entry, entries)), partition.unreduced, partition.reduced)


def mesh_with_devices() -> Any:
    """Return the current mesh with its devices.

    While a function is traced, the devices are not known, and the result is the abstract mesh.
    """
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside jit
        return jax.sharding.get_abstract_mesh()
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def _devices_of(x: Any) -> list[int]:
    """Return the ids of a concrete array's devices, in the order of its mesh if it has one."""
    mesh = _mesh_of(x)
    return sorted(d.id for d in x.sharding.device_set) if mesh is None else [d.id for d in mesh.devices.flat]


def _partition_spec_of(x: Any) -> Any:
    """Return the partition spec (`jax.P`) of an array, or None if the compiler has not chosen the sharding yet."""
    if isinstance(x, jax.core.Tracer):
        sharding = jax.typeof(x).sharding
        if sharding.mesh.empty:  # made outside of any mesh, so not sharded
            return None if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types else jax.P()
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return None
    else:
        sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    return jax.P() if sharding is None or len(sharding.device_set) == 1 else None


def _axes_of_entry(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (OPEN,) if entry is jax.P.UNCONSTRAINED else (entry,) if isinstance(entry, str) else tuple(entry)
