"""A tensor on a mesh: which device holds which block, for one spec, and before and after every step of a plan."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from gspmd.display.units import amount_of_seconds, mesh_text
from gspmd.figures.canvas import Canvas, width_in
from gspmd.figures.figure import Figure
from gspmd.figures.grid import CellSize, MeshGrid, draw_grid, extent
from gspmd.figures.notation import Run, SpecLike, spec_runs
from gspmd.figures.ownership import Ownership, sizes_text
from gspmd.figures.plan import PlanLike, StepLike
from gspmd.figures.tensor import tensor_text

_FEW, _SOME, _MANY = CellSize(62, 46, 15, 8, 10), CellSize(48, 36, 14, 6, 8), CellSize(36, 27, 13, 4, 8)
_STEP_FEW, _STEP_SOME, _STEP_MANY = CellSize(34, 26, 0, 4, 4), CellSize(20, 16, 0, 3, 3), CellSize(10, 9, 0, 2, 3)
_NARROW = 300.0
_LABEL, _BETWEEN = 18.0, 14.0


class CheckedSpec(SpecLike, Protocol):
    """A `Spec`, which refuses sizes and meshes that it does not fit."""

    def check(self, sizes: Mapping[str, int] | Sequence[int], mesh: Mapping[str, int]) -> None: ...


def blocks_figure(
    spec: CheckedSpec,
    sizes: Mapping[str, int] | Sequence[int],
    mesh: Mapping[str, int],
    *,
    devices: Sequence[int] | None = None,
) -> Figure:
    """Draw a tensor on a mesh: a cell for each device, in which its block of the tensor is filled.

    Copies of one block have the same color and place; the summands of a partial sum are hatched, with a plus sign. On a
    mesh of more than 64 devices, only the first ones and the last along each axis are drawn.

    Args:
        spec: a `gspmd.Spec` without open dimensions.
        sizes: size of every dimension by letter, or the shape of the whole tensor.
        mesh: sizes of the mesh axes, major first.
        devices: the ids of the devices in the order of the mesh; by default 0, 1, ...

    Returns:
        The figure. Every device is a group with `data-device`, its id, which has a rectangle with `data-block`, the
        number of its block with the last dimension fastest, and `data-summand` for a partial sum.

    Raises:
        SpecError: the spec does not fit the sizes and the mesh.
    """
    spec.check(sizes, mesh)
    shape = tuple(sizes[dim] for dim in spec.dims) if isinstance(sizes, Mapping) else tuple(sizes)
    held, grid, canvas = Ownership(spec, shape, dict(mesh)), MeshGrid(mesh), Canvas()
    size = _FEW if grid.columns <= 4 else _SOME if grid.columns <= 6 else _MANY
    named = spec_runs(spec) if spec.dims or spec.partial or spec.reduced else []
    with canvas.group(data_spec=spec):
        y = canvas.lines(0, 0, [[*named, Run(f"  {sizes_text(shape)}")]], 600, "title ink", 19)
    lines, wide = _captions(held, grid, mesh), max(extent(mesh, size)[0], _NARROW)
    for line in lines:
        y = canvas.lines(0, y, [[Run(word + " ")] for word in line.split()], wide, "small soft", 15)
    draw_grid(canvas, 0, y - 4, held, size, devices)
    return canvas.figure(
        f"{spec} {sizes_text(shape)} on {mesh_text(mesh) or 'one device'}".strip(),
        " ".join(f"{line}." for line in lines),
        lambda: tensor_text(held, devices),
    )


def _captions(held: Ownership, grid: MeshGrid, mesh: Mapping[str, int]) -> list[str]:
    axes = "mesh " + " ".join(f"{axis}={size}" for axis, size in mesh.items()) if mesh else "one device"
    copies = f", {held.copies:,} copies of each" if held.blocks > 1 and held.copies > 1 else ""
    lines = [axes + (f" ({grid.named()})" if len(grid.shown) > 1 else ""), held.summary + copies]
    return [*lines, grid.elided] if grid.elided else lines


def steps_figure(plan: PlanLike) -> Figure:
    """Draw the operands of every step of a plan on the mesh, before it and after it.

    Args:
        plan: a `gspmd.Plan`.

    Returns:
        The figure. Every step is a group with `data-step`, `data-kind` and `data-operand`; in it every tensor is one
        with `data-tensor` (`"before"`, `"other"` or `"after"`) and `data-spec`, whose devices are as in
        `blocks_figure`.
    """
    canvas, grid = Canvas(), MeshGrid(plan.mesh)
    size = _STEP_FEW if grid.drawn <= 4 else _STEP_SOME if grid.drawn <= 16 else _STEP_MANY
    y = 0.0
    if grid.elided and plan.steps:
        canvas.text(0, y + 10, grid.elided, "small soft")
        y += 24
    for number, step in enumerate(plan.steps):
        given = {"class_": "step", "data_step": number, "data_kind": step.kind, "data_operand": step.operand}
        with canvas.group(**given):
            y = _draw_step(canvas, y, plan, number, step, size) + 22
    if not plan.steps:
        canvas.text(0, 12, "nothing to do", "soft")
    told = "; ".join(f"{step.name}: {step.before} to {step.after}" for step in plan.steps) or "nothing to do"
    return canvas.figure(f"The steps of {plan.equation} on the mesh", f"{told}.", lambda: _steps_text(plan))


def _draw_step(canvas: Canvas, y: float, plan: PlanLike, number: int, step: StepLike, size: CellSize) -> float:
    """Draw one step in a row from y down: its tensors before, an arrow, the tensor after; return its end."""
    tensors = [("before", step.before), *([("other", step.other)] if step.other is not None else [])]
    head = canvas.text(0, y + 12, f"{number + 1}  {step.name}", f"strong {step.kind}")
    moved = "" if step.kind == "einsum" else step.operand
    figures = f"{step.amount} · {amount_of_seconds(step.seconds)}" + (f" · {moved}" if moved else "")
    canvas.text(head + 8, y + 12, figures, "small soft")
    x, y, bottom = 0.0, y + 22, 0.0
    for at, (role, spec) in enumerate(tensors):
        if at:
            canvas.text(x, y + 20, "·", "strong ink", "middle")
            x += _BETWEEN
        wide, bottom = _draw_tensor(canvas, x, y, plan, role, spec, size)
        x += wide + _BETWEEN
    middle = y + (bottom - y - _LABEL) / 2
    canvas.path([(x, middle), (x + 22, middle)])
    head_ = f"{x + 20:g},{middle - 3.5:g} {x + 20:g},{middle + 3.5:g} {x + 26:g},{middle:g}"
    canvas.parts.append(f'<polygon class="head" points="{head_}"/>')
    _, bottom = _draw_tensor(canvas, x + 26 + _BETWEEN, y, plan, "after", step.after, size)
    return bottom


def _draw_tensor(
    canvas: Canvas, x: float, y: float, plan: PlanLike, role: str, spec: SpecLike, size: CellSize
) -> tuple[float, float]:
    """Draw a tensor on the mesh with its spec below; return its width and its end."""
    held, runs = Ownership(spec, tuple(plan.sizes[dim] for dim in spec.dims), plan.mesh), spec_runs(spec)
    with canvas.group(data_tensor=role, data_spec=spec):
        wide, high = extent(plan.mesh, size)
        draw_grid(canvas, x, y, held, size)
        canvas.text(x, y + high + 15, runs, "ink")
    return max(wide, width_in("", runs)), y + high + _LABEL


def _steps_text(plan: PlanLike) -> str:
    parts = []
    for number, step in enumerate(plan.steps):
        parts.append(f"{number + 1}  {step.name}: {step.amount}, {amount_of_seconds(step.seconds)}")
        for spec in (step.before, *([step.other] if step.other is not None else []), step.after):
            held = Ownership(spec, tuple(plan.sizes[dim] for dim in spec.dims), plan.mesh)
            parts.append(tensor_text(held))
    return "\n".join(parts) or "nothing to do"
