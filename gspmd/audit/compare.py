"""What was planned beside what was compiled: by kind and mesh axes, and step by step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from gspmd.audit.groups import UNNAMED
from gspmd.audit.ledger import Entry, Key, Ledger, asked, number
from gspmd.collectives.figure import COLORS, amount_of_bytes, axes_text
from gspmd.collectives.lower import scope
from gspmd.collectives.plan import Step
from gspmd.collectives.trace import PlannedStep, ProgramPlan

VERDICTS = ("as planned", "shared", "rewritten", "gone", "the compiler's choice", "not planned")


@dataclass(frozen=True)
class Row:
    """One step of one equation, all its executions together, or what the compiler sends without one.

    Attributes:
        verdict: `"as planned"`; `"shared"`: another step moves the same value, and only that one was compiled;
            `"rewritten"`: something else was compiled in its place; `"gone"`: nothing was; `"the compiler's choice"`:
            within an equation whose lowering is `xla`; `"not planned"`: no equation asked for it.
        how: what a rewriting did, by name: `"reduce-scatter made an all-reduce"`, `"f32 on the wire"`, `"padded"`, ...;
            of a step as planned, with what it travels, where the compiler made several collectives one.
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


@dataclass(frozen=True)
class Comparison:
    """A program's plan beside its ledger; counts and bytes are per device and execution.

    Attributes:
        rows: a row per step.
        totals: (kind, mesh axes) -> (planned bytes, compiled bytes).
    """

    rows: tuple[Row, ...]
    totals: dict[Key, tuple[int, int]]

    @property
    def agrees(self) -> bool:
        """Whether for every kind and set of axes the bytes are the planned ones, and nothing else is sent."""
        return all(planned == compiled for planned, compiled in self.totals.values())

    @property
    def differing(self) -> tuple[Row, ...]:
        """The rows that are not as planned."""
        return tuple(row for row in self.rows if row.verdict != "as planned")

    def __getitem__(self, verdict: str) -> tuple[Row, ...]:
        """The rows of one verdict."""
        if verdict not in VERDICTS:
            raise KeyError(f"no verdict is called {verdict!r}; there are {', '.join(VERDICTS)}")
        return tuple(row for row in self.rows if row.verdict == verdict)

    def table(self) -> Table:
        """Planned and compiled bytes of every kind and set of axes."""
        table = Table(title="planned and compiled, bytes sent per device", title_justify="left")
        for column, justify in (("kind", "left"), ("mesh axes", "left"), ("planned", "right"), ("compiled", "right")):
            table.add_column(column, justify=justify)
        table.add_column("")
        for (kind, axes), (planned, compiled) in sorted(self.totals.items(), key=lambda row: -max(row[1])):
            figures = amount_of_bytes(planned), amount_of_bytes(compiled)
            table.add_row(f"[{COLORS[kind]}]{kind}[/]", axes_text(axes), *figures, _ratio(planned, compiled))
        table.add_section()
        sums = [sum(side) for side in zip(*self.totals.values())] or [0, 0]
        table.add_row("all", "", *map(amount_of_bytes, sums), _ratio(*sums), style="bold")
        return table

    def steps_table(self, verdicts: Sequence[str] = VERDICTS[1:]) -> Table:
        """The steps of some verdicts, those that differ from the plan if not given."""
        table = Table(title="step by step, where they differ", title_justify="left")
        columns = ("", "kind", "mesh axes", "planned", "compiled", "asked for by")
        for column in columns:
            table.add_column(column, justify="right" if column in ("planned", "compiled") else "left", overflow="fold")
        for row in (row for verdict in verdicts for row in self[verdict]):
            told = f"{row.verdict}: {row.how}" if row.how else row.verdict
            amounts = [f"{n} × {amount_of_bytes(sent / max(1, n))}" for n, sent in (row.planned, row.compiled)]
            by = asked(Entry(row.kind, row.axes, 0, 0, "", row.source, row.equation, row.step))
            table.add_row(told, f"[{COLORS[row.kind]}]{row.kind}[/]", axes_text(row.axes), *amounts, by)
        return table

    def __str__(self) -> str:
        console = Console(width=140, color_system=None)
        counted = ", ".join(f"{len(self[verdict])} {verdict}" for verdict in VERDICTS if self[verdict])
        with console.capture() as capture:
            console.print(self.table())
            console.print(f"steps: {counted or 'none'}")
            if self.differing:
                console.print(self.steps_table())
        return capture.get()


def _ratio(planned: int, compiled: int) -> str:
    if planned == compiled:
        return "[green]=[/]"
    return "not planned" if not planned else f"× {compiled / planned:.3g}" if compiled else "gone"


def compare(ledger: Ledger, plan: ProgramPlan) -> Comparison:
    """Put what was planned beside what was compiled.

    Compiled collectives are joined to steps by their scopes. Where a compiler merges several into one instruction it
    keeps the scopes of one of them: the others are then found by kind, axes and bytes. A step that was compiled in
    parts, over some of its axes and then over the rest, counts under the axes of the step.

    Args:
        ledger: of the compiled program.
        plan: `gspmd.trace` of the same function with the same arguments.

    Example:
        >>> compare(Ledger((), 0, {}), ProgramPlan(())).agrees
        True
    """
    steps = _planned_steps(plan)
    entries = _in_whole(steps, [entry for entry in ledger.entries if entry.wire_bytes])
    planned, compiled = plan.by_kind_and_axes(), replace(ledger, entries=tuple(entries)).by_kind_and_axes()
    keys = [key for key in sorted({*planned, *compiled}) if planned.get(key, (0, 0))[1] or key in compiled]
    totals = {key: (planned.get(key, (0, 0))[1], compiled.get(key, (0, 0))[1]) for key in keys}
    return Comparison(tuple(_rows(steps, entries)), totals)


_Name = tuple[str, str]  # an equation, and what the scope of one of its steps ends in


def _planned_steps(plan: ProgramPlan) -> dict[_Name, list[PlannedStep]]:
    """Collectives by equation and step; a plan's numbers are those of its scopes."""
    steps: dict[_Name, list[PlannedStep]] = defaultdict(list)
    for entry in plan.entries:
        if entry.step.is_collective and entry.step.wire_bytes:
            steps[entry.equation, scope(entry.number, entry.step)].append(entry)
    return steps


def _by_name(entries: Iterable[Entry]) -> dict[_Name, list[Entry]]:
    named: dict[_Name, list[Entry]] = defaultdict(list)
    for entry in entries:
        named[entry.equation, entry.step].append(entry)
    return named


def _in_whole(planned: dict[_Name, list[PlannedStep]], entries: Sequence[Entry]) -> list[Entry]:
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


def _rows(planned: dict[_Name, list[PlannedStep]], entries: Sequence[Entry]) -> Iterator[Row]:
    whole = _merged_whole(planned, entries)
    for row in _judgements(planned, entries):
        merged = row.compiled != row.planned and _place(row) in whole
        yield _as_planned(row) if merged else row


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
    return replace(row, verdict="as planned", how=row.how or "in one collective with others", compiled=row.planned)


def _judgements(planned: dict[_Name, list[PlannedStep]], entries: Sequence[Entry]) -> Iterator[Row]:
    compiled = _by_name(entries)
    present = {_signature(step) for name, steps in planned.items() if name in compiled for step in steps}
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
            yield _absent(name, steps, entries, present)
    yield from map(_without_step, left)


def _signature(entry: PlannedStep) -> tuple:
    step = entry.step
    return step.kind, step.axes, step.wire_bytes, step.before.axes, step.after.axes


def _stands_for(entry: Entry, steps: Sequence[PlannedStep]) -> bool:
    """Whether a compiled collective that lost its scopes is just what these steps would send."""
    first = steps[0].step
    same = entry.kind == first.kind and set(entry.axes) == set(first.axes)
    return not entry.step and same and entry.wire_bytes == sum(step.wire_bytes for step in steps)


def _absent(name: _Name, steps: Sequence[PlannedStep], entries: Sequence[Entry], present: set) -> Row:
    """A step whose scope no compiled collective has: its arrays travel in another's, or another moved them already."""
    axes = set(steps[0].step.axes)
    kinds = _REDUCTIONS if steps[0].step.kind in _REDUCTIONS else (steps[0].step.kind,)
    several = (entry for entry in entries if entry.arrays > 1 and entry.step and entry.kind in kinds)
    merged = next((entry for entry in several if set(entry.axes) == axes), None)
    if merged:
        where = "" if merged.equation == name[0] else f" of {merged.equation}"
        return _row("rewritten", f"in one collective with {number(merged.step)}{where}", name, steps, [])
    return _row("shared" if _signature(steps[0]) in present else "gone", "", name, steps, [])


def _judged(name: _Name, steps: Sequence[PlannedStep], entries: Sequence[Entry]) -> Row:
    how = _how(steps[0], entries)
    if not how and _planned(steps)[1] > _compiled(entries)[1]:
        return _row("shared", "", name, steps, entries)
    if not how and _planned(steps)[1] < _compiled(entries)[1]:
        how = "sent more often"
    return _row("rewritten" if how else "as planned", how, name, steps, entries)


def _how(planned: PlannedStep, entries: Sequence[Entry]) -> str:
    """What a compiler did to a step, by name; empty where each time it is the planned collective."""
    step, told = planned.step, []
    kinds = sorted({entry.kind for entry in entries})
    if kinds != [step.kind]:
        told.append(f"{step.kind} made {' and '.join(_article(kind) for kind in kinds)}")
    over = sorted({axes_text(entry.axes) for entry in entries if set(entry.axes) != set(step.axes)})
    if over:
        told.append(f"over {' and '.join(over)}")
    arrays = max(entry.arrays for entry in entries)
    each = max(entry.wire_bytes / entry.count for entry in entries) / step.wire_bytes
    if arrays > 1:
        told.append(f"{arrays} arrays in one collective")
    elif not told and each > 1:
        wide = max(entries, key=lambda entry: entry.wire_bytes).dtype
        told.append(f"{wide} on the wire" if each == int(each) and wide in _WIDE else "padded")
    return ", ".join(told)


_REDUCTIONS = ("all-reduce", "reduce-scatter")
_WIDE = ("f32", "s32", "u32", "f64", "s64", "u64")


def _article(kind: str) -> str:
    return f"{'an' if kind[0] == 'a' else 'a'} {kind}"


def _row(verdict: str, how: str, name: _Name, steps: Sequence[PlannedStep], entries: Sequence[Entry]) -> Row:
    step = steps[0].step
    source = next((entry.source for entry in entries if entry.source), "")
    return Row(verdict, how, step.kind, step.axes, *name, _planned(steps), _compiled(entries), source)


def _without_step(entry: Entry) -> Row:
    verdict = "rewritten" if entry.step else "the compiler's choice" if entry.equation else "not planned"
    how = "besides the step itself" if entry.step else ""
    counted = _compiled([entry])
    return Row(verdict, how, entry.kind, entry.axes, entry.equation, entry.step, (0, 0), counted, entry.source)


def _planned(steps: Sequence[PlannedStep]) -> tuple[int, int]:
    return sum(step.trips for step in steps), sum(step.wire_bytes for step in steps)


def _compiled(entries: Sequence[Entry]) -> tuple[int, int]:
    return sum(entry.count for entry in entries), sum(entry.wire_bytes for entry in entries)
