"""Which layout costs least for a feed-forward block: its two equations, planned under each table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from gspmd.annotate import LayoutError, PlanError, SpecError
from gspmd.annotate.errors import suggestion
from gspmd.collectives.chips import Chip
from gspmd.collectives.chips import chip as chip_row
from gspmd.collectives.planning import Plan, plan
from gspmd.layouts.layout import Layout

OBJECTIVES = ("seconds", "wire_bytes")


@dataclass(frozen=True)
class Ranked:
    """What one feed-forward block costs under a layout, per device; infinite where the layout does not fit.

    Attributes:
      name: the layout's name.
      seconds: predicted, nothing overlapped.
      wire_bytes: what one device sends.
      plans: of the equation in and the equation out.
      reason: why the layout does not fit these sizes on this mesh; empty where it does.
    """

    name: str
    seconds: float
    wire_bytes: float
    plans: tuple[Plan, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name:24} does not fit: {self.reason.splitlines()[0]}"
        return f"{self.name:24} {self.wire_bytes / 1e6:12.3f} MB {self.seconds * 1e6:12.1f} µs"


def rank(
    names: Iterable[str | Layout],
    *,
    sizes: Mapping[str, int],
    mesh: Any,
    chip: str | Chip = "tpu-v4",
    objective: str = "seconds",
    gated: bool = False,
    dtype: str = "bfloat16",
) -> list[Ranked]:
    """Layouts by what one feed-forward block costs under them, cheapest first.

    Args:
      names: presets, paths or layouts.
      sizes: of B, L, E and F.
      mesh: sizes of the mesh axes; an axis that a layout declares and the mesh lacks has size 1.
      chip: whose links and matrix units count.
      objective: `"seconds"` or `"wire_bytes"`; ties go by the other, then by the order of `names`.
      gated: two matrices in (SwiGLU) instead of one.
      dtype: of weights and activations.

    Returns:
      one `Ranked` for each name. Layouts that do not fit come last, with their reason.

    Raises:
      LayoutError: an unknown preset or objective, or a mesh axis that a layout does not declare.
      PlanError: an unknown chip.

    Example:
      >>> few, many = ({"B": b, "L": 2048, "E": 18432, "F": 73728} for b in (4, 2048))
      >>> pair, mesh = ("weight-stationary-2d", "weight-gathered-xyz"), {"x": 4, "y": 4, "z": 4}
      >>> [rank(pair, sizes=s, mesh=mesh, objective="wire_bytes")[0].name for s in (few, many)]
      ['weight-stationary-2d', 'weight-gathered-xyz']

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.2 and figure 3.
    """
    if objective not in OBJECTIVES:
        remedy = f"{suggestion(objective, OBJECTIVES)}Rank by {' or '.join(OBJECTIVES)}."
        raise LayoutError(f"no layout is ranked by {objective!r}.\n  {remedy}")
    row = chip_row(chip)
    ranked = [_measure(Layout.load(name), sizes, mesh, row, gated, dtype) for name in names]
    other = OBJECTIVES[1 - OBJECTIVES.index(objective)]
    return sorted(ranked, key=lambda r: (getattr(r, objective), getattr(r, other)))


def equations(layout: Layout, gated: bool = False) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
    """A feed-forward block as a layout writes it: the equation in and the equation out, each with its `via`.

    >>> equations(Layout.load("megatron-1d"))[1]
    ('B_xLF_yz, F_yzE -> B_xLE', 'B_xLF_yz, F_yzE')
    """
    ffn = layout.section("ffn")
    into = f"({ffn.w_in}, {ffn.w_gate}) -> ({ffn.hidden}, {ffn.hidden})" if gated else f"{ffn.w_in} -> {ffn.hidden}"
    return (f"{ffn.residual}, {into}", ffn.in_via), (f"{ffn.hidden}, {ffn.w_out} -> {ffn.residual}", ffn.out_via)


def _measure(layout: Layout, sizes: Mapping[str, int], mesh: Any, chip: Chip, gated: bool, dtype: str) -> Ranked:
    mesh = layout.complete_mesh(mesh)
    try:
        plans = tuple(plan(equation, sizes, mesh, dtype, chip, via=via) for equation, via in equations(layout, gated))
    except (SpecError, PlanError) as error:
        return Ranked(layout.name, inf, inf, reason=error.faults[0].fact if error.faults else str(error))
    return Ranked(layout.name, sum(p.seconds for p in plans), sum(p.wire_bytes for p in plans), plans)
