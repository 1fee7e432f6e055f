"""Programs with planned collectives: their mesh, their names, and the shard_map around their steps.

Every planned program is one `jax.jit` whose name carries the program's steps. So `gspmd.trace` finds the steps in a
jaxpr, even in loops and recomputation. Each step has a named scope, by which compiled instructions are matched with
steps.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from math import prod
from typing import Any

import jax

from gspmd.annotate.arrays import check_type
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.hardware.chips import Chip, chip
from gspmd.lowerings import in_force
from gspmd.lowerings.partitioner import may_abort
from gspmd.lowerings.scopes import program_scope
from gspmd.planner.steps import Step
from gspmd.planner.unknown import UnknownStep, is_unknown

DEFAULT_CHIP = "tpu-v4"
"""The chip whose figures are used for devices that chips.toml does not list, such as host devices."""

# -- the mesh in force -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """The mesh and the lowering of a call.

    Mesh axes that are already manual where the call is made are left out.

    Attributes:
        axes: the mesh axes and their sizes.
        chip: the chip of the mesh's devices.
        explicit: whether the mesh axes are Explicit.
        lowering: the name of the lowering.
        in_shard_map: whether other mesh axes are manual where the call is made, as in pipeline stages.
    """

    axes: tuple[tuple[str, int], ...]
    chip: Chip
    explicit: bool
    lowering: str
    in_shard_map: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Size of every mesh axis."""
        return dict(self.axes)

    @property
    def compiler_chooses(self) -> bool:
        """Whether operations run as plain annotated code.

        This is so under the lowering `xla`, if XLA's partitioner can handle the mesh.
        """
        return self.lowering == "xla" and not may_abort(self.mesh)


def context(lowering_name: str | None = None) -> Context:
    """Return the context of a call.

    It is read once, when an operation is called. The gradient of the operation uses the same context.

    Raises:
        PlanError: no mesh is set, or the mesh has both Explicit and Auto axes. Or the call is in a shard_map over all
            mesh axes, and not inside the `with` block of `in_force.on_no_axes`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise PlanError(
            "cannot plan this call: there is no mesh.\n"
            "  Call inside `with jax.set_mesh(mesh):`, with a mesh from jax.make_mesh."
        )
    if mesh.are_all_axes_manual:
        in_force.check_all_manual()
    if mesh.explicit_axes and mesh.auto_axes:
        raise PlanError(
            "cannot plan this call: the mesh mixes Explicit and Auto axes.\n"
            "  Make the mesh with axes of one type: axis_types=(jax.sharding.AxisType.Explicit,) * number of axes."
        )
    axes = tuple((axis, size) for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)
    device = mesh.abstract_device
    known = in_force.chip_of_devices() if device is not None else in_force.chip_in_force()
    if known is not None and device is not None and (across := in_force.across_slices()):
        # If the stages of a pipeline are the slices, each stage is on one slice.
        here = prod(across[axis] for axis, _ in axes)
        known = replace(known, node_devices=prod(size for _, size in axes) // here if here > 1 else 0)
    chosen = in_force.resolve(lowering_name)
    if chosen == "auto" and known is None:  # on host devices the same cores send and multiply, so nothing overlaps
        chosen = "blocking"
    return Context(axes, known or chip(DEFAULT_CHIP), bool(mesh.explicit_axes), chosen, bool(mesh.manual_axes))


# -- names that carry a program's steps --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedProgram:
    """The plan of a program, as `gspmd.trace` reads it.

    Attributes:
        equation: the computation in notation, such as `BE, EF -> BF`.
        steps: the steps of the program.
        backward: the steps of the gradient if JAX differentiates the program, else None.
        hidden_seconds: the seconds saved by the overlap in the program's loops.
    """

    equation: str
    steps: tuple[Step, ...]
    backward: tuple[Step, ...] | None = None
    hidden_seconds: float = 0.0


class ProgramName(str):
    """The name of a jitted program, with the planned program as an attribute.

    Jaxprs keep the name of a jitted function, so they keep this attribute too.
    """

    program: PlannedProgram


PREFIX = "gspmd_"
_numbers = count()


@lru_cache(maxsize=4096)
def name_of(program: PlannedProgram) -> ProgramName:
    """Return the name under which a program runs; equal programs have the same name.

    The name contains a number and not the equation. The reason is that names are compared as strings, and programs of
    one equation on two meshes need different names.
    """
    name = ProgramName(f"{PREFIX}{next(_numbers)}")
    name.program = program
    return name


def program_of(equation: Any) -> PlannedProgram | None:
    """Return the planned program that an operation of a jaxpr calls, or None if the operation calls no such program."""
    name = equation.params.get("name")
    if isinstance(name, ProgramName):
        return name.program
    if isinstance(name, str) and name.startswith(PREFIX) and name.removeprefix(PREFIX).isdigit():  # not gspmd_loss
        raise AssertionError(f"JAX has copied the name {name} as a plain string, so the plan is lost")
    return None


def named(program: Callable, planned: PlannedProgram) -> Callable:
    """Jit a function under a name that carries the steps of the planned program."""
    program.__name__ = program.__qualname__ = name_of(planned)
    return jax.jit(program)


# -- the shard_map -----------------------------------------------------------------------------------------------------


def run(
    ctx: Context, name: str, steps: Sequence[Step], body: Callable, in_specs: Sequence, out_specs: Any, *arrays: Any,
    hidden_seconds: float = 0.0,
) -> Any:  # fmt: skip
    """Run a shard_map over the whole mesh, with the planned `steps` as its collectives.

    JAX must never differentiate through this shard_map. It would transpose the body, and all-reduce the cotangent of
    each operand that is replicated over mesh axes, even if the cotangent is scattered later. So operations get a custom
    gradient from `gradient.with_gradient`, whose backward pass is another `run`.

    Args:
        ctx: the context of the call.
        name: the computation in notation. All named scopes inside the shard_map begin with this text.
        steps: the steps of the plan, which `body` emits.
        body: a function from local arrays to local arrays.
        in_specs: one Spec per array.
        out_specs: a Spec, or a tuple of Specs if `body` returns a tuple.
        arrays: the arrays, sharded as `in_specs` say.
        hidden_seconds: the predicted seconds saved by overlap.

    Raises:
        SpecError: under Explicit axes, the type of an array differs from its spec.
        PlanError: under Auto axes, an array is a partial sum. Or a search has yet to find the placements, and the steps
            cannot be planned before the placements are known.
    """
    if is_unknown(ctx.mesh) and not all(isinstance(step, UnknownStep) for step in steps):
        raise PlanError(f"cannot search the placement of '{name}': its steps can be planned only when it is known.")
    pairs = enumerate(zip(in_specs, arrays, strict=True))
    arrays = tuple(placed_input(ctx, spec, x, number, name) for number, (spec, x) in pairs)
    ins = tuple(spec.partition_spec() for spec in in_specs)
    outs = jax.tree.map(Spec.partition_spec, out_specs, is_leaf=lambda leaf: isinstance(leaf, Spec))
    return _jitted(PlannedProgram(name, tuple(steps), None, hidden_seconds), body, ins, outs)(*arrays)


# The body is part of the cache key, so callers of `run` must cache their body too, or every call is compiled again.
@lru_cache(maxsize=4096)
def _jitted(planned: PlannedProgram, body: Callable, ins: tuple, outs: Any) -> Callable:
    def scoped(*pieces):
        # The scope is inside the body: when a compiler rewrites a reduction, only scopes of its body are kept.
        with jax.named_scope(program_scope(planned.equation)), own_promotion():
            return body(*pieces)

    return named(lambda *arrays: mapped(scoped, ins, outs)(*arrays), planned)


def own_promotion() -> AbstractContextManager:
    """Use JAX's standard promotion rules inside a `with` block, even if the user has set other rules."""
    return jax.numpy_dtype_promotion("standard")


def mapped(body: Callable, ins: Any, outs: Any) -> Callable:
    """Return a function that runs a body in a shard_map.

    A new shard_map is made at each call, because JAX binds a shard_map to the mesh in force.
    """

    def run_mapped(*arrays):
        # On one device JAX inlines a shard_map and refuses its partial sums. They are complete sums there, and get
        # their type afterwards.
        mesh = jax.sharding.get_abstract_mesh()
        alone, free = mesh.size == 1, {*mesh.axis_names}.difference(mesh.manual_axes)
        if not free:
            return body(*arrays)
        wanted = jax.tree.map(lambda spec: jax.P(*spec.partitions), outs, is_leaf=_is_partition) if alone else outs
        run = _shard_map_of_empty if any(x.size == 0 for x in arrays) else jax.shard_map
        # Unchecked (check_vma=False), because for JAX the result of a gather varies over devices, and a check would
        # refuse it as replicated.
        results = run(body, in_specs=ins, out_specs=wanted, axis_names=free, check_vma=False)(*arrays)
        return jax.tree.map(_typed, outs, results, is_leaf=_is_partition) if alone else results

    partitions = jax.tree.leaves((ins, outs), is_leaf=_is_partition)
    if not any(each.unreduced or each.reduced for each in partitions):
        return run_mapped
    from gspmd.lowerings.transformations.partial_sums import unbatched

    return unbatched(run_mapped, ins, outs)


def _shard_map_of_empty(body: Callable, *, in_specs: Any, **options: Any) -> Callable:
    """Wrap a body in a shard_map if some arguments are empty arrays.

    XLA replaces an empty array by a constant. It fails on a shard_map whose body then has no input ("expected at least
    one operand ... GlobalToLocalShape", jaxlib 0.10.2). So a zero is added as a further input, on which every result
    depends.
    """

    def held(zero, *pieces):
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), body(*pieces))

    def run(*arrays):
        ins = (in_specs,) * len(arrays) if isinstance(in_specs, jax.P) else in_specs
        whole = jax.shard_map(held, in_specs=(jax.P(), *ins), **options)
        return whole(jax.numpy.zeros((), "int8"), *arrays)

    return run


def _is_partition(leaf: Any) -> bool:
    return isinstance(leaf, jax.P)


def _typed(spec: jax.P, x: jax.Array) -> jax.Array:
    return jax.reshard(x, spec) if spec.unreduced or spec.reduced else x


def placed_input(ctx: Context, spec: Spec, x: Any, number: int, name: str) -> Any:
    """Check that an operand of a computation is sharded as its spec says, and return the operand.

    Under Explicit axes the returned array has the spec's type, including mesh axes of size 1.

    Args:
        ctx: the context of the call.
        spec: the spec of the operand.
        x: the operand.
        number: the index of the operand, for error messages.
        name: the computation in notation, for error messages.
    """
    if ctx.explicit:
        return check_type(x, spec, f"cannot use operand {number + 1} of '{name}' as '{spec}'")
    if spec.partial or spec.reduced:
        raise PlanError(partial_under_auto(spec))
    return x


def partial_under_auto(spec: Spec) -> str:
    """Return the reason why a partial sum cannot enter or leave an equation under Auto axes."""
    return (
        f"a partial sum, '{spec}', cannot enter or leave an equation under Auto mesh axes.\n"
        "  Use Explicit axes (the default of jax.make_mesh), or reduce it inside the equation."
    )
