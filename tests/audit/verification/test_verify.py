"""`gspmd.audit.verify`: finds what is wrong on a mesh, under which lowering, and where; and nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd.audit import verify
from gspmd.lowerings.blocking import collectives as lower
from gspmd.lowerings.in_force import current

EQUATION = "BE_x, E_xF_y -> BF_y"


@pytest.fixture
def mesh(make_mesh, axis_type):
    with jax.set_mesh(make_mesh({"x": 2, "y": 2}, axis_type)) as mesh:
        yield mesh


def _arguments(dtype="float32"):
    shapes = {"BE_x": (4, 8), "E_xF_y": (8, 4)}
    return [gspmd.annotate(jax.ShapeDtypeStruct(shape, dtype), spec) for spec, shape in shapes.items()]


def _layer(x, w):
    return {"h": gspmd.einsum(EQUATION, x, w)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_what_is_right_is_found_right(mesh, dtype):
    found = verify(_layer, *_arguments(dtype))
    found.raise_if_wrong()
    assert found.ok
    assert found
    assert repr(found) == "Verification(_layer: ok)"
    count = 1 if dtype == "int32" else 3
    assert str(found) == f"_layer: {count} arrays agree with those on one device, under xla, blocking, looped"


def test_it_says_which_lowering_which_array_and_where(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2, "y": 2})):
        args = [gspmd.annotate(jnp.ones(shape), spec) for shape, spec in [((4, 8), "BE_x"), ((8, 4), "E_xF")]]

        def wrong(x, w):
            h = gspmd.einsum("BE_x, E_xF -> BF", x, w)
            late = jnp.where(jnp.arange(16).reshape(4, 4) > 6, 2.0, 0.0)
            several = jax.sharding.get_abstract_mesh().size > 1
            return h, h + (late if several and current() == "looped" else 0)

        found = verify(wrong, *args)
    assert not found
    (parting,) = found.partings
    assert (parting.lowering, parting.where, parting.index) == ("looped", "value[1]", (1, 3))
    assert (parting.absolute, parting.relative) == (2.0, 0.25)
    assert repr(found) == "Verification(wrong: 1 wrong)"
    message = r"looped: value\[1\] is off by 2, 0.25 of its largest value, where 5e-05 is allowed, first at \[1, 3\]"
    with pytest.raises(gspmd.PlanError, match=message):
        found.raise_if_wrong()


def test_a_wrong_gradient_is_found(make_mesh):
    @jax.custom_vjp
    def doubled(x):
        return x

    def backward(_, g):
        return (g * (1.0 if jax.sharding.get_abstract_mesh().size == 1 else 2.0),)

    doubled.defvjp(lambda x: (x, None), backward)
    with jax.set_mesh(make_mesh({"x": 2})):
        x = gspmd.annotate(jax.ShapeDtypeStruct((4, 3), "float32"), "B_xE")
        found = verify(lambda tree: doubled(tree["w"]), {"w": x}, lowerings=["blocking"])
        assert verify(lambda tree: doubled(tree["w"]), {"w": x}, gradients=False)
    assert [(each.lowering, each.where) for each in found.partings] == [("blocking", "gradient of argument[0]['w']")]
    assert found.partings[0].relative == 1.0


def test_an_equation_that_is_wrong_by_itself_is_named(make_mesh, monkeypatch):
    psum = jax.lax.psum
    monkeypatch.setitem(lower._EMIT, "all-reduce", lambda step, x, *_: psum(x, step.axes) + 1)
    with jax.set_mesh(make_mesh({"x": 3, "y": 2})):
        shapes = {"BE_x": (5, 9), "E_xF": (9, 7)}
        x, w = (gspmd.annotate(jax.ShapeDtypeStruct(shape, "float32"), spec) for spec, shape in shapes.items())
        gathered = lambda x: gspmd.reshard(x, "BE_x -> BE").sum()  # noqa: E731
        both = lambda x, w: gathered(x) + gspmd.einsum("BE_x, E_xF -> BF", x, w)  # noqa: E731
        found = verify(both, x, w, lowerings=("xla", "blocking"), gradients=False)
        only = verify(partial(gspmd.reshard, equation="BE_x -> BE"), x, lowerings=("blocking",))
    assert {each.lowering for each in found.partings} == {"blocking"}
    assert found.equations == (("blocking", "BE_x, E_xF -> BF"),)
    assert "blocking: 'BE_x, E_xF -> BF' gives wrong results even when it is run alone" in str(found)
    assert only.ok


def test_integers_are_exact_and_copies_count(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})):
        size = lambda: jax.sharding.get_abstract_mesh().size  # noqa: E731
        ids = gspmd.annotate(jnp.arange(8), "B_x")
        (parting,) = verify(lambda n: n + (n == 5) * (size() - 1), ids, lowerings=["xla"]).partings
        own = lambda x: x + jax.lax.axis_index("x")  # noqa: E731
        differ = {"in_specs": jax.P(), "out_specs": jax.P(), "check_vma": False}
        (copy,) = verify(lambda x: jax.shard_map(own, **differ)(x), jnp.zeros((3,), int), lowerings=["xla"]).partings
    assert (parting.where, parting.absolute, parting.tolerance, parting.index) == ("value", 1.0, 0.0, (5,))
    assert copy.absolute == 1.0


def test_what_raises_under_one_lowering_is_reported_so(make_mesh):
    def raises(x):
        if current() == "looped":
            raise ZeroDivisionError("no\nmore")
        return x

    with jax.set_mesh(make_mesh({"x": 2})):
        found = verify(raises, jnp.ones(3))
    assert [str(each) for each in found.partings] == ["looped: raises ZeroDivisionError: no"]


def test_no_mesh_and_wrong_arguments_are_errors_of_ours(make_mesh):
    with pytest.raises(gspmd.PlanError, match=r"cannot verify <lambda>: there is no mesh"):
        verify(lambda x: x, jnp.ones(3))
    with jax.set_mesh(make_mesh({"x": 2})):
        with pytest.raises(gspmd.PlanError, match=r"cannot verify <lambda>: 'a' is not an array\."):
            verify(lambda x: x, "a")
        with pytest.raises(gspmd.PlanError, match="is not an array"):
            verify(lambda x: x, None)
        with pytest.raises(gspmd.PlanError, match="no lowering is called 'blockin'"):
            verify(lambda x: x, jnp.ones(3), lowerings=["blockin"])
        with pytest.raises(gspmd.PlanError, match="it raises an error even on one device: ZeroDivisionError"):
            verify(lambda x: 1 // 0, jnp.ones(3))


def test_plain_einsum_on_the_mesh_where_the_partitioner_is_wrong_is_found(make_mesh):
    with jax.set_mesh(make_mesh({"x": 3, "y": 2}, "auto")):
        x, y = (gspmd.annotate(jax.ShapeDtypeStruct((2, 2, 3), "float32"), s) for s in ("BL_yE_x", "B_yLE_x"))
        plain = verify(lambda x, y: jnp.einsum("ble,ble->", x, y), x, y, lowerings=["xla"])
        ours = verify(lambda x, y: gspmd.einsum("BL_yE_x, B_yLE_x -> ", x, y), x, y)
    assert ours.ok
    assert not plain.ok  # docs/compiler.md
