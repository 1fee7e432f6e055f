"""The table of chips: its figures hang together, and each has a source."""

from dataclasses import fields, replace

import pytest

from gspmd.annotate import PlanError
from gspmd.audit.offline.names import POD_CHIPS, read_name
from gspmd.hardware.chips import CHIPS, Chip, chip, chip_of_device

# 128x128 multiply-adds per matrix unit and cycle (256x256 on v6e and 7x), two FLOPs each; 4096 FLOPs of a GPU's
# multiprocessor
FLOPS_PER_CYCLE = {
    "tpu-v3": 2 * 2 * 128**2,
    "tpu-v4": 8 * 2 * 128**2,
    "tpu-v5e": 4 * 2 * 128**2,
    "tpu-v5p": 8 * 2 * 128**2,
    "tpu-v6e": 4 * 2 * 256**2,
    "tpu7x": 4 * 2 * 256**2,
    "a100": 108 * 2048,
    "a100-40gb": 108 * 2048,
    "h100": 132 * 4096,
    "h200": 132 * 4096,
    "b200": 148 * 8192,
    "gb200": 148 * 8192,
    "mi300x": 304 * 2048,
}


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_every_figure_has_a_source(row):
    figures = {f.name: f.default for f in fields(row) if f.name not in ("name", "source", "device_kinds")}
    given = {name for name, default in figures.items() if getattr(row, name) != default}
    assert given <= set(row.source) <= set(figures)
    assert all(row.source.values())


@pytest.mark.parametrize("row", [row for row in CHIPS.values() if row.is_switch], ids=lambda row: row.name)
def test_a_gpu_has_the_figures_of_its_kernels(row):
    assert 0.5 < row.stream_efficiency < 1
    assert 0.3 < row.attention_efficiency < 1
    assert 0 < row.kernel_seconds < row.launch_seconds < 1e-5
    assert 0.7 < row.link_efficiency < 1
    assert 0.9 < row.network_efficiency < 1
    assert row.tf32_flops == pytest.approx(row.bf16_flops / 2, rel=0.01)
    # In the switch each device sends its bytes once, and receives them once.
    assert row.reduce_bandwidth <= 2 * row.link_efficiency * row.egress_bandwidth


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_rate_is_matrix_units_times_clock(row):
    assert row.bf16_flops == pytest.approx(FLOPS_PER_CYCLE[row.name] * row.clock, rel=0.005)


def test_links_and_wrap_around():
    v4, v5e, h100 = chip("tpu-v4"), chip("tpu-v5e"), chip("h100")
    assert v4.egress_bandwidth == 270e9  # Pope et al. 2022, section 4
    assert (v4.links, v4.torus, v5e.links, v5e.torus) == (6, 3, 4, 2)
    assert (v4.wraps(4), v4.wraps(2), v5e.wraps(16), v5e.wraps(8)) == (True, False, True, False)
    assert h100.is_switch
    assert h100.egress_bandwidth == 450e9


def test_a_chip_that_is_two_devices_counts_as_half_a_chip():
    v3, tpu7x = chip("tpu-v3"), chip("tpu7x")
    assert (2 * v3.bf16_flops, 2 * v3.hbm_bytes, 2 * v3.hbm_bandwidth) == (123e12, 32 * 2**30, 900e9)
    assert (2 * tpu7x.bf16_flops, 2 * tpu7x.hbm_bytes, 2 * tpu7x.hbm_bandwidth) == (2307e12, 192 * 2**30, 7380e9)
    assert 2 * tpu7x.egress_bandwidth == 600e9  # 1200 GBps both ways
    assert 2 * v3.egress_bandwidth == pytest.approx(340e12 / 1024, rel=0.001)
    assert (2 * v3.host_bandwidth, 2 * tpu7x.host_bandwidth) == (15e9, 32e9)
    for name in ("tpu-v3", "tpu7x"):
        halved = ("bf16_flops", "hbm_bytes", "hbm_bandwidth", "link_bandwidth")
        assert all("half of it per device" in chip(name).source[figure] for figure in halved)


@pytest.mark.parametrize("row", CHIPS.values(), ids=lambda row: row.name)
def test_float32_is_six_passes_on_a_tpu(row):
    if not row.is_switch:
        assert row.float32_flops == pytest.approx(row.bf16_flops / 6, rel=0.002)
        assert row.links == 2 * row.torus


def test_rate_depends_on_the_dtype():
    assert chip("h200").flops("bfloat16") == 989.4e12
    assert chip("h200").flops("float32") == 66.9e12


def test_a_chip_by_its_device_and_by_itself():
    assert chip_of_device("TPU v5 lite").name == "tpu-v5e"
    assert (chip_of_device("TPU v3").name, chip_of_device("TPU7x").name) == ("tpu-v3", "tpu7x")
    assert chip_of_device("NVIDIA A100-SXM4-40GB").name == "a100-40gb"
    assert chip_of_device("cpu") is None
    assert chip(chip("tpu-v4")) is CHIPS["tpu-v4"]


def test_an_unknown_chip():
    with pytest.raises(PlanError) as error:
        chip("TPU v4")
    assert str(error.value) == (
        "no chip is called 'TPU v4'.\n"
        "  Did you mean 'tpu-v4'? Known chips: tpu-v3, tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, tpu7x, "
        "a100, a100-40gb, h100, h200, b200, gb200, mi300x."
    )
    for wrong, near in {"B 200": "b200", "H100 SXM": "h100", "gb-200": "gb200", "mi300": "mi300x"}.items():
        with pytest.raises(PlanError, match=f"Did you mean '{near}'"):
            chip(wrong)
    with pytest.raises(PlanError, match=r"no chip is called \['h100'\]"):
        chip(["h100"])


def test_nodes_and_the_network_between_them():
    # jax-ml scaling book, part 12: bytes/s out of one GPU, and out of a node
    book = {"h100": (8, 450e9, 400e9), "b200": (8, 900e9, 400e9), "gb200": (72, 900e9, 3600e9)}
    for row, (devices, egress, out) in ((chip(name), figures) for name, figures in book.items()):
        assert (row.node_devices, row.egress_bandwidth) == (devices, egress)
        assert row.node_devices * row.network_bandwidth == out
    assert chip("a100").egress_bandwidth == 300e9
    assert chip("mi300x").full_mesh
    assert chip("mi300x").links == chip("mi300x").node_devices - 1


def test_a_tpu_pod_is_one_node():
    for name, pod in POD_CHIPS.items():
        halves = 2 if "half of it per device" in CHIPS[name].source["hbm_bytes"] else 1
        assert CHIPS[name].node_devices == halves * pod


def test_measured_permutes():
    # marin-community/marin issue 6736: a + bytes / b
    for name, start, rate in (("tpu-v5p", 4.55e-6, 86.3e9), ("tpu-v6e", 2.29e-6, 86.8e9)):
        row = chip(name)
        assert row.start_seconds + row.hop_seconds == pytest.approx(start)
        assert row.link_bandwidth == rate
        assert all("6736" in row.source[figure] for figure in ("start_seconds", "link_bandwidth"))


def test_a_mesh_says_how_many_nodes_it_fills():
    assert chip("h100").describe({"data": 32, "model": 8}) == "h100 · 32 nodes of 8"
    assert chip("h100").describe({"x": 12}) == "h100 · 2 nodes of up to 8"
    assert chip("gb200").describe({"x": 72}) == "gb200"
    assert chip("tpu-v5e").describe({"slice": 2, "x": 16, "y": 16}) == "tpu-v5e · 2 slices of 256"
    assert chip("tpu-v4").describe({"x": 16, "y": 16, "z": 16}) == "tpu-v4"
    assert chip("h100").describe({}) == "h100"


def test_a_chip_of_ones_own_is_one_node_unless_it_says_otherwise():
    own = Chip("mine", 1e14, 1e13, 10**10, 1e12, 1e10, 4, 0, 1, 1e-6, 1e9)
    assert (own.nodes({"x": 1024}), own.describe({"x": 1024})) == (1, "mine")
    with pytest.raises(PlanError) as error:
        replace(own, node_devices=8)
    assert str(error.value) == (
        "chip 'mine' has nodes of 8 devices, but no network between them.\n"
        "  Give network_bandwidth, bytes/s of one device, or leave node_devices out: then all are one node."
    )


def test_another_generation_is_no_misspelling():
    for look_up, name in ((chip, "v100"), (read_name, "v100:8")):
        with pytest.raises(PlanError) as error:
            look_up(name)
        assert "h100'?" not in str(error.value)
    for wrong, near in (("H100", "h100"), ("h10", "h100"), ("tpu_v4", "tpu-v4")):
        with pytest.raises(PlanError, match=f"Did you mean '{near}'"):
            chip(wrong)
