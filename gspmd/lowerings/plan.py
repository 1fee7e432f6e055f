"""`gspmd.plan`: the plan of an equation under a lowering."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from gspmd.annotate.equation import Equation, Via, parse_equation, parse_via
from gspmd.hardware.chips import Chip
from gspmd.hardware.chips import chip as chip_row
from gspmd.lowerings.default import resolve
from gspmd.planner.overlap import Overlap
from gspmd.planner.plan import Overlapping, Plan, nothing_overlaps, plan_equation
from gspmd.planner.request import read_dtypes, read_sizes


def plan(
    equation: str | Equation,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int] | Any,
    dtype: str | Sequence[str] = "bfloat16",
    chip: str | Chip = "tpu-v4",
    lowering: str | None = "auto",
    via: str | None = None,
) -> Plan:
    """Plan an equation: the collectives and local einsums it takes, with bytes and seconds per device.

    For each mesh axis the planner asks which dimension it shards while the einsum runs (a shared, a contracted or a
    free one, or none); contracted ones leave a partial sum. The plan is the cheapest way in and out, in seconds on this
    chip when nothing overlaps, ties to fewer bytes, then fewer steps, then the order of the specs. `"looped"` and
    `"auto"` overlap the steps of this plan; they do not search for one that overlaps better.

    Args:
        equation: an einsum, a move, a group or a sum of specs.
        sizes: size of every dimension of the whole tensors; those that the equation lacks are not read.
        mesh: size of every mesh axis, or a `jax.sharding.Mesh`.
        dtype: of all operands, or one each (group members one by one).
        chip: a row of chips.toml.
        lowering: `"xla"`, `"blocking"`, `"looped"`, `"looped:halves"`, `"looped:paired"`, or `"auto"`, the
            cheaper of blocking and looped.
        via: the specs that the operands are brought to before the local einsum, where they shall not be searched.

    Returns:
        A `Plan`; `print` shows it as the papers draw it.

    Raises:
        SpecError: the notation is wrong, or the sizes do not divide.
        PlanError: no plan exists, or the chip or the lowering is unknown.

    Example:
        >>> sizes, mesh = {"B": 512, "L": 1, "E": 18432, "F": 73728}, {"x": 4, "y": 4, "z": 4}
        >>> p = plan("BLE_xyz, E_xF_yz -> BLF_yzx", sizes, mesh)
        >>> [(step.kind, "".join(step.axes)) for step in p.steps]
        [('all-gather', 'yz'), ('einsum', ''), ('reduce-scatter', 'x')]
        >>> p.wire_bytes
        7962624

    Source: Pope et al. 2022, *Efficiently Scaling Transformer Inference* (arXiv 2211.05102), §3.1 and appendix A.
    """
    equation = parse_equation(equation)
    sizes, axes = read_sizes(equation, sizes, mesh)
    via = None if via is None else parse_via(via)
    dtypes = read_dtypes(equation, dtype)
    return make_plan(equation, sizes, axes, dtypes, chip_row(chip), resolve(lowering), via)


@lru_cache(maxsize=4096)
def make_plan(
    equation: Equation,
    sizes: tuple[tuple[str, int], ...],
    mesh: tuple[tuple[str, int], ...],
    dtypes: tuple[str, ...],
    chip: Chip,
    lowering: str,
    via: Via | None = None,
    wire_dtype: str | None = None,
    result_dtype: str | None = None,
) -> Plan:
    """`plan` with everything resolved and hashable; the last two are `gspmd.einsum`'s."""
    return plan_equation(
        equation, sizes, mesh, dtypes, chip, lowering, overlapping(lowering), via, wire_dtype, result_dtype
    )


def overlapping(lowering: str) -> Overlapping:
    """What a lowering overlaps with the einsums."""
    return nothing_overlaps if lowering in ("xla", "blocking") else partial(_overlap, lowering)


def _overlap(lowering: str, routine, inputs, outputs, environment) -> tuple[Overlap, float]:
    """What is looped; where a dimension is empty there is nothing to hide."""
    from gspmd.lowerings.looped.choice import plan_overlap  # here alone, so that the other lowerings need none of it

    if 0 in dict(environment.sizes).values():
        return Overlap(), 0.0
    return plan_overlap(routine, inputs, outputs, environment, lowering)
