"""The loss of a pipeline as a function that JAX differentiates: its gradients are those that the schedule computes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.ops._einsum import reshard
from gspmd.pipeline.calls import apart
from gspmd.pipeline.executor import Executor, Results, Stages
from gspmd.pipeline.schedule import Schedule

Tree = Any


def pipelined(
    stages: Stages, schedule: Schedule, *, axis: str, stream: str | Spec, shared: Tree
) -> Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]:
    """Make the loss of a pipeline: (shared, weights, batches) -> (loss, figures).

        x = first(shared, batch)                         stage 0
        x = chunk(weights[r, s], x, batch)               stage s of S, round r of R; x is sent to stage s + 1
        loss = last(shared, x, batch), mean over batches stage S - 1

    The three functions are of whole arrays on the other mesh axes, and may call any operation of gspmd there. A stage
    sends the next one its x, and the previous one the gradient of its own: one permute each per tick. Gradients of all
    microbatches are added where the weights are; those of `shared`, of which every stage has a copy, are summed over
    the stages once.

    Args:
        stages: the functions.
        schedule: what is computed when. Without differentiation, the forward passes alone.
        axis: the mesh axis of the stages; the schedule has as many stages as it has devices.
        stream: the spec of x.
        shared: a spec for every array of the shared weights, in the same tree.

    Returns:
        A function of `shared`, whose arrays lie as their specs say; `weights`, arrays [R, N, ...] whose N is split over
        `axis` first of all, so that chunk r·S + s has rows s·N/S to (s+1)·N/S of round r; and `batches`, arrays
        [M, ...]. It returns the mean loss of the microbatches and the mean figures [R, N, ...] of their chunks, which
        have no gradient. `shared` and `weights` are differentiated, in reverse mode.

    Raises:
        PlanError: by the function, if the mesh has no such axis, or another number of devices along it, or no other
            axis; or if an operation has lowering `"xla"` under Auto axes, or in schedule `"zero-bubble"`.

    Example:
        >>> import numpy as np
        >>> from gspmd import annotate, einsum
        >>> mesh = jax.make_mesh((1, 1), ("p", "x"))
        >>> with jax.set_mesh(mesh):
        ...     stages = Stages(
        ...         first=lambda shared, batch: batch,
        ...         chunk=lambda w, x, batch, number: (einsum("BE_x, EF_x -> BF_x", x, w[0]), 0.0, {}),
        ...         last=lambda shared, x, batch: einsum("BE_x -> ", x),
        ...     )
        ...     loss = pipelined(stages, Schedule.of("1f1b", 1, 2), axis="p", stream="BE_x", shared={})
        ...     x, w = annotate(np.ones((2, 3, 4), "float32"), "MBE_x"), annotate(np.eye(4)[None, None], "RN_pEF_x")
        ...     print(jax.value_and_grad(lambda w: loss({}, w, x)[0])(w)[0])
        12.0

    Source: Huang et al. 2019, GPipe (arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473), §2.2.
    Differs: all stages run one program, which computes `first` and `last` in every stage, and keeps the results of one.
        A chunk's forward pass is computed again in its backward pass, from its input.
    """
    stream, shared = Spec.parse(stream), jax.tree.map(Spec.parse, shared, is_leaf=_is_spec)

    @jax.custom_vjp
    def loss(shared_arrays: Tree, weights: Tree, batches: Tree) -> tuple[jax.Array, Tree]:
        alone = Schedule.of("forward", schedule.stages, schedule.microbatches, schedule.rounds)
        return run(alone, shared_arrays, weights, batches)[0]

    def forward(shared_arrays: Tree, weights: Tree, batches: Tree):
        values, results = run(schedule, shared_arrays, weights, batches)
        summed = jax.tree.map(_over_stages(axis), shared, results.shared, is_leaf=_is_spec)
        as_given = lambda gradient, x: gradient.astype(x.dtype)  # noqa: E731
        return values, jax.tree.map(as_given, (summed, results.weights), (shared_arrays, weights))

    def backward(gradients: tuple[Tree, Tree], cotangents: tuple[jax.Array, Tree]):
        scaled = jax.tree.map(lambda gradient: (gradient * cotangents[0]).astype(gradient.dtype), gradients)
        return *scaled, None

    loss.defvjp(forward, backward)

    def run(schedule: Schedule, *arrays: Tree) -> tuple[tuple[jax.Array, Tree], Results]:
        results = _region(Executor(stages, schedule, axis, stream), arrays)
        return (_over_stages(axis)(Spec((), ()), results.loss), results.figures), results

    return loss


def _over_stages(axis: str) -> Callable[[Spec, jax.Array], jax.Array]:
    """Sum an array over its leading dimension of stages, to the spec of the rest."""

    def summed(spec: Spec, x: jax.Array) -> jax.Array:
        letter = next(letter for letter in "SABCDEFGHIJKLMNOPQRTUVWXYZ" if letter not in spec.dims)
        return reshard(x, Equation.move(Spec((letter, *spec.dims), ((axis,), *spec.axes)), spec))

    return summed


def _region(executor: Executor, arrays: tuple[Tree, Tree, Tree]) -> Results:
    """Run the executor in a shard_map over the mesh axis of the stages; it sees the other axes as they were.

    JAX 0.10.2 gathers what crosses the border of a shard_map over some Explicit axes along the others, so these are
    Auto at the border.
    """
    mesh, axis = jax.sharding.get_abstract_mesh(), executor.axis
    _check(mesh, executor.schedule, axis)
    free = tuple(name for name in mesh.axis_names if name != axis)
    explicit = AxisType.Explicit in mesh.axis_types
    shared, weights, batches = (jax.tree.map(_partition, tree) for tree in arrays)

    def stage(*arrays: Tree) -> Results:
        results = executor(*arrays)
        if results.shared is None:
            return results._replace(loss=results.loss[None])
        return results._replace(loss=results.loss[None], shared=jax.tree.map(lambda x: x[None], results.shared))

    def entered(*arrays: Tree) -> Results:
        within = jax.tree.map(lambda spec: _without(spec, axis), (shared, weights, batches), is_leaf=_is_partition)
        return jax.sharding.explicit_axes(stage, axes=free, in_sharding=within)(*arrays) if explicit else stage(*arrays)

    of_stages, of_rows = jax.P(axis), jax.P(None, axis)
    region = jax.shard_map(
        entered,
        in_specs=(jax.P(), of_rows, jax.P()),
        out_specs=Results(of_stages, of_rows, of_stages, of_rows),
        axis_names={axis},
        check_vma=False,
    )
    if not explicit:
        return apart(jax.jit(region), *arrays)
    trains = executor.schedule.name != "forward"
    outs = Results(
        of_stages,
        of_rows,
        jax.tree.map(lambda spec: jax.P(axis, *spec), shared, is_leaf=_is_partition) if trains else None,
        weights if trains else None,
    )
    # JAX cannot, outside of jit
    return apart(jax.jit(jax.sharding.auto_axes(region, axes=free, out_sharding=outs)), *arrays)


def _check(mesh: jax.sharding.AbstractMesh, schedule: Schedule, axis: str) -> None:
    sizes, stages = dict(mesh.shape), schedule.stages
    if axis not in sizes:
        raise PlanError(
            f"the mesh has no axis {axis} for the stages of a pipeline.\n  It has {', '.join(sizes) or 'none'}."
        )
    if sizes[axis] != stages:
        raise PlanError(
            f"a schedule of {stages} stages cannot run on mesh axis {axis}, which has {sizes[axis]} devices.\n"
            f"  Make the schedule of {sizes[axis]} stages."
        )
    if len(sizes) == 1:
        raise PlanError(
            f"a pipeline needs a mesh axis besides {axis}, for its stages to plan on.\n  Add one; it may have size 1."
        )


def _partition(x: jax.Array) -> jax.P:
    return jax.typeof(x).sharding.spec


def _without(spec: jax.P, axis: str) -> jax.P:
    """The partition on the other mesh axes."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    return jax.P(*(tuple(name for name in entry if name != axis) or None for entry in entries))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, str | Spec)


def _is_partition(leaf: Any) -> bool:
    return isinstance(leaf, jax.P)
