"""`gspmd.plan`, which finds the steps of an equation on a mesh, and their costs, before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspmd.annotate.equation import Equation, Via, parse_equation, parse_via
from gspmd.annotate.errors import PlanError
from gspmd.annotate.validation import mesh_sizes, whole_sizes
from gspmd.hardware.chips import Chip
from gspmd.hardware.chips import chip as chip_row
from gspmd.hardware.dtypes import dtype_name
from gspmd.lowerings.call import make_plan
from gspmd.lowerings.in_force import resolve
from gspmd.planner.plan import Plan


def plan(
    equation: str | Equation,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int] | Any,
    dtype: str | Sequence[str] = "bfloat16",
    chip: str | Chip = "tpu-v4",
    lowering: str | None = "auto",
    via: str | Via | None = None,
) -> Plan:
    """Plan an equation: its collectives and local einsums, with bytes and seconds per device.

    For each mesh axis the planner chooses which dimension the axis shards while the einsum runs: a shared, a contracted
    or a free dimension, or none. If it is a contracted dimension, the einsum leaves a partial sum. The planner takes
    the plan whose moves and products take the least time on this chip, counted as if nothing overlapped. Ties are
    broken by the fewest bytes, then by the fewest steps, and then by a fixed order. Lowerings `"looped"` and `"auto"`
    overlap the steps of this plan. They do not search for a plan whose steps overlap better.

    Args:
        equation: an einsum, a move, a group or a sum of specs.
        sizes: the unsharded size of every dimension; dimensions that the equation lacks are ignored.
        mesh: the size of every mesh axis, or a `jax.sharding.Mesh`.
        dtype: one dtype for all operands, or a sequence with a dtype for each operand. Every member of a group counts
            as an operand.
        chip: the name of a chip in chips.toml, or a `Chip`.
        lowering: `"xla"`, `"blocking"`, `"looped"`, `"looped:halves"`, `"looped:paired"`, or `"auto"`, which is the
            cheaper of blocking and looped. None stands for the lowering that `gspmd.lowering` has set.
        via: the specs to which the operands are moved before the local einsum. If it is None, the planner searches for
            these specs.

    Returns:
        A `Plan`; `print` draws the plan as a chain of specs, in which each arrow is a collective.

    Raises:
        SpecError: the notation is wrong, or the mesh axes do not divide the sizes.
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
    sizes, axes = _read_sizes(equation, sizes, mesh)
    via = None if via is None else parse_via(via)
    dtypes = _read_dtypes(equation, dtype)
    made = make_plan(equation, sizes, axes, dtypes, chip_row(chip), resolve(lowering), via)
    # A plan is shared by all calls whose via means the same; `Plan.via` shows the text of this call.
    return made if via is None or made.via == via.text else replace(made, pinned=via)


def _read_sizes(
    equation: Equation, sizes: Mapping[str, int], mesh: Any
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """Return the sizes of the equation's dimensions, and the sizes of the mesh axes.

    Raises:
        SpecError: a size is not a whole number, or `sizes` or `mesh` is not a mapping.
    """
    axes = mesh_sizes(mesh)
    if isinstance(sizes, Mapping):
        used = {dim for spec in equation.specs for dim in spec.dims}
        read = whole_sizes({dim: size for dim, size in sizes.items() if dim in used})
        if len(read) == len(used) and all(type(size) is int for size in read.values()):
            return tuple(read.items()), tuple(axes.items())
    equation.check(sizes, axes)
    raise AssertionError("sizes that cannot be read have faults")


def _read_dtypes(equation: Equation, dtype: Any) -> tuple[str, ...]:
    """Return the name of each operand's dtype; every member of a group counts as an operand.

    `dtype` is one dtype for all operands, or a sequence with a dtype for each.
    """
    count = sum(len(operand.specs) for operand in equation.operands)
    dtypes = tuple(map(dtype_name, dtype)) if isinstance(dtype, (tuple, list)) else (dtype_name(dtype),) * count
    if len(dtypes) != count:
        raise PlanError(
            f"cannot plan '{equation}': {len(dtypes)} dtypes for {count} operands.\n"
            "  Give one dtype, or one for each operand."
        )
    return dtypes
