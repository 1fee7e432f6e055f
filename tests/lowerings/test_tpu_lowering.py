"""Collectives written for the TPU compiler: the same numbers on host devices, and on a TPU what was planned."""

from dataclasses import replace
from importlib import util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gspmd
from gspmd.audit import compile_offline, topology
from gspmd.commands.compile import CompileSettings, compiled
from gspmd.lowerings import in_force
from gspmd.lowerings.blocking import tpu
from gspmd.training import ShardingConfig
from tests.references.models import TINY

MESHES = [
    ({"x": 2}, ("x",)),
    ({"x": 3}, ("x",)),
    ({"x": 4}, ("x",)),
    ({"x": 2, "y": 3}, ("x", "y")),
    ({"x": 4, "y": 2}, ("x", "y")),
    ({"x": 4, "y": 2}, ("y", "x")),
    ({"x": 2, "y": 1, "z": 4}, ("z", "y", "x")),
    ({"x": 2, "y": 2, "z": 2}, ("x", "y", "z")),
    ({"x": 2, "y": 2, "z": 2}, ("z", "x")),
]
SHAPES = [(24, 24, 24), (24, 1, 48), (24, 3072)]
needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
CASES = [(shape, dimension) for shape in SHAPES for dimension in range(len(shape)) if shape[dimension] % 24 == 0]


@pytest.fixture
def whole_rings(monkeypatch):
    """Splits every collective over a whole mesh, as on large slices, by a chip with the torus of v4."""
    monkeypatch.setattr(tpu, "stays_whole", lambda kind, group, *_: group == 1)
    monkeypatch.setattr(in_force, "device_kind", lambda: "TPU v4")


def spec(rank: int, dimension: int, axes: tuple[str, ...]) -> jax.P:
    return jax.P(*(axes if place == dimension else None for place in range(rank)))


def drawn(shape, dtype):
    return jnp.asarray(np.random.default_rng(0).integers(-8, 9, shape), dtype)  # sums are exact


@pytest.mark.turns(4)
@pytest.mark.usefixtures("whole_rings")
@pytest.mark.parametrize(
    ("sizes", "axes", "dtype"),
    [(*case, "bfloat16") for case in MESHES] + [(*case, "float32") for case in MESHES[2::3]],
    ids=str,
)
def test_the_same_numbers(make_mesh, sizes, axes, dtype):
    whole = [drawn(shape, dtype) for shape, _ in CASES]
    placed = [spec(len(shape), dimension, axes) for shape, dimension in CASES]

    def program(whole, pieces):
        gathered = [tpu.all_gather(x, axes, d, sizes) for x, (_, d) in zip(pieces, CASES)]
        # every device adds its own number, so that a summand too many or one of a wrong piece shows
        summands = [x + lax.axis_index(tuple(sizes)).astype(dtype) for x in whole]
        scattered = [tpu.reduce_scatter(x, axes, d, sizes) for x, (_, d) in zip(summands, CASES)]
        plain = [lax.psum_scatter(x, axes, scatter_dimension=d, tiled=True) for x, (_, d) in zip(summands, CASES)]
        return gathered, scattered, plain

    specs = {"in_specs": (jax.P(), placed), "out_specs": (jax.P(), placed, placed)}
    mapped = jax.shard_map(program, mesh=make_mesh(sizes, "auto"), check_vma=False, **specs)
    gathered, scattered, plain = jax.jit(mapped)(whole, whole)
    for case, *arrays in zip(CASES, whole, gathered, scattered, plain):
        x, gather, scatter, want = (np.asarray(each.astype("float32")) for each in arrays)
        np.testing.assert_array_equal(gather, x, err_msg=str(case))
        np.testing.assert_array_equal(scatter, want, err_msg=str(case))


@pytest.mark.parametrize(("sizes", "axes"), [MESHES[1], MESHES[5], MESHES[6]], ids=str)
def test_an_all_to_all_of_rows_is_the_one_of_dimensions(make_mesh, sizes, axes):
    pairs = [(s, c) for s in range(3) for c in range(3) if s != c] + [(0, 3), (3, 0)]  # the last have no whole rows
    arrays = [drawn((24, 48, 24, 24 if 3 in pair else 5), "float32") + pair[0] for pair in pairs]
    pairs += [(3, 0), (3, 1)]  # a device's part of the last dimension is whole lanes
    arrays += [drawn((24, 24, 2, 24 * tpu.LANES), "float32")] * 2
    for pair in ((3, 0), (0, 3), (2, 0), (0, 2)):  # no other dimension has more than one element
        for width in (48, 24 * tpu.LANES):
            pairs.append(pair)
            sizes_of = {pair[0]: 48, pair[1]: 48, 3: width if 3 in pair else 1}
            arrays.append(drawn([sizes_of.get(place, 1) for place in range(4)], "float32"))

    def program(*pieces):
        cases = list(zip(pieces, pairs))
        rows = [tpu.all_to_all(x, axes, split, concat, sizes) for x, (split, concat) in cases]
        return rows, [lax.all_to_all(x, axes, split_axis=s, concat_axis=c, tiled=True) for x, (s, c) in cases]

    before, after = tuple(spec(4, c, axes) for _, c in pairs), [spec(4, s, axes) for s, _ in pairs]
    mapped = jax.shard_map(
        program, mesh=make_mesh(sizes, "auto"), in_specs=before, out_specs=(after, after), check_vma=False
    )
    for pair, x, rows, plain in zip(pairs, arrays, *jax.jit(mapped)(*arrays)):
        np.testing.assert_array_equal(rows, plain, err_msg=str(pair))
        np.testing.assert_array_equal(rows, x, err_msg=str(pair))  # it moves, and changes nothing


@needs_libtpu
@pytest.mark.parametrize(
    ("equation", "shape"),
    [
        ("B_xLE -> BLE_x", (64, 1, 8192)),  # the residual of a decoding step
        ("BLE_x -> B_xLE", (64, 1, 8192)),
        ("BL_xE -> BLE_x", (1, 256, 8192)),  # of a prompt
        ("B_xLE -> BLE_x", (64, 8, 8192)),
    ],
)
def test_an_exchange_costs_little_beside_its_wait(equation, shape):
    """The compiler's own form of the first computes for 151 µs, and waits for 4.5."""
    target = topology("tpu-v5e:2x2")
    before = gspmd.Spec.parse(equation.partition(" -> ")[0]).partition_spec()
    x = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(target.mesh({"x": 4}), before))
    with gspmd.lowering("blocking"):
        line = compile_offline(lambda x: gspmd.reshard(x, equation) + 1, x, topology=target).timeline
    assert line is not None
    assert line.compute_seconds < 2 * line.exposed_seconds


@pytest.mark.parametrize(("sizes", "axes"), [MESHES[1], MESHES[2], MESHES[5], MESHES[6]], ids=str)
def test_slots_travel_as_other_rows_do(make_mesh, sizes, axes):
    """One expert or several on a device, one group or several, one slot or several."""
    parts = np.prod([sizes[axis] for axis in axes])
    shapes = [(g * parts, x * parts, slots, 5) for g in (1, 2) for x in (1, 3) for slots in (1, 4)]
    cases = [(drawn(shape, "float32"), split) for shape in shapes for split in (0, 1)]

    def program(*pieces):
        splits = [split for _, split in cases]
        rows = [tpu.slots_to_all(x, axes, split, sizes) for x, split in zip(pieces, splits)]
        return rows, [tpu.all_to_all(x, axes, split, 1 - split, sizes) for x, split in zip(pieces, splits)]

    before, after = tuple(spec(4, 1 - split, axes) for _, split in cases), [spec(4, split, axes) for _, split in cases]
    mapped = jax.shard_map(
        program, mesh=make_mesh(sizes, "auto"), in_specs=before, out_specs=(after, after), check_vma=False
    )
    for (x, split), slots, rows in zip(cases, *jax.jit(mapped)(*(x for x, _ in cases))):
        np.testing.assert_array_equal(slots, x, err_msg=f"{x.shape} {split}")
        np.testing.assert_array_equal(rows, x, err_msg=f"{x.shape} {split}")


@pytest.mark.parametrize(("equation", "gathered"), [("G_xXCE -> GX_xCE", True), ("B_xLHD -> BL_xHD", False)])
def test_slots_alone_are_put_in_order_by_a_gather(monkeypatch, make_mesh, equation, gathered):
    with jax.set_mesh(make_mesh({"x": 2})):
        x = gspmd.annotate(drawn((4, 4, 2, 8), "float32"), equation.partition(" -> ")[0])
        monkeypatch.setattr(in_force, "device_kind", lambda: "TPU v4")
        jax.clear_caches()
        program = str(jax.make_jaxpr(lambda x: gspmd.reshard(x, equation))(x))
        jax.clear_caches()
    assert "all_to_all" in program
    assert ("gather" in program.replace("all_gather", "")) is gathered


EQUATIONS = [
    ("BE_x, E_xF_yz -> BF_yzx", ((8, 16), (16, 32))),
    ("B_zE_xy, EF -> B_zF_yx", ((8, 16), (16, 32))),
    ("BE_xyz, E_xyzF -> BF_xyz", ((8, 16), (16, 32))),
    ("BE_xyz, EF -> BF", ((8, 16), (16, 32))),
]


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_equations_and_their_gradients(monkeypatch, make_mesh, equation, shapes):
    mesh = make_mesh({"x": 2, "y": 2, "z": 2})
    specs = equation.partition(" -> ")[0].split(", ")

    def both(*arrays):
        y, transpose = jax.vjp(lambda *a: gspmd.einsum(equation, *a), *arrays)
        return y, transpose(y)

    with jax.set_mesh(mesh):
        arrays = [gspmd.annotate(drawn(shape, "float32"), spec) for shape, spec in zip(shapes, specs)]
        want = jax.jit(both)(*arrays)
        jax.clear_caches()
        monkeypatch.setattr(in_force, "is_tpu", lambda: True)
        monkeypatch.setattr(tpu, "LARGEST_WHOLE", {"all-gather": 1, "reduce-scatter": 1})
        got = jax.jit(lambda *a: both(*a))(*arrays)
    jax.clear_caches()  # nothing that was traced for a TPU is left for other tests
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.usefixtures("whole_rings")
def test_in_parts_the_bytes_are_those_of_the_whole(make_mesh):
    mesh = make_mesh({"x": 2, "y": 2, "z": 2}, "auto")
    sizes, axes = dict(mesh.shape), ("x", "y", "z")
    program = jax.shard_map(
        lambda x: tpu.all_gather(tpu.reduce_scatter(x, axes, 0, sizes), axes, 0, sizes),
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    ledger = gspmd.ledger(jax.jit(program).lower(jax.ShapeDtypeStruct((64, 4), "float32")).compile(), mesh)
    assert ledger.by_kind_and_axes() == {
        # 1024 bytes: half of them over the minor ring, of 512, and 3/4 over the other two
        ("all-gather", ("x", "y")): (1, 768),
        ("all-gather", ("z",)): (1, 128),
        ("reduce-scatter", ("x", "y")): (1, 768),
        ("reduce-scatter", ("z",)): (1, 128),
    }
    assert ledger.wire_bytes == 2 * 1024 * 7 // 8


def test_a_host_is_no_target(make_mesh):
    with jax.set_mesh(make_mesh({"x": 4})):
        assert not in_force.is_tpu()
    assert not in_force.is_tpu()


@pytest.fixture
def torus():
    if util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed")
    return topology("tpu-v4:4x4x4").mesh({"x": 4, "y": 4, "z": 4})


def agreed(mesh, function, *arrays) -> dict:
    """Return what a program sends on a TPU, which is what was planned."""
    with jax.set_mesh(mesh):
        assert in_force.is_tpu()
        abstract = [gspmd.annotate(jax.ShapeDtypeStruct(shape, "bfloat16"), spec) for spec, shape in arrays]
        compared = gspmd.ledger(jax.jit(function).lower(*abstract).compile()).compare(gspmd.trace(function, *abstract))
    assert compared.agrees, compared
    return {key: compiled for key, (_, compiled) in compared.totals.items()}


def test_a_decoding_step_reduces_and_scatters(torus):
    # bf16 [512, 1, 4608] over x: 512 * 4608 * 2 bytes * 3 / 4
    sent = agreed(
        torus,
        lambda x, w: gspmd.einsum("BLE_x, E_xF_yz -> BLF_yzx", x, w, lowering="blocking"),
        ("BLE_x", (512, 1, 18432)),
        ("E_xF_yz", (18432, 73728)),
    )
    assert sent == {("reduce-scatter", ("x",)): 512 * 4608 * 2 * 3 // 4}


SPLIT_QUERIES = """
[mesh]
axes = ["x", "y"]

[lowering]
default = "blocking"

[embedding]
table = "VE_x"
tokens = "B_yxL"

[attention]
residual = "B_yxLE"
norm = "E"
w_q = "E_xH_yD"
w_k = "E_xK_yD"
w_v = "E_xK_yD"
query = "B_xLH_yD"
key = "B_xLK_yD"
w_o = "H_yDE_x"
in_via = "BLE_x, E_xH_yD"
key_via = "BLE_x, E_xK_yD"
out_via = "BLH_yD, H_yDE_x"

[ffn]
residual = "B_yxLE"
norm = "E"
w_in = "EF_xy"
w_gate = "EF_xy"
hidden = "BLF_xy"
w_out = "F_xyE"

[output]
norm = "E"
table = "V_xyE"
logits = "BLV_xy"

[cache]
"attention.key" = "B_xTK_yD"
"""


@needs_libtpu
def test_a_decoding_step_scatters_its_queries_by_rows(tmp_path):
    """In a loop over layers a product has its heads in front of its rows; the compiler made this an all-reduce."""
    path = tmp_path / "queries.toml"
    path.write_text(SPLIT_QUERIES)
    model = replace(
        TINY, layers=2, embed=1024, heads=64, kv_heads=8, head_size=128, feed_forward=2048, vocabulary=1024, tied=False
    )
    settings = CompileSettings(
        topology="tpu-v5e:4x4", phase="decode", batch=64, length=128, dtype="bfloat16", model=model,
        sharding=ShardingConfig(layout=str(path), mesh="x=4,y=4"),
    )  # fmt: skip
    report = compiled(settings, topology("tpu-v5e:4x4"))
    assert report.ledger.wire_bytes == pytest.approx(report.plan.wire_bytes, rel=1e-3)


def test_a_gather_over_all_three_rings_sends_what_is_planned(torus):
    sent = agreed(torus, lambda x: gspmd.reshard(x, "BLE_xyz -> BLE"), ("BLE_xyz", (512, 1, 18432)))
    assert sent == {("all-gather", ("x", "y", "z")): 512 * 18432 * 2 * 63 // 64}


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    ("shape", "dimension", "axes"),
    [
        ((512, 1, 4608), 2, "x"),
        ((512, 1, 4608), 2, "yz"),
        ((512, 1, 4608), 0, "x"),  # rows of a matrix: sequences, in a decoding step
        ((512, 1, 4608), 0, "xy"),
        ((64, 1, 512), 0, "xy"),  # four rows each, less than a tile
        ((64, 4096), 0, "xy"),
        ((1024, 4096), 0, "x"),
        ((512, 4, 4608), 0, "x"),
        ((512, 4, 4608), 2, "x"),
        ((64, 4, 1024), 2, "xy"),
        ((4, 1024, 2048), 2, "yz"),  # pieces of 128, one row of lanes
        ((4, 1024, 4096), 2, "yz"),  # of 256, two rows
        ((16, 256, 640), 2, "yz"),  # of 40, no whole number of tiles
        ((2048, 8, 64), 2, "yz"),  # of 4
        ((8192, 2048), 0, "y"),
        ((64, 64, 2048), 0, "y"),
        ((64, 512, 2048), 1, "y"),
    ],
    ids=str,
)
def test_a_reduce_scatter_stays_one_or_one_an_axis(torus, shape, dimension, axes):
    sizes = dict(torus.shape)

    def program(x, w):
        y = jnp.einsum("...d,de->...e", x, w)
        return jnp.tanh(tpu.reduce_scatter(y, tuple(axes), dimension, sizes))

    mesh = jax.sharding.Mesh(torus.devices, torus.axis_names)  # Auto axes, for a program of its own
    placed = [
        jax.ShapeDtypeStruct(each, "bfloat16", sharding=jax.NamedSharding(mesh, jax.P()))
        for each in ((*shape[:-1], 128), (128, shape[-1]))
    ]
    out = spec(len(shape), dimension, tuple(axes))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(program, in_specs=(jax.P(), jax.P()), out_specs=out, check_vma=False)
        ledger = gspmd.ledger(jax.jit(mapped).lower(*placed).compile())
    group = 4 ** len(axes)
    whole = 2 * int(np.prod(shape))
    parts = [tuple(axes)] if whole >= tpu.SMALL else [(axis,) for axis in axes]  # axis by axis if small
    assert {key: count for key, (count, _) in ledger.by_kind_and_axes().items()} == {
        ("reduce-scatter", part): 1 for part in parts
    }
    assert ledger.wire_bytes == whole * (group - 1) // group


@pytest.mark.usefixtures("torus")
@pytest.mark.parametrize("lowering", ["auto", "looped"])
def test_a_layer_with_weights_of_one_byte_copies_no_weights_of_other_layers(lowering):
    """A ring cuts them at a place known at run time, for which the compiler puts them into another order."""
    slices, (layers, rows, embed, hidden) = topology("tpu-v4:2x2x1"), (4, 16, 4096, 4096)

    def stack(x, w):
        def layer(x, w):
            y = gspmd.einsum("BE_xy, E_xF_y -> BF_yx", x, w["in"])
            return gspmd.einsum("BF_yx, F_yE_x -> BE_xy", y, w["out"]), None

        return jax.lax.scan(layer, x, w)[0]

    with jax.set_mesh(slices.mesh({"x": 2, "y": 2})), gspmd.lowering(lowering):
        x = gspmd.annotate(jax.ShapeDtypeStruct((rows, embed), "bfloat16"), "BE_xy")
        w_in = gspmd.annotate(jax.ShapeDtypeStruct((layers, embed, hidden), "int8"), "NE_xF_y")
        w_out = gspmd.annotate(jax.ShapeDtypeStruct((layers, hidden, embed), "int8"), "NF_yE_x")
        report = compile_offline(stack, x, {"in": w_in, "out": w_out}, topology=slices)
    assert report.timeline.warnings == ()
