"""The chunks of an operand that arrive round an unrolled ring, and the products of each wave of chunks."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import jax
from jax import lax

from gspmd.lowerings.looped.accumulator import Accumulator
from gspmd.lowerings.looped.chunks import Region, RingTransfer, collect, part_of
from gspmd.lowerings.looped.rings import Offset, ShardPart


class ChunkStream:
    """The chunks of one part of an operand, wave by wave.

    Args:
        transfer: the transfer of the operand.
        shard: this device's shard, in the dtype in which it is sent.
        dtype: the dtype of the operand.
        part: the part of every shard that is sent, with its order of mesh axes and its direction.
        start, size: the start and the length of the part, along the dimension along which shards are cut.
    """

    def __init__(self, transfer: RingTransfer, shard: jax.Array, dtype: Any, part: ShardPart, start: int, size: int):
        self.transfer, self.dtype, self.start, self.size, self.sign = transfer, dtype, start, size, part.sign
        self.hops = transfer.hops(part)
        self.arrived = {0: collect(transfer, part, part_of(shard, transfer.dims, transfer.divided({}, start, size)))}
        self.waves = [[0], *([n for n, _ in some] for _, some in groupby(enumerate(self.hops, 1), lambda n: n[1].wave))]

    def region(self, offset: Offset) -> Region:
        """Return the region of the whole operand that is the chunk from the device at distance `offset`."""
        return self.transfer.divided(self.transfer.block(offset), self.start, self.size)

    def unpacked(self, chunk: jax.Array) -> jax.Array:
        """Return a chunk in the dtype in which it is multiplied."""
        return chunk.astype(self.dtype)

    def send(self, wave: int, before: Sequence[jax.Array]) -> None:
        """Send the chunks of a wave once all arrays in `before` are computed."""
        for number in self.waves[wave] if wave < len(self.waves) else ():
            hop = self.hops[number - 1]
            chunk = self.arrived[hop.source]
            chunk = lax.optimization_barrier((chunk, *before))[0] if before else chunk
            self.arrived[number] = self.transfer.send(chunk, hop)

    def wave(self, number: int, before: Sequence[jax.Array]) -> tuple[list[Region], list[jax.Array]]:
        """Return the regions and the chunks of a wave; the chunks wait until all arrays in `before` are computed.

        Without this wait, the compiler would multiply all chunks first, hold all products, and add the products at the
        end.
        """
        hops = self.waves[number] if number < len(self.waves) else []
        regions = [self.region(self.hops[hop - 1].offset if hop else {}) for hop in hops]
        chunks = [self.arrived[hop] for hop in hops]
        chunks = lax.optimization_barrier((chunks, list(before)))[0] if before and chunks else chunks
        return regions, [self.unpacked(chunk) for chunk in chunks]


def multiply_wave_by_wave(streams: Sequence[ChunkStream], accumulators: Sequence[Accumulator]) -> None:
    """Multiply the chunks of all streams as they arrive; the program has every hop written out, and no loop.

    The permutes of the next wave wait for the products of the previous wave. Otherwise the compiler might send all
    chunks first, and multiply afterwards.
    """
    for wave in range(max(len(stream.waves) for stream in streams)):
        before = [accumulator.latest for accumulator in accumulators if accumulator.latest is not None]
        for stream in streams:
            stream.send(wave + 1, before)
        for stream in streams:
            regions, chunks = stream.wave(wave, before)
            for accumulator in accumulators if chunks else ():
                accumulator.add(regions, chunks)
