"""A ring along one mesh axis as a loop: in every iteration the same permutes bring the next chunks."""

from collections.abc import Sequence

import jax
from jax import lax

from gspmd.lowerings import target
from gspmd.lowerings.looped.accumulator import Landing
from gspmd.lowerings.looped.chunks import Region
from gspmd.lowerings.looped.rings import Hop
from gspmd.lowerings.looped.stream import Way

UNROLLED = 2
"""Waves of one iteration: what arrives in one buffer is multiplied while the other is filled. On host devices, where a
permute is a copy and nothing is hidden, one: each wave more holds one more chunk."""


class RingLoop:
    """The chunks of one operand on their way round one axis, multiplied as they come."""

    def __init__(self, ways: Sequence[Way], landings: Sequence[Landing], others: Sequence[jax.Array | None]):
        self.landings, self.others = landings, others
        self.journey = ways[0].journey
        self.paired = self.journey.ring.schedule == "paired"
        self.ways = [(way, way.sign) for way in ways]
        if self.paired:
            self.ways = [(way, sign) for way in ways for sign in (1, -1)]
        self.axis = self.journey.ring.axes[0]
        self.size = self.journey.mesh[self.axis]
        self.waves = (self.size - 1) // (2 if self.paired else 1)

    def run(self) -> None:
        """Multiply every chunk: a device's own, those of every wave, and the one that comes one way only."""
        own = [way.arrived[0] for way, _ in self.ways]
        chunks = self._send(own)
        for (way, _), chunk in list(zip(self.ways, own))[: 1 if self.paired else None]:
            self._multiply([way], [0], [chunk])
        ahead = chunks[0] if self.waves == 0 else None
        if self.waves:
            chunks = self._all_but_the_last(chunks)
            ahead = self._send(chunks)[0] if self._even() else None
            self._wave(self.waves, chunks)
        if self._even():
            self._multiply([self.ways[0][0]], [self.waves + 1], [ahead])

    def _even(self) -> bool:
        """Whether the chunk from the other side of the ring comes one way only."""
        return self.paired and self.size % 2 == 0

    def _all_but_the_last(self, chunks: Sequence[jax.Array]) -> Sequence[jax.Array]:
        each = UNROLLED if self.waves > 2 * UNROLLED and not target.is_host() else 1
        count, left = divmod(self.waves - 1, each)

        def body(number, carry):
            chunks, states = carry
            self._load(states)
            for place in range(each):
                chunks = self._step(1 + number * each + place, chunks)
            return chunks, [landing.state() for landing in self.landings]

        if count:
            chunks, states = lax.fori_loop(0, count, body, (chunks, [landing.state() for landing in self.landings]))
            self._load(states)
        for place in range(left):
            chunks = self._step(1 + count * each + place, chunks)
        return chunks

    def _load(self, states: Sequence) -> None:
        for landing, state in zip(self.landings, states):
            landing.load(state)

    def _step(self, wave, chunks: Sequence[jax.Array]) -> list[jax.Array]:
        sent = self._send(chunks)
        self._wave(wave, chunks)
        return sent

    def _send(self, chunks: Sequence[jax.Array]) -> list[jax.Array]:
        """Everything one place on."""
        return [self.journey.send(chunk, Hop(0, self.axis, sign, (), 0)) for (_, sign), chunk in zip(self.ways, chunks)]

    def _wave(self, wave, chunks: Sequence[jax.Array]) -> None:
        """Multiply what has come so many places; from both sides together, if it has."""
        ways, signs = zip(*self.ways)
        if self.paired:
            self._multiply(ways, [sign * wave for sign in signs], chunks)
            return
        for way, sign, chunk in zip(ways, signs, chunks):
            self._multiply([way], [sign * wave], [chunk])

    def _multiply(self, ways: Sequence[Way], places: Sequence, chunks: Sequence[jax.Array]) -> None:
        regions: list[Region] = [way.region({self.axis: place}) for way, place in zip(ways, places)]
        for landing, other in zip(self.landings, self.others):
            landing.add(regions, [way.unpacked(chunk) for way, chunk in zip(ways, chunks)], other)
