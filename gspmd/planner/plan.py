"""A plan: the steps that an equation takes on a mesh, and their costs, before anything runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from gspmd.annotate.equation import Equation, Via
from gspmd.annotate.errors import PlanError, SpecError, shown
from gspmd.annotate.spec import Spec
from gspmd.frozen import FrozenDict
from gspmd.hardware.chips import Chip
from gspmd.hardware.dtypes import joint_dtype, wire_of
from gspmd.planner.overlap import Overlap, kept
from gspmd.planner.routines import plan_routine, ranked_routines
from gspmd.planner.steps import Environment, Routine, Step, Tensor

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure

Overlapping = Callable[[Routine, Sequence[Tensor], Sequence[Tensor], Environment], tuple[Overlap, float]]
"""A function that chooses the collectives of a routine that overlap with einsums, and predicts the seconds saved."""


def nothing_overlaps(*_: object) -> tuple[Overlap, float]:
    """Choose no collectives to overlap with einsums, as under lowering `blocking`."""
    return Overlap(), 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The steps that an equation takes on a mesh of chips, with their costs per device and execution.

    Attributes:
        equation: the parsed equation.
        sizes: dimension sizes of the whole tensors.
        mesh: mesh axis sizes.
        dtypes: dtype of each operand, where every member of a group counts as an operand.
        chip: the chip whose figures determine the seconds.
        lowering: `"xla"`, `"blocking"`, `"looped"` or `"looped:<schedule>"`. If `"auto"` was requested, this is
            `"blocking"` or `"looped"`, whichever is cheaper.
        routine: the moves, the local products and the outputs, as `gspmd.einsum` runs them.
        inputs, outputs: the operands and the results, as planner tensors.
        pinned: the specs of `via`, or None. The gradients of a pinned plan use the same placements.
        loops: the gathers and reduce-scatters that run inside an einsum, as rings.
        hidden_seconds: the seconds that `loops` save; negative if they cost time.
        asked: the lowering that was requested. If this is `"auto"`, each gradient chooses its own lowering.
        overlapping: the function that chooses which collectives overlap with einsums, in this plan and in its
            gradients.
        precision: the precision of float32 products, which `Chip.arithmetic` explains.
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
    pinned: Via | None = None
    loops: Overlap = field(default_factory=Overlap)
    hidden_seconds: float = 0.0
    asked: str = "auto"
    overlapping: Overlapping = nothing_overlaps
    precision: str = "default"

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step in the order of execution, including the local einsums."""
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
        """Predicted seconds; only the collectives in `loops` are assumed to overlap with einsums."""
        return sum(step.seconds for step in self.steps) - self.hidden_seconds

    @cached_property
    def peak_bytes(self) -> int:
        """The peak memory of one device in bytes, for operands, results and intermediate buffers.

        A buffer is counted from the step that makes the buffer to the last step that reads it, as XLA places buffers on
        host devices. For the chip of the plan this is an estimate, which docs/plans.md compares with compiled programs.
        """
        from gspmd.planner.memory import Footprint

        return Footprint(self.routine, self.inputs, self.outputs, self.sizes, self.mesh, self.loops).peak()

    @property
    def environment(self) -> Environment:
        """The sizes, the mesh, the chip and the precision, on which the costs depend."""
        return Environment.of(tuple(self.sizes.items()), tuple(self.mesh.items()), self.chip, self.precision)

    @cached_property
    def backward(self) -> Routine:
        """The routine that computes the cotangents of all operands together, as the backward pass runs it."""
        from gspmd.planner.gradients import backward

        mirrored = self.pinned is not None
        return backward(self.environment, self.routine, self.inputs, self.outputs, self.kept, mirrored=mirrored)

    @cached_property
    def backward_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs of the backward routine (first the cotangents, then the residuals), and its outputs."""
        from gspmd.planner.gradients import backward_tensors

        return backward_tensors(self.routine, self.inputs, self.outputs, self.kept)

    @property
    def kept(self) -> tuple[Spec, ...]:
        """The specs in which the moved operands are kept for the backward pass."""
        return kept(self.routine, self.loops)

    @property
    def backward_loops(self) -> Overlap:
        """The rings of the backward routine."""
        return self.backward_overlap[0]

    @cached_property
    def backward_overlap(self) -> tuple[Overlap, float]:
        """The rings of the backward routine, and the seconds that they save."""
        return self.overlapping(self.backward, *self.backward_tensors, self.environment)

    @cached_property
    def gradients(self) -> tuple["Plan", ...]:
        """One plan for the cotangent of each operand; a step that several plans need is only in the first plan.

        The seconds that loops of the backward routine save are divided among the plans, in proportion to the
        communication time of each plan.
        """
        from gspmd.planner.gradients import parts

        overlap, hidden = self.backward_overlap
        return tuple(
            replace(
                self,
                equation=part.equation,
                routine=part.routine,
                dtypes=part.dtypes,
                inputs=part.inputs,
                outputs=part.outputs,
                lowering=_chosen(self.asked, part.overlap),
                loops=part.overlap,
                hidden_seconds=hidden * part.share,
            )
            for part in parts(self.backward, *self.backward_tensors, overlap)
        )

    def alternatives(self, count: int = 8) -> tuple["Plan", ...]:
        """Return the best plan for each choice that the search compared, the cheapest plan first.

        A choice says which dimension, if any, each mesh axis shards while the operands are multiplied. If the equation
        has a group, the choice concerns the operand that all members of the group share. If the equation is a sum, the
        choice is the placement in which the products are added. If the equation is a move, the choice is the list of
        collectives.

        The first plan is the one that is made without `via`. The search orders plans by their seconds without overlap,
        so under `"looped"` and `"auto"` a later plan may have fewer `seconds`.

        Args:
            count: the largest number of plans to return.

        Returns:
            Plans of the same equation. To use one of these plans, pass its `Plan.via` as the argument `via`. The terms
            of a sum may then still be added in a different placement if that is cheaper.

        Raises:
            PlanError: `count` is not a positive whole number, or this is the plan of a gradient.

        Example:
            >>> import gspmd
            >>> sizes, mesh = {"B": 512, "L": 1, "E": 18432, "F": 73728}, {"x": 4, "y": 4, "z": 4}
            >>> plan = gspmd.plan("BLE_xyz, E_xF_yz -> BLF_yzx", sizes, mesh)
            >>> for each in plan.alternatives(3):
            ...     print(f"{each.via}: {each.wire_bytes / 1e6:.1f} MB sent, {each.seconds * 1e6:.0f} µs")
            BLE_x, E_xF_yz: 8.0 MB sent, 203 µs
            BLE, EF_yzx: 50.4 MB sent, 802 µs
            BLE_xz, E_xzF_y: 50.7 MB sent, 821 µs
        """
        if type(count) is not int or count < 1:
            raise PlanError(f"cannot list {shown(count)} alternatives.\n  Give a positive whole number.")
        if len(self.inputs) != sum(len(operand.specs) for operand in self.equation.operands):
            raise PlanError(
                f"cannot list alternatives to '{self.equation}', a gradient that is planned together with others.\n"
                f"  Plan it by itself: gspmd.plan('{self.equation}', ...).alternatives()."
            )
        ranked = ranked_routines(self.equation, self.environment, self.inputs, self.outputs, count)
        return tuple(map(self._with_routine, ranked))

    def _with_routine(self, routine: Routine) -> "Plan":
        """Return a plan of this equation with another routine, and with the specs of its moved operands as `via`."""
        overlap, hidden = self.overlapping(routine, self.inputs, self.outputs, self.environment)
        specs = {move.source: move.spec for move in routine.moves}
        flat = iter(range(len(self.inputs)))
        brought = lambda operand: [specs[next(flat)] for _ in operand.specs]  # noqa: E731
        terms = [[brought(o) if o.group else brought(o)[0] for o in term.operands] for term in self.equation.terms]
        return replace(
            self,
            routine=routine,
            pinned=Via.sum_of(terms),
            lowering=_chosen(self.asked, overlap),
            loops=overlap,
            hidden_seconds=hidden,
        )

    @property
    def via(self) -> str | None:
        """The text of `via` as it was written, or None."""
        return None if self.pinned is None else self.pinned.text

    def to_json(self, *, gradients: bool = True) -> str:
        """Return the plan as JSON, with every figure per device and execution.

        Args:
            gradients: whether to include the plans of the gradients.

        Keys:
            equation, lowering, dtypes, wire_bytes, flops, seconds, hidden_seconds, peak_bytes: the attributes of the
                plan with the same names. The dtypes are those of the operands.
            steps: a list in the order of execution. Each step has kind, axes, operand, before, other, after,
                wire_bytes, flops and seconds. The key `other` is null unless the step is a product of two operands.
            mesh, sizes, chip, via: the arguments for which the plan was made.
            gradients: a list with one entry for each operand, which is empty if the argument `gradients` is False. The
                entries have the same keys, except for mesh, sizes, chip, via and gradients.
        """
        asked = {"mesh": self.mesh, "sizes": self.sizes, "chip": self.chip.name, "via": self.via}
        parts = [_record(each) for each in self.gradients] if gradients else []
        return json.dumps({**_record(self), **asked, "gradients": parts}, indent=2)

    def figure(self, *, gradients: bool = False) -> "Figure":
        """Draw the plan: specs in boxes, and a collective on every arrow, with its bytes and seconds.

        Args:
            gradients: whether to draw the plans of the gradients below the plan.

        Returns:
            A figure. Notebooks show it, and `.save("plan.svg")` writes it to a file. All its numbers are figures of the
            plan.

        Example:
            >>> import gspmd
            >>> plan = gspmd.plan("BLE_xyz, E_xF_yz -> BLF_yzx", dict(B=8, L=1, E=64, F=128), dict(x=2, y=2, z=2))
            >>> plan.figure().title
            'Plan of BLE_xyz, E_xF_yz -> BLF_yzx'

        Source: Pope et al. 2022 (arXiv 2211.05102), figures 2 and 3.
        """
        from gspmd.planner.figures.plan import plan_figure

        return plan_figure(self, gradients=gradients)

    def steps_figure(self) -> "Figure":
        """Draw the blocks that each device holds before and after every step.

        Returns:
            A figure. If the mesh has more than 64 devices, only the first and the last devices along each axis are
            drawn.

        Example:
            >>> import gspmd
            >>> gspmd.plan("B_xE -> BE_x", dict(B=8, E=64), dict(x=2)).steps_figure().title
            'The steps of B_xE -> BE_x on the mesh'
        """
        from gspmd.planner.figures.steps import steps_figure

        return steps_figure(self)

    def __repr__(self) -> str:
        from gspmd.planner.drawing import one_line

        return one_line(self)

    def __str__(self) -> str:
        from gspmd.planner.drawing import plain

        return plain(self)

    def _repr_html_(self) -> str:
        from gspmd.planner.figures.plan import as_html

        return as_html(self)


def _chosen(asked: str, overlap: Overlap) -> str:
    """Return the requested lowering, or the lowering that was chosen if `"auto"` was requested."""
    return ("looped" if overlap else "blocking") if asked == "auto" else asked


_FIGURES = ("wire_bytes", "flops", "seconds", "hidden_seconds", "peak_bytes")


def _record(plan: Plan) -> dict[str, object]:
    """Return the figures and the steps of one plan as plain data, under the keys that `Plan.to_json` documents."""
    said = {"equation": str(plan.equation), "lowering": plan.lowering, "dtypes": plan.dtypes}
    figures = {name: getattr(plan, name) for name in _FIGURES}
    return {**said, **figures, "steps": [_step_record(step) for step in plan.steps]}


def _step_record(step: Step) -> dict[str, object]:
    return {
        "kind": step.kind,
        "axes": step.axes,
        "operand": step.operand,
        "before": str(step.before),
        "other": None if step.other is None else str(step.other),
        "after": str(step.after),
        "wire_bytes": step.wire_bytes,
        "flops": step.flops,
        "seconds": step.seconds,
    }


# -- from a request to its plan ----------------------------------------------------------------------------------------


def plan_equation(
    equation: Equation,
    sizes: tuple[tuple[str, int], ...],
    mesh: tuple[tuple[str, int], ...],
    dtypes: tuple[str, ...],
    chip: Chip,
    lowering: str,
    overlapping: Overlapping,
    via: Via | None = None,
    wire_dtype: str | None = None,
    result_dtype: str | None = None,
    precision: str = "default",
) -> Plan:
    """Plan an equation under a lowering.

    `overlapping` is the function that chooses which collectives this lowering overlaps with einsums. The other
    arguments are those of `gspmd.plan`, resolved and hashable.
    """
    for spec in equation.specs:
        if spec.is_open:
            raise PlanError(
                f"cannot plan '{equation}': '{spec}' leaves a dimension open, so the compiler chooses what is sent.\n"
                "  Name the mesh axes of that dimension, or run the equation with lowering='xla' under Auto axes."
            )
    equation.check(dict(sizes), dict(mesh))
    sizes = tuple((dim, size) for dim, size in sizes if any(dim in spec.dims for spec in equation.specs))
    inputs, outputs = tensors(equation, dict(mesh), dtypes, wire_dtype, result_dtype)
    environment = Environment.of(sizes, mesh, chip, precision)
    pinned: Sequence[Spec | None] = [None] * len(inputs)
    if via is not None:
        pinned = pinned_specs(equation, via, dict(sizes), dict(mesh))
    routine = plan_routine(equation, environment, inputs, outputs, pinned)
    overlap, hidden = overlapping(routine, inputs, outputs, environment)
    return Plan(
        equation,
        FrozenDict(sizes),
        FrozenDict(mesh),
        dtypes,
        chip,
        _chosen(lowering, overlap),
        routine,
        tuple(inputs),
        tuple(outputs),
        via,
        overlap,
        hidden,
        lowering,
        overlapping,
        precision,
    )


def tensors(
    equation: Equation, mesh: Mapping[str, int], dtypes: Sequence[str], wire_dtype: str | None, dtype: str | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the operands and the results of an equation as planner tensors.

    If `wire_dtype` is None, every tensor is sent in its own dtype, or in the dtype that `wire_of` gives for it.
    """
    specs = [spec.without_trivial(mesh) for spec in equation.specs]
    flat, results = specs[: -len(equation.outputs)], specs[-len(equation.outputs) :]
    names = ["operand"] if len(flat) == 1 else [f"operand {i + 1}" for i in range(len(flat))]
    inputs = [
        Tensor(replace(s, reduced=()), d, wire_dtype or wire_of(d, summed=bool(s.partial)), n, s.reduced)
        for s, d, n in zip(flat, dtypes, names)
    ]
    dtype = dtype or joint_dtype(equation, dtypes)
    sums = any(spec.partial or set(spec.dims) - set(out.dims) for spec in flat for out in equation.outputs)
    wire = wire_dtype or wire_of(dtype, summed=sums)
    outputs = [Tensor(replace(s, reduced=()), dtype, wire, "result", s.reduced) for s in results]
    return inputs, outputs


def pinned_specs(equation: Equation, via: Via, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> list[Spec]:
    """Return the spec to which `via` brings each operand, with the dimensions in the operand's order.

    Raises:
        SpecError: the specs of `via` do not have the operands' dimensions, or do not fit the sizes.
        PlanError: a spec leaves a dimension to the compiler.
    """
    flat = [spec for operand in equation.operands for spec in operand.specs]
    pinned = spread_over_groups(equation, via.specs, flat)
    if [set(spec.dims) for spec in pinned] != [set(spec.dims) for spec in flat]:
        raise SpecError(
            f"cannot plan '{equation}' via '{via.text}': the specs do not have the operands' dimensions.\n"
            f"  Write one spec per operand, in their order: '{', '.join(''.join(spec.dims) for spec in flat)}'."
        )
    for spec in pinned:
        if spec.is_open:
            raise PlanError(
                f"cannot plan '{equation}' via '{spec}', which leaves a dimension open.\n  Name its mesh axes."
            )
        spec.check(sizes, mesh)
    return [_ordered_as(spec, like).without_trivial(mesh) for spec, like in zip(pinned, flat)]


def spread_over_groups(equation: Equation, pinned: Sequence[Spec], flat: Sequence[Spec]) -> list[Spec]:
    """Return one spec for each operand, where every member of a group is an operand.

    A via may give a single spec for a whole group, if the members of the group have the same dimensions.
    """
    if len(pinned) == len(flat) or len(pinned) != len(equation.operands):
        return list(pinned)
    return [spec for spec, operand in zip(pinned, equation.operands) for _ in operand.specs]


def _ordered_as(spec: Spec, like: Spec) -> Spec:
    return Spec(like.dims, tuple(spec.axes_of(dim) for dim in like.dims), spec.partial)
