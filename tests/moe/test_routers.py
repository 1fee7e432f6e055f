"""Routers against the papers' transcriptions: assignments identical, gates and losses to 1e-6."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe import MoEConfig, gshard, route, switch
from tests.moe import papers
from tests.moe.cases import HARD, MANY, SCARCE

CASES = [*HARD, *SCARCE, MANY]
ROUTERS = ("switch", "gshard")
by_router = pytest.mark.parametrize("router", ROUTERS)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _config(router, case, **more):
    return MoEConfig(experts=case.logits.shape[-1], router=router, capacity_factor=case.factor, **more)


def _real(case):
    return np.ones(case.logits.shape[:2], bool) if case.mask is None else case.mask


def _agree(routing, answers, capacity, losses):
    """Every array of a routing against the transcription's answer for each group."""
    expert, slot, gate, kept = (np.asarray(a) for a in (routing.expert, routing.slot, routing.gate, routing.kept))
    wanted = np.zeros(gate.shape)
    for group, answer in enumerate(answers):
        assert expert[group].tolist() == answer.choices
        for token, placed in enumerate(answer.placed):
            row = zip(expert[group, token].tolist(), slot[group, token].tolist(), kept[group, token].tolist())
            assert {e: s for e, s, has_slot in row if has_slot} == {e: s for e, (s, _) in placed.items()}
            wanted[group, token] = [placed[e][1] if e in placed else 0.0 for e in answer.choices[token]]
    assert slot[kept].max(initial=0) < capacity
    np.testing.assert_allclose(gate, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(routing.losses["aux"], losses, rtol=1e-6, atol=1e-7)


@by_case
def test_switch_is_the_papers(case):
    config = _config("switch", case)
    capacity = config.capacity(case.logits.shape[1])
    answers = [papers.switch(*group, capacity, alpha=1e-2) for group in zip(case.logits, _real(case))]
    _agree(route(case.logits, config, mask=case.mask), answers, capacity, [a.loss for a in answers])


@by_case
def test_gshard_is_the_papers_in_evaluation(case):
    _check_gshard(case, None)


@pytest.mark.parametrize("case", [HARD[1], MANY], ids=lambda case: case.name)
def test_gshard_is_the_papers_in_training(case):
    _check_gshard(case, jax.random.key(7))


def _check_gshard(case, key):
    config = _config("gshard", case)
    capacity = config.capacity(case.logits.shape[1])
    draws = [None] * len(case.logits) if key is None else np.asarray(gshard.draw(key, case.logits.shape))
    answers = [papers.gshard(*group, capacity) for group in zip(case.logits, _real(case), draws)]
    losses = [config.aux_weight * config.experts**2 * a.loss for a in answers]
    _agree(route(case.logits, config, key=key, mask=case.mask), answers, capacity, losses)


@by_router
def test_padding_changes_nothing_for_real_tokens(router):
    logits, real = jax.random.normal(jax.random.key(0), (2, 12, 4)), np.r_[0:7, 12:17]
    garbage = jnp.concatenate([logits[:, :7], jnp.full((2, 5, 4), 50.0), logits[:, 7:]], axis=1)
    mask = np.ones((2, 17), bool)
    mask[:, 7:12] = False
    plain = route(logits, MoEConfig(experts=4, router=router, capacity_factor=12.0))
    padded = route(garbage, MoEConfig(experts=4, router=router, capacity_factor=17.0), mask=mask)
    np.testing.assert_array_equal(padded.slot[:, real], plain.slot)
    np.testing.assert_array_equal(padded.gate[:, real], plain.gate)
    np.testing.assert_allclose(padded.losses["aux"], plain.losses["aux"], rtol=1e-6)
    assert not np.asarray(padded.kept[:, 7:12]).any()
    assert (np.asarray(padded.slot[:, 7:12]) == -1).all()
    assert (np.asarray(padded.gate[:, 7:12]) == 0).all()


@by_router
def test_balanced_experts_cost_the_weight(router):
    logits = np.tile(np.eye(4, dtype=np.float32) * 1e-6, (1, 8, 1))
    routing = route(logits, MoEConfig(experts=4, router=router, aux_weight=0.5))
    np.testing.assert_allclose(routing.losses["aux"], 0.5, rtol=1e-5)


@by_router
def test_router_computes_in_float32(router):
    logits = jax.random.normal(jax.random.key(0), (1, 16, 4), jnp.bfloat16)
    config = MoEConfig(experts=4, router=router)
    narrow, wide = route(logits, config), route(logits.astype(jnp.float32), config)
    assert narrow.gate.dtype == narrow.losses["aux"].dtype == jnp.float32
    np.testing.assert_array_equal(narrow.gate, wide.gate)


def _objective(gates, loss):
    return np.sum(np.sin(gates)) + loss


@by_router
def test_gradient_is_the_papers_slope(router):
    config = MoEConfig(experts=4, router=router, capacity_factor=0.75)
    logits, way = np.random.default_rng(3).standard_normal((2, 16, 4))
    mask = np.arange(16) < 12
    transcription = partial(papers.switch, alpha=1.0) if router == "switch" else partial(papers.gshard, random=None)

    def slope(step=1e-5):
        values = []
        for moved in (logits + step * way, logits - step * way):
            answer = transcription(moved, mask, capacity=config.capacity(16))
            loss = answer.loss * config.aux_weight * (16 if router == "gshard" else 1)
            values.append(_objective([gate for placed in answer.placed for _, gate in placed.values()], loss))
        return (values[0] - values[1]) / (2 * step)

    @jax.jit
    @jax.grad
    def gradient(x):
        routing = route(x, config, mask=mask[None])
        return jnp.sum(jnp.sin(routing.gate)) + jnp.sum(routing.losses["aux"])

    found = np.asarray(gradient(logits[None].astype(np.float32)))[0]
    np.testing.assert_allclose(np.sum(found * way), slope(), rtol=1e-4)
    assert not found[12:].any()


def test_second_expert_is_drawn_in_proportion():
    logits = np.tile(np.float32([1.0, 0.0, -9.0, -9.0]), (1, 20000, 1))
    config = MoEConfig(experts=4, router="gshard", capacity_factor=4.0)
    kept = np.asarray(route(logits, config, key=jax.random.key(1)).kept)
    assert kept[..., 0].all()
    assert abs(kept[..., 1].mean() - 2 / (1 + np.e)) < 0.02


def test_only_a_router_that_draws_takes_a_key():
    key, shape = jax.random.key(3), (4, 10, 6)
    assert switch.draw(key, shape) is None
    assert gshard.draw(None, shape) is None
    assert gshard.draw(key, shape).shape == (4, 10)


def test_more_choices_than_one_word_sorts():
    """Beyond 2³¹ pairs of expert and place, the sort falls back from packed words to pairs."""
    from gspmd.moe import routing

    keys = np.random.default_rng(0).integers(0, 7, 50).astype(np.int32)
    packed = routing._stable_sort(jnp.asarray(keys), 6)
    pairs = routing._stable_sort(jnp.asarray(keys), 2**30)
    jax.tree.map(np.testing.assert_array_equal, packed, pairs)
