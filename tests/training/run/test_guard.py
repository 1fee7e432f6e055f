"""Poisoned batches: the update is skipped and counted, and too many end the run with the last checkpoint named."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from gspmd.commands import runner
from gspmd.training import Checkpoints, Diverged, fit
from gspmd.training.checkpoints import saved_steps
from gspmd.training.config import TrainingConfig
from gspmd.training.reporting import metrics
from tests.training.conftest import bigram_loss

CONFIG = TrainingConfig(steps=12, batch=4, length=16, validation_every=0, final_validation_batches=1, save_every=4)
POISON = 100
KINDS = ("loss", "gradient")


def poisoned_loss(params, tokens, key):
    """The bigram model's; for a batch with POISON nan, for one with POISON + 1 it has gradients that are not finite."""
    value, figures = bigram_loss(params, tokens % POISON, key)
    kind = tokens.max() - POISON
    zero = jnp.abs(params["table"].sum() * 0.0)
    steep = jnp.sqrt(jnp.where(kind == 1, zero, 1.0))  # 0, with an infinite slope
    return jnp.where(kind == 0, jnp.nan, value) + jnp.where(kind == 1, steep, 0.0), figures


@pytest.fixture
def make_poisoned(make_program):
    """A function ({step: kind}, first=1) -> Program whose batches of those steps are poisoned."""

    def make(kinds, first=1, **more):
        program, _ = make_program(loss=poisoned_loss, **more)
        place, placed = program.place, iter(range(first, 1000))

        def poison(tokens):
            tokens = np.array(tokens)
            if tokens.shape == (4, 17) and (kind := kinds.get(next(placed))):
                tokens[0, 0] = POISON + KINDS.index(kind)
            return place(tokens)

        return dataclasses.replace(program, place=poison)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_update_changes_nothing_but_the_step(make_poisoned, kind):
    program = make_poisoned({2: kind})
    batch = np.arange(68).reshape(4, 17) % 8
    state, figures = program.step(program.state, program.place(batch), program.key)
    assert int(figures["non_finite"]) == 0
    before = jax.device_get(state)
    state, figures = program.step(state, program.place(batch), program.key)
    assert int(figures["non_finite"]) == 1
    assert np.isfinite(figures["loss"]) == (kind == "gradient")
    assert int(state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.optimizer), before.optimizer)
    state, after = program.step(state, program.place(batch), program.key)
    assert int(after["non_finite"]) == 0
    # The rate of the update that was skipped, for which the one after it stands in.
    assert float(after["learning_rate"]) == float(figures["learning_rate"])


def test_skipped_updates_are_counted_over_a_resume_and_shown(make_poisoned, corpus, tmp_path):
    kinds, console = {3: "loss", 7: "gradient", 11: "loss"}, Console(file=io.StringIO(), width=200)
    config = dataclasses.replace(CONFIG, non_finite=3)
    fit(dataclasses.replace(config, steps=8), make_poisoned(kinds), corpus, tmp_path, console)
    fit(dataclasses.replace(config, resume=True), make_poisoned(kinds, first=9), corpus, tmp_path, console)
    rows = [row for row in metrics.read(tmp_path) if "loss" in row]
    assert [row["non_finite"] for row in rows] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert [row["step"] for row in rows if row["loss"] is None] == [3, 11]
    shown = console.file.getvalue()
    assert "The loss is nan at step 3; the update is skipped, 1 of at most 3." in shown
    assert "The gradient's norm is nan at step 7; the update is skipped, 2 of at most 3." in shown
    assert "The loss is nan at step 11; the update is skipped, 3 of at most 3." in shown


@pytest.mark.parametrize(("allowed", "poisoned", "step", "said"), [
    (0, [6], 4, "the loss is nan at step 6: lower --learning-rate, or raise --warmup. Step 4 is saved."),
    (0, [1], None, "the loss is nan at step 1, before any update: look at the loss, the initial parameters and the "
     "data (JAX_DEBUG_NANS=1). No step is saved."),
    (0, [2], None, "the loss is nan at step 2: lower --learning-rate, or raise --warmup. No step is saved."),
    (2, [6, 7, 10], 8, "the loss is nan at step 10, after 2 skipped updates: lower --learning-rate, or raise --warmup "
     "or --non-finite. Step 8 is saved."),
], ids=["after-a-save", "at-first", "before-a-save", "after-skips"])  # fmt: skip
def test_too_many_end_the_run(make_poisoned, corpus, tmp_path, allowed, poisoned, step, said):
    program = make_poisoned(dict.fromkeys(poisoned, "loss"))

    def run(argv):
        with runner.interrupts(tmp_path):
            fit(dataclasses.replace(CONFIG, non_finite=allowed), program, corpus, tmp_path, Console(quiet=True))

    with pytest.raises(Diverged) as error:
        run([])
    assert str(error.value) == said
    assert (error.value.step, error.value.out) == (step, tmp_path)
    assert max(saved_steps(tmp_path), default=None) == step
    if step:  # and it is a good one
        with Checkpoints(tmp_path) as checkpoints:
            state, run_ = checkpoints.restore(program.state, tell=pytest.fail)
        assert run_["skipped"] == len([each for each in poisoned if each <= step])
        assert np.isfinite(state.params["table"]).all()


def test_the_exit_code_is_one_and_the_resume_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])

    def run(argv):
        raise Diverged("the loss is nan at step 6: lower it.", 4, tmp_path)

    assert runner.guarded(run, []) == 1
    assert capsys.readouterr().err == (
        "The run failed: the loss is nan at step 6: lower it. Step 4 is saved. "
        f"To go on: python train.py --resume --out {tmp_path}\n"
    )
