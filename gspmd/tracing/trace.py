"""`gspmd.trace`: the planned steps of a whole function, forward and backward, with the number of times that each runs.

The function is traced to a jaxpr, and dead code is eliminated. Planned programs are recognized by the names under which
`gspmd.lowerings.program.run` calls them. A step is counted only if its named scope still contains operations. For
example, the recomputation under `jax.checkpoint` keeps only the collectives that the backward pass needs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr

from gspmd.annotate.errors import PlanError, article
from gspmd.lowerings import in_force
from gspmd.lowerings.program import PlannedProgram, program_of
from gspmd.tracing.compilers import compiler_in_use
from gspmd.tracing.dataflow import Path
from gspmd.tracing.jaxprs import all_equations, inner_jaxprs, without_dead_code
from gspmd.tracing.program_plan import PlannedStep, ProgramPlan
from gspmd.tracing.regions import Region
from gspmd.tracing.steps import traced_steps
from gspmd.tracing.sums import Change, Changes, changed_reductions
from gspmd.tracing.value_numbering import Numbering


def trace(fn: Callable, *abstract: Any, **keywords: Any) -> ProgramPlan:
    """Plan a whole function, including gradients and loops, without compiling the function.

    Args:
        fn: any function that JAX can trace on the current mesh.
        abstract: the arguments of `fn`, as arrays or `jax.ShapeDtypeStruct`s. Under Explicit axes they need shardings.
        keywords: the keyword arguments of `fn`.

    Returns:
        A `ProgramPlan`. Collectives are counted as the compiler for the mesh's devices runs them. Equal collectives are
        merged, and some loop-invariant collectives are hoisted out of loops. On GPUs, partial sums are added before
        they are reduced, even partial sums from different iterations of a loop.

    Raises:
        PlanError: `fn` is not a function, or an argument is not an array, a `jax.ShapeDtypeStruct` or a number.

    Example:
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> with jax.set_mesh(mesh):
        ...     trace(lambda x: x + 1, jax.ShapeDtypeStruct((4,), "float32")).wire_bytes
        0
    """
    check_call("trace", fn, abstract, keywords)
    with in_force.on_these_devices():
        closed = jax.make_jaxpr(fn)(*abstract, **keywords)
    jaxpr = without_dead_code(closed.jaxpr)
    compiler = compiler_in_use()
    changes = changed_reductions(jaxpr) if compiler.reduces_sums else {}
    numbering = Numbering(compiler)
    region = Region(numbering)
    region.bind_constants(zip(jaxpr.constvars, closed.consts, strict=True))
    steps = tuple(_steps(jaxpr, region, changes))
    entries = tuple(step for step in steps if not step.first)
    shared = tuple(step for step in steps if step.first)
    lowered = (program.equation for program in _programs(jaxpr) if program.backward is not None)
    notes = (*dict.fromkeys(_loop_notes(jaxpr)), *_merge_notes(shared, numbering))
    return ProgramPlan(entries, shared, frozenset(lowered), notes)


def check_call(doing: str, fn: Any, arguments: tuple, keywords: Mapping[str, Any] | None = None) -> None:
    """Check that a function and its arguments can be traced.

    Args:
        doing: a verb for the error message, such as "trace".
        fn: the function.
        arguments: the positional arguments of the function.
        keywords: the keyword arguments of the function.

    Raises:
        PlanError: `fn` is not a function, or an argument is not an array, a `jax.ShapeDtypeStruct` or a number.
    """
    if not callable(fn):
        raise PlanError(
            f"cannot {doing} {article(type(fn).__name__)}: it is not a function.\n"
            "  Give a function and its arguments, arrays or jax.ShapeDtypeStruct: (fn, x, w)."
        )
    named: dict[Any, Any] = {**dict(enumerate(arguments)), **(keywords or {})}
    leaves = (
        (f"[{name}]{jax.tree_util.keystr(path)}", leaf)
        for name, value in named.items()
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
    )
    for where, leaf in leaves:
        if not _is_array(leaf):
            raise PlanError(
                f"cannot {doing} a function of {article(type(leaf).__name__)}: argument {where} is {_shown(leaf)}.\n"
                "  Give arrays, jax.ShapeDtypeStruct or numbers; bind other arguments, as in lambda x: fn(x, 'train')."
            )


def _is_array(leaf: Any) -> bool:
    shaped = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return shaped or hasattr(leaf, "__jax_array__") or isinstance(leaf, (int, float, complex, np.generic))


def _shown(value: Any) -> str:
    written = repr(value)
    return written if len(written) <= 60 else f"{written[:57]}..."


def _programs(jaxpr: Jaxpr) -> Iterator[PlannedProgram]:
    named = (program_of(each) for each in all_equations(jaxpr))
    return (program for program in named if program is not None)


def _loop_notes(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield a note for every while loop that contains collectives, because its trip count is unknown."""
    for loop in (each for each in all_equations(jaxpr) if each.primitive.name == "while"):
        inside = (program for inner in inner_jaxprs(loop) for program in _programs(inner))
        names = dict.fromkeys(each.equation for each in inside if any(step.is_collective for step in each.steps))
        if names:
            yield f"a while loop counts as one trip, since its trip count is unknown; it has: {'; '.join(names)}"


def _merge_notes(shared: Sequence[PlannedStep], numbering: Numbering) -> Iterator[str]:
    """Yield a note about the shared steps that the compiler may run again, if there are any."""
    steps = [step for step in shared if (step.first, (step.equation, step.number)) in numbering.uncertain]
    sent = sum(step.wire_bytes for step in steps)
    if sent:
        names = "; ".join(dict.fromkeys(step.equation for step in steps))
        yield (
            f"up to {sent} bytes more may be sent: recomputation behind a barrier, as under jax.checkpoint, is planned "
            f"as merged with the original, but XLA merges the two only if it has fused both alike: {names}"
        )


def _steps(
    jaxpr: Jaxpr, region: Region, changes: Mapping[Path, Changes], path: Path = (), is_backward: bool = False
) -> Iterator[PlannedStep]:
    """Yield the planned steps of a program.

    For a conditional, only the steps of the largest branch are yielded. The steps of a scan with 0 iterations are not
    yielded.

    Args:
        jaxpr: the program.
        region: the region of the program.
        changes: the changes that the compiler makes to reductions.
        path: the path of the operation that calls the program; empty for a whole program.
        is_backward: whether the program belongs to a backward pass.
    """
    for equation in jaxpr.eqns:
        here = (*path, id(equation))
        backward = _is_backward(equation, is_backward)
        program = program_of(equation)
        region.visit(equation)
        if program is not None:
            yield from _steps_of_program(equation, program, region, backward, changes.get(here, {}))
        elif equation.primitive.name == "cond":
            yield from max(_called(equation, region, changes, here, backward), key=_size)
        elif equation.params.get("length") != 0:
            for steps in _called(equation, region, changes, here, backward):
                yield from steps


def _called(
    equation: Any, region: Region, changes: Mapping[Path, Changes], path: Path, is_backward: bool
) -> Iterator[list[PlannedStep]]:
    """Yield a list of planned steps for every program that an operation calls."""
    for inner in inner_jaxprs(equation):
        yield list(_steps(inner, region.enter(equation, inner), changes, path, is_backward))
        region.leave(equation, inner)


def _size(steps: list[PlannedStep]) -> tuple[int, float, int]:
    return ProgramPlan(tuple(step for step in steps if not step.first)).size


def _is_backward(equation: Any, inherited: bool) -> bool:
    """Return whether an operation belongs to a backward pass.

    The answer is False for recomputation in a backward pass.

    Args:
        equation: the operation.
        inherited: whether the program that contains the operation belongs to a backward pass.
    """
    scopes = str(equation.source_info.name_stack).split("/")
    if "rematted_computation" in scopes:
        return False
    return inherited or any(scope.startswith("transpose(") for scope in scopes)


def _steps_of_program(
    call: Any, program: PlannedProgram, region: Region, is_backward: bool, changes: Changes
) -> Iterator[PlannedStep]:
    """Yield those steps of a planned program that are left after dead code has been eliminated."""
    if program.backward is None:
        mesh, traced = _mesh_of(call), traced_steps(call, region, program.equation)
        sent = sum(step.seconds for step in program.steps if step.is_collective)
        share = program.hidden_seconds / sent if sent else 0.0
        for (number, trips), each in sorted(traced.items(), key=lambda item: item[0]):
            change = changes.get(number, Change())
            behind = change.trips if trips == region.trips else 1  # a loop-invariant reduction runs before the loop
            each = each.in_dtype(change.dtype)
            for step, same in each.as_executed(program.steps[number], mesh):
                runs, first = trips // behind, same or (change.first.step_key if change.first else None)
                hidden = share * step.seconds * runs if step.is_collective else 0.0
                yield PlannedStep(step, runs, program.equation, number, each.dtype, first, hidden, behind > 1)
    elif _computes(call, program):  # under `xla` there are no scopes, so all steps count
        for number, step in enumerate(program.backward if is_backward else program.steps):
            yield PlannedStep(step, region.trips, program.equation, number)


def _computes(call: Any, program: PlannedProgram) -> bool:
    """Return whether a part of a planned program under lowering `xla` computes anything.

    JAX splits programs into parts, some of which only pass values on.
    """
    has_einsums = any(step.kind == "einsum" for step in program.steps)
    names = {each.primitive.name for inner in inner_jaxprs(call) for each in all_equations(inner)}
    return not has_einsums or bool(names & {"dot_general", "reduce_sum", "mul"})


def _mesh_of(call: Any) -> dict[str, int]:
    """Return the sizes of the mesh axes, from the shard_map in a planned program."""
    inside = (each for inner in inner_jaxprs(call) for each in all_equations(inner))
    return next((dict(each.params["mesh"].shape) for each in inside if each.primitive.name == "shard_map"), {})
