"""SIGTERM saves and counts as done; SIGINT saves and counts as interrupted."""

import os
import signal

import pytest
from rich.console import Console

from gspmd.training import command, fit
from gspmd.training.checkpoints import newest
from gspmd.training.config import TrainingConfig
from gspmd.training.run.signals import Stop, Terminated, terminable

CONFIG = TrainingConfig(steps=20, batch=4, length=16, validation_every=0, final_validation_batches=1, save_every=6)


class Signalling(Console):
    """Sends a signal to this process when a step is shown."""

    def __init__(self, number, at):
        super().__init__(quiet=True)
        self.number, self.line = number, f"step {at}/"

    def print(self, *lines, **more):
        if lines and str(lines[0]).startswith(self.line):
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_at_the_end_of_the_step(make_program, corpus, tmp_path, capsys, number, code):
    def run(argv):
        with command.interrupts(tmp_path):
            fit(CONFIG, make_program()[0], corpus, tmp_path, Signalling(number, at=9))

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


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
