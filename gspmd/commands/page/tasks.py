"""The tasks of a page that take minutes and therefore run in separate processes: search and compilation."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gspmd import host
from gspmd.annotate.errors import NotationError
from gspmd.commands.page.compiling import CompileRequest, compiled
from gspmd.commands.page.search import Searcher, SearchRequest, WhyRequest
from gspmd.page.layout import Shelf
from gspmd.page.requests import Texts
from gspmd.page.tasks import answered, fault_record
from gspmd.training.toml import ConfigError

Tell = Callable[[Mapping[str, Any]], None]


class LongTasks:
    """The tasks, by name, that a page may ask a process for long tasks to run.

    Args:
        configs: the folder of the shipped configs.
        folder: the folder whose layout files may be read, or None.
    """

    def __init__(self, configs: Path, folder: Path | None = None):
        self._shelf = Shelf(configs, folder)
        self._searcher = Searcher(self._shelf)

    def warm(self) -> None:
        """Start JAX without devices, as `gspmd search` does."""
        with suppress(host.HostError):
            host.start(1, "cpu")

    def run(self, task: str, given: Mapping[str, Any], tell: Tell = lambda note: None) -> tuple[int, dict[str, Any]]:
        """Run a task; return its HTTP status and the last part of its answer, and pass earlier parts to `tell`."""
        known: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "search": partial(self._search, tell=tell),
            "why": self._why,
            "compile": partial(self._compile, tell=tell),
        }
        return answered(known[task], given)

    def _search(self, given: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
        request = SearchRequest.read(given)
        return _faults_told(request, lambda: self._searcher.search(request, tell))

    def _compile(self, given: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
        request = CompileRequest.read(given)
        return _faults_told(request, lambda: compiled(request, self._shelf, tell))

    def _why(self, given: Mapping[str, Any]) -> dict[str, Any]:
        request = WhyRequest.read(given)
        return _faults_told(request, lambda: self._searcher.why(request))


def _faults_told(request: Texts, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return answer()
    except NotationError as error:
        return fault_record(error, request)
    except ConfigError as error:
        return fault_record(NotationError(str(error)), request)
