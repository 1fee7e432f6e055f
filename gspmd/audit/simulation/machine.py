"""A simulated device: a clock, its computation, and the transfers in flight."""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from gspmd.audit.simulation.links import MEMORY, Link, Transfer

_ROUNDING = 1e-12
"""Rounding error of sums of seconds."""


@dataclass(frozen=True)
class Span:
    """One bar of a timeline: an instruction with its time.

    Attributes:
        name: the scope of a plan's step, such as `step2.reduce-scatter.x`, or else the name in JAX or HLO.
        rows: the rows on which the bar is drawn: `compute`, `memory`, or every mesh axis that the transfer uses.
        start: seconds from the beginning of the drawing, in which only simulated iterations of loops take time.
        seconds: seconds of one execution.
        category: the kind of a collective, `einsum` (a matrix product), `other` (other computation), `copy` or `loop`.
        times: number of executions.
        trips: for a loop, the number of iterations that the drawn iteration stands for.
        equation: the planned equation to which the instruction belongs, if any.
        source: the source line of the instruction, as `file:line`.
        instruction: the name of the instruction in the HLO.
        cycles: the compiler's estimate of the instruction's cycles.
        bytes: bytes per execution that one device sends, or moves to and from its memory.
        exposed: seconds per execution in which the device waits for the transfer.
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
    """A transfer in flight, with the seconds that it still needs if it does not share its links."""

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
    """The state of the simulated device: clock, transfers in flight, bars, and sums.

    Transfers on the same link share its bandwidth evenly, and each is as slow as on its most contended link. `sums` has
    the seconds under `"compute"`, `"hidden"`, `"exposed"`, `"memory"` and `"launch"`, the FLOPs under `"flops"`, and
    executions, seconds and exposed seconds under `(category, rows, "count" | "seconds" | "exposed")`.

    The host launches work on the device, `ahead` seconds before the device finishes its earlier work. The host gets
    further ahead while the device is busy, and loses time with every launch. `least` is the smallest value of `ahead`.
    """

    now: float = 0.0
    in_flight: dict[int, _InFlight] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    sums: defaultdict[Hashable, float] = field(default_factory=lambda: defaultdict(int))
    started: int = 0
    ahead: float = 0.0
    least: float = 0.0

    def copy(self) -> "Machine":
        """Return a copy of the state, from which another branch of a conditional can run."""
        in_flight = {number: replace(transfer) for number, transfer in self.in_flight.items()}
        return replace(self, in_flight=in_flight, spans=list(self.spans), sums=self.sums.copy())

    @property
    def elapsed(self) -> float:
        """Seconds so far, counting every iteration of every loop."""
        return self.sums["compute"] + self.sums["exposed"]

    def launch(self, seconds: float) -> None:
        """Let the host spend these seconds on a launch; the device waits if it has no other work."""
        self.ahead -= seconds
        while (late := -self.ahead) > 0:
            passed = self._advance(late)
            self.sums["launch"] += passed
            self.ahead = 0.0 if passed == late else self.ahead
        self.least = min(self.least, self.ahead)

    def synchronize(self) -> None:
        """Let the host wait for the device, to read a value that decides what runs next."""
        self.ahead = self.least = 0.0

    def compute(self, span: Span, flops: int = 0, memory_bound: bool = False) -> None:
        """Let the device compute for the seconds of a span, while transfers proceed."""
        self.sums["flops"] += flops
        if not span.seconds:
            return
        self.record(replace(span, start=self.now))
        self.sums["memory"] += span.seconds if memory_bound else 0.0
        left = span.seconds
        while left > 0:
            left -= self._advance(left)

    def start(self, span: Span, transfer: Transfer) -> int:
        """Start a transfer, and return its number, which `wait` takes."""
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
        """Add a bar to the timeline and to the sums."""
        self.spans.append(span)
        for figure, amount in (("count", 1), ("seconds", span.seconds), ("exposed", span.exposed)):
            self.sums[span.category, span.rows, figure] += amount

    def transfer_state(self) -> Hashable:
        """Return the transfers in flight with rounded times: iterations that start in equal states are equal."""
        transfers = self.in_flight.values()
        return tuple((each.span.instruction, round(each.busy, 15), round(each.latency, 15)) for each in transfers)

    def alike(self, ahead: float, launching: float, left: int) -> int:
        """Return how many of the `left` remaining iterations the host can run as it ran the last one.

        Args:
            ahead: seconds by which the host was ahead before the last iteration; `least` is the smallest lead during
                it.
            launching: seconds that the device had waited for launches before the last iteration.
            left: the number of iterations that are left.
        """
        gained = self.ahead - ahead
        if self.sums["launch"] > launching:
            return left if abs(gained) < _ROUNDING else 0
        return left if gained > -_ROUNDING else min(left, int(self.least / -gained))

    def repeat(self, sums: Mapping[Hashable, float], recorded: int, ahead: float, more: int) -> None:
        """Add everything since an earlier moment to the sums again, `more` times.

        Args:
            sums, recorded, ahead: at that moment, the sums, the number of bars, and the seconds the host was ahead.
            more: the number of times.
        """
        gained = more * (self.ahead - ahead)
        self.ahead += gained
        self.least += min(0.0, gained)  # The host's lead in the last iteration is smaller by this.
        for key in list(self.sums):
            self.sums[key] += more * (self.sums[key] - sums[key])
        self.spans[recorded:] = [replace(span, times=span.times * (more + 1)) for span in self.spans[recorded:]]

    def _advance(self, most: float, waited: _InFlight | None = None) -> float:
        """Let time pass until a transfer changes its state, at most `most` seconds; return the seconds that passed."""
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
        """Return the number of transfers on the most contended link of this transfer."""
        busy = [other.links for other in self.in_flight.values() if other.busy]
        return max((sum(link in links for links in busy) for link in transfer.links), default=1)

    def _finish_transfers(self) -> None:
        """Record and remove the transfers that are finished."""
        finished = [number for number, each in self.in_flight.items() if not each.busy and not each.latency]
        for number in finished:
            transfer = self.in_flight.pop(number)
            seconds = self.now - transfer.span.start
            self.record(replace(transfer.span, seconds=seconds, exposed=transfer.exposed))
