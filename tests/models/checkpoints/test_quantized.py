"""int8 weights, and an int8 cache beside them, against transformers' float32 logits, of every family."""

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd.moe.routers.rule import Router
from gspmd_models.checkpoints import load
from gspmd_models.decoding import abstract_cache, decode_step, served
from tests.models.checkpoints.cases import CASES


def read(model, mesh, tokens, *, int8):
    """Logits [B, L, V] of tokens that are read one by one, through a cache."""
    model, (rows, length) = served(model, model.layout), tokens.shape
    shapes = abstract_cache(model.config, model.layout, mesh, rows, length, "float32", int8=int8)
    empty, decode = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes), decode_step(model)

    @jax.jit
    def run(weights, cache, ids):
        return jax.lax.scan(lambda cache, ids: decode(weights, ids, cache)[::-1], cache, ids)[1]

    logits = np.asarray(run(models.arrays(model), empty, tokens.T.astype(np.int32)))
    return logits.transpose(1, 0, 2)[..., : model.config.vocabulary]


@pytest.fixture
def chosen(monkeypatch):
    """The experts of every step and layer, in the order in which they are chosen."""
    seen, assign = [], Router.assign

    def recorded(self, *given, **options):
        routing = assign(self, *given, **options)
        jax.debug.callback(lambda expert: seen.append(np.sort(np.asarray(expert).reshape(8, -1))), routing.expert)
        return routing

    monkeypatch.setattr(Router, "assign", recorded)
    return seen


def off(got, wanted):
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


OVER = {"llama-tied-scaled": "2.02%", "mixtral": "2.33%"}
"""The two whose logits are farther off than 2%, and by how much."""

OF_EACH = [
    pytest.param(name, marks=pytest.mark.xfail(reason=f"its logits are {OVER[name]} off")) if name in OVER else name
    for name in CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EACH)
def test_int8_weights_are_near_float32_and_an_int8_cache_is_near_those(name, reference, placing, chosen):
    """Weights within 2%, the cache within 2% more.

    Of experts those tokens count that go where they went, as do all before them: another expert is another token.
    """
    wanted, (layout, mesh), routes, logits = reference(name), placing("replicated"), [], []
    with jax.set_mesh(mesh):
        for int8 in (False, True):
            model, _ = load(wanted.directory, layout, mesh, "float32", int8=int8)
            for cache in (False, True)[: 1 + int8]:
                logits.append(read(model, mesh, wanted.tokens, int8=cache))
                jax.effects_barrier()
                routes.append(np.stack(chosen).reshape(wanted.prompt, -1, 8, chosen[0].shape[1]) if chosen else None)
                chosen.clear()
    np.testing.assert_allclose(logits[0], wanted.logits, atol=1e-4)
    alike = np.ones((3, *wanted.tokens.shape), bool)
    if model.config.moe:
        alike = np.stack([np.logical_and.accumulate((each == routes[0]).all((1, 3))).T for each in routes])
        assert alike.mean((1, 2)).min() > 0.5, alike.sum((1, 2))
    weights, cache = alike[1], alike[1] & alike[2]
    assert off(logits[1][weights], wanted.logits[weights]) < 0.02
    assert off(logits[2][cache], logits[1][cache]) < 0.02
