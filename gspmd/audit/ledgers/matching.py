"""Match compiled collectives with planned steps, by their scopes.

Plan and program have the same name for a step: its equation, and its scope, such as `step2.reduce-scatter.x`.
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
"""An equation, and the scope of one of its steps."""


def planned_steps(entries: Iterable[PlannedStep]) -> dict[Name, list[PlannedStep]]:
    """Return the planned collectives that send anything, by name."""
    steps: dict[Name, list[PlannedStep]] = defaultdict(list)
    for entry in entries:
        if entry.step.is_collective and entry.step.wire_bytes:
            steps[entry.equation, step_name(entry.number, entry.step)].append(entry)
    return steps


def by_name(entries: Iterable[Entry]) -> dict[Name, list[Entry]]:
    """Return the compiled collectives by name."""
    named: dict[Name, list[Entry]] = defaultdict(list)
    for entry in entries:
        named[entry.equation, entry.step].append(entry)
    return named


def planned_total(steps: Sequence[PlannedStep]) -> tuple[int, int]:
    """Return the number of runs of steps, and the bytes that they send."""
    return sum(step.trips for step in steps), sum(step.wire_bytes for step in steps)


def compiled_total(entries: Sequence[Entry]) -> tuple[int, int]:
    """Return the number of runs of entries, and the bytes that they send."""
    return sum(entry.count for entry in entries), sum(entry.wire_bytes for entry in entries)


def credit_shared_steps(plan: ProgramPlan, entries: Sequence[Entry]) -> list[Entry]:
    """Move the entries in the scope of a shared step to the step whose result it uses, if that step lacks bytes.

    Of equal collectives, the plan counts the first, but the compiler may keep any of them. Looped steps may share only
    some of their permutes; then only a part of the entry is moved.
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
    """Return the names of the steps whose results the shared steps use."""
    return [name for name in planned if any(step.first == (name[0], read_step(name[1]).number) for step in shared)]


def _credit(
    entry: Entry, first: Name, planned: Mapping, named: Mapping, surplus: Counter
) -> tuple[Entry | None, Entry | None]:
    """Split an entry into the part that the step `first` lacks, renamed to that step, and the rest."""
    name = entry.equation, entry.step
    only_here = name not in planned and first not in named
    part, rest = _split(entry, entry.wire_bytes if only_here else min(surplus[name], -surplus[first]))
    if first == name or not part:
        return None, entry
    surplus.update({name: -part.wire_bytes, first: part.wire_bytes})
    return replace(part, equation=first[0], step=first[1]), rest


def _split(entry: Entry, amount: int) -> tuple[Entry | None, Entry | None]:
    """Split an entry into a part that sends `amount` bytes, and the rest; only permutes can be split."""
    if amount >= entry.wire_bytes:
        return entry, None
    if amount <= 0 or entry.kind != "collective-permute" or entry.count < 2:
        return None, entry
    count = min(max(1, round(entry.count * amount / entry.wire_bytes)), entry.count - 1)
    part = replace(entry, count=count, wire_bytes=amount)
    return part, replace(entry, count=entry.count - count, wire_bytes=entry.wire_bytes - amount)


def under_axes_of_steps(planned: Mapping[Name, list[PlannedStep]], entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries; if a step was compiled axis by axis, each of its parts gets all axes of the step."""
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
    """Return whether these are all axes of a step; a permute may lack axes along which it moves nothing."""
    return over == set(step.axes) or (step.kind == "collective-permute" and over < set(step.axes))
