"""One device in simulated time: a clock, the computation, and the transfers in flight."""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from gspmd.audit.simulation.links import MEMORY, Link, Transfer

_ROUNDING = 1e-12
"""Rounding error of sums of seconds."""


@dataclass(frozen=True)
class Span:
    """One bar of a timeline.

    Attributes:
        name: a plan's step, `step2.reduce-scatter.x`, or the name in JAX or HLO.
        rows: the rows on which the bar is drawn: `compute`, `memory`, or every mesh axis that the transfer uses.
        start: seconds from the beginning of the program; for loops, only the simulated iterations take time here.
        seconds: seconds of one execution.
        category: kind of a collective, `einsum` (a matrix product), `other` (other computation), `copy`, `loop`.
        times: number of executions.
        trips: for a loop, the number of iterations that the drawn iteration stands for.
        equation: the planned equation to which the instruction belongs.
        source: the source line that asked for the instruction, `file:line`.
        instruction: its name in the HLO.
        cycles: the compiler's estimate of its cycles.
        bytes: bytes per execution that one device sends, or moves to and from its memory.
        exposed: seconds per execution in which the device waits for it.
    """

    name: str
    rows: tuple[str, ...]
    start: float
    seconds: float
    category: str
    times: int = 1
    trips: int = 1
    equation: str = ""
    source: str = ""
    instruction: str = ""
    cycles: int = 0
    bytes: int = 0
    exposed: float = 0.0


@dataclass
class _InFlight:
    """A transfer in flight, with the seconds that remain if it is alone on its links."""

    span: Span
    busy: float
    latency: float
    links: frozenset[Link]
    exposed: float = 0.0

    @property
    def is_copy(self) -> bool:
        return MEMORY in self.links


@dataclass
class Machine:
    """The clock, the transfers in flight, the spans, and the sums so far.

    Transfers on the same link share its bandwidth evenly; each is as slow as on its most contended link. `sums` holds
    seconds under `"compute"`, `"hidden"`, `"exposed"`, `"memory"` and `"launch"`, operations under `"flops"`, and
    executions, seconds and exposed seconds under `(category, rows, "count" | "seconds" | "exposed")`.

    A host launches what the device runs, `ahead` seconds before the device finishes the earlier work. The host gets
    further ahead while the device is busy, and falls back with every launch. `least` is the smallest value of `ahead`.
    """

    now: float = 0.0
    in_flight: dict[int, _InFlight] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    sums: defaultdict[Hashable, float] = field(default_factory=lambda: defaultdict(int))
    started: int = 0
    ahead: float = 0.0
    least: float = 0.0

    def copy(self) -> "Machine":
        """Return a copy of the state, from which a different branch can continue."""
        in_flight = {number: replace(transfer) for number, transfer in self.in_flight.items()}
        return replace(self, in_flight=in_flight, spans=list(self.spans), sums=self.sums.copy())

    @property
    def elapsed(self) -> float:
        """Seconds so far, counting every iteration of every loop."""
        return self.sums["compute"] + self.sums["exposed"]

    def launch(self, seconds: float) -> None:
        """Let the host launch something, which takes these seconds; the device waits if it has nothing else to do."""
        self.ahead -= seconds
        while (late := -self.ahead) > 0:
            passed = self._advance(late)
            self.sums["launch"] += passed
            self.ahead = 0.0 if passed == late else self.ahead
        self.least = min(self.least, self.ahead)

    def synchronize(self) -> None:
        """Let the host wait until the device has finished, to read a value that decides what comes next."""
        self.ahead = self.least = 0.0

    def compute(self, span: Span, flops: int = 0, memory_bound: bool = False) -> None:
        """Compute for the seconds of a span, while transfers proceed."""
        self.sums["flops"] += flops
        if not span.seconds:
            return
        self.record(replace(span, start=self.now))
        self.sums["memory"] += span.seconds if memory_bound else 0.0
        left = span.seconds
        while left > 0:
            left -= self._advance(left)

    def start(self, span: Span, transfer: Transfer) -> int:
        """Start a transfer, and return the number that `wait` needs."""
        self.started += 1
        span = replace(span, start=self.now)
        self.in_flight[self.started] = _InFlight(span, transfer.busy, transfer.latency, transfer.links)
        self._finish_transfers()
        return self.started

    def wait(self, number: int | None) -> None:
        """Wait until a transfer is finished. Waiting for a copy counts as computing, bound by memory."""
        while number is not None and (transfer := self.in_flight.get(number)):
            passed = self._advance(float("inf"), transfer)
            self.sums["memory"] += passed if transfer.is_copy else 0.0

    def drain(self) -> None:
        """Wait for all transfers."""
        for number in list(self.in_flight):
            self.wait(number)

    def record(self, span: Span) -> None:
        """Add a span to the timeline and to the sums."""
        self.spans.append(span)
        for figure, amount in (("count", 1), ("seconds", span.seconds), ("exposed", span.exposed)):
            self.sums[span.category, span.rows, figure] += amount

    def transfer_state(self) -> Hashable:
        """Return the transfers in flight, with rounded times; iterations that start in the same state are alike."""
        transfers = self.in_flight.values()
        return tuple((each.span.instruction, round(each.busy, 15), round(each.latency, 15)) for each in transfers)

    def alike(self, ahead: float, launching: float, left: int) -> int:
        """Return how many of the `left` iterations are, for the host, like the last iteration.

        Args:
            ahead: seconds that the host was ahead before the last iteration; `least` is the smallest lead during that
                iteration.
            launching: seconds that the device had waited for launches before the last iteration.
            left: the number of iterations that are left.
        """
        gained = self.ahead - ahead
        if self.sums["launch"] > launching:
            return left if abs(gained) < _ROUNDING else 0
        return left if gained > -_ROUNDING else min(left, int(self.least / -gained))

    def repeat(self, sums: Mapping[Hashable, float], recorded: int, ahead: float, more: int) -> None:
        """Count everything since a moment `more` times more.

        Args:
            sums, recorded, ahead: the sums of that moment, the number of spans, and how far the host was ahead.
            more: the number of times.
        """
        gained = more * (self.ahead - ahead)
        self.ahead += gained
        self.least += min(0.0, gained)  # In the last iteration the host is this much less far ahead.
        for key in list(self.sums):
            self.sums[key] += more * (self.sums[key] - sums[key])
        self.spans[recorded:] = [replace(span, times=span.times * (more + 1)) for span in self.spans[recorded:]]

    def _advance(self, most: float, waited: _InFlight | None = None) -> float:
        """Let time pass until a transfer changes its state, for at most `most` seconds; return the time that passed."""
        hides = any(not transfer.is_copy for transfer in self.in_flight.values())
        sharing = {number: self._sharing(transfer) for number, transfer in self.in_flight.items()}
        ends = [each.busy * sharing[n] if each.busy else each.latency for n, each in self.in_flight.items()]
        passed = min([most, *ends])
        for (number, transfer), end in zip(self.in_flight.items(), ends):
            if transfer.busy:
                transfer.busy = 0.0 if end <= passed else transfer.busy - passed / sharing[number]
            else:
                transfer.latency = 0.0 if end <= passed else transfer.latency - passed
        self.now += passed
        self.ahead += passed
        if waited and not waited.is_copy:
            waited.exposed += passed
            self.sums["exposed"] += passed
        else:
            self.sums["compute"] += passed
            self.sums["hidden"] += passed if hides else 0.0
        self._finish_transfers()
        return passed

    def _sharing(self, transfer: _InFlight) -> int:
        """Return the number of transfers that share the most contended link of this one."""
        busy = [other.links for other in self.in_flight.values() if other.busy]
        return max((sum(link in links for links in busy) for link in transfer.links), default=1)

    def _finish_transfers(self) -> None:
        """Record and remove the transfers that are finished."""
        finished = [number for number, each in self.in_flight.items() if not each.busy and not each.latency]
        for number in finished:
            transfer = self.in_flight.pop(number)
            seconds = self.now - transfer.span.start
            self.record(replace(transfer.span, seconds=seconds, exposed=transfer.exposed))
