"""Programs with planned collectives: the current mesh, and the shard_map in which a plan's steps run.

Every planned program is one `jax.jit` whose name leads to its steps, so that `gspmd.trace` finds it in a jaxpr, loops
and recomputation included, and each step has its named scope, so that a compiled instruction can be joined to it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import jax
from jax.sharding import AxisType

from gspmd.annotate.arrays import check_type
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.hardware.chips import Chip, chip, chip_of_device
from gspmd.lowerings import default as lowering
from gspmd.lowerings.partial_sums import unbatched
from gspmd.planner.steps import Step

DEFAULT_CHIP = "tpu-v4"
"""Whose figures plans are made with on devices that chips.toml does not list, such as host devices."""


@dataclass(frozen=True)
class Context:
    """The mesh in force: its axis sizes, the chip it is made of, whether its axes are Explicit, and the lowering."""

    axes: tuple[tuple[str, int], ...]
    chip: Chip
    explicit: bool
    lowering: str

    @property
    def mesh(self) -> dict[str, int]:
        """Size of every mesh axis."""
        return dict(self.axes)


def context(lowering_name: str | None = None) -> Context:
    """The context of a call.

    Raises:
        PlanError: there is no mesh, its axes are of both types, or the call stands inside another shard_map.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise PlanError("there is no mesh.\n  Call inside `with jax.set_mesh(mesh):`, with a mesh from jax.make_mesh.")
    types = set(mesh.axis_types)
    if AxisType.Manual in types:
        raise PlanError(
            "cannot plan inside another shard_map: its mesh axes are already manual, so arrays there are pieces.\n"
            "  Call gspmd outside of the shard_map, or use jax.lax collectives inside it."
        )
    if len(types) > 1:
        raise PlanError("the mesh mixes Explicit and Auto axes.\n  Make it with axes of one type.")
    axes = tuple(zip(mesh.axis_names, mesh.axis_sizes))
    device = mesh.abstract_device
    known = chip_of_device(device.device_kind) if device is not None else None
    chosen = lowering.resolve(lowering_name)
    if chosen == "auto" and known is None:  # host devices share their cores with what they send: nothing is hidden
        chosen = "blocking"
    return Context(axes, known or chip(DEFAULT_CHIP), types == {AxisType.Explicit}, chosen)


@dataclass(frozen=True)
class Registered:
    """What a planned program's name stands for; `backward` is set where JAX differentiates the program by itself."""

    equation: str
    steps: tuple[Step, ...]
    backward: tuple[Step, ...] | None = None


PREFIX = "gspmd_"
_programs: dict[str, Registered] = {}  # as lasting as the jaxprs that name them, so nothing is ever dropped


@cache
def register(registered: Registered) -> str:
    """The name under which a program runs; equal programs share one."""
    name = f"{PREFIX}{len(_programs)}"
    _programs[name] = registered
    return name


def registered(name: str) -> Registered | None:
    """The program of a jit's name, or None where the name is not one of ours."""
    return _programs.get(name)


def run(
    name: str, steps: Sequence[Step], body: Callable, in_specs: Sequence, out_specs: Any, *arrays: jax.Array
) -> Any:
    """Run a shard_map over the whole mesh whose collectives are the planned `steps`.

    Never differentiate through it: `gradient.with_gradient` stands outside, whose backward pass is another `run`.

    Args:
        name: what is computed, in notation; it opens every scope inside.
        steps: the plan; `body` emits them, with `lower.emit`.
        body: from local pieces to local pieces.
        in_specs: one Spec per array.
        out_specs: a Spec, or a tuple of them, as `body` returns arrays. A `jax.P` is taken as it is.

    Raises:
        SpecError: under Explicit axes, an array's type is not what its spec says.
        PlanError: under Auto axes, an array owes a partial sum.
    """
    explicit = context().explicit
    ins = tuple(
        _input_partition(spec, x, i, name, explicit) for i, (spec, x) in enumerate(zip(in_specs, arrays, strict=True))
    )
    outs = jax.tree.map(partition, out_specs, is_leaf=lambda leaf: isinstance(leaf, (Spec, jax.P)))
    return _program(register(Registered(name, tuple(steps))), name, body, ins, outs)(*arrays)


def _own_promotion() -> AbstractContextManager:
    """JAX's usual rules of promotion for code of ours, which knows what it mixes, whatever a user allows his own."""
    return jax.numpy_dtype_promotion("standard")


def partition(spec: Spec | jax.P) -> jax.P:
    """The `jax.P` of a spec."""
    return spec.partition_spec() if isinstance(spec, Spec) else spec


@lru_cache(maxsize=4096)
def _program(name: str, title: str, body: Callable, ins: tuple, outs: Any) -> Callable:
    def scoped(*pieces):
        # The scope stands inside: a reduction keeps only those of its body when a compiler rewrites it.
        with jax.named_scope(f"gspmd[{title}]"), _own_promotion():
            return body(*pieces)

    def program(*arrays):
        return mapped(scoped, ins, outs)(*arrays)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program)


def mapped(body: Callable, ins: Any, outs: Any) -> Callable:
    """The shard_map of a body over the mesh in force at the call; JAX binds one to the mesh in which it is made."""

    def run_mapped(*arrays):
        wanted = _whole(outs) if jax.sharding.get_abstract_mesh().size == 1 else outs
        run = _run_held if any(x.size == 0 for x in arrays) else jax.shard_map
        results = run(body, in_specs=ins, out_specs=wanted, check_vma=False)(*arrays)
        return results if wanted is outs else jax.tree.map(_owing, outs, results, is_leaf=_is_partition)

    return unbatched(run_mapped, ins, outs)


def _run_held(body: Callable, *, in_specs: Any, out_specs: Any, check_vma: bool) -> Callable:
    """A shard_map of pieces without elements, whose results depend on one input and so on none that XLA throws away.

    XLA replaces what has no elements by a constant, and cannot read the body of a shard_map that is left without any
    input ("expected at least one operand ... GlobalToLocalShape", jaxlib 0.10.2).
    """

    def held(zero, *pieces):
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), body(*pieces))

    def run(*arrays):
        ins = (in_specs,) * len(arrays) if _is_partition(in_specs) else in_specs
        whole = jax.shard_map(held, in_specs=(jax.P(), *ins), out_specs=out_specs, check_vma=check_vma)
        return whole(jax.numpy.zeros((), "int8"), *arrays)

    return run


def _is_partition(leaf: Any) -> bool:
    return isinstance(leaf, jax.P)


def _whole(outs: Any) -> Any:
    """On one device JAX inlines a shard_map and refuses its partial sums; they are whole there, and typed after."""
    return jax.tree.map(lambda spec: jax.P(*spec.partitions), outs, is_leaf=_is_partition)


def _owing(spec: jax.P, x: jax.Array) -> jax.Array:
    return jax.reshard(x, spec) if spec.unreduced or spec.reduced else x


def _input_partition(spec: Spec, x: Any, number: int, name: str, explicit: bool) -> jax.P:
    if explicit:
        doing = f"cannot use operand {number + 1} of '{name}' as '{spec}'"
        actual = jax.typeof(check_type(x, spec, doing)).sharding.spec
        return actual if actual.reduced else spec.partition_spec()
    if spec.partial:
        raise PlanError(auto_partial(spec))
    return spec.partition_spec()


def auto_partial(spec: Spec) -> str:
    """Why a partial sum cannot cross an equation's border under Auto axes."""
    return (
        f"a partial sum, '{spec}', cannot enter or leave an equation under Auto mesh axes.\n"
        "  Use Explicit axes (the default of jax.make_mesh), or settle it inside the equation."
    )


def compiler_chooses(f: Callable, in_specs: Sequence[Spec], out_specs: Any, *arrays: jax.Array, name: str = "") -> Any:
    """Run plain code on placed arrays and let the compiler insert the collectives; differentiable by JAX.

    Args:
        f: plain jax.numpy code.
        in_specs, out_specs: one Spec per array; constraints under Auto axes, types under Explicit ones.
        name: what is computed, in notation, for the ledger; none where a scope says it already.
    """
    with jax.named_scope(f"gspmd[{name}]") if name else nullcontext(), _own_promotion():
        return _annotated(f, in_specs, out_specs, *arrays)


def _annotated(f: Callable, in_specs: Sequence[Spec], out_specs: Any, *arrays: jax.Array) -> Any:
    ctx = context()
    is_spec = lambda leaf: isinstance(leaf, Spec)  # noqa: E731
    outs = jax.tree.map(partition, out_specs, is_leaf=is_spec)
    if ctx.explicit:
        for number, (spec, x) in enumerate(zip(in_specs, arrays, strict=True)):
            _input_partition(spec, x, number, getattr(f, "__name__", "f"), True)
        return jax.sharding.auto_axes(f, out_sharding=outs)(*arrays)
    constrain = jax.lax.with_sharding_constraint
    arrays = [constrain(x, spec.partition_spec()) for x, spec in zip(arrays, in_specs, strict=True)]
    return jax.tree.map(constrain, f(*arrays), outs)


def as_settled(spec: Spec, cotangent: jax.Array) -> jax.Array:
    """The cotangent of an array that owes sums, in the type of one that does not; the same on every device already."""
    plain = spec.without_partial().partition_spec()
    return _retyped(spec.partition_spec(dual=True), plain)(cotangent) if spec.partial else cotangent


def as_cotangent(spec: Spec, x: jax.Array) -> jax.Array:
    """The way back: a settled array in the type that the cotangent of an array of `spec` has."""
    plain = spec.without_partial().partition_spec()
    return _retyped(plain, spec.partition_spec(dual=True))(x) if spec.partial else x


@lru_cache(maxsize=1024)
def _retyped(here: jax.P, there: jax.P) -> Callable:
    return lambda x: mapped(lambda piece: piece, here, there)(x)  # mapped when called: on the mesh in force then
