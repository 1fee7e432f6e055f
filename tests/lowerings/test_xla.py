"""Lowering `xla` against numpy where operands lie in one another's way, and where the compiler is held to the plan."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate import parse_equation
from tests.references.random_equations import Case, check
from tests.references.random_products import draw
from tests.references.volume import scaled

# What plain `jnp.einsum` between the same annotations gets wrong under jax 0.10.2 (docs/compiler.md).
MISCOMPILED = (
    Case("BL_yE_x, B_yLE_x -> ", (("B", 2), ("L", 2), ("E", 3)), (("x", 3), ("y", 2)), "auto", "xla"),
    draw(141),  # a gradient in a group
    draw(298),  # a gradient of a product
)


@pytest.mark.parametrize("case", MISCOMPILED, ids=lambda case: case.equation)
def test_no_user_gets_what_the_partitioner_gets_wrong(case, axis_type):
    check(replace(case, axis_type=axis_type))


@pytest.mark.parametrize("seed", range(12))
def test_random_products_give_what_one_device_gives(seed):
    check(draw(100_000 + seed))


@pytest.mark.parametrize("seed", range(4))
def test_random_moves_give_what_one_device_gives(seed):
    check(draw(200_000 + seed, "move"))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_random_products_at_length_give_what_one_device_gives(part):
    """Ten parts of 25; of 500, as docs/compiler.md counts, with DRAWS=20."""
    for seed in range(500 * part, 500 * part + scaled(25)):
        case = draw(seed)
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {case}") from error


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_random_moves_at_length_give_what_one_device_gives(part):
    for seed in range(300_000 + 500 * part, 300_000 + 500 * part + scaled(50)):
        case = draw(seed, "move")
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {case}") from error


def test_the_gradient_keeps_operands_as_they_came_and_not_as_they_were_gathered(make_mesh):
    """Stacked by a scan over layers, gathered weights would be all of them on every device."""
    mesh = make_mesh({"x": 4})
    layer = lambda x, w: gspmd.einsum("B_xE, E_xF -> B_xF", x, w, lowering="xla", via="B_xE, EF")  # noqa: E731
    with jax.set_mesh(mesh):
        shapes = {"B_xE": (8, 16), "E_xF": (16, 16)}
        x, w = (gspmd.annotate(np.ones(shape, np.float32), spec) for spec, shape in shapes.items())
        transpose = jax.jit(lambda x, w: jax.vjp(layer, x, w)[1])(x, w)
    kept = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(transpose)]
    assert sorted(kept) == [2 * 16, 4 * 16]


def test_a_second_derivative_and_a_tangent_go_through(make_mesh):
    mesh = make_mesh({"x": 3, "y": 2}, "auto")
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, size=(2, 2, 3)).astype(np.float32) for _ in range(2)]
    with jax.set_mesh(mesh), gspmd.lowering("xla"):
        x, y = (gspmd.annotate(a, spec) for a, spec in zip(arrays, ("BL_yE_x", "B_yLE_x")))
        f = lambda x, y: gspmd.einsum("BL_yE_x, B_yLE_x -> ", x, y) ** 2  # noqa: E731
        product = jax.jit(lambda x, y, t: jax.jvp(lambda x: jax.grad(f)(x, y), (x,), (t,))[1])(x, y, x)
        _, tangent = jax.jit(lambda x, y: jax.jvp(f, (x, y), (x, y)))(x, y)
    total = float((arrays[0] * arrays[1]).sum())
    np.testing.assert_array_equal(product, 2 * arrays[1] * total)
    assert float(tangent) == 4 * total**2


@pytest.mark.parametrize("equation", [f"{left} -> CX partialsum-e" for left in ("C, CX", "XC", "XC + XC")])
def test_a_partial_sum_over_an_axis_of_size_one_where_nothing_is_summed(equation, make_mesh):
    shapes = {"C": (3,), "CX": (3, 2), "XC": (2, 3)}
    specs = [str(spec) for operand in parse_equation(equation).operands for spec in operand.specs]
    arrays = [jnp.arange(1.0, 1 + np.prod(shapes[spec])).reshape(shapes[spec]) for spec in specs]
    with jax.set_mesh(make_mesh({"e": 1})):
        found = gspmd.einsum(equation, *arrays, lowering="xla")
        assert "e" in jax.typeof(found).sharding.spec.unreduced
        blocking = gspmd.einsum(equation, *arrays, lowering="blocking")
        settled = [gspmd.reshard(each, "CX partialsum-e -> CX") for each in (found, blocking)]
    np.testing.assert_array_equal(*settled)
