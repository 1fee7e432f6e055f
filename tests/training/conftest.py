"""A model small enough to train in a test: one matrix and one vector, whose best loss is zero."""

import resource
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd.annotate import Spec
from gspmd.training import data
from gspmd.training.config import OptimizerConfig
from gspmd.training.optimizer import adamw, schedule
from gspmd.training.run.loop import Program
from gspmd.training.state import initial, shardings
from gspmd.training.step import jit_step, make_step


def bigram_loss(params, tokens, key):
    """Return the cross-entropy of a bigram model over 8 letters."""
    logits = jnp.take(params["table"], tokens[:, :-1], axis=0, mode="clip") + params["bias"][None, None]
    each = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    entropy = each.mean()
    load = jnp.array([[0.25, 0.75], [0.5, 0.5]])
    figures = {"cross_entropy": entropy, "aux_loss": jnp.float32(0.1), "load": load, "dropped": jnp.zeros(2)}
    return entropy + 0.1, figures


@pytest.fixture
def corpus():
    """Return text in which each letter is nearly always followed by the next of the alphabet."""
    rng = np.random.default_rng(0)
    text = (np.cumsum(np.where(rng.random(20_000) < 0.9, 1, 3)) % 8).astype(np.uint8)
    return data.Corpus("counting", text[:18_000], text[18_000:], (9, 1), 2.0)


@pytest.fixture
def make_program(make_mesh):
    """Return a function (sizes={"x": 2}, steps=20) -> Program of the bigram model under Auto axes."""

    def make(sizes=None, steps=20, loss=bigram_loss, specs=None):
        mesh = make_mesh(sizes or {"x": 2}, "auto")
        specs = {"table": Spec.parse("VE_x"), "bias": Spec.parse("E")} if specs is None else specs
        config = OptimizerConfig(learning_rate=0.1)
        transform = adamw(config, steps)
        params = {"table": jnp.zeros((8, 8)), "bias": jnp.zeros(8)}
        params = jax.device_put(params, shardings(specs, mesh))
        state = initial(params, transform, mesh, specs)
        step = make_step(loss, transform, schedule(config, steps), limit=1.0)
        evaluate = jax.jit(lambda params, tokens: bigram_loss(params, tokens, None)[1]["cross_entropy"])
        whole = NamedSharding(mesh, P())
        place = lambda tokens: jax.device_put(np.asarray(tokens, np.int32), whole)  # noqa: E731
        key = jax.device_put(jax.random.key(0), whole)
        return Program(state, jit_step(step, state), evaluate, place, key), SimpleNamespace(mesh=mesh, step=step)

    return make


@pytest.fixture
def small_files():
    """Return a function of a number of bytes: a context in which no file can grow beyond it, as on a full disk."""

    @contextmanager
    def limit(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit
