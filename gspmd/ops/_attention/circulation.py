"""The transport of chunks of keys to the queries, and of gradients back to the chunks, round a ring or by gathers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gspmd.hardware.links import neighbour
from gspmd.hardware.matmul import product_seconds
from gspmd.lowerings.program import Context
from gspmd.lowerings.scopes import step_scope
from gspmd.ops.interface.planned_op import Chains, float32, shard_index
from gspmd.planner.steps import Step

Visit = Callable[..., tuple[jax.Array, Sequence[jax.Array]]]
"""A function (state, device, *chunks of that device) -> (new state, contributions to the gradients of the chunks)."""


class Gathered:
    """Transport of all chunks at once: gathers bring the chunks before any is used, and reduce-scatters add gradients.

    Args:
        chains: the planned steps of the gathers and of the reduce-scatters.
        axes: the mesh axes that shard the sequence.
        names: the name, in `chains`, of the gather of each sharded operand.
    """

    def __init__(self, chains: Chains, axes: Sequence[str], names: Sequence[str]):
        self.chains, self.axes, self.names = chains, tuple(axes), names
        self.devices = prod(chains.mesh[axis] for axis in axes)

    def device(self, place: jax.Array | int) -> jax.Array | int:
        """Return the index of the device that is `place` devices behind this one."""
        return (shard_index(self.axes) - place) % self.devices

    def visit(self, f: Callable, state, chunks: Sequence[jax.Array]):
        """Fold a function over all other devices and their chunks.

        Args:
            f: a function (state, device, *chunks of that device) -> new state.
            state: the state of the first call.
            chunks: this device's own chunks, one for each sharded operand.

        Returns:
            The state after the last call.
        """
        whole = [self.chains.send(name, x) for name, x in zip(self.names, chunks)]

        def step(place, state):
            there = self.device(place)
            return f(state, there, *(_at(x, there, chunk) for x, chunk in zip(whole, chunks)))

        return lax.fori_loop(1, self.devices, step, state)

    def visit_and_return(self, f: Visit, state, chunks, own, back: Sequence[str]):
        """Fold like `visit`, and also return the gradients of this device's own chunks, summed over all devices.

        Args:
            f: a function like that of `visit`, which also returns contributions to the gradients of the chunks (see
                `Visit`).
            state, chunks: the arguments of `visit`.
            own: this device's contributions to the gradients of its own chunks.
            back: the name, in `chains`, of the reduce-scatter of each gradient.

        Returns:
            The final state, and the gradient of each sharded operand, in the dtype of the operand.
        """
        sums = [jnp.zeros((*x.shape[:1], self.devices * x.shape[1], *x.shape[2:]), jnp.float32) for x in own]
        sums = [_put(x, self.device(0), mine) for x, mine in zip(sums, own)]

        def step(carry, there, *chunks):
            state, parts = f(carry[0], there, *chunks)
            return state, [_put(x, there, part) for x, part in zip(carry[1], parts)]

        state, sums = self.visit(step, (state, sums), chunks)
        wire = (x.astype(chunk.dtype) for x, chunk in zip(sums, chunks))
        return state, *(self.chains.send(name, x) for name, x in zip(back, wire))


def _at(whole: jax.Array, device: jax.Array | int, chunk: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(whole, device * chunk.shape[1], chunk.shape[1], axis=1)


def _put(whole: jax.Array, device: jax.Array | int, part: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(whole, part, device * part.shape[1], axis=1)


class RingOfChunks(Gathered):
    """Transport round a ring: while a device attends to one chunk, a permute brings the next chunk.

    Source: Liu et al. 2023, *Ring Attention with Blockwise Transformers for Near-Infinite Context* (arXiv 2310.01889).
    Differs: the contribution of a device to the gradients of its own chunk stays on the device, so gradients make one
        hop less.
    """

    def visit(self, f: Callable, state, chunks: Sequence[jax.Array]):
        """Fold a function over all other devices and their chunks, as `Gathered.visit` does."""
        last, chunks = self.devices - 1, self._send(self.names, chunks)

        def step(place, carry):
            state, chunks = carry
            return f(state, self.device(place), *chunks), self._send(self.names, chunks)

        if last > 1:
            state, chunks = lax.fori_loop(1, last, step, (state, chunks))
        return f(state, self.device(last), *chunks)

    def visit_and_return(self, f: Visit, state, chunks, own, back: Sequence[str]):
        """Fold like `visit`, while the gradients of each chunk go round the ring with it, back to the chunk's device.

        Arguments and results are those of `Gathered.visit_and_return`.
        """
        last, wire = self.devices - 1, [x.dtype for x in chunks]

        def home(sums):
            return map(float32, self._send(back, [x.astype(dtype) for x, dtype in zip(sums, wire)]))

        def added(place, state, chunks, sums):
            arrived = home(sums)
            state, parts = f(state, self.device(place), *chunks)
            return state, [x + part for x, part in zip(arrived, parts)]

        def step(place, carry):
            sent = self._send(self.names, carry[1])
            state, sums = added(place, *carry)
            return state, sent, sums

        first = self._send(self.names, chunks)
        chunks = self._send(self.names, first) if last > 1 else first
        state, sums = f(state, self.device(1), *first)
        if last > 2:
            state, chunks, sums = lax.fori_loop(2, last, step, (state, chunks, sums))
        if last > 1:
            state, sums = added(last, state, chunks, sums)
        return state, *((x + mine).astype(dtype) for x, mine, dtype in zip(home(sums), own, wire))

    def _send(self, names: Sequence[str], chunks: Sequence[jax.Array]) -> list[jax.Array]:
        """Send all chunks to the next device; each permute is in the named scope of its planned step."""
        # JAX numbers the devices of a permute in the order of the mesh, whatever the order of the axes it is given.
        sizes = {axis: size for axis, size in self.chains.mesh.items() if axis in self.axes}
        numbers = np.arange(self.devices).reshape(*sizes.values())
        ring = numbers.transpose([*map([*sizes].index, self.axes)]).reshape(-1).tolist()
        hops, sent = list(zip(ring, ring[1:] + ring[:1])), []
        for name, x in zip(names, chunks):
            (step,) = (chain := self.chains.chains[name]).steps
            with step_scope(chain.first, replace(step, kind="collective-permute")):
                sent.append(lax.ppermute(x, tuple(sizes), hops) if x.size else x)  # XLA:CPU hangs if the array is empty
        return sent


def is_looped(
    ctx: Context, axes: Sequence[str], queries: tuple[int, ...], chunk: int, dtype: str, steps: Sequence[Step]
) -> bool:
    """Return whether chunks of keys and values go round a ring instead of being gathered.

    Under lowering `looped` they do. Under `auto` they do if the forward and backward passes together take less time
    with a ring than with gathers.

    Args:
        ctx: the context of the call.
        axes: the mesh axes that shard the sequence.
        queries: the local sizes of B, L, H and D.
        chunk: the average number of keys to which a query attends in one chunk.
        dtype: the dtype of queries and keys.
        steps: the gathers of keys and values, and the reduce-scatters of their gradients.
    """
    if ctx.lowering != "auto":
        return ctx.lowering.startswith("looped")
    devices, (rows, length, heads, size) = prod(ctx.mesh[axis] for axis in axes), queries
    options = {"batch": rows * heads, "dtype": dtype, "chip": ctx.chip}
    logits, values = (
        product_seconds(length, size, chunk, **options),
        product_seconds(length, chunk, size, **options),
    )
    links = [neighbour(axis, ctx.mesh, ctx.chip) for axis in axes]
    closes = ctx.chip.is_switch or all(ctx.chip.wraps(ctx.mesh[axis]) for axis in axes)
    rate, latency = min(rate for rate, _ in links) / (1 if closes else 2), max(latency for _, latency in links)
    sent = sum(step.wire_bytes for step in steps) / (devices - 1) / rate  # for one hop of both passes
    forward, backward = logits + values, 3 * logits + 2 * values
    # Keys and values are sent in both passes, gradients in one, so the forward pass sends a third of all bytes.
    looped = max(forward, sent / 3 + latency) + max(backward, sent * 2 / 3 + latency)
    blocking = forward + backward + sum(step.seconds for step in steps) / (devices - 1)
    return looped < blocking
