"""Topologies: what the TPU compiler describes, meshes over its torus, and what does not exist."""

import os
import subprocess
import sys
from importlib import metadata, util
from itertools import pairwise

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd
from gspmd import PlanError, host
from gspmd.audit import slices, topology
from gspmd.audit.offline.libtpu import require_libtpu
from gspmd.audit.offline.names import POD_CHIPS
from gspmd.hardware.chips import CHIPS, chip_of_device

needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")

SLICES = {
    "tpu-v3:4x4": 32,
    "tpu-v4:4x4x4": 64,
    "tpu-v5e:16x16": 256,
    "tpu-v5p:8x8x16": 1024,
    "tpu-v6e:16x16": 256,
    "tpu7x:4x4x4": 128,
}


def _steps(a: jax.Device, b: jax.Device, shape: tuple[int, ...]) -> int:
    """Hops between two chips, around the torus if that is shorter."""
    apart = [abs(p - q) for p, q in zip(a.coords, b.coords)]
    return sum(min(step, size - step) for step, size in zip(apart, shape))


@needs_libtpu
@pytest.mark.parametrize(("name", "count"), SLICES.items())
def test_every_chip(name, count):
    slice_ = topology(name)
    assert (slice_.name, slice_.num_devices, slice_.chip) == (name, count, CHIPS[name.split(":")[0]])
    assert slice_.shape == tuple(map(int, name.split(":")[1].split("x")))
    assert slice_.cores == (2 if name.startswith(("tpu-v3", "tpu7x")) else 1)
    assert {chip_of_device(device.device_kind) for device in slice_.devices} == {slice_.chip}
    assert list(slice_.devices) == sorted(slice_.devices, key=lambda d: (*d.coords, d.core_on_chip))
    assert np.array([d.coords[: slice_.chip.torus] for d in slice_.devices]).max(axis=0).tolist() == [
        size - 1 for size in slice_.shape
    ]


def test_the_chips_are_those_that_are_no_switch():
    assert set(POD_CHIPS) == {name for name, row in CHIPS.items() if not row.is_switch}


@needs_libtpu
@pytest.mark.parametrize("name", ["tpu-v4:4x4x4", "v4:4x4x4", "TPU-v4:4X4X4", " TPU v4:4x4x4", "tpu_v4:4x4x4"])
def test_spellings(name):
    assert topology(name) is topology("tpu-v4:4x4x4")


@needs_libtpu
@pytest.mark.parametrize("name", ["tpu7x:2x2x1", "7x:2x2x1", "v7x:2x2x1", "TPU7x:2x2x1"])
def test_spellings_of_7x(name):
    assert topology(name).name == "tpu7x:2x2x1"


@needs_libtpu
def test_a_topology_prints_as_what_it_is():
    assert repr(topology("v5e:4x4")) == "Topology(name='tpu-v5e:4x4', shape=(4, 4))"


WHOLE_AXES = [
    ("tpu-v4:4x4x4", {"x": 4, "y": 4, "z": 4}),
    ("tpu-v5p:4x4x8", {"z": 8, "x": 4, "y": 4}),
    ("tpu-v5e:16x16", {"data": 16, "model": 16}),
    ("tpu-v6e:8x16", {"model": 16, "data": 8}),
    ("tpu-v3:4x4", {"x": 4, "y": 4, "core": 2}),
    ("tpu7x:2x2x4", {"core": 2, "z": 4, "xy": 4}),
]


@needs_libtpu
@pytest.mark.parametrize(("name", "axes"), WHOLE_AXES, ids=str)
def test_a_mesh_axis_is_whole_torus_axes(name, axes):
    slice_ = topology(name)
    mesh = slice_.mesh(axes)
    assert (mesh.axis_names, mesh.devices.shape) == (tuple(axes), tuple(axes.values()))
    assert sorted(mesh.devices.flat, key=lambda d: d.id) == sorted(slice_.devices, key=lambda d: d.id)
    used = []
    for axis in range(mesh.devices.ndim):
        line = np.moveaxis(mesh.devices, axis, 0).reshape(mesh.devices.shape[axis], -1)[:, 0]
        where = np.array([(*device.coords, device.core_on_chip) for device in line])
        moves = [i for i in range(4) if where[:, i].max() > where[:, i].min()]
        torus = dict(enumerate((*slice_.shape, 1)[:3])) | {3: slice_.cores}
        assert np.prod([torus[i] for i in moves]) == len(line)
        used += moves
    assert len(used) == len(set(used))


@needs_libtpu
@pytest.mark.parametrize(("name", "axes"), WHOLE_AXES[:5], ids=str)
def test_neighbours_on_a_mesh_axis_are_neighbours_on_the_torus(name, axes):
    slice_ = topology(name)
    devices = slice_.mesh(axes).devices
    for axis, size in enumerate(devices.shape):
        for line in np.moveaxis(devices, axis, 0).reshape(size, -1).T:
            ring = [*line, line[0]] if size > 2 else line
            hops = {_steps(a, b, slice_.shape) for a, b in pairwise(ring)}
            assert hops == ({0} if line[0].coords == line[1].coords else {1})


@needs_libtpu
def test_a_split_torus_axis_keeps_its_minor_part_adjacent():
    slice_ = topology("tpu-v5e:4x4")
    devices = slice_.mesh({"x": 2, "y": 8}).devices
    assert _steps(*devices[0, :2], slice_.shape) == 1
    assert [d.coords[0] for d in devices[:, 0]] == [0, 2]


@needs_libtpu
def test_axis_types():
    slice_ = topology("tpu-v5e:2x2")
    assert slice_.mesh({"x": 4}).axis_types == (AxisType.Explicit,)
    assert slice_.mesh({"x": 2, "y": 2}, "auto").axis_types == (AxisType.Auto,) * 2
    assert slice_.mesh({"x": 2, "y": 2}, AxisType.Auto) == slice_.mesh({"x": 2, "y": 2}, axis_type="auto")
    with pytest.raises(PlanError) as error:
        slice_.mesh({"x": 4}, "manual")
    assert str(error.value) == "no mesh axis has the type 'manual'.\n  Use 'explicit' or 'auto'."


@needs_libtpu
def test_a_program_compiles_for_it():
    mesh = topology("tpu-v5e:2x4").mesh({"x": 2, "y": 4})
    x = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=NamedSharding(mesh, P(None, "y")))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "y"), mesh=mesh, in_specs=P(None, "y"), out_specs=P())
    ledger = gspmd.ledger(jax.jit(total).lower(x).compile(), mesh)
    assert ledger.by_kind_and_axes().keys() == {("all-reduce", ("y",))}
    assert {device.platform for device in jax.devices()} == {"cpu"}


KNOWN = (
    "Known: tpu-v3:4x4, tpu-v4:4x4x4, tpu-v5e:4x4, tpu-v5p:4x4x4, tpu-v6e:4x4, tpu7x:4x4x4, "
    "a100:8, a100-40gb:8, h100:8, h200:8, b200:8, gb200:72, mi300x:8, and other sizes."
)
ERRORS = {
    "tpu-v9:4x4": ("no chip is called 'tpu-v9'", "Did you mean 'tpu-v4'? "),
    "h1000:8": ("no chip is called 'h1000'", "Did you mean 'h100'? "),
    "quadro:8": ("no chip is called 'quadro'", ""),
    "h100": ("it has no shape", "Did you mean 'h100:8'? "),
    "h100:16": ("a node of h100 has 8 GPUs, but 16 uses 16 of one node", "Did you mean 'h100:2x8'? "),
    "h100:8x3": ("a node of h100 has 8 GPUs, but 8x3 uses only 3 of each node", "Did you mean 'h100:3x8'? "),
    "h100:2x2x8": ("GPUs come as nodes x GPUs of a node, and 2x2x8 has 3 dimensions", "Did you mean 'h100:4x8'? "),
    "gb200:100": ("a node of gb200 has 72 GPUs, but 100 uses 100 of one node", "Did you mean 'gb200:2x72'? "),
    ":4x4": ("it names no chip", ""),
    "v4": ("it has no shape", "Did you mean 'tpu-v4:4x4x4'? "),
    "v4:4xx4": ("'4xx4' is not a shape", "Did you mean 'tpu-v4:4x4x4'? "),
    "v4:4x0x4": ("'4x0x4' is not a shape", "Did you mean 'tpu-v4:4x4x4'? "),
    "v4:4x4": ("tpu-v4 is a 3D torus, and 4x4 has 2 dimensions", "Did you mean 'tpu-v4:4x4x4'? "),
    "v5p:64": ("tpu-v5p is a 3D torus, and 64 has 1 dimension", "Did you mean 'tpu-v5p:4x4x4'? "),
    "tpu-v6e:4x4x4": ("tpu-v6e is a 2D torus, and 4x4x4 has 3 dimensions", "Did you mean 'tpu-v6e:4x4'? "),
    "v5e:8x32": ("a tpu-v5e pod is 16x16, and 8x32 is not a part of it", "Did you mean 'tpu-v5e:4x4'? "),
    "v4:16x16x20": ("a tpu-v4 pod has 4096 chips, but 16x16x20 has 5120", "Did you mean 'tpu-v4:4x4x4'? "),
}


@pytest.mark.parametrize(("name", "message"), ERRORS.items())
def test_what_does_not_exist(name, message):
    with pytest.raises(PlanError) as error:
        topology(name)
    fact, hint = message
    assert str(error.value) == f"there is no topology {name!r}: {fact}.\n  {hint}{KNOWN}"


@needs_libtpu
def test_what_libtpu_refuses():
    with pytest.raises(PlanError) as error:
        topology("v4:3x4x4")
    assert str(error.value) == (
        "libtpu refuses the topology 'tpu-v4:3x4x4': "
        'Topology layout "v4:3x4x4" is not divisible by the given (or default) chips_per_host_bounds "2x2x1"'
    )


MESHES = [
    ({"x": 4, "y": 8}, "x=4,y=8 (32 in all)", "x=4,y=16, x=8,y=8 or x=2,y=32"),
    ({"x": 63}, "x=63 (63 in all)", "x=64"),
    ({"x": -8, "y": -8}, "x=-8,y=-8", "x=1,y=64, x=2,y=32 or x=4,y=16"),
    ({"x": 64.0}, "x=64.0", "x=64"),
    ({}, "without axes", "x=64"),
]


@needs_libtpu
@pytest.mark.parametrize(("axes", "asked", "fits"), MESHES, ids=str)
def test_a_mesh_of_another_number_of_devices(axes, asked, fits):
    with pytest.raises(PlanError) as error:
        topology("tpu-v4:4x4x4").mesh(axes)
    assert str(error.value) == (
        f"cannot lay the mesh {asked} over tpu-v4:4x4x4, which has 64 devices.\n"
        f"  The sizes have to multiply to 64, as in {fits}."
    )


def _pretend(monkeypatch, libtpu: str | None, pins: list[str]) -> None:
    def version(package: str) -> str:
        if package == "libtpu" and libtpu is None:
            raise metadata.PackageNotFoundError(package)
        return libtpu if package == "libtpu" else "0.10.2"

    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda package: pins)


PIN = ["numpy>=2.0", 'jaxlib<=0.10.2,>=0.10.2; extra == "tpu"', 'libtpu==0.0.42.*; extra == "tpu"']


def test_without_libtpu(monkeypatch):
    _pretend(monkeypatch, None, PIN)
    with pytest.raises(PlanError) as error:
        topology("v4:4x4x4")
    assert str(error.value) == (
        "cannot describe 'v4:4x4x4': libtpu, the compiler for TPUs, is not installed.\n"
        "  Install it with pip install 'gspmd[tpu]', on Linux x86-64 (jax 0.10.2 needs libtpu==0.0.42.*)."
    )


@pytest.mark.parametrize("found", ["0.0.41", "0.0.420.1", "0.0.43.dev20260101+nightly"])
def test_another_libtpu_than_jax_needs(monkeypatch, found):
    _pretend(monkeypatch, found, PIN)
    with pytest.raises(PlanError) as error:
        topology("v4:4x4x4")
    assert str(error.value) == (
        f"cannot describe 'v4:4x4x4': libtpu {found} is installed, and jax 0.10.2 needs libtpu==0.0.42.*.\n"
        "  Install that one with pip install 'libtpu==0.0.42.*'."
    )


FITTING = [("0.0.42", PIN), ("0.0.42.1", PIN), ("0.0.42", ["libtpu==0.0.42"]), ("9", []), ("9", ["libtpu>=1"])]


@pytest.mark.parametrize(("found", "pins"), FITTING, ids=str)
def test_a_libtpu_that_jax_accepts(monkeypatch, found, pins):
    _pretend(monkeypatch, found, pins)
    require_libtpu("v4:4x4x4", CHIPS["tpu-v4"])


def test_a_library_of_the_users_own_is_left_to_jax(monkeypatch, tmp_path):
    _pretend(monkeypatch, None, PIN)
    library = tmp_path / "libtpu.so"
    library.touch()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    require_libtpu("v4:4x4x4", CHIPS["tpu-v4"])


def test_the_environment_is_the_users_first(monkeypatch):
    monkeypatch.setattr(host, "_numbered", lambda prefix: False)
    for variable in host.WITHOUT_TPU:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TPU_LOG_DIR", "/logs")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "")
    host.quiet_libtpu()
    assert {variable: os.environ[variable] for variable in host.WITHOUT_TPU} == {
        **host.WITHOUT_TPU,
        "TPU_LOG_DIR": "/logs",
    }


@pytest.mark.parametrize("device", ["/dev/accel0", "/dev/vfio/0"])
def test_a_machine_with_tpus_is_left_as_it_is(monkeypatch, device):
    monkeypatch.setattr(host, "_numbered", lambda prefix: prefix == device[:-1])
    for variable in host.WITHOUT_TPU:
        monkeypatch.delenv(variable, raising=False)
    host.quiet_libtpu()
    assert not set(host.WITHOUT_TPU) & set(os.environ)


def _flags(monkeypatch, before, devices=()):
    """Return the flags that libtpu reads after `quiet_libtpu`, by its flags before and the chips of the machine."""
    for variable in host.WITHOUT_TPU:
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", before)
    monkeypatch.setattr(host, "_numbered", lambda prefix: bool(devices))
    host.quiet_libtpu()
    return subprocess.run(["printenv", "LIBTPU_INIT_ARGS"], capture_output=True, text=True).stdout.split()


def test_schedules_are_asked_for_but_in_place_of_a_users_own_dump(monkeypatch):
    asked = _flags(monkeypatch, "--other=1")
    assert asked[0] == "--other=1"
    assert asked[1] == f"--xla_jf_dump_to={host.schedules_folder()}"
    assert os.environ["LIBTPU_INIT_ARGS"] == "--other=1"  # part of the key of every program that JAX keeps
    assert _flags(monkeypatch, " ".join(asked)) == asked
    for own in ("--xla_jf_dump_to=/mine", "--xla_jf_dump_llo_pass_label_regex=mine"):
        assert _flags(monkeypatch, own) == [own]


def test_schedules_of_the_process_that_started_this_one_are_not_asked_for_again(monkeypatch):
    parents = _flags(monkeypatch, "--other=1")
    monkeypatch.setattr(host, "_OWN", "another")
    asked = _flags(monkeypatch, " ".join(parents))
    assert f"--xla_jf_dump_to={host.schedules_folder()}" in asked
    assert len(asked) == len(parents)
    assert _flags(monkeypatch, " ".join(parents), devices=["/dev/accel0"]) == ["--other=1"]


@needs_libtpu
def test_no_backend_starts_and_libtpu_is_quiet():
    code = (
        "import jax; from gspmd import host; from gspmd.audit import topology\n"
        "print(topology('v4:2x2x1').num_devices)\n"
        "host.use_host_devices(3)\n"  # an error, had a backend started
        "print(len(jax.devices('cpu')), topology('v5e:2x2').num_devices)"
    )
    known = {*host.WITHOUT_TPU, "JAX_PLATFORMS"}
    bare = {name: value for name, value in os.environ.items() if name not in known}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare)
    assert out.stdout.split() == ["4", "3", "4"], out.stderr
    assert "TPU" not in out.stderr


@needs_libtpu
def test_importing_gspmd_keeps_a_backend_that_looks_for_tpus_quiet():
    bare = {name: value for name, value in os.environ.items() if name not in {*host.WITHOUT_TPU, "JAX_PLATFORMS"}}
    code = "import jax, gspmd; jax.devices()"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare).stderr.splitlines()
    # Whenever JAX is imported, its plugin for CUDA says that there is no driver.
    assert [line for line in said if "cuda drivers" not in line and "absl::InitializeLog" not in line] == []


@needs_libtpu
@pytest.mark.parametrize("axes", [None, 64, "x=64", [("x", 64)], {0: 64}])
def test_what_is_no_mesh_is_named(axes):
    with pytest.raises(gspmd.PlanError, match="does not say which axis has which size"):
        topology("tpu-v4:4x4x4").mesh(axes)


def test_slices_of_an_unknown_chip_are_refused():
    with pytest.raises(gspmd.PlanError, match="no chip"):
        next(slices("tpu-v9"))


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "axes", "rings"),
    [
        ("tpu-v4:4x4x4", {"x": 4, "y": 4, "z": 4}, {"x": (4,), "y": (4,), "z": (4,)}),
        ("tpu-v4:4x4x4", {"x": 16, "y": 4}, {"x": (4, 4), "y": (4,)}),
        ("tpu-v4:4x4x4", {"x": 8, "y": 8}, {"x": (4, 2), "y": (2, 4)}),
        ("tpu-v5p:8x8x16", {"x": 1024, "y": 1}, {"x": (8, 8, 16), "y": ()}),
        ("tpu7x:4x4x4", {"x": 32, "y": 4}, {"x": (4, 4), "y": (4,)}),  # two devices of one chip are no ring
    ],
)
def test_an_axis_knows_the_rings_it_is_laid_over(name, axes, rings):
    slice_ = topology(name)
    assert slice_.rings(slice_.mesh(axes)) == rings


@needs_libtpu
def test_slices_grow_by_two():
    found = [slice_.shape for slice_, _ in zip(slices(CHIPS["tpu-v4"]), range(6))]
    assert found == [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8)]
    assert [slice_.shape for slice_ in slices(CHIPS["tpu-v5e"])][-1] == (16, 16)
