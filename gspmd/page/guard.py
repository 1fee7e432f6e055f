"""The guard in front of the page: it checks where a request comes from and its size, and adds headers to every answer.

The page listens on the loopback address. This keeps other machines out, but not the pages of other sites that a browser
on this machine has open. Such pages can send requests to this server: directly, or by a name that they make the browser
resolve to the loopback address (DNS rebinding). So a request must name this server as its host, and must come from this
server's page. A link on another site may open the page, because links are how an equation is shared.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gspmd.page import limits

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'",
        "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    )
)  # fmt: skip
"""The security policy: only the page's own files are loaded, no inline script runs, and no site may frame the page."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(Exception):
    """The error for a request that the page does not answer, with its HTTP status and the reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class Guard:
    """An ASGI application that wraps another application, and passes on only the requests of this page.

    Args:
        application: the application that answers the requests.
        port: the port that the page listens on.
        pages: the paths that a link of another site may open.
    """

    def __init__(self, application: Application, port: int, pages: frozenset[str]):
        self._application, self._pages = application, pages
        names = ("127.0.0.1", "localhost", "[::1]")
        self._hosts = {f"{name}:{port}" for name in names} | ({*names} if port == 80 else set())
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or send the error for a request that is refused."""
        if scope["type"] == "lifespan":
            return await self._application(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], *_encoded(HEADERS)]}
            await send(message)

        try:
            self._check(scope)
            body = await _body(scope, receive)
            await self._application(scope, _replay(body, receive), guarded)
        except Refused as error:
            if not started:
                await _refuse(guarded, error)
        except asyncio.CancelledError:  # The page is ending, and has waited for this answer long enough.
            if not started:
                await _refuse(guarded, Refused(503, "the page is shutting down."))
        except Exception:
            if started:
                raise
            await _refuse(guarded, Refused(500, "the page failed; its terminal says more."))
            raise

    def _check(self, scope: Scope) -> None:
        """Raise an error if a request does not come from this page."""
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            raise Refused(
                421, "this page answers to 127.0.0.1, localhost and [::1] with its own port, and to no other host."
            )
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refused(
                405, f"{scope['method'][:20]} is not a method of this page, which accepts GET, HEAD and POST."
            )
        origins, sites = _values(scope, b"origin"), _values(scope, b"sec-fetch-site")
        opened = scope["method"] == "GET" and scope["path"] in self._pages
        opened = opened and "navigate" in _values(scope, b"sec-fetch-mode")
        foreign = any(origin not in self._origins for origin in origins)
        foreign = foreign or any(site not in ("same-origin", "none") for site in sites)
        if foreign and not opened:
            raise Refused(403, "this request comes from another site.")


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


async def _body(scope: Scope, receive: Receive) -> bytes:
    """Read the body of a request, within the limits of size and time."""
    declared = _values(scope, b"content-length")
    largest = Refused(413, f"the body may have at most {limits.BODY:,} bytes.")
    if any(not length.isdigit() or len(length) > 12 or int(length) > limits.BODY for length in declared):
        raise largest
    body = b""
    try:
        async with asyncio.timeout(limits.BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the connection ended before the whole body had arrived.")
                body += message.get("body", b"")
                if len(body) > limits.BODY:
                    raise largest
                if not message.get("more_body"):
                    return body
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {limits.BODY_SECONDS:g} seconds.") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that first gives the body that has been read, and then the messages that come later."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _refuse(send: Send, error: Refused) -> None:
    body = json.dumps({"refused": error.reason}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    await send({"type": "http.response.start", "status": error.status, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": body})


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
