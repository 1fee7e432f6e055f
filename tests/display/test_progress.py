"""Progress: nothing is silent for long, a call that does not return least of all."""

import io
import time

import pytest
from rich.console import Console

from gspmd.display import progress
from gspmd.display.progress import Progress


@pytest.fixture
def console(monkeypatch):
    """Return a console as without a terminal, on which tenths of seconds stand for seconds."""
    monkeypatch.setattr(progress, "_EVERY", 0.2)
    monkeypatch.setattr(progress, "_SOON", 0.08)
    monkeypatch.setattr(progress, "_POLL", 0.02)
    return Console(file=io.StringIO(), width=30)


def lines(console):
    return console.file.getvalue().splitlines()


def wait(console, *said):
    """Until the lines begin with these, whatever else this machine has to do."""
    deadline = time.monotonic() + 120
    while not {*said} <= {line.partition(" …")[0] for line in lines(console)}:
        assert time.monotonic() < deadline, lines(console)
        time.sleep(0.02)


def test_a_call_that_does_not_return_is_spoken_for(console):
    began = time.monotonic()
    with Progress(console, "Compiling a program with a long name"):
        while len(lines(console)) < 4:
            time.sleep(0.02)
    over, seconds = len(lines(console)), time.monotonic() - began
    assert over <= 1 + seconds / 0.2
    assert lines(console)[0] == "Compiling a program with a long name …"
    assert all(line.startswith("Compiling a program with a long name …") for line in lines(console))
    time.sleep(0.5)
    assert len(lines(console)) <= over + 1  # it is over, but for a line that was being written


def test_what_is_short_says_nothing(console, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY", 120)
    monkeypatch.setattr(progress, "_SOON", 60)
    with Progress(console, "Starting"):
        time.sleep(0.1)
    assert lines(console) == []


def test_of_two_the_inner_one_speaks(console):
    with Progress(console, "Training"):
        with Progress(console, "Validating") as inner:
            wait(console, "Validating")
            inner.begin(lambda: "Validating: batch 7")
            wait(console, "Validating: batch 7")
        said = len(lines(console))
        wait(console, "Training")
    # Of the outer one only what came before the inner one had begun, or after it had ended.
    names = [line.partition(" …")[0] for line in lines(console)]
    inside = [at for at, name in enumerate(names) if name != "Training"]
    assert {*names[inside[0] : inside[-1] + 1]} == {"Validating", "Validating: batch 7"}
    assert {*names[said + 1 :]} <= {"Training"}


def test_what_takes_very_long_is_said_more_seldom(console, monkeypatch):
    with Progress(console, "Compiling") as long:
        now = time.monotonic()
        monkeypatch.setattr(long, "_since", now - 3600)
        for silent, due in ((20, False), (30, True)):
            monkeypatch.setattr(Progress, "_said", now - silent)
            assert long.due == due
        monkeypatch.setattr(long, "_since", now - 90 * 3600)
        monkeypatch.setattr(Progress, "_said", now - 61)
        assert long.due


def test_a_terminal_shows_the_time_in_a_line_that_goes(monkeypatch):
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    with Progress(console, "Compiling") as shown:
        assert str(shown) == "Compiling …"
        monkeypatch.setattr(shown, "_began", time.monotonic() - 12)
        assert str(shown) == "Compiling … 12 s"
        shown._status._live.refresh()
    assert "Compiling … 12 s" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K")


def test_nowhere_to_say_it(console):
    with Progress(None, "Reading") as silent:
        silent.say("Reading more")
        silent.note("a fact")
    assert lines(console) == []
