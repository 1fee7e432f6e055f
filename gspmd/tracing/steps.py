"""What is really there under the named scopes of a planned program: bytes, operations, and what is sent again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

from gspmd.hardware.links import wire_bytes
from gspmd.lowerings.scopes import step_numbers
from gspmd.planner.steps import Step
from gspmd.tracing.value_numbering import Asker, Values, inner_jaxprs

_COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "pmax", "all_to_all", "ppermute")
_DTYPES = (("bool", "pred"), ("complex", "c"), ("float", "f"), ("uint", "u"), ("int", "s"), ("_", ""))


@dataclass(frozen=True)
class Found:
    """What is there under a step's scope.

    Attributes:
        buffer: bytes of the larger side of its largest collective, on one device.
        flops: operations of its products, but for those that have been made before.
        dtype: what that collective sends, as HLO names it.
        first: who has made that collective before, or, without one, a product, if somebody has.
        permuted: what its permutes send that nobody has sent before: a looped step has nothing else.
        again: what its permutes send again, by who has sent it before.
    """

    buffer: int = 0
    flops: int = 0
    dtype: str = ""
    first: Asker | None = None
    permuted: int = 0
    again: Mapping[Asker, int] = field(default_factory=lambda: MappingProxyType({}))

    def __add__(self, other: "Found") -> "Found":
        larger = max(self, other, key=lambda found: (found.buffer, found.first is not None))
        again = {asker: self.again.get(asker, 0) + other.again.get(asker, 0) for asker in {**self.again, **other.again}}
        permuted = self.permuted + other.permuted
        return replace(larger, flops=self.flops + other.flops, permuted=permuted, again=again)

    @property
    def tells(self) -> bool:
        """Whether there is a collective or a product in it."""
        return bool(self.buffer or self.flops or self.first)

    def times(self, trips: int) -> "Found":
        """The same in a loop; a collective that is no ring's stands in none."""
        again = {asker: sent * trips for asker, sent in self.again.items()}
        return replace(self, flops=self.flops * trips, permuted=self.permuted * trips, again=again)

    def as_run(self, step: Step, mesh: Mapping[str, int]) -> Iterator[tuple[Step, Asker | None]]:
        """The step with the figures of what is there: under vmap more than was planned for one example.

        A looped step is the permutes that it is made of: those of its own, and, for everybody who has sent some of them
        before, those.
        """
        permutes = {None: self.permuted, **self.again}
        if any(permutes.values()):
            yield from ((_sending(step, sent), first) for first, sent in permutes.items() if sent)
        elif step.kind == "einsum":
            yield self._multiplied(step), None if self.flops else self.first
        else:
            group = prod(mesh.get(axis, 1) for axis in step.axes)
            yield _with_bytes(step, wire_bytes(step.kind, group, self.buffer)), self.first

    def _multiplied(self, step: Step) -> Step:
        flops = self.flops
        return replace(step, flops=flops, seconds=step.seconds * flops / step.flops) if flops and step.flops else step


def _sending(step: Step, permuted: int) -> Step:
    return _with_bytes(replace(step, kind="collective-permute"), permuted)


def _with_bytes(step: Step, sent: int) -> Step:
    return replace(step, wire_bytes=sent, seconds=step.seconds * sent / step.wire_bytes) if step.wire_bytes else step


def scoped(equation: Any, values: Values, name: str) -> dict[tuple[int, int], Found]:
    """By the numbers of the steps whose scope is there, and how often they run: what is found under each.

    A step of which a part is taken out of the loop around it is there more than once.

    Args:
        equation: a call in a jaxpr.
        values: those of the program around it.
        name: the planned equation that it belongs to.
    """
    around = {*values.outwards()}
    found: dict[tuple[int, int], Found] = {}
    for number, home, part in _parts(equation, values, name):
        base = next(each for each in home.outwards() if each in around)  # a ring has loops of its own
        key = number, base.trips
        found[key] = found.get(key, Found()) + part.times(home.trips // base.trips)
    most = dict(sorted(found))
    telling = {key: part for key, part in found.items() if part.tells}
    told = {number for number, _ in telling}
    return {**{key: found[key] for key in most.items() if key[0] not in told}, **telling}


def _parts(equation: Any, values: Values, name: str) -> Iterator[tuple[int, Values, Found]]:
    """The operations of a call that have a step's scope: its number, and where each runs."""
    for inner in inner_jaxprs(equation):
        known = values.enter(equation, inner)
        for each in inner.eqns:
            numbers = step_numbers(str(each.source_info.name_stack))
            made = known.make(each, (name, int(numbers[-1])) if numbers else ("", 0))
            if numbers:
                yield int(numbers[-1]), made.home, _alone(each, made.first)
            yield from _parts(each, known, name)
        values.leave(equation, inner)


def _alone(equation: Any, first: Asker | None) -> Found:
    """What one operation is."""
    buffer, flops, dtype = _buffer(equation), 0 if first else _dot_flops(equation), _dtype(equation)
    if equation.primitive.name != "ppermute":
        return Found(buffer, flops, dtype, first)
    return Found(buffer, flops, dtype, first, 0 if first else buffer, {first: buffer} if first else {})


def _buffer(equation: Any) -> int:
    """Bytes of the larger side of a collective, on one device."""
    if equation.primitive.name not in _COLLECTIVES:
        return 0
    sides = ([v.aval for v in equation.invars], [v.aval for v in equation.outvars])
    return max(sum(aval.size * aval.dtype.itemsize for aval in side) for side in sides)


def _dtype(equation: Any) -> str:
    """What a collective sends, as HLO names it."""
    if equation.primitive.name not in _COLLECTIVES:
        return ""
    return hlo_name(equation.invars[0].aval.dtype.name)


def hlo_name(name: str) -> str:
    """HLO's name of a dtype.

    >>> hlo_name("bfloat16"), hlo_name("int32")
    ('bf16', 's32')
    """
    for jax_name, hlo_name in _DTYPES:
        name = name.replace(jax_name, hlo_name)
    return name


def _dot_flops(equation: Any) -> int:
    if equation.primitive.name != "dot_general":
        return 0
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return (2 if contracted else 1) * equation.outvars[0].aval.size * prod(shape[d] for d in contracted)
