"""Reductions that a compiler merges or moves, because only a sum of their results is used.

    all-reduce(a) + all-reduce(b) = all-reduce(a + b)

A tied embedding has such a gradient: one part from the logits, and one from each look-up, of which an encoder–decoder
has two. So a sum of reductions that are merged counts as a reduction in a further sum. If the results are converted to
a wider dtype before they are added, the sum is reduced in that dtype. XLA calls the passes `AllReduceReassociate` and
`ReduceScatterReassociate`.

If a loop adds the results of its trips up, and uses the sum for nothing else, one all-reduce behind the loop is enough.
A loop over microbatches adds gradients up in this way, and so does the backward pass of layers that share a weight. XLA
calls this pass, which comes after the other two, `WhileLoopAllReduceCodeMotion`.
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
_RESHAPES = ("transpose", _CONVERTED)


class Change(NamedTuple):
    """A compiler's change of a planned reduction.

    Attributes:
        first: the operation that reduces the sum of both; None if the reduction is not merged into another one.
        merged: the reductions that are merged into this one.
        dtype: the dtype of the sum that it reduces, if that is wider than its own; otherwise None.
        trips: the trips of the loops behind which it is moved.
    """

    first: Operation | None = None
    merged: tuple[Operation, ...] = ()
    dtype: Any = None
    trips: int = 1


Changes = Mapping[int, Change]
"""The changes in one call of a planned program, by the number of the step; a mark has the number 0."""


Found = dict[Path, dict[int, Change]]


@dataclass(frozen=True)
class _Reduction:
    """The reduction that makes a value.

    Attributes:
        place: the place of its operation in the program.
        steps: this operation, and the operations that are merged into it.
        cuts: the slices that each device keeps of the result.
        converted: the narrower dtype that is reduced, if the result is converted; otherwise empty.
    """

    place: int
    steps: tuple[Operation, ...]
    cuts: tuple[str, ...] = ()
    converted: str = ""

    @property
    def how(self) -> tuple:
        """The operation, and what is done with its result."""
        first = self.steps[0]
        return first.name if first.is_mark else expression(first.equation), self.cuts, self.converted


def changed_reductions(jaxpr: Jaxpr) -> Mapping[Path, Changes]:
    """Return the changes of reductions, by the path of the planned program's call, or of a mark.

    A mark may stand for a reduction, so it gets the changes that the reduction would have.
    """
    found: Found = defaultdict(dict)
    _Program(dataflow(jaxpr), found)
    return found


class _Program:
    """The reductions of a program without its loops, whose bodies are separate programs.

    Args:
        flow: the program.
        found: the changes; the changes of this program and of all programs that it calls are added.
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
        """Merge two reductions if this operation adds their results."""
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
        """Return the step that reduces to a value, maybe cut or converted; None if something else makes the value."""
        cuts: list[str] = []
        made, dtypes = self.flow.makers.get(value), []
        while made is not None and made.name == _CONVERTED:
            dtypes.append(made.equation.outvars[0].aval.dtype)
            made = self._maker_for_this_alone(made.operands[0])
        while made is not None and made.name == _CUT and made.program:
            # Each device keeps its part, which the axes of the step determine.
            axes = "" if made.step is None else str(made.program.steps[made.step].axes)
            cuts += [str(made.equation.outvars[0].aval.shape), axes]
            made = self._maker_for_this_alone(made.operands[0])
        if made is None or not _is_planned(made):
            return None
        own = made.equation.outvars[0].aval.dtype
        if any(jnp.promote_types(own, dtype) != dtype for dtype in dtypes):
            return None  # The result is rounded.
        return _Reduction(self._places[made], (made,), tuple(cuts), str(own) if {own, *dtypes[:1]} != {own} else "")

    def _maker_for_this_alone(self, value: Value | None) -> Operation | None:
        """Return the operation that makes a value if this is its only use, otherwise None."""
        return self.flow.makers.get(value) if self.flow.uses(value) == 1 else None

    def _is_scattered(self, value: Value | None) -> bool:
        """Return whether a planned program makes a value by adding rows to zeros, the gradient of a look-up whose rows
        are gathered. XLA:GPU adds the rows to the other part of a sum instead, maybe a reduction that it merges
        later."""
        made = self.flow.makers.get(value)
        return made is not None and made.name == _SCATTER and made.program is not None

    # -- reductions that a loop adds up --------------------------------------------------------------------------------

    def _move_behind(self, loop: Operation, body: "_Program") -> None:
        """Move all-reduces of a loop's body behind the loop, if it only adds them up."""
        constants, carried = scan_operands(loop.equation)
        for place in range(carried):
            reduction = body._added_up(constants + place, place)
            if reduction is None:
                continue
            for step in reduction.steps:
                self._note(step, trips=self._change(step).trips * loop.equation.params["length"])
            self.moved[loop.results[place]] = loop.operands[constants + place], reduction

    def _added_up(self, argument: int, result: int) -> _Reduction | None:
        """Return the all-reduce of which this result is the sum with this argument; None if it is not such a sum.

        The argument must not be used otherwise.
        """
        buffer, total = self.flow.arguments[argument], self._reshaped(self.flow.results[result])
        added = self.moved.get(total) or self._sum(total)
        if added is None or self._reshaped(added[0]) != buffer or self._uses(buffer) != 1:
            return None
        return added[1]

    def _sum(self, total: Value | None) -> tuple[Value | None, _Reduction] | None:
        """Return the two parts of a sum whose second part is an all-reduce; None if there is no such sum."""
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
        """Return the value from which this one is made by a change of shape or dtype, if it has no other use."""
        while value is not None and self._uses(value) == 1 and (made := self.flow.makers.get(value)):
            if made.name in _RESHAPES or is_reshape(made.equation) or _is_whole(made.equation):
                value = made.operands[made.name == _PUT]
            else:
                break
        return value

    def _uses(self, value: Value | None) -> int:
        """Return the number of uses of a value, without uses as the place of a slice that covers it."""
        covered = (each for each in self.flow.users[value] if each.name == _PUT and _is_whole(each.equation))
        return self.flow.uses(value) - sum(each.operands[0] == value for each in covered)


def _is_planned(operation: Operation) -> bool:
    """Return whether an operation is a reduction in a step of a planned program, or a mark, which may be one."""
    if operation.is_mark:
        return True
    return operation.name in _REDUCTIONS and operation.program is not None and operation.step is not None


def _place(operation: Operation) -> tuple[Path, int]:
    """Return the place of the changes of a reduction: see `changed_reductions`."""
    return (operation.path, 0) if operation.is_mark else (operation.program_path, operation.step_key[1])


def _is_whole(equation: Any) -> bool:
    """Return whether a slice that is read or written covers the whole array: compilers remove both."""
    name, operands = equation.primitive.name, equation.invars
    whole = {_CUT: equation.outvars[:1], _PUT: operands[1:2]}.get(name, ())
    return any(part.aval.shape == operands[0].aval.shape for part in whole)
