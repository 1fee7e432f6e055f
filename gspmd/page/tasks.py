"""The tasks of the worker process: each task turns the JSON object of a request into data for JSON."""

from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

from gspmd.annotate.errors import NotationError, PlanError
from gspmd.display.units import mesh_text
from gspmd.hardware.chips import CHIPS
from gspmd.lowerings.names import LOWERINGS
from gspmd.page.equation import EquationAnswer
from gspmd.page.requests import BadRequest, EquationRequest, Texts

DTYPES = ("bfloat16", "float32", "float16", "int8", "float8_e4m3fn")
"""The dtypes that the page offers."""
DEVICES = 32
"""Number of devices of the mesh that the page first offers with a layout."""


class Tasks:
    """The tasks that a page may ask for, by name.

    Args:
        configs: the folder of the config files that come with gspmd; None for a process that plans no layouts.
        folder: the folder whose layouts may be read, if there is one.
    """

    def __init__(self, configs: Path | None = None, folder: Path | None = None):
        self._configs, self._folder = configs, folder
        self._known = {
            "choices": self._choices, "plan": self._plan, "compare": self._compare, "shelf": self._shelf,
            "layout": self._layout, "kept": self._kept,
        }  # fmt: skip

    def warm(self) -> None:
        """Import what the first answer needs, and prepare it.

        A process for equations plans one equation. A process for layouts reads the models and layouts.
        """
        if self._configs is not None:
            self._shelf({})
            return
        self._compare({"equation": "BE_x, EF_x -> BF_x", "sizes": "B=8,E=8,F=8", "mesh": "x=2"})

    def run(
        self, task: str, given: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None] = lambda note: None
    ) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status of a request, and the answer; these tasks are short, and report no progress."""
        return answered(self._known[task], given)

    def _choices(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the choices that the fields of the page offer."""
        if given:
            raise BadRequest("the choices take no fields.")
        return {"chips": [*CHIPS], "dtypes": DTYPES, "lowerings": LOWERINGS}

    def _shelf(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the models and layouts that a page may name, and the settings with which each config file trains."""
        from gspmd.page.layout import Shelf
        from gspmd_models.config import REMATS

        if given:
            raise BadRequest("the shelf takes no fields.")
        assert self._configs is not None, "the server asks this of the process that plans layouts"
        shelf = Shelf(self._configs, self._folder)
        trained = ("batch", "length")
        configs = {
            name: {key: str(value) for key, value in tables.get("training", {}).items() if key in trained}
            | {
                "layout": tables.get("sharding", {}).get("layout", ""),
                "mesh": tables.get("sharding", {}).get("mesh", ""),
            }
            for name, tables in shelf.configs().items()
        }
        return {
            "configs": configs,
            "remats": REMATS,
            "layouts": {name: mesh_text(shelf.layout(name).mesh_for(DEVICES)) for name in shelf.layouts()},
        } | self._choices({})

    def _layout(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._of_layout(given, "record")

    def _kept(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the memory of the activations that a training step keeps.

        This memory takes as long to compute as the plan of the step, so the page asks for the memory later.
        """
        return self._of_layout(given, "kept")

    def _of_layout(self, given: Mapping[str, Any], part: str) -> dict[str, Any]:
        from gspmd.page.layout import LayoutRequest, Shelf, planned

        request = LayoutRequest.read(given)
        assert self._configs is not None, "the server asks this of the process that plans layouts"
        try:
            return planned(request, Shelf(self._configs, self._folder), methodcaller(part))
        except NotationError as error:
            return fault_record(error, request)

    def _plan(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return _answer(given, EquationAnswer.record)

    def _compare(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return _answer(given, EquationAnswer.compared)


def answered(
    task: Callable[[Mapping[str, Any]], dict[str, Any]], given: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status of a request, and the answer; the answer to a bad request is `refused`, with a reason."""
    try:
        return 200, task(given)
    except BadRequest as error:
        return 400, {"refused": str(error)}
    except MemoryError:
        return 200, fault_record(PlanError("there is not enough memory for this.\n  Try a smaller mesh."))


def _answer(given: Mapping[str, Any], part: Callable[[EquationAnswer], dict[str, Any]]) -> dict[str, Any]:
    request = EquationRequest.read(given)
    try:
        return part(EquationAnswer(request))
    except NotationError as error:
        return fault_record(error, request)


def fault_record(error: NotationError, request: Texts | None = None) -> dict[str, Any]:
    """Return the faults in a request as data for JSON, each with the name of the field that has the fault."""
    texts = {} if request is None else {text: name for name, text in reversed(vars(request).items())}
    faults = [
        {
            "field": texts.get(fault.text),
            "text": fault.text, "start": fault.start, "end": fault.end, "fact": fault.fact, "remedy": fault.remedy,
        }
        for fault in error.faults
    ]  # fmt: skip
    return {"fault": {"kind": type(error).__name__, "message": str(error), "faults": faults}}
