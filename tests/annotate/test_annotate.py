"""annotate() on eight host devices: it places, constrains, states; and the exact wording of its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from gspmd import Spec, SpecError, annotate
from gspmd.annotate import spec_of

SIZES = {"x": 4, "y": 2}
VALUE = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)


def _error(x, spec) -> str:
    with pytest.raises(SpecError) as error:
        annotate(x, spec)
    return str(error.value)


# -- concrete arrays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["BE", "B_xE_y", "B_xyE", "B_yxE", "BE_x"])
def test_a_concrete_array_is_placed(make_mesh, axis_type, text):
    mesh, spec = make_mesh(SIZES, axis_type), Spec.parse(text)
    with jax.set_mesh(mesh):
        for given in (VALUE, jnp.asarray(VALUE), annotate(VALUE, "B_xE_y")):
            placed = annotate(given, spec)
            assert placed.sharding == jax.NamedSharding(mesh, spec.partition_spec())
            assert placed.addressable_shards[0].data.shape == spec.local_shape((8, 12), SIZES)
            np.testing.assert_array_equal(placed, VALUE)
            assert spec_of(placed, "BE") == spec


def test_an_array_from_before_the_mesh_is_placed(make_mesh, axis_type):
    elsewhere = jax.device_put(VALUE, jax.devices()[5])
    with jax.set_mesh(make_mesh(SIZES, axis_type)):
        assert spec_of(annotate(elsewhere, "B_xE"), "BE") == Spec.parse("B_xE")


def test_a_scalar_and_a_key_are_placed(make_mesh, axis_type):
    with jax.set_mesh(make_mesh(SIZES, axis_type)):
        assert annotate(3.0, "") == 3.0
        assert spec_of(annotate(jax.random.split(jax.random.key(0), 8), "B_xy"), "B") == Spec.parse("B_xy")


def test_a_shape_gets_its_sharding(make_mesh, axis_type):
    mesh = make_mesh(SIZES, axis_type)
    with jax.set_mesh(mesh):
        shape = annotate(jax.ShapeDtypeStruct((8, 12), jnp.bfloat16), "B_xE_y")
    assert (shape.shape, shape.dtype) == ((8, 12), jnp.bfloat16)
    assert shape.sharding == jax.NamedSharding(mesh, jax.P("x", "y"))


# -- traced arrays ----------------------------------------------------------------------------------------------------


def test_under_auto_axes_it_constrains(make_mesh):
    with jax.set_mesh(make_mesh(SIZES, "auto")):
        x = annotate(VALUE, "B_xE")
        moved = jax.jit(lambda v: annotate(v * 2, "B_yE_x"))(x)
        assert spec_of(moved, "BE") == Spec.parse("B_yE_x")
        np.testing.assert_array_equal(moved, VALUE * 2)


def test_under_auto_axes_a_dimension_may_stay_open(make_mesh):
    with jax.set_mesh(make_mesh(SIZES, "auto")):
        x = annotate(VALUE, "B_xE_y")
        np.testing.assert_array_equal(jax.jit(lambda v: annotate(v, "B_?E"))(x), VALUE)
        assert spec_of(jax.jit(lambda v: annotate(v, "BE_?"))(x), "BE").axes_of("B") == ()
        np.testing.assert_array_equal(annotate(x, "B_?E_?"), VALUE)


def test_under_explicit_axes_it_states_the_type(make_mesh):
    with jax.set_mesh(make_mesh(SIZES)):
        x = annotate(VALUE, "B_xE_y")
        np.testing.assert_array_equal(jax.jit(lambda v: annotate(v, "B_xE_y"))(x), VALUE)
        assert "reshard" not in str(jax.make_jaxpr(lambda v: annotate(v, "B_xE_y"))(x))


def test_a_constant_inside_jit_is_placed(make_mesh, axis_type):
    with jax.set_mesh(make_mesh(SIZES, axis_type)):
        placed = jax.jit(lambda: annotate(VALUE, "B_xE_y"))()
        assert spec_of(placed, "BE") == Spec.parse("B_xE_y")
        np.testing.assert_array_equal(placed, VALUE)


def test_axes_of_size_one_are_stated_too(make_mesh):
    with jax.set_mesh(make_mesh({"x": 8, "y": 1})):
        x = annotate(VALUE, "B_xE")
        stated = jax.jit(lambda v: annotate(v, "B_xE_y"))(x)
        assert spec_of(stated, "BE") == Spec.parse("B_xE_y")


def test_under_grad_vmap_scan_and_remat(make_mesh, axis_type):
    with jax.set_mesh(make_mesh(SIZES, axis_type)):
        x = annotate(VALUE, "B_xE_y")
        stack = annotate(np.stack([VALUE, VALUE]), "NB_xE_y")

        def f(v):
            return (annotate(v, "B_xE_y") ** 2).sum()

        np.testing.assert_array_equal(jax.jit(jax.grad(jax.remat(f)))(x), 2 * VALUE)
        np.testing.assert_array_equal(jax.grad(f)(x), 2 * VALUE)
        np.testing.assert_allclose(jax.jit(jax.vmap(f))(stack), [(VALUE**2).sum()] * 2, rtol=1e-6)
        total, _ = jax.jit(lambda s: jax.lax.scan(lambda c, v: (c + f(v), None), 0.0, s))(stack)
        np.testing.assert_allclose(total, 2 * (VALUE**2).sum(), rtol=1e-6)


def _owing(x):
    """x as a sum that is owed over y: every device of y holds half of it."""
    spec = Spec.parse("B_xE")
    body = lambda v: v / 2  # noqa: E731
    return jax.shard_map(
        body, in_specs=spec.partition_spec(), out_specs=spec.with_partial("y").partition_spec(), check_vma=False
    )(x)


def test_a_partial_sum_that_is_owed_can_be_stated(make_mesh):
    with jax.set_mesh(make_mesh(SIZES)):
        owing = _owing(annotate(VALUE, "B_xE"))
        assert spec_of(owing, "BE") == Spec.parse("B_xE partialsum-y")
        assert annotate(owing, "B_xE partialsum-y") is owing
        jax.jit(lambda v: annotate(_owing(v), "B_xE (partialsum-y)"))(annotate(VALUE, "B_xE"))


# -- spec_of ----------------------------------------------------------------------------------------------------------


def test_spec_of(make_mesh):
    assert spec_of(np.ones(3)) == Spec.parse("A")
    assert spec_of(jnp.ones((2, 3)), "BE") == Spec.parse("BE")
    seen = []
    with jax.set_mesh(make_mesh(SIZES, "auto")):
        jax.jit(lambda v: seen.append(spec_of(v, "BE")))(annotate(VALUE, "B_xE_y"))
    assert seen == [Spec.parse("B_?E_?")]  # the compiler has yet to choose
    with pytest.raises(SpecError) as error:
        spec_of(VALUE, "BLE")
    assert str(error.value) == (
        "cannot name the dimensions of an array of shape (8, 12) with 'BLE'.\n"
        "  Write one capital letter for each dimension of the array."
    )


# -- errors -----------------------------------------------------------------------------------------------------------


def test_without_a_mesh():
    assert _error(VALUE, "B_xE") == (
        "cannot annotate an array of shape (8, 12) with 'B_xE': no mesh is set.\n"
        "  Call it inside 'with jax.set_mesh(mesh):', where mesh = jax.make_mesh((4, 2), ('x', 'y'))."
    )


def test_what_is_no_array(make_mesh):
    with jax.set_mesh(make_mesh(SIZES)):
        assert _error([VALUE], "B_xE") == (
            "cannot annotate a list with 'B_xE'.\n  Pass one array; use jax.tree.map for a tree of arrays."
        )


def test_what_does_not_fit(make_mesh, axis_type):
    with jax.set_mesh(make_mesh(SIZES, axis_type)):
        assert (
            _error(VALUE, "B_qE_xy")
            == """\
cannot annotate an array of shape (8, 12) with 'B_qE_xy': 2 faults
    B_qE_xy
    ^^^
  the mesh has no axis q.
  The mesh has x and y.
    B_qE_xy
       ^^^^
  dimension E has size 12, which mesh axes x and y (size 4·2 = 8) do not divide.
  Use a size that is a multiple of 8 (8 or 16), or leave E unsharded: 'B_qE'."""
        )


def test_a_partial_sum_under_auto_axes(make_mesh):
    with jax.set_mesh(make_mesh(SIZES, "auto")):
        assert (
            _error(VALUE, "B_xE partialsum-y")
            == """\
cannot annotate an array of shape (8, 12) with 'B_xE partialsum-y'
    B_xE partialsum-y
         ^^^^^^^^^^^^
  under Auto axes an array cannot be a partial sum.
  Reduce it in the equation that makes it, or make the mesh with Explicit axes."""
        )


def test_a_partial_sum_of_an_array_that_owes_none(make_mesh):
    with jax.set_mesh(make_mesh(SIZES)):
        assert (
            _error(VALUE, "BE partialsum-y")
            == """\
cannot annotate an array of shape (8, 12) with 'BE partialsum-y'
    BE partialsum-y
    ^^^^^^^^^^^^^^^
  the spec says 'BE partialsum-y', but the type of the array says 'BE'.
  Only an equation can make a partial sum. Write an equation whose result has this spec."""
        )


def test_an_open_dimension_under_explicit_axes(make_mesh):
    with jax.set_mesh(make_mesh(SIZES)):
        assert (
            _error(VALUE, "B_xE_?")
            == """\
cannot annotate an array of shape (8, 12) with 'B_xE_?'
    B_xE_?
       ^^^
  dimension E is left open, but under Explicit axes every dimension has a placement.
  Name its mesh axes, or make the mesh with Auto axes."""
        )


def test_another_type_under_explicit_axes(make_mesh):
    with jax.set_mesh(make_mesh(SIZES)), pytest.raises(SpecError) as error:
        jax.jit(lambda v: annotate(v, "BE_x"))(annotate(VALUE, "B_xE_y"))
    assert (
        str(error.value)
        == """\
cannot annotate an array of shape (8, 12) with 'BE_x'
    BE_x
    ^^^^
  the spec says 'BE_x', but the type of the array says 'B_xE_y'.
  Move it with gspmd.reshard(x, 'B_xE_y -> BE_x')."""
    )


def test_inside_a_shard_map(make_mesh, axis_type):
    with jax.set_mesh(make_mesh(SIZES, axis_type)), pytest.raises(SpecError) as error:
        jax.shard_map(lambda v: annotate(v, "BE"), in_specs=jax.P("x"), out_specs=jax.P("x"))(annotate(VALUE, "B_xE"))
    assert (
        str(error.value)
        == """\
cannot annotate an array of shape (2, 12) with 'BE'
    BE
    ^^
  inside a shard_map over this mesh every array is one device's part.
  Annotate the array outside of it."""
    )


def test_axes_of_two_types():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with jax.set_mesh(mesh):
        assert (
            _error(VALUE, "BE")
            == """\
cannot annotate an array of shape (8, 12) with 'BE'
    BE
    ^^
  the mesh has axes of several types: x Auto, y Explicit.
  Make it with Auto axes only, or with Explicit axes only."""
        )


@pytest.mark.parametrize(("given", "means"), [
    (jax.P("x", None), "a PartitionSpec of JAX, which does not name dimensions.\n  Write 'A_xB', with your letters for "
     "A and B."),
    (jax.P(("x", "y"), "data"), "a PartitionSpec of JAX, which does not name dimensions.\n  Write 'A_xyB_{data}', with "
     "your letters for A and B."),
    (("x", None), "a tuple, which does not name dimensions.\n  Write 'A_xB', with your letters for A and B."),
])  # fmt: skip
def test_a_partition_spec_is_answered_with_the_spec_that_it_means(make_mesh, given, means):
    with jax.set_mesh(make_mesh(SIZES)), pytest.raises(SpecError) as error:
        annotate(VALUE, given)
    assert str(error.value) == f"cannot read a spec from {given!r}: it is {means}"


def test_names_of_dimensions_are_answered_with_their_letters(make_mesh):
    with jax.set_mesh(make_mesh(SIZES)), pytest.raises(SpecError) as error:
        annotate(VALUE, ("batch", "length"))
    assert str(error.value).splitlines()[1] == ("  Write 'BL', with the mesh axes that shard them, such as 'B_xL'.")


def test_what_is_not_placed_yet_is_placed_under_explicit_axes(make_mesh):
    """In jit, in eval_shape, and where a module is built; its gradient is that of the whole array."""
    wanted = jax.P("x", "y")
    with jax.set_mesh(make_mesh(SIZES)):
        place = lambda v: annotate(v, "B_xE_y")  # noqa: E731
        assert jax.jit(place)(VALUE).sharding.spec == wanted
        assert jax.typeof(jax.jit(lambda: place(jnp.ones((8, 12))))()).sharding.spec == wanted
        assert jax.eval_shape(place, jax.ShapeDtypeStruct((8, 12), jnp.float32)).sharding.spec == wanted
        gradient = jax.jit(jax.grad(lambda v: (place(v) ** 2).sum()))(jnp.asarray(VALUE, jnp.float32))
        np.testing.assert_allclose(gradient, 2 * VALUE, rtol=1e-6)


def test_the_parameters_of_a_module_are_placed_where_it_is_built(make_mesh):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(annotate(jax.random.normal(rngs.params(), (8, 12)), "B_xE_y"))

    with jax.set_mesh(make_mesh(SIZES)):
        for build in (lambda make: make(), nnx.jit, nnx.eval_shape):
            made = build(lambda: Layer(nnx.Rngs(0)))
            made = made() if build is nnx.jit else made
            assert made.w.get_value().sharding.spec == jax.P("x", "y")
