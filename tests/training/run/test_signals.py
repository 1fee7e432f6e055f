"""SIGTERM saves and counts as done; SIGINT saves and counts as interrupted."""

import dataclasses
import errno
import io
import os
import signal
from itertools import count
from types import SimpleNamespace

import pytest
from rich.console import Console

from gspmd.training import command, fit
from gspmd.training.checkpoints import newest
from gspmd.training.config import TrainingConfig
from gspmd.training.run.signals import Stop, Terminated, terminable

CONFIG = TrainingConfig(steps=20, batch=4, length=16, validation_every=0, final_validation_batches=1, save_every=6)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_in_the_middle_of_a_step_saves_at_its_end(make_program, corpus, tmp_path, capsys, number, code):
    program, placed = make_program()[0], count(1)

    def place(batch):
        if next(placed) == 10:  # the devices compute step 9
            os.kill(os.getpid(), number)
        return program.place(batch)

    def run(argv):
        with command.interrupts(tmp_path):
            fit(CONFIG, dataclasses.replace(program, place=place), corpus, tmp_path, Console(quiet=True))

    assert command.guarded(run, []) == code
    assert newest(tmp_path) == 9
    said = capsys.readouterr().err
    assert said.startswith("\nInterrupted after step 9. To go on: python ")
    assert said.endswith(f" --resume --out {tmp_path}\n")


@pytest.mark.parametrize(("saved", "number", "code"), [
    ([], signal.SIGTERM, 143), (["8"], signal.SIGTERM, 0), ([], signal.SIGINT, 130), (["8"], signal.SIGINT, 130),
])  # fmt: skip
def test_a_signal_outside_the_loop_loses_nothing_that_is_saved(tmp_path, saved, number, code):
    """While the model is built, or text is sampled at the end."""
    for step in saved:
        (tmp_path / "checkpoints" / step).mkdir(parents=True)

    def run(argv):
        with command.interrupts(tmp_path):
            os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    assert command.guarded(run, []) == code
    assert signal.getsignal(signal.SIGTERM) is before


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
def test_ctrl_c_in_a_terminal_is_answered_at_once(monkeypatch, capfd, number, terminal):
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: terminal))
    with Stop() as stop:
        os.kill(os.getpid(), number)
    said = "\nStopping at the end of this step. To stop at once: interrupt again.\n"
    assert (stop.number, capfd.readouterr().err) == (number, said if terminal and number == signal.SIGINT else "")


def test_an_output_that_is_closed_saves_at_the_end_of_a_step(make_program, corpus, tmp_path, capfd):
    """As `gspmd train | tee log` has it, where tee ends."""

    class Closed(io.StringIO):
        def write(self, text):
            if "step 1/20" in text:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            return super().write(text)

    def run(argv):
        with command.interrupts(tmp_path):
            fit(CONFIG, make_program()[0], corpus, tmp_path, Console(file=Closed()))

    assert command.guarded(run, []) == 128 + signal.SIGPIPE
    said = capfd.readouterr().err
    assert said.startswith("\nStandard output is closed: stopping at the end of this step.\n")
    assert "\nInterrupted after step 1. To go on: python " in said
    assert newest(tmp_path) == 1


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
