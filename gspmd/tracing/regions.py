"""Regions of a program, and the values, collectives and products that are available in each.

A region is a program without the bodies of its loops and conditionals, which are regions of their own. So the
operations of a region run one after the other. See `gspmd.tracing.value_numbering`.
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
"""Operations that compilers remove, by their primitives; `name` is the primitive of `checkpoint_name`."""

_LOOPS = ("scan", "while")


class Value(NamedTuple):
    """A value of a program, by the value numbers that it has at three moments of compilation.

    Attributes:
        number: its number after common subexpression elimination.
        barrierless: its number after optimization barriers are expanded and subexpressions are eliminated again, if the
            compiler does so; otherwise `number`.
        region: the outermost region in which the value is available.
        captured: its number before either elimination, when values from outside become operands of loops. If two
            operands of a loop become equal later, they are still two values inside the loop.
    """

    number: int
    barrierless: int
    region: "Region"
    captured: int

    def numbers_in(self, region: "Region") -> tuple[int, int]:
        """Return `number` and `barrierless` as an operation in this region sees them."""
        inside = region.depth > self.region.depth
        return (self.captured, self.captured) if inside else (self.number, self.barrierless)


class Occurrence(NamedTuple):
    """The region in which an operation runs after hoisting, and the earlier step, if any, with the same value there."""

    region: "Region"
    first: StepKey | None = None


class Region:
    """A program, or the body of one of its loops or conditionals, with the values that are available in it.

    Args:
        numbering: the value numbers of the whole program.
        parent: the region around this one.
        length: the number of trips of the loop whose body this is, for each run of the loop.
        is_loop: whether this is the body of a loop, rather than a branch of a conditional.
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
        """Yield this region, the region around it, and so on to the whole program."""
        yield self
        if self.parent:
            yield from self.parent.ancestors()

    # -- calls and loops -----------------------------------------------------------------------------------------------

    def enter(self, equation: Any, inner: Jaxpr) -> "Region":
        """Return the region of a called program, which is this region if the program runs exactly once."""
        operands = [self._value(var) for var in equation.invars]
        call = self._call(equation, operands)
        region = self._entered(equation, inner, operands)
        region.bind_constants(constants_of(equation, inner))
        self.numbering.calls.append(call)
        return region

    def bind_constants(self, constants: Iterable[tuple[Any, Any]]) -> None:
        """Bind the constants of a program, given as pairs of a variable and an array; equal arrays are one value.

        An array that a function closes over is a constant of the program once for each use, and every compiler merges
        constants of the same type and content.
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
        """Bind the results of a called program to the values that they have inside it."""
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
        """Return a value number that identifies this call within a planned program, or None outside of one."""
        around, number = self.numbering.calls[-1], self.numbering.of
        if around is not None and equation.primitive.name in _LOOPS:
            return number("in", self._loop(equation, operands).barrierless)
        if around is not None:
            return number("in", around, id(equation))
        if equation.primitive.name == "shard_map":
            return number("in", id(equation.params["jaxpr"]), *(value.captured for value in operands))
        return None

    def _loop_body(self, equation: Any, inner: Jaxpr, operands: Sequence[Value]) -> "Region":
        """Return the region of a loop's body, with its invariants bound: constants, and carries that stay unchanged."""
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
        """Return a loop or a conditional as a value; two loops with the same body and operands are equal."""
        region = self._region_of_call(equation)
        if equation.primitive.name not in _LOOPS or has_effects(equation):
            return region._new()
        what = expression(equation)
        number, barrierless = (self.numbering.of(*what, id(region), *side) for side in _sides(operands, region))
        return Value(number, barrierless, region, barrierless)

    def _region_of_call(self, equation: Any) -> "Region":
        """Return the region in which a loop or a conditional runs as a whole."""
        hoists = equation.primitive.name in _LOOPS or self.numbering.compiler.is_host
        return self._hoisted([self._value(var) for var in equation.invars], hoists and not has_effects(equation))

    def _recomputed(self, equation: Any, operands: list[Value]) -> list[Value]:
        """Return the operands of a call; if a backward pass recomputes it, they are behind an optimization barrier."""
        kept = equation.params.get("prevent_cse", False) if equation.primitive.name in RECOMPUTED else False
        each = (kept,) * len(operands) if isinstance(kept, bool) else kept
        waits = [one and equation.params["differentiated"] for one in each]
        behind = iter(self._behind_barrier(equation, [value for value, wait in zip(operands, waits) if wait]))
        return [next(behind) if wait else value for value, wait in zip(operands, waits)]

    def _across(self, equation: Any, side: str, values: Sequence[Value]) -> list[Value]:
        """Return operands as they are inside a call, or results as they are outside.

        A shard_map turns arrays into shards, or back, by their specs.
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
        """Number the results of an operation in a step; return where it runs and which step has computed it before."""
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
        """Return the value of a reshape of a value.

        A compiler merges consecutive reshapes, and drops them if they restore the original shape. JAX itself reshapes
        scalars: one half of a differentiated shard_map passes them to the other half as vectors with one element.
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
        """Make a collective or a product available; if it already is, return the step that has computed it."""
        number, barrierless, available = result.number, result.barrierless, self._available
        first = available.get(number, available.get(barrierless))
        if_fused = number not in available and barrierless in self.numbering.if_fused
        if first and (if_fused or any(region._is_uncertain for region in self.ancestors())):
            self.numbering.uncertain.add((first, step))
        available.setdefault(number, step)
        available.setdefault(barrierless, step)
        return Occurrence(self, first)

    def _note_fusion(self, primitive: str, results: Sequence[Value], operands: Sequence[Value]) -> None:
        """Record results that are equal after barriers are expanded, but only if the compiler fused them alike."""
        is_fused = primitive not in (*_COLLECTIVES, "dot_general")
        noted = self.numbering.if_fused
        if is_fused or any(value.number != value.barrierless and value.barrierless in noted for value in operands):
            noted.update(value.barrierless for value in results if value.number != value.barrierless)

    def _behind_barrier(self, equation: Any, values: Sequence[Value]) -> list[Value]:
        """Return the values after an optimization barrier; each becomes available only when all are.

        Two barriers of the same values are one: every compiler eliminates the second as a common subexpression.
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
        """Return the region in which an operation runs: outside the loops in which all its operands are invariant."""
        needed, region = max((value.region.depth for value in operands), default=0), self
        all_loops = self.numbering.compiler.is_host
        while hoists and region.is_loop and region.depth > needed and (region is self or all_loops):
            if region.parent is None:
                break
            region = region.parent
        return region

    # -- values --------------------------------------------------------------------------------------------------------

    def number_of(self, var: Any, region: "Region") -> int:
        """Return the value number of a variable of this region, as an operation in a region around it sees it."""
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
        """Return a value that equals no other value."""
        number = self.numbering.of("new", len(self.numbering.expressions))
        return Value(number, number, self, number)

    def _captured(self, equation: Any, operands: Sequence[Value], what: tuple[str, str] | None = None) -> int:
        """Return the value number of an operation's result before any subexpressions are eliminated.

        Outside of planned programs JAX itself lowers equal operations to one; inside them every call has its own
        operations.
        """
        call = self.numbering.calls[-1]
        if call is not None:
            return self.numbering.of("captured", call, id(equation))
        return self.numbering.of("captured", *(what or expression(equation)), *(value.captured for value in operands))

    def _elements(self, what: str, whole: Value, count: int) -> list[Value]:
        """Return the results of an operation, or the carries of a loop in one trip, as values."""
        numbers = (whole.number, whole.barrierless, whole.captured)
        sides = zip(*([self.numbering.of(what, one, place) for place in range(count)] for one in numbers))
        return [Value(number, barrierless, self, captured) for number, barrierless, captured in sides]


_contents: dict[int, tuple[weakref.ref, bytes]] = {}  # hashes of living arrays, by identity


def _content(array: Any, dtype: Any) -> bytes:
    """Return a hash of an array's contents; for a JAX array, which is immutable, it is kept as long as the array."""
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
    """Return the `number` of each operand, and then the `barrierless` of each, as this region sees them."""
    seen = [value.numbers_in(region) for value in operands]
    return [tuple(pair[side] for pair in seen) for side in (0, 1)]
