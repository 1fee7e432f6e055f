"""The server of the page: its files, and the answers that its scripts ask for."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gspmd.display import theme
from gspmd.page import limits
from gspmd.page.guard import Application, Guard
from gspmd.page.requests import BadRequest, read_object
from gspmd.page.worker import Ended, TooLong, Worker

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGES = {"/": "equation.html", "/layout": "layout.html"}
"""The pages, by path."""
EQUATION_TASKS, LAYOUT_TASKS = ("choices", "plan", "compare"), ("shelf", "layout")
"""The tasks of `gspmd.page.tasks` that a page may ask for; those of layouts have a process of their own."""


def application(port: int, configs: Path, folder: Path | None = None) -> Application:
    """Return the page as an ASGI application.

    Args:
        port: the port on which it will be served, which its requests have to name.
        configs: the folder of the shipped configs.
        folder: the folder whose layouts may be read, if there is one.
    """
    equations = _Desk(Worker(), lambda: limits.SECONDS)
    layouts = _Desk(Worker(configs, *([] if folder is None else [folder])), lambda: limits.LAYOUT_SECONDS)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await anyio.to_thread.run_sync(equations.worker.start)  # That of layouts starts when one is asked for.
        try:
            yield
        finally:
            equations.worker.close()
            layouts.worker.close()

    async def ask(request: Request, task: str, desk: _Desk) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _refused(415, "the body has to be of type application/json.")
        try:
            given = read_object(await request.body())
        except BadRequest as error:
            return _refused(400, str(error))
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
    inner = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _unknown})
    return Guard(inner, port, frozenset(PAGES))


class _Desk:
    """A process that answers, the requests that wait for it, and a function that returns the most seconds of each."""

    def __init__(self, worker: Worker, seconds: Callable[[], float]):
        self.worker, self.seconds, self.waiting = worker, seconds, anyio.CapacityLimiter(1)


def _names() -> list[str]:
    return sorted(each.name for each in files(__package__).joinpath("static").iterdir())


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with a file of the page, read now: no path of a request leads to a file."""
    content = files(__package__).joinpath("static").joinpath(name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, media_type=_KINDS[name[name.rindex(".") :]])

    return answer


async def _figures(_: Request) -> Response:
    """Answer with the style sheet of the figures, which follow the theme of the page."""
    return Response(theme.style(standalone=False), media_type="text/css")


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer a request for what is not there, or by a method that it does not take."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _refused(405, f"{request.method} is not a method of {request.url.path[:100]}.")
    return _refused(error.status_code, f"there is nothing at {request.url.path[:100]}.")


def _refused(status: int, reason: str) -> Response:
    return JSONResponse({"refused": reason}, status)
