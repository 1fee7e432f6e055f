"""The origin of a compiled instruction: the equation and step of a plan, and the source line, from its metadata."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from gspmd.audit.hlo.collectives import Collective
from gspmd.audit.hlo.module import Array, Computation, Instruction, Module
from gspmd.lowerings.scopes import innermost, read_step

OURS = f"{Path(__file__).parents[2]}{os.sep}"
"""The directory of this package. The source line of an instruction is the innermost line outside of this directory."""

_KERNELS = f"{Path(jax.__file__).parent / 'experimental' / 'pallas'}{os.sep}"
"""The directory of JAX's Pallas kernels, whose lines do not count as source lines either."""

LAUNCHERS = ("<frozen ", f"{Path(sys.executable).parent / 'gspmd'}")
"""Prefixes of the names of files that only start the command, with Python's `-m` or as the console script."""

_RANGE = re.compile(r"\{\[(\d+):(\d+)\]\}")
_RESHAPES = ("bitcast", "reshape", "copy", "transpose")

_REDUCTIONS = {"all-reduce", "reduce-scatter"}
"""The two kinds of reductions; a compiler may replace one kind by the other."""

_NEAR = 4
"""Number of preceding instructions that are searched for a source line if a collective itself has no source line."""


Placed = tuple[Computation, Instruction]
"""A pair: the computation that contains an instruction, and the instruction."""


@dataclass(frozen=True)
class Origin:
    """The origin of an instruction in the user's program and in its plan.

    Attributes:
        equation: the planned equation; empty if the metadata does not name one.
        step: the scope name of the step, such as `step2.reduce-scatter.x`; empty if the metadata does not name one.
        source: the source line as `file:line`; empty if the metadata does not state one.
    """

    equation: str
    step: str
    source: str


def origin(
    module: Module, computation: Computation, scheduled: Instruction, instruction: Instruction, ours: str = OURS
) -> Origin:
    """Return the origin of an instruction.

    If a compiler rewrites a reduction, it drops the metadata of the instruction. In that case the equation and step are
    read from the computation `to_apply`, by which the reduction combines two elements. The source line is read from the
    operand.

    Args:
        module, computation: the program, and the computation that contains the instruction.
        scheduled: the scheduled instruction, which may wrap or fuse `instruction`.
        instruction: the instruction whose origin is returned; often the same as `scheduled`.
        ours: the directory of this package, whose lines do not count as source lines.
    """
    reducer = module.computations.get(instruction.attribute("to_apply").lstrip("%"))
    own = [instruction, scheduled, *([reducer.root] if reducer and not instruction.op_name else ())]
    equation, step = max(
        (innermost(each.op_name) for each in own), key=lambda scopes: (bool(scopes[1]), bool(scopes[0]))
    )
    sources = (module.source(each, (ours, _KERNELS, *LAUNCHERS)) for each in own + _producers(computation, scheduled))
    return Origin(equation, step, next(filter(None, sources), ""))


def _producers(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """Return the chain of instructions that leads back from an instruction along first operands.

    The chain begins with the instruction that computes the first operand of the given instruction. Each next one
    computes the first operand of the one before. At most `_NEAR` instructions are returned.
    """
    producers: list[Instruction] = []
    while instruction.operands and len(producers) < _NEAR:
        instruction = computation.by_name[instruction.operands[0]]
        producers.append(instruction)
    return producers


def by_origin(
    module: Module, computation: Computation, scheduled: Instruction, collective: Collective
) -> Iterator[tuple[Origin, Collective]]:
    """Split a combined collective into one part for each origin of its arrays.

    XLA combines several collectives into one. The instruction that takes an array out of the combined result
    (`get-tuple-element`) has the metadata of the collective that the array originally belonged to. XLA:GPU may instead
    keep this metadata on the next instruction, which reshapes the array. Or it may keep the metadata of all arrays only
    on the combined collective, as a list. XLA:GPU also concatenates the arrays of several all-reduces into one array,
    and slices the result.

    Args:
        module, computation: the program, and the computation that contains the collective.
        scheduled: the scheduled instruction of the collective.
        collective: the collective that `scheduled` runs.
    """
    own = origin(module, computation, scheduled, collective.instruction)
    done = _done(computation, scheduled)
    apart = [*_taken_apart(module, computation, done, collective)]
    names = next((found for each in (done, scheduled) if len(found := _listed(each.op_name)) == len(apart) > 1), ())
    parts: dict[Origin, list] = {}
    for number, (array, taken) in enumerate(apart):
        in_step = [placed for placed in taken if _in_step(placed, collective.kind)]
        if names and not in_step:
            part = Origin(*innermost(names[number]), "")
        elif named := in_step or [placed for placed in taken if placed[1].op_name]:
            where, instruction = named[0]
            part = origin(module, where, instruction, instruction)
        else:
            part = own
        parts.setdefault(part, []).append(array)
    for part, arrays in parts.items():
        yield part, replace(collective, arrays=tuple(arrays))


def _in_step(placed: Placed, kind: str) -> bool:
    """Return whether an instruction is in the scope of a step whose collective is of the given kind.

    An all-reduce and a reduce-scatter count as the same kind. The answer may be False for an instruction that reshapes
    the result of a collective, because such an instruction may be in the scope of the step that uses the result, such
    as a product.
    """
    step = innermost(placed[1].op_name)[1]
    planned = read_step(step).kind if step else ""
    return planned == kind or {planned, kind} == _REDUCTIONS


def _in_equation(placed: Placed) -> bool:
    """Return whether an instruction is in the scope of an equation, but not in the scope of any of its steps.

    Under lowering `xla` this is true of all instructions of an equation.
    """
    equation, step = innermost(placed[1].op_name)
    return bool(equation and not step)


def _done(computation: Computation, scheduled: Instruction) -> Instruction:
    """Return the instruction that ends an asynchronous collective, or `scheduled` if the collective is synchronous."""
    users = (each for each in computation.instructions if each.operands == (scheduled.name,))
    return next((each for each in users if each.opcode.endswith("-done")), scheduled)


def _listed(op_name: str) -> list[str]:
    """Return the names that XLA:GPU has merged into the name of a combined collective, in the order of the arrays.

    >>> _listed("jit(f)/body/(a/gspmd[B, (E, F) -> B]/psum:b/psum)")
    ['a/gspmd[B, (E, F) -> B]/psum', 'b/psum']
    """
    _, _, inner = op_name.partition("/(")
    names, depth = [""], 0
    for letter in inner.removesuffix(")"):
        depth += (letter in "([") - (letter in ")]")
        if letter == ":" and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return names if op_name.endswith(")") else []


def _taken_apart(
    module: Module, computation: Computation, done: Instruction, collective: Collective
) -> Iterator[tuple[Array, Sequence[Placed]]]:
    """Yield each array of a combined collective, with the instructions that take the array out of the result."""
    if len(collective.arrays) > 1 and not collective.fused:
        out = (each for each in computation.instructions if each.operands == (done.name,))
        taken = {int(each.attribute("index")): each for each in out if each.opcode == "get-tuple-element"}
        for number, array in enumerate(collective.arrays):
            yield array, _renamed(computation, taken[number]) if number in taken else ()
    elif pieces := _concatenated(module, computation, done) if collective.kind == "all-reduce" else {}:
        dtype = collective.arrays[0].dtype
        yield from ((Array(dtype, (stop - start,)), named) for (start, stop), named in pieces.items())
    else:
        yield from ((array, ()) for array in collective.arrays)


def _concatenated(module: Module, computation: Computation, done: Instruction) -> dict[tuple[int, int], list[Placed]]:
    """Return the slices, in the form of `_slices`, into which XLA:GPU cuts the result of concatenated all-reduces.

    The result is empty if the compiler concatenated nothing. A user's program may also cut the result of an all-reduce
    into slices, but only slices made by the compiler have the metadata of an all-reduce.
    """
    pieces = _slices(module, computation, done)
    named = (placed for piece in pieces.values() for placed in piece)
    return pieces if any(_in_step(placed, "all-reduce") or _in_equation(placed) for placed in named) else {}


def _slices(module: Module, computation: Computation, done: Instruction) -> dict[tuple[int, int], list[Placed]]:
    """Return the slices that divide a result completely and without overlap.

    Each key is the (start, stop) of a slice, and its value is a list of the instructions that may have the metadata of
    this slice. The mapping is empty if the slices do not divide the result, or if the result is also used in other
    ways.
    """
    found: dict[tuple[int, int], list[Placed]] = {}
    for user in computation.instructions:
        for number in (number for number, name in enumerate(user.operands) if name == done.name):
            inner = module.computations[user.called[0]] if user.opcode == "fusion" else computation
            value = inner.parameters[number] if user.opcode == "fusion" else done
            for each in (each for each in inner.instructions if value.name in each.operands):
                cut = _RANGE.fullmatch(each.attribute("slice")) if each.opcode == "slice" else None
                if not cut:
                    return {}
                named = _renamed(inner, each)
                named += _renamed(computation, user) if each.root and inner is not computation else []
                found.setdefault((int(cut[1]), int(cut[2])), []).extend(named)
    pieces = dict(sorted(found.items()))
    starts, stops = zip(*pieces) if pieces else ((), ())
    return pieces if (*starts, *(array.size for array in done.arrays)) == (0, *stops) else {}


def _renamed(computation: Computation, value: Instruction) -> list[Placed]:
    """Return an instruction, and those that copy or reshape its value, as (computation, instruction) pairs."""
    same = [value]
    for each in computation.instructions:
        if each.opcode in _RESHAPES and each.operands[0] in {known.name for known in same}:
            same.append(each)
    return [(computation, each) for each in same]
