"""Commands of `gspmd`, each in a separate process that is forked from one that has imported everything.

`python -m tests.commands.outcomes` reads a line of JSON for each: the words of the command, and the folder to run in.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """The end of a command.

    Attributes:
        code: its exit code; minus the number of the signal that killed it, -SIGKILL if it took too long.
        out, err: its output.
        seconds: the seconds that it took.
        bytes: its largest resident memory, without that of the imports.
    """

    code: int
    out: str
    err: str
    seconds: float
    bytes: int


class Commands:
    """Runs commands one after another; a context manager."""

    def __enter__(self) -> "Commands":
        arguments = [sys.executable, "-m", "tests.commands.outcomes"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_ROOT)}
        self._server = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environment
        )
        return self

    def __call__(self, *words: str, folder: str | os.PathLike, limit: float = 60) -> Outcome:
        """Run `gspmd` with these words in a folder, for `limit` seconds at most."""
        request = {"words": words, "folder": os.fspath(folder), "limit": limit}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Outcome(**json.loads(self._server.stdout.readline()))

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()


def _serve(requests: Iterator[str]) -> Iterator[Outcome]:
    for line in requests:
        request = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            began = time.monotonic()
            child = os.fork()
            if child == 0:
                _run(request["words"], request["folder"], out.fileno(), err.fileno())
            code, used = _waited(child, request["limit"])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read(1 << 20).decode(errors="replace"))
            took = time.monotonic() - began
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            yield Outcome(code, *texts, took, 1024 * max(0, used.ru_maxrss - own))


def _waited(child: int, limit: float) -> tuple[int, resource.struct_rusage]:
    handle = os.pidfd_open(child)
    with contextlib.closing(os.fdopen(handle, "rb", buffering=0)):
        if not select.select([handle], [], [], limit)[0]:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), used


def _run(words: Sequence[str], folder: str, out: int, err: int) -> None:
    """Become the command; nothing that it raises reaches the caller."""
    from gspmd.commands.main import main

    code = 99
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    # Everything that a command imports, except modules that start a backend.
    import gspmd.commands.compile
    import gspmd.commands.explain
    import gspmd.commands.export
    import gspmd.commands.generate
    import gspmd.commands.search.command
    import gspmd.commands.train  # noqa: F401

    for outcome in _serve(iter(sys.stdin.readline, "")):
        print(json.dumps(vars(outcome)), flush=True)
