"""The loop: figures of every step, a stop that saves, and a resumed run that equals an unbroken one."""

import dataclasses
import io
import json
import math
import signal

import numpy as np
import pytest
from rich.console import Console

from gspmd.training import Interrupted, fit
from gspmd.training.checkpoints import newest
from gspmd.training.config import TrainingConfig
from gspmd.training.reporting import metrics
from gspmd.training.toml import ConfigError

CONFIG = TrainingConfig(steps=20, batch=4, length=16, validation_every=8, validation_batches=2, save_every=6)


@pytest.fixture
def console():
    return Console(quiet=True)


def replace(config, **changes):
    return type(config)(**{**vars(config), **changes})


def test_every_step_has_its_figures(make_program, corpus, console, tmp_path):
    state = fit(CONFIG, make_program()[0], corpus, tmp_path, console)
    assert int(state.step) == 20
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 21), 20]
    names = ["loss", "aux_loss", "bits_per_byte", "tokens_per_second", "learning_rate", "gradient_norm", "dropped"]
    assert all({*names, "load"} <= set(row) for row in rows[:-1])
    assert rows[0]["bits_per_byte"] == pytest.approx(3.0, rel=1e-5)
    assert rows[0]["loss"] == pytest.approx(math.log(8) + 0.1, rel=1e-5)
    assert rows[19]["bits_per_byte"] < 2
    assert rows[0]["load"] == [[0.25, 0.75], [0.5, 0.5]]
    assert set(rows[-1]) == {"step", "val_bits_per_byte", "gzip_bits_per_byte"}
    assert [row["step"] for row in rows if "val_bits_per_byte" in row] == [8, 16, 20]
    assert list((tmp_path / "events").iterdir())
    assert newest(tmp_path) == 20


def test_bits_per_byte_are_those_of_tokens_over_the_bytes_of_a_token(make_program, corpus, console, tmp_path):
    program, _ = make_program(steps=2)
    corpus = replace(corpus, bytes_per_token=2.5)
    state = fit(replace(CONFIG, steps=2), program, corpus, tmp_path, console)
    rows = metrics.read(tmp_path)
    for row in rows[:-1]:
        assert row["bits_per_byte"] * 2.5 == pytest.approx(row["cross_entropy"] / math.log(2), rel=1e-6)
    nats = [float(program.evaluate(state.params, program.place(each))) for each in corpus.validation_batches(4, 16)]
    assert rows[-1]["val_bits_per_byte"] * 2.5 == pytest.approx(np.mean(nats) / math.log(2), rel=1e-6)


def test_resumed_run_equals_an_unbroken_one(make_program, corpus, console, tmp_path):
    fit(CONFIG, make_program()[0], corpus, tmp_path / mkdir(tmp_path, "whole"), console)
    broken = tmp_path / mkdir(tmp_path, "broken")

    class Stopping(Console):
        """Raises the signal of Ctrl-C when the ninth step is shown."""

        def print(self, *lines, **more):
            if lines and str(lines[0]).startswith("step 9/"):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted) as stop:
        fit(CONFIG, make_program()[0], corpus, broken, Stopping(quiet=True))
    assert stop.value.step == 9
    assert newest(broken) == 9
    fit(replace(CONFIG, resume=True), make_program({"x": 4, "y": 2})[0], corpus, broken, console)
    one, two = ([row for row in metrics.read(tmp_path / name) if "loss" in row] for name in ("whole", "broken"))
    assert [row["step"] for row in two] == list(range(1, 21))
    np.testing.assert_allclose([row["loss"] for row in two], [row["loss"] for row in one], rtol=1e-5)


class Stopped:
    """A program's validation that someone interrupts at its first batch."""

    def __init__(self, evaluate):
        self.evaluate = evaluate

    def __call__(self, params, batch):
        signal.raise_signal(signal.SIGINT)
        return self.evaluate(params, batch)


@pytest.mark.parametrize(("every", "step"), [(8, 8), (0, 20)])
def test_a_validation_cut_short_leaves_no_figure(make_program, corpus, console, tmp_path, every, step):
    program = make_program()[0]
    stopping = dataclasses.replace(program, evaluate=Stopped(program.evaluate))
    config = replace(CONFIG, validation_every=every)
    with pytest.raises(Interrupted) as stop:
        fit(config, stopping, corpus, tmp_path, console)
    assert (stop.value.step, stop.value.out) == (step, tmp_path)
    assert newest(tmp_path) == step
    rows = metrics.read(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    assert not any("val_bits_per_byte" in row for row in rows)
    fit(replace(config, resume=True), make_program()[0], corpus, tmp_path, console)
    assert "val_bits_per_byte" in metrics.read(tmp_path)[-1]


def test_the_last_validation_has_a_limit_and_says_so(make_program, corpus, tmp_path):
    program, read, console = make_program()[0], [], Console(file=io.StringIO(), width=120)

    def counting(params, batch):
        read.append(batch.shape)
        return program.evaluate(params, batch)

    config = replace(CONFIG, steps=1, final_validation_batches=3)
    fit(config, dataclasses.replace(program, evaluate=counting), corpus, tmp_path, console)
    assert read == [(4, 17)] * 3
    assert "Validating on 3 of the 32 batches of held-out text." in console.file.getvalue()


def test_a_resume_refuses_other_batches(make_program, corpus, console, tmp_path):
    fit(replace(CONFIG, steps=2), make_program()[0], corpus, tmp_path, console)
    before = (tmp_path / "metrics.jsonl").read_text()
    other = dataclasses.replace(corpus, train=corpus.train[1:])
    with pytest.raises(ConfigError) as error:
        fit(replace(CONFIG, resume=True, seed=5), make_program()[0], other, tmp_path, console)
    assert "the text differs" in str(error.value)
    assert "seed was 0, but is 5." in str(error.value)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_figures_after_the_checkpoint_are_dropped_on_resume(make_program, corpus, console, tmp_path):
    fit(replace(CONFIG, steps=6), make_program()[0], corpus, tmp_path, console)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    fit(replace(CONFIG, resume=True), make_program()[0], corpus, tmp_path, console)
    assert [row["step"] for row in metrics.read(tmp_path)] == [*range(1, 21), 20]


def test_resume_of_a_finished_run_validates_again(make_program, corpus, console, tmp_path):
    fit(CONFIG, make_program()[0], corpus, tmp_path, console)
    before = metrics.read(tmp_path)[-1]
    fit(replace(CONFIG, resume=True), make_program()[0], corpus, tmp_path, console)
    assert metrics.read(tmp_path)[-1] == before
    assert len(metrics.read(tmp_path)) == 21


def test_handlers_are_put_back(make_program, corpus, console, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    fit(replace(CONFIG, steps=1), make_program()[0], corpus, tmp_path, console)
    assert signal.getsignal(signal.SIGINT) is before


def mkdir(path, name):
    (path / name).mkdir()
    return name
