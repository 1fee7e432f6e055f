"""Refusals of the room's calls, one error each: other sizes than the routing's, other types, other names."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd import PlanError, SpecError
from gspmd.moe import MoEConfig, Routing, combine, dispatch, expert_layer, grouped_matmul, route
from gspmd.moe.routers.switch import route as switch
from tests.moe import placed
from tests.moe.placed import LAYOUTS

G, L, X, C, E = 2, 6, 4, 2, 3
CONFIG = MoEConfig(experts=X)
KEYS = jax.random.split(jax.random.key(0))
ROWS, WEIGHTS = jnp.ones((4, 2)), jnp.ones((3, 2, 5))
by_form = pytest.mark.parametrize("form", ["sort", "onehot"])


@pytest.fixture(scope="module")
def routing():
    return route(jax.random.normal(jax.random.key(0), (G, L, X)), CONFIG)


OTHER = {
    "more slots": ((G, L, E), X, C + 1, f"It has {C + 1} slots C per expert, but the routing has {C}."),
    "fewer slots": ((G, L, E), X, C - 1, f"It has {C - 1} slots C per expert, but the routing has {C}."),
    "more experts": ((G, L, E), X + 1, C, f"It has {X + 1} experts X, but the routing has {X}."),
    "more tokens": ((G, L + 1, E), X, C, f"It has {L + 1} tokens L of a group, but the routing has {L}."),
    "fewer tokens": ((G, L - 1, E), X, C, f"It has {L - 1} tokens L of a group, but the routing has {L}."),
    "more groups": ((G + 1, L, E), X, C, f"It has {G + 1} groups G, but the routing has {G}."),
}


@by_form
@pytest.mark.parametrize(("shape", "experts", "capacity", "fact"), OTHER.values(), ids=OTHER)
def test_dispatch_takes_the_sizes_of_the_routing(shape, experts, capacity, fact, form, routing):
    call = lambda routing: dispatch(jnp.ones(shape), routing, experts, capacity, form=form)  # noqa: E731
    for run in (call, jax.jit(call), jax.grad(lambda routing: call(routing).sum(), allow_int=True)):
        with pytest.raises(SpecError) as error:
            run(routing)
        assert str(error.value).splitlines() == [
            f"cannot dispatch tokens to their slots: x [G, L, E] = {shape} does not fit the routing.",
            f"  {fact}",
            "  Use one config for both: capacity = config.capacity(tokens), as gspmd.moe.route did.",
        ]


@by_form
@pytest.mark.parametrize(
    ("shape", "fact"),
    [
        ((G, X, C + 1, E), "It has 3 slots C per expert, but the routing has 2."),
        ((G, X - 1, C, E), "It has 3 experts X, but the routing has 4."),
        ((G + 1, X, C, E), "It has 3 groups G, but the routing has 2."),
    ],
)
def test_combine_takes_the_sizes_of_the_routing(shape, fact, form, routing):
    for run in (partial(combine, form=form), jax.jit(partial(combine, form=form))):
        with pytest.raises(SpecError) as error:
            run(jnp.ones(shape), routing)
        assert fact in str(error.value)


@by_form
def test_under_vmap_the_sizes_are_those_of_one_example(form, routing):
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), routing)
    x = jnp.ones((2, G, L, E))
    slots = jax.vmap(lambda x, routing: dispatch(x, routing, X, C, form=form))(x, many)
    np.testing.assert_array_equal(slots[1], dispatch(x[1], routing, X, C, form=form))
    with pytest.raises(SpecError, match="It has 3 slots C per expert, but the routing has 2"):
        jax.vmap(lambda x, routing: dispatch(x, routing, X, C + 1, form=form))(x, many)


@by_form
def test_a_routing_made_by_hand_stays_within_its_slots(form):
    expert, slot = jnp.array([[[0], [1], [0]]]), jnp.array([[[0], [0], [1]]])
    made = Routing(expert, slot, jnp.ones((1, 3, 1)), jnp.ones((1, 3, 1), bool), {})
    x = jnp.array([[[1.0], [2.0], [3.0]]])
    assert dispatch(x, made, 2, 2, form=form)[0, ..., 0].tolist() == [[1, 3], [2, 0]]
    with pytest.raises(SpecError) as error:
        dispatch(x, made, 2, 1, form=form)
    assert str(error.value) == (
        "cannot dispatch tokens to their slots: choice 0 of token 2 of group 0 is kept, with expert 0 and slot 1.\n"
        "  There are 2 experts of 1 slots."
    )
    # Where its values are not known, what has no slot takes none, in either form, and least of all the next expert's.
    traced = jax.jit(lambda routing: dispatch(x, routing, 2, 1, form=form))(made)
    assert traced[0, ..., 0].tolist() == [[1], [2]]


WRONG = {
    "a seed": (lambda: route(jnp.ones((G, L, X)), CONFIG, key=3), "key is 3, which is not a key.\n  Make a key"),
    "keys": (lambda: route(jnp.ones((G, L, X)), CONFIG, key=KEYS), "key holds keys (2,)"),
    "config": (lambda: route(jnp.ones((G, L, X)), "switch"), "config is 'switch', which is not a MoEConfig."),
    "config of a router": (lambda: switch(jnp.ones((G, L, X)), None), "config is None, which is not a MoEConfig."),
    "text for logits": (lambda: route("abc", CONFIG), "logits is 'abc', which is not an array.\n  Pass an array [G, L"),
    "no logits": (lambda: route(None, CONFIG), "logits is None, which is not an array."),
    "complex logits": (lambda: route(jnp.ones((G, L, X), complex), CONFIG), "logits has dtype complex64."),
    "text for a mask": (lambda: route(jnp.ones((G, L, X)), CONFIG, mask="all"), "mask is 'all', which is not an"),
    "another mask": (lambda: route(jnp.ones((G, L, X)), CONFIG, mask=jnp.ones((L, G))), "but it has (6, 2)."),
    "no routing": (lambda: dispatch(jnp.ones((G, L, E)), None, X, C), "routing is not a Routing."),
    "no tokens": (lambda: dispatch(None, None, X, C), "x is None, which is not an array."),
    "no capacity": (lambda: dispatch(jnp.ones((G, L, E)), None, X, None), "capacity is None."),
    "a capacity that is a float": (lambda: dispatch(jnp.ones((G, L, E)), None, X, 2.0), "capacity is 2.0."),
    "a capacity in an array": (lambda: dispatch(jnp.ones((G, L, E)), None, X, jnp.array(2)), "capacity is Array(2"),
    "a capacity below 0": (lambda: dispatch(jnp.ones((G, L, E)), None, X, -1), "capacity is -1."),
    "shape of x": (lambda: dispatch(jnp.ones((L, E)), None, X, C), "[G, L, E], but it has shape (6, 3)."),
    "a form": (lambda: dispatch(jnp.ones((G, L, E)), None, X, C, form="sorted"), "Did you mean 'sort'?"),
    "forms": (lambda: combine(jnp.ones((G, X, C, E)), None, form=["sort"]), "form is ['sort']."),
    "no answers": (lambda: combine(None, None), "y is None, which is not an array."),
    "answers of integers": (lambda: combine(jnp.ones((G, X, C, E), int), None), "y has dtype int32."),
    "no rows": (lambda: grouped_matmul(None, WEIGHTS, [1, 1, 1]), "rows is None, which is not an array."),
    "sizes of floats": (lambda: grouped_matmul(ROWS, WEIGHTS, jnp.ones(3)), "sizes has dtype float32."),
    "sizes above": (lambda: grouped_matmul(ROWS, WEIGHTS, [3, 3, 3]), "sizes are [3, 3, 3]; they must not"),
    "sizes below": (lambda: grouped_matmul(ROWS, WEIGHTS, [-1, 1, 1]), "sizes are [-1, 1, 1]"),
    "no experts": (lambda: grouped_matmul(ROWS, jnp.ones((0, 2, 5)), np.zeros(0, int)), "have no experts"),
    "a router": (lambda: MoEConfig(router="topk"), "router is 'topk'. Did you mean 'top-k'?"),
    "a router in capitals": (lambda: MoEConfig(router="Switch"), "Did you mean 'switch'?"),
    "a dispatch": (lambda: MoEConfig(dispatch="one-hot"), "dispatch is 'one-hot'. Did you mean 'onehot'?"),
    "a switch that is text": (lambda: MoEConfig(priority="no"), "priority is 'no'; it must be True or False."),
    "capacity for None": (lambda: CONFIG.capacity(None), "capacity for None tokens."),
    "capacity for a share": (lambda: CONFIG.capacity(2.5), "capacity for 2.5 tokens."),
}  # fmt: skip


@pytest.mark.parametrize(("call", "text"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(call, text):
    with pytest.raises((SpecError, PlanError)) as error:
        call()
    assert text in str(error.value)


IN_A_LAYER = {
    "a seed": ({"key": 7}, "key is 7, which is not a key.\n  Make a key from a seed: jax.random.key(7)."),
    "activation": ({"activation": "Gelu"}, "activation is 'Gelu'.\n  Did you mean 'gelu'?"),
    "activations": ({"activation": ["gelu"]}, "activation is ['gelu']."),
    "no config": ({"config": None}, "config is None, which is not a MoEConfig."),
    "a layout's name": ({"layout": "gshard"}, "layout is 'gshard', which lacks router, groups, dispatched"),
    "no tokens": ({"x": None}, "x is None, which is not an array.\n  Pass an array [G, L, E]."),
    "a shape": ({"x": jax.ShapeDtypeStruct((8, 12, 8), "float32")}, "a shape without values.\n  Call it inside"),
    "integers": ({"x": jnp.ones((8, 12, 8), int)}, "x has dtype int32.\n  Cast it: x holds floating-point numbers."),
    "no weights": ({"weights": None}, "weights lack router, w_in, w_gate, w_out."),
    "a list of weights": ({"weights": [1, 2]}, "weights lack router, w_in, w_gate, w_out."),
    "mask": ({"mask": jnp.ones((8, 11))}, "the mask must have shape (8, 12), but it has (8, 11)."),
    "True": ({"mask": True}, "mask must have dimensions [G, L], but it has shape ()."),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "text"), IN_A_LAYER.values(), ids=IN_A_LAYER)
def test_what_is_wrong_in_a_layer_is_named(changed, text):
    x, weights, _ = placed.inputs()
    given = {"x": x, "weights": weights, "layout": LAYOUTS["replicated"].section, "config": MoEConfig(experts=8)}
    given |= changed
    with pytest.raises((SpecError, PlanError)) as error:
        expert_layer(**given)
    assert text in str(error.value)
