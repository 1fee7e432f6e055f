"""The search space of a custom model."""

from collections.abc import Callable, Iterator
from functools import partial

from gspmd.commands.search.settings import SearchSettings
from gspmd.commands.search.slice import Slice
from gspmd.layouts import Layout
from gspmd.search.answers import Space
from gspmd.search.answers.microbatches import several
from gspmd.training.config import parse_mesh
from gspmd_models.search.own import OwnProblem, OwnStep


def spaces(settings: SearchSettings) -> Callable[[Slice], Iterator[Space]]:
    """Return a function from a slice to every mesh of it, with every possible number of microbatches.

    The program is read once for each number, whatever the slice.

    Raises:
        LayoutError: the layout lacks lines of the model, or a fixed line.
    """
    layout = Layout.load(settings.layout)
    step = OwnStep(settings.subject, settings.update, settings.batch, settings.length, layout, settings.given)
    counts = (1, *several(settings.batch)) if settings.microbatches is None else (settings.microbatches,)

    def of(target: Slice) -> Iterator[Space]:
        for mesh in [parse_mesh(settings.mesh)] if settings.mesh else target.meshes():
            for count in counts:
                yield Space(partial(OwnProblem, step, mesh, target.chip, count))

    return of
