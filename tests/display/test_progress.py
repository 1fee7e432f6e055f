"""Progress: nothing is silent for long, a call that does not return least of all."""

import io
import sys
import time
from threading import Event, Thread
from types import SimpleNamespace

import pytest
from rich.console import Console

from gspmd.display import progress
from gspmd.display.notebook import Cell
from gspmd.display.progress import Progress
from gspmd.training.reporting.display import Display


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
    assert len(lines(console)) == over


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


class _Handle:
    """The handle that IPython's `display` returns: a place whose content is replaced."""

    def __init__(self, shown: list):
        self.shown = shown

    def update(self, data, raw):
        self.shown.append(data)


@pytest.fixture
def notebook(monkeypatch):
    """A console as in a notebook, the places in its output, and what was shown in them."""
    shown, places = [], []

    def display(data, raw, display_id):
        places.append(display_id)
        shown.append(data)
        return _Handle(shown)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    for name in ("_EVERY", "_SOON", "_POLL", "_IN_PLACE"):
        monkeypatch.setattr(progress, name, 0.02)
    return Console(file=io.StringIO(), width=30, force_jupyter=True), places, shown


def test_a_notebook_has_one_line_that_changes(notebook):
    console, places, shown = notebook
    with Progress(console, "Searching <4 meshes>"):
        deadline = time.monotonic() + 120
        while len(shown) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert places == [True]
    assert shown[0]["text/plain"].startswith("Searching <4 meshes> …")
    assert "Searching &lt;4 meshes&gt; …" in shown[0]["text/html"]
    assert shown[-1] == {"text/plain": "", "text/html": ""}
    assert console.file.getvalue() == ""


def test_a_line_that_is_being_written_comes_before_the_end(notebook):
    console, _, shown = notebook
    writing = Event()

    def slowly():
        writing.set()
        time.sleep(0.2)
        return "Searching"

    with Progress(console, slowly):
        assert writing.wait(120)
    assert shown[-1] == {"text/plain": "", "text/html": ""}
    over = len(shown)
    time.sleep(0.4)
    assert len(shown) == over


def test_threads_share_one_place_in_a_notebook(monkeypatch):
    places = []

    def display(data, raw, display_id):
        time.sleep(0.05)
        places.append(data)
        return _Handle([])

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    cell = Cell()
    threads = [Thread(target=cell.show, args=(f"step {number}",)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(places) == 1


def test_a_notebook_keeps_the_last_step_with_its_bar(notebook):
    console, places, shown = notebook
    with Progress(console, "Step 1/2") as line:
        line.report("step 1/2  loss 3.0", 0.5)
        line.report("step 2/2  loss 2.0", 1.0)
    assert places == [True]
    assert shown[-1]["text/plain"] == "step 2/2  loss 2.0"
    assert '<progress value="1.0000" max="1"' in shown[-1]["text/html"]


def test_a_training_run_in_a_notebook_is_one_line(notebook):
    console, places, shown = notebook
    with Display(console, 50) as display:
        for step in range(1, 51):
            display.update(step, {"loss": 1.0, "bits_per_byte": 1.0, "tokens_per_second": 10.0})
    assert places == [True]
    assert shown[-1]["text/plain"].startswith("step 50/50  loss 1.000")
    assert console.file.getvalue() == ""
