"""The loss of a pipeline, as a function that JAX can differentiate; gradients are computed as the schedule says."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError, shown
from gspmd.annotate.spec import Spec
from gspmd.lowerings.in_force import on_no_axes
from gspmd.lowerings.partitioner import open_in_shard_map
from gspmd.lowerings.program import mapped
from gspmd.ops._einsum import reshard
from gspmd.pipeline.calls import apart
from gspmd.pipeline.executor import PipelineExecutor, StageResults
from gspmd.pipeline.schedule import Schedule
from gspmd.pipeline.stage import Stages

Tree = Any


def pipelined(
    stages: Stages | Sequence[Stages],
    schedule: Schedule,
    *,
    axis: str,
    stream: str | Spec | Sequence[str | Spec],
    shared: Tree,
    data: str | Sequence[str] = (),
) -> Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]:
    """Make the loss of a pipeline: (shared, weights, batches) -> (loss, metrics).

        x = first(shared, batch)                               (on stage 0)
        x = chunk(weights[r, s], x, batch, r·S + s)            (on stage s of S in round r of R; x goes to stage s + 1)
        loss = mean over batches of last(shared, x, batch)     (on stage S - 1)

    If `Stages.chunk_reads_shared` is True, `chunk` gets `shared` as its first argument, before the arguments above.

    The three functions in `Stages` (`first`, `chunk` and `last`) may call any operation of gspmd. The arrays that these
    functions take and return are global over all mesh axes other than `axis` and `data`. In each tick a stage sends x
    to the next stage, and the gradient of its input to the previous stage, by one permute each. Gradients of all
    microbatches are added up on the devices that hold the weights. Every stage has a copy of `shared`, and the
    gradients of `shared` are summed over the stages once. Along the mesh axes `data`, pipelines run side by side, each
    on its own sequences, and the loss is the mean over all pipelines. Gradients are returned as partial sums over
    `data`, which the caller reduces.

    Several stacks of blocks, such as an encoder and a decoder, are given as a sequence. Each stack has chunks in every
    stage. A microbatch goes through all stages for the first stack, and then through all stages for the second stack.
    Every chunk of the second stack reads the output y of the first stack, which goes from stage to stage together with
    x:

        y = chunk(weights[0][r, s], y, batch, r·S + s)       first stack, whose first() makes y
        x = chunk(weights[1][r, s], x, batch, r·S + s, y)    second stack, whose last() returns the loss

    Args:
        stages: the three functions, as a `Stages`; for several stacks, a sequence with a `Stages` for each stack.
        schedule: the work of each stage in each tick, for a single stack. For several stacks, `Schedule.in_stacks`
            derives the schedule of each stack from it. If the loss is not differentiated, only forward passes run.
        axis: the mesh axis of the stages; its size is the number of stages of the schedule.
        stream: the spec of x; for several stacks, a sequence with the spec of each stack's x.
        shared: the spec of every array of the shared weights, in a tree with the structure of these weights.
        data: the mesh axis or axes along which pipelines run side by side. The three functions do not see these axes,
            and the specs do not mention these axes. For example, `"BLE"` is the spec of the stream of one pipeline.

    Returns:
        A function (shared, weights, batches) -> (loss, metrics).
        Its argument `shared` has arrays that are sharded as the specs `shared` say.
        Its argument `weights` has arrays [R, N, ...], whose dimension N is sharded over `axis` as its first mesh axis.
        The weights of chunk r·S + s are rows s·N/S to (s+1)·N/S of round r.
        Its argument `batches` has arrays [M, ...], which are sharded over `data` as their types say.
        The types of `shared` and `weights` must be `reduced` over `data`. The results are the mean loss of the
        microbatches, and the mean metrics [R, N, ...] of the chunks. For several stacks, weights and metrics are
        tuples, with a tree for each stack. The loss can be differentiated with respect to `shared` and `weights`, in
        reverse mode; the metrics have no gradient.

    Raises:
        PlanError: a spec leaves a dimension open (`E_?`); a stack has no spec; a stack other than the last one has the
            function `last`; or the last stack has no function `last`. The returned function raises PlanError in these
            cases: weights are not given for each stack; the mesh lacks `axis` or an axis of `data`; the size of `axis`
            is not the number of stages; or a weight is not `reduced` over `data`, which needs Explicit mesh axes. If
            the mesh has further axes, the returned function also raises PlanError for an operation with lowering
            `"xla"`, under Auto axes or in schedule `"zero-bubble"`.

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
    Differs: all stages run one program, which computes `first` and `last` in every stage and keeps the results of one
        stage. The backward pass of a chunk recomputes the chunk's forward pass from the chunk's input.
    """
    alone = isinstance(stages, Stages)
    stacks = (stages,) if isinstance(stages, Stages) else tuple(stages)
    streams = tuple(map(Spec.parse, (stream,) if isinstance(stream, str | Spec) else stream))
    if len(streams) != len(stacks) or not stacks:
        fact = f"the number of stacks is {len(stacks)}, but stream= has {len(streams)} of their specs"
        raise PlanError(f"cannot make a pipeline: {fact}.\n  Pass in stream= one spec for each Stages.")
    for number, stack in enumerate(stacks, 1):
        if (stack.last is None) == (number == len(stacks)):
            fault = "has no last() to compute the loss" if stack.last is None else "has last(), but a stack follows it"
            remedy = "Give Stages(last=...)." if stack.last is None else "Leave it out."
            raise PlanError(f"stack {number} of {len(stacks)} {fault}.\n  {remedy}")
    shared = jax.tree.map(Spec.parse, shared, is_leaf=_is_spec)
    data = (data,) if isinstance(data, str) else tuple(data)
    for spec in (*streams, *jax.tree.leaves(shared, is_leaf=_is_spec)):
        if spec.is_open:
            raise PlanError(open_in_shard_map(spec))

    @jax.custom_vjp
    def loss(shared_arrays: Tree, weights: Tree, batches: Tree) -> tuple[jax.Array, Tree]:
        forward = Schedule.of("forward", schedule.stages, schedule.microbatches, schedule.rounds)
        return run(forward, shared_arrays, weights, batches)[0]

    def forward(shared_arrays: Tree, weights: Tree, batches: Tree):
        values, results = run(schedule, shared_arrays, weights, batches)
        of_shared = partial(_summed, axes=(axis,), kept=data)
        over_stages = jax.tree.map(of_shared, shared, results.shared, is_leaf=_is_spec)
        as_given = lambda gradient, x: gradient.astype(x.dtype)  # noqa: E731
        return values, jax.tree.map(as_given, (over_stages, results.weights), (shared_arrays, weights))

    def backward(gradients: tuple[Tree, Tree], cotangents: tuple[jax.Array, Tree]):
        scaled = jax.tree.map(lambda gradient: (gradient * cotangents[0]).astype(gradient.dtype), gradients)
        return *jax.tree.map(lambda gradient: _partial_sum(gradient, data), scaled), None

    loss.defvjp(forward, backward)

    def run(schedule: Schedule, *arrays: Tree) -> tuple[tuple[jax.Array, Tree], StageResults]:
        mesh = jax.sharding.get_abstract_mesh()
        _check(mesh, schedule, axis, data, arrays[:2])
        batches = schedule.microbatches * prod(mesh.shape[name] for name in data)
        executor = PipelineExecutor(stacks, schedule.in_stacks(len(stacks)), axis, streams, batches)
        results = _region(executor, data, jax.tree.map(_whole, arrays))
        figures = jax.tree.map(lambda x: _over_data(x, axis, data), results.figures)
        return (_summed(Spec((), ()), results.loss, (axis, *data)), figures), results

    def loss_of_one(shared_arrays: Tree, weights: Tree, batches: Tree) -> tuple[jax.Array, Tree]:
        value, (figures,) = loss(shared_arrays, (weights,), batches)
        return value, figures

    def loss_of_all(shared_arrays: Tree, weights: Sequence[Tree], batches: Tree) -> tuple[jax.Array, Tree]:
        if not isinstance(weights, list | tuple) or len(weights) != len(stacks):
            raise PlanError(
                f"cannot run {len(stacks)} stacks with weights {shown(jax.tree.map(jnp.shape, weights))}.\n"
                "  Give a tuple with a tree of weights for each stack."
            )
        return loss(shared_arrays, tuple(weights), batches)

    return loss_of_one if alone else loss_of_all


def _summed(spec: Spec, x: jax.Array, axes: tuple[str, ...], kept: tuple[str, ...] | None = None) -> jax.Array:
    """Sum an array over its leading dimension, which is sharded over mesh axes.

    Args:
        spec: the spec of the dimensions after the leading one or, if `kept` is not None, after the first two.
        x: the array.
        axes: the mesh axes of the leading dimension.
        kept: the mesh axes of a second leading dimension, which is not summed; None if there is no such dimension.
    """
    free = [letter for letter in "SABCDEFGHIJKLMNOPQRTUVWXYZ" if letter not in spec.dims]
    after = spec if kept is None else Spec((free[1], *spec.dims), (kept, *spec.axes))
    return reshard(x, Equation.move(Spec((free[0], *after.dims), (axes, *after.axes)), after))


def _over_data(x: jax.Array, axis: str, data: tuple[str, ...]) -> jax.Array:
    """Sum metrics over the pipelines that run side by side; the result has the metrics [R, N, ...] of each layer."""
    if not data:
        return x[0]
    dims = "RNABC"[: x.ndim - 1]
    return _summed(Spec(tuple(dims), ((), (axis,), *((),) * (len(dims) - 2))), x, data)


def _partial_sum(x: jax.Array, data: tuple[str, ...]) -> jax.Array:
    """Make a partial sum over the mesh axes `data` from an array whose leading dimension has a summand per device."""
    if not data:
        return x[0]
    _, *partitions = jax.typeof(x).sharding.spec.partitions
    return mapped(lambda piece: piece[0], _partition(x), jax.P(*partitions, unreduced={*data}))(x)


def _whole(x: jax.Array) -> jax.Array:
    """Return an array without `reduced` in its type."""
    partition = _partition(x)
    return mapped(lambda piece: piece, partition, jax.P(*partition.partitions))(x) if partition.reduced else x


def _region(executor: PipelineExecutor, data: tuple[str, ...], arrays: tuple[Tree, Tree, Tree]) -> StageResults:
    """Run the executor in a shard_map over the axes of the stages and of the data, and over no other axes.

    JAX 0.10.2 has no partial sums in a shard_map over only some axes. So this shard_map includes the axes of the data,
    and each device adds up its own summand. The results have a dimension of summands. This dimension comes first or,
    for shared weights, second, after the dimension of the stages.

    In a shard_map over some Explicit axes, JAX gathers arguments and results along the other axes. So the other axes
    are Auto where arrays enter and leave.
    """
    mesh, axis = jax.sharding.get_abstract_mesh(), executor.axis
    free = tuple(name for name in mesh.axis_names if name not in (axis, *data))
    explicit = bool(free) and AxisType.Explicit in mesh.axis_types
    shared, weights, batches = (jax.tree.map(_partition, tree) for tree in arrays)
    trains = executor.schedules[0].name != "forward"

    def stage(*arrays: Tree) -> StageResults:
        with nullcontext() if free else on_no_axes():
            results = executor(*arrays)
        alone = jax.tree.map(lambda x: x[None], results)
        return alone._replace(shared=jax.tree.map(lambda x: x[None], alone.shared))

    def entered(*arrays: Tree) -> StageResults:
        within = jax.tree.map(lambda each: _along(each, free), (shared, weights, batches), is_leaf=_is_partition)
        return jax.sharding.explicit_axes(stage, axes=free, in_sharding=within)(*arrays) if explicit else stage(*arrays)

    summands, of_data = data or None, jax.tree.map(lambda each: _along(each, data), batches, is_leaf=_is_partition)
    of_rows = jax.P(summands, None, axis)
    region = jax.shard_map(
        entered,
        in_specs=(jax.P(), jax.P(None, axis), of_data),
        out_specs=StageResults(jax.P((axis, *data)), of_rows, jax.P(axis, summands), of_rows),
        axis_names={axis, *data},
        check_vma=False,
    )
    if explicit:
        outs = StageResults(
            jax.P((axis, *data)),
            of_rows,
            jax.tree.map(lambda each: jax.P(axis, summands, *each), shared, is_leaf=_is_partition) if trains else None,
            jax.tree.map(lambda each: jax.P(summands, *each), weights, is_leaf=_is_partition) if trains else None,
        )
        region = jax.sharding.auto_axes(region, axes=free, out_sharding=outs)
    return apart(jax.jit(region), *arrays)  # JAX cannot run such a shard_map outside of jit


def _check(
    mesh: jax.sharding.AbstractMesh, schedule: Schedule, axis: str, data: tuple[str, ...], weights: Tree
) -> None:
    sizes, stages = dict(mesh.shape), schedule.stages
    if axis not in sizes:
        raise PlanError(
            f"the mesh has no axis {axis} for the stages of a pipeline.\n  It has {', '.join(sizes) or 'none'}."
        )
    if unknown := [name for name in data if name not in sizes]:
        raise PlanError(f"the mesh has no axis {unknown[0]} for pipelines side by side.\n  It has {', '.join(sizes)}.")
    if sizes[axis] != stages:
        raise PlanError(
            f"a schedule of {stages} stages cannot run on mesh axis {axis}, which has {sizes[axis]} devices.\n"
            f"  Make the schedule of {sizes[axis]} stages."
        )
    for x in jax.tree.leaves(weights):
        if (reduced := _partition(x).reduced) != {*data}:
            raise PlanError(
                f"cannot run pipelines side by side along {', '.join(data) or 'no mesh axis'}: weights must be "
                f"reduced over these axes, and one is reduced over {', '.join(sorted(reduced)) or 'none'}.\n"
                "  Use the same Explicit axes for the weights as in data=, for example with "
                "gspmd.reshard(w, 'NEF -> NEF reduced-x')."
            )


def _partition(x: jax.Array) -> jax.P:
    return jax.typeof(x).sharding.spec


def _along(partition: jax.P, axes: tuple[str, ...]) -> jax.P:
    """Return a partition spec with only those mesh axes that are in `axes`."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in partition)
    return jax.P(*(tuple(name for name in entry if name in axes) or None for entry in entries))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, str | Spec)


def _is_partition(leaf: Any) -> bool:
    return isinstance(leaf, jax.P)
