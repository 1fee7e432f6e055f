"""Matching of compiled collectives with planned steps, by their names.

The plan and the compiled program use the same name for a step: the equation, and a scope such as
`step2.reduce-scatter.x`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gspmd.audit.hlo.replica_groups import UNNAMED
from gspmd.audit.ledgers.entries import Entry
from gspmd.lowerings.scopes import read_step, step_name
from gspmd.planner.steps import Step
from gspmd.tracing.program_plan import PlannedStep, ProgramPlan

Name = tuple[str, str]
"""The name of a step: its equation, and its scope, such as `step2.reduce-scatter.x`."""


def planned_steps(entries: Iterable[PlannedStep]) -> dict[Name, list[PlannedStep]]:
    """Return the planned collectives that send at least one byte, grouped by name."""
    steps: dict[Name, list[PlannedStep]] = defaultdict(list)
    for entry in entries:
        if entry.step.is_collective and entry.step.wire_bytes:
            steps[entry.equation, step_name(entry.number, entry.step)].append(entry)
    return steps


def by_name(entries: Iterable[Entry]) -> dict[Name, list[Entry]]:
    """Return the compiled collectives, grouped by name."""
    named: dict[Name, list[Entry]] = defaultdict(list)
    for entry in entries:
        named[entry.equation, entry.step].append(entry)
    return named


def planned_total(steps: Sequence[PlannedStep]) -> tuple[int, int]:
    """Return the number of runs of all these steps together, and the bytes that the steps send together."""
    return sum(step.trips for step in steps), sum(step.wire_bytes for step in steps)


def compiled_total(entries: Sequence[Entry]) -> tuple[int, int]:
    """Return the number of runs of all these entries together, and the bytes that the entries send together."""
    return sum(entry.count for entry in entries), sum(entry.wire_bytes for entry in entries)


def credit_shared_steps(plan: ProgramPlan, entries: Sequence[Entry]) -> list[Entry]:
    """Give entries of a shared step the name of the equal, earlier step, if that step sends fewer bytes than planned.

    A shared step is a planned step that uses the result of an equal, earlier step. The plan counts only the earlier
    step, but the compiler may keep the collective of either step. Steps of looped equations may share only some of
    their permutes; in that case only a part of the entry is renamed.
    """
    planned, named = planned_steps(plan.entries), by_name(entries)
    surplus = Counter({name: compiled_total(found)[1] for name, found in named.items()})  # bytes in excess of the plan
    surplus.subtract({name: planned_total(steps)[1] for name, steps in planned.items()})
    firsts = {name: _firsts(steps, planned) for name, steps in planned_steps(plan.shared).items()}
    credited = []
    for rest in entries:
        for first in firsts.get((rest.equation, rest.step), ()):
            part, rest = _credit(rest, first, planned, named, surplus)
            credited += [part] if part else []
            if not rest:
                break
        credited += [rest] if rest else []
    return credited


def _firsts(shared: Sequence[PlannedStep], planned: Iterable[Name]) -> list[Name]:
    """Return the names of the planned steps whose results the shared steps use."""
    return [name for name in planned if any(step.first == (name[0], read_step(name[1]).number) for step in shared)]


def _credit(
    entry: Entry, first: Name, planned: Mapping, named: Mapping, surplus: Counter
) -> tuple[Entry | None, Entry | None]:
    """Split an entry into a part that sends the bytes that the step `first` lacks, and the rest.

    A step lacks bytes if it sends fewer bytes than planned. The part gets the name of the step `first`. A part or rest
    that is empty is None.
    """
    name = entry.equation, entry.step
    only_here = name not in planned and first not in named
    part, rest = _split(entry, entry.wire_bytes if only_here else min(surplus[name], -surplus[first]))
    if first == name or not part:
        return None, entry
    surplus.update({name: -part.wire_bytes, first: part.wire_bytes})
    return replace(part, equation=first[0], step=first[1]), rest


def _split(entry: Entry, amount: int) -> tuple[Entry | None, Entry | None]:
    """Split an entry into a part that sends `amount` bytes, and the rest.

    If the entry sends at most `amount` bytes, the part is the whole entry, and the rest is None. A larger entry can be
    split only if it is a collective-permute that runs several times, and only if `amount` is positive. Otherwise the
    part is None.
    """
    if amount >= entry.wire_bytes:
        return entry, None
    if amount <= 0 or entry.kind != "collective-permute" or entry.count < 2:
        return None, entry
    count = min(max(1, round(entry.count * amount / entry.wire_bytes)), entry.count - 1)
    part = replace(entry, count=count, wire_bytes=amount)
    return part, replace(entry, count=entry.count - count, wire_bytes=entry.wire_bytes - amount)


def under_axes_of_steps(planned: Mapping[Name, list[PlannedStep]], entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries; an entry that is only a part of a step gets all mesh axes of the step.

    A step has several parts if it was compiled axis by axis. Entries that are not such parts are returned unchanged.
    """
    axes = {}
    for name, found in by_name(entries).items():
        if name not in planned:
            continue
        step = planned[name][0].step
        over = {axis for entry in found for axis in entry.axes}
        enough = compiled_total(found)[1] >= planned_total(planned[name])[1]
        covered = _covers(step, over) or (over == {*UNNAMED} and enough)  # Parts of an axis have no name.
        if covered and all(entry.kind == step.kind for entry in found):
            axes[name] = step.axes
    return [replace(entry, axes=axes.get((entry.equation, entry.step), entry.axes)) for entry in entries]


def _covers(step: Step, over: set[str]) -> bool:
    """Return whether `over` has all mesh axes of a step, and no other axes.

    For a collective-permute, axes along which nothing moves may be missing from `over`.
    """
    return over == set(step.axes) or (step.kind == "collective-permute" and over < set(step.axes))
