"""Open a page in the browser that plans equations and layouts as you type: figures, tensors on the mesh, costs by line.

    gspmd page

The page is served only to this machine, until Ctrl-C ends it. Nothing runs on a device.
"""

import argparse
import logging
import socket
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Thread

from gspmd.commands import configs
from gspmd.commands.arguments import Parser
from gspmd.reading import folder_fault, whole_number

LONG = "gspmd.commands.page.tasks:LongTasks"
"""The tasks of the page that take minutes."""
_PORT = 8765
_PORTS = 20
"""The number of ports, from `_PORT` on, that are tried in turn if no port is given."""


def parse(argv: Sequence[str], script: str = "") -> argparse.Namespace:
    """Parse the flags.

    Args:
        argv: the flags.
        script: unused, because no file in scripts/ runs this command.
    """
    return make_parser().parse_args(argv)


def run(argv: Sequence[str], script: str = "", settings: argparse.Namespace | None = None) -> int:
    """Serve the page until an interrupt; return the exit code, 2 for bad input or a package that is not installed.

    Args:
        argv: the flags.
        script: unused; see `parse`.
        settings: the settings, if the flags have been parsed already.
    """
    options = settings or parse(argv)
    try:
        import uvicorn

        from gspmd.page.server import application
    except ModuleNotFoundError as error:
        if error.name not in ("anyio", "starlette", "uvicorn"):
            raise
        print(f"gspmd page: {error.name} is not installed. Run pip install 'gspmd[page]'.", file=sys.stderr)
        return 2
    try:
        listening = _listen(options.port)
    except OSError as error:
        ports = f"port {options.port}" if options.port else f"the ports {_PORT} to {_PORT + _PORTS - 1}"
        other = "another --port, or none for the first free one" if options.port else "a free port with --port"
        print(f"gspmd page: cannot listen on {ports}: {error.strerror}.\n  Give {other}.", file=sys.stderr)
        return 2
    with closing(listening):
        port = listening.getsockname()[1]
        from gspmd.page import limits

        served = application(port, configs.FOLDER, options.layouts, LONG, lambda: server.should_exit)
        config = uvicorn.Config(
            served, log_level="warning", lifespan="on", ws="none",
            server_header=False,
            limit_concurrency=limits.CONNECTIONS, timeout_graceful_shutdown=2, h11_max_incomplete_event_size=2**15,
        )  # fmt: skip
        address = f"http://127.0.0.1:{port}/"

        class Server(uvicorn.Server):
            """A server that prints its address and opens the browser once it answers requests."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    print(f"gspmd page: {address}   (Ctrl-C ends it)", flush=True)
                    if not options.no_browser:
                        Thread(target=webbrowser.open, args=(address,), daemon=True).start()

        server = Server(config)

        def tells(record: logging.LogRecord) -> bool:
            """Return whether a record is for the user.

            Records about answers that are pending when the page ends are not for the user, because these answers are
            canceled on purpose. The same holds for records about WebSockets. The page uses no WebSocket, so only a
            stranger asks for one.
            """
            about = record.getMessage()
            return not (server.should_exit or "upgrade request" in about or "WebSocket" in about)

        logging.getLogger("uvicorn.error").addFilter(tells)
        server.run(sockets=[listening])
    return 0


def make_parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser(prog="gspmd page", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=_port, help=f"the port to listen on (default: the first free one from {_PORT})")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and open no browser")
    parser.add_argument(
        "--layouts", type=_folder, metavar="FOLDER", help="a folder of layouts to offer along with the presets"
    )
    return parser


def _port(text: str) -> int:
    number = whole_number(text)
    if number is None or not 1 <= number < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a whole number from 1 to 65535.")
    return number


def _folder(text: str) -> Path:
    fault = folder_fault(text)
    if fault:
        raise argparse.ArgumentTypeError(f"cannot offer the layouts of {text!r}: {fault}.")
    return Path(text).resolve()


def _listen(port: int | None) -> socket.socket:
    """Listen on a port of the loopback address: the given port, or the first free port."""
    for number in [port] if port else range(_PORT, _PORT + _PORTS):
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", number))
            return listening
        except OSError:
            listening.close()
            if port or number == _PORT + _PORTS - 1:
                raise
    raise AssertionError("a port is bound, or the last error raised")
