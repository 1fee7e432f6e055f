"""What became of every planned step: compiled collectives joined to steps by their scopes, and judged."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gspmd.audit.hlo.replica_groups import UNNAMED
from gspmd.audit.ledgers.ledger import Entry, number
from gspmd.display.units import axes_text
from gspmd.lowerings.scopes import step_name
from gspmd.planner.steps import Step
from gspmd.tracing.program_plan import PlannedStep, ProgramPlan

VERDICTS = ("as planned", "shared", "rewritten", "gone", "the compiler's choice", "not planned")


@dataclass(frozen=True)
class Row:
    """One step of one equation, all its executions together, or what the compiler sends without one.

    Attributes:
        verdict: `"as planned"`; `"shared"`: another step moves the very same value, and by the plan sends it for both;
            `"rewritten"`: something else was compiled in its place; `"gone"`: nothing was; `"the compiler's choice"`:
            within an equation whose lowering is `xla`; `"not planned"`: no step asked for it.
        how: what a rewriting did, by name: `"reduce-scatter made an all-reduce"`, `"f32 on the wire"`, `"padded"`, ...;
            of a shared step, with which one; of a step as planned, with what it travels, where the compiler made
            several collectives one.
        kind, axes: as planned; as compiled where nothing was planned.
        equation, step: what it belongs to.
        planned: times it runs and bytes that one device sends, by the plan.
        compiled: the same of what was compiled.
        source: the line that asked for it.
    """

    verdict: str
    how: str
    kind: str
    axes: tuple[str, ...]
    equation: str
    step: str
    planned: tuple[int, int]
    compiled: tuple[int, int]
    source: str = ""


_Name = tuple[str, str]  # an equation, and what the scope of one of its steps ends in


def planned_steps(entries: Iterable[PlannedStep]) -> dict[_Name, list[PlannedStep]]:
    """Collectives by equation and step; a plan's numbers are those of its scopes."""
    steps: dict[_Name, list[PlannedStep]] = defaultdict(list)
    for entry in entries:
        if entry.step.is_collective and entry.step.wire_bytes:
            steps[entry.equation, step_name(entry.number, entry.step)].append(entry)
    return steps


def _by_name(entries: Iterable[Entry]) -> dict[_Name, list[Entry]]:
    named: dict[_Name, list[Entry]] = defaultdict(list)
    for entry in entries:
        named[entry.equation, entry.step].append(entry)
    return named


def served(plan: ProgramPlan, entries: Sequence[Entry]) -> list[Entry]:
    """The entries, those of a shared step under the name of the one it shares with where that was not compiled.

    Looped steps may share some of their permutes only: of an entry of permutes a part may change its name.
    """
    planned, named = planned_steps(plan.entries), _by_name(entries)
    sends = Counter({name: _compiled(found)[1] for name, found in named.items()})
    sends.subtract({name: _planned(steps)[1] for name, steps in planned.items()})
    firsts = {name: _firsts(steps, planned) for name, steps in planned_steps(plan.shared).items()}
    given = []
    for entry in entries:
        for first in firsts.get((entry.equation, entry.step), ()):
            part, entry = _owed(entry, first, planned, named, sends)
            given += [part] if part else []
            if not entry:
                break
        given += [entry] if entry else []
    return given


def _owed(entry: Entry, first: _Name, planned: dict, named: dict, sends: Counter) -> tuple[Entry | None, Entry | None]:
    """The part of an entry that a step lacks which serves its own, under the name of that step, and the rest."""
    name = entry.equation, entry.step
    alone = name not in planned and first not in named
    part, rest = _parted(entry, entry.wire_bytes if alone else min(sends[name], -sends[first]))
    if first == name or not part:
        return None, entry
    sends.update({name: -part.wire_bytes, first: part.wire_bytes})
    return replace(part, equation=first[0], step=first[1]), rest


def _parted(entry: Entry, amount: int) -> tuple[Entry | None, Entry | None]:
    """An entry's part that sends so many bytes, and the rest of it; only permutes may be parted."""
    if amount >= entry.wire_bytes:
        return entry, None
    if amount <= 0 or entry.kind != "collective-permute" or entry.count < 2:
        return None, entry
    count = min(max(1, round(entry.count * amount / entry.wire_bytes)), entry.count - 1)
    part = replace(entry, count=count, wire_bytes=amount)
    return part, replace(entry, count=entry.count - count, wire_bytes=entry.wire_bytes - amount)


def _firsts(shared: Sequence[PlannedStep], planned: Iterable[_Name]) -> list[_Name]:
    """The steps that serve shared ones."""
    return [name for name in planned if any(step.first == (name[0], _number(name)) for step in shared)]


def _number(name: _Name) -> int:
    return int(name[1].partition(".")[0].removeprefix("step"))


def in_whole(planned: dict[_Name, list[PlannedStep]], entries: Sequence[Entry]) -> list[Entry]:
    """The entries, parts of one step under the axes of that step."""
    whole = {}
    for name, found in _by_name(entries).items():
        step = planned[name][0].step if name in planned else None
        over = {axis for entry in found for axis in entry.axes}
        enough = _compiled(found)[1] >= _planned(planned.get(name, ()))[1]  # parts of an axis have no name
        covered = step and (_covers(step, over) or (over == {*UNNAMED} and enough))
        if covered and all(entry.kind == step.kind for entry in found):
            whole[name] = step.axes
    return [replace(entry, axes=whole.get((entry.equation, entry.step), entry.axes)) for entry in entries]


def _covers(step: Step, over: set[str]) -> bool:
    """Whether these are all axes of a step; a permute may leave a device's place along some of them as it is."""
    return over == set(step.axes) or (step.kind == "collective-permute" and over < set(step.axes))


def rows(plan: ProgramPlan, entries: Sequence[Entry]) -> Iterator[Row]:
    """What became of every step, of those that share another's move, and what was compiled without a step."""
    planned = planned_steps(plan.entries)
    whole = _merged_whole(planned, entries)
    for row in _judgements(planned, entries, plan):
        merged = row.compiled != row.planned and _place(row) in whole
        yield _as_planned(row) if merged else row
    for name, steps in planned_steps(plan.shared).items():
        yield _row("shared", _with(name, steps[0].first), name, steps, [])


def _with(name: _Name, first: tuple[str, int]) -> str:
    equation, number = first
    return f"with step {number}{f' of {equation}' if equation != name[0] else ''}" if equation else ""


def _merged_whole(planned: dict[_Name, list[PlannedStep]], entries: Sequence[Entry]) -> set[tuple]:
    """The kinds and axes whose collectives a compiler merged, and that send just the planned steps all together."""
    place = {name: _place(steps[0].step) for name, steps in planned.items()}
    wanted, found = defaultdict(int), defaultdict(list)
    for name, steps in planned.items():
        wanted[place[name]] += _planned(steps)[1]
    for entry in entries:
        found[_place(entry)].append(entry)
    return {
        key
        for key, here in found.items()
        if any(entry.arrays > 1 for entry in here)
        and all(place.get((entry.equation, entry.step)) == key for entry in here)
        and _compiled(here)[1] == wanted[key]
    }


def _place(step: Step | Entry | Row) -> tuple[str, frozenset[str]]:
    return step.kind, frozenset(step.axes)


def _as_planned(row: Row) -> Row:
    """What a row says of a step whose arrays travel with those of others."""
    return replace(row, verdict="as planned", how=row.how or _MERGED, compiled=row.planned)


def _judgements(planned: dict[_Name, list[PlannedStep]], entries: Sequence[Entry], plan: ProgramPlan) -> Iterator[Row]:
    compiled = _by_name(entries)
    for name in [name for name in planned if name in compiled]:
        yield _judged(name, planned[name], compiled.pop(name))
    left = [entry for found in compiled.values() for entry in found]
    for name, steps in planned.items():
        if name in _by_name(entries):
            continue
        own_first = sorted(left, key=lambda entry: entry.equation != name[0])
        stand_in = next((entry for entry in own_first if _stands_for(entry, steps)), None)
        if stand_in:
            left.remove(stand_in)
            yield _judged(name, steps, [stand_in])
        else:
            yield _absent(name, steps, entries)
    yield from (_without_step(entry, plan) for entry in left)


def _stands_for(entry: Entry, steps: Sequence[PlannedStep]) -> bool:
    """Whether a compiled collective that lost its scopes is just what these steps would send."""
    first = steps[0].step
    same = entry.kind == first.kind and set(entry.axes) == set(first.axes)
    return not entry.step and same and entry.wire_bytes == sum(step.wire_bytes for step in steps)


def _absent(name: _Name, steps: Sequence[PlannedStep], entries: Sequence[Entry]) -> Row:
    """A step whose scope no compiled collective has: its arrays travel in another's, or nowhere."""
    axes = set(steps[0].step.axes)
    kinds = _REDUCTIONS if steps[0].step.kind in _REDUCTIONS else (steps[0].step.kind,)
    several = (entry for entry in entries if entry.arrays > 1 and entry.step and entry.kind in kinds)
    merged = next((entry for entry in several if set(entry.axes) == axes), None)
    if merged:
        where = "" if merged.equation == name[0] else f" of {merged.equation}"
        return _row("rewritten", f"in one collective with {number(merged.step)}{where}", name, steps, [])
    return _row("gone", "", name, steps, [])


def _judged(name: _Name, steps: Sequence[PlannedStep], entries: Sequence[Entry]) -> Row:
    largest = max(steps, key=lambda step: step.step.wire_bytes)
    all_there = _planned(steps)[1] == _compiled(entries)[1]
    how = _how(largest, entries, all_there) or _how_often(_planned(steps), _compiled(entries))
    merged = any(max(entry.together, entry.arrays) > 1 for entry in entries)
    return _row("rewritten" if how else "as planned", how or (_MERGED if merged else ""), name, steps, entries)


def _how_often(planned: tuple[int, int], compiled: tuple[int, int]) -> str:
    """What to call a step that sends more or less in all than planned, and nothing else than planned each time."""
    if planned[1] == compiled[1]:
        return ""
    if planned[1] < compiled[1]:
        return "sent more often"
    return "runs less often" if compiled[0] < planned[0] else "sends less"


def _how(planned: PlannedStep, entries: Sequence[Entry], all_there: bool) -> str:
    """What a compiler did to a step, by name; empty where each time it is the planned collective.

    All there are as many bytes in all as were planned: several arrays in one collective are then its own.
    """
    step, told = planned.step, []
    kinds = sorted({entry.kind for entry in entries})
    if kinds != [step.kind]:
        told.append(f"{step.kind} made {' and '.join(_article(kind) for kind in kinds)}")
    over = sorted({axes_text(entry.axes) for entry in entries if set(entry.axes) != set(step.axes)})
    if over:
        told.append(f"over {' and '.join(over)}")
    arrays = max(entry.arrays for entry in entries)
    each = max(entry.wire_bytes / entry.count / entry.arrays for entry in entries) / step.wire_bytes
    if arrays > 1 and not all_there:
        told.append(f"{arrays} arrays in one collective")
    elif not told:
        told += _size(planned.dtype, max(entries, key=lambda entry: entry.wire_bytes).dtype, each)
    return ", ".join(told)


def _size(planned: str, compiled: str, each: float) -> list[str]:
    """Why one execution sends more or less than planned: another dtype, or else padding."""
    if planned and planned != compiled and (_bits(compiled) - _bits(planned)) * (each - 1) > 0:
        return [f"{compiled} on the wire"]
    return ["padded"] if each > 1 else []


def _bits(dtype: str) -> int:
    """Of `bf16`, `f8e4m3fn`, `s32`, ...; a truth value is a byte."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


_REDUCTIONS = ("all-reduce", "reduce-scatter")
_MERGED = "in one collective with others"


def _article(kind: str) -> str:
    return f"{'an' if kind[0] == 'a' else 'a'} {kind}"


def _row(verdict: str, how: str, name: _Name, steps: Sequence[PlannedStep], entries: Sequence[Entry]) -> Row:
    step = steps[0].step
    source = next((entry.source for entry in entries if entry.source), "")
    return Row(verdict, how, step.kind, step.axes, *name, _planned(steps), _compiled(entries), source)


def _without_step(entry: Entry, plan: ProgramPlan) -> Row:
    chosen = "the compiler's choice" if entry.equation in plan.lowered else "not planned"
    verdict = "rewritten" if entry.step else chosen
    again = (entry.equation, entry.step) in planned_steps(plan.shared)
    how = ("sent again, though shared" if again else "besides the step itself") if entry.step else ""
    counted = _compiled([entry])
    return Row(verdict, how, entry.kind, entry.axes, entry.equation, entry.step, (0, 0), counted, entry.source)


def _planned(steps: Sequence[PlannedStep]) -> tuple[int, int]:
    return sum(step.trips for step in steps), sum(step.wire_bytes for step in steps)


def _compiled(entries: Sequence[Entry]) -> tuple[int, int]:
    return sum(entry.count for entry in entries), sum(entry.wire_bytes for entry in entries)
