"""The schedules of a pipeline as tables: for every tick, the microbatch and the kind of work of each stage.

All stages run one program in lockstep. A tick has a slot for each kind of work that any stage does in it, and stages
without this work wait. A stage computes `rounds` chunks of layers: in round r, stage s computes chunk r·S + s. So a
microbatch goes round the stages `rounds` times.

If a model has several stacks of blocks, such as an encoder and a decoder, a stage has chunks of each stack. A
microbatch goes through all stages for the first stack, and then through all stages for the second stack. Each stack has
its own slots in a tick.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import groupby
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from gspmd.annotate.errors import PlanError, shown, suggestion
from gspmd.annotate.validation import whole
from gspmd.display import images
from gspmd.pipeline.picture import figure, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
"""The names of the schedules for training."""


KINDS = ("forward", "backward", "weights")
"""The kinds of work, in the order in which a stage does them in a tick."""


class Work(NamedTuple):
    """The work of a stage in one slot: a microbatch, and a round, which determines the chunk of layers."""

    microbatch: int
    round: int


Slot = tuple[Work | None, ...]
"""The work of each stage in one slot; None for a stage that waits."""


@dataclass(frozen=True)
class Schedule:
    """The work of every stage at every tick.

    Attributes:
        name: one of `SCHEDULES`, or `"forward"` for the forward pass alone.
        stages: S, the number of devices along the mesh axis of the pipeline.
        microbatches: M, the number of microbatches, the parts of a batch that go through the stages one by one.
        rounds: R, the number of chunks of layers in each stage.
        ticks: for each tick, a mapping from kind of work to slot. The kinds are `"forward"`, `"backward"` and, if
            backward passes are split, `"weights"`. If they are split, `"backward"` computes gradients of inputs, and
            `"weights"` computes gradients of weights. If a tick lacks a kind, no stage does this kind of work in the
            tick.
        stack: the index, from 0, of the stack of blocks to which this work belongs (see `in_stacks`).
        stacks: the number of stacks that a microbatch goes through.

    Example:
        >>> schedule = Schedule.of("1f1b", stages=4, microbatches=8)
        >>> schedule.ticks[0]["forward"]
        (Work(microbatch=0, round=0), None, None, None)
        >>> round(schedule.bubble, 3), schedule.in_flight
        (0.273, 7)
        >>> print(Schedule.of("1f1b", stages=2, microbatches=3))
        1f1b of 3 microbatches through 2 stages, bubble 25%
        stage 0 │ F0 │ F1 .  │ F2 B0 │ .  B1 │ B2
        stage 1 │ .  │ F0 B0 │ F1 B1 │ F2 B2 │ .

    Source: GPipe, Huang et al. 2019 (arXiv 1811.06965), §2.3; 1F1B, Narayanan et al. 2019 (PipeDream, SOSP), §3.2, and
        its interleaved form, Narayanan et al. 2021 (arXiv 2104.04473), §2.2; the split backward pass, Qi et al. 2023
        (arXiv 2401.10241), §2.
    Differs: stages run in lockstep, so a tick of 1F1B has a slot for a forward pass and a slot for a backward pass. In
        the first and last ticks, some stages wait in one of the two slots. The time is the same as in the papers, but
        stage s holds 2(S - 1 - s) + 1 microbatches instead of S - s. In zero-bubble, all stages compute gradients of
        weights in the same ticks, so that no stage waits in these slots. In slots for forward passes and for gradients
        of inputs, stages wait as in 1F1B.
    """

    name: str
    stages: int
    microbatches: int
    rounds: int
    ticks: tuple[Mapping[str, Slot], ...]
    stack: int = 0
    stacks: int = 1

    @classmethod
    def of(cls, name: str, stages: int, microbatches: int, rounds: int = 1) -> "Schedule":
        """Make the table of a schedule.

        Args:
            name: the kind of schedule. `"gpipe"` runs all forward passes and then all backward passes; `"1f1b"` runs
                each backward pass as early as possible; `"zero-bubble"` is 1F1B with split backward passes;
                `"forward"` runs only forward passes.
            stages: S, the number of stages.
            microbatches: M, the number of microbatches. If there are several rounds, M is a multiple of S.
            rounds: R, the number of rounds. A schedule with several rounds is interleaved (also called circular).

        Raises:
            PlanError: no schedule is called `name`, a number is not a positive integer, or R > 1 and S does not divide
                M.
        """
        if name not in (*SCHEDULES, "forward"):
            near = suggestion(name, SCHEDULES) if isinstance(name, str) else ""
            raise PlanError(f"no schedule is called {shown(name)}.\n  {near}Schedules: {', '.join(SCHEDULES)}.")
        for what, number in (("stages", stages), ("microbatches", microbatches), ("rounds", rounds)):
            if (whole(number) or 0) < 1:
                raise PlanError(f"a pipeline of {shown(number)} {what} has no schedule.\n  Give 1 or more.")
        if rounds > 1 and microbatches % stages:
            raise PlanError(
                f"{microbatches} microbatches cannot go {rounds} times round {stages} stages: they go in groups of "
                f"{stages}.\n  Give a multiple of {stages} microbatches, or one round."
            )
        return cls(name, stages, microbatches, rounds, _ticks(name, stages, microbatches, rounds, 0, 1))

    def in_stacks(self, count: int) -> "tuple[Schedule, ...]":
        """Return the schedules of several stacks of blocks; a microbatch goes through the stacks one after the other.

        All schedules have the same ticks. What one stack sends to another stack arrives in the next tick.

        Args:
            count: the number of stacks.

        Example:
            >>> print(*Schedule.of("1f1b", stages=2, microbatches=2).in_stacks(2), sep="\\n")
            1f1b of 2 microbatches through 2 stages, bubble 33%, stack 1 of 2
            stage 0 │ F0 │ F1 │ .  │    │    │ .  │ B0 │ B1
            stage 1 │ .  │ F0 │ F1 │    │    │ B0 │ B1 │ .
            1f1b of 2 microbatches through 2 stages, bubble 33%, stack 2 of 2
            stage 0 │    │    │ F0 │ F1 .  │ .  B0 │ B1 │    │
            stage 1 │    │    │ .  │ F0 B0 │ F1 B1 │ .  │    │
        """
        of = self.name, self.stages, self.microbatches, self.rounds
        tables = [_ticks(*of, stack, count) for stack in range(count)]
        last = max(map(len, tables))
        rest = MappingProxyType[str, Slot]({})
        padded = ((*ticks, *[rest] * (last - len(ticks))) for ticks in tables)
        return tuple(Schedule(*of, ticks, stack, count) for stack, ticks in enumerate(padded))

    def __hash__(self) -> int:
        return hash((self.name, self.stages, self.microbatches, self.rounds, self.stack, self.stacks))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of work in the schedule, such as `"forward"`."""
        return tuple(kind for kind in KINDS if any(kind in tick for tick in self.ticks))

    @property
    def bubble(self) -> float:
        """The fraction of slots in which a stage waits, counted in the table of ticks.

        The fraction is (S - 1) / (R·M + S - 1). Stages wait in as many forward slots as backward slots. So the fraction
        of slots is also the fraction of time, whatever the ratio of the times of a forward pass and a backward pass. In
        zero-bubble, no stage waits in slots for gradients of weights, and the fraction is 2(S - 1) / (3R·M + 2(S - 1)).
        """
        slots = [slot for tick in self.ticks for slot in tick.values()]
        return sum(slot.count(None) for slot in slots) / (len(slots) * self.stages)

    @cached_property
    def inputs(self) -> Mapping[tuple[str, int, int], int]:
        """A mapping from (kind of work, tick, stage) to the index of the buffer that holds the chunk's input.

        The input is held from the chunk's forward pass to its backward pass.
        """
        return self._places("forward", "backward")

    @cached_property
    def residuals(self) -> Mapping[tuple[str, int, int], int]:
        """A mapping from (kind of work, tick, stage) to the buffer index of the residuals of a split backward pass.

        Residuals are held until the gradients of weights, which need them, have been computed.
        """
        return self._places("backward", "weights")

    def _places(self, begin: str, end: str) -> Mapping[tuple[str, int, int], int]:
        """Assign the first free buffer index to each work, so that as few buffers as possible are needed.

        The buffer is held from the work's slot of kind `begin` to its slot of kind `end`.
        """
        places: dict[tuple[str, int, int], int] = {}
        for stage in range(self.stages):
            held: dict[Work, int] = {}
            free: list[int] = []  # free places among those used before
            for number, tick in enumerate(self.ticks):
                if begin in tick and (work := tick[begin][stage]):
                    places[begin, number, stage] = held[work] = heappop(free) if free else len(held)
                if end in tick and (work := tick[end][stage]):
                    places[end, number, stage] = held.pop(work)
                    heappush(free, places[end, number, stage])
        return MappingProxyType(places)

    @property
    def in_flight(self) -> int:
        """The largest number of chunk inputs that a stage holds at any time."""
        return max(self.inputs.values()) + 1

    def phases(self) -> Iterator[tuple[tuple[str, ...], range]]:
        """Group consecutive ticks with the same kinds of work; for each group, yield the kinds and the tick numbers."""
        for ticks in phases([self]):
            yield tuple(self.ticks[ticks[0]]), ticks

    def describe(self) -> str:
        """Describe the schedule on one line.

        >>> Schedule.of("gpipe", stages=4, microbatches=8).describe()
        'gpipe of 8 microbatches through 4 stages, bubble 27%'
        """
        rounds = f" {self.rounds} times" if self.rounds > 1 else ""
        return (
            f"{self.name} of {self.microbatches} microbatches{rounds} through {self.stages} stages, "
            f"bubble {self.bubble:.0%}"
        ) + (f", stack {self.stack + 1} of {self.stacks}" if self.stacks > 1 else "")

    def __str__(self) -> str:
        return text(self.describe(), self.ticks)

    def figure(self) -> "Figure":
        """Draw the schedule as a matplotlib figure, in which time runs to the right, and each stage is a row.

        Slots in which a stage waits are gray.
        """
        return figure(self.describe(), self.ticks)

    def save(self, path: str | PathLike) -> None:
        """Write the picture of the schedule to a file, whose suffix determines the format, such as PNG.

        Args:
            path: the file to write.
        """
        images.save(self.figure(), Path(path), self.describe(), f"bubble {self.bubble:.0%}")


def phases(schedules: Sequence[Schedule]) -> Iterator[range]:
    """Group consecutive ticks in which each stack has the same kinds of work; yield the tick numbers of each group.

    Args:
        schedules: the schedules of all stacks.
    """
    numbers = range(len(schedules[0].ticks))
    for _, ticks in groupby(numbers, key=lambda number: [tuple(schedule.ticks[number]) for schedule in schedules]):
        run = list(ticks)
        yield range(run[0], run[-1] + 1)


def _ticks(
    name: str, stages: int, microbatches: int, rounds: int, stack: int, stacks: int
) -> tuple[Mapping[str, Slot], ...]:
    """Return the ticks of one of several stacks, up to the last tick in which this stack has work."""
    around = rounds * stages  # ticks of a microbatch in a stack
    early = stacks * around - 1
    # The tick of the first backward pass, which is in the last stack.
    delays = {"gpipe": early - around + microbatches * rounds + stages, "1f1b": early, "zero-bubble": early}
    slots: dict[tuple[int, str], list[Work | None]] = {}
    for microbatch in range(microbatches):
        group, place = divmod(microbatch, stages)
        for turn in range(rounds):
            order = group * around + turn * stages + place
            for stage in range(stages):
                forward = slots.setdefault((stack * around + order + stage, "forward"), [None] * stages)
                forward[stage] = Work(microbatch, turn)
                if name in delays:  # in backward passes the last stack, the last round and the last stage come first
                    tick = delays[name] + (stacks - 1 - stack) * around + order + stages - 1
                    back = Work(microbatch, rounds - 1 - turn)
                    slots.setdefault((tick - stage, "backward"), [None] * stages)[stage] = back
                    if name == "zero-bubble":  # when the first stage, the last to get one, has its cotangent
                        slots.setdefault((tick, "weights"), [None] * stages)[stage] = back
    last = max(tick for tick, _ in slots)
    ticks = ({kind: tuple(slots[tick, kind]) for kind in KINDS if (tick, kind) in slots} for tick in range(last + 1))
    return tuple(map(MappingProxyType, ticks))
