"""The planned steps that remain in a traced program, with the bytes and FLOPs of the operations in their scopes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

from jax.extend.core import Literal

from gspmd.hardware.links import wire_bytes
from gspmd.lowerings.local_einsum import ONE_ROW
from gspmd.lowerings.scopes import step_numbers
from gspmd.planner.steps import Step
from gspmd.tracing.jaxprs import inner_jaxprs
from gspmd.tracing.regions import Region
from gspmd.tracing.value_numbering import StepKey

_COLLECTIVES = ("all_gather", "reduce_scatter", "psum", "pmax", "all_to_all", "ppermute")
_HLO_NAMES = (("bool", "pred"), ("complex", "c"), ("float", "f"), ("uint", "u"), ("int", "s"), ("_", ""))


def step_number(equation: Any) -> int | None:
    """Return the number of the innermost step whose named scope contains an operation, or None if there is no step."""
    numbers = step_numbers(str(equation.source_info.name_stack))
    return numbers[-1] if numbers else None


@dataclass(frozen=True)
class TracedStep:
    """A summary of the operations in the named scope of one planned step.

    The sum `a + b` is the summary of the operations of both `a` and `b`.

    Attributes:
        buffer: bytes that the step's largest collective reads or writes on one device, whichever are more.
        flops: FLOPs of the step's products, without products that an earlier step has already computed.
        dtype: the dtype that the largest collective sends, as HLO names it.
        itemsize: bytes per element of this dtype.
        first: the earlier step that has already run the same collective, or the same product if there is no collective.
            None if there is no such step.
        permuted: bytes of the permutes that only this step sends. The collectives of a looped step are permutes.
        again: bytes of the step's remaining permutes, indexed by the earlier step that has already sent the same data.
    """

    buffer: int = 0
    flops: int = 0
    dtype: str = ""
    itemsize: int = 0
    first: StepKey | None = None
    permuted: int = 0
    again: Mapping[StepKey, int] = field(default_factory=lambda: MappingProxyType({}))

    def __add__(self, other: "TracedStep") -> "TracedStep":
        larger = max(self, other, key=lambda each: (each.buffer, each.first is not None))
        again = {step: self.again.get(step, 0) + other.again.get(step, 0) for step in {**self.again, **other.again}}
        permuted = self.permuted + other.permuted
        return replace(larger, flops=self.flops + other.flops, permuted=permuted, again=again)

    @property
    def is_empty(self) -> bool:
        """Whether the step has no collective and no product."""
        return not (self.buffer or self.flops or self.first)

    def times(self, trips: int) -> "TracedStep":
        """Return the summary of all iterations of a loop, where `self` is the summary of one iteration.

        The loop may contain only permutes and products.
        """
        again = {step: sent * trips for step, sent in self.again.items()}
        return replace(self, flops=self.flops * trips, permuted=self.permuted * trips, again=again)

    def in_dtype(self, dtype: Any) -> "TracedStep":
        """Return the summary with the collective in a different dtype, or unchanged if `dtype` is None."""
        if dtype is None or not self.dtype:
            return self
        name = hlo_name(dtype.name)
        return replace(self, dtype=name, buffer=self.buffer * dtype.itemsize // self.itemsize)

    def as_executed(self, step: Step, mesh: Mapping[str, int]) -> Iterator[tuple[Step, StepKey | None]]:
        """Yield a planned step with the traced bytes and FLOPs, paired with the earlier step whose result it uses.

        The second element of the pair is None if there is no such earlier step. Under vmap, the traced amounts are
        larger than the planned amounts, because a plan is for one example. For a looped step, several pairs may be
        yielded. One pair has the permutes that only this step sends. Each of the other pairs has the permutes whose
        data a certain earlier step has already sent.

        Args:
            step: the planned step.
            mesh: sizes of the mesh axes.
        """
        permutes: list[tuple[int, StepKey | None]] = [(self.permuted, None)]
        permutes += [(sent, first) for first, sent in self.again.items()]
        if any(sent for sent, _ in permutes):
            permute = replace(step, kind="collective-permute")
            yield from ((_with_bytes(permute, sent), first) for sent, first in permutes if sent)
        elif step.kind == "einsum":
            yield _with_flops(step, self.flops), None if self.flops else self.first
        else:
            group = prod(mesh.get(axis, 1) for axis in step.axes)
            yield _with_bytes(step, wire_bytes(step.kind, group, self.buffer)), self.first


def _with_bytes(step: Step, sent: int) -> Step:
    return replace(step, wire_bytes=sent, seconds=step.seconds * sent / step.wire_bytes) if step.wire_bytes else step


def _with_flops(step: Step, flops: int) -> Step:
    return replace(step, flops=flops, seconds=step.seconds * flops / step.flops) if flops and step.flops else step


def traced_steps(call: Any, region: Region, equation: str) -> dict[tuple[int, int], TracedStep]:
    """Return the steps of one planned program, indexed by (number of the step, number of times that it runs).

    If the compiler hoists a part of a step out of the loop around the program, the step has several entries.

    Args:
        call: the equation that calls the program in the surrounding jaxpr.
        region: the region of the call.
        equation: the planned equation that the program computes.
    """
    around = {*region.ancestors()}
    found: dict[tuple[int, int], TracedStep] = {}
    for number, home, part in _operations(call, region, equation):
        outside = next(each for each in home.ancestors() if each in around)  # a looped step contains loops
        key = number, outside.trips
        found[key] = found.get(key, TracedStep()) + part.times(home.trips // outside.trips)
    working = {key: step for key, step in found.items() if not step.is_empty}
    numbers = {number for number, _ in working}
    empty = dict(sorted(key for key in found if key[0] not in numbers))  # the entry that runs most often
    return {**{key: found[key] for key in empty.items()}, **working}


def _operations(call: Any, region: Region, equation: str) -> Iterator[tuple[int, Region, TracedStep]]:
    """Yield (number of the step, region, summary of the operation) for each operation in a step of a program.

    The region is the region in which the operation runs after hoisting.
    """
    for program in inner_jaxprs(call):
        inside = region.enter(call, program)
        for each in program.eqns:
            number = step_number(each)
            placed = inside.visit(each, ("", 0) if number is None else (equation, number))
            # Operations that read nothing, such as an iota of rows, do not count for the step: JAX may hoist them
            # alone.
            if number is not None and any(not isinstance(var, Literal) for var in each.invars):
                yield number, placed.region, _operation(each, placed.first)
            yield from _operations(each, inside, equation)
        region.leave(call, program)


def _operation(equation: Any, first: StepKey | None) -> TracedStep:
    """Return the summary of one operation.

    Args:
        equation: the operation.
        first: the earlier step that has already computed the same collective or product, or None.
    """
    buffer, dtype, itemsize = 0, "", 0
    if equation.primitive.name in _COLLECTIVES:
        sides = ([var.aval for var in side] for side in (equation.invars, equation.outvars))
        buffer = max(sum(aval.size * aval.dtype.itemsize for aval in side) for side in sides)
        dtype, itemsize = hlo_name(equation.invars[0].aval.dtype.name), equation.invars[0].aval.dtype.itemsize
    flops = 0 if first else _dot_flops(equation)
    if equation.primitive.name != "ppermute":
        return TracedStep(buffer, flops, dtype, itemsize, first)
    return TracedStep(buffer, flops, dtype, itemsize, first, 0 if first else buffer, {first: buffer} if first else {})


def hlo_name(name: str) -> str:
    """Return HLO's name for a dtype of JAX.

    >>> hlo_name("bfloat16"), hlo_name("int32")
    ('bf16', 's32')
    """
    for jax_name, short in _HLO_NAMES:
        name = name.replace(jax_name, short)
    return name


def _dot_flops(equation: Any) -> int:
    if equation.primitive.name != "dot_general":
        return 0
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    operations = (2 if contracted else 1) * equation.outvars[0].aval.size * prod(shape[d] for d in contracted)
    return operations // 2 if ONE_ROW in str(equation.source_info.name_stack).split("/") else operations
