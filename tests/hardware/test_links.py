"""Costs of collectives: by hand, against the scaling book, and properties that hold on every mesh of every chip."""

from dataclasses import replace
from functools import partial
from importlib import util
from itertools import pairwise, product
from math import inf, prod
from random import Random

import pytest

from gspmd import plan
from gspmd.annotate import PlanError
from gspmd.audit import topology
from gspmd.hardware.chips import CHIPS, Chip, chip
from gspmd.hardware.dtypes import dtype_name
from gspmd.hardware.links import (
    collective_seconds,
    gathers_round_each_axis,
    neighbour,
    network_bytes,
    over_slices,
    rings,
    sharing_node,
    wire_bytes,
)

pytestmark = pytest.mark.usefixtures("every_schedule")

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
SIZES = (1, 2, 2, 3, 4, 4, 8, 8, 9, 16, 32)


def busy(kind: str, axes, mesh, buffer, row: Chip) -> float:
    """Seconds that bytes take, without latency: those of so many more that the way to send them is that of many."""
    many, more = (collective_seconds(kind, axes, mesh, times * buffer, row) for times in (10**6, 2 * 10**6))
    return (more - many) / 10**6


def ideal(name: str) -> Chip:
    """A GPU whose links and network carry what the data sheet says: the scaling book's."""
    return replace(chip(name), link_efficiency=1.0, network_efficiency=1.0, reduce_bandwidth=0.0)


def draws(row: Chip, seed: int = 0, count: int = 200):
    """Random meshes of up to four axes, and two groups of their axes that have none in common."""
    random = Random(f"{row.name} {seed}")
    for _ in range(count):
        names = "wxyz"[: random.randint(1, 4)]
        mesh = {name: random.choice(SIZES) for name in names}
        if random.random() < 0.5:  # more than one node of every chip
            mesh = {"slice": random.choice((2, 3, 4)) * max(1, row.node_devices // prod(mesh.values()))} | mesh
        where = {axis: random.choice("ab-") for axis in mesh}
        first, second = (tuple(axis for axis in mesh if where[axis] == side) for side in "ab")
        yield mesh, first, second


def enumerated(axes, mesh, node) -> int:
    """`sharing_node` one device at a time."""
    there: dict = {}
    for number, place in enumerate(product(*map(range, mesh.values()))):
        group = tuple(at for axis, at in zip(mesh, place) if axis not in axes)
        there[group, number // node] = there.get((group, number // node), 0) + 1
    return min(there.values())


def test_members_that_share_a_node():
    random = Random(0)
    for _ in range(300):
        mesh = {name: random.choice((1, 2, 3, 4, 6, 8)) for name in "wxyz"[: random.randint(1, 4)]}
        axes = tuple(axis for axis in mesh if random.random() < 0.5)
        for node in (1, 3, 4, 8, 12, 72):
            assert sharing_node(axes, tuple(mesh.items()), node) == enumerated(axes, mesh, node)


def test_a_mesh_too_large_to_count_is_taken_for_the_dearest():
    assert sharing_node(("x",), (("x", 3), ("y", 10**7)), 8) == 1
    assert sharing_node(("x",), (("x", 10**9),), 8) == 8


@pytest.mark.parametrize("name", ["h100", "b200", "gb200"])
def test_gathering_a_whole_array_over_many_nodes(name):
    # jax-ml scaling book, part 12, Quiz 4.1: bytes (M - 1) / (M W_node egress), or bytes / W_GPU egress if that is more
    row, nodes = ideal(name), 32
    mesh = {"node": nodes, "gpu": row.node_devices}
    into_a_node = row.node_devices * row.network_bandwidth
    for whole in (10**9, 10**11):
        gather = busy("all-gather", ("node", "gpu"), mesh, whole, row)
        slowest = max((1 - 1 / nodes) / into_a_node, (1 - 1 / prod(mesh.values())) / row.egress_bandwidth)
        assert gather == pytest.approx(whole * slowest, rel=1e-6)
        assert busy("reduce-scatter", ("node", "gpu"), mesh, whole, row) == pytest.approx(gather)
        assert busy("all-reduce", ("node", "gpu"), mesh, whole, row) == pytest.approx(2 * gather)


def test_gathering_over_nodes_what_is_sharded_within_them():
    # the book, Pop Quiz 3: over 32 nodes, with Y = 8 shards in each, 2 D F (32 - 1) / (32 · 400e9), as with Y = 1
    whole, mesh = 2 * 8192 * 32768, {"x": 32, "y": 8}
    assert busy("all-gather", "x", mesh, whole / 8, ideal("h100")) == pytest.approx(whole * 31 / 32 / 400e9, rel=1e-6)


def test_all_to_all_leaves_the_node():
    # the book: B / (8 · 450e9) within a node (less what stays), B / (2 · 400e9) over two; B is on all devices together
    within, over = ({"x": 8}, 8), ({"x": 16}, 16)
    whole = 2**33
    mesh, devices = within
    assert busy("all-to-all", "x", mesh, whole / devices, ideal("h100")) == pytest.approx(whole * 7 / 8 / (8 * 450e9))
    mesh, devices = over
    expected = whole * (2 - 1) / (2**2 * 400e9)
    assert busy("all-to-all", "x", mesh, whole / devices, ideal("h100")) == pytest.approx(expected)


def test_within_a_node_of_an_h100():
    # the book, Pop Quiz 1: 65 µs for bf16[1024, 16384] over 8 GPUs
    assert busy("all-gather", "x", {"x": 8}, 2 * 1024 * 16384, ideal("h100")) == pytest.approx(65e-6, rel=0.005)


def test_256_gpus_are_no_switch():
    mesh, whole = {"x": 256}, 10**9
    one_switch = whole * 255 / 256 / 450e9
    assert busy("all-to-all", "x", mesh, whole, ideal("h100")) > 8 * one_switch
    assert busy("collective-permute", "x", mesh, whole, ideal("h100")) == pytest.approx(whole / 50e9)
    assert busy("collective-permute", "x", {"x": 8}, whole, ideal("h100")) == pytest.approx(whole / 450e9)
    # over the axis that stays in a node nothing changes
    assert collective_seconds("all-reduce", "y", {"x": 32, "y": 8}, whole, chip("h100")) == collective_seconds(
        "all-reduce", "y", {"y": 8}, whole, chip("h100")
    )


def test_the_order_of_the_axes_says_which_stay_in_a_node():
    major, minor = {"model": 8, "data": 8}, {"data": 8, "model": 8}
    spread, within = (busy("all-reduce", ("model",), mesh, 10**8, ideal("h100")) for mesh in (major, minor))
    assert spread == pytest.approx(9 * within)


def test_a_full_mesh_uses_the_links_to_its_members():
    # MI300X: 64 GB/s to each peer; every one of 4 gets a quarter from each of 3 others, over as many links
    for devices in (2, 4, 8):
        gather = busy("all-gather", "x", {"x": devices}, 8 * 10**8, ideal("mi300x"))
        assert gather == pytest.approx(8e8 / devices / 64e9)
    assert busy("collective-permute", "x", {"x": 8}, 10**8, ideal("mi300x")) == pytest.approx(1e8 / 64e9)


# Bus bandwidth, GB/s: of all devices, bytes (K - 1) / K over seconds, twice that in an all-reduce.
MEASURED_BUSES = {
    # NVIDIA/nccl-tests issue 212, NCCL's maintainer: 370 in a node without NVLink SHARP, 480 with it
    "a node, gathered": ("h100", "all-gather", {"x": 8}, 370),
    "a node, summed": ("h100", "all-reduce", {"x": 8}, 480),
    # NVIDIA/nccl-tests issue 309, 8 x 400 Gb/s: 1, 2 and 4 nodes
    "2 nodes, summed": ("h100", "all-reduce", {"x": 16}, 470),
    "4 nodes, summed": ("h100", "all-reduce", {"x": 32}, 366),
    # NVIDIA/nccl issue 1807 (721.8 is what NCCL calls the links' bandwidth) and coreweave/nccl-tests pull request 43
    "8 B200, gathered": ("b200", "all-gather", {"x": 8}, 721.8),
    "8 B200, summed": ("b200", "all-reduce", {"x": 8}, 830),
    "a rack, summed": ("gb200", "all-reduce", {"x": 72}, 835),
}


@pytest.mark.parametrize(("name", "kind", "mesh", "measured"), MEASURED_BUSES.values(), ids=MEASURED_BUSES)
def test_the_bandwidth_of_nccl_as_others_measured_it(name, kind, mesh, measured):
    whole, devices = 8 * 2**30, mesh["x"]
    sent = (2 if kind == "all-reduce" else 1) * whole * (devices - 1) / devices
    assert sent / collective_seconds(kind, "x", mesh, whole, chip(name)) / 1e9 == pytest.approx(measured, rel=0.03)


def test_a_reduction_in_the_switch_needs_more_than_two_devices():
    whole = 2**30
    for devices, times in ((2, 1), (4, 480 / 370.8)):
        scatter, reduce = (busy(kind, "x", {"x": devices}, whole, chip("h100")) for kind in KINDS[1:3])
        assert 2 * scatter / reduce == pytest.approx(times, rel=1e-6)


def test_the_latency_of_a_ring_grows_with_its_devices_and_that_of_a_tree_with_their_logarithm():
    meshes, row = [{"x": 8 * nodes} for nodes in (2, 4, 8, 16, 32)], chip("h100")
    gather, reduce = ([collective_seconds(kind, "x", mesh, 1, row) for mesh in meshes] for kind in KINDS[::2][:2])
    assert gather[-1] > 8 * gather[0]
    assert [more - less for less, more in pairwise(reduce)] == pytest.approx([10e-6] * 4)
    # NVIDIA/nccl issue 1259: a small all-reduce over 2 H100 takes some 6 us
    assert collective_seconds("all-reduce", "x", {"x": 2}, 8, row) == pytest.approx(6e-6, abs=2e-6)


def test_slices_of_a_tpu_are_joined_by_the_data_center_network():
    mesh, row, whole = {"slice": 2, "x": 16, "y": 16}, chip("tpu-v5e"), 10**9
    within = collective_seconds("reduce-scatter", "x", {"x": 16, "y": 16}, whole, row)
    assert collective_seconds("reduce-scatter", "x", mesh, whole, row) == within
    # 6.4 Tbps per pod of 256: every chip gets 1/256 of the other slice's half, and the rest over the interconnect
    outside = whole / 2 / 256 / (6.4e12 / 8 / 256)
    assert busy("all-gather", ("slice",), mesh, whole, row) == pytest.approx(256 * outside)
    # scattered within each slice first, as within one, and over the network then
    inside = busy("reduce-scatter", ("x", "y"), {"x": 16, "y": 16}, whole, row)
    assert busy("reduce-scatter", ("slice", "x", "y"), mesh, whole, row) == pytest.approx(inside + outside)
    assert busy("all-reduce", ("slice", "x", "y"), mesh, whole, row) == pytest.approx(2 * (inside + outside), rel=0.01)
    # all of it over the network, the part for its own slice too
    exchanged = busy("all-to-all", ("slice", "x", "y"), mesh, whole, row)
    assert exchanged == pytest.approx(whole * 511 / 512 / (6.4e12 / 8 / 256))
    assert busy("collective-permute", ("slice",), mesh, whole, row) == pytest.approx(whole / (6.4e12 / 8 / 256))


def test_bytes_over_the_network():
    """A device sends the bytes that its slice does not have, divided among the slice; an exchange sends all of them."""
    row, near = chip("tpu-v5e"), 256
    for slices, kind in product((2, 4, 64), KINDS[:3]):
        group = slices * near
        sent = wire_bytes(kind, group, group << 20)
        within = wire_bytes(kind, near, group << 20)  # a whole slice's gather or scatter, of the same buffer
        assert network_bytes(kind, group, near, sent, row) == sent - within
    assert network_bytes("all-to-all", 512, near, 1000, row) == 1000
    assert network_bytes("all-to-all", 16, 8, wire_bytes("all-to-all", 16, 1600), chip("h100")) == 800
    assert network_bytes("collective-permute", 2, 1, 1000, row) == 1000
    assert network_bytes("all-gather", 8, 8, 1000, chip("h100")) == 0


def test_a_measured_permute():
    # marin-community/marin issue 6736; two neighbours without a ring between them have one link
    for name, start, rate in (("tpu-v5p", 4.55e-6, 86.3e9), ("tpu-v6e", 2.29e-6, 86.8e9)):
        bandwidth, latency = neighbour("x", {"x": 4}, chip(name))
        assert (latency, bandwidth) == (pytest.approx(start), rate)


def test_a_ring_of_permutes_over_nodes_runs_at_the_network_s_rate():
    # hardly anything to multiply, and nothing that the other axis divides: else it takes part in the gather
    sizes = {"B": 8 * 8191, "E": 63, "F": 7}
    over, within = (
        plan("B_xE, EF -> BF", sizes, mesh, chip="h100", via="BE, EF", lowering="looped:one-way").seconds
        for mesh in ({"x": 8, "y": 16}, {"x": 8})
    )
    sent = 7 / 8 * 8 * 8191 * 63 * 2
    slower = sent / (0.94 * 50e9) - sent / (0.824 * 450e9)
    assert over - within == pytest.approx(slower + 7 * chip("h100").network_seconds, rel=0.01)


def test_rings_that_close_are_not_slowed_by_one_that_does_not():
    # v4: 4 links of 45 GB/s along x and y, and one way along z
    mesh = {"x": 4, "y": 4, "z": 2}
    assert busy("all-reduce", "xyz", mesh, 32 * 10**6, chip("tpu-v4")) == pytest.approx(2 * 31e6 / (5 * 45e9))


def test_a_gather_over_a_whole_slice_runs_in_parts():
    """The TPU lowering gathers over one axis first, and then over the others, whose links bring nearly all of it."""
    mesh, whole, v5e = {"x": 16, "y": 16}, 256 * 10**6, chip("tpu-v5e")
    assert busy("all-gather", "xy", mesh, whole, v5e) == pytest.approx((15e6 + 240e6) / (2 * 45e9))
    # No axis of 4 is a ring on a v5e: each has one link each way.
    mesh, whole = {"x": 4, "y": 2, "z": 4}, 32 * 10**6
    assert busy("all-gather", "xyz", mesh | {"w": 2}, whole, v5e) == pytest.approx(31e6 / (2 * 45e9))
    mesh, whole = {"x": 4, "y": 4}, 16 * 10**6
    assert busy("all-gather", "xy", mesh, whole, v5e) == pytest.approx(15e6 / (2 * 45e9))
    assert busy("reduce-scatter", "xy", mesh, whole, v5e) == pytest.approx(3e6 / 45e9 + 12e6 / 45e9)


@pytest.mark.parametrize(
    ("name", "sides", "kind", "bytes", "compiled"),
    [
        ("tpu-v5e", (2, 4), "reduce-scatter", 2**24, 167e-6),
        ("tpu-v6e", (2, 4), "reduce-scatter", 2**27, 682e-6),
        ("tpu-v5e", (4, 4), "reduce-scatter", 2**24, 356e-6),
        ("tpu-v5e", (4, 8), "reduce-scatter", 2**24, 197e-6),
        ("tpu-v5e", (8, 16), "reduce-scatter", 2**27, 1544e-6),
        ("tpu-v5e", (16, 16), "reduce-scatter", 2**27, 1501e-6),
        ("tpu-v5e", (4, 8), "all-gather", 2**24, 197e-6),
        ("tpu-v6e", (4, 8), "all-gather", 2**27, 766e-6),
        ("tpu-v5e", (8, 8), "all-gather", 2**24, 381e-6),
        ("tpu-v5e", (8, 8), "all-gather", 2**27, 1500e-6),
        ("tpu-v5e", (8, 16), "all-gather", 2**27, 1544e-6),
        ("tpu-v5e", (16, 16), "all-gather", 2**27, 1501e-6),
    ],
)
def test_a_collective_over_a_whole_2d_torus_takes_what_is_compiled(name, sides, kind, bytes, compiled):
    """One collective or two, whichever libtpu 0.0.42 keeps and runs faster."""
    mesh = dict(zip("xy", sides))
    assert collective_seconds(kind, "xy", mesh, bytes, chip(name)) == pytest.approx(compiled, rel=0.06)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5p"])
def test_gathers_and_scatters_over_several_axes_of_a_3d_torus_have_the_links_of_one(name, kind):
    """As compiled (benchmarks/moves.py). A reduce-scatter over three is priced as the all-reduce, which is faster."""
    row, mesh, whole = chip(name), {"x": 4, "y": 4, "z": 4, "w": 2}, 64 * 10**6
    assert busy(kind, "xy", mesh, whole, row) == pytest.approx(60e6 / (2 * row.link_bandwidth))
    of_three = {"all-gather": 63e6 / (2 * row.link_bandwidth), "reduce-scatter": 2 * 63e6 / (6 * row.link_bandwidth)}
    assert busy(kind, "xyz", mesh, whole, row) == pytest.approx(of_three[kind])
    # An odd grid without wrap-around links has no cycle through all places: there is one way to go.
    assert busy(kind, "xy", {"x": 3, "y": 3, "z": 2}, 9e6, row) == pytest.approx(8e6 / row.link_bandwidth)


@pytest.mark.parametrize(
    ("name", "axes", "mesh", "compiled"),
    [
        ("tpu-v4", "yz", {"x": 4, "y": 4, "z": 4}, 18.6e-3),
        ("tpu-v4", "xyz", {"x": 4, "y": 4, "z": 4}, 17.6e-3),
        ("tpu-v5p", "yz", {"x": 4, "y": 4, "z": 4}, 9.20e-3),
        ("tpu-v5p", "xyz", {"x": 4, "y": 4, "z": 4}, 8.77e-3),
        ("tpu-v5p", "yz", {"x": 4, "y": 4, "z": 8}, 9.79e-3),
        ("tpu-v5p", "xyz", {"x": 4, "y": 4, "z": 8}, 9.07e-3),
    ],
)
def test_many_bytes_go_round_each_axis_of_a_3d_torus(name, axes, mesh, compiled):
    """As compiled for 18432 x 73728 in bfloat16 (benchmarks/torus_gather.py)."""
    row, whole = chip(name), 18432 * 73728 * 2
    assert collective_seconds("all-gather", axes, mesh, whole, row) == pytest.approx(compiled, rel=0.08)
    # Not where an axis has no wrap-around links, and not where mesh axes and torus axes are certainly not the same.
    for other in (mesh | {axes[0]: 2}, mesh | {"w": 2}):
        assert not gathers_round_each_axis(axes, other, whole, row)
    assert not gathers_round_each_axis("yz", {"y": 16, "z": 4}, whole, row)
    assert not gathers_round_each_axis(axes, mesh, 2**20, row)


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5p"])
def test_what_fills_the_memory_does_not_go_round_each_axis(name):
    """Beside its result such a gather holds blocks as large, and what is gathered may be gathered further."""
    row, mesh = chip(name), {"x": 4, "y": 4, "z": 4}
    most = row.hbm_bytes / 8
    assert gathers_round_each_axis("xyz", mesh, most, row)
    assert not gathers_round_each_axis("xyz", mesh, most * 1.01, row)
    assert gathers_round_each_axis("yz", mesh, most / 4, row, most)
    assert not gathers_round_each_axis("yz", mesh, most / 4, row, most * 1.01)


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_seconds_grow_with_bytes(row):
    for mesh, axes, _ in draws(row):
        for kind in KINDS:
            seconds = [collective_seconds(kind, axes, mesh, buffer, row) for buffer in (0, 1, 10**3, 10**6, 10**9)]
            assert seconds == sorted(seconds)
            trivial = prod(mesh[axis] for axis in axes) == 1
            assert seconds[-1] == 0 if trivial else seconds[0] > 0 and seconds[-1] > seconds[0]


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_slices_and_einsums_send_nothing(row):
    for mesh, axes, _ in draws(row, count=20):
        assert collective_seconds("slice", axes, mesh, 10**9, row) == 0
        assert collective_seconds("einsum", axes, mesh, 10**9, row) == 0


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_an_all_reduce_is_a_scatter_and_a_gather(row):
    for mesh, axes, _ in draws(row):
        for buffer in (0, 10**2, 10**6):
            buffer *= prod(mesh[axis] for axis in axes)
            gather, scatter, reduce = (collective_seconds(kind, axes, mesh, buffer, row) for kind in KINDS[:3])
            assert reduce <= (gather + scatter) * (1 + 1e-12)
            assert row.is_switch or scatter <= reduce  # NCCL has trees for all-reduces only
            wide = [axis for axis in axes if mesh[axis] > 1]
            whole = min(prod(mesh.values()), row.node_devices or inf)  # devices of a slice
            in_parts = not row.is_switch and prod(mesh[axis] for axis in wide) >= whole
            in_parts |= row.torus == 2 and row.nodes(mesh) > 1  # A part of the group may be the whole of a slice.
            if len(wide) == 1 or not (in_parts or row.gathers_on_one_ring):
                assert gather == scatter
                moved, once = busy("reduce-scatter", axes, mesh, buffer, row), row.reduce_bandwidth > 0
                assert (1 if once else 2) * moved * (1 - 1e-6) <= busy("all-reduce", axes, mesh, buffer, row)


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_both_at_once_never_cost_more_than_one_after_the_other(row):
    for mesh, first, second in draws(row, seed=1):
        for whole, kind in product((0, 2**20 * 9**4, 2**30 * 9**4), KINDS):
            several = not row.is_switch and row.nodes(mesh) > 1
            across = over_slices(tuple(mesh.values()), row.nodes(mesh)) if several else None
            apart = across and all(part in (1, size) for part, size in zip(across, mesh.values()))
            full = prod(mesh.values()) % (row.node_devices or 1) == 0
            if several and (kind == "all-to-all" or not apart or not full):
                # An exchange goes over the network as a whole, an axis over slices and within them runs on its own, and
                # there is no rule for slices that are used in part.
                continue
            # A ring of NCCL has more steps than two in turn; over slices an all-reduce is three collectives.
            seconds = busy if row.is_switch or several else collective_seconds
            joint = seconds(kind, first + second, mesh, whole, row)
            for one, other in ((first, second), (second, first)):
                shrunk = prod(mesh[axis] for axis in other) if kind in KINDS[:2] else 1  # the smaller step of the two
                steps = [seconds(kind, one, mesh, whole / shrunk, row), seconds(kind, other, mesh, whole, row)]
                goes_round = kind == "all-gather" and (
                    gathers_round_each_axis(one, mesh, whole / shrunk, row)
                    or gathers_round_each_axis(other, mesh, whole, row)
                )
                if goes_round and not gathers_round_each_axis(first + second, mesh, whole, row):
                    continue  # The axes that have wrap-around links are gathered faster by themselves.
                # A ring through all devices of a slice has more hops than the two along each axis.
                more = row.hop_seconds * prod(mesh[axis] for axis in first + second) if row.keeps_whole_slices else 0
                assert joint <= sum(steps) * (1 + 1e-9) + more / 2, (kind, mesh, one, other)


@pytest.mark.parametrize(
    ("name", "kind", "mesh", "axes", "buffer", "whole"),
    [
        ("tpu-v5p", "all-gather", {"x": 4, "y": 4, "z": 4}, "yz", 3e10, None),
        ("tpu-v5p", "all-gather", {"x": 4, "y": 4, "z": 4}, "yz", 1e9, 3e10),
        ("tpu-v4", "all-gather", {"x": 4, "y": 4, "z": 4}, "xyz", 5e9, None),
        ("tpu-v5e", "reduce-scatter", {"x": 8, "y": 16}, "xy", 5e6, None),
        ("tpu-v6e", "reduce-scatter", {"x": 8, "y": 16}, "xy", 1e7, None),
    ],
)
def test_a_price_in_parts_is_that_of_the_cheapest_number_of_parts(name, kind, mesh, axes, buffer, whole):
    row, seconds = chip(name), partial(collective_seconds, kind, axes, mesh)
    parts = [2**cut * seconds(buffer / 2**cut, row, None if whole is None else whole / 2**cut) for cut in range(20)]
    assert seconds(buffer, replace(row, prices_in_parts=True), whole) == pytest.approx(min(parts))
    assert min(parts) < 0.9 * parts[0]


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_no_parts_of_a_tensor_take_less_than_its_price_in_parts(row):
    """And where `RelaxedTraining` takes plain prices, a part takes at least its share of the seconds of the whole."""
    rng, in_parts = Random(0), replace(row, prices_in_parts=True)
    for mesh, axes, _ in draws(row, count=100):
        for kind in KINDS:
            buffer = 2 ** rng.uniform(10, 36)
            least = collective_seconds(kind, axes, mesh, buffer, in_parts)
            parts = [2**cut * collective_seconds(kind, axes, mesh, buffer / 2**cut, row) for cut in range(14)]
            assert least <= min(parts) * (1 + 1e-9), (kind, mesh, axes, buffer)
            if not (row.gathers_on_one_ring or row.keeps_whole_slices):
                assert parts[0] <= min(parts) * (1 + 1e-9), (kind, mesh, axes, buffer)


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_one_more_node_never_makes_it_cheaper(row):
    inside = {"y": 4, "z": row.node_devices // 4}
    for kind, axes in product(KINDS, (("x",), ("x", "z"), ("x", "y", "z"))):
        seconds = [collective_seconds(kind, axes, {"x": nodes} | inside, 10**9, row) for nodes in (1, 2, 3, 4, 8, 100)]
        assert seconds[1:] == sorted(seconds[1:])
        # The longest rings of a torus exchange more slowly than the network.
        as_slow = kind == "collective-permute" or len(axes) == 3 or (kind == "all-to-all" and not row.is_switch)
        assert seconds[0] <= seconds[1] if as_slow and axes != ("x",) else seconds[0] < seconds[1]


def test_no_dtype():
    with pytest.raises(PlanError, match="no dtype is called 'float77'"):
        dtype_name("float77")
    for short in ("b", "?", "\0"):
        with pytest.raises(PlanError, match=r"no dtype is called"):
            dtype_name(short)


# -- mesh axes over several torus axes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "all-to-all"])
@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5p"])
def test_a_mesh_axis_over_several_torus_axes_has_the_links_of_all_of_them(kind, name):
    """As compiled: the all-reduce of PaLM 62B's residual over z=16 of 2x2x4 chips waits as over three mesh axes."""
    of = replace(chip(name), slice_shape=(2, 2, 4))
    apart = collective_seconds(kind, "xyz", {"x": 2, "y": 2, "z": 4}, 1e7, of)
    assert collective_seconds(kind, "z", {"x": 1, "y": 1, "z": 16}, 1e7, of) == pytest.approx(apart, rel=1e-9)
    assert collective_seconds(kind, "xy", {"x": 4, "y": 4}, 1e7, of) == pytest.approx(apart, rel=1e-9)
    if kind != "all-gather":  # Which goes round one ring of 16 in any case.
        assert collective_seconds(kind, "z", {"x": 1, "y": 1, "z": 16}, 1e7, chip(name)) > 1.5 * apart


def test_the_shape_of_a_slice_changes_nothing_where_mesh_axes_are_torus_axes():
    mesh, v4 = {"x": 4, "y": 4, "z": 8}, chip("tpu-v4")
    of = replace(v4, slice_shape=(4, 4, 8))
    for kind, axes in product(("all-gather", "reduce-scatter", "all-reduce", "all-to-all"), ("x", "yz", "xyz")):
        assert collective_seconds(kind, axes, mesh, 1e7, of) == collective_seconds(kind, axes, mesh, 1e7, v4)
    stage = "all-reduce", "xy", {"x": 4, "y": 8}, 1e7  # A stage of a pipeline has a part of the slice.
    assert collective_seconds(*stage, of) == collective_seconds(*stage, v4)


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize("name", ["tpu-v4:2x2x4", "tpu-v4:4x4x4", "tpu-v5e:4x8", "tpu-v5p:2x4x4"])
def test_rings_are_those_of_the_mesh_that_is_laid_over_the_slice(name):
    target = topology(name)
    of = replace(target.chip, slice_shape=target.shape)
    for sizes in product((1, 2, 4, 8, 16, 32, 64), repeat=3):
        if prod(sizes) == target.num_devices:
            mesh = dict(zip("xyz", sizes))
            laid = target.rings(target.mesh(mesh))
            for axis, size in mesh.items():
                if size > 1:
                    assert rings(axis, mesh, of) == [*laid[axis]], mesh
