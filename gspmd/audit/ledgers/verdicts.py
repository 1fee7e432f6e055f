"""Verdicts on every planned step, and on every compiled collective that belongs to no step."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gspmd.annotate.errors import article
from gspmd.audit.ledgers.entries import Entry, step_text
from gspmd.audit.ledgers.matching import Name, by_name, compiled_total, planned_steps, planned_total
from gspmd.display.units import axes_text
from gspmd.planner.steps import Step
from gspmd.tracing.program_plan import PlannedStep, ProgramPlan

VERDICTS = ("as planned", "shared", "rewritten", "gone", "the compiler's choice", "not planned")
_REDUCTIONS = ("all-reduce", "reduce-scatter")
_COMBINED = "in one collective with others"

Steps = Mapping[Name, Sequence[PlannedStep]]


@dataclass(frozen=True)
class ComparedStep:
    """A row of a comparison: a planned step with all its runs, or a compiled collective that belongs to no step.

    Attributes:
        verdict: one of six texts. `"as planned"` means that the planned bytes are sent in the planned way. `"shared"`
            means that the step uses the result of an equal step, or that the results of two steps are added and reduced
            once. `"rewritten"` means that the compiler replaced the step by something else. `"gone"` means that nothing
            was compiled for the step. `"the compiler's choice"` means that the collective belongs to an equation under
            lowering `xla`, whose collectives the compiler chooses. `"not planned"` means that the collective belongs to
            no step.
        how: details of the verdict. For a rewritten step, this is a text such as `"reduce-scatter made an all-reduce"`,
            `"f32 on the wire"` or `"padded"`. For a shared step, it names the equal step. For a step as planned, it
            says whether the step's collective is combined with others.
        kind, axes: the kind and mesh axes of the planned step, or of the compiled collective if there is no step.
        equation, step: the equation, and the scope name of the step, to which the row belongs.
        planned: (number of runs, bytes that one device sends) in the plan.
        compiled: (number of runs, bytes that one device sends) in the compiled program.
        source: the source line of the compiled collective; empty if unknown.
        carrier: if a collective of another step sends this step's bytes, the equation and scope name of that other
            step.
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
    carrier: Name | None = None


def rows(plan: ProgramPlan, entries: Sequence[Entry]) -> Iterator[ComparedStep]:
    """Yield the rows of planned steps, then of compiled collectives that belong to no step, then of shared steps."""
    planned = planned_steps(plan.entries)
    combined = _combined_in_full(planned, entries)
    for row in _judged(planned, entries, plan):
        if row.planned == (0, 0) and not row.step and _kind_and_axes(row) in combined:
            continue  # The collective is counted in the rows of steps behind a loop.
        if row.compiled != row.planned and _kind_and_axes(row) in combined:
            row = replace(row, verdict="as planned", how=row.how or _COMBINED, compiled=row.planned)
        yield row
    for name, steps in planned_steps(plan.shared).items():
        first = steps[0].first
        assert first is not None  # Every shared step has one.
        equation, number = first
        other = f" of {equation}" if equation != name[0] else ""
        yield _row("shared", f"with step {number}{other}" if equation else "", name, steps, [])


def _combined_in_full(planned: Steps, entries: Sequence[Entry]) -> set[tuple]:
    """Return each (kind, axes) whose combined collectives together send exactly the bytes that the plan states.

    The compiler may move an all-reduce out of a loop, to a place after the loop. The all-reduce then loses its scope
    name, even if it becomes a part of a combined collective. If all parts have lost their scope names, the combined
    collective looks like the collective of a single array.
    """
    behind = {_kind_and_axes(step.step) for steps in planned.values() for step in steps if step.is_behind_loop}
    keys = {name: _kind_and_axes(steps[0].step) for name, steps in planned.items()}
    wanted: defaultdict[tuple, int] = defaultdict(int)
    found: defaultdict[tuple, list[Entry]] = defaultdict(list)
    for name, steps in planned.items():
        wanted[keys[name]] += planned_total(steps)[1]
    for entry in entries:
        found[_kind_and_axes(entry)].append(entry)
    return {
        key
        for key, here in found.items()
        if (key in behind or any(entry.arrays > 1 for entry in here))
        and all(keys.get((e.equation, e.step)) == key or (key in behind and not e.step) for e in here)
        and compiled_total(here)[1] == wanted[key]
    }


def _kind_and_axes(of: Step | Entry | ComparedStep) -> tuple[str, frozenset[str]]:
    return of.kind, frozenset(of.axes)


def _judged(planned: Steps, entries: Sequence[Entry], plan: ProgramPlan) -> Iterator[ComparedStep]:
    named = by_name(entries)
    for name in (name for name in planned if name in named):
        yield _compared(name, planned[name], named[name])
    left = [entry for name, found in named.items() if name not in planned for entry in found]
    for name, steps in planned.items():
        if name in named:
            continue
        own_equation_first = sorted(left, key=lambda entry: entry.equation != name[0])
        stand_in = next((entry for entry in own_equation_first if _stands_in_for(entry, steps)), None)
        if stand_in:
            left.remove(stand_in)
            yield _compared(name, steps, [stand_in])
        else:
            yield _absent(name, steps, entries)
    yield from (_without_step(entry, plan) for entry in left)


def _stands_in_for(entry: Entry, steps: Sequence[PlannedStep]) -> bool:
    """Return whether a collective without a scope name has the steps' kind and mesh axes, and sends the same bytes."""
    same = _kind_and_axes(entry) == _kind_and_axes(steps[0].step)
    return not entry.step and same and entry.wire_bytes == planned_total(steps)[1]


def _absent(name: Name, steps: Sequence[PlannedStep], entries: Sequence[Entry]) -> ComparedStep:
    """Return the row of a step whose scope name no compiled collective has.

    The step's bytes are sent by a combined collective that has the name of another step, or the step is gone.
    """
    step = steps[0].step
    kinds = _REDUCTIONS if step.kind in _REDUCTIONS else (step.kind,)
    several = (entry for entry in entries if entry.arrays > 1 and entry.step and entry.kind in kinds)
    combined = next((entry for entry in several if set(entry.axes) == set(step.axes)), None)
    if combined:
        where = "" if combined.equation == name[0] else f" of {combined.equation}"
        how = f"in one collective with {step_text(combined.step)}{where}"
        return replace(_row("rewritten", how, name, steps, []), carrier=(combined.equation, combined.step))
    return _row("gone", "", name, steps, [])


def _without_step(entry: Entry, plan: ProgramPlan) -> ComparedStep:
    """Return the row of a compiled collective that matches no planned step."""
    chosen = "the compiler's choice" if entry.equation in plan.lowered else "not planned"
    verdict = "rewritten" if entry.step else chosen
    again = (entry.equation, entry.step) in planned_steps(plan.shared)
    how = ("sent again, though shared" if again else "besides the step itself") if entry.step else ""
    total = compiled_total([entry])
    return ComparedStep(verdict, how, entry.kind, entry.axes, entry.equation, entry.step, (0, 0), total, entry.source)


def _compared(name: Name, steps: Sequence[PlannedStep], entries: Sequence[Entry]) -> ComparedStep:
    """Return the row of a step that was compiled; `entries` are the step's compiled collectives."""
    planned, compiled = planned_total(steps), compiled_total(entries)
    largest = max(steps, key=lambda step: step.step.wire_bytes)
    how = _rewriting(largest, entries, planned[1] == compiled[1])
    if not how and planned[1] < compiled[1]:
        how = "sent more often"
    elif not how and planned[1] > compiled[1]:
        others = sorted({entry.dtype for entry in entries} - {step.dtype for step in steps})
        less = f"{' and '.join(others)} on the wire" if others else "sends less"
        how = "runs less often" if compiled[0] < planned[0] else less
    combined = any(max(entry.together, entry.arrays) > 1 for entry in entries)
    return _row("rewritten" if how else "as planned", how or (_COMBINED if combined else ""), name, steps, entries)


def _rewriting(planned: PlannedStep, entries: Sequence[Entry], in_full: bool) -> str:
    """Describe how the compiler rewrote a step; the text is empty if each execution is the planned collective.

    `in_full` states whether exactly the planned bytes are sent. If so, all arrays of a combined collective belong to
    the step.
    """
    step, changes = planned.step, []
    kinds = sorted({entry.kind for entry in entries})
    if kinds != [step.kind]:
        changes.append(f"{step.kind} made {' and '.join(map(article, kinds))}")
    over = sorted({axes_text(entry.axes) for entry in entries if set(entry.axes) != set(step.axes)})
    if over:
        changes.append(f"over {' and '.join(over)}")
    arrays = max(entry.arrays for entry in entries)
    each = max(entry.wire_bytes / entry.count / entry.arrays for entry in entries) / step.wire_bytes
    if arrays > 1 and not in_full:
        changes.append(f"{arrays} arrays in one collective")
    elif not changes:
        changes += _size_change(planned.dtype, max(entries, key=lambda entry: entry.wire_bytes).dtype, each)
    return ", ".join(changes)


def _size_change(planned: str, compiled: str, ratio: float) -> list[str]:
    """Return a reason why an execution sends more or fewer bytes than planned.

    The reason is a different dtype, or padding. The list is empty if neither explains the difference.

    Args:
        planned, compiled: the two dtypes.
        ratio: the compiled bytes divided by the planned bytes.
    """
    if planned and planned != compiled and (_bits(compiled) - _bits(planned)) * (ratio - 1) > 0:
        return [f"{compiled} on the wire"]
    return ["padded"] if ratio > 1 else []


def _bits(dtype: str) -> int:
    """Return the number of bits of a dtype in HLO's notation, such as `bf16`, `f8e4m3fn` or `s32`."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def _row(verdict: str, how: str, name: Name, steps: Sequence[PlannedStep], entries: Sequence[Entry]) -> ComparedStep:
    step = steps[0].step
    source = next((entry.source for entry in entries if entry.source), "")
    return ComparedStep(
        verdict, how, step.kind, step.axes, *name, planned_total(steps), compiled_total(entries), source
    )
