"""Messages of the search's refusals: imported where something is refused, for nobody else needs to read them."""

from collections.abc import Sequence

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.display.units import amount_of_bytes
from gspmd.planner.steps import Contraction, Tensor


def too_many_permutes(permutes: int, most: int, sizes: Sequence[int]) -> PlanError:
    """The graph of a tensor would not fit in memory."""
    listed = ", ".join(map(str, sizes))
    return PlanError(
        f"cannot plan on {len(sizes)} mesh axes (of sizes {listed}): for this tensor {permutes:,} permutes\n"
        f"  would have to be compared, and {most:,} are the most.\n"
        "  Make one mesh axis of two that are always used together."
    )


def too_large(name: str, shape: Sequence[int], size: int, most_bytes: int, most_seconds: float) -> PlanError:
    """Every path has a step of more bytes or seconds than can be counted."""
    lengths = "x".join(map(str, shape))
    most = f"{amount_of_bytes(most_bytes)} at once, or for more than {most_seconds:.0f} s"
    return PlanError(
        f"cannot plan {name or 'a tensor'} of {lengths}, {amount_of_bytes(size)}: on every way there a device\n"
        f"  sends more than {most}. Check the sizes, or use larger mesh axes."
    )


def no_placement(left: Tensor, contractions: Sequence[Contraction], pinned: Spec | None) -> str:
    """Say why no joint placement of the operands leads to the targets."""
    targets = ", ".join(f"'{contraction.target.spec}'" for contraction in contractions)
    via = "" if pinned is None else f" via '{pinned}'"
    return (
        f"no plan brings '{left.spec}'{via} to {targets}.\n"
        "  A partial sum in the result comes from a mesh axis on a summed dimension, or from an operand that owes it;\n"
        "  via specs must agree on every dimension that the operands share."
    )
