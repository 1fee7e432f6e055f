"""Nodes of GPUs: what JAX's plugin for CUDA describes, meshes over them, and what is missing or refused."""

import os
import subprocess
import sys
from importlib import metadata

import jax
import numpy as np
import pytest

import gspmd
from gspmd import PlanError, host
from gspmd.audit import compile_offline, slices, topology
from gspmd.audit.offline import cuda
from gspmd.audit.offline.cards import CARDS, described
from gspmd.audit.offline.cuda import COMPILER_OPTIONS, require_cuda_plugin
from gspmd.audit.offline.names import read_name, shapes
from gspmd.hardware.chips import CHIPS, chip, chip_of_device
from tests.audit.offline.plugins import needs_cuda_plugin

NODES = {"a100:8": 8, "a100-40gb:2x8": 16, "h100:4": 4, "h100:128x8": 1024, "h200:8": 8, "b200:8": 8, "gb200:2x72": 144}


@needs_cuda_plugin
@pytest.mark.parametrize(("name", "count"), NODES.items())
def test_every_card(name, count):
    nodes = topology(name)
    assert (nodes.name, nodes.num_devices, nodes.chip) == (name, count, CHIPS[name.split(":")[0]])
    assert {chip_of_device(device.device_kind) for device in nodes.devices} == {nodes.chip}
    assert [device.id for device in nodes.devices] == [*range(count)]
    assert nodes.cores == 1


def test_the_cards_are_all_gpus_of_nvidia():
    assert set(CARDS) == {name for name, row in CHIPS.items() if row.device_kinds[0].startswith("NVIDIA")}


@pytest.mark.parametrize("name", CARDS)
def test_a_description_has_the_figures_of_the_chip(name):
    text, row = described(chip(name)), chip(name)
    for figure in (f"device_memory_size: {row.hbm_bytes}", f"memory_bandwidth: {int(row.hbm_bandwidth)}"):
        assert figure in text
    assert f'name: "{row.device_kinds[0]}"' in text
    # Tensor cores of compute capability 8.0, 9.0 and 10.0 do 2048, 4096 and 8192 FLOP a cycle and SM (see chips.toml).
    per_cycle = 1024 * 2 ** (CARDS[name].capability[0] - 7 if CARDS[name].capability[0] < 10 else 3)
    assert CARDS[name].multiprocessors * per_cycle * row.clock == pytest.approx(row.bf16_flops, rel=0.01)


@pytest.mark.parametrize(
    ("name", "canonical"),
    {"h100:1x8": ("h100", (8,)), "H100:2x8": ("h100", (2, 8)), "NVIDIA H200:8": ("h200", (8,)),
     "a100-80gb:8": ("a100", (8,)), "NVIDIA A100-SXM4-40GB:4": ("a100-40gb", (4,)), "mi300x:2x8": ("mi300x", (2, 8)),
     "GB200:72": ("gb200", (72,))}.items(),
)  # fmt: skip
def test_spellings(name, canonical):
    row, shape, _ = read_name(name)
    assert (row.name, shape) == canonical


def test_a_cluster_may_be_larger_than_those_that_are_searched():
    assert read_name("h100:12500x8")[:2] == (CHIPS["h100"], (12_500, 8))


def test_a_cluster_that_no_memory_could_describe():
    with pytest.raises(PlanError) as error:
        topology("h100:99999999x8")
    assert str(error.value).startswith(
        "there is no topology 'h100:99999999x8': gspmd describes at most 262,144 GPUs, but 99999999x8 "
        "has 799,999,992.\n"
        "  Did you mean 'h100:32768x8'? Known: "
    )


@needs_cuda_plugin
def test_one_node_is_one_object():
    assert topology("h100:1x8") is topology("h100:8")


def test_nodes_grow_by_two():
    assert [*shapes(CHIPS["h100"])][:6] == [(1,), (2,), (4,), (8,), (2, 8), (4, 8)]
    assert [*shapes(CHIPS["h100"])][-1] == (2048, 8)
    assert [*shapes(CHIPS["gb200"])][5:10] == [(32,), (64,), (72,), (2, 72), (4, 72)]


@needs_cuda_plugin
def test_slices_of_a_gpu():
    assert [each.num_devices for each, _ in zip(slices("h100"), range(6))] == [1, 2, 4, 8, 16, 32]


@needs_cuda_plugin
def test_devices_fill_a_mesh_node_by_node():
    nodes = topology("h100:4x8")
    mesh = nodes.mesh({"data": 2, "pipe": 2, "model": 8})
    assert np.array([device.id for device in mesh.devices.flat]).tolist() == [*range(32)]
    assert len({device.process_index for device in mesh.devices[0, 1]}) == 1
    assert nodes.rings(mesh) == {}


@needs_cuda_plugin
def test_eight_gpus_are_no_mesh_of_three_nodes():
    with pytest.raises(PlanError) as error:
        topology("h100:3x8").mesh({"x": 8})
    assert str(error.value) == (
        "cannot lay the mesh x=8 (8 in all) over h100:3x8, which has 24 devices, 3 nodes of 8.\n"
        "  The sizes have to multiply to 24, as in x=24."
    )


@needs_cuda_plugin
def test_a_gpu_of_amd_can_only_be_planned_for():
    with pytest.raises(PlanError) as error:
        topology("mi300x:8")
    assert str(error.value) == (
        f"cannot compile for 'mi300x:8': gspmd compiles for GPUs of NVIDIA only, {', '.join(CARDS)}.\n"
        "  gspmd.plan and gspmd search plan for mi300x, too."
    )


PINNED = ['jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda12"', "numpy>=2.0"]


def _pretend(monkeypatch, **installed: str) -> None:
    found = {name.replace("_", "-"): version for name, version in installed.items()} | {"jax": "0.10.2"}

    def version(package: str) -> str:
        if package not in found:
            raise metadata.PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda package: PINNED)


def test_without_the_plugin(monkeypatch):
    _pretend(monkeypatch)
    with pytest.raises(PlanError) as error:
        topology("h100:8")
    assert str(error.value) == (
        "cannot describe 'h100:8': JAX's plugin for CUDA, with the compiler for GPUs, is not installed.\n"
        "  Install it with pip install 'gspmd[gpu-offline]', on Linux (jax 0.10.2 needs jax-cuda12-plugin==0.10.2); "
        "or ask gspmd search --topology h100:8, which needs no compiler."
    )


def test_another_plugin_than_jax_needs(monkeypatch):
    _pretend(monkeypatch, jax_cuda13_plugin="0.12.0")
    with pytest.raises(PlanError) as error:
        topology("h100:8")
    assert str(error.value) == (
        "cannot describe 'h100:8': jax-cuda13-plugin 0.12.0 is installed, and jax 0.10.2 needs 0.10.2.\n"
        "  Install that one with pip install 'jax-cuda13-plugin==0.10.2' 'jax-cuda13-pjrt==0.10.2'."
    )


@pytest.mark.parametrize("plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin"])
def test_a_plugin_that_jax_accepts(monkeypatch, plugin):
    _pretend(monkeypatch, **{plugin: "0.10.2", plugin.replace("plugin", "pjrt"): "0.10.2"})
    require_cuda_plugin("h100:8", CHIPS["h100"])


@pytest.mark.parametrize(
    ("compiler", "fact"),
    [({}, "is not installed"), ({"jax_cuda12_pjrt": "0.10.1"}, "0.10.1 is installed")],
)
def test_a_plugin_without_its_compiler(monkeypatch, compiler, fact):
    _pretend(monkeypatch, jax_cuda12_plugin="0.10.2", **compiler)
    with pytest.raises(PlanError) as error:
        require_cuda_plugin("h100:8", CHIPS["h100"])
    assert str(error.value) == (
        f"cannot describe 'h100:8': jax-cuda12-pjrt {fact}, and jax 0.10.2 needs 0.10.2.\n"
        "  Install that one with pip install 'jax-cuda12-plugin==0.10.2' 'jax-cuda12-pjrt==0.10.2'."
    )


UNKNOWN = NotImplementedError("topology not implemented for cuda")
FAULTS = {
    "started before": (UNKNOWN, False, "JAX was started before gspmd was imported, and did not load its plugin for"),
    "a GPU without CUDA": (UNKNOWN, True, "this machine has a GPU, but JAX did not load its plugin for CUDA: CUDA is"),
    "not implemented": (NotImplementedError("UNIMPLEMENTED: no fabric"), False, "refuses h100: no fabric\n  gspmd is"),
    "refused": (RuntimeError("INVALID_ARGUMENT: no card\nat line 3"), False, "refuses h100: no card\n  gspmd is"),
}


@pytest.mark.parametrize(("error", "has_gpu", "message"), FAULTS.values(), ids=FAULTS)
def test_why_the_plugin_describes_nothing(monkeypatch, error, has_gpu, message):
    def refuse(**_):
        raise error

    monkeypatch.setattr(cuda.topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(cuda, "has_nvidia_gpu", lambda: has_gpu)
    with pytest.raises(PlanError) as told:
        cuda.node_devices(CHIPS["h100"], 8)
    assert message in str(told.value)


def test_the_check_of_cuda_is_skipped_only_without_a_gpu(monkeypatch, tmp_path):
    (tmp_path / "jax_plugins" / "xla_cuda12").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for there, skipped in ((True, None), (False, "1")):
        monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
        monkeypatch.setattr(host, "_numbered", lambda prefix, there=there: there and prefix == "/dev/nvidia")
        host.skip_check_of_cuda()
        assert os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == skipped
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "")
    host.skip_check_of_cuda()
    assert os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == ""


@needs_cuda_plugin
def test_no_backend_starts():
    code = (
        "import jax; from gspmd import host; from gspmd.audit import topology\n"
        "print(topology('h100:2x8').num_devices)\n"
        "host.use_host_devices(3)\n"  # an error, had a backend started
        "print(len(jax.devices('cpu')), topology('a100:8').num_devices)"
    )
    bare = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare)
    assert out.stdout.split() == ["16", "3", "8"], out.stderr
    assert "Traceback" not in out.stderr


@needs_cuda_plugin
def test_a_plugin_that_jax_has_given_up_is_named():
    code = "import jax; jax.devices(); from gspmd.audit import topology; topology('h100:8')"
    unset = ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    bare = {name: value for name, value in os.environ.items() if name not in unset}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare)
    assert "JAX was started before gspmd was imported, and did not load its plugin for CUDA" in out.stderr


# -- compiled ----------------------------------------------------------------------------------------------------------


def product(x, w):
    return gspmd.einsum("BLE_xyz, E_xF_yz -> BLF_yzx", x, w, lowering="blocking")


def placed(nodes, rows=64):
    with jax.set_mesh(nodes.mesh({"x": 2, "y": 2, "z": nodes.num_devices // 4})):
        x = gspmd.annotate(jax.ShapeDtypeStruct((rows, 16, 256), "bfloat16"), "BLE_xyz")
        return x, gspmd.annotate(jax.ShapeDtypeStruct((256, 1024), "bfloat16"), "E_xF_yz")


@needs_cuda_plugin
@pytest.mark.parametrize("name", ["h100:8", "h100:2x8", "a100:8", "b200:8"])
def test_what_is_planned_is_compiled(name):
    nodes = topology(name)
    report = compile_offline(product, *placed(nodes), topology=nodes)
    assert report.fits
    assert report.ledger.compare(report.plan).agrees
    assert report.flops == report.plan.flops == 2 * 64 * 16 * 256 * 1024 // nodes.num_devices
    assert report.argument_bytes == 2 * (64 * 16 * 256 + 256 * 1024) // nodes.num_devices
    assert report.module.is_scheduled


@needs_cuda_plugin
def test_a_program_that_does_not_fit_is_compiled_and_told():
    """The compiler for GPUs refuses nothing; what it needs is its own figure."""
    nodes = topology("a100-40gb:8")
    square = lambda x: x @ x  # noqa: E731
    for size in (70656, 71168):  # two arrays of so many rows and columns take 39.94 and 40.52 GB
        with jax.set_mesh(nodes.mesh({"x": 8})):
            x = gspmd.annotate(jax.ShapeDtypeStruct((size, size), "float32"), "EF")
        report = compile_offline(square, x, topology=nodes)
        needed = report.argument_bytes + report.output_bytes + report.temporary_bytes
        assert report.fits == (needed <= 40e9)
    assert not report.fits
    assert report.argument_bytes == report.output_bytes == 4 * size**2
    assert report.reason == "The compiled program takes 40.5 GB per device, and a device has 40 GB."
    assert "does not fit" in str(report)


@needs_cuda_plugin
def test_the_users_options_come_first():
    nodes = topology("h100:8")
    assert nodes.compiler_options == COMPILER_OPTIONS
    flags = os.environ.get("XLA_FLAGS")
    with pytest.raises(PlanError, match="xla_gpu_no_such_option"):
        compile_offline(product, *placed(nodes), topology=nodes, compiler_options={"xla_gpu_no_such_option": True})
    given = {"xla_gpu_enable_triton_gemm": True}
    assert "__cublas" not in compile_offline(product, *placed(nodes), topology=nodes, compiler_options=given).hlo
    assert "__cublas$lt$matmul" in compile_offline(product, *placed(nodes), topology=nodes).hlo
    assert os.environ.get("XLA_FLAGS") == flags


@needs_cuda_plugin
def test_attention_by_cudnn_is_compiled_without_cudnn():
    """The operations of a causal mask: L (L + 1) / 2 pairs, in two products forward and five backward."""
    nodes = topology("h100:8")
    with jax.set_mesh(nodes.mesh({"x": 8})):
        q, k = (
            gspmd.annotate(jax.ShapeDtypeStruct((8, 4096, heads, 128), "bfloat16"), spec)
            for heads, spec in ((32, "B_xLHD"), (8, "B_xLKD"))
        )

    def summed(q, k, v):
        return gspmd.ops.attention(q, k, v, "B_xLHD", "B_xLKD").astype("float32").sum()

    report = compile_offline(jax.grad(summed), q, k, k, topology=nodes)
    assert report.flops == (2 + 5) * 2 * 32 * 128 * 4096 * 4097 // 2
    assert report.ledger.notes == ()
    assert "__cudnn$fmhaSoftmaxBackward" in report.hlo


@needs_cuda_plugin
def test_the_workspace_of_a_library_is_not_written():
    nodes = topology("h100:1")
    with jax.set_mesh(nodes.mesh({"x": 1})):
        x = gspmd.annotate(jax.ShapeDtypeStruct((256, 256), "bfloat16"), "EF")
    report = compile_offline(lambda x: x @ x, x, topology=nodes)
    assert report.timeline.notes[0].startswith("times are modelled")
    assert "note: times are modelled" in str(report)
    product = next(span for span in report.timeline.spans if span.category == "einsum")
    assert product.bytes == 3 * 2 * 256**2


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize("size", range(69_632, 69_632 + 20 * 128, 128))
def test_what_fits_is_what_the_compiler_says(size):
    """Sizes around the limit of 40 GB, against the figures of a program that JAX compiles by itself."""
    nodes = topology("a100-40gb:1")
    with jax.set_mesh(nodes.mesh({"x": 1})):
        x = gspmd.annotate(jax.ShapeDtypeStruct((size, size), "float32"), "EF")
        report = compile_offline(lambda x: x @ x, x, topology=nodes)
        of_jax = jax.jit(lambda x: x @ x).lower(x).compile(compiler_options=COMPILER_OPTIONS).memory_analysis()
    needed = of_jax.argument_size_in_bytes + of_jax.output_size_in_bytes + of_jax.temp_size_in_bytes
    assert report.bytes_per_device == needed
    assert report.fits == (needed <= 40e9)


@pytest.mark.parametrize(("name", "near"), [("b300", "b200"), ("gb300", "gb200"), ("h20", "h200")])
def test_an_unknown_gpu_is_answered_with_a_gpu(name, near):
    with pytest.raises(gspmd.PlanError, match=f"Did you mean '{near}'"):
        topology(f"{name}:8")


def test_a_number_that_is_too_long_is_no_shape():
    with pytest.raises(gspmd.PlanError, match="is not a shape"):
        topology(f"h100:{'9' * 5000}")
