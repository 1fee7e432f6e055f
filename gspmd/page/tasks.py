"""The tasks of the process that answers: from the object of a request to plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspmd.annotate.errors import NotationError, PlanError
from gspmd.hardware.chips import CHIPS
from gspmd.lowerings.in_force import LOWERINGS
from gspmd.page.equation import EquationAnswer
from gspmd.page.requests import BadRequest, EquationRequest

DTYPES = ("bfloat16", "float32", "float16", "int8", "float8_e4m3fn")
"""The dtypes that the page offers."""


class Tasks:
    """All that a page may ask for, by name.

    Args:
        folder: the folder whose layouts may be read, if there is one.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._known = {"choices": self._choices, "plan": self._plan}

    def warm(self) -> None:
        """Import what the first answer needs, and plan one equation."""
        self._plan({"equation": "BE_x, EF_x -> BF_x", "sizes": "B=8,E=8,F=8", "mesh": "x=2"})

    def run(self, task: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request: `refused` with the reason if no page sends it."""
        try:
            return self._known[task](given)
        except BadRequest as error:
            return {"refused": str(error)}
        except MemoryError:
            return fault_record(PlanError("there is not enough memory for this.\n  Try a smaller mesh."))

    def _choices(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the fields of the page offer."""
        if given:
            raise BadRequest("the choices take no fields.")
        return {"chips": [*CHIPS], "dtypes": DTYPES, "lowerings": LOWERINGS}

    def _plan(self, given: Mapping[str, Any]) -> dict[str, Any]:
        request = EquationRequest.read(given)
        try:
            return EquationAnswer(request).record()
        except NotationError as error:
            return fault_record(error, request)


def fault_record(error: NotationError, request: EquationRequest | None = None) -> dict[str, Any]:
    """Return what is wrong with the fields of a request, each fault with the field in which it stands."""
    faults = [
        {
            "field": next((name for name, text in vars(request).items() if text == fault.text), None) if request else None,
            "text": fault.text, "start": fault.start, "end": fault.end, "fact": fault.fact, "remedy": fault.remedy,
        }
        for fault in error.faults
    ]  # fmt: skip
    return {"fault": {"kind": type(error).__name__, "message": str(error), "faults": faults}}
