"""The message for the case that no layout fits: the smallest layout, the missing bytes, and a slice that has them."""

from collections.abc import Callable, Iterable

from gspmd.commands.search.settings import SearchSettings
from gspmd.commands.search.slice import Slice
from gspmd.display.units import amount_of_bytes
from gspmd.search import NothingFits
from gspmd.search.answers import Candidate, NoneFits, Space
from gspmd.search.answers.microbatches import smallest

Spaces = Callable[[Slice], Iterable[Space]]


def nothing_fits(
    fault: NoneFits, settings: SearchSettings, target: Slice, spaces: Spaces, tell: Callable[[str], None]
) -> str:
    """Return the message for the case that no layout fits.

    Args:
        fault: the error that `find` raised.
        settings: the settings of the search.
        target: the slice.
        spaces: a function from a slice to the spaces to be searched on it.
        tell: a function that gets a text about each slice that is tried.
    """
    remedies = ["a smaller --batch"] * (fault.candidate is None or fault.candidate.microbatches < settings.batch)
    if fault.nearest and fault.nearest.bytes <= target.chip.hbm_bytes:
        remedies.insert(0, "a larger --memory")
    remedies += ["--remat full"] * (settings.remat not in (None, "full"))
    remedies += ["more --microbatches"] * (settings.microbatches is not None)
    smaller = ", or ".join(remedies or ["a smaller model"])
    if fault.candidate is None or fault.nearest is None or fault.over is None:
        fact = f"No layout fits {target.name}: none divides the sizes of this model and batch on any of its meshes."
        return f"{fact}\n  Use a different slice, or {smaller}."
    limit = fault.candidate.limit
    where = f"{fault.candidate.named} {fault.candidate.in_microbatches}".strip()
    fact = (
        f"No layout fits {target.name}: the smallest, on mesh {where}, holds "
        f"{amount_of_bytes(fault.nearest.bytes)} on each device, {amount_of_bytes(fault.over)} more than the "
        f"{amount_of_bytes(limit)} that may be used, {100 * settings.memory:.3g}% of "
        f"{amount_of_bytes(target.chip.hbm_bytes)}."
    )
    if settings.mesh:
        return f"{fact}\n  Leave --mesh out, or use a larger slice, or {smaller}."
    larger = next_slice(target, limit, spaces, tell)
    remedy = f"It would fit on {larger.name}" if larger else f"No slice of {target.chip.name} is large enough"
    return f"{fact}\n  {remedy}. Otherwise use {smaller}."


def next_slice(target: Slice, limit: float, spaces: Spaces, tell: Callable[[str], None]) -> Slice | None:
    """Return the smallest larger slice of the chip on which some layout fits, if there is one."""
    for larger in target.larger():
        tell(f"whether it fits {larger.name}")
        every = [*spaces(larger)][::-1]  # More axes have more layouts.
        for space in every:
            try:
                if Candidate(space.phase(), limit).least.bytes <= limit:
                    return larger
            except NothingFits:  # The sizes have no layout on this mesh.
                continue
        for several in (space.several for space in every if space.several):
            least = smallest([], [several(limit)])
            if least and least.least.bytes <= limit:
                return larger
    return None
