"""The passes of a program over memory, and its peak memory, both derived from the types of its values.

A search traces the program on a mesh whose axes are placeholders, the unknowns (`gspmd.planner.unknown`). Under
Explicit axes the type of an array names the unknowns over which it is sharded. Once a layout replaces the unknowns by
mesh axes, the bytes of the array on one device are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import fsum, prod
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal

from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import program_of
from gspmd.lowerings.unknown import planned_steps
from gspmd.planner.unknown import MARK, PREFIX, Unknown, UnknownMove, UnknownProduct, UnknownSteps
from gspmd.search.labels import PASSING, RETYPED, Rule, carried, labels_of_operands, passes_on
from gspmd.tracing.jaxprs import all_equations, inner_jaxprs

_LOOPS = ("scan", "while")
_APART = ("dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "sort", "cond", *_LOOPS)
"""Operations that compilers do not fuse with their neighbors."""
_VIEWS = ("reshape", "squeeze", "broadcast_in_dim", "transpose")
"""Operations that move no data in memory by themselves, since products read operands in any order of dimensions."""


_MOST_UNKNOWNS = 8
"""The largest number of mesh axes that a type may have beyond one for each of its dimensions.

A type with more mesh axes does not show how its array is sharded.
"""


@dataclass(frozen=True, order=True)
class HeldArray:
    """An array in the memory of a device.

    Attributes:
        size: bytes of the array, divided by the sizes of those mesh axes that shard it and are known.
        unknowns: the unknowns over which the array is sharded.
        move: for an array inside a planned operation, the move that brings the array there or takes it away; None for
            all other arrays. If the placements before and after the move are equal, the operation has no such array: it
            neither holds nor reads nor writes one.
    """

    size: int
    unknowns: tuple[str, ...]
    move: UnknownMove | None = None

    @classmethod
    def of(cls, aval: Any) -> HeldArray | None:
        """Return the array that a type describes, or None if it is no array type or lacks the sharding."""
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        if shape is None or dtype is None or not hasattr(dtype, "itemsize"):
            return None
        mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
        if mesh is not None and any(name.startswith(PREFIX) for name in mesh.auto_axes):
            # At the border of a region with Auto axes a type lacks the sharding; the types outside the region have it.
            return None
        named = [name for names in unknowns_by_dimension(aval) for name in names]
        if len(named) > len(shape) + _MOST_UNKNOWNS:
            # Differentiation splits a shard_map; JAX types residuals between its halves as sharded over the whole mesh.
            return None
        sizes = mesh.shape if mesh is not None else {}
        size = dtype.itemsize * prod(shape) // prod(sizes[name] for name in named)
        return cls(size, tuple(sorted(name for name in named if name.startswith(PREFIX))))


def unknowns_by_dimension(aval: Any) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dimension of a type, or an empty list if it is not an array type."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    parts = () if spec is None else spec.partitions
    return [() if part is None else part if isinstance(part, tuple) else (part,) for part in parts]


# -- a program without plain calls -------------------------------------------------------------------------------------


class HeldValue:
    """A value of a program; variables that only pass a value on share one `HeldValue`.

    Args:
        aval: the type of the value.
        seen: the value whose memory this value shares, because this value is a reshaped view of it; None if this value
            is not a view.
    """

    def __init__(self, aval: Any, seen: HeldValue | None = None):
        self.aval, self.array = aval, HeldArray.of(aval)
        self.memory: HeldValue = self if seen is None else seen.memory


@dataclass(frozen=True)
class Operation:
    """An operation of a program with its values: a planned operation, a loop, a conditional or a primitive."""

    equation: Any
    inputs: tuple[HeldValue, ...]
    outputs: tuple[HeldValue, ...]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.equation.primitive.name

    @property
    def is_fused(self) -> bool:
        """Whether compilers fuse this operation with its neighbors."""
        return self.name not in _APART and program_of(self.equation) is None and not self.inner

    @property
    def inner(self) -> list[Jaxpr]:
        """The programs inside a loop or a conditional; none for a planned operation, which has steps instead."""
        return [] if program_of(self.equation) is not None else list(inner_jaxprs(self.equation))

    @property
    def carried(self) -> list[tuple[HeldValue, HeldValue]]:
        """The carry of a loop, as pairs of a value before the loop and the value that replaces it after the loop."""
        first, count = carried(self.equation)
        pairs = zip(self.operands[first : first + count], self.outputs)
        return [(before, after) for before, after in pairs if before is not None]

    @property
    def operands(self) -> list[HeldValue | None]:
        """The values of all operands; None for literals, which `inputs` leaves out."""
        given = iter(self.inputs)
        return [None if isinstance(var, Literal) else next(given) for var in self.equation.invars]


@dataclass
class Straight:
    """A program as one list of operations, in which calls that run once are replaced by their contents."""

    inputs: list[HeldValue]
    operations: list[Operation]
    results: list[HeldValue]

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> Straight:
        """Return the flat form of a program, with its plain calls replaced by their contents."""
        values = {var: HeldValue(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        operations: list[Operation] = []
        _inline(jaxpr, values, operations)
        results = [values[var] for var in jaxpr.outvars if not isinstance(var, Literal)]
        return cls([values[var] for var in jaxpr.invars], operations, results)


def _inline(jaxpr: Jaxpr, values: dict[Any, HeldValue], operations: list[Operation]) -> None:
    def read(var: Any) -> HeldValue:
        return HeldValue(var.aval) if isinstance(var, Literal) else values[var]

    for equation in jaxpr.eqns:
        if equation.primitive.name in PASSING:
            values |= dict(zip(equation.outvars, map(read, equation.invars)))
            continue
        inner = [] if program_of(equation) is not None else list(inner_jaxprs(equation))
        apart = equation.primitive.name in (*_LOOPS, "cond", "shard_map") or len(inner) != 1
        if not inner or apart or len(inner[0].invars) != len(equation.invars):
            given = [values[var] for var in equation.invars if not isinstance(var, Literal)]
            seen = given[0] if given and _is_reshaped(equation) else None
            made = [HeldValue(var.aval, seen) for var in equation.outvars]
            operations.append(Operation(equation, tuple(given), tuple(made)))
        else:
            (called,) = inner
            within = dict(zip(called.invars, map(read, equation.invars)))
            within |= {var: HeldValue(var.aval) for var in called.constvars}
            _inline(called, within, operations)
            made = [HeldValue(v.aval) if isinstance(v, Literal) else within[v] for v in called.outvars]
        values |= dict(zip(equation.outvars, made))


def _is_reshaped(equation: Any) -> bool:
    """Return whether the result of an operation shares the memory of its operand.

    Such a result is its operand in a different shape, or on the other side of the border of a region with Auto axes.
    """
    name, before, after = equation.primitive.name, equation.invars[0].aval, equation.outvars[0].aval
    if name in RETYPED:
        return HeldArray.of(before) is None
    return name in ("reshape", "squeeze", "broadcast_in_dim", "dynamic_slice") and before.size == after.size


# -- passes over memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramWork:
    """The work of a program outside its planned steps.

    Attributes:
        passed: the arrays that are read or written, with the number of passes over each.
        flops: FLOPs of the products that are not planned steps, by the array that each product computes.
    """

    passed: Mapping[HeldArray, int]
    flops: Mapping[HeldArray, int]


def work(jaxpr: Jaxpr) -> ProgramWork:
    """Count the passes of a program over memory, and the FLOPs of products that are not planned steps.

    Elementwise operations make passes, and so do planned operations other than products, and loops that read and write
    stacks. Elementwise operations are assumed to be fused as far as possible, so an array that is written and read only
    within one fused group is not counted.
    """
    passed: Counter = Counter()
    flops: Counter = Counter()
    _passes(jaxpr, 1, passed, flops)
    # Sorted, since sets of arrays are counted on the way.
    arrays = sorted(passed.items(), key=lambda pair: _rank(pair[0]))
    return ProgramWork(dict(arrays), dict(sorted(flops.items())))


def _rank(array: HeldArray) -> tuple[int, tuple[str, ...], str]:
    return array.size, array.unknowns, str(array.move)


def _passes(jaxpr: Jaxpr, times: int, passed: Counter, flops: Counter) -> None:
    straight = Straight.of(jaxpr)
    given = {*straight.inputs}
    fused = [each for each in straight.operations if each.is_fused]
    apart = {value for each in straight.operations if not each.is_fused for value in each.inputs} | {*straight.results}
    for cluster in _clusters(fused):
        within = {value for each in cluster for value in each.outputs}
        read = {value for each in cluster for value in each.inputs} - within
        if all(each.name in _VIEWS for each in cluster):
            continue
        for value in (*read, *(within & apart)):
            _count(passed, value, times)
    for each in straight.operations:
        if each.is_fused:
            continue
        if program_of(each.equation) is not None:
            _planned(each, times, passed, flops)
            continue
        trips = each.equation.params.get("length", 1) if each.name in _LOOPS else 1
        for inner in each.inner:
            _passes(inner, times * trips, passed, flops)
        touched = [*each.inputs, *each.outputs] if not each.inner else []
        if each.name == "scan":  # Stacks are written, or read, slice by slice.
            first, count = carried(each.equation)
            stacked = [var for var in each.equation.invars[first + count :] if not isinstance(var, Literal)]
            read = each.inputs[len(each.inputs) - len(stacked) :]
            # Parameters, and a cache, are read where they are multiplied.
            touched = [*(value for value in read if value not in given), *each.outputs[count:]]
        for value in touched:
            _count(passed, value, times)
        if each.name == "dot_general" and each.outputs[0].array is not None:
            flops[each.outputs[0].array] += times * _dot_flops(each.equation)


def _count(passed: Counter, value: HeldValue, times: int, move: UnknownMove | None = None) -> None:
    if value.array is not None and value.aval.shape:
        passed[replace(value.array, move=move)] += times


def _clusters(fused: list[Operation]) -> Iterator[list[Operation]]:
    """Yield the groups of operations that are fused together: operations connected through their operands."""
    of: dict[HeldValue, list[Operation]] = {}
    for operation in fused:
        near = {id(of[value]): of[value] for value in operation.inputs if value in of}
        merged = [each for members in near.values() for each in members] + [operation]
        for each in merged:
            for value in each.outputs:
                of[value] = merged
    yield from {id(members): members for members in of.values()}.values()


def _planned(call: Operation, times: int, passed: Counter, flops: Counter) -> None:
    """Count the arrays that a planned operation reads and writes.

    Products and their operands are left out, because they are priced as steps.
    """
    marks = _marks_in(call)
    if any(_is_product(what) for what in marks):
        return
    multiplies = any(isinstance(what, UnknownSteps) and what.is_product for what in marks)
    move = _move_of(call)  # Where the spec does not change, the compiled program has no such operation.
    left = _left_out(call, multiplies)
    for value in (*call.inputs, *call.outputs):
        if value not in left:
            _count(passed, value, times, move)
    done = 0 if multiplies else _flops_in(call.equation)
    read, made = ([each.array for each in values if each.array is not None] for values in (call.inputs, call.outputs))
    if done and made:
        # A device has a part of the result, and attends to a part of a cache.
        largest = [max(arrays, key=lambda array: array.size) for arrays in (read, made)]
        unknowns = {name for array in largest for name in array.unknowns}
        flops[HeldArray(largest[1].size, tuple(sorted(unknowns)))] += times * done


def _left_out(call: Operation, multiplies: bool) -> set[HeldValue]:
    """Return the operands and results of a planned operation over which it makes no pass.

    A lookup reads rows of a table, and an update writes positions of a cache: only these count. If the operation
    multiplies, its products are priced with their operands, and so are the weights that it moves for them.

    Views are not followed: tokens are sent to experts as rows gathered from a view that has the tokens of all groups,
    and all of them are read.
    """
    left = -1  # the label of an operand that is left out; other labels are the numbers of results
    updated: set[int] = set()

    def rule(equation: Any, results: Sequence[Set[int]]) -> Sequence[Set[int]] | None:
        if equation.primitive.name == "gather":
            return [{left}]
        if equation.primitive.name == "dynamic_update_slice":
            updated.update(results[0] - {left})
            return [{*results[0], left}]
        if multiplies and isinstance(_marked_by(equation), UnknownMove):
            return [{*results[0], left}]
        return None

    found = [(value, labels) for value, labels in _labels(call, rule) if left in labels]
    # A result that is an operand with some slices updated is left out, too. If slices are written one by one into an
    # array made for them, that array is written as a whole.
    in_place = {number for _, labels in found for number in labels & updated}
    return {value for value, _ in found} | {call.outputs[number] for number in in_place}


def _is_product(what: Unknown) -> bool:
    """Return whether an operation with this mark is only a product, so that the mark is priced as a local einsum."""
    return isinstance(what, UnknownProduct) or (isinstance(what, UnknownSteps) and what.plan is planned_steps)


def _flops_in(equation: Any) -> int:
    """Return the FLOPs of all products inside an operation, including calls, times the trip counts of its loops."""
    if equation.primitive.name == "dot_general":
        return _dot_flops(equation)
    inside = sum(_flops_in(each) for inner in inner_jaxprs(equation) for each in inner.eqns)
    return inside * (equation.params.get("length", 1) if equation.primitive.name == "scan" else 1)


def _dot_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    done = 2 * equation.outvars[0].aval.size
    for dim in contracted:
        done *= equation.invars[0].aval.shape[dim]
    return done


# -- an operation and its marks ----------------------------------------------------------------------------------------


def _labels(operation: Operation, rule: Rule) -> list[tuple[HeldValue, set[int]]]:
    """Label the results of an operation by their numbers, and return its operands with their labels by a rule."""
    found: list[set[int]] = [set() for _ in operation.equation.invars]
    numbers = [{number} for number in range(len(operation.outputs))]
    for inner in inner_jaxprs(operation.equation):
        assert len(inner.outvars) == len(numbers), operation.name
        for labels, more in zip(found, labels_of_operands(inner, numbers, rule), strict=True):
            labels |= more
    return [(value, labels) for value, labels in zip(operation.operands, found) if value is not None]


def _marked_by(equation: Any) -> Unknown | None:
    """Return the step for which an equation is a mark, or None for all other equations."""
    return equation.params["mark"].what if equation.primitive.name == MARK else None


def _marks_in(operation: Operation) -> list[Unknown]:
    """Return the marks of the planned steps of an operation."""
    inside = (each for inner in inner_jaxprs(operation.equation) for each in all_equations(inner))
    return [what for each in inside if (what := _marked_by(each)) is not None]


# -- memory ------------------------------------------------------------------------------------------------------------


Moment = tuple[int, ...]
"""A point of a program: the index of an operation. For a point inside a loop or a conditional, the index of the program
inside that operation and a point of this program follow. For a planned operation that reduces gradients of several
weights, the index of the gradient follows.
"""


@dataclass(frozen=True)
class Held:
    """The arrays of a program at one moment.

    Attributes:
        arguments: the arguments of the program, each with the number of equal arrays.
        others: all other arrays, each with the number of equal arrays. They are intermediate arrays, including those
            inside a planned operation, and results that do not fit into the memory of an argument.
    """

    arguments: Mapping[HeldArray, int]
    others: Mapping[HeldArray, int]


@dataclass(frozen=True)
class Moments:
    """The arrays that a program holds at each of its moments, if every argument is donated.

    A result then takes the memory of an argument of the same size and sharding, if there is one.

    Attributes:
        arrays: the different arrays of the program, sorted.
        counts: [moments, arrays], how many arrays of each kind the program holds at each moment, with its arguments.
        every: the moments, in the order of the program.
        arguments: the arguments of the program, each with the number of equal arrays.
    """

    arrays: tuple[HeldArray, ...]
    counts: np.ndarray
    every: tuple[Moment, ...]
    arguments: Mapping[HeldArray, int]

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> Moments:
        """Return the moments of a program."""
        arguments = Counter(array for var in jaxpr.invars if (array := HeldArray.of(var.aval)) is not None)
        outputs = (var for var in jaxpr.outvars if not isinstance(var, Literal))
        results = Counter(array for var in outputs if (array := HeldArray.of(var.aval)) is not None)
        always = arguments + (results - arguments)
        found = [(moment, always + inside) for moment, inside in _moments(jaxpr)]
        # Sorted, since sets of arrays are collected on the way.
        arrays = sorted(set[HeldArray]().union(*(held for _, held in found)), key=_rank)
        column = {array: number for number, array in enumerate(arrays)}
        counts = np.zeros((len(found), len(arrays)), np.int64)
        for row, (_, held) in zip(counts, found):
            row[[column[array] for array in held]] = [*held.values()]
        return cls(tuple(arrays), counts, tuple(moment for moment, _ in found), arguments)

    def largest(self, sizes: Sequence[float]) -> tuple[Moment, float]:
        """Return the moment of peak memory, the first one if there are several, and the bytes held then.

        Args:
            sizes: the bytes of each of `arrays` on one device.
        """
        sums = self.counts @ np.array(sizes)
        # Sums of equal bytes may differ in rounding.
        row = int(np.argmax(sums >= sums.max() * (1 - 1e-12)))
        return self.every[row], fsum(count * size for count, size in zip(self.counts[row].tolist(), sizes) if count)

    def at(self, moment: Moment) -> Held:
        """Return the arrays at a moment of this program, or of a program that differs from it only in sizes."""
        counts = zip(self.arrays, self.counts[self.every.index(moment)].tolist())
        others = {array: more for array, count in counts if (more := count - self.arguments.get(array, 0))}
        return Held(self.arguments, others)

    def average(self, shares: Mapping[Moment, float]) -> dict[HeldArray, float]:
        """Return how many arrays of each kind the program holds on average, if each moment has its share."""
        rows = sum(share * self.counts[self.every.index(moment)] for moment, share in shares.items())
        return {array: count for array, count in zip(self.arrays, np.asarray(rows).tolist()) if count}


def _within(operation: Operation, later: Iterable[HeldValue] = ()) -> list[Counter[HeldArray]]:
    """Return the arrays that only exist inside a planned operation: moved operands, results to be moved, and summands.

    Compilers reduce the gradient of one weight before they compute that of the next, so no two partial sums of weights'
    gradients are in memory at the same time. The result of a group's gradient has one entry for each of them, with the
    arrays that are held while this partial sum exists. Which one is the largest depends on the layout. The result of
    any other operation has one entry.

    If several products are added up, each of them except the last is kept in float32. An example is the gradient of an
    operand that is multiplied by several weights. Arrays that belong to results in `later` are left out, because these
    results are computed later.
    """
    given, made = ({value.array for value in values} for values in (operation.inputs, operation.outputs))
    marks, moves = _marks_in(operation), _moves_in(operation)
    always: Counter[HeldArray] = Counter()
    of_weights: list[Counter[HeldArray]] = []
    for move, results in moves:
        if len(move.before) == 1 and move.shape and not results & {*later}:
            # Gradients of weights are computed first; that of the other operand, the first result, takes its place.
            own = bool(move.before[0].partial) and operation.outputs[0] not in results
            ends = (*move.before, set() if own else given), (move.after, made)
            every = ((_placed(move, spec), outside) for spec, outside in ends)
            found = Counter(array for array, outside in every if replace(array, move=None) not in outside)
            if own and results and _adds(operation):
                of_weights.append(found)
            else:
                always += found
    summed = Counter((mark.specs[2], mark.sizes) for mark in marks if isinstance(mark, UnknownProduct))
    for (spec, sizes), count in summed.items():
        size = prod(dict(sizes)[dim] for dim in spec.dims)
        if count > sum(spec in move.before for move, _ in moves):  # Each result is moved from where its products are.
            unknowns = {name for axes in spec.axes for name in axes}
            always[HeldArray(4 * size, tuple(sorted(unknowns)))] += count - 1
    return [always + each for each in of_weights] or [always]


def _moves_in(operation: Operation) -> list[tuple[UnknownMove, set[HeldValue]]]:
    """Return the moves of an operation, each with the results of the operation that it brings to their specs.

    A moved operand is a result, too, if it is kept for the backward pass; otherwise the set of its move is empty.
    """
    at: dict[int, set[int]] = {}

    def rule(equation: Any, results: Sequence[Set[int]]) -> Sequence[Set[int]] | None:
        if not isinstance(_marked_by(equation), UnknownMove):
            # On the one device of the trace, a partial sum gets its type behind its move (`gspmd.lowerings.program`),
            # so labels also pass through the operations that do this.
            return None
        at.setdefault(id(equation), set()).update(*results)  # This is the last move on the way to these results.
        return []

    _labels(operation, rule)
    found = []
    for inner in inner_jaxprs(operation.equation):
        for each in all_equations(inner):
            if isinstance(what := _marked_by(each), UnknownMove):
                found.append((what, {operation.outputs[number] for number in at.get(id(each), ())}))
    return found


def _placed(move: UnknownMove, spec: Spec) -> HeldArray:
    """Return the array of a moved tensor with `spec`, which is its spec before or after the move.

    The axes of a partial sum do not divide the array.
    """
    unknowns = {name for axes in spec.axes for name in axes}
    return HeldArray(prod(move.shape) * move.itemsize, tuple(sorted(unknowns)), move)


def _moments(jaxpr: Jaxpr) -> Iterator[tuple[Moment, Counter[HeldArray]]]:
    """Yield every moment of a program, with the arrays that it holds then besides its operands and results."""
    straight = Straight.of(jaxpr)
    outside = {value.memory for value in (*straight.inputs, *straight.results)}
    last = {value: number for number, each in enumerate(straight.operations) for value in _memory(each.inputs)}
    elsewhere = outside | _only_fused(straight)
    later = _postponed(straight, last)
    moved = _moved(straight, last, elsewhere)
    ended: dict[int, list[HeldValue]] = {}
    for value, number in last.items():
        ended.setdefault(number, []).append(value)
    alive: Counter[HeldArray] = Counter()

    def held(values: Iterable[HeldValue]) -> Iterator[HeldArray]:
        return (array for value in values if (array := moved.get(value, value.array)) is not None)

    if not straight.operations:
        yield (), alive
    for number, each in enumerate(straight.operations):
        done = {*ended.get(number, ())} - elsewhere
        made = {value for value in _memory(each.outputs) if value in {*each.outputs} and value in last} - elsewhere
        made = {value for value in made if later.get(value, number) == number}
        made |= {value for value, begin in later.items() if begin == number} - elsewhere
        # The new values of a loop's carry overwrite the old ones, and results of elementwise operations their operands.
        over = {after for before, after in each.carried if before.memory in done} & made
        over |= _overwriting(each, made - over, done)
        alive.update(held(made - over))
        if program_of(each.equation) is not None:
            every = _within(each, later)
            for which, within in enumerate(every):
                yield (number, which) if len(every) > 1 else (number,), alive + within
        elif each.inner:
            for which, inner in enumerate(each.inner):
                yield from (((number, which, *moment), alive + within) for moment, within in _moments(inner))
        else:
            yield (number,), +alive
        alive.update(held(over))
        alive.subtract(held(done))
        alive = +alive


def _postponed(straight: Straight, last: dict[HeldValue, int]) -> dict[HeldValue, int]:
    """Return the values that compilers compute later, each with the number of the first operation that needs it.

    - A gradient that is only added to other gradients, such as those of earlier microbatches or of a tied table, is
      computed where it is added.
    - An operand that a group keeps for its gradient, as after a recomputed forward pass, is moved where the gradient
      reads it. Until then, compiled programs do not hold all of the moved operands: docs/accuracy.md has figures.

    Until then, the operands from which such a value is computed are in memory, but no others of the same operation.
    Therefore this function changes `last`, which maps each value to the number of the last operation that reads it.
    """
    readers: dict[HeldValue, set[int]] = {}
    for number, each in enumerate(straight.operations):
        for value in _memory(each.inputs):
            readers.setdefault(value, set()).add(number)

    def followed(value: HeldValue, kept: bool) -> tuple[list[HeldValue], int]:
        """Return a value with the values that only pass it on, and the number of the operation that needs it.

        The number is -1 if the value has other uses.
        """
        if len(readers.get(value.memory, ())) != 1:
            return [], -1
        (number,) = readers[value.memory]
        reader = straight.operations[number]
        if _adds(reader) if kept else reader.name in ("add", "add_any"):
            return [value.memory], number
        if reader.name == "convert_element_type" or _move_of(reader) is not None:
            values, end = followed(reader.outputs[0], kept)
            return [value.memory, *values], end
        return [], -1

    later: dict[HeldValue, int] = {}
    for number, each in enumerate(straight.operations):
        if program_of(each.equation) is None or len(each.outputs) == 1:
            continue  # A product that keeps nothing and has no second gradient is computed where it stands.
        sources, products = _sources(each)
        for value, operands in sources.items() if products else ():
            values, end = followed(value, value not in products)
            if end > number:
                later |= dict.fromkeys(values, end)
                last |= {x: max(last[x], end) for x in _memory(operands) if x in last}
                last |= dict.fromkeys(values, end)
    return later


def _adds(operation: Operation) -> bool:
    """Return whether a planned operation adds up several products, as the gradient of a group does."""
    marks = _marks_in(operation) if program_of(operation.equation) is not None else []
    return any(isinstance(mark, UnknownMove) and len(mark.before) > 1 for mark in marks)


def _sources(operation: Operation) -> tuple[dict[HeldValue, list[HeldValue]], set[HeldValue]]:
    """Return the operands from which each result of an operation is computed, and the results that products make.

    Operands that are kept for the backward pass are results, too, but no product makes them.
    """
    products: set[int] = set()

    def rule(equation: Any, results: Sequence[Set[int]]) -> Sequence[Set[int]] | None:
        if isinstance(_marked_by(equation), UnknownProduct):
            products.update(*results)
        return None if passes_on(equation) else [set().union(*results)] * len(equation.invars)

    found = _labels(operation, rule)
    sources = {
        result: [value for value, labels in found if number in labels]
        for number, result in enumerate(operation.outputs)
    }
    return sources, {operation.outputs[number] for number in products}


def _move_of(operation: Operation) -> UnknownMove | None:
    """Return the move of a planned operation that only moves a tensor, without transposing it.

    The result is None for all other operations.
    """
    marks = _marks_in(operation) if program_of(operation.equation) is not None else []
    if not len(marks) == len(operation.inputs) == len(operation.outputs) == 1:
        return None
    (mark,) = marks
    if not isinstance(mark, UnknownMove) or len(mark.before) > 1 or mark.before[0].dims != mark.after.dims:
        return None
    # A sum, such as the square of a norm, has a larger operand.
    sizes = {prod(value.aval.shape) for value in (*operation.inputs, *operation.outputs)}
    return mark if sizes == {prod(mark.shape)} else None


def _moved(straight: Straight, last: Mapping[HeldValue, int], elsewhere: Set[HeldValue]) -> dict[HeldValue, HeldArray]:
    """Return the arrays of moved tensors that also stay in memory in their old placement.

    Each array has its move, because no second array is in memory if the placements before and after the move are equal.
    """
    found = {}
    for number, each in enumerate(straight.operations):
        if (move := _move_of(each)) is None or each.outputs[0].array is None:
            continue
        before = {*_memory(each.inputs)}
        if all(value in elsewhere or last[value] > number for value in before):
            found[each.outputs[0]] = replace(each.outputs[0].array, move=move)
    return found


def _overwriting(operation: Operation, made: Set[HeldValue], done: Set[HeldValue]) -> set[HeldValue]:
    """Return the results of an elementwise operation that are written over operands which nothing reads later.

    A planned operation without a product, such as the gradient of a loss, counts as elementwise. The result of a move
    in this operation is not written over the array that is moved.
    """
    if operation.is_fused:
        moved: set[HeldValue] = set()
    elif program_of(operation.equation) is not None and not _flops_in(operation.equation):
        moves = _moves_in(operation)
        if len(moves) < len(_marks_in(operation)):
            return set()
        moved = {value for _, results in moves for value in results}
    else:
        return set()
    free = Counter(value.array for value in done)
    found = set()
    for value in operation.outputs:
        if value in made and value.array and free[value.array] and value not in moved:
            free[value.array] -= 1
            found.add(value)
    return found


def _memory(values: Iterable[HeldValue]) -> set[HeldValue]:
    """Return the values in memory behind some values: for a view, the value that is viewed; otherwise the value."""
    return {value.memory for value in values if value.memory.array is not None}


def _only_fused(straight: Straight) -> set[HeldValue]:
    """Return the values that are never in memory, because only fused operations make and read them."""
    made = {value.memory for each in straight.operations if each.is_fused for value in each.outputs}
    apart = _memory(value for each in straight.operations if not each.is_fused for value in each.inputs)
    return made - apart - _memory(straight.results)
