"""gspmd.show: an array of any rank under any sharding, and every refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd import SpecError
from tests.figures.svg import having, root


def _mesh():
    return jax.make_mesh((2, 2, 2), ("x", "y", "z"))


def _devices(figure) -> dict[int, int]:
    return {
        int(each.get("data-device")): int(having(each, block=None)[0].get("data-block"))
        for each in having(root(figure), device=None)
    }


@pytest.mark.parametrize(
    "partition", [(), ("x",), (None, ("z", "x")), ("x", None, "y", "z"), (None,) * 4 + (("x", "y", "z"),)]
)
def test_an_array_is_shown_as_jax_has_placed_it(partition):
    shape = (8,) * max(1, len(partition))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8])[::-1].reshape(2, 2, 2), ("x", "y", "z"))
    x = jax.device_put(np.zeros(shape, np.float32), jax.NamedSharding(mesh, jax.P(*partition)))
    found = _devices(gspmd.show(x))
    placed = {shard.device.id: shard.index for shard in x.addressable_shards}
    assert found.keys() == placed.keys()
    for one in placed:
        for other in placed:
            assert (found[one] == found[other]) == (placed[one] == placed[other])


def test_dimensions_have_the_letters_that_are_given():
    with jax.set_mesh(_mesh()):
        x = gspmd.annotate(np.zeros((8, 4, 6), np.float32), "B_xLE_y")
        assert str(gspmd.show(x, "BLE")).startswith("B_xLE_y  8 × 4 × 6  on x=2 y=2 z=2: 4 blocks of 4 × 4 × 3\n")
        assert str(gspmd.show(x)).startswith("A_xBC_y  8 × 4 × 6")


def test_a_partial_sum_and_a_traced_array_are_shown():
    with jax.set_mesh(_mesh()):
        x = gspmd.annotate(np.zeros((4, 4), np.float32), "AB_x")
        total = jax.jit(lambda x: gspmd.einsum("AB_x, B_xC -> AC partialsum-x", x, x.T))(x)
        assert "│ 0 1 2 3 + 4 5 6 7 │" in str(gspmd.show(total))
        assert jax.jit(lambda x: str(gspmd.show(x)).startswith("AB_x  4 × 4"))(x)


def test_arrays_on_one_device_and_specs_are_shown():
    assert str(gspmd.show(jax.device_put(jnp.float32(3), jax.devices()[3]))).endswith("│ 3 │\n└───┘")
    figure = gspmd.show("B_xE", {"B": 4, "E": 2}, {"x": 2})
    assert _devices(figure) == {0: 0, 1: 1}
    assert _devices(gspmd.show(gspmd.Spec.parse("B_xE"), (4, 2), _mesh())) == dict(enumerate([0] * 4 + [1] * 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((np.zeros(3),), "cannot show an ndarray: it has no sharding"),
        ((jax.P("x"), (4, 2), {"x": 2}), "it is a PartitionSpec of JAX, which does not name dimensions"),
        (("B_xE",), "cannot show 'B_xE' without sizes and a mesh"),
        (("B_xE", (3, 2), {"x": 2}), "dimension B has size 3, which mesh axis x"),
        (("B_?E", (4, 2), {"x": 2}), "leaves a dimension to the compiler"),
        ((jnp.zeros((2, 2)), "B"), "cannot show an array of 2 dimensions as 'B'"),
        ((jnp.zeros((2, 2)), "BB"), "Write one letter for each: 'AB'"),
        ((jnp.zeros(2), None, {"x": 1}), "on a mesh other than its own"),
    ],
)
def test_what_cannot_be_shown_is_refused(given, message):
    with pytest.raises(SpecError, match=message):
        gspmd.show(*given)
