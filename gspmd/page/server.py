"""The server of the page: it serves the page's files, and the answers that the page's scripts ask for."""

import json
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gspmd.display import theme
from gspmd.page import limits
from gspmd.page.guard import Application, Guard, Receive, Scope, Send
from gspmd.page.requests import BadRequest, read_object
from gspmd.page.worker import Ended, TooLong, Worker

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGES = {"/": "equation.html", "/layout": "layout.html"}
"""The pages, by path."""
EQUATION_TASKS, LAYOUT_TASKS = ("choices", "plan", "compare"), ("shelf", "layout", "kept")
"""The tasks of `gspmd.page.tasks` that a page may ask for; a separate process runs the tasks of layouts."""
SHORT = "gspmd.page.tasks:Tasks"
"""The class that runs the tasks of equations and of layouts, as `module:name`."""
TOLD = ("search", "compile")
"""The tasks that answer part by part. Each has a process of its own, which ends if its page is closed."""
_ENDING = "gspmd page has been ended in its terminal. Start it again, and ask once more."
"""The answer that a task of `TOLD` gives if the server is about to end."""


def application(
    port: int, configs: Path, folder: Path | None = None, long: str = "", ending: Callable[[], bool] = lambda: False
) -> Application:
    """Return the page as an ASGI application.

    Args:
        port: the port on which the page will be served; requests must name this port.
        configs: the folder of the config files that come with gspmd.
        folder: the folder whose layouts may be read, if there is one.
        long: the class of the tasks that take minutes, as `module:name`, since this package may not import it.
        ending: a function that returns whether the server is about to end; answers that take minutes then end too.
    """
    folders = [configs] if folder is None else [configs, folder]
    equations = _Desk(Worker(SHORT), lambda: limits.SECONDS)
    layouts = _Desk(Worker(SHORT, *folders), lambda: limits.LAYOUT_SECONDS)
    longer = {task: _Desk(Worker(long, *folders), lambda: limits.SEARCH_SECONDS) for task in TOLD if long}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await anyio.to_thread.run_sync(equations.worker.start)  # The process for layouts starts when it is asked.
        try:
            yield
        finally:
            for desk in (equations, layouts, *longer.values()):
                desk.worker.close()

    async def read(request: Request) -> dict[str, Any] | Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _refused(415, "the body has to be of type application/json.")
        try:
            return read_object(await request.body())
        except BadRequest as error:
            return _refused(400, str(error))

    async def tell(request: Request, task: str, desk: _Desk) -> Response:
        given = await read(request)
        if isinstance(given, Response):
            return given
        if desk.waiting.borrowed_tokens:
            return _refused(503, f"another request ({task}) is under way, perhaps in another window; stop it first.")
        return _Told(desk, task, given, ending)

    async def ask(request: Request, task: str, desk: _Desk) -> Response:
        given = await read(request)
        if isinstance(given, Response):
            return given
        if desk.waiting.statistics().tasks_waiting >= limits.WAITING:
            return _refused(503, "too many requests wait for an answer.")
        try:
            call = partial(desk.worker.ask, task, given, desk.seconds())
            status, answer = await anyio.to_thread.run_sync(call, limiter=desk.waiting)
        except TooLong as error:
            return _refused(504, str(error))
        except Ended as error:
            return _refused(503, str(error))
        return Response(answer, status, media_type="application/json")

    routes = [Route(path, _file(name)) for path, name in PAGES.items()]
    routes += [Route(f"/{name}", _file(name)) for name in _names() if not name.endswith(".html")]
    routes.append(Route("/figures.css", _figures))
    for desk, tasks in ((equations, EQUATION_TASKS), (layouts, LAYOUT_TASKS)):
        routes += [Route(f"/api/{task}", partial(ask, task=task, desk=desk), methods=["POST"]) for task in tasks]
    for task, desk in longer.items():
        routes.append(Route(f"/api/{task}", partial(tell, task=task, desk=desk), methods=["POST"]))
    if longer:
        routes.append(Route("/api/why", partial(ask, task="why", desk=longer["search"]), methods=["POST"]))
    inner = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _unknown})
    return Guard(inner, port, frozenset(PAGES))


class _Desk:
    """A worker process, the requests that wait for it, and a function that returns the most seconds for a request."""

    def __init__(self, worker: Worker, seconds: Callable[[], float]):
        self.worker, self.seconds, self.waiting = worker, seconds, anyio.CapacityLimiter(1)


class _Told(Response):
    """An answer in lines of JSON: notes about progress, then the HTTP status and the last part of the answer.

    If the page is closed, or its button stops the answer, the connection ends. Then the process that answers ends too.
    """

    def __init__(self, desk: _Desk, task: str, given: Mapping[str, Any], ending: Callable[[], bool]):
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._desk, self._task, self._given, self._ending = desk, task, given, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes: queue.SimpleQueue[str] = queue.SimpleQueue()

        def answer() -> str:
            try:
                call = self._desk.worker.ask(self._task, self._given, self._desk.seconds(), notes.put)
            except (TooLong, Ended) as error:
                reason = _ENDING if self._ending() else str(error)  # Its process is ended before the page is.
                call = 504 if isinstance(error, TooLong) else 503, json.dumps({"refused": reason})
            return f'{{"status": {call[0]}, "answer": {call[1].strip()}}}'

        ended = False

        async def watch() -> None:
            try:
                while (await receive())["type"] != "http.disconnect":
                    pass
            finally:  # Also if the server ends: the thread that waits for the answer cannot be canceled.
                while not ended:
                    self._desk.worker.interrupt()
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(limits.BEATS)

        async def speak() -> None:
            while True:
                if self._ending():
                    self._desk.worker.interrupt()
                lines = "".join(f"{notes.get().strip()}\n" for _ in range(notes.qsize()))
                await send({"type": "http.response.body", "body": (lines or "{}\n").encode(), "more_body": True})
                await anyio.sleep(limits.BEATS)

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            group.start_soon(speak)
            try:
                last = await anyio.to_thread.run_sync(answer, limiter=self._desk.waiting)
            finally:
                ended = True
            group.cancel_scope.cancel()
        lines = "".join(f"{notes.get().strip()}\n" for _ in range(notes.qsize()))
        await send({"type": "http.response.body", "body": f"{lines}{last}\n".encode()})


def _names() -> list[str]:
    return sorted(each.name for each in files(__package__).joinpath("static").iterdir())


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with a file of the page.

    The file is read now, so that no request can name a different file.
    """
    content = files(__package__).joinpath("static").joinpath(name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, media_type=_KINDS[name[name.rindex(".") :]])

    return answer


async def _figures(_: Request) -> Response:
    """Answer with the style sheet of the figures, which follow the theme of the page."""
    return Response(theme.style(standalone=False), media_type="text/css")


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer a request for a path that does not exist, or with an HTTP method that the path does not accept."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _refused(405, f"{request.method} is not a method of {request.url.path[:100]}.")
    return _refused(error.status_code, f"there is nothing at {request.url.path[:100]}.")


def _refused(status: int, reason: str) -> Response:
    return JSONResponse({"refused": reason}, status)
