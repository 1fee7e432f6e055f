"""Match the collectives of programs of several TPU slices with planned steps, by their bytes.

libtpu drops the names of most collectives in such programs. And it compiles a step over slices and within them as
several collectives: one over the network, and others within the slices.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

from gspmd.audit.ledgers.entries import Entry
from gspmd.audit.ledgers.matching import planned_steps
from gspmd.hardware.links import over_slices
from gspmd.lowerings.scopes import step_name
from gspmd.planner.steps import Step
from gspmd.tracing.program_plan import PlannedStep

Part = tuple[str, frozenset[str], int]
"""A collective that is a part of a step: its kind, its mesh axes, and the bytes that one device sends."""


def by_bytes(
    steps: Sequence[PlannedStep], entries: Sequence[Entry], mesh: Mapping[str, int], slices: int
) -> list[Entry]:
    """Return the entries of a program of several slices under the names, kinds and axes of the steps that they run.

    A step gets as many executions as it has trips, of collectives with exactly the kinds, axes and bytes of its parts:
    those of its own name first, and then those without a name. A step of which a part is not found gets none.

    Args:
        steps: the planned steps that run.
        entries: the compiled collectives.
        mesh: sizes of the mesh axes.
        slices: number of slices, over which the first axes lie.
    """
    pool = _Pool(entries)
    across = dict(zip(mesh, over_slices(tuple(mesh.values()), slices)))
    matched = []
    for (equation, name), named in planned_steps(steps).items():
        for planned in named:
            taken = pool.take(_ways(planned.step, mesh, across), planned.trips, (equation, name))
            if taken:
                first = taken[0]
                matched.append(
                    replace(
                        first,
                        kind=planned.step.kind,
                        axes=planned.step.axes,
                        count=planned.trips,
                        wire_bytes=sum(part.wire_bytes for part in taken),
                        network_bytes=sum(part.network_bytes for part in taken),
                        group=prod(mesh[axis] for axis in planned.step.axes),
                        equation=equation,
                        step=step_name(planned.number, planned.step),
                    )
                )
    return [*matched, *pool.left()]


class _Pool:
    """Compiled collectives by kind, axes and bytes of an execution, and how many executions are left of each."""

    def __init__(self, entries: Sequence[Entry]):
        self._left = {number: entry.count for number, entry in enumerate(entries)}
        self._entries = entries
        self._alike: dict[Part, list[int]] = defaultdict(list)
        for number, entry in enumerate(entries):
            each, rest = divmod(entry.wire_bytes, entry.count)
            if not rest and entry.arrays == 1:
                self._alike[entry.kind, frozenset(entry.axes), each].append(number)

    def take(self, ways: Iterator[Sequence[Part]], count: int, name: tuple[str, str]) -> list[Entry]:
        """Take `count` executions of each part of the first way of which all are there; nothing if there is none."""
        for parts in ways:
            found = [(number, runs) for part in parts for number, runs in self._find(part, count, name)]
            runs = sum(runs for _, runs in found)
            if runs == count * len(parts):
                for number, some in found:
                    self._left[number] -= some
                return [self._part(number, some) for number, some in found]
        return []

    def left(self) -> list[Entry]:
        """Return the executions that no step took."""
        return [self._part(number, runs) for number, runs in self._left.items() if runs]

    def _find(self, part: Part, count: int, name: tuple[str, str]) -> Iterator[tuple[int, int]]:
        own = lambda number: (self._entries[number].equation, self._entries[number].step) == name  # noqa: E731
        free = [number for number in self._alike.get(part, ()) if own(number) or not self._entries[number].step]
        for number in sorted(free, key=own, reverse=True):
            if runs := min(count, self._left[number]):
                count -= runs
                yield number, runs

    def _part(self, number: int, runs: int) -> Entry:
        entry = self._entries[number]
        sent, away = (total * runs // entry.count for total in (entry.wire_bytes, entry.network_bytes))
        return replace(entry, count=runs, wire_bytes=sent, network_bytes=away)


def _ways(step: Step, mesh: Mapping[str, int], across: Mapping[str, int]) -> Iterator[list[Part]]:
    """Yield the ways in which a step may be compiled: as it is, and in parts."""
    kind, axes = step.kind, frozenset(axis for axis in step.axes if mesh[axis] > 1)
    yield [(kind, axes, step.wire_bytes)]
    between = frozenset(axis for axis in axes if across.get(axis, 1) > 1)
    inside = axes - between
    if not (between and inside) or kind in ("all-to-all", "collective-permute"):
        yield from _in_two(kind, axes, step.wire_bytes, mesh)
        return
    near, group = prod(mesh[axis] for axis in inside), prod(mesh[axis] for axis in axes)
    away = step.wire_bytes * (group - near) // (near * (group - 1))
    if kind == "all-reduce":
        half = (step.wire_bytes - away) // 2
        for scatter in _at_once_or_in_two("reduce-scatter", inside, half, mesh):
            for gather in _at_once_or_in_two("all-gather", inside, half, mesh):
                yield [*scatter, ("all-reduce", between, away), *gather]
        return
    for within in _at_once_or_in_two(kind, inside, step.wire_bytes - away, mesh):
        yield [*within, (kind, between, away)]


def _at_once_or_in_two(kind: str, axes: frozenset[str], sent: int, mesh: Mapping[str, int]) -> Iterator[list[Part]]:
    yield [(kind, axes, sent)]
    yield from _in_two(kind, axes, sent, mesh)


def _in_two(kind: str, axes: frozenset[str], sent: int, mesh: Mapping[str, int]) -> Iterator[list[Part]]:
    """Yield the ways to gather or scatter over some axes and then the others, as in `gspmd.lowerings.blocking.tpu`."""
    if kind not in ("all-gather", "reduce-scatter"):
        return
    group = prod(mesh[axis] for axis in axes)
    for some in range(1, len(axes)):
        for major in map(frozenset, combinations(sorted(axes), some)):
            few = prod(mesh[axis] for axis in major)
            # Of a buffer S the minor part sends S/few · (1 - few/group), and the major one S (1 - 1/few).
            minor = sent * (group - few) // (few * (group - 1))
            yield [(kind, major, sent - minor), (kind, axes - major, minor)]
