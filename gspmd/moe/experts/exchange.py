"""The all-to-alls before and after the experts, chunk by chunk: slots to the experts, and outputs back."""

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.lowerings.blocking.collectives import emit
from gspmd.lowerings.program import Context
from gspmd.moe.experts.work import ExpertWork
from gspmd.planner.steps import NumberedSteps


class Exchange:
    """For every chunk, the steps of the all-to-all to the experts and of the all-to-all back.

    In the experts' program, these steps come before the steps of the equations.
    """

    def __init__(self, work: ExpertWork, ctx: Context, program: NumberedSteps):
        self.mesh, self.chunks = ctx.mesh, work.chunks
        pairs = [work.there_and_back(ctx, size) for size in work.chunks]
        self.chains = [[program.add(steps) for steps in pair] for pair in pairs]

    def start(self, slots: jax.Array) -> "ChunkedExchange":
        """Cut all slots of a device into chunks, inside a shard_map."""
        ends = [sum(self.chunks[:n]) for n in range(1, len(self.chunks))]
        return ChunkedExchange(self, jnp.split(slots, ends, axis=2))


class ChunkedExchange:
    """The chunks of an array of slots, which are sent to the experts one by one, and whose outputs are sent back."""

    def __init__(self, exchange: Exchange, chunks: list[jax.Array]):
        self.exchange, self.chunks = exchange, chunks
        self.received: list[jax.Array] = []
        self.answers: list[jax.Array] = []
        self.returned: list[jax.Array] = []

    def dispatch(self, number: int) -> jax.Array:
        """Send chunk `number` to the experts once chunk `number - 1` has arrived and `number - 2` has been multiplied.

        Without this order the compiler would send all chunks first and multiply afterwards, so that nothing would
        overlap.
        """
        before, x = [*self.received[-1:], *self.answers[-2:-1]], self.chunks[number]
        x = lax.optimization_barrier((x, *before))[0] if before else x
        self.received.append(emit(self.exchange.chains[number][0], x, self.exchange.mesh))
        return self.received[-1]

    def combine(self, number: int, answer: jax.Array) -> None:
        """Send the experts' outputs for a chunk back to the devices from which the chunk's slots came."""
        self.answers.append(answer)
        self.returned.append(emit(self.exchange.chains[number][1], answer, self.exchange.mesh))

    def result(self) -> jax.Array:
        """Return all outputs, in the order of the slots."""
        return self.returned[0] if len(self.returned) == 1 else jnp.concatenate(self.returned, axis=2)
