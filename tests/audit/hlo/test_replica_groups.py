"""Groups of devices in every form that XLA prints, and the mesh axes that they are."""

import json
from importlib import util

import jax
import numpy as np
import pytest
from jax import lax

from gspmd.annotate.errors import PlanError
from gspmd.audit import hlo
from gspmd.audit.hlo.replica_groups import UNNAMED, axes_of, groups, pairs

MESH = {"x": 4, "y": 2}  # device 2x + y


def collective(attributes: str, opcode: str = "all-reduce") -> hlo.Instruction:
    line = f"%a = f32[8]{{0}} {opcode}(%p), channel_id=1, {attributes}, use_global_device_ids=true, to_apply=%add"
    return hlo.parse(f"HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n").entry.root


X = ((0, 2, 4, 6), (1, 3, 5, 7))
Y = ((0, 1), (2, 3), (4, 5), (6, 7))
ALL = (tuple(range(8)),)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", Y),
        ("{{0, 1}, {2, 3}, {4, 5}, {6, 7}}", Y),
        ("{}", ALL),
        ("{{}}", ALL),
        ("[4,2]<=[8]", Y),
        ("[2,4]<=[4,2]T(1,0)", X),
        ("[1,8]<=[8]", ALL),
        # 0..7 as [x1, x2, y]; the groups have x1 and y: first for x2 = 0
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['x'=4,'y'=2] {'y'}", Y),
        ("mesh['x'=4,'y'=2] {'x'}", X),
        ("mesh['x'=4,'y'=2] {'x','y'}", ALL),
        ("mesh['data parallel'=4,'y_1'=2] {'data parallel'}", X),
        ("mesh['x'=1,'y'=8] {'x','y'}", ALL),
        ("mesh['x'=4,'y'=2] {}", tuple((n,) for n in range(8))),
        # half of x: the major one pairs x with x + 2, the minor one with x + 1
        ("mesh['x'=4,'y'=2] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=4,'y'=2] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'x'=2,'y'=2] {'a','y'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        # other numbers: the mesh's devices are 0 2 4 6 1 3 5 7, row by row of four times two
        ("mesh['x'=4,'y'=2], device_ids=([4,2]T(1,0)) {'y'}", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("mesh['x'=4,'y'=2], device_ids=(7,6,5,4,3,2,1,0) {'y'}", ((7, 6), (5, 4), (3, 2), (1, 0))),
        ("mesh['x'=4,'y'=2], device_ids=([8]) {'x':(2)2,'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_every_form(written, found):
    assert groups(collective(f"replica_groups={written}"), 8) == found


def test_without_groups_all_take_part():
    assert groups(collective("constrain_layout=true"), 8) == ALL


@pytest.mark.parametrize(
    ("written", "axes"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("x",)),
        ("{{6,4,2,0},{1,3,5,7}}", ("x",)),  # in whatever order
        ("[4,2]<=[8]", ("y",)),
        ("{}", ("x", "y")),
        ("mesh['a'=8] {'a'}", ("x", "y")),  # the compiler's names are not ours
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("{{0,2},{1,3},{4,6},{5,7}}", UNNAMED),  # half of x
        ("mesh['x'=4,'y'=2] {'x':(1)2}", UNNAMED),
        ("{{0,3},{1,2},{4,7},{5,6}}", UNNAMED),  # a diagonal
        ("{{0,1},{2,3}}", UNNAMED),  # not all devices
        ("{{0,1,2},{3},{4,5,6},{7}}", UNNAMED),
        ("{{0,8}}", UNNAMED),  # a device that the mesh does not have
    ],
)
def test_axes(written, axes):
    assert axes_of(collective(f"replica_groups={written}"), MESH) == axes


def test_axes_of_one_device_are_none():
    mesh = {"a": 1, "x": 4, "b": 1, "y": 2}
    assert axes_of(collective("replica_groups={{0,2,4,6},{1,3,5,7}}"), mesh) == ("x",)
    assert axes_of(collective("replica_groups={}"), mesh) == ("x", "y")
    assert axes_of(collective("replica_groups={{0}}"), {"a": 1}) == ()
    assert axes_of(collective("replica_groups={}"), {}) == ()


def test_three_axes_in_the_order_of_the_mesh():
    mesh = {"z": 2, "y": 2, "x": 2}
    for names in (("z",), ("y",), ("x",), ("z", "y"), ("z", "x"), ("y", "x"), ("z", "y", "x")):
        order = [n for n, name in enumerate(mesh) if name not in names] + [list(mesh).index(name) for name in names]
        rows = np.arange(8).reshape(2, 2, 2).transpose(order).reshape(-1, 2 ** len(names)).tolist()
        written = json.dumps(rows).replace("[", "{").replace("]", "}")
        assert axes_of(collective(f"replica_groups={written}"), mesh) == names


@pytest.mark.parametrize(
    ("written", "axes"),
    [
        ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", ("x",)),
        ("{{0, 1}, {1, 0}}", ("y",)),  # only some take part
        ("{{0,0},{1,3},{3,1},{2,2}}", ("x",)),  # some keep what they have
        ("{{0,3},{3,0}}", ("x", "y")),
        ("{{0,1},{1,0},{2,4},{4,2}}", ("x", "y")),  # along one here, along the other there
        ("{{0,0},{1,1}}", ()),
        ("{}", ()),
        ("{{0,9}}", UNNAMED),
    ],
)
def test_axes_of_a_permute(written, axes):
    assert axes_of(collective(f"source_target_pairs={written}", "collective-permute"), MESH) == axes


def test_pairs():
    assert pairs(collective("source_target_pairs={{0,10},{10,0}}", "collective-permute")) == ((0, 10), (10, 0))
    assert pairs(collective("replica_groups={{0,1},{2,3}}")) == ()


def _everything(v):
    ring = [(n, (n + 1) % 4) for n in range(4)]
    a = lax.psum(v, "x") + lax.psum(v, ("x", "y")) + lax.ppermute(v, "x", ring)
    b = lax.all_gather(v, "y", tiled=True).sum() + lax.all_to_all(v, ("y", "x"), 0, 0, tiled=True)
    return a + b + lax.psum_scatter(lax.all_gather(v, "x", tiled=True), "x", tiled=True)


EVERYTHING = {
    ("all-reduce", ("x",)),
    ("all-reduce", ("x", "y")),
    ("collective-permute", ("x",)),
    ("all-gather", ("y",)),
    ("all-gather", ("x",)),
    ("all-to-all", ("x", "y")),
    ("reduce-scatter", ("x",)),
}


def _found(compiled) -> set:
    module = hlo.parse(compiled.as_text())
    kinds = {kind for kind, _ in EVERYTHING}
    return {(i.opcode, axes_of(i, MESH)) for i in module.entry.instructions if i.opcode in kinds}


def test_as_this_jax_prints_them(make_mesh):
    # jax 0.10 writes the groups out, 0.12 writes the mesh
    mesh = make_mesh(MESH, "auto")
    spread = jax.P(("x", "y"))
    program = jax.jit(jax.shard_map(_everything, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False))
    v = jax.ShapeDtypeStruct((64,), "float32", sharding=jax.NamedSharding(mesh, spread))
    assert _found(program.lower(v).compile()) == EVERYTHING


def test_a_mesh_in_another_order_of_devices_counts_by_its_places():
    devices = np.array(jax.devices())[[3, 1, 4, 0, 5, 2, 6, 7]].reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("x", "y"))
    spread = jax.P(("x", "y"))
    program = jax.jit(jax.shard_map(_everything, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False))
    v = jax.ShapeDtypeStruct((64,), "float32", sharding=jax.NamedSharding(mesh, spread))
    assert _found(program.lower(v).compile()) == EVERYTHING


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_a_torus_counts_by_the_places_in_the_mesh():
    from gspmd.audit import topology

    mesh = topology("tpu-v5e:2x4").mesh({"y": 2, "x": 4}, "auto")  # axes against the order of the torus
    mesh = jax.sharding.Mesh(mesh.devices.T, ("x", "y"))
    spread = jax.P(("x", "y"))
    program = jax.jit(jax.shard_map(_everything, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False))
    v = jax.ShapeDtypeStruct((1024,), "float32", sharding=jax.NamedSharding(mesh, spread))
    names = {kind for kind, _ in EVERYTHING} | {"collective-permute-start"}
    module = hlo.parse(program.lower(v).compile().as_text())
    sent = [i for i in module.entry.instructions if i.opcode in names]
    found = {(i.opcode.removesuffix("-start"), axes_of(i, MESH)) for i in sent}
    assert UNNAMED not in {axes for _, axes in found}
    assert {("collective-permute", ("x",)), ("all-gather", ("y",))} <= found


def test_groups_in_a_notation_that_is_not_known_are_refused():
    with pytest.raises(PlanError, match=r"cannot read the replica groups '\[4,2\]<=mesh'"):
        groups(collective("replica_groups=[4,2]<=mesh"), 8)
