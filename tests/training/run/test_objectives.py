"""The loop on rows of named arrays: their figures, means over what is predicted, and a resume among them."""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from gspmd.training import Interrupted, fit
from gspmd.training.config import TrainingConfig
from gspmd.training.data.objectives import PackedText
from gspmd.training.reporting import metrics
from gspmd.training.toml import ConfigError

CONFIG = TrainingConfig(steps=12, batch=4, length=16, pack=True, validation_every=5, validation_batches=2, save_every=6)
CONSOLE = Console(quiet=True)


def counted(batch):
    within = (batch["segments"][:, 1:] == batch["segments"][:, :-1]) & (batch["segments"][:, 1:] > 0)
    return within & (batch["tokens"][:, 1:] >= 0)


def packed_loss(params, batch, key):
    """The cross-entropy of a bigram model over the tokens that are predicted."""
    tokens = batch["tokens"]
    logits = jnp.take(params["table"], tokens[:, :-1], axis=0, mode="clip") + params["bias"][None, None]
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    counts = counted(batch)
    entropy = jnp.sum(each * counts) / jnp.sum(counts)
    return entropy, {"cross_entropy": entropy, "predicted": jnp.sum(counts)}


@pytest.fixture
def documents(corpus):
    """The corpus in documents of 2 to 40 letters."""
    random = np.random.default_rng(0)
    starts = [np.append(np.cumsum(random.integers(2, 41, len(part) // 41)) - 2, len(part)) for part in corpus._parts]
    starts = tuple(np.concatenate([[0], each]) for each in starts)
    return dataclasses.replace(corpus, objective=PackedText(), starts=starts, bytes_per_token=2.5)


@pytest.fixture
def program(make_program):
    """A function that returns a program of the bigram model on packed rows; and the batches that it has placed."""
    made, placed = make_program(loss=packed_loss)[0], []
    evaluate = jax.jit(lambda params, batch: packed_loss(params, batch, None)[0])

    def place(batch):
        placed.append(batch)
        return jax.tree.map(made.place, batch)

    def begin():  # a run donates its first state
        return dataclasses.replace(made, place=place, evaluate=evaluate, state=jax.tree.map(jnp.copy, made.state))

    return begin, placed


def test_figures_are_those_of_what_is_predicted(program, documents, tmp_path):
    begin, placed = program
    program = begin()
    state = fit(
        dataclasses.replace(CONFIG, validation_every=0, final_validation_batches=0),
        program,
        documents,
        tmp_path,
        CONSOLE,
    )
    rows, batches = metrics.read(tmp_path), placed[: CONFIG.steps]
    assert [row["predicted"] for row in rows[:-1]] == [counted(batch).sum() for batch in batches]
    fills = [np.mean(batch["segments"] > 0) for batch in batches]
    np.testing.assert_allclose([row["fill"] for row in rows[:-1]], fills, rtol=1e-6)
    assert min(fills) > 0.6
    nats = tokens = 0
    for batch in documents.validation_batches(4, 16):
        count = counted(batch).sum()
        nats, tokens = nats + count * float(program.evaluate(state.params, batch)), tokens + count
    assert len({counted(batch).sum() for batch in documents.validation_batches(4, 16)}) > 1
    assert rows[-1]["val_bits_per_byte"] * 2.5 == pytest.approx(nats / tokens / np.log(2), rel=1e-5)


def test_a_resumed_run_has_the_rows_of_an_unbroken_one(program, documents, tmp_path):
    begin, placed = program
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    fit(CONFIG, begin(), documents, tmp_path / "whole", CONSOLE)
    placed.clear()

    def place(batch):
        if len(placed) == 8 + CONFIG.validation_batches:
            signal.raise_signal(signal.SIGINT)
        return program.place(batch)

    program = begin()
    with pytest.raises(Interrupted):
        fit(CONFIG, dataclasses.replace(program, place=place), documents, tmp_path / "broken", CONSOLE)
    fit(dataclasses.replace(CONFIG, resume=True), begin(), documents, tmp_path / "broken", CONSOLE)
    one, two = ([row for row in metrics.read(tmp_path / name) if "loss" in row] for name in ("whole", "broken"))
    assert [(row["step"], row["predicted"]) for row in two] == [(row["step"], row["predicted"]) for row in one]
    np.testing.assert_allclose([row["loss"] for row in two], [row["loss"] for row in one], rtol=1e-5)
    plain = dataclasses.replace(documents, objective=None)
    with pytest.raises(ConfigError, match="pack was True, but is not set"):
        fit(dataclasses.replace(CONFIG, resume=True, steps=20), begin(), plain, tmp_path / "whole", CONSOLE)
