"""What a caller asks of `gspmd.plan`: read, checked, and made of Python's own numbers before anything is planned."""

from collections.abc import Mapping, Sequence
from typing import Any

from gspmd.annotate.equation import Equation, Via
from gspmd.annotate.errors import PlanError, SpecError
from gspmd.annotate.spec import Spec
from gspmd.annotate.validation import mesh_sizes, whole_sizes
from gspmd.hardware.dtypes import dtype_name


def read_sizes(
    equation: Equation, sizes: Mapping[str, int], mesh: Any
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """Sizes of the dimensions and of the mesh axes. Dimensions that the equation lacks are left out, unread.

    Raises:
        SpecError: one of them is no whole number, or they are no mappings.
    """
    axes = mesh_sizes(mesh)
    if isinstance(sizes, Mapping):
        used = {dim for spec in equation.specs for dim in spec.dims}
        read = whole_sizes({dim: size for dim, size in sizes.items() if dim in used})
        if len(read) == len(used) and all(type(size) is int for size in read.values()):
            return tuple(read.items()), tuple(axes.items())
    equation.check(sizes, axes)
    raise AssertionError("sizes that cannot be read have faults")


def read_dtypes(equation: Equation, dtype: Any) -> tuple[str, ...]:
    """The dtype of every operand by name, group members one by one, of one for all or of one each."""
    count = sum(len(operand.specs) for operand in equation.operands)
    dtypes = tuple(map(dtype_name, dtype)) if isinstance(dtype, (tuple, list)) else (dtype_name(dtype),) * count
    if len(dtypes) != count:
        raise PlanError(
            f"cannot plan '{equation}': {len(dtypes)} dtypes for {count} operands.\n  Give one dtype, or one each."
        )
    return dtypes


def refuse_open(equation: Equation) -> None:
    """Refuse a spec that leaves a dimension to the compiler."""
    for spec in equation.specs:
        if spec.is_open:
            raise PlanError(
                f"cannot plan '{equation}': '{spec}' leaves a dimension open; what it sends is the compiler's choice.\n"
                "  Name its mesh axes, or run it with lowering='xla' under Auto axes."
            )


def pins(equation: Equation, via: Via | None, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> list[Spec | None]:
    """The spec that `via` brings each operand to, in the operand's order of dimensions; None where it says nothing."""
    flat = [spec for operand in equation.operands for spec in operand.specs]
    if via is None:
        return [None] * len(flat)
    pinned = _spread_over_groups(equation, via.specs, flat)
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


def _spread_over_groups(equation: Equation, pinned: Sequence[Spec], flat: Sequence[Spec]) -> list[Spec]:
    """A via may write a group's spec once where its members have the same dimensions."""
    if len(pinned) == len(flat) or len(pinned) != len(equation.operands):
        return list(pinned)
    return [spec for spec, operand in zip(pinned, equation.operands) for _ in operand.specs]


def _ordered_as(spec: Spec, like: Spec) -> Spec:
    return Spec(like.dims, tuple(spec.axes_of(dim) for dim in like.dims), spec.partial)
