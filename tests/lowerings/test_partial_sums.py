"""Partial sums in loops, branches, recomputation and vmap: right, or refused in our own words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd

LEAVES, SETTLES = "BE_x, E_xF -> BF partialsum-x", "BF partialsum-x -> BF"
TAKES = "BF partialsum-x, FG -> BG partialsum-x"
LOWERINGS = ["blocking", "looped", "xla"]
EIGHTH = 1 / 8  # so that a product with ones stays one: values are exact


def _added_of_each_step(x, w, v):
    xs, first = jnp.stack([x, 2 * x, 3 * x]), gspmd.einsum(LEAVES, x, w)
    return gspmd.reshard(jax.lax.scan(lambda c, x: (c + gspmd.einsum(LEAVES, x, w), None), first, xs)[0], SETTLES)


def _added_as_it_changes(x, w, v):
    step = lambda c, _: ((c[0] + gspmd.einsum(LEAVES, c[1], w), 2 * c[1]), None)  # noqa: E731
    return gspmd.reshard(jax.lax.scan(step, (gspmd.einsum(LEAVES, x, w), x), None, length=3)[0][0], SETTLES)


def _multiplied(x, w, v):
    step = lambda c, _: (gspmd.einsum(TAKES, c, v), None)  # noqa: E731
    return gspmd.reshard(jax.lax.scan(step, gspmd.einsum(LEAVES, x, w), None, length=3)[0], SETTLES)


def _settled_inside(x, w, v):
    step = lambda c, _: (c + gspmd.reshard(gspmd.einsum(LEAVES, x, w), SETTLES) * c.mean(), None)  # noqa: E731
    return jax.lax.scan(step, jnp.ones((4, 8)), None, length=3)[0]


def _fori(x, w, v):
    xs, first = jnp.stack([x, x, x]), gspmd.einsum(LEAVES, x, w)
    return gspmd.reshard(jax.lax.fori_loop(0, 3, lambda i, c: c + gspmd.einsum(LEAVES, xs[i], w), first), SETTLES)


def _added_alike(x, w, v, layer=lambda x, w: gspmd.einsum(LEAVES, x, w)):
    c, _ = jax.lax.scan(lambda c, _: (c + layer(x, w), None), gspmd.einsum(LEAVES, x, w), None, length=3)
    return gspmd.reshard(c, SETTLES)


def _added_alike_in_a_loop_of_loops(x, w, v):
    def twice(c, _):
        return jax.lax.scan(lambda c, _: (c + gspmd.einsum(LEAVES, x, w), None), c, None, length=2)[0], None

    return gspmd.reshard(jax.lax.scan(twice, gspmd.einsum(LEAVES, x, w), None, length=2)[0], SETTLES)


def _added_alike_in_a_recomputed_loop(x, w, v):
    return jax.checkpoint(_added_alike)(x, w, v)


def _added_alike_of_what_is_not_differentiated(x, w, v):
    fixed = jax.lax.stop_gradient((x, w))
    step = lambda c, _: (c + gspmd.einsum(LEAVES, *fixed), None)  # noqa: E731
    return gspmd.reshard(jax.lax.scan(step, gspmd.einsum(LEAVES, x, w), None, length=3)[0], SETTLES)


def _added_alike_beside_what_changes(x, w, v):
    group = "(BE_x, BE_x), E_xF -> (BF partialsum-x, BF partialsum-x)"

    def step(c, x_of_step):
        changes, same = gspmd.einsum(group, (x_of_step, x), w)
        return c + changes + same, None

    first, xs = gspmd.einsum(LEAVES, x, w), jnp.stack([x, 2 * x, 3 * x])
    return gspmd.reshard(jax.lax.scan(step, first, xs)[0], SETTLES)


def _branches(x, w, v):
    m = gspmd.einsum(LEAVES, x, w)
    return gspmd.reshard(jax.lax.cond(x.sum() > 0, lambda: m + gspmd.einsum(LEAVES, 2 * x, w), lambda: m), SETTLES)


def _recomputed(x, w, v):
    return jax.checkpoint(lambda m: gspmd.reshard(m, SETTLES))(jax.checkpoint(lambda x: gspmd.einsum(LEAVES, x, w))(x))


def _jitted(x, w, v):
    return gspmd.reshard(jax.jit(lambda m: m + m)(jax.jit(lambda x: gspmd.einsum(LEAVES, x, w))(x)), SETTLES)


RIGHT = {
    _added_of_each_step: lambda x, w, v: 7 * x @ w,
    _added_as_it_changes: lambda x, w, v: 8 * x @ w,
    _multiplied: lambda x, w, v: x @ w @ v @ v @ v,
    _settled_inside: None,
    _fori: lambda x, w, v: 4 * x @ w,
    _added_alike: lambda x, w, v: 4 * x @ w,
    _added_alike_in_a_loop_of_loops: lambda x, w, v: 5 * x @ w,
    _added_alike_in_a_recomputed_loop: lambda x, w, v: 4 * x @ w,
    _added_alike_of_what_is_not_differentiated: lambda x, w, v: x @ w + 3 * jax.lax.stop_gradient(x @ w),
    _added_alike_beside_what_changes: lambda x, w, v: 10 * x @ w,
    _branches: lambda x, w, v: 3 * x @ w,
    _recomputed: lambda x, w, v: x @ w,
    _jitted: lambda x, w, v: 2 * x @ w,
}


def _settled_plainly(x, w, v):
    c = jnp.ones((4, 8))
    for _ in range(3):
        c = c + (x @ w) * c.mean()
    return c


@pytest.fixture
def arrays(make_mesh):
    mesh = make_mesh({"x": 2})
    with jax.set_mesh(mesh):
        specs = {"BE_x": (4, 8), "E_xF": (8, 8), "FG": (8, 8)}
        x, w, v = (gspmd.annotate(np.ones(shape, np.float32), spec) for spec, shape in specs.items())
        yield x, w, v * EIGHTH


def _value_and_gradients(f, argnums):
    return jax.jit(jax.value_and_grad(lambda *arrays: (f(*arrays) ** 2).sum(), argnums=argnums))


def _is_right(program, plain, arrays, argnums=(0, 1, 2)):
    want = _value_and_gradients(plain, argnums)(*(np.asarray(x) for x in arrays))
    jax.tree.map(np.testing.assert_array_equal, _value_and_gradients(program, argnums)(*arrays), want)


@pytest.mark.turns(13)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda f: f.__name__.strip("_"))
def test_a_partial_sum_goes_through(arrays, program, lowering):
    with gspmd.lowering(lowering):
        _is_right(program, RIGHT[program] or _settled_plainly, arrays)


@pytest.mark.turns(8)
@pytest.mark.parametrize("argnums", [0, 1])
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda f: f.__name__.strip("_"))
def test_a_partial_sum_is_differentiated_in_one_operand(arrays, program, lowering, argnums):
    with gspmd.lowering(lowering):
        _is_right(program, RIGHT[program] or _settled_plainly, arrays, argnums)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_recomputed_loop_is_differentiated_in_the_second_operand_alone(arrays, lowering):
    """JAX then asks for no tangent of the first one, which keeps the equation in its loop, and must not lose it."""
    with gspmd.lowering(lowering):
        _is_right(_added_alike_in_a_recomputed_loop, RIGHT[_added_alike], arrays, argnums=1)


def _either(f):
    return lambda x, w: jax.lax.cond(x.sum() > 0, f, lambda x, w: f(2 * x, w), x, w)


WRAPS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit-of-checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "checkpoint-of-jit": lambda f: jax.checkpoint(jax.jit(f)),
    "cond": _either,
    "vjp": lambda f: lambda x, w: jax.vjp(f, x, w)[0],
}


@pytest.mark.turns(6)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_called_layer_is_computed_at_every_step_whoever_called_it_first(arrays, lowering, wrap):
    layer = wrap(lambda x, w: gspmd.einsum(LEAVES, x, w))
    first = lambda x, w, v: gspmd.reshard(layer(x, w), SETTLES)  # noqa: E731
    in_loop = lambda x, w, v: _added_alike(x, w, v, layer)  # noqa: E731

    def both(x, w, v):  # the same call before the loop and in it
        c, _ = jax.lax.scan(lambda c, _: (c + layer(x, w), None), layer(x, w), None, length=3)
        return gspmd.reshard(c, SETTLES)

    with gspmd.lowering(lowering):
        for program, times in ((in_loop, 4), (first, 1), (in_loop, 4), (both, 4)):
            _is_right(program, lambda x, w, v, times=times: times * x @ w, arrays)


@pytest.mark.turns(7)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("wrap", [lambda f: f, *WRAPS.values()], ids=["plain", *WRAPS])
def test_a_layer_that_is_not_differentiated_is_computed_at_every_step(arrays, lowering, wrap):
    layer = wrap(lambda x, w: gspmd.einsum(LEAVES, x, w))
    program = lambda x, w, v: _added_alike(x, w, v, lambda x, w: layer(*jax.lax.stop_gradient((x, w))))  # noqa: E731
    with gspmd.lowering(lowering):
        _is_right(program, RIGHT[_added_alike_of_what_is_not_differentiated], arrays)


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["plain", "jit", "grad"])
def test_vmap_of_an_equation_that_owes_is_refused(arrays, lowering, wrap):
    x, w, _ = arrays
    of = wrap(lambda x: gspmd.reshard(gspmd.einsum(LEAVES, x, w), SETTLES).sum())
    with gspmd.lowering(lowering), pytest.raises(gspmd.PlanError, match="cannot vmap an equation with a partial sum"):
        jax.vmap(of)(jnp.stack([x, x]))


def test_vmap_over_what_the_equation_does_not_take_is_no_vmap_of_it(arrays):
    x, w, _ = arrays
    got = jax.vmap(lambda n: n * gspmd.reshard(gspmd.einsum(LEAVES, x, w), SETTLES).sum())(jnp.arange(2.0))
    np.testing.assert_array_equal(got, [0, 256])


def test_second_derivatives_are_right_under_xla_and_right_or_refused_otherwise(arrays):
    x, w, _ = arrays

    def slope(x):
        of = lambda x: (gspmd.reshard(gspmd.einsum(LEAVES, x, w), SETTLES) ** 3).sum()  # noqa: E731
        return jax.grad(of)(x).sum()

    plain = jax.grad(lambda x: jax.grad(lambda x: ((x @ np.asarray(w)) ** 3).sum())(x).sum())(np.asarray(x))
    with gspmd.lowering("xla"):
        np.testing.assert_array_equal(jax.jit(jax.grad(slope))(x), plain)
    with gspmd.lowering("blocking"):
        got = _or_refused(lambda: jax.jit(jax.grad(slope))(x))
    right = isinstance(got, jax.Array) and np.array_equal(got, plain)
    assert right or "cannot differentiate twice an equation" in got


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("program", [_recomputed, _jitted, _branches], ids=lambda f: f.__name__.strip("_"))
def test_the_gradient_of_a_value_that_came_with_a_gradient_is_right_or_refused(arrays, program, lowering):
    with_gradient = lambda *arrays: jax.vjp(program, *arrays)[0]  # noqa: E731
    want = _value_and_gradients(RIGHT[program], (0, 1, 2))(*(np.asarray(x) for x in arrays))
    with gspmd.lowering(lowering):
        got = _or_refused(lambda: _value_and_gradients(with_gradient, (0, 1, 2))(*arrays))
    if isinstance(got, str):
        assert "cannot differentiate twice an equation" in got
    else:
        jax.tree.map(np.testing.assert_array_equal, got, want)


def _or_refused(f):
    try:
        return f()
    except gspmd.PlanError as error:
        return str(error)
