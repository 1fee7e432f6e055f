"""Gradients under vmap, whichever operands are batched: those of one example after the other."""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.moe import MoEConfig, combine, dispatch, expert_layer, grouped_matmul, route
from gspmd.moe.config import ROUTERS
from tests.moe import placed
from tests.moe.placed import LAYOUTS

MANY = 2
close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def _check(loss, arrays, batched):
    """Compares the gradient of a vmapped loss, summed, with the sum over the examples, one by one."""

    def vmapped(*arrays):
        return jnp.sum(jax.vmap(loss, [0 if yes else None for yes in batched])(*arrays))

    def looped(*arrays):
        return sum(loss(*(x[n] if yes else x for x, yes in zip(arrays, batched))) for n in range(MANY))

    places = tuple(range(len(arrays)))
    found, wanted = (jax.jit(jax.value_and_grad(each, places))(*arrays) for each in (vmapped, looped))
    jax.tree.map(close, found, wanted)


def _drawn(batched, *shapes):
    draw = np.random.default_rng(1)
    return [draw.standard_normal((MANY, *shape) if yes else shape).astype(np.float32)
            for shape, yes in zip(shapes, batched)]  # fmt: skip


def some_batched(count, fast, forms):
    """Every choice of what is batched, in every form; but for those of `fast` with the first form, slow."""
    named = {"".join("ub"[yes] for yes in case): case for case in product([True, False], repeat=count) if any(case)}
    is_fast = lambda name, form: name in fast and form == forms[0]  # noqa: E731
    cases = [
        pytest.param(case, form, id=f"{name}-{form}", marks=[] if is_fast(name, form) else pytest.mark.slow)
        for name, case in named.items()
        for form in forms
    ]
    return pytest.mark.parametrize(("batched", "form"), cases)


@some_batched(3, ["buu", "uub"], ["sort", "onehot"])
def test_dispatch_and_combine(batched, form):
    config = MoEConfig(experts=4, router="gshard", capacity_factor=0.75)

    def loss(x, logits, weight):
        routing = route(logits, config)
        slots = dispatch(x, routing, 4, config.capacity(6), form=form)
        y = combine(jnp.tanh(jnp.einsum("GXCE,XEF->GXCF", slots, weight)), routing, form=form)
        return jnp.sum(jnp.sin(y)) + jnp.sum(y[0]) + sum(jnp.sum(each) for each in routing.losses.values())

    _check(loss, _drawn(batched, (2, 6, 3), (2, 6, 4), (4, 3, 3)), batched)


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["logits", "mask"])
@pytest.mark.parametrize(
    "router", [name if name == "gshard" else pytest.param(name, marks=pytest.mark.slow) for name in ROUTERS]
)
def test_routers(router, masked):
    config = MoEConfig(experts=4, router=router, capacity_factor=0.5, z_weight=1e-2)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (MANY, 2, 6)) if masked else jnp.ones((2, 6), bool)

    def loss(logits, mask):
        routing = route(logits, config, key=jax.random.key(3), mask=mask)
        return jnp.sum(jnp.sin(routing.gate)) + sum(jnp.sum(each) for each in routing.losses.values())

    (logits,) = _drawn([not masked], (2, 6, 4))
    vmapped = lambda logits: jnp.sum(jax.vmap(loss, (None, 0) if masked else (0, None))(logits, mask))  # noqa: E731
    looped = lambda logits: sum(  # noqa: E731
        loss(logits if masked else logits[n], mask[n] if masked else mask) for n in range(MANY)
    )
    found, wanted = (jax.value_and_grad(each)(logits) for each in (vmapped, looped))
    jax.tree.map(close, found, wanted)


@some_batched(2, ["ub"], ["ragged", "blocks"])
def test_grouped_products(batched, form):
    sizes = jnp.array([2, 0, 3])
    loss = lambda rows, weights: jnp.sum(jnp.sin(grouped_matmul(rows, weights, sizes, form=form)))  # noqa: E731
    _check(loss, _drawn(batched, (6, 3), (3, 3, 2)), batched)


@cache
def _one_example(layout, form, lowering):
    """The loss of the layer, and the jitted value and gradient of one example: the same whatever is batched."""
    config = MoEConfig(experts=placed.X, router="gshard", dispatch=form, capacity_factor=1.0)

    def loss(x, router, w_in, w_out):
        given = {"router": router, "w_in": w_in, "w_out": w_out}
        y, loss, _ = expert_layer(x, given, LAYOUTS[layout].section, config, activation="relu")
        return placed.loss_of(y, loss)

    return loss, jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))


def _layer(layout, form, lowering, batched, make_mesh):
    """The layer, of tokens, its router and the experts' weights, each batched or not, against each example alone."""
    x, weights, _ = placed.inputs()
    examples = [[], []]
    with jax.set_mesh(make_mesh(LAYOUTS[layout].mesh)), gspmd.lowering(lowering):
        found = []
        groups = [x] + [weights[name] for name in ("router", "w_in", "w_out")]
        for array, spec, yes in zip(groups, ("groups", "router", "w_in", "w_out"), batched):
            spec, half = gspmd.Spec.parse(LAYOUTS[layout].specs[spec]), array * np.float32(0.5)
            for example, alone in zip(examples, (array, half if yes else array)):
                example.append(gspmd.annotate(alone, spec))
            whole = np.stack([array, half]) if yes else array
            found.append(gspmd.annotate(whole, gspmd.Spec(("N", *spec.dims), ((), *spec.axes)) if yes else spec))
        loss, alone = _one_example(layout, form, lowering)

        def vmapped(*arrays):
            return jnp.sum(jax.vmap(loss, [0 if yes else None for yes in batched])(*arrays))

        value, gradients = jax.jit(jax.value_and_grad(vmapped, (0, 1, 2, 3)))(*found)
        values, wanted = zip(*(jax.tree.map(np.asarray, alone(*example)) for example in examples))
    close(value, sum(values))
    for gradient, both, yes in zip(gradients, zip(*wanted), batched):
        close(gradient, np.stack(both) if yes else sum(both))


def test_layer_of_batched_weights_and_one_x(make_mesh):
    _layer("one axis", "sort", "blocking", (False, False, True, False), make_mesh)


@pytest.mark.slow
@some_batched(4, [], ["sort", "onehot", "dropless"])
def test_layer_whatever_is_batched(batched, form, make_mesh):
    lowering = ("blocking", "looped", "xla")[(sum(batched) + ["sort", "onehot", "dropless"].index(form)) % 3]
    _layer("experts x data", form, lowering, batched, make_mesh)
