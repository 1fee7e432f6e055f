"""`gspmd.trace`: every planned step of a whole function, forward and backward, times its loop trips.

The function is traced to a jaxpr, dead code is removed, and the planned programs are found in it by the names under
which `lowerings.program` runs them. Inside one, the steps that are still there are those whose named scope is:
recomputation under `jax.checkpoint` keeps only the moves that the backward pass needs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import partial_eval

from gspmd.annotate.errors import PlanError
from gspmd.lowerings.program import PlannedProgram, program_of
from gspmd.tracing.compilers import compiler
from gspmd.tracing.program_plan import PlannedStep, ProgramPlan
from gspmd.tracing.steps import scoped
from gspmd.tracing.value_numbering import Values, inner_jaxprs


def trace(fn: Callable, *abstract: Any, **keywords: Any) -> ProgramPlan:
    """Plan a whole function, gradients and loops included, without compiling it.

    Args:
        fn: any function that JAX traces, on the current mesh.
        abstract: its arguments, arrays or `jax.ShapeDtypeStruct`; under Explicit axes with their shardings.

    Returns:
        A `ProgramPlan`. What the compiler of the mesh's devices makes once counts once: collectives of the same value,
        and, as far as it takes them out of loops, those of what does not change from trip to trip.

    Raises:
        PlanError: `fn` is no function, or an argument is neither an array nor stands for one.

    Example:
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> with jax.set_mesh(mesh):
        ...     trace(lambda x: x + 1, jax.ShapeDtypeStruct((4,), "float32")).wire_bytes
        0
    """
    check_call("trace", fn, abstract, keywords)
    jaxpr = _live(jax.make_jaxpr(fn)(*abstract, **keywords).jaxpr)
    values = Values(compiler())
    found = tuple(_walk(jaxpr, values))
    entries = tuple(entry for entry in found if not entry.first)
    shared = tuple(entry for entry in found if entry.first)
    notes = (*dict.fromkeys(_notes(jaxpr)), *_doubts(shared, values))
    return ProgramPlan(entries, shared, frozenset(_lowered(jaxpr)), notes)


def check_call(doing: str, fn: Any, arguments: tuple, keywords: Mapping[str, Any] | None = None) -> None:
    """Refuse what is no function, and arguments that JAX cannot trace.

    Raises:
        PlanError: with what is there instead.
    """
    if not callable(fn):
        raise PlanError(
            f"cannot {doing} {_a(fn)}: it is no function.\n"
            "  Give a function and what it is called with, arrays or jax.ShapeDtypeStruct: (fn, x, w)."
        )
    named = {**dict(enumerate(arguments)), **(keywords or {})}
    leaves = (
        (f"[{name}]{jax.tree_util.keystr(path)}", leaf)
        for name, value in named.items()
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
    )
    for where, leaf in leaves:
        if not _is_array(leaf):
            raise PlanError(
                f"cannot {doing} a function of {_a(leaf)}: argument {where} is {_shown(leaf)}.\n"
                "  Give arrays, jax.ShapeDtypeStruct or numbers; what else it needs, as in lambda x: fn(x, 'train')."
            )


def _is_array(leaf: Any) -> bool:
    shaped = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return shaped or hasattr(leaf, "__jax_array__") or isinstance(leaf, (int, float, complex, np.generic))


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _shown(value: Any) -> str:
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _live(jaxpr: Jaxpr) -> Jaxpr:
    return partial_eval.dce_jaxpr(_plain(jaxpr, {}), [True] * len(jaxpr.outvars))[0]


def _plain(jaxpr: Jaxpr, done: dict[int, Jaxpr]) -> Jaxpr:
    """A program in which what has a rule of its own for vmap is a plain call: JAX looks for dead code only in those."""
    if id(jaxpr) not in done:
        equations = [_plainly_called(equation, done) for equation in jaxpr.eqns]
        same = all(new is old for new, old in zip(equations, jaxpr.eqns))
        done[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=equations)
    return done[id(jaxpr)]


def _plainly_called(equation: Any, done: dict[int, Jaxpr]) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(plain, value)) if any(map(_is_program, value)) else value
        if isinstance(value, ClosedJaxpr):
            inner = _plain(value.jaxpr, done)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        return _plain(value, done) if isinstance(value, Jaxpr) else value

    params = {name: plain(value) for name, value in equation.params.items()}
    if equation.primitive.name == "custom_vmap_call":
        return equation.replace(primitive=closed_call_p, params={"call_jaxpr": params["call"]})
    same = all(params[name] is value for name, value in equation.params.items())
    return equation if same else equation.replace(params=params)


def _is_program(value: Any) -> bool:
    return isinstance(value, (ClosedJaxpr, Jaxpr))


def _programs(jaxpr: Jaxpr) -> Iterator[PlannedProgram]:
    named = (program_of(each) for each in _all(jaxpr))
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


def _doubts(shared: Sequence[PlannedStep], values: Values) -> Iterator[str]:
    """What the compiler may still make twice."""
    some = [entry for entry in shared if (entry.first, (entry.equation, entry.number)) in values.doubts]
    sent = sum(entry.wire_bytes for entry in some)
    if sent:
        names = "; ".join(dict.fromkeys(entry.equation for entry in some))
        yield (
            f"up to {sent} bytes more may be sent: what is computed again behind a barrier, as under jax.checkpoint, "
            f"is planned as sent once, but XLA merges only what it has fused alike by then; in it: {names}"
        )


def _walk(jaxpr: Jaxpr, values: Values, transposed: bool = False) -> Iterator[PlannedStep]:
    for equation in jaxpr.eqns:
        backward = _transposed(equation, transposed)
        program = program_of(equation)
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


def _steps(equation: Any, program: PlannedProgram, values: Values, transposed: bool) -> Iterator[PlannedStep]:
    """The steps of one planned program that are still in it."""
    if program.backward is None:
        mesh = _mesh_of(equation)
        there = scoped(equation, values, program.equation)
        for (number, runs), found in ((key, there[key]) for key in sorted(there)):
            for step, first in found.as_run(program.steps[number], mesh):
                yield PlannedStep(step, runs, program.equation, number, found.dtype, first)
    elif _computes(equation, program):  # the compiler lowers it: without scopes, it counts whole
        for number, step in enumerate(program.backward if transposed else program.steps):
            yield PlannedStep(step, values.trips, program.equation, number)


def _computes(equation: Any, program: PlannedProgram) -> bool:
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
