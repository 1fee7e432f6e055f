"""A ring along one mesh axis as a loop of the program, in which the same permutes send the next chunks every time."""

from collections.abc import Sequence

import jax
from jax import lax

from gspmd.lowerings import in_force
from gspmd.lowerings.looped.accumulator import Accumulator
from gspmd.lowerings.looped.rings import Hop
from gspmd.lowerings.looped.stream import ChunkStream
from gspmd.planner.overlap import SCHEDULES

UNROLLED = 2
"""Number of waves in one iteration; with two waves, one buffer is multiplied while another buffer is filled.

Host devices use one wave. Permutes are copies there, so that nothing overlaps, and every further wave would hold
another chunk in memory.
"""


class RingLoop:
    """A loop that sends the chunks of one operand round one axis, and multiplies them as they arrive.

    Its hops are the hops of `rings.walk` for the same `RingSchedule`. Every stream of chunks is sent in its own
    direction, or in both directions if the schedule says so.

    Attributes:
        streams: the streams of chunks with their directions. A stream that is sent in both directions is listed twice.
        waves: the number of waves in which chunks arrive. If chunks are sent in both directions round a ring of even
            size, the last chunk comes from one side only, and is not counted.
    """

    def __init__(self, streams: Sequence[ChunkStream], accumulators: Sequence[Accumulator]):
        self.accumulators, self.transfer = accumulators, streams[0].transfer
        self.both_ways = SCHEDULES[self.transfer.ring.schedule].both_ways
        self.streams = [(stream, stream.sign) for stream in streams]
        if self.both_ways:
            self.streams = [(stream, sign) for stream in streams for sign in (1, -1)]
        self.axis = self.transfer.ring.axes[0]
        self.size = self.transfer.mesh[self.axis]
        self.waves = (self.size - 1) // (2 if self.both_ways else 1)

    def run(self) -> None:
        """Multiply the device's own chunks, the chunks of every wave, and any chunk that comes from one side only."""
        own = [stream.arrived[0] for stream, _ in self.streams]
        chunks = self._send(own)
        for (stream, _), chunk in list(zip(self.streams, own))[: 1 if self.both_ways else None]:
            self._multiply([stream], [0], [chunk])
        # In a ring of even size the shard of the opposite device comes from one side only.
        even = self.both_ways and self.size % 2 == 0
        if self.waves:
            last = self._all_but_the_last(chunks)
            chunks = self._send(last) if even else []
            self._wave(self.waves, last)
        if even:
            self._multiply([self.streams[0][0]], [self.waves + 1], chunks[:1])

    def _all_but_the_last(self, chunks: Sequence[jax.Array]) -> Sequence[jax.Array]:
        each = UNROLLED if self.waves > 2 * UNROLLED and not in_force.is_host() else 1
        count, left = divmod(self.waves - 1, each)

        def body(number, carry):
            chunks, states = carry
            self._load(states)
            for place in range(each):
                chunks = self._step(1 + number * each + place, chunks)
            return chunks, self._states()

        if count:
            chunks, states = lax.fori_loop(0, count, body, (chunks, self._states()))
            self._load(states)
        for place in range(left):
            chunks = self._step(1 + count * each + place, chunks)
        return chunks

    def _states(self) -> list:
        return [accumulator.state() for accumulator in self.accumulators]

    def _load(self, states: Sequence) -> None:
        for accumulator, state in zip(self.accumulators, states):
            accumulator.load(state)

    def _step(self, wave, chunks: Sequence[jax.Array]) -> list[jax.Array]:
        sent = self._send(chunks)
        self._wave(wave, chunks)
        return sent

    def _send(self, chunks: Sequence[jax.Array]) -> list[jax.Array]:
        """Send every chunk to the next device in its direction."""
        hops = [Hop(0, self.axis, sign, (), 0) for _, sign in self.streams]
        return [self.transfer.send(chunk, hop) for hop, chunk in zip(hops, chunks)]

    def _wave(self, wave, chunks: Sequence[jax.Array]) -> None:
        """Multiply the chunks that come from `wave` devices away; chunks from both sides are multiplied together."""
        streams, signs = zip(*self.streams)
        if self.both_ways:
            self._multiply(streams, [sign * wave for sign in signs], chunks)
            return
        for stream, sign, chunk in zip(streams, signs, chunks):
            self._multiply([stream], [sign * wave], [chunk])

    def _multiply(self, streams: Sequence[ChunkStream], places: Sequence, chunks: Sequence[jax.Array]) -> None:
        regions = [stream.region({self.axis: place}) for stream, place in zip(streams, places)]
        for accumulator in self.accumulators:
            accumulator.add(regions, [stream.unpacked(chunk) for stream, chunk in zip(streams, chunks)])
