"""Run a schedule: one program for all stages, inside a shard_map over the mesh axis of the pipeline.

Every stage computes in every slot of a tick, and its results are masked if the slot has no microbatch: a permute in a
branch that only some devices take would wait for the others. Gradients are computed here too, chunk by chunk, by
`jax.vjp` of a chunk's forward pass. That pass is computed again from its input, so a stage holds only the input of a
chunk for each microbatch in flight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gspmd.annotate.spec import Spec
from gspmd.hardware.links import collective_seconds, wire_bytes
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
    """The computations of a pipeline: three functions that take global arrays of the mesh axes other than the stages'.

    Attributes:
        first: (shared, batch) -> x, the input of the first stage, such as an embedding.
        chunk: (weights, x, batch, number) -> (x, loss, figures), the layers of chunk `number`. The loss is a float32
            scalar that is added to the last stage's. The figures are a tree of float32 arrays, one row for each layer.
        last: (shared, x, batch) -> the loss of a microbatch, a float32 scalar.
    """

    first: Callable[[Tree, Tree], jax.Array]
    chunk: Callable[[Tree, jax.Array, Tree, jax.Array], tuple[jax.Array, jax.Array, Tree]]
    last: Callable[[Tree, jax.Array, Tree], jax.Array]


class StageResults(NamedTuple):
    """The results of one stage after the last tick.

    Attributes:
        loss: the stage's summand of the loss: the losses of its chunks and, in the last stage, the loss of the model.
        figures: the figures of its chunks, [rounds, layers, ...], its summand of the mean over microbatches.
        shared, weights: its summands of the gradients; None if only forward passes ran.
    """

    loss: Any
    figures: Tree
    shared: Tree = None
    weights: Tree = None


class _State(NamedTuple):
    """The carry of a stage from tick to tick."""

    activation: jax.Array  # received from the previous stage
    cotangent: Any  # received from the next stage
    inputs: Any  # of chunks that still need their backward pass
    residuals: Any  # of chunks that still need their gradients of weights
    sums: StageResults


@dataclass(frozen=True)
class PipelineExecutor:
    """One stage of a pipeline, while its shard_map is traced.

    Attributes:
        stages: the functions to compute.
        schedule: the order in which they run.
        axis: the mesh axis of the stages.
        stream: the spec of the tensor that a stage sends to the next.
        batches: number of microbatches that the loss averages over, in all pipelines side by side.
    """

    stages: Stages
    schedule: Schedule
    axis: str
    stream: Spec
    batches: int

    def __call__(self, shared: Tree, weights: Tree, batches: Tree) -> StageResults:
        """Run all ticks on this stage's weights [rounds, layers, ...] and all microbatches [M, ...]."""
        trains = self.schedule.name != "forward"
        halves: Any = self._halves(shared, weights, batches) if "weights" in self.schedule.kinds else None
        state = self._begin(shared, weights, batches, trains, halves)
        for kinds, ticks in self.schedule.phases():
            rows = {kind: self._rows(kind, ticks) for kind in kinds}

            def tick(state: _State, rows: Mapping[str, Any]) -> tuple[_State, None]:
                if "forward" in rows:
                    state = self._forward(state, shared, weights, batches, self._mine(rows["forward"]), trains)
                if "backward" in rows:
                    row = self._mine(rows["backward"])
                    state = self._backward(state, shared, weights, batches, row, halves)
                if "weights" in rows:
                    state = self._weights(state, shared, weights, self._mine(rows["weights"]), halves)
                return state, None

            if len(ticks) == 1:  # without a loop, results that no stage uses after the last tick are not sent
                state, _ = tick(state, _at(rows, 0))
            else:
                state, _ = lax.scan(tick, state, rows)
        return state.sums

    # -- the table ----------------------------------------------------------------------------------------------------

    def _rows(self, kind: str, ticks: range) -> "_TickSlots":
        """Return the slots of one kind for each of these ticks and each stage; zeros where a stage waits."""
        places = self.schedule.inputs, self.schedule.residuals
        table = [
            [
                (*work, *(held.get((kind, tick, stage), 0) for held in places), 1) if work else (0, 0, 0, 0, 0)
                for stage, work in enumerate(self.schedule.ticks[tick][kind])
            ]
            for tick in ticks
        ]
        return _TickSlots(*(jnp.asarray(column, jnp.int32) for column in np.moveaxis(np.array(table), -1, 0)))

    def _mine(self, row: "_TickSlots") -> "_TickSlots":
        """Return this stage's entry of a row."""
        return _TickSlots(*(lax.dynamic_index_in_dim(x, lax.axis_index(self.axis), 0, keepdims=False) for x in row))

    # -- ticks --------------------------------------------------------------------------------------------------------

    def _begin(self, shared: Tree, weights: Tree, batches: Tree, trains: bool, halves: Halves | None) -> _State:
        some, chunk = _at(batches, 0), _at(weights, 0)
        stream = jax.eval_shape(self.stages.first, shared, some)
        _, _, figures = jax.eval_shape(self.stages.chunk, chunk, stream, some, jnp.int32(0))
        figures = jax.tree.map(lambda x: jnp.zeros((self.schedule.rounds, *x.shape), jnp.float32), figures)
        self.stream.check(stream.shape, context().mesh)
        activation = self._zeros(stream)
        if not trains:
            return _State(activation, None, None, None, StageResults(jnp.float32(0), figures))
        # Many microbatches are added: in float32 even for narrower weights.
        wide = lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
        gradients = (jax.tree.map(wide, tree) for tree in (shared, weights))
        residuals = None
        if halves is not None:
            count = max(self.schedule.residuals.values()) + 1
            residuals = [_zeros(x, x.sharding.spec, count) for x in halves.kept]
        held = self._zeros(stream, self.schedule.in_flight)
        return _State(activation, activation, held, residuals, StageResults(jnp.float32(0), figures, *gradients))

    def _zeros(self, x: jax.ShapeDtypeStruct, *more: int) -> jax.Array:
        return _zeros(x, self.stream.partition_spec(), *more)

    def _halves(self, shared: Tree, weights: Tree, batches: Tree) -> Halves:
        """Return the backward pass of a chunk, split in two."""
        batch = _at(batches, 0)
        x = self._zeros(jax.eval_shape(self.stages.first, shared, batch))
        return split(self._pullback, (shared, _at(weights, 0)), (x, batch, jnp.int32(0), x, jnp.float32(0)))

    def _forward(
        self, state: _State, shared: Tree, weights: Tree, batches: Tree, row: "_TickSlots", trains: bool
    ) -> _State:
        batch = _at(batches, row.microbatch)
        number, is_first, is_last = self._chunk(row)
        x = jnp.where(is_first, self.stages.first(shared, batch), state.activation)
        y, loss, figures = self.stages.chunk(_at(weights, row.round), x, batch, number)
        state = state._replace(activation=self._sent(y, 1))
        if trains:  # the backward pass computes the rest again
            return state._replace(inputs=_put_at(state.inputs, row.input, x, row.active))
        loss = loss + jnp.where(is_last, self.stages.last(shared, y, batch), 0.0)
        return state._replace(sums=self._added(state.sums, row, loss, figures))

    def _backward(
        self, state: _State, shared: Tree, weights: Tree, batches: Tree, row: "_TickSlots", halves: Halves | None
    ) -> _State:
        number, _, is_last = self._chunk(row)
        x = _at(state.inputs, row.input)
        # In a slot without a microbatch cotangents are 0, so it adds nothing to any gradient.
        cotangent = jnp.where((row.active == 1) & ~is_last, state.cotangent, jnp.zeros_like(x))
        share = row.active / jnp.float32(self.batches)
        fixed, moving = (shared, _at(weights, row.round)), (x, _at(batches, row.microbatch), number, cotangent, share)
        if halves is None:
            (of_x, loss, figures), gradients = self._pullback(fixed, moving)
            state = state._replace(sums=_with_gradients(state.sums, row, *gradients))
        else:
            (of_x, loss, figures), kept = halves.first(fixed, moving)
            held = [_put_at(into, row.residual, each, row.active) for into, each in zip(state.residuals, kept)]
            state = state._replace(residuals=held)
        sums = self._added(state.sums, row, loss, figures)
        return state._replace(cotangent=self._sent(of_x, -1), sums=sums)

    def _weights(self, state: _State, shared: Tree, weights: Tree, row: "_TickSlots", halves: Halves) -> _State:
        """Add the gradients of weights of a split backward pass. No stage waits in these slots, so none is masked."""
        gradients = halves.rest((shared, _at(weights, row.round)), _at(state.residuals, row.residual))
        return state._replace(sums=_with_gradients(state.sums, row, *gradients))

    def _pullback(self, fixed: Tree, moving: Tree) -> tuple[Tree, Tree]:
        """Compute the backward pass of a chunk from its input.

        Returns:
            (gradient of x, loss, figures), and (gradient of shared, gradient of weights).
        """
        x, batch, number, cotangent, share = moving
        is_first, is_last = self._ends(number)

        def compute(shared: Tree, weights: Tree, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Tree]:
            x = jnp.where(is_first, self.stages.first(shared, batch), x)
            y, loss, figures = self.stages.chunk(weights, x, batch, number)
            return (y, loss + jnp.where(is_last, self.stages.last(shared, y, batch), 0.0)), figures

        (_, loss), transposed, figures = jax.vjp(compute, *fixed, x, has_aux=True)
        *gradients, of_x = transposed((cotangent, share))
        return (of_x, loss, figures), tuple(gradients)

    def _chunk(self, row: "_TickSlots") -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the number of the chunk that this stage computes, and whether it is the first or the last of all."""
        number = row.round * self.schedule.stages + lax.axis_index(self.axis)
        return number, *self._ends(number)

    def _ends(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        return number == 0, number == self.schedule.stages * self.schedule.rounds - 1

    def _added(self, sums: StageResults, row: "_TickSlots", loss: jax.Array, figures: Tree) -> StageResults:
        """Add a microbatch's share of the loss and of the figures, unless the stage waits."""

        def share(x: jax.Array) -> jax.Array:
            return jnp.where(row.active == 1, x, 0.0) / self.batches

        figures = jax.tree.map(lambda into, x: _add_at(into, row.round, share(x)), sums.figures, figures)
        return sums._replace(loss=sums.loss + share(loss), figures=figures)

    def _sent(self, x: jax.Array, by: int) -> jax.Array:
        """Send x to the next stage (by = 1) or the previous one (by = -1) in one permute, a step of the plan."""
        stages, rounds = self.schedule.stages, self.schedule.rounds
        pairs = [(stage, (stage + by) % stages) for stage in range(stages)]
        if rounds == 1:  # no stage follows the last one
            pairs = [(source, target) for source, target in pairs if target == source + by]
        if stages == 1:  # the next chunk is on the same stage, or there is none
            return x if pairs else jnp.zeros_like(x)
        ctx = context()
        sends = self.stream, x.shape, x.dtype.itemsize, ctx, self.axis, stages
        step: Step
        if is_unknown(ctx.mesh):
            step = UnknownStep.of(UnknownSteps(sent, sends, "stream"), self.stream, self.stream, "stream")
        else:
            (step,) = sent(*sends)["stream"]
        name = f"{self.stream} to the {'next' if by == 1 else 'previous'} stage"
        return run(ctx, name, (step,), _body(self.axis, tuple(pairs), step), (self.stream,), self.stream, x)


def sent(
    stream: Spec, shape: tuple[int, ...], width: int, ctx: Context, axis: str, stages: int
) -> dict[str, tuple[Step, ...]]:
    """Return the step that sends a stream to the next or previous stage, under the name of the tensor.

    Args:
        stream: the spec of the stream in a stage.
        shape: the global shape of the stream.
        width: bytes of an element.
        ctx: mesh and chip of a stage.
        axis: the mesh axis of the stages.
        stages: the number of stages.
    """
    held = int(np.prod(stream.local_shape(shape, ctx.mesh))) * width
    kind, mesh = "collective-permute", {axis: stages, **ctx.mesh}
    seconds = collective_seconds(kind, (axis,), mesh, held, ctx.chip)
    return {"stream": (Step(kind, (axis,), wire_bytes(kind, stages, held), seconds, stream, stream, "stream"),)}


class _TickSlots(NamedTuple):
    """A tick's slots of one kind, for every stage or for one."""

    microbatch: jax.Array
    round: jax.Array
    input: jax.Array
    residual: jax.Array
    active: jax.Array


def _at(tree: Tree, index: jax.Array | int) -> Tree:
    """Return row `index` of every array.

    If there is only one row, it is the same at every tick. Its index is then the constant 0, so that compilers and the
    trace see that computations on it do not change: a stage with one layer gathers its weights once, before the loop.
    """
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, 0 if x.shape[0] == 1 else index, 0, keepdims=False), tree)


def _add_at(into: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(into, _at(into, index) + x, index, 0)


def _put_at(into: jax.Array, index: jax.Array, x: jax.Array, active: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(into, jnp.where(active == 1, x, _at(into, index)), index, 0)


def _with_gradients(sums: StageResults, row: _TickSlots, of_shared: Tree, of_weights: Tree) -> StageResults:
    added = jax.tree.map(lambda into, x: _add_at(into, row.round, x), sums.weights, of_weights)
    return sums._replace(shared=jax.tree.map(jnp.add, sums.shared, of_shared), weights=added)


def _zeros(x: Any, partition: jax.P, *more: int) -> jax.Array:
    """Return zeros of shape [*more, *x.shape], sharded as `partition` in the dimensions of x."""
    zeros = jnp.zeros((*more, *x.shape), x.dtype)
    return jax.reshard(zeros, jax.P(*(None for _ in more), *partition)) if context().explicit else zeros


@lru_cache(maxsize=1024)
def _body(axis: str, pairs: tuple[tuple[int, int], ...], step: Step) -> Callable[[jax.Array], jax.Array]:
    """Return the permute of a step; cached, so that equal steps share one compiled program."""

    def body(piece: jax.Array) -> jax.Array:
        if isinstance(step, UnknownStep):
            assert step.what is not None
            return lax.ppermute(marked(piece, step.what), axis, pairs)
        with step_scope(0, step):
            return lax.ppermute(piece, axis, pairs)

    return body
