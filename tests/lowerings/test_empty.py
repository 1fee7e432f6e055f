"""Dimensions of size 0, wherever a collective of either pass would touch them: XLA:CPU has no collective of nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd import ops
from gspmd.annotate import parse_equation

MESH = {"x": 2, "y": 2}
EQUATIONS = [  # every kind of step, behind every kind of product
    ("BE_x -> BE", None),
    ("BE_x -> B_xE", None),
    ("BE_xy -> BE_yx", None),
    ("BE -> BE_x", None),
    ("BE_x -> B", None),
    ("BE_x, E_xF -> BF_x", None),
    ("BE_x, E_xF -> BF", None),
    ("B_xE, EF_x -> BF_x", "BE, EF_x"),
    ("F_xB, F_xEB -> FE_xB", "FB, FE_xB"),
    ("B_xE_y, E_xF_y -> BF_yx", None),
    ("BE_x, (E_xF, E_xH) -> (BF_x, B_xH)", None),
    ("BF_x, F_xE + BH_x, H_xE -> B_xE", None),
]
CASES = [(*each, dim) for each in EQUATIONS for dim in sorted({c for c in each[0] if c.isupper()})]


@pytest.mark.turns(22)
@pytest.mark.parametrize("lowering", ["blocking", "looped", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("equation", "via", "empty"), CASES)
def test_values_and_gradients(equation, via, empty, lowering, make_mesh):
    parsed = parse_equation(equation)
    specs = [spec for operand in parsed.operands for spec in operand.specs]
    sizes = {dim: 0 if dim == empty else 4 for spec in specs for dim in spec.dims}
    shape = lambda spec: tuple(sizes[dim] for dim in spec.dims)  # noqa: E731

    def compute(*flat):
        held = iter(flat)
        nested = [tuple(next(held) for _ in o.specs) if o.group else next(held) for o in parsed.operands]
        results = gspmd.einsum(parsed, *nested, lowering=lowering, via=via)
        return results if parsed.group else (results,)

    def both(*flat):
        total = lambda *flat: sum(y.sum() for y in compute(*flat))  # noqa: E731
        return compute(*flat), jax.grad(total, tuple(range(len(flat))))(*flat)

    with jax.set_mesh(make_mesh(MESH)):
        arrays = [gspmd.annotate(np.ones(shape(spec), "float32"), spec) for spec in specs]
        results, gradients = jax.jit(both)(*arrays)
    assert [y.shape for y in results] == [shape(spec) for spec in parsed.outputs]
    assert [g.shape for g in gradients] == [shape(spec) for spec in specs]
    if len(parsed.terms) == 1 and not parsed.group:
        letters = ",".join("".join(spec.dims) for spec in specs) + "->" + "".join(parsed.outputs[0].dims)
        np.testing.assert_array_equal(results[0], np.einsum(letters, *(np.ones(shape(spec)) for spec in specs)))


FORMS = {
    "norm": lambda: ops.rms_norm(gspmd.annotate(jnp.ones((0, 4)), "B_xE_y"), jnp.ones(4), "B_xE_y", "E"),
    "softmax": lambda: ops.softmax(gspmd.annotate(jnp.ones((0, 4)), "BV_x"), "BV_x", "V"),
    "logsumexp": lambda: ops.logsumexp(gspmd.annotate(jnp.ones((0, 4)), "BV_x"), "BV_x", "V"),
    "lookup": lambda: ops.embed(jnp.ones((0, 4), int), jnp.ones((4, 2)), "BL, VE -> BLE"),
    "argmax": lambda: ops.argmax(gspmd.annotate(jnp.ones((0, 4)), "BV_x"), "BV_x", "V"),
    "sample": lambda: ops.sample(
        gspmd.annotate(jnp.ones((0, 4)), "BV_x"), "BV_x", "V", seeds=np.arange(0), positions=np.arange(0), top_p=0.5
    ),
    "loss": lambda: ops.cross_entropy(gspmd.annotate(jnp.ones((0, 4)), "BV_x"), jnp.ones((0,), int), "BV_x"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_no_rows(form, make_mesh):
    with jax.set_mesh(make_mesh(MESH)), gspmd.lowering("blocking"):
        assert FORMS[form]().shape[0] == 0


def test_a_gradient_from_no_rows_is_zero(make_mesh):
    with jax.set_mesh(make_mesh(MESH)), gspmd.lowering("blocking"):
        x = gspmd.annotate(jnp.ones((0, 4)), "B_xE_y")
        gradient = jax.grad(lambda scale: ops.rms_norm(x, scale, "B_xE_y", "E").sum())(jnp.ones(4))
    np.testing.assert_array_equal(gradient, np.zeros(4))
