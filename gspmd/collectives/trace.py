"""`gspmd.trace`: every planned step of a whole function, forward and backward, times its loop trips.

The function is traced to a jaxpr, dead code is removed, and the planned programs are found in it by the names under
which `planned.run` runs them. Inside one, the steps that are still there are those whose named scope is: recomputation
under `jax.checkpoint` keeps only the moves that the backward pass needs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval
from rich.console import Console
from rich.table import Table

from gspmd.collectives import planned
from gspmd.collectives.compilers import compiler
from gspmd.collectives.figure import COLORS, amount_of_bytes, axes_text
from gspmd.collectives.found import scoped
from gspmd.collectives.plan import Step
from gspmd.collectives.sharing import Values, inner_jaxprs


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
    found = tuple(_walk(jaxpr, Values(compiler())))
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
        inside = (program for inner in inner_jaxprs(loop) for program in _programs(inner))
        names = dict.fromkeys(each.equation for each in inside if any(step.is_collective for step in each.steps))
        if names:
            yield f"a while loop is planned as one trip, for its trips are not known here; in it: {'; '.join(names)}"


def _walk(jaxpr: Jaxpr, values: Values, transposed: bool = False) -> Iterator[PlannedStep]:
    for equation in jaxpr.eqns:
        backward = _transposed(equation, transposed)
        program = planned.registered(str(equation.params.get("name", "")))
        values.make(equation)
        if program is not None:
            yield from _steps(equation, program, values, backward)
        elif equation.primitive.name == "cond":
            yield from max(_called(equation, values, backward), key=_size)
        elif equation.params.get("length") != 0:
            for steps in _called(equation, values, backward):
                yield from steps


def _called(equation: Any, values: Values, transposed: bool) -> Iterator[list[PlannedStep]]:
    """The steps of every program that an operation calls."""
    for inner in inner_jaxprs(equation):
        yield list(_walk(inner, values.enter(equation, inner), transposed))
        values.leave(equation, inner)


def _size(entries: list[PlannedStep]) -> tuple[int, float, int]:
    return ProgramPlan(tuple(entry for entry in entries if not entry.first)).size


def _transposed(equation: Any, inherited: bool) -> bool:
    """Whether an operation belongs to a backward pass; recomputation inside one is forward again."""
    scopes = str(equation.source_info.name_stack).split("/")
    if "rematted_computation" in scopes:
        return False
    return inherited or any(scope.startswith("transpose(") for scope in scopes)


def _steps(equation: Any, program: planned.Registered, values: Values, transposed: bool) -> Iterator[PlannedStep]:
    """The steps of one planned program that are still in it."""
    if program.backward is None:
        mesh = _mesh_of(equation)
        for (number, runs), found in sorted(scoped(equation, values, program.equation).items(), key=lambda each: each[0]):
            for step, first in found.as_run(program.steps[number], mesh):
                yield PlannedStep(step, runs, program.equation, number, found.dtype, first)
    elif _computes(equation, program):  # the compiler lowers it: without scopes, it counts whole
        for number, step in enumerate(program.backward if transposed else program.steps):
            yield PlannedStep(step, values.trips, program.equation, number)


def _computes(equation: Any, program: planned.Registered) -> bool:
    """Whether a piece of a compiler-lowered program does its work; JAX splits some off that only carry values along."""
    einsums = any(step.kind == "einsum" for step in program.steps)
    names = {each.primitive.name for inner in inner_jaxprs(equation) for each in _all(inner)}
    return not einsums or bool(names & {"dot_general", "reduce_sum", "mul"})


def _all(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from _all(inner)


def _mesh_of(equation: Any) -> dict[str, int]:
    """The mesh of the shard_map in a planned program."""
    found = (each for inner in inner_jaxprs(equation) for each in _all(inner) if each.primitive.name == "shard_map")
    return next((dict(each.params["mesh"].shape) for each in found), {})
