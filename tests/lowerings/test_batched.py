"""Batched products on CPUs: what an einsum gives, in the order of dimensions that costs no copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.lowerings.local_einsum import batched, einsum_in_tiles, local_einsum

LETTERS = [
    "GXCE,XEF->GXCF",
    "XEF,GXCE->XGFC",
    "GXCE,GXCF->XEF",
    "GXCF,XEF->GXCE",
    "BLKQD,BTKD->BLKQT",
    "EXF,XE->FX",
    "XCE,XE->XC",
]
SIZES = dict(zip("GXCEFBLKQDTH", (2, 3, 4, 5, 6, 2, 3, 2, 4, 5, 6, 2)))


def _operands(letters):
    draw = np.random.default_rng(0)
    left, right = letters.split("->")[0].split(",")
    return [draw.integers(-4, 5, [SIZES[dim] for dim in dims]).astype(np.float32) for dims in (left, right)]


@pytest.mark.parametrize("letters", LETTERS)
def test_it_is_the_einsum(letters):
    operands = _operands(letters)
    np.testing.assert_array_equal(batched(letters)(*operands), np.einsum(letters, *operands))


@pytest.mark.parametrize("letters", ["BE,EF->BF", "XE,XE->XE", "XCE,EF->CF", "XCE,XEF->CF"])
def test_what_is_no_batch_of_products_is_left_alone(letters):
    assert batched(letters) is None


@pytest.mark.parametrize("letters", LETTERS)
def test_a_device_multiplies_what_it_holds_in_this_order(letters, make_mesh):
    operands = _operands(letters)
    with jax.set_mesh(make_mesh({"x": 1})):
        program = jax.make_jaxpr(lambda *arrays: local_einsum(letters, *arrays))(*operands)
    products = [each for each in program.eqns if each.primitive.name == "dot_general"]
    assert [each.params["dimension_numbers"][1] for each in products] == [((0,), (0,))]
    assert all(x.aval.ndim == 3 for each in products for x in each.invars)


def test_parts_of_arrays_are_left_to_the_compiler(make_mesh):
    operands = [jnp.asarray(x) for x in _operands("GXCE,XEF->GXCF")]
    with jax.set_mesh(make_mesh({"x": 2}, "auto")):
        program = jax.make_jaxpr(lambda *arrays: local_einsum("GXCE,XEF->GXCF", *arrays))(*operands)
    assert "reshape" not in str(program)


TILES = [
    ("GXCE,XEF->GXCF", {"C": 8}, True),
    ("GXCF,GXCE->XEF", {"C": 16}, True),
    ("XCE,XEF->XCF", {"C": 3}, True),  # nothing is merged
    ("GXCE,XEF->GXCF", {"C": 4}, False),
    ("GXCE,XEF->GXCF", {"C": 1}, False),
    ("GXCE,XEHD->GXCHD", {"C": 8, "D": 128}, False),  # lanes would be merged
    ("BHLD,BHTD->BHLT", {}, False),
    ("XCE,XE->XC", {"C": 8}, False),
]


@pytest.mark.parametrize(("letters", "sizes", "merged"), TILES, ids=str)
def test_on_a_tpu_only_whole_tiles_are_merged(letters, sizes, merged, make_mesh):
    draw = np.random.default_rng(0)
    dims = letters.split("->")[0].split(",")
    operands = [draw.integers(-4, 5, [sizes.get(d, SIZES[d]) for d in each]).astype(np.float32) for each in dims]
    with jax.set_mesh(make_mesh({"x": 1})):
        program = jax.make_jaxpr(lambda *arrays: einsum_in_tiles(letters, *arrays))(*operands)
        np.testing.assert_array_equal(einsum_in_tiles(letters, *operands), np.einsum(letters, *operands))
    (product,) = (each for each in program.eqns if each.primitive.name == "dot_general")
    assert all(x.aval.ndim == 3 for x in product.invars) is merged
