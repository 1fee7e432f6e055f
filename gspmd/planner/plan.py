"""A plan: what an equation will do on a mesh, before anything runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gspmd.annotate.equation import Equation, Operand, Term
from gspmd.annotate.spec import Spec
from gspmd.display.console import html, printable
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.frozen import FrozenDict
from gspmd.hardware.chips import Chip
from gspmd.hardware.dtypes import joint_dtype, wire_of
from gspmd.planner import routines as planner
from gspmd.planner.drawing import figure
from gspmd.planner.memory import Footprint
from gspmd.planner.overlap import Overlap, kept
from gspmd.planner.record import record
from gspmd.planner.request import pins, refuse_open
from gspmd.planner.steps import Environment, Routine, Step, Tensor

Overlapping = Callable[[Routine, Sequence[Tensor], Sequence[Tensor], Environment], tuple[Overlap, float]]
"""What of a routine overlaps with its einsums, and the seconds that this hides."""


def nothing_overlaps(*_: object) -> tuple[Overlap, float]:
    """One step after the other, as under lowering `blocking`."""
    return Overlap(), 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The steps an equation takes on a mesh of a chip, and what they cost, per device and execution.

    Attributes:
        equation: the parsed equation.
        sizes: dimension sizes of the whole tensors.
        mesh: mesh axis sizes.
        dtypes: dtype of each operand, group members one by one.
        chip: the hardware figures the seconds come from.
        lowering: how it becomes a program: `"xla"`, `"blocking"`, `"looped"` or `"looped:<schedule>"`; of `"auto"`,
            what was cheapest.
        routine: moves, local products and outputs, as `gspmd.einsum` runs them.
        inputs, outputs: the tensors of the operands and of the results.
        via: the pins, as they were written; the gradients of a pinned plan mirror it.
        loops: the gathers and reduce-scatters that run inside an einsum.
        hidden_seconds: how much sooner the steps end for that; below 0, how much later.
        asked: the lowering as it was asked for: of `"auto"`, the gradients decide for themselves.
        overlapping: what the lowering overlaps with the einsums of a routine; the gradients ask it too.
    """

    equation: Equation
    sizes: Mapping[str, int]
    mesh: Mapping[str, int]
    dtypes: tuple[str, ...]
    chip: Chip
    lowering: str
    routine: Routine
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    via: str | None = None
    loops: Overlap = field(default_factory=Overlap)
    hidden_seconds: float = 0.0
    asked: str = "auto"
    overlapping: Overlapping = nothing_overlaps

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step in the order of execution, the local einsums among them."""
        return self.routine.steps

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends."""
        return sum(step.wire_bytes for step in self.steps)

    @property
    def flops(self) -> int:
        """Floating-point operations of one device."""
        return sum(step.flops for step in self.steps)

    @property
    def seconds(self) -> float:
        """Predicted seconds; nothing is overlapped but what `loops` says."""
        return sum(step.seconds for step in self.steps) - self.hidden_seconds

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that one device holds at once: operands, results, and what there is between them.

        Every buffer is counted from the step that makes it to the last that reads it, as XLA lays buffers out on host
        devices. For the chip of the plan it is an estimate; docs/plans.md has how far compiled programs are from it.
        """
        return Footprint(self.routine, self.inputs, self.outputs, self.sizes, self.mesh, self.loops).peak()

    @cached_property
    def backward(self) -> Routine:
        """The routine of all the operands' cotangents together, as it runs."""
        return planner.backward(
            _environment(self), self.routine, self.inputs, self.outputs, self.kept, mirrored=self.via is not None
        )

    @property
    def kept(self) -> tuple[Spec, ...]:
        """The specs in which the moved operands are kept for the backward pass."""
        return kept(self.routine, self.loops)

    @property
    def backward_loops(self) -> Overlap:
        """The rings of the backward routine."""
        return self._looped_backward[0]

    @cached_property
    def _looped_backward(self) -> tuple[Overlap, float]:
        held, targets = planner.backward_tensors(self.routine, self.inputs, self.outputs, self.kept)
        return self.overlapping(self.backward, held, targets, _environment(self))

    @cached_property
    def gradients(self) -> tuple["Plan", ...]:
        """One plan per operand's cotangent. A step that several need stands in the first of them only."""
        claimed: set[int] = set()
        return tuple(_gradient(self, number, claimed) for number in range(len(self.inputs)))

    def to_json(self, *, gradients: bool = True) -> str:
        """The plan as JSON: every figure, per device and execution, and the same of the gradients.

        Keys:
            equation, lowering, dtypes (of the operands), wire_bytes, flops, seconds, hidden_seconds, peak_bytes: as
                the attributes of the same names.
            steps: a list in the order of execution, each with kind, axes, operand, before, other (null but for a
                product of two), after, wire_bytes, flops, seconds.
            mesh, sizes, chip, via: what was asked.
            gradients: a list, one for each operand, each with all keys but those of the line above and this one; empty
                without `gradients`.
        """
        return json.dumps(record(self, gradients=gradients), indent=2)

    def __repr__(self) -> str:
        figures = f"{amount_of_bytes(self.wire_bytes)} sent, {amount_of_seconds(self.seconds)}"
        return printable(f"<Plan {str(self.equation)!r} {figures}>")

    def __str__(self) -> str:
        return printable(figure(self).plain)

    def _repr_html_(self) -> str:
        return html(figure(self))


def _environment(plan: Plan) -> Environment:
    real = tuple((axis, size) for axis, size in plan.mesh.items() if size > 1)
    return Environment(tuple(plan.sizes.items()), real, plan.chip)


def _gradient(whole: Plan, number: int, claimed: set[int]) -> Plan:
    """One operand's part of the backward routine. A move that an earlier gradient made is there, its steps are not.

    What the whole routine hides is shared out by the seconds that each sends.
    """
    back, output = whole.backward, whole.backward.outputs[number]
    products = [back.products[p] for p in output.products]
    needed = list(dict.fromkeys(m for p in products for m in (p.left, p.right) if m is not None))
    moves = [replace(back.moves[m], steps=()) if m in claimed else back.moves[m] for m in needed]
    loops = whole.backward_loops.part([m if m not in claimed else -1 for m in needed], number)
    claimed.update(needed)
    local = [
        replace(p, left=needed.index(p.left), right=None if p.right is None else needed.index(p.right))
        for p in products
    ]
    held, targets = planner.backward_tensors(whole.routine, whole.inputs, whole.outputs, whole.kept)
    sources = [[back.moves[m].source for m in (p.left, p.right) if m is not None] for p in products]
    terms = tuple(Term(tuple(Operand((held[source].spec,)) for source in pair)) for pair in sources)
    output = replace(output, products=tuple(range(len(local))))
    routine = Routine(back.inputs, tuple(moves), tuple(local), (output,))
    return replace(
        whole,
        equation=Equation(terms, (output.spec,)),
        routine=routine,
        dtypes=tuple(held[source].dtype for pair in sources for source in pair),
        inputs=tuple(held),
        outputs=(targets[number],),
        lowering=("looped" if loops else "blocking") if whole.asked == "auto" else whole.lowering,
        loops=loops,
        hidden_seconds=whole._looped_backward[1] * _share(routine, back),
    )


def _share(part: Routine, whole: Routine) -> float:
    """Of the seconds that a routine sends, a part's."""
    sent, of = (sum(step.seconds for step in each.steps if step.is_collective) for each in (part, whole))
    return sent / of if of else 0.0


def plan_equation(
    equation: Equation,
    sizes: tuple[tuple[str, int], ...],
    mesh: tuple[tuple[str, int], ...],
    dtypes: tuple[str, ...],
    chip: Chip,
    lowering: str,
    overlapping: Overlapping,
    via: str | None = None,
    wire_dtype: str | None = None,
    result_dtype: str | None = None,
) -> Plan:
    """Plan an equation whose request is resolved: a lowering by name, and what it overlaps."""
    refuse_open(equation)
    equation.check(dict(sizes), dict(mesh))
    sizes = tuple((dim, size) for dim, size in sizes if any(dim in spec.dims for spec in equation.specs))
    inputs, outputs = tensors(equation, dict(mesh), dtypes, wire_dtype, result_dtype)
    real = tuple((axis, size) for axis, size in mesh if size > 1)
    environment = Environment(sizes, real, chip)
    routine = planner.forward(equation, environment, inputs, outputs, pins(equation, via, dict(sizes), dict(mesh)))
    loops, hidden = overlapping(routine, inputs, outputs, environment)
    chosen = ("looped" if loops else "blocking") if lowering == "auto" else lowering
    return Plan(
        equation,
        FrozenDict(sizes),
        FrozenDict(mesh),
        dtypes,
        chip,
        chosen,
        routine,
        tuple(inputs),
        tuple(outputs),
        via,
        loops,
        hidden,
        asked=lowering,
        overlapping=overlapping,
    )


def tensors(
    equation: Equation, mesh: Mapping[str, int], dtypes: Sequence[str], wire_dtype: str | None, dtype: str | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Operands and results as the planner sees them; each crosses the wire in its own dtype unless told otherwise."""
    flat = [spec for operand in equation.operands for spec in operand.specs]
    names = ["operand"] if len(flat) == 1 else [f"operand {i + 1}" for i in range(len(flat))]
    inputs = [
        Tensor(s.without_trivial(mesh), d, wire_dtype or wire_of(d, summed=bool(s.partial)), n)
        for s, d, n in zip(flat, dtypes, names)
    ]
    dtype = dtype or joint_dtype(equation, dtypes)
    sums = any(spec.partial or set(spec.dims) - set(out.dims) for spec in flat for out in equation.outputs)
    wire = wire_dtype or wire_of(dtype, summed=sums)
    outputs = [Tensor(s.without_trivial(mesh), dtype, wire, "result") for s in equation.outputs]
    return inputs, outputs
