"""Routers against the papers' transcriptions: assignments identical, gates and losses to 1e-6."""

from dataclasses import replace
from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe import MoEConfig, route
from gspmd.moe.config import ROUTERS, Kind
from gspmd.moe.routers import BY_NAME, gshard, named, noisy_top_k, switch
from gspmd.moe.routers.routing import assigned
from gspmd.moe.routers.rule import router
from tests.moe import papers
from tests.moe import placed as on_mesh
from tests.moe.cases import HARD, MANY, SCARCE

CASES = [*HARD, *SCARCE, MANY]
by_router = pytest.mark.parametrize("router", ROUTERS)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

#: What is open in a router, and what changes every one that queues; over the two cases that tell the most.
VARIANTS = {
    "k = 1": {"router": "top-k", "k": 1},
    "k = 3, probabilities": {"router": "top-k", "k": 3, "renormalize": False},
    "k = X": {"router": "top-k", "k": 8},
    "noisy k = 1": {"router": "noisy-top-k", "k": 1},
    "noisy k = X": {"router": "noisy-top-k", "k": 8},
    "switch with a z-loss": {"router": "switch", "z_weight": 0.1},
    "priority, switch": {"router": "switch", "priority": True},
    "priority, gshard": {"router": "gshard", "priority": True},
    "priority, noisy": {"router": "noisy-top-k", "priority": True},
    "sigmoid": {"router": "top-k", "scores": "sigmoid", "k": 3},
    "sigmoid of one": {"router": "top-k", "scores": "sigmoid", "k": 1, "renormalize": False},
    "sigmoid, groups by their best": {"router": "top-k", "scores": "sigmoid", "expert_groups": 2, "kept_groups": 1,
                                      "group_best": 1, "gate_factor": 0.5},
    "groups by their best": {"router": "top-k", "k": 3, "expert_groups": 4, "kept_groups": 2, "group_best": 1,
                             "renormalize": False, "gate_factor": 16.0, "priority": True},
    "bias": {"router": "top-k", "choice_bias": True},
    "sigmoid, groups, bias": {"router": "top-k", "k": 3, "scores": "sigmoid", "expert_groups": 4, "kept_groups": 2,
                              "choice_bias": True, "gate_factor": 2.5, "z_weight": 0.1},
    "no capacity": {"router": "top-k", "dispatch": "dropless"},
    "no slots": {"router": "top-k", "capacity_factor": 0.0},
    "no slots for experts that choose": {"router": "expert-choice", "capacity_factor": 0.0},
}  # fmt: skip
by_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=list(VARIANTS))


def _config(case, **changes):
    return MoEConfig(**{"experts": case.logits.shape[-1], "capacity_factor": case.factor} | changes)


def _real(case):
    return np.ones(case.logits.shape[:2], bool) if case.mask is None else case.mask


def _inputs(case, config, key):
    """Logits, and what the router draws for them."""
    draws = named(config).draw(key, case.logits.shape)
    logits = case.logits
    if config.router == "noisy-top-k":
        # Beyond this a float32 sum of logit and noise is itself too coarse for gates to 1e-6.
        clean = np.clip(logits, -30, 30)
        logits = np.concatenate(
            [clean, np.random.default_rng(1).standard_normal(clean.shape)], axis=-1, dtype=clean.dtype
        )
    return logits, [None] * len(logits) if draws is None else np.asarray(draws)


def _check(case, config, key=None):
    """A routing against the transcription's answer for each group."""
    logits, draws = _inputs(case, config, key)
    bias = np.random.default_rng(4).standard_normal(config.experts).astype(np.float32) if config.choice_bias else None
    answers = [papers.routed(config, *group, bias) for group in zip(logits, _real(case), draws)]
    routing = route(logits, config, key=key, mask=case.mask, bias=bias)
    expert, slot, gate, kept = (np.asarray(a) for a in (routing.expert, routing.slot, routing.gate, routing.kept))
    wanted = np.zeros(gate.shape)
    for group, answer in enumerate(answers):
        assert expert[group].tolist() == answer.choices
        for token, placed in enumerate(answer.placed):
            row = zip(expert[group, token].tolist(), slot[group, token].tolist(), kept[group, token].tolist())
            assert {e: s for e, s, has_slot in row if has_slot} == {e: s for e, (s, _) in placed.items()}
            wanted[group, token] = [placed[e][1] if e in placed else 0.0 for e in answer.choices[token]]
    assert (slot[kept] < config.capacity(case.logits.shape[1])).all()
    np.testing.assert_allclose(gate, wanted, rtol=1e-6, atol=1e-6)
    assert set(routing.losses) == set(answers[0].losses)
    for name, loss in routing.losses.items():
        np.testing.assert_allclose(loss, [a.losses[name] for a in answers], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.turns(18)
@by_router
@by_case
def test_router_is_the_papers_in_evaluation(case, router):
    _check(case, _config(case, router=router))


@pytest.mark.parametrize("router", ["gshard", "noisy-top-k"])
@pytest.mark.parametrize("case", [HARD[1], MANY], ids=lambda case: case.name)
def test_router_is_the_papers_in_training(case, router):
    _check(case, _config(case, router=router), jax.random.key(7))


@by_variant
@pytest.mark.parametrize("case", [HARD[1], pytest.param(MANY, marks=pytest.mark.slow)], ids=lambda case: case.name)
def test_variant_is_the_papers(case, changes):
    _check(case, _config(case, **changes), jax.random.key(7))


@pytest.mark.turns(6)
@by_router
@pytest.mark.parametrize("priority", [False, True])
def test_padding_changes_nothing_for_real_tokens(router, priority):
    if ROUTERS[router].by_experts and priority:
        return
    logits, real = jax.random.normal(jax.random.key(0), (2, 12, 4)), np.r_[0:7, 12:17]
    garbage = jnp.concatenate([logits[:, :7], jnp.full((2, 5, 4), 50.0), logits[:, 7:]], axis=1)
    mask = np.ones((2, 17), bool)
    mask[:, 7:12] = False
    factors = (1.0, 0.7) if ROUTERS[router].by_experts else (12.0, 17.0)  # as many slots for both
    shorter, longer = (MoEConfig(experts=4, router=router, capacity_factor=f, priority=priority) for f in factors)
    plain, padded = route(logits, shorter), route(garbage, longer, mask=mask)
    np.testing.assert_array_equal(padded.slot[:, real], plain.slot)
    np.testing.assert_array_equal(padded.gate[:, real], plain.gate)
    for name, loss in plain.losses.items():
        np.testing.assert_allclose(padded.losses[name], loss, rtol=1e-6, atol=1e-8)
    assert not np.asarray(padded.kept[:, 7:12]).any()
    assert (np.asarray(padded.slot[:, 7:12]) == -1).all()
    assert (np.asarray(padded.gate[:, 7:12]) == 0).all()


@pytest.mark.parametrize("router", ["switch", "gshard", "st-moe", "top-k"])
def test_balanced_experts_cost_the_weight(router):
    logits = np.tile(np.eye(4, dtype=np.float32) * 1e-6 + np.roll(np.eye(4), 1, axis=1) * 5e-7, (1, 8, 1))
    routing = route(logits, MoEConfig(experts=4, router=router, aux_weight=0.5))
    np.testing.assert_allclose(routing.losses["aux"], 0.5, rtol=1e-5)


@by_router
def test_router_computes_in_float32(router):
    logits = jax.random.normal(jax.random.key(0), (1, 16, 4), jnp.bfloat16)
    config = MoEConfig(experts=4, router=router, z_weight=1.0)
    narrow, wide = route(logits, config), route(logits.astype(jnp.float32), config)
    assert {x.dtype for x in (narrow.gate, *narrow.losses.values())} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(narrow.gate, wide.gate)


def _objective(gates, losses):
    return sum(map(np.sin, gates)) + sum(losses)


@by_router
def test_gradient_is_the_papers_slope(router):
    config = MoEConfig(experts=4, router=router, capacity_factor=0.75, z_weight=0.1)
    logits, way = np.random.default_rng(3).standard_normal((2, 16, 8 if router == "noisy-top-k" else 4))
    mask, key = np.arange(16) < 12, jax.random.key(2) if router == "noisy-top-k" else None
    draws = named(config).draw(key, (1, 16, 4))

    def slope(step=1e-5):
        values = []
        for moved in (logits + step * way, logits - step * way):
            answer = papers.routed(config, moved, mask, None if draws is None else np.asarray(draws[0], np.float64))
            gates = [gate for placed in answer.placed for _, gate in placed.values()]
            values.append(_objective(gates, answer.losses.values()))
        return (values[0] - values[1]) / (2 * step)

    @jax.jit
    @jax.grad
    def gradient(x):
        routing = route(x, config, key=key, mask=mask[None])
        return jnp.sum(jnp.sin(routing.gate)) + sum(map(jnp.sum, routing.losses.values()))

    found = np.asarray(gradient(logits[None].astype(np.float32)))[0]
    np.testing.assert_allclose(np.sum(found * way), slope(), rtol=1e-4)
    assert not found[12:].any()


@pytest.mark.turns(6)
@by_router
@pytest.mark.parametrize("case", [HARD[0], SCARCE[1]], ids=lambda case: case.name)
def test_gradient_is_always_finite(case, router):
    config, key = _config(case, router=router, z_weight=0.1), jax.random.key(7)
    logits = case.logits
    if router == "noisy-top-k":  # the noise as wide and as narrow as it gets
        logits = np.concatenate([logits, np.resize(np.float32([-300, 300, 0, -20]), logits.shape)], axis=-1)

    @jax.jit
    @jax.value_and_grad
    def objective(x):
        routing = route(x, config, key=key, mask=case.mask)
        return jnp.sum(routing.gate) + sum(map(jnp.sum, routing.losses.values()))

    value, gradient = objective(logits)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


#: Scores of DeepSeek-V3's router for four groups of two experts.
SCORES = np.float32([0.9, 0.1, 0.6, 0.5, 0.55, 0.5, 0.2, 0.1])
V3 = MoEConfig(experts=8, router="top-k", scores="sigmoid", expert_groups=4, kept_groups=2, gate_factor=2.5)


def _of_scores(config, **more):
    return route(np.log(SCORES / (1 - SCORES))[None, None], config, **more)


def test_groups_are_scored_by_the_sum_of_their_two_best():
    routing = _of_scores(V3)
    assert routing.expert[0, 0].tolist() == [2, 4]  # the best of all experts, 0, is in neither of the best groups
    np.testing.assert_allclose(routing.gate[0, 0], [1.304, 1.196], atol=5e-4)
    assert _of_scores(replace(V3, expert_groups=1, kept_groups=None)).expert[0, 0].tolist() == [0, 2]
    assert _of_scores(replace(V3, group_best=1)).expert[0, 0].tolist() == [0, 2]


def test_experts_of_other_groups_are_not_chosen_however_low_the_biases():
    routing = _of_scores(replace(V3, choice_bias=True), bias=np.full(8, -5, np.float32))
    assert routing.expert[0, 0].tolist() == [2, 4]
    np.testing.assert_allclose(routing.gate[0, 0], [1.304, 1.196], atol=5e-4)


@pytest.mark.parametrize("order", [[-17, -18, -19, -20], [-20, -17, -19, -18]])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_bias_that_swamps_the_scores_hides_none(order, groups):
    config = MoEConfig(experts=4, router="top-k", scores="sigmoid", choice_bias=True, expert_groups=groups)
    routing = route(np.float32(order)[None, None], config, bias=np.full(4, 12, np.float32))
    assert routing.expert[0, 0].tolist() == [order.index(-17), order.index(-18)]
    np.testing.assert_allclose(routing.gate[0, 0], [0.731, 0.269], atol=5e-4)


def test_equal_sums_go_to_the_lowest_index():
    config = replace(V3, choice_bias=True, k=3)
    routing = route(jnp.zeros((1, 1, 8)), config, bias=jnp.zeros(8))
    assert routing.expert[0, 0].tolist() == [0, 1, 2]
    routing = route(jnp.zeros((1, 1, 8)), config, bias=jnp.float32([0, 0, 0, 0.25, 0, 0, 0.25, 0]))
    assert routing.expert[0, 0].tolist() == [3, 6, 2]


def test_a_bias_of_the_choice_is_given_if_the_config_has_it():
    with pytest.raises(ValueError) as error:
        _of_scores(replace(V3, choice_bias=True))
    assert str(error.value) == (
        "cannot route without a bias for choosing experts: the config has one.\n"
        "  Pass bias, an array of shape (8,): a number for each expert."
    )
    with pytest.raises(ValueError) as error:
        _of_scores(V3, bias=np.zeros(8))
    assert str(error.value) == (
        "cannot route with a bias for choosing experts: the config has none.\n"
        "  Leave out bias, or set choice_bias in the config."
    )
    with pytest.raises(ValueError, match=r"bias must have shape \[X\] = \(8,\), but it has \(3,\)"):
        _of_scores(replace(V3, choice_bias=True), bias=np.zeros(3))


def test_second_expert_is_drawn_in_proportion():
    logits = np.tile(np.float32([1.0, 0.0, -9.0, -9.0]), (1, 20000, 1))
    config = MoEConfig(experts=4, router="gshard", capacity_factor=4.0)
    kept = np.asarray(route(logits, config, key=jax.random.key(1)).kept)
    assert kept[..., 0].all()
    assert abs(kept[..., 1].mean() - 2 / (1 + np.e)) < 0.02


def test_smooth_load_is_the_chance_of_another_draw():
    """P(x, i) is how often the expert is chosen when its noise alone is drawn anew."""
    clean, width = np.float32([0.3, -0.2, 0.5, 0.0]), np.float32([0.5, 1.0, 0.2, 0.7])
    noise = np.random.default_rng(0).standard_normal((5000, 4)).astype(np.float32)
    noisy = np.tile(clean + 0.1, (5000, 4, 1))
    np.einsum("TXX->TX", noisy)[...] = clean + noise * width
    often = [(np.argsort(-noisy[:, i], axis=-1)[:, :2] == i).any(axis=-1).mean() for i in range(4)]
    one = jnp.asarray(clean + np.float32(0.1))
    found = noisy_top_k._probability(jnp.asarray(clean), one, jnp.asarray(width), jnp.argsort(-one)[:3])
    np.testing.assert_allclose(found, often, atol=0.02)


def test_only_a_router_that_draws_takes_a_key():
    key, shape = jax.random.key(3), (4, 10, 6)
    assert switch.route.draw(key, shape) is None
    assert gshard.route.draw(None, shape) is None
    assert gshard.route.draw(key, shape).shape == (4, 10)
    assert noisy_top_k.route.draw(key, shape).shape == shape


def test_experts_that_choose_leave_no_slot_empty():
    logits = jax.random.normal(jax.random.key(0), (3, 24, 4))
    routing = route(logits, MoEConfig(experts=4, router="expert-choice", capacity_factor=1.5))
    slots = np.where(routing.kept, routing.slot, -1)
    for expert in range(4):
        assert (np.sort(slots[..., expert], axis=1)[:, -9:] == np.arange(9)).all()


def test_more_choices_than_one_word_sorts():
    """Beyond 2³¹ pairs of expert and place, the sort falls back from packed words to pairs."""
    from gspmd.moe.routers import routing

    keys = np.random.default_rng(0).integers(0, 7, 50).astype(np.int32)
    packed = routing._stable_sort(jnp.asarray(keys), 6)
    pairs = routing._stable_sort(jnp.asarray(keys), 2**30)
    jax.tree.map(np.testing.assert_array_equal, packed, pairs)


def test_every_router_of_a_config_is_one():
    assert set(BY_NAME) == set(ROUTERS)
    for each in BY_NAME.values():
        assert list(signature(each).parameters) == ["logits", "config", "key", "mask", "bias"]


def test_a_router_refuses_the_config_of_another():
    with pytest.raises(ValueError) as error:
        gshard.route(jnp.zeros((1, 8, 8)), MoEConfig(experts=8))
    assert str(error.value) == (
        "cannot route: this is router gshard, and the config names switch.\n"
        "  Call gspmd.moe.route, which uses the router of the config."
    )


def test_a_new_router_is_one_function(make_mesh, monkeypatch):
    @router("by-position")
    def by_position(logits, config, draws, mask):
        """Send each token to the expert after its predecessor's."""
        expert = jnp.broadcast_to(jnp.arange(logits.shape[1])[:, None] % config.experts, (*mask.shape, 1))
        return assigned(expert, jnp.ones(expert.shape), logits, config, mask, losses={})

    monkeypatch.setitem(ROUTERS, "by-position", Kind(choices=1))
    monkeypatch.setitem(BY_NAME, "by-position", by_position)
    layout, config = on_mesh.LAYOUTS["one axis"], MoEConfig(experts=8, router="by-position", z_weight=0.1)
    assert by_position.__doc__.startswith("Send each token")
    with jax.set_mesh(make_mesh(layout.mesh)):
        x, weights, mask = on_mesh.arrays(layout)
        _, loss, stats = jax.jit(on_mesh.layer(layout, config))(x, weights, mask)
    real = np.asarray(mask)
    wanted = [real[:, expert::8].sum() / real.sum() for expert in range(8)]
    np.testing.assert_allclose(stats["load"], wanted, rtol=1e-6)
    assert loss > 0  # of large logits, which every router has
    with pytest.raises(ValueError, match="logits for 8 experts must have"):
        by_position(jnp.zeros((1, 4, 3)), config)


@by_router
def test_where_jax_has_64_bits_assignments_are_the_same(router):
    case = HARD[0]
    config = _config(case, router=router)
    logits, _ = _inputs(case, config, jax.random.key(0))
    pick = lambda: route(jnp.asarray(logits, "float32"), config)  # noqa: E731
    narrow = pick()
    with jax.enable_x64():
        wide = pick()
    np.testing.assert_array_equal(narrow.expert, wide.expert)
    np.testing.assert_allclose(narrow.gate, wide.gate, rtol=1e-6)
