"""One device in simulated time: a clock, what it computes, and the transfers that are under way beside it."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from gspmd.audit.simulation.links import MEMORY, Link, Transfer


@dataclass(frozen=True)
class Span:
    """Something drawn on a timeline.

    Attributes:
        name: a plan's step, `step2.reduce-scatter.x`, or what JAX or HLO calls it.
        rows: on which it stands: `compute`, `memory`, or every mesh axis that it uses.
        start: seconds from the beginning of the program; of a loop only its first iterations take time here.
        seconds: that one execution takes.
        category: kind of a collective, `einsum` (a matrix product), `other` (what else is computed), `copy`, `loop`.
        times: how often it runs.
        trips: of a loop, how many iterations this drawn one stands for.
        equation: the planned equation it belongs to.
        source: `file:line` that asked for it.
        instruction: its name in the HLO.
        cycles: as the compiler estimates them.
        bytes: per execution: what one device sends, or moves to and from its memory.
        exposed: seconds per execution for which nothing was computed because of it.
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
class _Flight:
    """A transfer under way, with what is left of it."""

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
    """The clock, what is under way, what was drawn, and the sums so far.

    Transfers that fill the same link at the same time share it: each goes on as slowly as on its most crowded link.
    `sums` holds seconds under `"compute"`, `"hidden"`, `"exposed"` and `"memory"`, operations under `"flops"`, and
    executions, seconds and exposed seconds under `(category, rows, "count" | "seconds" | "exposed")`.
    """

    now: float = 0.0
    under_way: dict[int, _Flight] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    sums: Counter = field(default_factory=Counter)
    started: int = 0

    def copy(self) -> "Machine":
        """The same state, to go on from in another way."""
        flights = {number: replace(flight) for number, flight in self.under_way.items()}
        return Machine(self.now, flights, list(self.spans), Counter(self.sums), self.started)

    @property
    def elapsed(self) -> float:
        """Seconds so far, every iteration of every loop counted."""
        return self.sums["compute"] + self.sums["exposed"]

    def compute(self, span: Span, flops: int = 0, waits: bool = False) -> None:
        """Compute for as long as the span says, beside whatever is under way; `waits` if for the memory's sake."""
        self.sums["flops"] += flops
        if not span.seconds:
            return
        self.draw(replace(span, start=self.now))
        self.sums["memory"] += span.seconds if waits else 0.0
        left = span.seconds
        while left > 0:
            left -= self._advance(left)

    def start(self, span: Span, asked: Transfer) -> int:
        """Begin a transfer; returns the number to wait for."""
        self.started += 1
        span = replace(span, start=self.now)
        self.under_way[self.started] = _Flight(span, asked.busy, asked.latency, asked.links)
        self._land()
        return self.started

    def wait(self, number: int | None) -> None:
        """Stand still until a transfer is over. Waiting for a copy counts as computing, bound by memory."""
        while flight := self.under_way.get(number):
            passed = self._advance(float("inf"), flight)
            self.sums["memory"] += passed if flight.is_copy else 0.0

    def drain(self) -> None:
        """Wait for everything that is under way."""
        for number in list(self.under_way):
            self.wait(number)

    def draw(self, span: Span) -> None:
        """Keep a span, and count it."""
        self.spans.append(span)
        for figure, amount in (("count", 1), ("seconds", span.seconds), ("exposed", span.exposed)):
            self.sums[span.category, span.rows, figure] += amount

    def border(self) -> Hashable:
        """What is under way, to the femtosecond: moments that agree in this go on alike."""
        flights = self.under_way.values()
        return tuple((each.span.instruction, round(each.busy, 15), round(each.latency, 15)) for each in flights)

    def repeat(self, sums: Counter, drawn: int, more: int) -> None:
        """Count so many times more, without drawing it, what came since a moment (its sums, its number of spans)."""
        for key in list(self.sums):
            self.sums[key] += more * (self.sums[key] - sums[key])
        self.spans[drawn:] = [replace(span, times=span.times * (more + 1)) for span in self.spans[drawn:]]

    def _advance(self, most: float, waited: _Flight | None = None) -> float:
        """Let time pass until something changes, or for at most so long; returns the seconds."""
        talking = any(not flight.is_copy for flight in self.under_way.values())
        crowds = {number: self._crowd(flight) for number, flight in self.under_way.items()}
        ends = [each.busy * crowds[n] if each.busy else each.latency for n, each in self.under_way.items()]
        passed = min([most, *ends])
        for (number, flight), end in zip(self.under_way.items(), ends):
            if flight.busy:
                flight.busy = 0.0 if end <= passed else flight.busy - passed / crowds[number]
            else:
                flight.latency = 0.0 if end <= passed else flight.latency - passed
        self.now += passed
        if waited and not waited.is_copy:
            waited.exposed += passed
            self.sums["exposed"] += passed
        else:
            self.sums["compute"] += passed
            self.sums["hidden"] += passed if talking else 0.0
        self._land()
        return passed

    def _crowd(self, flight: _Flight) -> int:
        """How many transfers share the most crowded link that this one fills."""
        filled = [other.links for other in self.under_way.values() if other.busy]
        return max((sum(link in links for links in filled) for link in flight.links), default=1)

    def _land(self) -> None:
        """Draw and forget what is over."""
        over = [number for number, flight in self.under_way.items() if not flight.busy and not flight.latency]
        for number in over:
            flight = self.under_way.pop(number)
            seconds = self.now - flight.span.start
            self.draw(replace(flight.span, seconds=seconds, exposed=flight.exposed))
