"""The message for the case that no layout fits: the smallest layout, the missing bytes, and a larger slice."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from gspmd.annotate import LayoutError, PlanError
from gspmd.commands.search.settings import SearchSettings
from gspmd.commands.search.slice import Slice
from gspmd.display.units import amount_of_bytes
from gspmd.search import NothingFits
from gspmd.search.answers import Candidate, NoneFits, Space
from gspmd.search.answers.microbatches import smallest

Spaces = Callable[[Slice], Iterable[Space]]


def nothing_fits(
    fault: NoneFits,
    settings: SearchSettings,
    target: Slice,
    spaces: Callable[[SearchSettings], Spaces],
    tell: Callable[[str], None],
) -> str:
    """Return the message for the case that no layout fits.

    Args:
        fault: the error that `find` raised.
        settings: the settings of the search.
        target: the slice.
        spaces: a function that takes settings, and returns a function from a slice to the spaces to be searched.
        tell: called with a text about each slice that is tried.
    """
    if fault.candidate is None or fault.nearest is None or fault.over is None:
        fact = f"No layout fits {target.name}: none divides the sizes of this model and batch on any of its meshes."
        return f"{fact}\n  Use a different slice, or a different --batch."
    limit = fault.candidate.limit
    remedies: list[str] = []
    if _fits_smaller_batch(settings, target, limit, spaces, tell):
        remedies += ["a smaller --batch"] * (fault.candidate.microbatches < settings.batch)
        remedies += ["more --microbatches"] * (settings.microbatches is not None)
    if fault.nearest.bytes <= target.chip.hbm_bytes:
        remedies.insert(0, "a larger --memory")
    remedies += ["--remat full"] * (settings.remat not in (None, "full"))
    smaller = ", or ".join(remedies or ["a smaller model"])
    where = f"{fault.candidate.named} {fault.candidate.in_microbatches}".strip()
    none = "No layout fits" if fault.proved else "No layout was found that fits"
    fact = (
        f"{none} {target.name}: the smallest{'' if fault.nearest.complete else ' found'}, on mesh {where}, holds "
        f"{amount_of_bytes(fault.nearest.bytes)} on each device, {amount_of_bytes(fault.over)} more than the "
        f"{amount_of_bytes(limit)} that may be used, {100 * settings.memory:.3g}% of "
        f"{amount_of_bytes(target.chip.hbm_bytes)}."
    )
    if settings.mesh:
        return f"{fact}\n  Leave --mesh out, or use a larger slice, or {smaller}."
    larger = next_slice(target, limit, spaces(settings), tell)
    remedy = f"It would fit on {larger.name}" if larger else f"No slice of {target.chip.name} is large enough"
    return f"{fact}\n  {remedy}. Otherwise use {smaller}."


def next_slice(target: Slice, limit: float, spaces: Spaces, tell: Callable[[str], None]) -> Slice | None:
    """Return the smallest slice of the chip that is larger than `target` and on which some layout fits, or None."""
    for larger in target.larger():
        tell(f"whether it fits {larger.name}")
        if _some_fits(spaces(larger), limit):
            return larger
    return None


def _fits_smaller_batch(
    settings: SearchSettings,
    target: Slice,
    limit: float,
    spaces: Callable[[SearchSettings], Spaces],
    tell: Callable[[str], None],
) -> bool:
    """Return whether some layout may fit with a smaller batch; none can fit if the state alone is too large.

    A batch of one sequence is tried. If no layout can divide one sequence, the result is True, because a larger batch
    may still fit.
    """
    if settings.batch == 1:
        return False
    tell("whether a batch of one sequence fits")
    one = replace(settings, batch=1, microbatches=None if settings.microbatches is None else 1)
    try:
        return _some_fits(spaces(one)(target), limit) is not False
    except (LayoutError, PlanError):  # For example, groups of experts do not divide one sequence.
        return True


def _some_fits(spaces: Iterable[Space], limit: float) -> bool | None:
    """Return whether some layout of the spaces fits, or None if the spaces have no layout at all."""
    every = [*spaces][::-1]  # More axes have more layouts.
    any_layout = False
    for space in every:
        try:
            if Candidate(space.phase(), limit).least.bytes <= limit:
                return True
            any_layout = True
        except NothingFits:  # The sizes have no layout on this mesh.
            continue
    for several in (space.several for space in every if space.several):
        least = smallest([], [several(limit)])
        if least and least.least.bytes <= limit:
            return True
        any_layout = any_layout or least is not None
    return False if any_layout else None
