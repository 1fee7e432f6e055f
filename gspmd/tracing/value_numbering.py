"""Common moves: a compiler that is told to move the same value in the same way twice moves it once.

Values are numbered as compilers number them: what is worked out in the same way from the same values is the same
value, through calls, recomputation and loops that run once, which XLA unrolls. What does not change from trip to trip
of a loop is worked out before the loop, as far as the compiler goes (`gspmd.tracing.compilers`), and is there the
same value as what stands there already. Loops, branches, what has effects, and optimization barriers make new values.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Literal

from gspmd.lowerings.hoisting import ANEW
from gspmd.tracing.compilers import HOST, Compiler

_REDUCTIONS = ("psum", "pmax")
_MOVES = ("all_gather", "reduce_scatter", "all_to_all", "ppermute", *_REDUCTIONS)
_BARRIER = "optimization_barrier"

_CALLS = ("jit", "pjit", "closed_call", "shard_map", "custom_partitioning")
_CALLS += tuple(f"custom_{kind}_call" for kind in ("jvp", "vjp", "vmap"))
_RECOMPUTED = ("remat2", "checkpoint")
_LOOPS = ("scan", "while")

Asker = tuple[str, int]
"""An equation and the number of its step; ("", 0) is the program's own."""


class Value(NamedTuple):
    """A value of a program.

    Attributes:
        number: the same for what is the same.
        late: the same also for what is the same but for an optimization barrier, if the compiler drops barriers.
        home: the piece of the program from which on it is there.
        own: the same for what was the same before loops got what they need from outside, each value by itself: in a
            loop, two values from outside that have become the same since are two.
    """

    number: int
    late: int
    home: "Values"
    own: int

    def seen_from(self, home: "Values") -> tuple[int, int]:
        """Its `number` and `late` in a piece of the program."""
        return (self.number, self.late) if home.depth <= self.home.depth else (self.own, self.own)


class Made(NamedTuple):
    """Where an operation runs in the end, and who has made this very collective there before, if somebody has."""

    home: "Values"
    first: Asker | None = None


class Values:
    """The values of one straight piece of a program, and the collectives that it has made of them.

    Args:
        compiler: of the program; of the piece around this one, if there is one.
        around: the piece that runs this one in a loop or a branch.
        length: how often the loop around it runs, each time that it is reached.
        is_loop: whether this is a loop's body, rather than a branch.
    """

    def __init__(
        self, compiler: Compiler = HOST, around: "Values | None" = None, length: int = 1, is_loop: bool = False
    ):
        self.compiler, self.around, self.is_loop = around.compiler if around else compiler, around, is_loop
        self.depth = around.depth + 1 if around else 0
        self.trips = length * (around.trips if around else 1)
        self._numbers: dict[Hashable, int] = around._numbers if around else {}
        self._origins: list[Hashable] = around._origins if around else []
        self._calls: list[int | None] = around._calls if around else [None]
        self._known: dict[Any, Value] = {}
        self._moved: dict[int, Asker] = {}
        self._bodies: dict[int, Values] = {}
        self._loops: set[int] = set()
        self._doubtful: set[int] = around._doubtful if around else set()
        self.doubts: set[tuple[Asker, Asker]] = around.doubts if around else set()
        self.doubted = False

    # -- through calls -------------------------------------------------------------------------------------------------

    def enter(self, equation: Any, inner: Jaxpr) -> "Values":
        """The values with which a called program begins: the caller's own where it runs exactly once, else others."""
        held = [self._of(var) for var in equation.invars]
        call = self._call(equation, held)
        values = self._entered(equation, inner, held)
        self._calls.append(call)
        return values

    def _entered(self, equation: Any, inner: Jaxpr, held: list[Value]) -> "Values":
        if self._is_call(equation, inner):
            self._know(inner.invars, self._across(equation, "in_specs", self._recomputed(equation, held)))
            return self
        if _runs_once(equation):
            pairs = zip(equation.invars, inner.invars, held)
            self._know(inner.invars, [self._only(value) if _is_stack(var, one) else value for var, one, value in pairs])
            return self
        if equation.primitive.name in _LOOPS:
            return self._loop(equation, inner, held)
        return Values(around=self._home_of_call(equation))

    def _call(self, equation: Any, held: list[Value]) -> int | None:
        """Which call inside a planned program this is; None outside, where equal values are one from the start."""
        around = self._calls[-1]
        if around is not None and equation.primitive.name in _LOOPS:
            return self._number(("in", self._loop_of(equation, held).late))
        if around is not None:
            return self._number(("in", around, id(equation)))
        if equation.primitive.name == "shard_map":
            return self._number(("in", id(equation.params["jaxpr"]), *(value.own for value in held)))
        return None

    def leave(self, equation: Any, inner: Jaxpr) -> None:
        """Know a called program's results by what they are inside."""
        self._calls.pop()
        if self._is_call(equation, inner) and len(equation.outvars) == len(inner.outvars):
            self._know(equation.outvars, self._across(equation, "out_specs", [self._of(var) for var in inner.outvars]))
        elif _runs_once(equation):
            pairs = [(var, one, self._of(one)) for var, one in zip(equation.outvars, inner.outvars)]
            self._know(equation.outvars, [self._stack(v) if _is_stack(var, one) else v for var, one, v in pairs])
        else:
            loop = self._loop_of(equation, [self._of(var) for var in equation.invars])
            results = loop.home._parts("result", loop, len(equation.outvars))
            self._know(equation.outvars, results)
            self._doubt(equation.primitive.name, results, ())

    def _loop(self, equation: Any, inner: Jaxpr, held: Sequence[Value]) -> "Values":
        """A loop's body, which knows what is the same in every trip: its constants, and what it carries unchanged."""
        length = equation.params.get("length", 1)  # nobody knows how often a while loop runs
        is_body = equation.primitive.name == "scan" or inner is equation.params["body_jaxpr"].jaxpr
        loop = self._loop_of(equation, held)
        if not is_body:
            return Values(around=loop.home, length=length)
        body = loop.home._bodies.setdefault(loop.late, Values(around=loop.home, length=length, is_loop=True))
        body.doubted = bool(body._loops) and loop.number not in body._loops
        body._loops.add(loop.number)
        held = held[equation.params.get("cond_nconsts", 0) :]
        constants = equation.params["num_consts" if equation.primitive.name == "scan" else "body_nconsts"]
        unchanged = [place < constants or _passed_on(inner, place, constants) for place in range(len(held))]
        changing = body._parts("carried", loop._replace(number=loop.late), len(held))
        body._know(inner.invars, [old if same else new for old, new, same in zip(held, changing, unchanged)])
        return body

    def _loop_of(self, equation: Any, held: Sequence[Value]) -> Value:
        """A loop, or a branch, as a whole: two that do the same with the same values are one."""
        home = self._home_of_call(equation)
        if equation.primitive.name not in _LOOPS or not _has_no_effects(equation):
            return home.new()
        how, own = (*_written(equation), id(home)), self._own(equation, held)
        # Where a device stands is known before all loops, and each loop gets it by itself from the one around it.
        apart = (own,) if home.is_loop and "axis_index" in how[1] else ()
        number, late = (self._number((*how, *apart, *side)) for side in _sides(held, home))
        return Value(number, late, home, late)

    def _own(self, equation: Any, held: Sequence[Value]) -> int:
        """What an operation makes, before the compiler merges what planned programs make."""
        if self._calls[-1] is not None:
            return self._number(("own", self._calls[-1], id(equation)))
        return self._number(("own", *_written(equation), *(value.own for value in held)))

    def _parts(self, what: str, whole: Value, count: int) -> list[Value]:
        """The results of an operation, or what a loop has in one trip."""
        parts = lambda one: [self._number((what, one, place)) for place in range(count)]  # noqa: E731
        sides = zip(parts(whole.number), parts(whole.late), parts(whole.own))
        return [Value(number, late, self, own) for number, late, own in sides]

    def _recomputed(self, equation: Any, held: list[Value]) -> list[Value]:
        """What a call gets: recomputation for a gradient stands behind a barrier that keeps it where it is."""
        kept = equation.params.get("prevent_cse", False) if equation.primitive.name in _RECOMPUTED else False
        behind = [each and equation.params["differentiated"] for each in _each(kept, len(held))]
        waiting = iter(self._behind([value for value, waits in zip(held, behind) if waits]))
        return [next(waiting) if waits else value for value, waits in zip(held, behind)]

    @staticmethod
    def _is_call(equation: Any, inner: Jaxpr) -> bool:
        return equation.primitive.name in (*_CALLS, *_RECOMPUTED) and len(equation.invars) == len(inner.invars)

    # -- operations ----------------------------------------------------------------------------------------------------

    def make(self, equation: Any, asker: Asker = ("", 0)) -> Made:
        """Take note of an operation: where it runs, and who has asked there for this collective of the same value."""
        held = [self._of(var) for var in equation.invars]
        if equation.primitive.name == _BARRIER:
            self._know(equation.outvars, self._behind(held))
            return Made(self)
        if equation.primitive.name == ANEW:  # nothing, for a compiler
            self._know(equation.outvars, held)
            return Made(self)
        if not self._is_pure(equation):
            # A jaxpr may run in many places with the same variables: what it makes is new in each.
            self._know(equation.outvars, [self.new() for _ in equation.outvars])
            return Made(self)
        home = self._home(held, self.compiler.leaves(equation))
        how = *_written(equation), id(home)
        number, late = (self._number((*how, *side)) for side in _sides(held, home))
        late = number if equation.primitive.name in _REDUCTIONS else late
        made = Value(number, late, home, self._own(equation, held))
        results = home._parts("result", made, len(equation.outvars))
        self._know(equation.outvars, results)
        self._doubt(equation.primitive.name, [made, *results], held)
        if equation.primitive.name not in (*_MOVES, "dot_general"):
            return Made(home)
        first = home._moved.get(number, home._moved.get(late))
        if first and (
            (number not in home._moved and late in self._doubtful) or any(one.doubted for one in home.outwards())
        ):
            self.doubts.add((first, asker))
        home._moved.setdefault(number, asker)
        home._moved.setdefault(late, asker)
        return Made(home, first)

    def _doubt(self, primitive: str, made: Sequence[Value], held: Sequence[Value]) -> None:
        """Remember what is the same only if the compiler, once it drops barriers, has fused it alike."""
        fused = primitive not in (*_MOVES, "dot_general")
        if fused or any(value.number != value.late and value.late in self._doubtful for value in held):
            self._doubtful.update(value.late for value in made if value.number != value.late)

    def _behind(self, held: Sequence[Value]) -> list[Value]:
        """Values behind an optimization barrier: none is there before all are."""
        home = self._home(held)
        new = [home.new() for _ in held]
        late = [value.seen_from(home)[1] for value in held]
        return [each._replace(late=one) for each, one in zip(new, late)] if self.compiler.is_host else new

    def _home(self, held: Sequence[Value], leaves: bool = True) -> "Values":
        """The piece in which something runs that needs these values: before the loops in which none of them changes."""
        needed, home = max((value.home.depth for value in held), default=0), self
        while leaves and home.is_loop and home.depth > needed and (home is self or self.compiler.is_host):
            home = home.around
        return home

    def _home_of_call(self, equation: Any) -> "Values":
        """The piece in which a loop or a branch runs as a whole."""
        hoisted = equation.primitive.name in _LOOPS or self.compiler.is_host
        return self._home([self._of(var) for var in equation.invars], hoisted and _has_no_effects(equation))

    def _is_pure(self, equation: Any) -> bool:
        """Whether an operation makes the same of the same: not one that calls programs or has effects."""
        calls = any(True for _ in inner_jaxprs(equation))
        return not calls and _has_no_effects(equation)

    # -- numbers -------------------------------------------------------------------------------------------------------

    def new(self) -> Value:
        """A value that is nobody else's."""
        number = self._number(("new", len(self._numbers)))
        return Value(number, number, self, number)

    def _across(self, equation: Any, side: str, held: Sequence[Value]) -> list[Value]:
        """A call's values on its other side; a device's pieces are those of a value under one spec, and of no other."""
        specs = equation.params.get(side) if equation.primitive.name == "shard_map" else None
        if specs is None:
            return list(held)
        name, reverse = ("piece", "whole") if side == "in_specs" else ("whole", "piece")
        return [self._undone(reverse, name, value, str(spec)) for value, spec in zip(held, specs)]

    def _stack(self, value: Value) -> Value:
        return self._undone("slice", "stack", value)

    def _only(self, stacked: Value) -> Value:
        """The one slice of a value that is a stack of one."""
        return self._undone("stack", "slice", stacked)

    def _undone(self, made: str, name: str, value: Value, *how: str) -> Value:
        """What a value was made of, if it was made in that way, and a new value otherwise."""

        def undone(number: int) -> int:
            origin = self._origins[number]
            same = isinstance(origin, tuple) and origin[0] == made and origin[2:] == how
            return origin[1] if same else self._number((name, number, *how))

        return Value(undone(value.number), undone(value.late), value.home, undone(value.own))

    def _number(self, key: Hashable) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._origins)
            self._origins.append(key)
        return self._numbers[key]

    def _of(self, var: Any) -> Value:
        if isinstance(var, Literal):
            number = self._number(("literal", str(var.aval), repr(var.val)))
            return Value(number, number, [*self.outwards()][-1], number)
        if var not in self._known:
            number = self._number(("outer", id(var)))
            self._known[var] = Value(number, number, self, number)
        return self._known[var]

    def outwards(self) -> Iterator["Values"]:
        """This piece, the one around it, and so on."""
        yield self
        if self.around:
            yield from self.around.outwards()

    def _know(self, variables: Sequence[Any], values: Sequence[Value]) -> None:
        self._known.update(zip(variables, values))


def _sides(held: Sequence[Value], home: Values) -> list[tuple[int, ...]]:
    """The `number` of each value in a piece of the program, and the `late` of each."""
    seen = [value.seen_from(home) for value in held]
    return [tuple(pair[side] for pair in seen) for side in (0, 1)]


def _written(equation: Any) -> tuple[str, str]:
    """What an operation does, whatever order JAX has put its parameters in."""
    return equation.primitive.name, str(sorted(equation.params.items(), key=lambda item: item[0]))


def _each(kept: Any, count: int) -> Sequence[bool]:
    return (kept,) * count if isinstance(kept, bool) else kept


def _passed_on(body: Jaxpr, place: int, constants: int) -> bool:
    """Whether a loop's body returns what it carries as it is."""
    carried = place - constants
    return carried < len(body.outvars) and body.outvars[carried] is body.invars[place]


def _has_no_effects(equation: Any) -> bool:
    return {type(effect).__name__ for effect in equation.effects} <= {"NamedAxisEffect"}


def _is_stack(outer: Any, inner: Any) -> bool:
    """Whether a loop takes or makes a value piece by piece, rather than whole."""
    return len(getattr(outer.aval, "shape", ())) > len(getattr(inner.aval, "shape", ()))


def _runs_once(equation: Any) -> bool:
    return equation.primitive.name == "scan" and equation.params["length"] == 1


def inner_jaxprs(equation: Any) -> Iterator[Jaxpr]:
    """The programs that an operation calls."""
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if isinstance(inner, Jaxpr):
                yield inner
