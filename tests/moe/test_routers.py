"""Routers against the papers' transcriptions: assignments identical, gates and losses to 1e-6."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from gspmd.moe import MoEConfig, gshard, route, switch
from tests.moe import papers
from tests.moe.cases import CASES


def _config(router, case, **more):
    return MoEConfig(experts=case.logits.shape[-1], router=router, capacity_factor=case.factor, **more)


def _real(case):
    return np.ones(case.logits.shape[:2], bool) if case.mask is None else case.mask


def _agree(routing, answers, capacity, losses):
    """Every array of a routing against the transcription's answer for each group."""
    expert, slot, gate, kept = (np.asarray(a) for a in (routing.expert, routing.slot, routing.gate, routing.kept))
    for group, answer in enumerate(answers):
        for token, placed in enumerate(answer.placed):
            assert expert[group, token].tolist() == answer.choices[token]
            found = {int(e): int(s) for e, s, k in zip(expert[group, token], slot[group, token], kept[group, token]) if k}
            assert found == {e: s for e, (s, _) in placed.items()}
            weights = [placed[e][1] if e in placed else 0.0 for e in answer.choices[token]]
            np.testing.assert_allclose(gate[group, token], weights, rtol=1e-6, atol=1e-6)
    assert slot[kept].max(initial=0) < capacity
    np.testing.assert_allclose(routing.losses["aux"], losses, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_switch_is_the_papers(case):
    config = _config("switch", case)
    capacity = config.capacity(case.logits.shape[1])
    routing = jax.jit(lambda l, m: switch.route(l, config, mask=m))(case.logits, case.mask)
    answers = [papers.switch(l, capacity, 1e-2, r) for l, r in zip(case.logits, _real(case))]
    _agree(routing, answers, capacity, [a.loss for a in answers])


@pytest.mark.parametrize("drawn", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gshard_is_the_papers(case, drawn):
    config = _config("gshard", case)
    capacity = config.capacity(case.logits.shape[1])
    key = jax.random.key(7) if drawn else None
    random = None if key is None else np.asarray(jax.random.uniform(key, case.logits.shape[:2]))
    routing = jax.jit(lambda l, m: gshard.route(l, config, key=key, mask=m))(case.logits, case.mask)
    draws = [None] * len(case.logits) if random is None else random
    answers = [papers.gshard(l, capacity, r, d) for l, r, d in zip(case.logits, _real(case), draws)]
    coefficient = config.aux_weight * config.experts**2
    _agree(routing, answers, capacity, [coefficient * a.loss for a in answers])


@pytest.mark.parametrize("router", ["switch", "gshard"])
def test_many_random_logits(router):
    for seed in range(20):
        draw = np.random.default_rng(seed)
        groups, tokens, experts = draw.integers(1, 5), draw.integers(1, 70), draw.integers(2, 20)
        logits = draw.standard_normal((groups, tokens, experts)).astype(np.float32)
        config = MoEConfig(experts=int(experts), router=router, capacity_factor=float(draw.choice([0.5, 1.0, 1.25, 2.0])))
        capacity, real = config.capacity(int(tokens)), [True] * tokens
        if router == "switch":
            answers = [papers.switch(l, capacity, 1e-2, real) for l in logits]
            losses = [a.loss for a in answers]
        else:
            answers = [papers.gshard(l, capacity, real) for l in logits]
            losses = [1e-2 * experts**2 * a.loss for a in answers]
        _agree(route(jnp.asarray(logits), config), answers, capacity, losses)


def test_padding_changes_nothing_for_real_tokens():
    logits = jax.random.normal(jax.random.key(0), (2, 12, 4))
    garbage = jnp.concatenate([logits[:, :7], jnp.full((2, 5, 4), 50.0), logits[:, 7:]], axis=1)
    mask = jnp.ones((2, 17), bool).at[:, 7:12].set(False)
    for name in ("switch", "gshard"):
        plain = route(logits, MoEConfig(experts=4, router=name, capacity_factor=12.0))
        padded = route(garbage, MoEConfig(experts=4, router=name, capacity_factor=17.0), mask=mask)
        real = np.r_[0:7, 12:17]
        np.testing.assert_array_equal(padded.slot[:, real], plain.slot)
        np.testing.assert_array_equal(padded.gate[:, real], plain.gate)
        assert not padded.kept[:, 7:12].any() and (padded.slot[:, 7:12] == -1).all() and (padded.gate[:, 7:12] == 0).all()
        np.testing.assert_allclose(padded.losses["aux"], plain.losses["aux"], rtol=1e-6)


@pytest.mark.parametrize("router", ["switch", "gshard"])
def test_balanced_experts_cost_the_weight(router):
    logits = jnp.tile(jnp.eye(4) * 1e-6, (1, 8, 1))
    routing = route(logits, MoEConfig(experts=4, router=router, aux_weight=0.5))
    np.testing.assert_allclose(routing.losses["aux"], 0.5, rtol=1e-5)


@pytest.mark.parametrize("router", ["switch", "gshard"])
def test_router_computes_in_float32(router):
    logits = jax.random.normal(jax.random.key(0), (1, 16, 4), jnp.bfloat16)
    config = MoEConfig(experts=4, router=router)
    narrow, wide = route(logits, config), route(logits.astype(jnp.float32), config)
    assert narrow.gate.dtype == narrow.losses["aux"].dtype == jnp.float32
    np.testing.assert_array_equal(narrow.gate, wide.gate)


@pytest.mark.parametrize("router", ["switch", "gshard"])
def test_gradients_reach_the_logits_and_not_padding(router):
    logits = jax.random.normal(jax.random.key(0), (2, 16, 4))
    mask = jnp.ones((2, 16), bool).at[:, 12:].set(False)
    config = MoEConfig(experts=4, router=router)

    def objective(logits):
        routing = route(logits, config, mask=mask)
        return jnp.sum(jnp.sin(routing.gate)) + jnp.sum(routing.losses["aux"])

    gradient = jax.grad(objective)(logits)
    check_grads(objective, (logits,), order=1, modes=["rev"], rtol=1e-2)
    assert np.abs(gradient[:, :12]).max() > 0 and not np.asarray(gradient[:, 12:]).any()


def test_second_expert_is_drawn_in_proportion():
    logits = jnp.tile(jnp.array([1.0, 0.0, -9.0, -9.0]), (1, 20000, 1))
    config = MoEConfig(experts=4, router="gshard", capacity_factor=4.0)
    kept = gshard.route(logits, config, key=jax.random.key(1)).kept
    assert bool(kept[..., 0].all())
    assert abs(float(kept[..., 1].mean()) - 2 / (1 + np.e)) < 0.02


def test_draws_do_not_depend_on_jit_or_grouping_of_calls():
    key, shape = jax.random.key(3), (4, 10, 6)
    np.testing.assert_array_equal(gshard.draw(key, shape), jax.jit(lambda k: gshard.draw(k, shape))(key))
    assert switch.draw(key, shape) is None and gshard.draw(None, shape) is None
