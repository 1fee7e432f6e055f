"""Gathers round each axis of a torus: the numbers of one gather on host devices, and on a TPU the planned bytes."""

import re
from importlib import util
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.audit import compile_offline, topology
from gspmd.hardware import links
from gspmd.lowerings import in_force
from gspmd.lowerings.blocking import torus

MESHES = [
    ({"x": 4, "y": 2}, ("x", "y")),
    ({"x": 2, "y": 4}, ("y", "x")),
    ({"x": 2, "y": 3}, ("x", "y")),
    ({"x": 3, "y": 2}, ("x", "y")),
    ({"x": 2, "y": 1, "z": 4}, ("z", "y", "x")),
    ({"x": 2, "y": 2, "z": 2}, ("x", "y", "z")),
    ({"x": 2, "y": 2, "z": 2}, ("z", "x", "y")),
    ({"x": 2, "y": 2, "z": 2}, ("z", "x")),
]
# Local shapes: whole tiles; too few tiles for six parts; a part and a rest; shards that are no tiles; fewer rows than
# parts; one dimension more.
CASES = [((96, 128), 1), ((16, 128), 1), ((100, 128), 1), ((96, 9), 1), ((7, 768), 0), ((3, 5), 1), ((2, 96, 128), 0)]


@pytest.mark.turns(9)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("sizes", "axes"), MESHES, ids=str)
def test_the_numbers_of_one_gather(make_mesh, sizes, axes, dtype):
    parts, arrays, cases = prod(sizes[axis] for axis in axes), [], []
    for shape, dimension in CASES:
        whole = [size * parts if place == dimension else size for place, size in enumerate(shape)]
        arrays.append(jnp.asarray(np.random.default_rng(0).integers(-128, 128, whole), dtype))
        cases.append((dimension, next(place for place in reversed(range(len(shape))) if place != dimension)))

    def program(*pieces):
        return tuple(torus.gather(x, axes, d, along, sizes) for x, (d, along) in zip(pieces, cases))

    before = tuple(
        jax.P(*(axes if place == d else None for place in range(x.ndim))) for x, (d, _) in zip(arrays, cases)
    )
    mapped = jax.shard_map(program, mesh=make_mesh(sizes, "auto"), in_specs=before, out_specs=jax.P(), check_vma=False)
    for case, want, got in zip(CASES, arrays, jax.jit(mapped)(*arrays)):
        np.testing.assert_array_equal(np.asarray(got, "float32"), np.asarray(want, "float32"), err_msg=str(case))


def test_it_sends_what_one_gather_sends(make_mesh):
    mesh = make_mesh({"x": 2, "y": 2, "z": 2}, "auto")
    sizes, axes = dict(mesh.shape), ("x", "y", "z")
    program = jax.shard_map(
        lambda x: torus.gather(x, axes, 1, 0, sizes),
        mesh=mesh,
        in_specs=jax.P(None, axes),
        out_specs=jax.P(),
        check_vma=False,
    )
    ledger = gspmd.ledger(jax.jit(program).lower(jax.ShapeDtypeStruct((96, 1024), "float32")).compile(), mesh)
    assert ledger.wire_bytes == 96 * 1024 * 4 * 7 // 8
    # two parts for each axis, a hop along each, of 1, 2 and 4 shards: a sixth of all bytes for either way round each
    assert {axes: sent for (_, axes), (_, sent) in ledger.by_kind_and_axes().items()} == dict.fromkeys(
        (("x",), ("y",), ("z",)), ledger.wire_bytes // 3
    )


@pytest.fixture
def as_v4(monkeypatch):
    """Lowers as for a TPU v4 whose rings have two devices, and gathers the smallest arrays round each axis."""
    jax.clear_caches()
    monkeypatch.setattr(in_force, "device_kind", lambda: "TPU v4")
    monkeypatch.setattr(links, "ROUND_EACH_AXIS", 0)
    monkeypatch.setattr(links.Chip, "wraps", lambda *_: True)
    yield
    jax.clear_caches()  # nothing that was traced for a TPU is left for other tests


@pytest.mark.usefixtures("as_v4")
@pytest.mark.parametrize("equation", ["BE, EF_yz -> BF", "B_xE, E_yzF -> B_xF", "BE, E_xyzF -> BF"])
def test_products_and_their_gradients(make_mesh, equation):
    rng = np.random.default_rng(0)
    b, w = (rng.integers(-2, 3, shape).astype("float32") for shape in ((8, 64), (64, 1024)))
    specs = equation.partition(" -> ")[0].split(", ")
    via = ", ".join("".join(each for each in spec if each.isupper()) for spec in specs)
    via = via.replace("B,", "B_x,").replace("BE", "B_xE") if "B_x" in equation else via

    def loss(b, w):
        return (gspmd.einsum(equation, b, w, lowering="blocking", via=via) ** 2).sum()

    with jax.set_mesh(make_mesh({"x": 2, "y": 2, "z": 2})):
        given = [gspmd.annotate(jnp.asarray(x), spec) for x, spec in zip((b, w), specs)]
        program = str(jax.make_jaxpr(loss)(*given))
        value, (to_b, to_w) = jax.jit(jax.value_and_grad(loss, (0, 1)))(*given)
    assert "ppermute" in program
    assert "all_gather" not in program
    y = b @ w
    np.testing.assert_array_equal(value, (y**2).sum())
    np.testing.assert_array_equal(to_b, 2 * y @ w.T)
    np.testing.assert_array_equal(to_w, b.T @ (2 * y))


@pytest.mark.usefixtures("as_v4")
def test_a_batch_of_products_gathers_its_shared_weight_once(make_mesh):
    """One gather for a whole batch: a batched wait would send the shared weight once for each."""

    def product(b, w):
        return gspmd.einsum("B_xE, EF_yz -> B_xF", b, w, lowering="blocking", via="B_xE, EF")

    def sent(function, *operands):
        return re.findall(r"f32(\[[\d,]*\])\S* = ppermute", str(jax.make_jaxpr(function)(*operands)))

    with jax.set_mesh(make_mesh({"x": 2, "y": 2, "z": 2})):
        b, w = (
            gspmd.annotate(jax.ShapeDtypeStruct(shape, "float32"), spec)
            for shape, spec in (((8, 64), "B_xE"), ((64, 1024), "EF_yz"))
        )
        placed = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(None, "x"))
        several = jax.ShapeDtypeStruct((5, 8, 64), "float32", sharding=placed)
        plain, batched = sent(product, b, w), sent(jax.vmap(product, (0, None)), several, w)
    assert plain
    assert batched == plain


def test_shards_of_less_than_a_tile_stay_with_the_compiler():
    """Permutes would send the padding, too: 64 of 128 columns, 8 of 16 rows of two-byte numbers."""
    assert torus.cut_along((32768, 64), 2, 1, 2) is None
    assert torus.cut_along((32768, 576), 2, 1, 2) == 0
    assert torus.cut_along((8, 32768), 2, 0, 2) is None
    assert torus.cut_along((8, 32768), 4, 0, 2) == 1


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize(
    ("rows", "shape", "mesh", "kinds"),
    [
        (4096, "4x4x4", {"x": 4, "y": 4, "z": 4}, "collective-permute"),
        (512, "4x4x4", {"x": 4, "y": 4, "z": 4}, "all-gather"),  # few bytes
        (4096, "2x4x8", {"x": 2, "y": 4, "z": 8}, "collective-permute"),  # x is not gathered
        # y has no wrap-around links: x takes its place, gathered with z. One ring takes 1.75 times as long, compiled.
        (4096, "2x4x8", {"x": 4, "y": 2, "z": 8}, "all-gather all-to-all collective-permute"),
        (4096, "4x4x4", {"x": 2, "y": 4, "z": 8}, "all-gather"),  # x and z are no axes of the torus
        (2**18, "4x4x4", {"x": 4, "y": 4, "z": 4}, "all-gather"),  # 8.6 of 34 GB: blocks as large would be held, too
        (4096, "4x4x4", {"y": 16, "z": 4}, "all-gather"),  # nor is y
    ],
    ids=str,
)
def test_many_bytes_go_round_each_axis_of_the_torus(rows, shape, mesh, kinds):
    slices = topology(f"tpu-v4:{shape}")
    with jax.set_mesh(slices.mesh(mesh)):
        x = gspmd.annotate(jax.ShapeDtypeStruct((rows, 16384), "bfloat16"), "EF_yz")
        gather = lambda x: gspmd.reshard(x, "EF_yz -> EF", lowering="blocking")  # noqa: E731
        planned = gspmd.trace(gather, x).by_kind_and_axes()
    assert {each for each, _ in planned} == {*kinds.split()}


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_gathers_of_one_equation_go_one_after_the_other():
    """At once they would share the links, and hold the blocks of all of them."""
    slices = topology("tpu-v4:4x4x4")
    specs = "B_xE", "EF_yz", "EF_yz"
    with jax.set_mesh(slices.mesh(dict(zip("xyz", slices.shape)))):
        b, *weights = (
            gspmd.annotate(jax.ShapeDtypeStruct(shape, "bfloat16"), spec)
            for spec, shape in zip(specs, [(8192, 2048), (2048, 16384), (2048, 16384)])
        )
        report = compile_offline(
            lambda b, *weights: gspmd.einsum(
                "B_xE, (EF_yz, EF_yz) -> (B_xF, B_xF)", b, weights, via="B_xE, (EF, EF)", lowering="blocking"
            ),
            b, *weights, topology=slices,
        )  # fmt: skip
    started = re.findall(r"collective-permute-start\(.*?/step(\d+)\.collective-permute", report.hlo)
    assert len(started) >= 2 * 4 * 6  # of two gathers, four parts that make three hops round either axis
    assert started == sorted(started)


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize(("rows", "kind"), [(2**16, "collective-permute"), (2**18, "all-gather")])
def test_a_part_counts_as_the_whole_tensor(rows, kind):
    """A part of 2.1 GB may be gathered further, to 8.6 of a v4's 34 GB: with its blocks it would leave little room."""
    slices = topology("tpu-v4:4x4x4")
    with jax.set_mesh(slices.mesh({"x": 4, "y": 4, "z": 4})):
        x = gspmd.annotate(jax.ShapeDtypeStruct((rows, 16384), "bfloat16"), "E_xF_yz")
        planned = gspmd.trace(lambda x: gspmd.reshard(x, "E_xF_yz -> E_xF", lowering="blocking"), x)
    assert {each for each, _ in planned.by_kind_and_axes()} == {kind}
