"""`gspmd.trace`: every planned step of a whole function, forward and backward, times its loop trips.

The function is traced to a jaxpr, dead code is removed, and the planned programs are found in it by the names under
which `planned.run` runs them. Inside one, the steps that are still there are those whose named scope is: recomputation
under `jax.checkpoint` keeps only the moves that the backward pass needs.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval
from rich.console import Console
from rich.table import Table

from gspmd.collectives import planned
from gspmd.collectives.cost import wire_bytes
from gspmd.collectives.figure import COLORS, amount_of_bytes, axes_text
from gspmd.collectives.plan import Step
from gspmd.collectives.sharing import Values

_SCOPE = re.compile(r"step(\d+)\.")


@dataclass(frozen=True)
class PlannedStep:
    """A step of a function's plan.

    Attributes:
        step: what it does.
        trips: how often it runs.
        equation: the equation it belongs to.
        number: its number among the steps of that equation.
        dtype: what a collective sends, as HLO names it: `f32`, `bf16`; empty in a forecast.
        first: the equation and number of the step that has moved the same value before, and serves this one too.
    """

    step: Step
    trips: int
    equation: str
    number: int = 0
    dtype: str = ""
    first: tuple[str, int] | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in all trips together."""
        return self.step.wire_bytes * self.trips


@dataclass(frozen=True)
class ProgramPlan:
    """All planned steps of a function, in program order; figures are per device and execution.

    A conditional counts its largest branch; a while loop, whose trips nobody knows before it runs, counts once. Under
    vmap a step counts what the whole batch sends. Programs that the compiler lowers are forecasts, and count whole.

    Attributes:
        entries: the steps that run.
        shared: steps whose value one of the entries moves for them; they send nothing, and nothing here counts them.
        lowered: the equations that the compiler lowers.
        notes: what could not be counted.
    """

    entries: tuple[PlannedStep, ...]
    shared: tuple[PlannedStep, ...] = ()
    lowered: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step, repeated as often as it runs."""
        return tuple(entry.step for entry in self.entries for _ in range(entry.trips))

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends."""
        return sum(entry.wire_bytes for entry in self.entries)

    @property
    def size(self) -> tuple[int, float, int]:
        """Bytes, seconds, operations: by which the largest branch of a conditional is the one that counts."""
        return self.wire_bytes, self.seconds, self.flops

    @property
    def seconds(self) -> float:
        """Predicted seconds of the planned steps, nothing overlapped."""
        return sum(entry.step.seconds * entry.trips for entry in self.entries)

    @property
    def flops(self) -> int:
        """Floating-point operations of the planned einsums."""
        return sum(entry.step.flops * entry.trips for entry in self.entries)

    def by_kind_and_axes(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """For every collective kind and set of mesh axes: how often it runs, and the bytes sent."""
        counts, sent = Counter(), Counter()
        for entry in self.entries:
            if entry.step.is_collective:
                key = (entry.step.kind, tuple(sorted(entry.step.axes)))
                counts[key] += entry.trips
                sent[key] += entry.wire_bytes
        return {key: (counts[key], sent[key]) for key in sorted(counts)}

    def table(self) -> Table:
        """The collectives as a rich table, most bytes first."""
        table = Table(title="planned collectives, per device", title_justify="left")
        for column, justify in (("kind", "left"), ("mesh axes", "left"), ("count", "right"), ("sent", "right")):
            table.add_column(column, justify=justify)
        rows = sorted(self.by_kind_and_axes().items(), key=lambda row: -row[1][1])
        for (kind, axes), (count, sent) in rows:
            table.add_row(f"[{COLORS[kind]}]{kind}[/]", axes_text(axes), str(count), amount_of_bytes(sent))
        table.add_section()
        total = sum(count for _, (count, _) in rows)
        table.add_row("all", "", str(total), amount_of_bytes(self.wire_bytes), style="bold")
        return table

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self.table(), *(f"note: {note}" for note in self.notes), sep="\n")
        return capture.get()


def trace(fn: Callable, *abstract: Any, **keywords: Any) -> ProgramPlan:
    """Plan a whole function, gradients and loops included, without compiling it.

    Args:
        fn: any function that JAX traces, on the current mesh.
        abstract: its arguments, arrays or `jax.ShapeDtypeStruct`; under Explicit axes with their shardings.

    Returns:
        A `ProgramPlan`.

    Example:
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> with jax.set_mesh(mesh):
        ...     trace(lambda x: x + 1, jax.ShapeDtypeStruct((4,), "float32")).wire_bytes
        0
    """
    jaxpr = _live(jax.make_jaxpr(fn)(*abstract, **keywords).jaxpr)
    found = tuple(_walk(jaxpr, 1, Values()))
    entries = tuple(entry for entry in found if not entry.first)
    shared = tuple(entry for entry in found if entry.first)
    return ProgramPlan(entries, shared, frozenset(_lowered(jaxpr)), tuple(dict.fromkeys(_notes(jaxpr))))


def _live(jaxpr: Jaxpr) -> Jaxpr:
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def _programs(jaxpr: Jaxpr) -> Iterator[planned.Registered]:
    named = (planned.registered(str(each.params.get("name", ""))) for each in _all(jaxpr))
    return (program for program in named if program is not None)


def _lowered(jaxpr: Jaxpr) -> Iterator[str]:
    return (program.equation for program in _programs(jaxpr) if program.backward is not None)


def _notes(jaxpr: Jaxpr) -> Iterator[str]:
    """The while loops that have steps in them."""
    for loop in (each for each in _all(jaxpr) if each.primitive.name == "while"):
        inside = (program for inner in _inner(loop) for program in _programs(inner))
        names = dict.fromkeys(each.equation for each in inside if any(step.is_collective for step in each.steps))
        if names:
            yield f"a while loop is planned as one trip, for its trips are not known here; in it: {'; '.join(names)}"


def _walk(jaxpr: Jaxpr, trips: int, values: Values, transposed: bool = False) -> Iterator[PlannedStep]:
    for equation in jaxpr.eqns:
        backward = _transposed(equation, transposed)
        program = planned.registered(str(equation.params.get("name", "")))
        if program is not None:
            yield from _steps(equation, program, trips, values, backward)
        elif equation.primitive.name == "cond":
            branches = [list(_walk(each.jaxpr, trips, Values(), backward)) for each in equation.params["branches"]]
            yield from max(branches, key=_size)
        else:
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            values.first(equation)
            for inner in _inner(equation):
                yield from _walk(inner, trips * times, values.enter(equation, inner), backward)
                values.leave(equation, inner)


def _size(entries: list[PlannedStep]) -> tuple[int, float, int]:
    return ProgramPlan(tuple(entry for entry in entries if not entry.first)).size


def _transposed(equation: Any, inherited: bool) -> bool:
    """Whether an operation belongs to a backward pass; recomputation inside one is forward again."""
    scopes = str(equation.source_info.name_stack).split("/")
    if "rematted_computation" in scopes:
        return False
    return inherited or any(scope.startswith("transpose(") for scope in scopes)


def _steps(
    equation: Any, program: planned.Registered, trips: int, values: Values, transposed: bool
) -> Iterator[PlannedStep]:
    """The steps of one planned program that are still in it."""
    if program.backward is None:
        mesh = _mesh_of(equation)
        for number, found in sorted(_scoped(equation, values, program.equation).items()):
            step = _as_run(program.steps[number], mesh, found)
            yield PlannedStep(step, trips, program.equation, number, found.dtype, found.first)
    elif _computes(equation, program):  # the compiler lowers it: without scopes, it counts whole
        for number, step in enumerate(program.backward if transposed else program.steps):
            yield PlannedStep(step, trips, program.equation, number)


def _computes(equation: Any, program: planned.Registered) -> bool:
    """Whether a piece of a compiler-lowered program does its work; JAX splits some off that only carry values along."""
    einsums = any(step.kind == "einsum" for step in program.steps)
    names = {each.primitive.name for inner in _inner(equation) for each in _all(inner)}
    return not einsums or bool(names & {"dot_general", "reduce_sum", "mul"})


def _all(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in _inner(equation):
            yield from _all(inner)


def _mesh_of(equation: Any) -> dict[str, int]:
    """The mesh of the shard_map in a planned program."""
    found = (each for inner in _inner(equation) for each in _all(inner) if each.primitive.name == "shard_map")
    return next((dict(each.params["mesh"].shape) for each in found), {})


@dataclass(frozen=True)
class _Found:
    """What is there under a step's scope: its largest collective, in bytes and dtype, and who made it; operations.

    `permuted` is what all its permutes send together: a looped step has nothing else.
    """

    buffer: int = 0
    flops: int = 0
    dtype: str = ""
    first: tuple[str, int] | None = None
    permuted: int = 0

    def __add__(self, other: "_Found") -> "_Found":
        larger = max(self, other, key=lambda found: found.buffer)
        return replace(larger, flops=self.flops + other.flops, permuted=self.permuted + other.permuted)


def _scoped(equation: Any, values: Values, name: str) -> dict[int, _Found]:
    """The numbers of the steps whose scope is there, with what is found under each."""
    found: dict[int, _Found] = {}
    for inner in _inner(equation):
        known = values.enter(equation, inner)
        for each in inner.eqns:
            numbers = _SCOPE.findall(str(each.source_info.name_stack))
            first = known.first(each, (name, int(numbers[-1])) if numbers else ("", 0))
            permuted = 0 if first or each.primitive.name != "ppermute" else _buffer(each)
            here = _Found(_buffer(each), _dot_flops(each), _dtype(each), first, permuted)
            own = [(int(number), here) for number in numbers[-1:]]
            for number, more in (*own, *_scoped(each, known, name).items()):
                found[number] = found.get(number, _Found()) + more
        values.leave(equation, inner)
    return found


def _buffer(equation: Any) -> int:
    """Bytes of the larger side of a collective, on one device."""
    if equation.primitive.name not in _COLLECTIVES:
        return 0
    sides = ([v.aval for v in equation.invars], [v.aval for v in equation.outvars])
    return max(sum(aval.size * aval.dtype.itemsize for aval in side) for side in sides)


def _dtype(equation: Any) -> str:
    """What a collective sends, as HLO names it."""
    if equation.primitive.name not in _COLLECTIVES:
        return ""
    name = equation.invars[0].aval.dtype.name
    for jax_name, hlo_name in _DTYPES:
        name = name.replace(jax_name, hlo_name)
    return name


_DTYPES = (("bool", "pred"), ("complex", "c"), ("float", "f"), ("uint", "u"), ("int", "s"), ("_", ""))
_COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "pmax", "all_to_all", "ppermute")


def _dot_flops(equation: Any) -> int:
    if equation.primitive.name != "dot_general":
        return 0
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return (2 if contracted else 1) * equation.outvars[0].aval.size * prod(shape[d] for d in contracted)


def _as_run(step: Step, mesh: dict[str, int], found: _Found) -> Step:
    """The step with the figures of what is really there, which under vmap is more than was planned for one example."""
    if step.kind == "einsum":
        flops = found.flops
        return replace(step, flops=flops, seconds=step.seconds * flops / step.flops) if flops and step.flops else step
    if found.permuted:
        return _with_bytes(replace(step, kind="collective-permute"), found.permuted)
    return _with_bytes(step, wire_bytes(step.kind, prod(mesh.get(axis, 1) for axis in step.axes), found.buffer))


def _with_bytes(step: Step, sent: int) -> Step:
    return replace(step, wire_bytes=sent, seconds=step.seconds * sent / step.wire_bytes) if step.wire_bytes else step


def _inner(equation: Any) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if isinstance(inner, Jaxpr):
                yield inner
