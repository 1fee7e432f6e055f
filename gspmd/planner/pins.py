"""Pins: the places to which a `via` brings the operands of an equation."""

from collections.abc import Mapping, Sequence

from gspmd.annotate.equation import Equation, Via
from gspmd.annotate.errors import PlanError, SpecError
from gspmd.annotate.spec import Spec


def pins(equation: Equation, via: Via, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> list[Spec]:
    """The spec that `via` brings each operand to, in the operand's order of dimensions.

    Raises:
        SpecError: the specs do not have the operands' dimensions, or do not fit the sizes.
        PlanError: one leaves a dimension open.
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
    """A via may write a group's spec once where its members have the same dimensions."""
    if len(pinned) == len(flat) or len(pinned) != len(equation.operands):
        return list(pinned)
    return [spec for spec, operand in zip(pinned, equation.operands) for _ in operand.specs]


def _ordered_as(spec: Spec, like: Spec) -> Spec:
    return Spec(like.dims, tuple(spec.axes_of(dim) for dim in like.dims), spec.partial)
