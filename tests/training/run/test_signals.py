"""SIGTERM saves and counts as done; SIGINT and SIGHUP save and count as interrupted."""

import dataclasses
import errno
import io
import os
import pty
import signal
import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import pytest
from rich.console import Console

from gspmd.commands import runner
from gspmd.interruption import Terminated
from gspmd.training import fit
from gspmd.training.checkpoints import newest
from gspmd.training.config import TrainingConfig
from gspmd.training.run.signals import Stop, terminable

CONFIG = TrainingConfig(steps=20, batch=4, length=16, validation_every=0, final_validation_batches=1, save_every=6)


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGTERM], 0),
        ([signal.SIGINT], 130),
        ([signal.SIGHUP], 129),
        ([signal.SIGHUP, signal.SIGHUP], 129),  # of the kernel, and of the shell
        ([signal.SIGTERM, signal.SIGHUP], 0),  # as systemd has it with SendSIGHUP
        ([signal.SIGHUP, signal.SIGTERM], 0),  # a machine that shuts down
    ],
)
def test_a_signal_in_the_middle_of_a_step_saves_at_its_end(make_program, corpus, tmp_path, capsys, numbers, code):
    program, placed = make_program()[0], count(1)

    def place(batch):
        if next(placed) == 10:  # the devices compute step 9
            for number in numbers:
                os.kill(os.getpid(), number)
        return program.place(batch)

    def run(argv):
        with runner.interrupts(tmp_path):
            fit(CONFIG, dataclasses.replace(program, place=place), corpus, tmp_path, Console(quiet=True))

    assert runner.guarded(run, []) == code
    assert newest(tmp_path) == 9
    said = capsys.readouterr().err
    assert said.startswith("\nInterrupted after step 9. To go on: python ")
    assert said.endswith(f" --resume --out {tmp_path}\n")


@pytest.mark.parametrize(("saved", "number", "code"), [
    ([], signal.SIGTERM, 143), (["8"], signal.SIGTERM, 0), ([], signal.SIGINT, 130), (["8"], signal.SIGINT, 130),
    ([], signal.SIGHUP, 129), (["8"], signal.SIGHUP, 129),
])  # fmt: skip
def test_a_signal_outside_the_loop_loses_nothing_that_is_saved(tmp_path, saved, number, code):
    """While the model is built, or text is sampled at the end."""
    for step in saved:
        (tmp_path / "checkpoints" / step).mkdir(parents=True)

    def run(argv):
        with runner.interrupts(tmp_path):
            os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    assert runner.guarded(run, []) == code
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_run_has_a_folder_is_one_line(number, capfd):
    """While the settings or the text are read, or the devices are started."""
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        assert runner.guarded(lambda argv: os.kill(os.getpid(), number), []) == 128 + number
        assert capfd.readouterr().err == "\nInterrupted before the run began.\n"
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_before_the_first_save_is_one_line(make_program, corpus, tmp_path, capfd, number):
    """And so are further ones, which come while that line is written."""
    program, placed = make_program()[0], count(1)

    def place(batch):
        if next(placed) == 2:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return program.place(batch)

    class Impatient(io.StringIO):
        def write(self, text):
            os.kill(os.getpid(), number)
            return super().write(text)

    def run(argv):
        with runner.interrupts(tmp_path):
            fit(CONFIG, dataclasses.replace(program, place=place), corpus, tmp_path, Console(quiet=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", said := Impatient())
        assert runner.guarded(run, []) == 128 + number
    assert said.getvalue() == "\nInterrupted before a step was saved.\n"
    assert newest(tmp_path) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_is_ignored_stays_so(number, monkeypatch):
    """A script's background job and nohup ignore signals, and training leaves that alone."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with terminable(), Stop() as stop:
            os.kill(os.getpid(), number)
            assert not stop.asked
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.number == signal.SIGTERM
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


_IN_A_TERMINAL = """
import fcntl, signal, sys, termios, time
from pathlib import Path
from gspmd.commands import runner
from gspmd.display.console import console
from gspmd.training.run.signals import Interrupted, Stop

def run(argv):
    out, shown = Path(sys.argv[1]), console()
    with runner.interrupts(out), Stop() as stop, stop.closed(shown):
        shown.print("begun")
        while not stop.asked:
            shown.print("a step")
            time.sleep(0.01)
        shown.print("saving")
        (out / "checkpoints" / "7").mkdir(parents=True)
        raise Interrupted(7, out, stop.number)

if sys.argv[2] == "its own":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(runner.guarded(run, [], "gspmd train"))
"""


@pytest.mark.parametrize(
    ("whose", "code"), [("its own", 128 + signal.SIGHUP), ("of others", 128 + signal.SIGPIPE)], ids=["", "disowned"]
)
def test_a_terminal_that_is_closed_saves(tmp_path, whose, code):
    """Each write to it is an error from then on, whether a signal comes or, as to a process that is disowned, none."""
    terminal, inside = pty.openpty()
    given = [sys.executable, "-c", _IN_A_TERMINAL, str(tmp_path), whose]
    with subprocess.Popen(given, stdin=inside, stdout=inside, stderr=inside, start_new_session=True) as process:
        os.close(inside)
        while b"a step" not in os.read(terminal, 1 << 12):
            pass
        os.close(terminal)
        assert process.wait() == code
    assert newest(tmp_path) == 7


def test_a_second_signal_interrupts_at_once():
    for number, raised in ((signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)):
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.asked
            with pytest.raises(raised):
                os.kill(os.getpid(), number)
            assert stop.number == signal.SIGINT


@pytest.mark.parametrize(
    ("number", "terminal"), [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, True)]
)
def test_a_signal_is_answered_at_once_in_a_terminal(monkeypatch, capfd, number, terminal):
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: terminal))
    with Stop() as stop:
        os.kill(os.getpid(), number)
    said = "\nStopping at the end of this step, which is then saved. To stop at once: interrupt again.\n"
    assert (stop.number, capfd.readouterr().err) == (number, said if terminal else "")


def test_an_output_that_is_closed_saves_at_the_end_of_a_step(make_program, corpus, tmp_path, capfd):
    """The case of `gspmd train | tee log` whose tee ends."""

    class Closed(io.StringIO):
        def write(self, text):
            if "step 1/20" in text:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            return super().write(text)

    def run(argv):
        with runner.interrupts(tmp_path):
            fit(CONFIG, make_program()[0], corpus, tmp_path, Console(file=Closed()))

    assert runner.guarded(run, []) == 128 + signal.SIGPIPE
    said = capfd.readouterr().err
    assert said.startswith("\nStandard output is closed: stopping at the end of this step.\n")
    assert "\nInterrupted after step 1. To go on: python " in said
    assert newest(tmp_path) == 1


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
