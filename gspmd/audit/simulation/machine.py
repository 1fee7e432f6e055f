"""A simulated device, with its clock, its computation, and the transfers in flight."""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from gspmd.audit.simulation.links import MEMORY, Link, Transfer

_ROUNDING = 1e-12
"""Largest rounding error of a sum of seconds."""

HOST_MEMORY = "host memory"
"""The row of a timeline with copies to and from host memory."""
COPY_ROWS = ("memory", HOST_MEMORY)
"""The rows of copies: between memories of the device, and to and from host memory."""
LOCAL_ROWS = ("compute", *COPY_ROWS)
"""The rows of a timeline for work in which no other device takes part."""


@dataclass(frozen=True)
class Span:
    """One bar of a timeline: an instruction, and the time at which it runs.

    Attributes:
        name: the scope name of a planned step, such as `step2.reduce-scatter.x`; if the instruction belongs to no step,
            the name in JAX or in HLO.
        rows: the rows on which the bar is drawn: one of `LOCAL_ROWS`, or every mesh axis that the transfer uses.
        start: seconds from the beginning of the timeline. Only the simulated iterations of a loop take time in the
            timeline.
        seconds: seconds of one execution.
        category: the kind of a collective, `einsum` (a matrix product), `other` (other computation), `copy` or `loop`.
        times: number of executions.
        trips: for a loop, the number of iterations that the bar stands for.
        equation: the planned equation to which the instruction belongs; empty if there is no such equation.
        source: the source line of the instruction, as `file:line`; empty if unknown.
        instruction: the name of the instruction in the HLO.
        cycles: the compiler's estimate of the instruction's cycles; 0 if there is no estimate.
        bytes: for a transfer to other devices, the bytes that one device sends per execution; for other instructions,
            the bytes moved to and from the device's memory or host memory per execution.
        exposed: for a collective, the seconds per execution in which the device waits for it; 0 in all other
            categories.
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
    """A transfer in flight.

    Attributes:
        span: the bar of the transfer, whose seconds are not yet known.
        busy: seconds for which the transfer still has to fill its links, if it shares no link with other transfers.
        latency: seconds from the end of `busy` until the last bytes arrive.
        links: the links that the transfer fills.
        exposed: seconds for which the device has waited for the transfer so far; 0 for a copy.
    """

    span: Span
    busy: float
    latency: float
    links: frozenset[Link]
    exposed: float = 0.0

    @property
    def is_copy(self) -> bool:
        return self.span.category == "copy"


@dataclass
class Machine:
    """The state of the simulated device.

    Transfers on the same link share the bandwidth of the link evenly. The speed of a transfer is the speed on its most
    contended link. Copies from and to main memory have only the bandwidth that the running computation leaves.

    Attributes:
        now: the time in seconds since the beginning of the timeline.
        in_flight: a mapping from numbers to the transfers in flight.
        spans: the bars recorded so far.
        sums: totals over all iterations of all loops. The keys `"compute"`, `"hidden"`, `"exposed"`, `"memory"`,
            `"host"` and `"launch"` have seconds, and `"flops"` has FLOPs. The keys `(category, rows, "count")`,
            `(category, rows, "seconds")` and `(category, rows, "exposed")` have the executions, the seconds and the
            exposed seconds of the bars.
        started: number of transfers started so far.
        ahead: the lead of the host, in seconds. It is the time from the moment when the host launches new work until
            the device has finished all earlier work. The lead grows while the device is busy, and shrinks with every
            launch.
        least: the smallest lead since the last synchronization, or since the current iteration of a loop began.
    """

    now: float = 0.0
    in_flight: dict[int, _InFlight] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    sums: defaultdict[Hashable, float] = field(default_factory=lambda: defaultdict(int))
    started: int = 0
    ahead: float = 0.0
    least: float = 0.0

    def copy(self) -> "Machine":
        """Return an independent copy of the state, from which a branch of a conditional can be simulated."""
        in_flight = {number: replace(transfer) for number, transfer in self.in_flight.items()}
        return replace(self, in_flight=in_flight, spans=list(self.spans), sums=self.sums.copy())

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, in which every iteration of every loop is counted."""
        return self.sums["compute"] + self.sums["exposed"]

    def launch(self, seconds: float) -> None:
        """Simulate a launch that takes the host the given seconds; the device waits if it has no other work."""
        self.ahead -= seconds
        while (late := -self.ahead) > 0:
            passed = self._advance(late)
            self.sums["launch"] += passed
            self.ahead = 0.0 if passed == late else self.ahead
        self.least = min(self.least, self.ahead)

    def synchronize(self) -> None:
        """Simulate that the host waits for the device, to read a value that decides which work runs next."""
        self.ahead = self.least = 0.0

    def compute(self, span: Span, flops: int = 0, memory_bound: bool = False, memory_share: float = 0.0) -> None:
        """Simulate a computation of `span.seconds` seconds, during which transfers proceed.

        It takes a share of main memory's bandwidth, which copies then lack.
        """
        self.sums["flops"] += flops
        if not span.seconds:
            return
        self.record(replace(span, start=self.now))
        self.sums["memory"] += span.seconds if memory_bound else 0.0
        left = span.seconds
        while left > 0:
            left -= self._advance(left, memory_share=memory_share)

    def start(self, span: Span, transfer: Transfer) -> int:
        """Start a transfer, and return the number that identifies this transfer in a call of `wait`."""
        self.started += 1
        span = replace(span, start=self.now)
        self.in_flight[self.started] = _InFlight(span, transfer.busy, transfer.latency, transfer.links)
        self._finish_transfers()
        return self.started

    def wait(self, number: int | None) -> None:
        """Wait until a transfer is finished.

        The time of waiting for a copy counts as computation that main memory limits, or the link to the host.
        """
        while number is not None and (transfer := self.in_flight.get(number)):
            passed = self._advance(float("inf"), transfer)
            if transfer.is_copy:
                self.sums["host" if transfer.span.rows == (HOST_MEMORY,) else "memory"] += passed

    def drain(self) -> None:
        """Wait until all transfers in flight are finished."""
        for number in list(self.in_flight):
            self.wait(number)

    def record(self, span: Span) -> None:
        """Add a bar to `spans`, and its figures to `sums`."""
        self.spans.append(span)
        for figure, amount in (("count", 1), ("seconds", span.seconds), ("exposed", span.exposed)):
            self.sums[span.category, span.rows, figure] += amount

    def transfer_state(self) -> Hashable:
        """Return the transfers in flight, with rounded times, as a value that can be compared.

        Iterations of a loop that start with equal transfer states take the same time.
        """
        transfers = self.in_flight.values()
        return tuple((each.span.instruction, round(each.busy, 15), round(each.latency, 15)) for each in transfers)

    def alike(self, ahead: float, launching: float, left: int) -> int:
        """Return the number of remaining iterations in which launches delay the device as in the last iteration.

        Args:
            ahead: the lead of the host, in seconds, before the last iteration; `least` is the smallest lead during
                the last iteration.
            launching: seconds for which the device had waited for launches before the last iteration.
            left: the number of iterations that remain.
        """
        gained = self.ahead - ahead
        if self.sums["launch"] > launching:
            return left if abs(gained) < _ROUNDING else 0
        return left if gained > -_ROUNDING else min(left, int(self.least / -gained))

    def repeat(self, sums: Mapping[Hashable, float], recorded: int, ahead: float, more: int) -> None:
        """Count the work since an earlier moment, such as the beginning of an iteration, `more` additional times.

        Args:
            sums: the sums at the earlier moment.
            recorded: the number of bars at the earlier moment.
            ahead: the lead of the host, in seconds, at the earlier moment.
            more: the number of additional times.
        """
        gained = more * (self.ahead - ahead)
        self.ahead += gained
        self.least += min(0.0, gained)  # The host's lead in the last iteration is smaller by this.
        for key in list(self.sums):
            self.sums[key] += more * (self.sums[key] - sums[key])
        self.spans[recorded:] = [replace(span, times=span.times * (more + 1)) for span in self.spans[recorded:]]

    def _advance(self, most: float, waited: _InFlight | None = None, memory_share: float = 0.0) -> float:
        """Let time pass until some transfer changes its state, and return the seconds that passed.

        Args:
            most: the maximum number of seconds.
            waited: the transfer for which the device waits, or None if the device computes.
            memory_share: the share of main memory's bandwidth that the computation takes.
        """
        hides = any(not transfer.is_copy for transfer in self.in_flight.values())
        sharing = {number: self._sharing(transfer, memory_share) for number, transfer in self.in_flight.items()}
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

    def _sharing(self, transfer: _InFlight, memory_share: float) -> float:
        """Return the factor by which a transfer takes longer than alone.

        This is the number of transfers on the most contended of its links. A copy from or to main memory has only what
        the computation leaves of its bandwidth; the factor is infinite if nothing is left.
        """
        busy = [other.links for other in self.in_flight.values() if other.busy]
        left = 1.0 - memory_share if MEMORY in transfer.links else 1.0
        together = max((sum(link in links for links in busy) for link in transfer.links), default=1)
        return together / left if left else inf

    def _finish_transfers(self) -> None:
        """Record the bars of all finished transfers, and remove these transfers from `in_flight`."""
        finished = [number for number, each in self.in_flight.items() if not each.busy and not each.latency]
        for number in finished:
            transfer = self.in_flight.pop(number)
            seconds = self.now - transfer.span.start
            self.record(replace(transfer.span, seconds=seconds, exposed=transfer.exposed))
