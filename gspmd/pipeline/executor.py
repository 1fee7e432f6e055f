"""Run a schedule: one program for all stages, inside a shard_map over the mesh axis of the pipeline.

The module `schedule` explains ticks and slots. Every stage computes in every slot of a tick. If a stage has no
microbatch in a slot, the stage's results are masked. This is not a branch, because a permute in a branch that only some
devices take would wait for the other devices. Gradients are computed here too, chunk by chunk, by `jax.vjp` of a
chunk's forward pass. The forward pass is recomputed from the chunk's input, so for each microbatch in flight a stage
holds only the input of a chunk.

Several stacks of blocks, such as an encoder and a decoder, are several pipelines through the same stages, one after the
other. The output of a stack goes from the last stage back to the first stage. From there, this output goes unchanged
through all stages, together with the stream of the next stack, because every chunk of the next stack reads it. The
gradient of the output returns in the same way, and each stage adds its contribution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import context
from gspmd.pipeline.schedule import Schedule, phases
from gspmd.pipeline.stage import StackState, StageOfStack, Stages, StageSums, TickSlots, row_of, wide_zeros

Tree = Any


class StageResults(NamedTuple):
    """The results of one stage of the pipeline after the last tick.

    Attributes:
        loss: the stage's summand of the loss. It includes the losses of the stage's chunks and, in the last stage, the
            loss of the model.
        figures: for each stack, the metrics of the stage's chunks, [rounds, layers, ...]. They are summands of the mean
            over the microbatches of all pipelines.
        shared: the stage's summand of the gradients of shared weights; None if only forward passes ran.
        weights: for each stack, the stage's summand of the gradients of weights; None if only forward passes ran.
    """

    loss: Any
    figures: Tree
    shared: Tree = None
    weights: Tree = None


class _Carry(NamedTuple):
    """The state that a stage carries from tick to tick."""

    sums: StageSums
    stacks: tuple[StackState, ...]


@dataclass(frozen=True)
class PipelineExecutor:
    """The program of one stage of a pipeline, which is called while the pipeline's shard_map is traced.

    Attributes:
        stages: the functions to compute in a stage, for each stack of blocks.
        schedules: the order in which these functions run, for each stack.
        axis: the mesh axis over which layers are split into stages.
        streams: the spec of the tensor that a stage sends to the next stage, for each stack.
        batches: number of microbatches over which the loss is averaged. It includes the microbatches of all
            pipelines that run side by side.
    """

    stages: tuple[Stages, ...]
    schedules: tuple[Schedule, ...]
    axis: str
    streams: tuple[Spec, ...]
    batches: int

    def __call__(self, shared: Tree, weights: tuple[Tree, ...], batches: Tree) -> StageResults:
        """Run all ticks of this stage.

        Args:
            shared: the weights that every stage has.
            weights: for each stack, the weights of this stage, [rounds, layers, ...].
            batches: all microbatches, [M, ...].
        """
        trains = self.schedules[0].name != "forward"
        carry, stacks = self._begin(shared, weights, batches, trains)
        for ticks in phases(self.schedules):
            rows = [{kind: stack.rows(kind, ticks) for kind in stack.schedule.ticks[ticks[0]]} for stack in stacks]

            def tick(carry: _Carry, rows: Sequence[Mapping[str, TickSlots]]) -> tuple[_Carry, None]:
                sums, states = carry.sums, [*carry.stacks]
                # A stack receives what another stack sent in the previous tick. So within a tick a stack's forward pass
                # runs before that of the stack from which it receives its input. Backward passes are ordered in the
                # same way.
                for number, stack in reversed([*enumerate(stacks)]):
                    if "forward" in rows[number]:
                        ended = states[number - 1].activation[:1] if number else ()
                        states[number], sums = stack.forward(states[number], sums, rows[number]["forward"], ended)
                for number, stack in enumerate(stacks):
                    if "backward" in rows[number]:
                        ending = states[number + 1].cotangent[1] if number + 1 < len(stacks) else None
                        states[number], sums = stack.backward(states[number], sums, rows[number]["backward"], ending)
                for number, stack in enumerate(stacks):
                    if "weights" in rows[number]:
                        states[number], sums = stack.gradients(states[number], sums, rows[number]["weights"])
                return _Carry(sums, tuple(states)), None

            if len(ticks) == 1:  # not in a loop, so that results that no stage uses after the last tick are not sent
                carry, _ = tick(carry, row_of(rows, 0))
            else:
                carry, _ = lax.scan(tick, carry, rows)
        figures, of_weights = (tuple(getattr(state, name) for state in carry.stacks) for name in ("figures", "weights"))
        return StageResults(carry.sums.loss, figures, carry.sums.shared, of_weights if trains else None)

    def _begin(
        self, shared: Tree, weights: tuple[Tree, ...], batches: Tree, trains: bool
    ) -> tuple[_Carry, list[StageOfStack]]:
        """Return the state before the first tick, and the stage's computations in each stack."""
        stacks: list[StageOfStack] = []
        for number, stages in enumerate(self.stages):
            stream = jax.eval_shape(stages.first, shared, row_of(batches, 0))
            self.streams[number].check(stream.shape, context().mesh)
            before = [(stacks[-1].streams[0], stacks[-1].shapes[0])] if number else []
            specs, shapes = zip((self.streams[number], stream), *before)
            of = self.schedules[number], self.axis, specs, shapes, self.batches
            stacks.append(StageOfStack(stages, *of, shared, weights[number], batches))
        # In float32 even if the weights have a narrower dtype, since many microbatches are added up.
        added = StageSums(jnp.float32(0), wide_zeros(shared) if trains else None)
        return _Carry(added, tuple(stack.begin(trains) for stack in stacks)), stacks
