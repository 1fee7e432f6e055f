"""Reductions that a compiler merges, or moves out of loops, because only a sum of their results is used.

    all-reduce(a) + all-reduce(b) = all-reduce(a + b)

The gradient of a tied embedding is such a sum. One part comes from the logits, and one part from each look-up, of which
an encoder–decoder has two. With three parts, the sum of two merged reductions is merged with the third reduction. If
the results are converted to a wider dtype before they are added, the sum is reduced in the wider dtype. XLA calls the
passes that merge reductions `AllReduceReassociate` and `ReduceScatterReassociate`.

If a loop only adds up the results of an all-reduce in its iterations, and does not use the sum in another way, one
all-reduce after the loop is enough. A loop over microbatches adds up gradients in this way, and so does the backward
pass of layers that share a weight. XLA calls the pass that moves such reductions `WhileLoopAllReduceCodeMotion`; it
runs after the other two passes.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from gspmd.jax_internals import scan_operands
from gspmd.planner.unknown import MARK
from gspmd.tracing.dataflow import Dataflow, Operation, Path, Value, dataflow
from gspmd.tracing.jaxprs import expression, inner_jaxprs, is_reshape

_SUMS = ("add", "add_any")
_ALL_REDUCES = ("psum", "psum_invariant")
_REDUCTIONS = (*_ALL_REDUCES, "reduce_scatter")
_CUT = "dynamic_slice"
_PUT = "dynamic_update_slice"
_CONVERTED = "convert_element_type"
_SCATTER = "scatter-add"
_RESHARD = "reshard"
_RESHAPES = ("transpose", _CONVERTED)


class Change(NamedTuple):
    """The change that a compiler makes to a planned reduction.

    Attributes:
        first: the reduction into which this reduction is merged, and which reduces the sum; None if this reduction is
            not merged into another.
        merged: the reductions that are merged into this reduction.
        dtype: the dtype in which the sum is reduced, if this dtype is wider than the reduction's own; otherwise None.
        trips: the product of the trip counts of the loops out of which the reduction is moved; 1 if it is not moved.
    """

    first: Operation | None = None
    merged: tuple[Operation, ...] = ()
    dtype: Any = None
    trips: int = 1


Changes = Mapping[int, Change]
"""The changes of the reductions in one call of a planned program, indexed by the number of the step. For a mark, the
number is 0."""


Found = dict[Path, dict[int, Change]]


@dataclass(frozen=True)
class _Reduction:
    """A reduction that makes a value, and the operations applied to its result.

    Attributes:
        place: the index of the reduction among the operations of the program.
        steps: the reduction, followed by the reductions that are merged into it.
        cuts: a description of the slices of the result that each device keeps; empty if the result is not sliced.
        converted: the dtype in which the reduction runs, if its result is then converted to a wider dtype; otherwise
            empty.
    """

    place: int
    steps: tuple[Operation, ...]
    cuts: tuple[str, ...] = ()
    converted: str = ""

    @property
    def how(self) -> tuple:
        """The kind of the reduction, and the operations applied to its result.

        Two reductions can be merged if this property is the same for both.
        """
        first = self.steps[0]
        return first.name if first.is_mark else expression(first.equation), self.cuts, self.converted


def changed_reductions(jaxpr: Jaxpr) -> Mapping[Path, Changes]:
    """Return the changes that a compiler makes to the reductions of a program.

    The changes are indexed by the path of the call of a planned program, or by the path of a mark. A mark may stand for
    a reduction, so a mark has the changes that this reduction would have.
    """
    found: Found = defaultdict(dict)
    _Program(dataflow(jaxpr), found)
    return found


class _Program:
    """The reductions of a program; the body of each loop is a separate program.

    Args:
        flow: the dataflow of the program.
        found: the changes found so far. The changes of this program, and of the loop bodies and branches in it,
            are added.
    """

    def __init__(self, flow: Dataflow, found: Found):
        self.flow, self.found = flow, found
        self.sums: dict[Value, _Reduction] = {}  # sums of reductions that are merged
        self.moved: dict[Value, tuple[Value | None, _Reduction]] = {}  # loop results: initial values and reductions
        self._places = {operation: place for place, operation in enumerate(flow.operations)}
        for operation in flow.operations:
            bodies = [_Program(dataflow(inner, operation.path), found) for inner in inner_jaxprs(operation.equation)]
            if operation.name in _SUMS:
                self._merge(operation)
            elif operation.name == "scan" and operation.equation.params["length"]:
                self._move_behind(operation, bodies[0])

    def _note(self, operation: Operation, **what: Any) -> None:
        path, number = _place(operation)
        self.found[path][number] = self._change(operation)._replace(**what)

    def _change(self, operation: Operation) -> Change:
        path, number = _place(operation)
        return self.found[path].get(number, Change())

    # -- two reductions that are added ---------------------------------------------------------------------------------

    def _merge(self, operation: Operation) -> None:
        """Merge two reductions if `operation` adds their results."""
        only = [value for value in operation.operands if value is not None and self.flow.uses(value) == 1]
        each = [found for value in only if (found := self.sums.get(value) or self._planned(value))]
        if len(each) == 1 and any(map(self._is_scattered, only)):
            self.sums[operation.results[0]] = each[0]
        if len(each) == 2 and each[0].how == each[1].how:
            first, second = sorted(each, key=lambda reduction: reduction.place)
            self._note(second.steps[0], first=first.steps[0])
            if first.converted:
                self._note(first.steps[0], dtype=operation.equation.outvars[0].aval.dtype)
            self._note(first.steps[0], merged=first.steps[1:] + second.steps)
            self.sums[operation.results[0]] = replace(first, steps=first.steps + second.steps)

    def _planned(self, value: Value | None) -> _Reduction | None:
        """Return the reduction whose result is the given value, or None if there is no such reduction.

        The value may also be a slice of the result, or the result converted to a wider dtype.
        """
        cuts: list[str] = []
        made, dtypes = self.flow.makers.get(value), []
        while made is not None and (made.name == _CONVERTED or _only_retypes(made.equation)):
            if made.name == _CONVERTED:
                dtypes.append(made.equation.outvars[0].aval.dtype)
            made = self._maker_for_this_alone(made.operands[0])
        while made is not None and made.name == _CUT and made.program:
            # Each device keeps its own slice, which the axes of the step determine.
            axes = "" if made.step is None else str(made.program.steps[made.step].axes)
            cuts += [str(made.equation.outvars[0].aval.shape), axes]
            made = self._maker_for_this_alone(made.operands[0])
        if made is None or not _is_planned(made):
            return None
        own = made.equation.outvars[0].aval.dtype
        if any(jnp.promote_types(own, dtype) != dtype for dtype in dtypes):
            return None  # the conversion rounds the result
        return _Reduction(self._places[made], (made,), tuple(cuts), str(own) if {own, *dtypes[:1]} != {own} else "")

    def _maker_for_this_alone(self, value: Value | None) -> Operation | None:
        """Return the operation that makes a value, or None if the value does not have exactly one use."""
        return self.flow.makers.get(value) if self.flow.uses(value) == 1 else None

    def _is_scattered(self, value: Value | None) -> bool:
        """Return whether a planned program makes a value by adding rows to zeros.

        Such a value is the gradient of a look-up whose rows are gathered. If the value is one part of a sum, XLA:GPU
        adds the rows to the other part of the sum, instead of to zeros. That other part may be a reduction that is
        merged later.
        """
        made = self.flow.makers.get(value)
        return made is not None and made.name == _SCATTER and made.program is not None

    # -- reductions that a loop adds up --------------------------------------------------------------------------------

    def _move_behind(self, loop: Operation, body: "_Program") -> None:
        """Move all-reduces from a loop's body to a place after the loop, if the loop only adds up their results."""
        constants, carried = scan_operands(loop.equation)
        for place in range(carried):
            reduction = body._added_up(constants + place, place)
            if reduction is None:
                continue
            for step in reduction.steps:
                self._note(step, trips=self._change(step).trips * loop.equation.params["length"])
            self.moved[loop.results[place]] = loop.operands[constants + place], reduction

    def _added_up(self, argument: int, result: int) -> _Reduction | None:
        """Return the all-reduce whose result a loop's body adds to an argument.

        The result is None if there is no such all-reduce, or if the argument has another use.

        Args:
            argument: the index of the body's argument.
            result: the index of the body's result that is the sum of the argument and the all-reduce.
        """
        buffer, total = self.flow.arguments[argument], self._reshaped(self.flow.results[result])
        added = self.moved.get(total) or self._sum(total)
        if added is None or self._reshaped(added[0]) != buffer or self._uses(buffer) != 1:
            return None
        return added[1]

    def _sum(self, total: Value | None) -> tuple[Value | None, _Reduction] | None:
        """Return the two parts of a sum, one of which is an all-reduce: first the other part, then the all-reduce.

        The result is None if the value `total` is not such a sum.
        """
        made = self.flow.makers.get(total)
        if made is None or made.name not in _SUMS:
            return None
        for other, value in (made.operands, made.operands[::-1]):
            origin = self._reshaped(value)
            reduction = self.sums.get(origin) or self._planned(origin)
            whole = reduction is not None and reduction.steps[0].name in (*_ALL_REDUCES, MARK) and not reduction.cuts
            if reduction is not None and whole and self._uses(origin) == 1:
                return other, reduction
        return None

    def _reshaped(self, value: Value | None) -> Value | None:
        """Return the value from which the given value is made by operations that change only its shape or type.

        Only operations whose results have no other use are followed back.
        """
        while value is not None and self._uses(value) == 1 and (made := self.flow.makers.get(value)):
            reshaped = made.name in _RESHAPES or is_reshape(made.equation)
            if reshaped or _is_whole(made.equation) or _only_retypes(made.equation):
                value = made.operands[made.name == _PUT]
            else:
                break
        return value

    def _uses(self, value: Value | None) -> int:
        """Return the number of uses of a value, without operations that overwrite the whole value."""
        covered = (each for each in self.flow.users[value] if each.name == _PUT and _is_whole(each.equation))
        return self.flow.uses(value) - sum(each.operands[0] == value for each in covered)


def _is_planned(operation: Operation) -> bool:
    """Return whether an operation is a reduction in a step of a planned program, or a mark.

    A mark may stand for such a reduction.
    """
    if operation.is_mark:
        return True
    return operation.name in _REDUCTIONS and operation.program is not None and operation.step is not None


def _place(operation: Operation) -> tuple[Path, int]:
    """Return the path and the number under which `changed_reductions` stores the changes of a reduction."""
    return (operation.path, 0) if operation.is_mark else (operation.program_path, operation.step_key[1])


def _only_retypes(equation: Any) -> bool:
    """Return whether an equation is a reshard on a mesh of one device, which changes only the type of an array.

    The search for a layout traces programs on such a mesh, which has an axis for each unknown. On this mesh, a gradient
    that may be a partial sum is resharded to the type of a partial sum. If the gradient is not a partial sum in the
    layout that is found, the final program has no such reshard.
    """
    return equation.primitive.name == _RESHARD and equation.outvars[0].aval.sharding.mesh.size == 1


def _is_whole(equation: Any) -> bool:
    """Return whether an operation reads or writes a slice that is the whole array; compilers remove such operations."""
    name, operands = equation.primitive.name, equation.invars
    whole = {_CUT: equation.outvars[:1], _PUT: operands[1:2]}.get(name, ())
    return any(part.aval.shape == operands[0].aval.shape for part in whole)
