"""What is said where nothing fits: the nearest, by how much, and the smallest slice of the chip that would do."""

from collections.abc import Callable, Iterable

from gspmd.commands.search.settings import Settings
from gspmd.commands.search.slice import Slice
from gspmd.display.units import amount_of_bytes
from gspmd.search import NothingFits
from gspmd_models.search.answers import Candidate, NoneFits
from gspmd_models.search.answers.microbatches import Range, smallest
from gspmd_models.search.problem import PhaseProblem

Makers = Callable[[Slice], Iterable[Callable[[], PhaseProblem]]]
Ranges = Callable[[Slice], Iterable[Callable[[], Range]]]


def nothing_fits(
    fault: NoneFits, settings: Settings, target: Slice, makers: Makers, ranges: Ranges, tell: Callable[[str], None]
) -> str:
    """The message.

    Args:
        fault: from `find`.
        settings: of the search.
        target: the slice.
        makers: of the problems on the meshes of a slice.
        ranges: makers of the numbers of microbatches that are searched besides.
        tell: told which slice is tried.
    """
    remedies = ["a smaller --batch"]
    remedies += ["--remat full"] * (settings.remat not in (None, "full"))
    remedies += ["more --microbatches"] * (settings.microbatches is not None)
    smaller = ", or ".join(remedies)
    if fault.candidate is None or fault.nearest is None or fault.over is None:
        return f"Nothing fits {target.name}: the sizes of this model and batch have no layout on any of its meshes."
    limit = fault.candidate.limit
    where = f"{fault.candidate.named} {fault.candidate.in_microbatches}".strip()
    fact = (
        f"Nothing fits {target.name}: the smallest layout, on mesh {where}, holds "
        f"{amount_of_bytes(fault.nearest.bytes)} on each device, {amount_of_bytes(fault.over)} more than the "
        f"{amount_of_bytes(limit)} that may be used, {100 * settings.memory:.3g}% of "
        f"{amount_of_bytes(target.chip.hbm_bytes)}."
    )
    if settings.mesh:
        return f"{fact}\n  Leave --mesh out, or take a larger slice, {smaller}."
    larger = next_slice(target, limit, makers, ranges, tell)
    remedy = f"It would fit on {larger.name}" if larger else f"No slice of {target.chip.name} is large enough"
    return f"{fact}\n  {remedy}. Otherwise take {smaller}."


def next_slice(
    target: Slice, limit: float, makers: Makers, ranges: Ranges, tell: Callable[[str], None]
) -> Slice | None:
    """The smallest larger slice of the chip on some mesh of which something fits."""
    for larger in target.larger():
        tell(f"whether it fits {larger.name}")
        for make in reversed([*makers(larger)]):  # more axes have more layouts
            try:
                if Candidate(make(), limit).least.bytes <= limit:
                    return larger
            except NothingFits:  # the sizes have no layout on this mesh
                continue
        for make in reversed([*ranges(larger)]):
            least = smallest([], [make()])
            if least and least.least.bytes <= limit:
                return larger
    return None
