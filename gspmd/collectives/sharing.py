"""Common moves: a compiler that is told to move the same value in the same way twice moves it once.

Values are numbered as compilers number them: what is worked out in the same way from the same values is the same
value, through calls and through loops that run once, which XLA unrolls. Other loops, branches, and what has effects
make new values. So does an optimization barrier, but on host devices: the compiler there drops barriers, then merges.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

_MOVES = ("all_gather", "reduce_scatter", "psum", "pmax", "all_to_all", "ppermute")
_BARRIER = "optimization_barrier"
_HOISTED = ("axis_index", "empty")
"""What does not depend on a loop's trip: compilers work it out before the loop, each occurrence by itself."""

_CALLS = ("jit", "pjit", "closed_call", "shard_map", "custom_partitioning")
_CALLS += tuple(f"custom_{kind}_call" for kind in ("jvp", "vjp", "vmap"))

Asker = tuple[str, int]
"""An equation and the number of its step; ("", 0) is the program's own."""


class Values:
    """The values of one straight piece of a program, and the collectives that it has made of them.

    Args:
        barriers: whether the compiler keeps optimization barriers until equal values are merged.
        looped: whether the piece stands in a loop.
    """

    def __init__(self, barriers: bool = True, looped: bool = False):
        self.barriers, self.looped = barriers, looped
        self._numbers: dict[Hashable, int] = {}
        self._origins: list[Hashable] = []
        self._known: dict[Any, int] = {}
        self._moved: dict[int, Asker] = {}

    def enter(self, equation: Any, inner: Jaxpr) -> "Values":
        """The values with which a called program begins: the caller's own where it runs exactly once, else none."""
        if self._is_call(equation, inner):
            held = [self._of(var) for var in equation.invars]
            self._alias(inner.invars, self._across(equation, "in_specs", held))
            return self
        if _runs_once(equation):
            pairs = zip(equation.invars, inner.invars)
            held = [self._only(self._of(var)) if _is_stack(var, one) else self._of(var) for var, one in pairs]
            self._alias(inner.invars, held)
            return self
        return self.apart(equation)

    def apart(self, equation: Any) -> "Values":
        """The values with which a program that an operation calls begins, if it shares none with what is around it."""
        return Values(self.barriers, self.looped or equation.primitive.name in ("scan", "while"))

    def leave(self, equation: Any, inner: Jaxpr) -> None:
        """Know a called program's results by what they are inside."""
        if self._is_call(equation, inner) and len(equation.outvars) == len(inner.outvars):
            self._alias(equation.outvars, self._across(equation, "out_specs", [self._of(var) for var in inner.outvars]))
        elif _runs_once(equation):
            pairs = [(var, one, self._of(one)) for var, one in zip(equation.outvars, inner.outvars)]
            held = [self._number(("stack", n)) if _is_stack(var, one) else n for var, one, n in pairs]
            self._alias(equation.outvars, held)

    def first(self, equation: Any, asker: Asker = ("", 0)) -> Asker | None:
        """Take note of an operation; who has asked for this very collective of the same value, if somebody has."""
        if equation.primitive.name == _BARRIER and not self.barriers:
            self._alias(equation.outvars, [self._of(var) for var in equation.invars])
            return None
        if not self._is_pure(equation):
            # A jaxpr may run in many places with the same variables: what it makes is new in each.
            self._alias(equation.outvars, [self._number(("new", len(self._numbers))) for _ in equation.outvars])
            return None
        key = (equation.primitive.name, str(equation.params), *(self._of(var) for var in equation.invars))
        number = self._number(key)
        self._alias(equation.outvars, [self._number((number, place)) for place in range(len(equation.outvars))])
        if equation.primitive.name not in _MOVES:
            return None
        earlier = self._moved.get(number)
        self._moved.setdefault(number, asker)
        return earlier

    def _is_pure(self, equation: Any) -> bool:
        """Whether an operation makes the same of the same: not one that calls programs or has effects."""
        effects = {type(effect).__name__ for effect in equation.effects}
        calls = any(True for _ in inner_jaxprs(equation))
        hoisted = self.looped and equation.primitive.name in _HOISTED
        return not calls and not hoisted and effects <= {"NamedAxisEffect"} and equation.primitive.name != _BARRIER

    @staticmethod
    def _is_call(equation: Any, inner: Jaxpr) -> bool:
        return equation.primitive.name in _CALLS and len(equation.invars) == len(inner.invars)

    def _across(self, equation: Any, side: str, held: Sequence[int]) -> list[int]:
        """A call's values on its other side; a device's pieces are those of a value under one spec, and of no other."""
        specs = equation.params.get(side) if equation.primitive.name == "shard_map" else None
        if specs is None:
            return list(held)
        name, reverse = ("piece", "whole") if side == "in_specs" else ("whole", "piece")
        return [self._undone(reverse, name, number, str(spec)) for number, spec in zip(held, specs)]

    def _only(self, stacked: int) -> int:
        """The one slice of a value that is a stack of one."""
        return self._undone("stack", "slice", stacked)

    def _undone(self, made: str, name: str, number: int, *how: str) -> int:
        """What a value was made of, if it was made in that way, and a new value otherwise."""
        origin = self._origins[number]
        same = isinstance(origin, tuple) and origin[0] == made and origin[2:] == how
        return origin[1] if same else self._number((name, number, *how))

    def _number(self, key: Hashable) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._origins)
            self._origins.append(key)
        return self._numbers[key]

    def _of(self, var: Any) -> int:
        if isinstance(var, Literal):
            return self._number(("literal", str(var.aval), repr(var.val)))
        return self._known[var] if var in self._known else self._number(("outer", id(var)))

    def _alias(self, variables: Sequence[Any], numbers: Sequence[int]) -> None:
        self._known.update((var, number) for var, number in zip(variables, numbers))


def barriers_hold() -> bool:
    """Whether the devices in force have a compiler that merges equal values first, and drops barriers then."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is None or device.device_kind != "cpu"


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
