"""A command whose output is closed, as by `| head`, or full ends with an exit code that says so, and no traceback."""

import os
import pty
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPLAIN = ["explain", "BLE_xyz, E_xF_yz -> BLF_yzx", "--mesh", "x=4,y=4,z=4", "--sizes", "B=512,L=1,E=18432,F=73728"]
FULL = "Standard output cannot be written: No space left on device.\n"

_PRINTS = """
import sys, types
from threading import Thread
from gspmd.commands import main
from gspmd.display.console import console

def run(flags, file, settings):
    {}
    return 0

main.import_module = lambda name: types.SimpleNamespace(run=run, parse=str, read=lambda *_: ("settings", 0))
sys.argv = ["gspmd", "train"]
sys.exit(main.main())
"""


def into(stream, given):
    """The exit code, and what is said on stderr, but for JAX's start, where that is slow."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": stream, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run([sys.executable, *given], cwd=ROOT, env=buffered, **pipes)
    return done.returncode, re.sub(r"Starting JAX … .*\n", "", done.stderr)


@contextmanager
def closed():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


@pytest.fixture(params=["closed", "hung up", "full"])
def output(request):
    """A stream that takes nothing; and the exit code and message that it makes."""
    if request.param == "full":
        if not os.path.exists("/dev/full"):
            pytest.skip("this machine has no /dev/full")
        with open("/dev/full", "w") as stream:
            yield stream, (1, FULL)
        return
    if request.param == "hung up":
        terminal, stream = pty.openpty()
        os.close(terminal)
        yield stream, (141, "")
        os.close(stream)
        return
    with closed() as stream:
        yield stream, (141, "")


@pytest.mark.parametrize(
    "given", [["-m", "gspmd", "--help"], ["-m", "gspmd", *EXPLAIN], ["scripts/search.py", "--help"]],
    ids=["commands", "explain", "help"],
)  # fmt: skip
def test_of_a_command(output, given):
    stream, ended = output
    assert into(stream, given) == ended


@pytest.mark.parametrize(
    "printed", ["print('a line')", "print('a line\\n' * 100_000)", "console().print('a line')"],
    ids=["a little", "more than a buffer", "a console"],
)  # fmt: skip
def test_of_whatever_prints(output, printed):
    stream, ended = output
    assert into(stream, ["-c", _PRINTS.format(printed)]) == ended


def test_a_thread_that_finds_it_closed_says_nothing():
    """A thread says what takes long."""
    beside = "thread = Thread(target=lambda: console().print('beside')); thread.start(); thread.join()"
    with closed() as stream:
        assert into(stream, ["-c", _PRINTS.format(beside)]) == (141, "")


def test_a_fault_is_not_hidden_by_a_closed_output(output):
    stream, _ = output
    code, said = into(stream, ["-c", _PRINTS.format("print('a line'); raise RuntimeError('a fault')")])
    assert code != 0
    assert "RuntimeError: a fault" in said
