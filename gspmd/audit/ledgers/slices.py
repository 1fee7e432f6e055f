"""Matching of collectives with planned steps by their bytes, for programs on several TPU slices.

In such programs, libtpu drops the names of most collectives. It compiles a step over several slices as several
collectives: one over the network between the slices, and others within the slices.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod

from gspmd.audit.hlo.replica_groups import UNNAMED
from gspmd.audit.ledgers.entries import Entry
from gspmd.audit.ledgers.matching import planned_steps
from gspmd.hardware.links import over_slices, wire_bytes
from gspmd.lowerings.scopes import step_name
from gspmd.planner.steps import Step
from gspmd.tracing.program_plan import PlannedStep

Part = tuple[str, frozenset[str], int]
"""A collective that runs a part of a step: its kind, its mesh axes, and the bytes that one device sends per run."""


def by_bytes(
    steps: Sequence[PlannedStep], entries: Sequence[Entry], mesh: Mapping[str, int], slices: int
) -> list[Entry]:
    """Match the collectives of a program on several slices with planned steps, by kind, mesh axes and bytes.

    A step may be compiled in several parts. A step that runs n times is matched with n executions of each part, that
    is, of a collective with exactly the kind, axes and bytes of the part. Collectives that have the step's name are
    used first, then collectives without a name. If any part of a step is not found, no collective is matched with the
    step.

    Args:
        steps: the planned steps, without those that use another step's result.
        entries: the compiled collectives.
        mesh: sizes of the mesh axes.
        slices: number of slices. The first mesh axes run across the slices.

    Returns:
        One entry for each matched step, with the step's name, kind and axes and the bytes of all its parts, followed by
        the collectives that are matched with no step.
    """
    pool = _Pool(entries)
    across = dict(zip(mesh, over_slices(tuple(mesh.values()), slices) or ()))
    matched = []
    for (equation, name), named in planned_steps(steps).items():
        for planned in named:
            taken = pool.take(_ways(planned.step, mesh, across), planned.trips, (equation, name))
            taken = taken or pool.take_hops(planned, (equation, name))
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


def whole_permutes(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries, without the permutes within slices that are part of a permute across slices.

    The compiler writes a permute across slices as two permutes, one across slices and one within each slice. Each
    device sends its piece by only one of the two, so only the permute across slices is counted. The permute within
    slices that belongs to it is the nearest one in the program that sends the same number of bytes over the same axes
    or over some of these axes.
    """
    rest: set[int] = set()
    for number, crossing in enumerate(entries):
        if crossing.kind != "collective-permute" or not crossing.network_bytes:
            continue
        within = [
            (abs(other - number), other)
            for other, entry in enumerate(entries)
            if entry.kind == crossing.kind
            and other not in rest
            and (entry.network_bytes, entry.wire_bytes, entry.count) == (0, crossing.wire_bytes, crossing.count)
            and {*entry.axes} <= {*crossing.axes}
        ]
        if within:
            rest.add(min(within)[1])
    return [entry for number, entry in enumerate(entries) if number not in rest]


class _Pool:
    """The compiled collectives, indexed by kind, axes and bytes per execution.

    For each collective, the pool counts the executions that are not yet assigned to a step.
    """

    def __init__(self, entries: Sequence[Entry]):
        self._left = {number: entry.count for number, entry in enumerate(entries)}
        self._entries = entries
        self._alike: dict[Part, list[int]] = defaultdict(list)
        for number, entry in enumerate(entries):
            each, rest = divmod(entry.wire_bytes, entry.count)
            if each and not rest and entry.arrays == 1:
                self._alike[entry.kind, frozenset(entry.axes), each].append(number)

    def take(self, ways: Iterator[Sequence[Part]], count: int, name: tuple[str, str]) -> list[Entry]:
        """Take `count` executions of each part of a step, and return them as entries.

        Each element of `ways` is a list of parts. The first list for which enough executions of every part are left is
        used. If there is no such list, nothing is taken, and the result is empty.
        """
        for parts in ways:
            found = [(number, runs) for part in parts for number, runs in self._find(part, count, name)]
            if sum(runs for _, runs in found) == count * len(parts):
                return self._taken(found)
        return []

    def take_hops(self, planned: PlannedStep, name: tuple[str, str]) -> list[Entry]:
        """Take the permutes of a step of a looped equation, and return them as entries.

        The permutes are hops that send equal numbers of bytes. If some hops are missing, nothing is taken.
        """
        step = planned.step
        for kind, axes, each in self._alike:
            if not step.kind == kind == "collective-permute" or axes != {*step.axes} or step.wire_bytes % each:
                continue
            wanted = planned.trips * (step.wire_bytes // each)
            found = [*self._find((kind, axes, each), wanted, name)]
            if sum(runs for _, runs in found) == wanted:
                return self._taken(found)
        return []

    def left(self) -> list[Entry]:
        """Return the executions that are not assigned to any step, as entries."""
        return [self._part(number, runs) for number, runs in self._left.items() if runs]

    def _find(self, part: Part, count: int, name: tuple[str, str]) -> Iterator[tuple[int, int]]:
        own = lambda number: (self._entries[number].equation, self._entries[number].step) == name  # noqa: E731
        free = [number for number in self._alike.get(part, ()) if own(number) or not self._entries[number].step]
        for number in sorted(free, key=own, reverse=True):
            if runs := min(count, self._left[number]):
                count -= runs
                yield number, runs

    def _taken(self, found: Sequence[tuple[int, int]]) -> list[Entry]:
        for number, runs in found:
            self._left[number] -= runs
        return [self._part(number, runs) for number, runs in found]

    def _part(self, number: int, runs: int) -> Entry:
        entry = self._entries[number]
        sent, away = (total * runs // entry.count for total in (entry.wire_bytes, entry.network_bytes))
        return replace(entry, count=runs, wire_bytes=sent, network_bytes=away)


def _ways(step: Step, mesh: Mapping[str, int], across: Mapping[str, int]) -> Iterator[list[Part]]:
    """Yield every way to compile a step, as a list of parts; the first way is a single collective.

    `gspmd.lowerings.blocking.tpu` describes how a step is divided into parts.
    """
    axes = [axis for axis in step.axes if mesh[axis] > 1]
    yield [(step.kind, frozenset(axes), step.wire_bytes)]
    if step.kind not in ("all-gather", "reduce-scatter", "all-reduce"):
        return
    group = prod(mesh[axis] for axis in axes)
    passes = 2 if step.kind == "all-reduce" else 1
    buffer = -(-step.wire_bytes * group // (passes * (group - 1)))  # `wire_bytes` rounds down.
    away = frozenset(axis for axis in axes if across.get(axis, 1) > 1)
    inside = [*_inside(axes, mesh, across)]
    if not away:
        if step.kind != "all-reduce":
            yield from (_sent(step.kind, parts, buffer) for parts in inside)
        return
    mixed = any(across[axis] < mesh[axis] for axis in away)
    between = (frozenset(UNNAMED) if mixed else away, prod(across[axis] for axis in away))
    if step.kind != "all-reduce":
        yield from (_sent(step.kind, [*parts, between], buffer) for parts in inside)
        return
    for scatter, gather in product(inside, inside):
        left = buffer // prod(devices for _, devices in scatter)
        within = [*_sent("reduce-scatter", scatter, buffer), *_sent("all-gather", gather, buffer)]
        yield [*within, *_sent("all-reduce", [between], left)]


_Along = tuple[frozenset[str], int]
"""The mesh axes of a part, and the number of devices along these axes."""


def _inside(axes: Sequence[str], mesh: Mapping[str, int], across: Mapping[str, int]) -> Iterator[list[_Along]]:
    """Yield the ways to divide a collective within a slice into parts, which are ordered from major to minor axes.

    A mesh axis that runs both across slices and within each slice is a separate part, which has no axis name in the
    compiled program. If there is only one part, the divisions of that part into two parts are yielded too.
    """
    parts: list[list[str]] = [[]]
    for axis in axes:
        if across.get(axis, 1) == 1:
            parts[-1].append(axis)
        elif across[axis] < mesh[axis]:
            parts += [[axis], []]
    found = [
        (frozenset(UNNAMED), mesh[names[0]] // across[names[0]])
        if across.get(names[0], 1) > 1
        else (frozenset(names), prod(mesh[axis] for axis in names))
        for names in parts
        if names
    ]
    yield found
    if len(found) != 1:
        return
    (names, devices), *_ = found
    if names == frozenset(UNNAMED):
        yield from ([(names, devices // few), (names, few)] for few in range(2, devices) if devices % few == 0)
    for some in range(1, len(names)):
        for major in map(frozenset, combinations(sorted(names), some)):
            yield [(each, prod(mesh[axis] for axis in each)) for each in (major, names - major)]


def _sent(kind: str, parts: Sequence[_Along], buffer: int) -> list[Part]:
    """Return the parts of a collective, with the bytes that each part sends.

    Parts are ordered from major to minor. Each part divides its buffer by its number of devices, and leaves the
    quotient to the next part.
    """
    sent = []
    for axes, devices in parts:
        sent.append((kind, axes, wire_bytes(kind, devices, buffer)))
        buffer //= devices
    return sent
