"""Both forms of dispatch give the same values and gradients, and the layer of the papers, whatever the router."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.moe import MoEConfig, Routing, combine, dispatch, route
from gspmd.moe.config import ROUTERS
from gspmd.moe.slots import from_slots, to_slots
from tests.moe.cases import HARD, SCARCE

FORMS = ("sort", "onehot")
by_router = pytest.mark.parametrize("router", ROUTERS)
by_form = pytest.mark.parametrize("form", FORMS)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def _layer(x, logits, weight, config, mask, form):
    routing = route(logits, config, mask=mask)
    slots = dispatch(x, routing, config.experts, config.capacity(x.shape[1]), form=form)
    return combine(jnp.tanh(jnp.einsum("GXCE,XEF->GXCF", slots, weight)), routing, form=form), routing


@partial(jax.jit, static_argnums=(3, 5))
@partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
def _objective(x, logits, weight, config, mask, form):
    y, routing = _layer(x, logits, weight, config, mask, form)
    return jnp.sum(jnp.sin(y)), (y, routing)


def _inputs(case):
    draw, logits = np.random.default_rng(11), np.maximum(case.logits, -99)
    experts = logits.shape[-1]
    x = draw.standard_normal((*logits.shape[:2], 5)).astype(np.float32)
    return x, logits, draw.standard_normal((experts, 5, 5)).astype(np.float32)


def _looped(x, routing, weight):
    """Every kept choice by itself: the sum of gate · expert(token), in float64."""
    y = np.zeros(x.shape)
    expert, gate, kept = (np.asarray(a) for a in (routing.expert, routing.gate, routing.kept))
    for g, l, k in np.argwhere(kept):
        y[g, l] += gate[g, l, k] * np.tanh(x[g, l].astype(np.float64) @ weight[expert[g, l, k]])
    return y


def _check(case, config):
    inputs = _inputs(case)
    (_, (y, routing)), gradients = _objective(*inputs, config, case.mask, "sort")
    (_, (other_y, _)), other_gradients = _objective(*inputs, config, case.mask, "onehot")
    jax.tree.map(close, (y, gradients), (other_y, other_gradients))
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_allclose(y, _looped(inputs[0], routing, inputs[2]), rtol=1e-4, atol=1e-5)


@pytest.mark.turns(1)
@by_router
@pytest.mark.parametrize("case", [HARD[1], SCARCE[0]], ids=lambda case: case.name)
def test_forms_agree_with_each_other_and_a_loop(case, router):
    _check(case, MoEConfig(experts=case.logits.shape[-1], router=router, capacity_factor=case.factor))


@pytest.mark.slow
@by_router
@pytest.mark.parametrize("case", [*HARD, *SCARCE], ids=lambda case: case.name)
def test_forms_agree_in_every_case(case, router):
    _check(case, MoEConfig(experts=case.logits.shape[-1], router=router, capacity_factor=case.factor))


@pytest.mark.parametrize("router", ["gshard", "expert-choice"])
def test_groups_gathered_together_are_those_gathered_alone(router):
    """Slots, answers and gradients of a device's groups are the same, expert by expert or group by group."""
    case = HARD[1]
    x, logits, _ = _inputs(case)
    config = MoEConfig(experts=logits.shape[-1], router=router, capacity_factor=case.factor)
    routing = route(logits, config, mask=case.mask)
    assert x.shape[0] > 1
    assert routing.kept.any() != routing.kept.all()

    def layer(together, x, gate):
        slots = to_slots(x, routing, config.experts, config.capacity(x.shape[1]), "sort", together)
        return slots, from_slots(jnp.tanh(slots), replace(routing, gate=gate), "sort", together)

    found, pulled = zip(*(jax.vjp(partial(layer, together), x, routing.gate) for together in (True, False)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6)
    cotangents = jax.tree.map(jnp.sin, found[0])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *(pull(cotangents) for pull in pulled))


@pytest.mark.parametrize("empty", ["groups", "tokens", "slots", "size"])
def test_nothing_gathered_together_is_nothing(empty):
    groups, tokens, size = (0 if empty == name else 3 for name in ("groups", "tokens", "size"))
    config = MoEConfig(experts=2, router="gshard", capacity_factor=0.0 if empty == "slots" else 1.0)
    routing = route(jnp.zeros((groups, tokens, 2)), config, key=jax.random.key(0))
    slots = to_slots(jnp.ones((groups, tokens, size)), routing, 2, config.capacity(tokens), "sort", True)
    assert slots.shape == (groups, 2, config.capacity(tokens), size)
    assert not np.any(from_slots(jnp.zeros_like(slots), routing, "sort", True))
    assert from_slots(slots, routing, "sort", True).shape == (groups, tokens, size)


@pytest.mark.parametrize("router", ["gshard", "expert-choice"])
def test_without_slots_nothing_is_taken(router):
    config = MoEConfig(experts=8, router=router, capacity_factor=0.0)
    x, logits, weight = _inputs(HARD[1])
    for form in FORMS:
        (_, (y, _)), gradients = _objective(x, logits, weight, config, HARD[1].mask, form)
        assert not any(np.any(array) for array in (y, *gradients))


@by_router
def test_slots_hold_the_tokens_that_the_router_put_there(router):
    config = MoEConfig(experts=4, router=router, capacity_factor=0.75)
    logits = jax.random.normal(jax.random.key(0), (2, 20, 4))
    routing, capacity = route(logits, config, key=jax.random.key(1)), config.capacity(20)
    expert, slot, kept = (np.asarray(a) for a in (routing.expert, routing.slot, routing.kept))
    x = np.arange(1.0, 41.0, dtype=np.float32).reshape(2, 20, 1)
    wanted = np.zeros((2, 4, capacity, 1))
    for g, l, k in np.argwhere(kept):
        wanted[g, expert[g, l, k], slot[g, l, k]] = x[g, l]
    for form in FORMS:
        np.testing.assert_array_equal(dispatch(x, routing, 4, capacity, form=form), wanted)


def test_tokens_of_many_experts_are_summed_over_the_slots():
    config = MoEConfig(experts=16, router="expert-choice", capacity_factor=1.0)
    logits = jax.random.normal(jax.random.key(0), (2, 32, 16))
    assert "scatter-add" in str(_gradient(config, logits))  # 16 gathers would be of 8 times as many rows


def _gradient(config, logits):
    x, weight = jnp.ones((*logits.shape[:2], 8)), jnp.ones((logits.shape[-1], 8, 8))
    return jax.make_jaxpr(lambda *a: _objective(*a, config, None, "sort"))(x, logits, weight)


@pytest.mark.parametrize("router", [name for name, kind in ROUTERS.items() if not kind.by_experts])
def test_gradient_scatters_no_activations(router):
    config, x = MoEConfig(experts=4, router=router), jnp.ones((2, 16, 8))
    logits, weight = jnp.ones((2, 16, 4)), jnp.ones((4, 8, 8))
    text = _objective.lower(x, logits, weight, config, None, "sort").as_text()
    scatters = text.split('"stablehlo.scatter"')[1:]
    assert scatters
    assert not any("f32" in part.split("stablehlo.return")[0] for part in scatters)


@by_form
def test_bfloat16_activations_are_combined_in_float32(form):
    config = MoEConfig(experts=4, router="gshard", capacity_factor=4.0)
    routing = route(jax.random.normal(jax.random.key(0), (1, 16, 4)), config)
    x = jax.random.normal(jax.random.key(1), (1, 16, 8), jnp.bfloat16)
    slots = dispatch(x, routing, 4, config.capacity(16), form=form)
    y = combine(slots, routing, form=form)
    assert slots.dtype == y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.astype(jnp.float32), x.astype(jnp.float32))  # the gates sum to 1


@pytest.mark.parametrize("experts", [2, 16])  # by gathers, and by a pass over the slots
def test_slots_that_nobody_took_are_never_read(experts):
    capacity, tokens = 3, 8
    slot = np.full((1, tokens, experts), -1)
    slot[0, :2, 0] = [0, 1]  # two tokens take the first expert, and nobody another one
    choice = np.broadcast_to(np.arange(experts), slot.shape)
    routing = Routing(choice, slot, jnp.where(slot >= 0, 1.0, 0.0), slot >= 0, {})
    slots = dispatch(jnp.ones((1, tokens, 3)), routing, experts, capacity)
    y, pullback = jax.vjp(lambda slots, gate: combine(slots, replace(routing, gate=gate)),
                          slots.at[:, 1:].set(jnp.nan), routing.gate)  # fmt: skip
    np.testing.assert_array_equal(y[0, :, 0], [1, 1, 0, 0, 0, 0, 0, 0])
    assert all(np.isfinite(array).all() for array in pullback(jnp.ones_like(y)))


@by_form
def test_nothing_is_promoted_silently(form):
    config, x = MoEConfig(experts=4, router="gshard"), jnp.ones((2, 16, 8), jnp.bfloat16)

    def loss(x, logits):
        routing = route(logits, config)
        return jnp.sum(combine(dispatch(x, routing, 4, config.capacity(16), form=form), routing, form=form))

    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(loss, (0, 1)), x, jnp.ones((2, 16, 4)))


def test_sort_is_the_default_and_what_older_configs_call_auto():
    assert MoEConfig() == MoEConfig(dispatch="sort") == MoEConfig(dispatch="auto")
    assert [MoEConfig(dispatch=form).dispatch for form in ("auto", *FORMS, "dropless")] == ["sort", *FORMS, "dropless"]


def test_a_form_without_slots_is_refused():
    routing = route(jnp.zeros((1, 4, 8)), MoEConfig())
    with pytest.raises(ValueError, match=r"'dropless'\.\n  Choose from sort, onehot; dropless has no slots"):
        dispatch(jnp.ones((1, 4, 2)), routing, 8, 1, form="dropless")


BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.fixture(scope="module")
def sparse():
    """Two groups of 6 tokens, some without a slot, and an expert that nobody chose: tokens, their routing, slots."""
    config = MoEConfig(experts=4, router="gshard", capacity_factor=0.75)
    logits = jax.random.normal(jax.random.key(0), (2, 6, 4)).at[..., 3].set(-30.0)
    routing = route(logits, config)
    assert not routing.kept.all()
    assert not np.any(np.asarray(routing.expert)[np.asarray(routing.kept)] == 3)
    return jax.random.normal(jax.random.key(1), (2, 6, 3)), routing, config.capacity(6)


def _values_and_gradients(form, x, routing, capacity, spoil):
    """Slots and answers, with the gradients of tokens, of the experts' answers and of gates; `spoil` changes some."""
    slots, back = jax.vjp(lambda x: dispatch(x, routing, 4, capacity, form=form), spoil.get("x", lambda x: x)(x))
    answers = spoil.get("answers", lambda y: y)(jnp.sin(slots))
    y, pull = jax.vjp(lambda y, gate: combine(y, replace(routing, gate=gate), form=form), answers, routing.gate)
    of_answers, of_gate = pull(spoil.get("cotangent", lambda y: y)(jnp.cos(y)))
    return slots, y, of_answers, of_gate, *back(spoil.get("of_slots", lambda y: y)(of_answers))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["x", "answers", "cotangent", "of_slots"])
def test_what_is_not_finite_reaches_the_same_places_by_either_form(sparse, where, bad):
    x, routing, capacity = sparse
    place = {"x": (1, 2, 1), "answers": (0, 1, 0, 2), "cotangent": (1, 0, 0), "of_slots": (0, 0, 0, 0)}
    spoil = {where: lambda array: array.at[place[where]].set(BAD[bad])}
    found = [_values_and_gradients(form, x, routing, capacity, spoil) for form in FORMS]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *found)
    assert not all(np.isfinite(array).all() for array in found[0])


@by_form
def test_an_expert_that_got_no_token_spoils_nothing(sparse, form):
    x, routing, capacity = sparse
    spoil = {name: lambda array: array.at[:, 3].set(jnp.nan) for name in ("answers", "of_slots")}
    found = _values_and_gradients(form, x, routing, capacity, spoil)
    assert all(np.isfinite(array).all() for array in found)
    jax.tree.map(close, found, _values_and_gradients(form, x, routing, capacity, {}))


@by_form
def test_a_token_that_is_not_finite_spoils_its_own_output_alone(sparse, form):
    x, routing, capacity = sparse
    y = combine(dispatch(x.at[1, 2].set(jnp.nan), routing, 4, capacity, form=form), routing, form=form)
    spoiled = np.zeros((2, 6), bool)
    spoiled[1, 2] = np.asarray(routing.kept)[1, 2].any()
    assert spoiled.any()
    np.testing.assert_array_equal(np.isnan(y).any(-1), spoiled)


@by_form
def test_a_routing_without_choices_sends_no_token_and_answers_0(form):
    none, x = jnp.zeros((1, 3, 0)), jnp.ones((1, 3, 4))
    routing = Routing(none.astype(int), none.astype(int), none, none.astype(bool), {})

    def answers(x):
        return combine(1.0 + dispatch(x, routing, 2, 2, form=form), routing, form=form)

    assert not np.any(dispatch(x, routing, 2, 2, form=form))
    assert answers(x).tolist() == [[[0.0] * 4] * 3]
    assert not np.any(jax.grad(lambda x: answers(x).sum())(x))
