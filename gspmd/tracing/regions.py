"""Regions of a program, and the values, collectives and products that are available in each region.

The body of a loop is a separate region, and so is a branch of a conditional. A region contains all operations that are
not in the regions inside it, so the operations of a region run one after another. `gspmd.tracing.value_numbering`
explains the value numbers.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from gspmd.jax_internals import scan_operands
from gspmd.lowerings.transformations.gradient import ENTERING
from gspmd.lowerings.transformations.hoisting import NEVER_HOISTED
from gspmd.planner.unknown import MARK
from gspmd.tracing.jaxprs import (
    RECOMPUTED,
    constants_of,
    expression,
    has_effects,
    inner_jaxprs,
    is_call,
    is_carried_unchanged,
    is_reshape,
    is_stacked,
    literal,
    runs_once,
)
from gspmd.tracing.value_numbering import Numbering, StepKey

_REDUCTIONS = ("psum", "pmax")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ppermute", *_REDUCTIONS, MARK)
_BARRIER = "optimization_barrier"
_NOTHING = (NEVER_HOISTED, ENTERING, "name")
"""The primitives of operations that compilers remove; `name` is the primitive of `checkpoint_name`."""

_LOOPS = ("scan", "while")


class Value(NamedTuple):
    """A value of a program, with the value numbers that it has at three moments of compilation.

    Attributes:
        number: the value number after common subexpressions have been eliminated.
        barrierless: the value number after optimization barriers have been expanded and common subexpressions have been
            eliminated again. It is the same as `number` for a compiler that does not eliminate them again.
        region: the outermost region in which the value is available.
        captured: the value number before any common subexpressions are eliminated, at the moment when values from
            outside become operands of loops. If two operands of a loop become equal later, they remain two different
            values inside the loop.
    """

    number: int
    barrierless: int
    region: "Region"
    captured: int

    def numbers_in(self, region: "Region") -> tuple[int, int]:
        """Return the two value numbers that an operation in the given region uses for this value.

        If the given region is inside the region of this value, both numbers are `captured`. Otherwise they are `number`
        and `barrierless`.
        """
        inside = region.depth > self.region.depth
        return (self.captured, self.captured) if inside else (self.number, self.barrierless)


class Occurrence(NamedTuple):
    """The result of `Region.visit` for an operation.

    Attributes:
        region: the region in which the operation runs after hoisting.
        first: the earlier step that has computed the same value in that region, or None if there is no such step.
    """

    region: "Region"
    first: StepKey | None = None


class Region:
    """A region: a whole program, the body of a loop, or a branch of a conditional, with the values available in it.

    Args:
        numbering: the value numbers of the whole program.
        parent: the region that contains this region; None for a whole program.
        length: for the body of a loop, the number of iterations in each run of the loop.
        is_loop: whether this region is the body of a loop.
    """

    def __init__(self, numbering: Numbering, parent: "Region | None" = None, length: int = 1, is_loop: bool = False):
        self.numbering, self.parent, self.is_loop = numbering, parent, is_loop
        self.depth: int = parent.depth + 1 if parent else 0
        self.trips: int = length * (parent.trips if parent else 1)
        self._values: dict[Any, Value] = {}  # by variable
        self._available: dict[int, StepKey] = {}  # collectives and products, by value number
        self._bodies: dict[int, Region] = {}  # loops by their `barrierless` number
        self._loops: set[int] = set()  # the loops whose body this is, by `number`
        self._is_uncertain = False  # whether the current loop merges with the others only after barriers are expanded

    def ancestors(self) -> Iterator["Region"]:
        """Yield this region, then the region that contains it, and so on up to the whole program."""
        yield self
        if self.parent:
            yield from self.parent.ancestors()

    # -- calls and loops -----------------------------------------------------------------------------------------------

    def enter(self, equation: Any, inner: Jaxpr) -> "Region":
        """Begin a called program, and return its region.

        The result is this region if the program runs exactly once, as in a plain call.

        Args:
            equation: the equation that calls the program.
            inner: the called program.
        """
        operands = [self._value(var) for var in equation.invars]
        call = self._call(equation, operands)
        region = self._entered(equation, inner, operands)
        region.bind_constants(constants_of(equation, inner))
        self.numbering.calls.append(call)
        return region

    def bind_constants(self, constants: Iterable[tuple[Any, Any]]) -> None:
        """Bind variables to the constants of a program, so that equal arrays become one value.

        An array that a function closes over occurs among the program's constants once for each use. Every compiler
        merges constants with the same type and content.

        Args:
            constants: pairs of a variable and an array.
        """
        for var, array in constants:
            if not isinstance(var.aval, jax.core.ShapedArray) or not getattr(array, "is_fully_addressable", True):
                continue  # a mutable reference, or an array of which this process has only a part
            number = self.numbering.of("constant", str(var.aval), _content(array, var.aval.dtype))
            self._values[var] = Value(number, number, [*self.ancestors()][-1], number)

    def _entered(self, equation: Any, inner: Jaxpr, operands: list[Value]) -> "Region":
        if is_call(equation, inner):
            self._bind(inner.invars, self._across(equation, "in_specs", self._recomputed(equation, operands)))
            return self
        if runs_once(equation):
            for outer, var, value in zip(equation.invars, inner.invars, operands):
                self._values[var] = self._inverse("stack", "slice", value) if is_stacked(outer, var) else value
            return self
        if equation.primitive.name in _LOOPS:
            return self._loop_body(equation, inner, operands)
        return Region(self.numbering, self._region_of_call(equation))

    def leave(self, equation: Any, inner: Jaxpr) -> None:
        """End a called program, and bind the results of its equation to the values computed in the program."""
        self.numbering.calls.pop()
        if is_call(equation, inner) and len(equation.outvars) == len(inner.outvars):
            results = [self._value(var) for var in inner.outvars]
            self._bind(equation.outvars, self._across(equation, "out_specs", results))
        elif runs_once(equation):
            results = [self._value(var) for var in inner.outvars]
            for outer, var, value in zip(equation.outvars, inner.outvars, results):
                self._values[outer] = self._inverse("slice", "stack", value) if is_stacked(outer, var) else value
        else:
            loop = self._loop(equation, [self._value(var) for var in equation.invars])
            results = loop.region._elements("result", loop, len(equation.outvars))
            self._bind(equation.outvars, results)
            self._note_fusion(equation.primitive.name, results, ())

    def _call(self, equation: Any, operands: list[Value]) -> int | None:
        """Return a value number that identifies a call, if the call is a shard_map or is inside a shard_map.

        Such a shard_map is, for example, the one in a planned program. For any other call, the result is None.
        """
        around, number = self.numbering.calls[-1], self.numbering.of
        if around is not None and equation.primitive.name in _LOOPS:
            return number("in", self._loop(equation, operands).barrierless)
        if around is not None:
            return number("in", around, id(equation))
        if equation.primitive.name == "shard_map":
            return number("in", id(equation.params["jaxpr"]), *(value.captured for value in operands))
        return None

    def _loop_body(self, equation: Any, inner: Jaxpr, operands: Sequence[Value]) -> "Region":
        """Return the region of a loop's body, with the body's arguments bound.

        Loop-invariant arguments are bound to the values of the loop's operands. These arguments are the constants of
        the loop, and the carried values that the body returns unchanged.
        """
        length = equation.params.get("length", 1)  # the trips of a while loop are unknown and counted as one
        is_scan = equation.primitive.name == "scan"
        loop = self._loop(equation, operands)
        if not is_scan and inner is not equation.params["body_jaxpr"].jaxpr:  # the condition
            return Region(self.numbering, loop.region, length)
        bodies = loop.region._bodies
        body = bodies.setdefault(loop.barrierless, Region(self.numbering, loop.region, length, is_loop=True))
        body._is_uncertain = bool(body._loops) and loop.number not in body._loops
        body._loops.add(loop.number)
        operands = operands[equation.params.get("cond_nconsts", 0) :]
        constants = scan_operands(equation)[0] if is_scan else equation.params["body_nconsts"]
        changing = body._elements("carried", loop._replace(number=loop.barrierless), len(operands))
        for place, var in enumerate(inner.invars):
            invariant = place < constants or is_carried_unchanged(inner, place, constants)
            body._values[var] = operands[place] if invariant else changing[place]
        return body

    def _loop(self, equation: Any, operands: Sequence[Value]) -> Value:
        """Return the value that represents a loop or a conditional as a whole.

        Two loops with the same body and the same operands have equal values. Conditionals, and loops with side effects,
        have new values.
        """
        region = self._region_of_call(equation)
        if equation.primitive.name not in _LOOPS or has_effects(equation):
            return region._new()
        what = expression(equation)
        number, barrierless = (self.numbering.of(*what, id(region), *side) for side in _sides(operands, region))
        return Value(number, barrierless, region, barrierless)

    def _region_of_call(self, equation: Any) -> "Region":
        """Return the region in which a loop or a conditional runs after hoisting."""
        hoists = equation.primitive.name in _LOOPS or self.numbering.compiler.is_host
        return self._hoisted([self._value(var) for var in equation.invars], hoists and not has_effects(equation))

    def _recomputed(self, equation: Any, operands: list[Value]) -> list[Value]:
        """Return the values of a call's operands as the called program sees them.

        If a backward pass recomputes the call, the operands are behind an optimization barrier.
        """
        kept = equation.params.get("prevent_cse", False) if equation.primitive.name in RECOMPUTED else False
        each = (kept,) * len(operands) if isinstance(kept, bool) else kept
        waits = [one and equation.params["differentiated"] for one in each]
        behind = iter(self._behind_barrier(equation, [value for value, wait in zip(operands, waits) if wait]))
        return [next(behind) if wait else value for value, wait in zip(operands, waits)]

    def _across(self, equation: Any, side: str, values: Sequence[Value]) -> list[Value]:
        """Return the values of a call's operands inside the call, or the values of the call's results outside the call.

        A shard_map turns its operands into shards, and the shards of its results into arrays, by their specs. For any
        other call, the values are returned unchanged.

        Args:
            equation: the call.
            side: the parameter of shard_map with the specs, "in_specs" for operands or "out_specs" for results.
            values: the values of the operands outside the call, or of the results inside the call.
        """
        specs = equation.params.get(side) if equation.primitive.name == "shard_map" else None
        if specs is None:
            return list(values)
        name, inverse = ("shard", "array") if side == "in_specs" else ("array", "shard")
        return [self._inverse(inverse, name, value, str(spec)) for value, spec in zip(values, specs)]

    def _inverse(self, made: str, name: str, value: Value, *how: str) -> Value:
        numbers = (value.number, value.barrierless, value.captured)
        number, barrierless, captured = (self.numbering.inverse(made, name, one, *how) for one in numbers)
        return Value(number, barrierless, value.region, captured)

    # -- operations ----------------------------------------------------------------------------------------------------

    def visit(self, equation: Any, step: StepKey = ("", 0)) -> Occurrence:
        """Assign value numbers to the results of an operation.

        Args:
            equation: the operation.
            step: the step to which the operation belongs.

        Returns:
            The region in which the operation runs, and the earlier step that has computed the same collective or
            product.
        """
        operands, name = [self._value(var) for var in equation.invars], equation.primitive.name
        if name in (_BARRIER, *_NOTHING):
            self._bind(equation.outvars, self._behind_barrier(equation, operands) if name == _BARRIER else operands)
            return Occurrence(self)
        if is_reshape(equation):
            self._bind(equation.outvars, [self._reshaped(equation, operands[0])])
            return Occurrence(self)
        if has_effects(equation) or any(True for _ in inner_jaxprs(equation)):
            # The values are new each time, because a jaxpr may be called from many places with the same variables.
            self._bind(equation.outvars, [self._new() for _ in equation.outvars])
            return Occurrence(self)
        region = self._hoisted(operands, self.numbering.compiler.hoists(equation))
        what = expression(equation)
        number, barrierless = (self.numbering.of(*what, id(region), *side) for side in _sides(operands, region))
        barrierless = number if name in _REDUCTIONS else barrierless
        result = Value(number, barrierless, region, self._captured(equation, operands, what))
        results = region._elements("result", result, len(equation.outvars))
        self._bind(equation.outvars, results)
        self._note_fusion(name, [result, *results], operands)
        return region._computed(result, step) if name in (*_COLLECTIVES, "dot_general") else Occurrence(region)

    def _reshaped(self, equation: Any, value: Value) -> Value:
        """Return the value of a reshape's result, from the value of its operand.

        Compilers merge consecutive reshapes, and remove reshapes that together restore the original shape. Such
        reshapes occur because JAX splits a differentiated shard_map into two parts, one of which passes scalars to the
        other as vectors with one element.
        """
        shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        region = self._hoisted([value])  # hoisted by every compiler, since the size stays the same
        number, barrierless = (self._reshaped_number(side, *shapes) for side in value.numbers_in(region))
        return Value(number, barrierless, region, self._captured(equation, [value]))

    def _reshaped_number(self, number: int, before: tuple, after: tuple) -> int:
        made_by = self.numbering.expressions[number]
        origin, shape = made_by[1:3] if made_by[0] == "reshaped" else (number, before)
        return origin if shape == after else self.numbering.of("reshaped", origin, shape, after)

    def _computed(self, result: Value, step: StepKey) -> Occurrence:
        """Make a collective or product available in this region, under the name of the step that computes it.

        Args:
            result: the value of the collective or product.
            step: the step that computes it.

        Returns:
            This region, and the earlier step that has already computed an equal value.
        """
        number, barrierless, available = result.number, result.barrierless, self._available
        first = available.get(number, available.get(barrierless))
        if_fused = number not in available and barrierless in self.numbering.if_fused
        if first and (if_fused or any(region._is_uncertain for region in self.ancestors())):
            self.numbering.uncertain.add((first, step))
        available.setdefault(number, step)
        available.setdefault(barrierless, step)
        return Occurrence(self, first)

    def _note_fusion(self, primitive: str, results: Sequence[Value], operands: Sequence[Value]) -> None:
        """Record those results of an operation that are merged with equal values only if both are fused alike.

        Such results become equal to other values only after the compiler expands optimization barriers.
        """
        is_fused = primitive not in (*_COLLECTIVES, "dot_general")
        noted = self.numbering.if_fused
        if is_fused or any(value.number != value.barrierless and value.barrierless in noted for value in operands):
            noted.update(value.barrierless for value in results if value.number != value.barrierless)

    def _behind_barrier(self, equation: Any, values: Sequence[Value]) -> list[Value]:
        """Return values as they are after an optimization barrier.

        Each value becomes available only when all values of the barrier are available. Two barriers of the same values
        count as one barrier, because every compiler eliminates the second as a common subexpression.
        """
        region = self._hoisted(values)
        number = self.numbering.of(_BARRIER, id(region), *_sides(values, region)[0])
        results = region._elements(
            "result", Value(number, number, region, self._captured(equation, values)), len(values)
        )
        if not self.numbering.compiler.merges_across_barriers:
            return results
        return [one._replace(barrierless=value.numbers_in(region)[1]) for one, value in zip(results, values)]

    def _hoisted(self, operands: Sequence[Value], hoists: bool = True) -> "Region":
        """Return the region in which an operation runs after hoisting.

        A loop-invariant operation is hoisted out of the innermost loop. XLA:CPU hoists it out of all loops in which all
        its operands are invariant.

        Args:
            operands: the operands of the operation.
            hoists: whether the compiler hoists such an operation at all.
        """
        needed, region = max((value.region.depth for value in operands), default=0), self
        all_loops = self.numbering.compiler.is_host
        while hoists and region.is_loop and region.depth > needed and (region is self or all_loops):
            if region.parent is None:
                break
            region = region.parent
        return region

    # -- values --------------------------------------------------------------------------------------------------------

    def number_of(self, var: Any, region: "Region") -> int:
        """Return the value number that an operation in `region` uses for a variable of this region.

        Args:
            var: the variable.
            region: a region that contains this region.
        """
        return self._value(var).numbers_in(region)[0]

    def _value(self, var: Any) -> Value:
        if isinstance(var, Literal):
            number = self.numbering.of("literal", *literal(var))
            return Value(number, number, [*self.ancestors()][-1], number)
        if var not in self._values:
            number = self.numbering.of("outer", id(var))
            self._values[var] = Value(number, number, self, number)
        return self._values[var]

    def _bind(self, variables: Sequence[Any], values: Sequence[Value]) -> None:
        self._values.update(zip(variables, values))

    def _new(self) -> Value:
        """Return a new value, which is not equal to any other value."""
        number = self.numbering.of("new", len(self.numbering.expressions))
        return Value(number, number, self, number)

    def _captured(self, equation: Any, operands: Sequence[Value], what: tuple[str, str] | None = None) -> int:
        """Return the value number of an operation's result before any common subexpressions are eliminated.

        Outside of planned programs, JAX itself lowers equal operations to one operation. Inside a planned program, each
        call has separate operations.
        """
        call = self.numbering.calls[-1]
        if call is not None:
            return self.numbering.of("captured", call, id(equation))
        return self.numbering.of("captured", *(what or expression(equation)), *(value.captured for value in operands))

    def _elements(self, what: str, whole: Value, count: int) -> list[Value]:
        """Return the parts of a value: the results of an operation, or the carried values in one iteration of a loop.

        Args:
            what: the kind of parts, "result" or "carried".
            whole: the value that represents the operation or loop as a whole.
            count: number of parts.
        """
        numbers = (whole.number, whole.barrierless, whole.captured)
        sides = zip(*([self.numbering.of(what, one, place) for place in range(count)] for one in numbers))
        return [Value(number, barrierless, self, captured) for number, barrierless, captured in sides]


_contents: dict[int, tuple[weakref.ref, bytes]] = {}  # hashes of living arrays, by identity


def _content(array: Any, dtype: Any) -> bytes:
    """Return a hash of the contents of an array.

    The hash of a JAX array is kept as long as the array exists, because a JAX array is immutable.
    """
    key = id(array)
    if key in _contents and _contents[key][0]() is array:
        return _contents[key][1]
    is_random = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    numbers = np.ascontiguousarray(jax.random.key_data(array) if is_random else array)
    content = sha256(numbers.reshape(-1).view(np.uint8).data).digest()  # without a copy
    if isinstance(array, jax.Array):
        _contents[key] = weakref.ref(array, lambda _: _contents.pop(key, None)), content
    return content


def _sides(operands: Sequence[Value], region: Region) -> list[tuple[int, ...]]:
    """Return two tuples, each with one value number per operand of an operation in the given region.

    `Value.numbers_in` returns two numbers for each operand: the first tuple has the first numbers, and the second tuple
    has the second numbers.
    """
    seen = [value.numbers_in(region) for value in operands]
    return [tuple(pair[side] for pair in seen) for side in (0, 1)]
