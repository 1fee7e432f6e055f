"""Progress: nothing is silent for long, a call that does not return least of all."""

import io
import time

import pytest
from rich.console import Console

from gspmd.display import progress
from gspmd.display.progress import Progress


@pytest.fixture
def console(monkeypatch):
    """Where there is no terminal, with tenths of seconds for seconds."""
    monkeypatch.setattr(progress, "_EVERY", 0.2)
    monkeypatch.setattr(progress, "_SOON", 0.08)
    monkeypatch.setattr(progress, "_POLL", 0.02)
    return Console(file=io.StringIO(), width=30)


def lines(console):
    return console.file.getvalue().splitlines()


def test_a_call_that_does_not_return_is_spoken_for(console):
    with Progress(console, "Compiling a program with a long name"):
        time.sleep(1.0)
    assert 3 <= len(lines(console)) <= 6
    assert lines(console)[0] == "Compiling a program with a long name …"
    assert all(line.startswith("Compiling a program with a long name …") for line in lines(console))
    time.sleep(0.5)
    assert len(lines(console)) <= 6  # it is over


def test_what_is_short_says_nothing(console):
    with Progress(console, "Starting"):
        pass
    assert lines(console) == []


def test_of_two_the_inner_one_speaks(console):
    with Progress(console, "Training"):
        with Progress(console, "Validating") as inner:
            time.sleep(0.5)
            inner.begin(lambda: "Validating: batch 7")
            time.sleep(0.3)
        said = len(lines(console))
        time.sleep(0.5)
    assert {line.partition(" …")[0] for line in lines(console)[:said]} == {"Validating", "Validating: batch 7"}
    assert {line.partition(" …")[0] for line in lines(console)[said:]} == {"Training"}


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
