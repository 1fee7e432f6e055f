"""The way of slots to their experts and back, chunk by chunk."""

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.lowerings.blocking.collectives import emit
from gspmd.lowerings.program import Context
from gspmd.moe.experts.work import Work
from gspmd.planner.steps import Chain, Program


class Exchange:
    """Both ways of every chunk in one program; the steps of all of them stand first in it."""

    def __init__(self, work: Work, ctx: Context, program: Program):
        self.mesh, self.chunks = ctx.mesh, work.chunks
        pairs = [work.there_and_back(ctx, size) for size in work.chunks]
        self.chains = [[program.add(steps) for steps in pair] for pair in pairs]

    def start(self, slots: jax.Array) -> "Journey":
        """Inside a shard_map: all slots of a device, to be sent."""
        ends = [sum(self.chunks[:n]) for n in range(1, len(self.chunks))]
        return Journey(self, jnp.split(slots, ends, axis=2))

    def send(self, chain: Chain, x: jax.Array) -> jax.Array:
        """A chunk at the end of a chain."""
        return emit(chain, x, self.mesh)


class Journey:
    """The chunks of one array on their way; each is sent, and then brought back, in order."""

    def __init__(self, exchange: Exchange, pieces: list[jax.Array]):
        self.exchange, self.pieces = exchange, pieces
        self.arrived: list[jax.Array] = []
        self.done: list[jax.Array] = []
        self.back: list[jax.Array] = []

    def there(self, number: int) -> jax.Array:
        """A chunk where the experts are, sent once the one before it has arrived, and the one before that is done.

        Left to itself a compiler has been seen to send for all chunks at once, and to multiply then.
        """
        before = [*self.arrived[-1:], *self.done[-2:-1]]
        x = self.pieces[number]
        x = lax.optimization_barrier((x, *before))[0] if before else x
        self.arrived.append(self.exchange.send(self.exchange.chains[number][0], x))
        return self.arrived[-1]

    def answer(self, number: int, y: jax.Array) -> None:
        """Send what has become of a chunk back."""
        self.done.append(y)
        self.back.append(self.exchange.send(self.exchange.chains[number][1], y))

    def end(self) -> jax.Array:
        """All chunks that are back, as the slots were."""
        return self.back[0] if len(self.back) == 1 else jnp.concatenate(self.back, axis=2)
