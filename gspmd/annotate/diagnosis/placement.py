"""Faults of an array's placement: the errors of `annotate()` and of the check of an array's type.

As in `sizes.py`, a spec is any object with the fields of a `Spec`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gspmd.annotate.diagnosis.sizes import fault_at
from gspmd.annotate.errors import Fault, SpecError, listed, report
from gspmd.annotate.parser import OPEN


def unfit_array(spec: Any, shape: tuple[int, ...], mesh: Any, doing: str) -> SpecError:
    """Return the error for an array that cannot have the spec on this mesh, a `jax.sharding.AbstractMesh`."""
    if mesh.empty:
        return SpecError(
            f"{doing}: no mesh is set.\n"
            "  Call it inside 'with jax.set_mesh(mesh):', where mesh = jax.make_mesh((4, 2), ('x', 'y'))."
        )
    return report(SpecError, doing, [*_axis_type_faults(spec, mesh), *spec.faults(shape, mesh)])


def other_type(spec: Any, actual: Any, doing: str) -> SpecError:
    """Return the error for an array whose type, `actual`, does not agree with the spec."""
    # The message has no apostrophe, because the search for a layout reads the specs between its quotes.
    fact = f"the spec says '{spec}', but the type of the array says '{actual}'."
    moved = re.search(r"operand \d+", doing)
    what = "x" if moved is None else moved[0].replace(" ", "_")  # In an equation, x may be the name of another array.
    remedy = f"Move it with gspmd.reshard({what}, '{actual} -> {spec}')."
    if actual.is_open:
        fact = f"the spec says '{spec}', but the type of the array does not say where it is placed."
        remedy = f"Place it outside of jit first: gspmd.annotate(x, '{spec}')."
    elif not set(spec.partial) <= set(actual.partial):
        remedy = "Only an equation can make a partial sum. Write an equation whose result has this spec."
    return report(SpecError, doing, [_of_whole(spec, fact, remedy)])


def on_another_mesh(spec: Any, there: Mapping[str, int], here: Mapping[str, int], doing: str) -> SpecError:
    """Return the error for an array whose type has a mesh other than the mesh in force."""
    fact = f"the array is on a different mesh, of {_mesh_text(there)}, and the mesh in force has {_mesh_text(here)}."
    return report(SpecError, doing, [_of_whole(spec, fact, _bring_here(spec))])


def on_other_devices(spec: Any, held: Sequence[int], wanted: Sequence[int], doing: str) -> SpecError:
    """Return the error for an array committed to the devices `held`, if the mesh in force has others (`wanted`)."""
    fact = f"the array is on {_devices_text(held)}, and the mesh in force has {_devices_text(wanted)}."
    return report(SpecError, doing, [_of_whole(spec, fact, _bring_here(spec))])


def _axis_type_faults(spec: Any, mesh: Any) -> list[Fault]:
    kinds = [kind.name for kind in mesh.axis_types]
    if "Manual" in kinds:
        fact = "inside a shard_map over this mesh every array is one device's part."
        return [_of_whole(spec, fact, "Annotate the array outside of it.")]
    if len(set(kinds)) > 1:
        types = ", ".join(f"{axis} {kind}" for axis, kind in zip(mesh.axis_names, kinds))
        fact = f"the mesh has axes of several types: {types}."
        return [_of_whole(spec, fact, "Make it with Auto axes only, or with Explicit axes only.")]
    if kinds[0] == "Explicit":
        remedy = "Name its mesh axes, or make the mesh with Auto axes."
        opened = [(at, dim) for at, dim in enumerate(spec.dims) if spec.axes[at] == (OPEN,)]
        fact = "dimension {} is left open, but under Explicit axes every dimension has a placement."
        return [fault_at(spec, at, fact.format(dim), remedy) for at, dim in opened]
    if spec.partial or spec.reduced:
        remedy = "Reduce it in the equation that makes it, or make the mesh with Explicit axes."
        fact = f"under Auto axes {'an array' if spec.partial else 'a gradient'} cannot be a partial sum."
        return [fault_at(spec, len(spec.dims), fact, remedy)]
    return []


def _of_whole(spec: Any, fact: str, remedy: str) -> Fault:
    return Fault(str(spec), 0, len(str(spec)), fact, remedy)


def _bring_here(spec: Any) -> str:
    return f"Move it outside of jit first: gspmd.annotate(x, '{spec.without_partial()}'), or jax.device_put."


def _mesh_text(sizes: Mapping[str, int]) -> str:
    return listed(f"{axis} ({size})" for axis, size in sizes.items())


def _devices_text(devices: Sequence[int]) -> str:
    shown = ", ".join(map(str, devices[:8])) + ", …" * (len(devices) > 8)
    return f"device {shown}" if len(devices) == 1 else f"{len(devices)} devices ({shown})"
