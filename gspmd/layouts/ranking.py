"""Ranking of layouts by the cost of a feed-forward block, whose two equations are planned under each layout."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from os import PathLike
from typing import Any

from gspmd.annotate import LayoutError, PlanError, SpecError, mesh_sizes
from gspmd.annotate.equation import Equation, Via
from gspmd.annotate.errors import listed, shown, suggestion
from gspmd.display.plain import printable
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.hardware.chips import Chip
from gspmd.hardware.chips import chip as chip_row
from gspmd.hardware.dtypes import dtype_name
from gspmd.layouts import printed
from gspmd.layouts.layout import Layout
from gspmd.layouts.mesh import read_sizes
from gspmd.ops._plan import plan
from gspmd.planner.plan import Plan

OBJECTIVES = ("seconds", "wire_bytes")
_DIMENSIONS = ("B", "L", "E", "F")


@dataclass(frozen=True, repr=False)
class Ranked:
    """The cost of one feed-forward block under a layout.

    Costs are per device. They are infinite if the layout does not fit.

    Attributes:
      name: the layout's name.
      seconds: the predicted time, without overlap of communication and computation.
      wire_bytes: bytes that one device sends.
      plans: the plans of the block's first and second equation; empty if the layout does not fit.
      reason: the reason why the layout does not fit these sizes on this mesh; empty if it fits.
    """

    name: str
    seconds: float
    wire_bytes: float
    plans: tuple[Plan, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        return printable(f"{self.name:24} {self.says}")

    def __repr__(self) -> str:
        return printable(f"<Ranked {self.name!r}: {' '.join(self.says.split())}>")

    @property
    def says(self) -> str:
        """The bytes sent and the seconds as text, or the reason why the layout does not fit."""
        if self.reason:
            return f"does not fit: {self.reason.splitlines()[0]}"
        return f"{amount_of_bytes(self.wire_bytes):>8} sent  {amount_of_seconds(self.seconds):>8}"


class Ranking(list[Ranked]):
    """A list of `Ranked`, cheapest first, which prints as a table.

    Attributes:
      title: the title of the table. It names the block, the mesh, the chip and the objective.
    """

    def __init__(self, ranked: Iterable[Ranked], title: str):
        super().__init__(ranked)
        self.title = title

    def __str__(self) -> str:
        return printable("\n".join([self.title, *(f"  {entry}" for entry in self)]))

    def __repr__(self) -> str:
        return printable(f"<Ranking of {len(self)}: {', '.join(entry.name for entry in self)}>")

    def __reduce__(self) -> tuple:
        return Ranking, (list(self), self.title)

    def _repr_html_(self) -> str:
        return printed.ranking(self.title, [(entry.name, entry.says) for entry in self])


def rank(
    names: "str | PathLike | Layout | Iterable[str | PathLike | Layout]",
    *,
    sizes: Mapping[str, int],
    mesh: Any,
    chip: str | Chip = "tpu-v4",
    objective: str = "seconds",
    gated: bool = False,
    dtype: str = "bfloat16",
) -> Ranking:
    """Rank layouts by the cost of one feed-forward block, cheapest first.

    Args:
      names: the layouts to rank: names of presets, paths of files, `Layout` objects, or a single one of these.
      sizes: the sizes of B, L, E and F.
      mesh: sizes of the mesh axes. If a layout declares an axis that the mesh lacks, this axis has size 1.
      chip: the chip for which costs are computed.
      objective: the cost by which layouts are ranked, `"seconds"` or `"wire_bytes"`. Ties are broken by the other cost,
        and then by the order of `names`.
      gated: whether the block is gated (SwiGLU), that is, has two input matrices instead of one.
      dtype: the dtype of weights and activations.

    Returns:
      A list with one `Ranked` per name, which prints as a table. Layouts that do not fit come last, with the reason.

    Raises:
      LayoutError: a preset or the objective is unknown, sizes are missing or invalid, or the mesh has an axis that a
        layout does not declare.
      PlanError: the chip or the dtype is unknown.

    Example:
      >>> few, many = ({"B": b, "L": 2048, "E": 18432, "F": 73728} for b in (4, 2048))
      >>> pair, mesh = ("weight-stationary-2d", "weight-gathered-xyz"), {"x": 4, "y": 4, "z": 4}
      >>> [rank(pair, sizes=s, mesh=mesh, objective="wire_bytes")[0].name for s in (few, many)]
      ['weight-stationary-2d', 'weight-gathered-xyz']

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.2 and figure 3.
    """
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        remedy = f"{suggestion(str(objective), OBJECTIVES)}Rank by {' or '.join(OBJECTIVES)}."
        raise LayoutError(f"cannot rank layouts by {shown(objective)}.\n  {remedy}")
    if not isinstance(gated, bool):
        raise LayoutError(f"cannot rank layouts with gated={shown(gated)}.\n  Pass True or False.")
    layouts, row, sizes = _layouts(names), chip_row(chip), _sizes(sizes)
    plan("E -> E", sizes, mesh, dtype, row)  # raises here if dtype or mesh is invalid, which is not a layout's fault
    ranked = [_measure(layout, sizes, mesh, row, gated, dtype) for layout in layouts]
    other = OBJECTIVES[1 - OBJECTIVES.index(objective)]
    ranked.sort(key=lambda r: (getattr(r, objective), getattr(r, other)))
    return Ranking(ranked, _title(sizes, mesh, row, objective, dtype))


def equations(layout: Layout, gated: bool = False) -> tuple[tuple[Equation, Via | None], tuple[Equation, Via | None]]:
    """Return the first and the second equation of a layout's feed-forward block, each with its via.

    >>> equations(Layout.load("megatron-1d"))[1]
    (<Equation 'B_xLF_yz, F_yzE -> B_xLE'>, <Via 'B_xLF_yz, F_yzE'>)
    """
    ffn = layout.section("ffn")
    into = "residual, (w_in, w_gate) -> (hidden, hidden)" if gated else "residual, w_in -> hidden"
    both = into, "hidden, w_out -> residual"
    first, second = ((ffn.equation(text), ffn.via(text)) for text in both)
    return first, second


def _layouts(names: Any) -> list[Layout]:
    if isinstance(names, str | PathLike | Layout):
        return [Layout.load(names)]
    if not isinstance(names, Iterable) or hasattr(names, "dtype"):
        raise LayoutError(f"cannot rank {shown(names)}.\n  Give names of layouts, as in ['megatron-1d', 'zero-3'].")
    return [Layout.load(name) for name in names]


def _sizes(sizes: Any) -> Mapping[str, int]:
    missing = [dim for dim in _DIMENSIONS if dim not in read_sizes(sizes)]
    if missing:
        raise LayoutError(
            f"cannot rank layouts without the size of {listed(missing)}.\n"
            f"  A feed-forward block has dimensions {listed(_DIMENSIONS)}."
        )
    return sizes


def _title(sizes: Mapping[str, int], mesh: Any, chip: Chip, objective: str, dtype: str) -> str:
    of = " ".join(f"{dim}={sizes[dim]}" for dim in _DIMENSIONS)
    axes = mesh_sizes(mesh)
    on = " ".join(f"{axis}={size}" for axis, size in axes.items())
    return f"feed-forward block  {of}  mesh {on}  {dtype_name(dtype)}  {chip.describe(axes)}  by {objective}"


def _measure(layout: Layout, sizes: Mapping[str, int], mesh: Any, chip: Chip, gated: bool, dtype: str) -> Ranked:
    mesh = layout.complete_mesh(mesh)
    try:
        pairs = equations(layout.resolved(sizes, mesh), gated)
        wide = layout.padded(sizes)
        plans = tuple(plan(equation, wide, mesh, dtype, chip, via=via and via.text) for equation, via in pairs)
    except (SpecError, PlanError, LayoutError) as error:
        return Ranked(layout.name, inf, inf, reason=error.faults[0].fact if error.faults else str(error))
    return Ranked(layout.name, sum(p.seconds for p in plans), sum(p.wire_bytes for p in plans), plans)
