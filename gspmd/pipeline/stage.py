"""One stage of a pipeline in one stack of blocks: the work of its slots, and the permutes to neighboring stages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gspmd.annotate.spec import Spec
from gspmd.hardware.links import collective_seconds, network_seconds, wire_bytes
from gspmd.lowerings import in_force
from gspmd.lowerings.marks import marked
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.scopes import step_scope
from gspmd.pipeline.schedule import Schedule
from gspmd.pipeline.split import Halves, split
from gspmd.planner.steps import Step
from gspmd.planner.unknown import UnknownStep, UnknownSteps, is_unknown

Tree = Any


@dataclass(frozen=True)
class Stages:
    """The functions that the stages of a pipeline compute for a stack of blocks.

    The arrays that these functions take and return are global over the mesh axes that the pipeline does not use.

    Attributes:
        first: a function (shared, batch) -> x, which computes the input of the first stage, such as an embedding.
        chunk: a function (weights, x, batch, number) -> (x, loss, figures), which computes the layers of chunk
            `number`. The loss is a float32 scalar that is added to the loss of the last stage. `figures` are the
            metrics, a tree of float32 arrays with a row for each layer. In a stack that follows another stack, `chunk`
            has one more argument, which is the output of the previous stack.
        last: a function (shared, x, batch) -> the loss of a microbatch, a float32 scalar; None if another stack
            follows.
        chunk_reads_shared: whether the layers use shared weights, such as one table of relative positions. If True, the
            arguments of `chunk` are (shared, weights, x, batch, number).
    """

    first: Callable[[Tree, Tree], jax.Array]
    chunk: Callable[..., tuple[jax.Array, jax.Array, Tree]]
    last: Callable[[Tree, jax.Array, Tree], jax.Array] | None = None
    chunk_reads_shared: bool = False

    def run_chunk(self, shared: Tree, weights: Tree, *inputs: Any) -> tuple[jax.Array, jax.Array, Tree]:
        """Compute the layers of a chunk from its weights and its other arguments."""
        return self.chunk(*([shared] if self.chunk_reads_shared else []), weights, *inputs)


Streams = tuple[jax.Array, ...]
"""The arrays that a stage sends to the next stage.

They are the stack's stream and, if there is a previous stack, the output of that stack.
"""


class StackState(NamedTuple):
    """The state that a stage carries from tick to tick, for one stack of blocks."""

    activation: Streams  # received from the previous stage
    cotangent: Any  # cotangents of the same streams, received from the next stage
    inputs: Any  # inputs of the chunks whose backward pass is still to come
    residuals: Any  # residuals of the chunks whose gradients of weights are still to come
    figures: Tree
    weights: Tree


class StageSums(NamedTuple):
    """The sums of a stage over all stacks: the stage's loss, and the gradients of shared weights."""

    loss: jax.Array
    shared: Tree


@dataclass(frozen=True)
class StageOfStack:
    """The computations of one stage of the pipeline in one stack of blocks.

    Attributes:
        stages: the functions to compute in a stage.
        schedule: the order in which these functions run.
        axis: the mesh axis over which layers are split into stages.
        streams: the specs of the arrays that a stage sends to the next stage.
        shapes: the shapes of the arrays that a stage sends to the next stage.
        batches: number of microbatches over which the loss is averaged.
        shared: the weights that every stage has.
        weights: [rounds, layers, ...], the weights of the stage in this stack.
        microbatches: the inputs of all microbatches, [M, ...].
    """

    stages: Stages
    schedule: Schedule
    axis: str
    streams: tuple[Spec, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    batches: int
    shared: Tree
    weights: Tree
    microbatches: Tree

    # -- the table ----------------------------------------------------------------------------------------------------

    def rows(self, kind: str, ticks: range) -> "TickSlots":
        """Return the slots of one kind of work for each tick in `ticks` and each stage; zeros where a stage waits."""
        places = self.schedule.inputs, self.schedule.residuals
        table = [
            [
                (*work, *(held.get((kind, tick, stage), 0) for held in places), 1) if work else (0, 0, 0, 0, 0)
                for stage, work in enumerate(self.schedule.ticks[tick][kind])
            ]
            for tick in ticks
        ]
        return TickSlots(*(jnp.asarray(column, jnp.int32) for column in np.moveaxis(np.array(table), -1, 0)))

    def _mine(self, row: "TickSlots") -> "TickSlots":
        """Return the entry of this stage in a row that has an entry for every stage."""
        return TickSlots(*(lax.dynamic_index_in_dim(x, lax.axis_index(self.axis), 0, keepdims=False) for x in row))

    # -- ticks --------------------------------------------------------------------------------------------------------

    def begin(self, trains: bool) -> StackState:
        """Return the state before the first tick: zeros, and None for arrays that are used only if `trains` is True."""
        chunk, some = row_of(self.weights, 0), row_of(self.microbatches, 0)
        x, *before = self.shapes
        _, _, figures = jax.eval_shape(self.stages.run_chunk, self.shared, chunk, x, some, jnp.int32(0), *before)
        figures = jax.tree.map(lambda x: jnp.zeros((self.schedule.rounds, *x.shape), jnp.float32), figures)
        activation = self._zeros()
        if not trains:
            return StackState(activation, None, None, None, figures, None)
        residuals = None
        if self._halves is not None:
            count = max(self.schedule.residuals.values()) + 1
            residuals = [_zeros(x, x.sharding.spec, count) for x in self._halves.kept]
        held = self._zeros(self.schedule.in_flight)
        return StackState(activation, activation, held, residuals, figures, wide_zeros(self.weights))

    def _zeros(self, *more: int) -> Streams:
        return tuple(_zeros(x, spec.partition_spec(), *more) for x, spec in zip(self.shapes, self.streams))

    @cached_property
    def _halves(self) -> Halves | None:
        """The backward pass of a chunk, split in two, or None if the schedule does not split it."""
        if "weights" not in self.schedule.kinds:
            return None
        streams, batch = self._zeros(), row_of(self.microbatches, 0)
        moving = streams, batch, jnp.int32(0), streams, jnp.float32(0)
        return split(self._pullback, (self.shared, row_of(self.weights, 0)), moving)

    def forward(
        self, state: StackState, sums: StageSums, rows: "TickSlots", ended: Streams
    ) -> tuple[StackState, StageSums]:
        """Compute a chunk's forward pass.

        `ended` has the output of the previous stack, which the first stage reads; it is empty if there is no previous
        stack.
        """
        row = self._mine(rows)
        batch = row_of(self.microbatches, row.microbatch)
        number, is_first, is_last = self._chunk(row)
        starts = self.stages.first(self.shared, batch), *ended
        streams = tuple(jnp.where(is_first, start, held) for start, held in zip(starts, state.activation))
        weights = row_of(self.weights, row.round)
        y, loss, figures = self.stages.run_chunk(self.shared, weights, streams[0], batch, number, *streams[1:])
        state = state._replace(activation=self._sent((y, *streams[1:]), 1))
        if state.inputs is not None:  # the backward pass computes everything else again from the input
            held = tuple(_put_at(into, row.input, x, row.active) for into, x in zip(state.inputs, streams))
            return state._replace(inputs=held), sums
        if self.stages.last is not None:
            loss = loss + jnp.where(is_last, self.stages.last(self.shared, y, batch), 0.0)
        return self._added(state, sums, row, loss, figures)

    def backward(
        self, state: StackState, sums: StageSums, rows: "TickSlots", ending: jax.Array | None
    ) -> tuple[StackState, StageSums]:
        """Compute a chunk's backward pass.

        `ending` is the cotangent from the next stack, which the last stage reads; it is None if there is no next stack.
        """
        row = self._mine(rows)
        number, _, is_last = self._chunk(row)
        x, *before = (row_of(held, row.input) for held in state.inputs)
        # In a slot without a microbatch cotangents are 0, so the slot adds nothing to any gradient.
        active = row.active == 1
        of_x, *of_before = state.cotangent
        of_x = jnp.where(active & ~is_last, of_x, jnp.zeros_like(x))
        if ending is not None:
            of_x = jnp.where(active & is_last, ending, of_x)
        cotangent = of_x, *(jnp.where(active & ~is_last, each, jnp.zeros_like(each)) for each in of_before)
        share = row.active / jnp.float32(self.batches)
        fixed = self.shared, row_of(self.weights, row.round)
        moving = (x, *before), row_of(self.microbatches, row.microbatch), number, cotangent, share
        if self._halves is None:
            (of_streams, loss, figures), gradients = self._pullback(fixed, moving)
            state, sums = self._with_gradients(state, sums, row, *gradients)
        else:
            (of_streams, loss, figures), kept = self._halves.first(fixed, moving)
            held = [_put_at(into, row.residual, each, row.active) for into, each in zip(state.residuals, kept)]
            state = state._replace(residuals=held)
        return self._added(state._replace(cotangent=self._sent(of_streams, -1)), sums, row, loss, figures)

    def gradients(self, state: StackState, sums: StageSums, rows: "TickSlots") -> tuple[StackState, StageSums]:
        """Add the weights' gradients of a split backward pass; no stage waits in these slots, so nothing is masked."""
        row = self._mine(rows)
        assert self._halves is not None
        kept = [row_of(each, row.residual) for each in state.residuals]
        return self._with_gradients(
            state, sums, row, *self._halves.rest((self.shared, row_of(self.weights, row.round)), kept)
        )

    def _pullback(self, fixed: Tree, moving: Tree) -> tuple[Tree, Tree]:
        """Compute the backward pass of a chunk from its input.

        Returns:
            Two tuples, (gradients of the streams, loss, metrics) and (gradient of shared weights, gradient of the
            chunk's weights).
        """
        streams, batch, number, (cotangent, *beyond), share = moving
        is_first, is_last = self._ends(number)

        def compute(
            shared: Tree, weights: Tree, x: jax.Array, *before: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], Tree]:
            x = jnp.where(is_first, self.stages.first(shared, batch), x)
            y, loss, figures = self.stages.run_chunk(shared, weights, x, batch, number, *before)
            if self.stages.last is not None:
                loss = loss + jnp.where(is_last, self.stages.last(shared, y, batch), 0.0)
            return (y, loss), figures

        (_, loss), transposed, figures = jax.vjp(compute, *fixed, *streams, has_aux=True)
        of_shared, of_weights, of_x, *of_before = transposed((cotangent, share))
        # Later stages have read the output of the previous stack too, so their gradients are added.
        of_before = (mine + theirs for mine, theirs in zip(of_before, beyond))
        return ((of_x, *of_before), loss, figures), (of_shared, of_weights)

    def _chunk(self, row: "TickSlots") -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the index of this stage's chunk, whether the chunk is the first, and whether it is the last."""
        number = row.round * self.schedule.stages + lax.axis_index(self.axis)
        return number, *self._ends(number)

    def _ends(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        return number == 0, number == self.schedule.stages * self.schedule.rounds - 1

    def _added(
        self, state: StackState, sums: StageSums, row: "TickSlots", loss: jax.Array, figures: Tree
    ) -> tuple[StackState, StageSums]:
        """Add a microbatch's contribution to the loss and to the metrics, unless the stage waits."""

        def share(x: jax.Array) -> jax.Array:
            return jnp.where(row.active == 1, x, 0.0) / self.batches

        figures = jax.tree.map(lambda into, x: _add_at(into, row.round, share(x)), state.figures, figures)
        return state._replace(figures=figures), sums._replace(loss=sums.loss + share(loss))

    def _with_gradients(
        self, state: StackState, sums: StageSums, row: "TickSlots", of_shared: Tree, of_weights: Tree
    ) -> tuple[StackState, StageSums]:
        added = jax.tree.map(lambda into, x: _add_at(into, row.round, x), state.weights, of_weights)
        shared = jax.tree.map(jnp.add, sums.shared, of_shared)
        return state._replace(weights=added), sums._replace(shared=shared)

    def _sent(self, streams: Streams, by: int) -> Streams:
        """Send streams to the next stage (by = 1) or to the previous stage (by = -1)."""
        around = self.schedule.rounds > 1
        has_next = self.schedule.stack + 1 < self.schedule.stacks
        # A stack's output goes from the last stage to the first of the next stack, and its gradient back.
        ends = (around or (has_next and by == 1), around or by == -1)
        return tuple(self._sent_one(x, spec, by, around=end) for x, spec, end in zip(streams, self.streams, ends))

    def _sent_one(self, x: jax.Array, stream: Spec, by: int, *, around: bool) -> jax.Array:
        """Send x by one permute, which is a planned step; with `around`, the first stage follows the last stage."""
        stages = self.schedule.stages
        pairs = [(stage, (stage + by) % stages) for stage in range(stages)]
        if not around:
            pairs = [(source, target) for source, target in pairs if target == source + by]
        if stages == 1:  # the next chunk, if there is one, is on the same stage
            return x if pairs else jnp.zeros_like(x)
        ctx = context()
        sends = stream, x.shape, x.dtype.itemsize, ctx, self.axis, stages
        step: Step
        if is_unknown(ctx.mesh):
            step = UnknownStep.of(UnknownSteps(sent, sends, "stream"), stream, stream, "stream")
        else:
            (step,) = sent(*sends)["stream"]
        name = f"{stream} to the {'next' if by == 1 else 'previous'} stage"
        return run(ctx, name, (step,), _body(self.axis, tuple(pairs), step), (stream,), stream, x)


def sent(
    stream: Spec, shape: tuple[int, ...], width: int, ctx: Context, axis: str, stages: int
) -> dict[str, tuple[Step, ...]]:
    """Return the step that sends a stream to the next or previous stage, in a mapping with the key "stream".

    Args:
        stream: the spec of the stream within a stage.
        shape: the global shape of the stream.
        width: number of bytes of one element.
        ctx: the mesh and the chip of a stage.
        axis: the mesh axis of the stages.
        stages: the number of stages.
    """
    held = int(np.prod(stream.local_shape(shape, ctx.mesh))) * width
    kind, mesh = "collective-permute", {axis: stages, **ctx.mesh}
    if (across := in_force.across_slices()).get(axis, 1) > 1:
        seconds = network_seconds(kind, stages, held, ctx.chip)
    else:  # a stage's mesh does not say where slices end, but this permute stays within a slice
        chip = replace(ctx.chip, node_devices=0) if across else ctx.chip
        seconds = collective_seconds(kind, (axis,), mesh, held, chip)
    return {"stream": (Step(kind, (axis,), wire_bytes(kind, stages, held), seconds, stream, stream, "stream"),)}


class TickSlots(NamedTuple):
    """The slots of one kind of work, as int32 arrays of the same shape.

    The shape is [ticks, stages] in the result of `StageOfStack.rows`, [stages] within a tick, and [] within a stage.
    """

    microbatch: jax.Array
    round: jax.Array
    input: jax.Array
    residual: jax.Array
    active: jax.Array


def row_of(tree: Tree, index: jax.Array | int) -> Tree:
    """Return row `index` of every array.

    If there is only one row, its index is the constant 0, so that compilers and the trace see that the row is the same
    at every tick. A stage with one layer then gathers its weights once, before the loop.
    """
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, 0 if x.shape[0] == 1 else index, 0, keepdims=False), tree)


def _add_at(into: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(into, row_of(into, index) + x, index, 0)


def _put_at(into: jax.Array, index: jax.Array, x: jax.Array, active: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(into, jnp.where(active == 1, x, row_of(into, index)), index, 0)


def wide_zeros(tree: Tree) -> Tree:
    """Return zeros in float32 or wider, to which many gradients are added; weights may have a narrower dtype."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), tree)


def _zeros(x: Any, partition: jax.P, *more: int) -> jax.Array:
    """Return zeros of shape [*more, *x.shape], sharded as `partition` in the dimensions of x."""
    zeros = jnp.zeros((*more, *x.shape), x.dtype)
    return jax.reshard(zeros, jax.P(*(None for _ in more), *partition)) if context().explicit else zeros


@lru_cache(maxsize=1024)
def _body(axis: str, pairs: tuple[tuple[int, int], ...], step: Step) -> Callable[[jax.Array], jax.Array]:
    """Return the permute of a step; permutes are cached, so that equal steps share one compiled program."""

    def body(piece: jax.Array) -> jax.Array:
        if isinstance(step, UnknownStep):
            assert step.what is not None
            return lax.ppermute(marked(piece, step.what), axis, pairs)
        with step_scope(0, step):
            return lax.ppermute(piece, axis, pairs)

    return body
