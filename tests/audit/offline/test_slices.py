"""Several TPU slices: their names and meshes, and programs compiled for them, which send and take what was planned."""

from importlib import util
from importlib.metadata import version
from math import prod
from statistics import median
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import gspmd
from gspmd.audit import compile_offline, topology
from gspmd.audit import slices as slices_of_chip
from gspmd.audit.hlo import parse
from gspmd.audit.hlo.slices import of_all_slices
from gspmd.audit.offline.names import read_name
from gspmd.hardware.chips import slice_of
from gspmd.hardware.links import over_slices

needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
SIZES = {"B": 512, "E": 2048, "F": 4096, "X": 16}


def compiled(name: str, axes: dict[str, int], equation: str):
    """Return the report of one equation under lowering `blocking`."""
    slices = topology(name)
    mesh = slices.mesh(axes)
    specs = [gspmd.Spec.parse(operand) for operand in equation.split(" -> ")[0].split(", ")]
    given = [
        jax.ShapeDtypeStruct(
            tuple(SIZES[dim] for dim in spec.dims),
            "bfloat16",
            sharding=jax.NamedSharding(mesh, spec.partition_spec()),
        )
        for spec in specs
    ]
    with gspmd.lowering("blocking"):
        return compile_offline(lambda *given: gspmd.einsum(equation, *given), *given, topology=slices)


# -- names and meshes --------------------------------------------------------------------------------------------------


def test_a_name_says_how_many_slices():
    four = read_name("TPU v5p:4x8x8*4")
    assert (four.name, four.slices, four.shape) == ("tpu-v5p:4x8x8*4", 4, (4, 8, 8))
    assert four.chip.node_devices == 256
    assert read_name("tpu7x:2x2x1*2").chip.node_devices == 8  # two devices of each chip
    assert read_name("v5e:4x4*1") == read_name("v5e:4x4")
    assert read_name("v5e: 2x2 * 2 ").name == "tpu-v5e:2x2*2"


@pytest.mark.parametrize(
    ("name", "fact", "remedy"),
    [
        ("v5e:4x4*", "it has no number of slices after '*'", "'tpu-v5e:4x4*2'"),
        ("v5e:4x4*0", "'0' is not a number of slices", "'tpu-v5e:4x4*2'"),
        ("v5e:4x4*2x2", "'2x2' is not a number of slices", "'tpu-v5e:4x4*2'"),
        ("v5e:4x4*-2", "'-2' is not a number of slices", "'tpu-v5e:4x4*2'"),
        ("v5e*2", "it names no chip|no chip is called", ""),
        ("h100:2x8*4", "only TPUs come in slices", "'h100:8x8'"),
        ("h100:4*2", "only TPUs come in slices", "'h100:8'"),
        ("tpu-v5p:4x4x4*9999", "at most 262,144 devices, but this has 639,936", r"'tpu-v5p:4x4x4\*4096'"),
    ],
)
def test_names_of_slices_that_do_not_exist(name, fact, remedy):
    with pytest.raises(gspmd.PlanError, match=fact) as raised:
        read_name(name)
    assert remedy.replace("\\", "") in str(raised.value)


def test_a_mesh_without_axes_is_on_one_slice():
    assert over_slices((), 1) == ()
    assert over_slices((), 2) is None


def test_devices_of_gpus_are_of_no_slice():
    """JAX numbers their hosts as slices."""
    assert slice_of(SimpleNamespace(platform="gpu", slice_index=3)) == 0
    assert slice_of(SimpleNamespace(platform="tpu", slice_index=3)) == 3
    assert slice_of(jax.devices()[0]) == 0


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 6, 8])
def test_the_parts_of_axes_over_slices_are_those_of_counting(slices):
    """A device's slice is its place over the devices of a slice; each axis either divides the slices or not."""
    for sizes in np.ndindex(4, 4, 4):
        sizes = tuple(int(size) + 1 for size in sizes)
        parts = over_slices(sizes, slices)
        devices = int(np.prod(sizes))
        if parts is None:
            continue
        assert devices % slices == 0
        owner = np.arange(devices).reshape(sizes) // (devices // slices)
        for axis, part in enumerate(parts):
            along = np.moveaxis(owner, axis, 0).reshape(sizes[axis], -1)
            assert max(len({*column}) for column in along.T) == part


@needs_libtpu
def test_a_mesh_is_filled_slice_by_slice():
    slices = topology("v5p:2x2x2*4")
    assert (slices.num_devices, slices.slices, slices.cores) == (32, 4, 1)
    assert slices.chip.describe({"x": 4, "y": 8}) == "tpu-v5p · 4 slices of 8"
    for axes in ({"x": 4, "y": 4, "z": 2}, {"x": 2, "y": 4, "z": 4}, {"x": 32}, {"x": 8, "y": 4}):
        owners = [device.slice_index for device in slices.mesh(axes).devices.flat]
        assert owners == sorted(owners)
    assert slices.rings(slices.mesh({"x": 4, "y": 4, "z": 2})) == {"x": (), "y": (2, 2), "z": (2,)}
    assert slices.rings(slices.mesh({"x": 8, "y": 4})) == {"x": (2,), "y": (2, 2)}


@needs_libtpu
def test_larger_slices_end_where_devices_are_too_many():
    found = [each.name for each in slices_of_chip("tpu-v5p", 64)]
    assert found[0] == "tpu-v5p:2x2x1*64"
    assert max(topology(name).num_devices for name in found[:2]) == 512
    assert prod(int(size) for size in found[-1].removeprefix("tpu-v5p:").partition("*")[0].split("x")) == 4096


@needs_libtpu
def test_a_mesh_that_does_not_divide_the_slices():
    with pytest.raises(gspmd.PlanError, match="x=4 does not divide its 3 slices") as raised:
        topology("v5e:4x4*3").mesh({"x": 4, "y": 12})
    assert "as in x=3,y=16" in str(raised.value)
    with pytest.raises(gspmd.PlanError, match="multiply to 48"):
        topology("v5e:4x4*3").mesh({"x": 4, "y": 4})


# -- programs ----------------------------------------------------------------------------------------------------------

MOVES = {
    "gathered over the network": ("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "E_sF -> EF"),
    "slices major": ("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "E_sxyF -> EF"),
    "slices minor": ("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "EF_xys -> EF"),
    "slices between": ("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "EF_xsy -> EF"),
    "an axis over slices and within": ("v5e:4x4*2", {"x": 8, "y": 4}, "E_yxF -> EF"),
    "one axis over all": ("v5e:4x4*2", {"x": 32}, "E_xF -> EF"),
    "scattered": ("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "BE_sx, E_sxF -> B_sxF"),
    "scattered, slices minor": ("v5p:2x2x2*2", {"s": 2, "x": 2, "y": 4}, "BE_xs, E_xsF -> BF_xs"),
    "reduced": ("v5p:2x2x2*4", {"s": 4, "x": 2, "y": 4}, "B_yE_sx, E_sxF -> B_yF"),
    "exchanged": ("v4:2x2x2*2", {"s": 2, "x": 2, "y": 4}, "E_sF_y -> E_yF_s"),
    "permuted": ("v6e:2x2*2", {"s": 2, "x": 2, "y": 2}, "E_sF_x -> E_xF_s"),
    "permuted, slices major to minor": ("v5e:2x2*2", {"s": 2, "x": 4}, "E_sxF -> E_xsF"),
    "within a slice": ("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "B_sE_x, E_xF_y -> B_sF_xy"),
    "on SparseCores": ("tpu7x:2x2x1*2", {"s": 2, "x": 4, "y": 2}, "E_xsF -> EF"),
}


@needs_libtpu
@pytest.mark.parametrize("case", MOVES)
def test_slices_send_and_take_what_was_planned(case):
    name, axes, equation = MOVES[case]
    report = compiled(name, axes, equation)
    found = report.ledger.compare(report.plan)
    assert found.agrees, found
    assert report.ledger.wire_bytes == report.plan.wire_bytes
    assert {row.verdict for row in found.rows} <= {"as planned"}
    away = report.plan.network_bytes(axes, report.topology.chip)
    assert report.ledger.network_bytes == report.network_bytes == away
    assert (away > 0) == (case != "within a slice")
    planned = sum(entry.step.seconds for entry in report.plan.entries if entry.step.is_collective)
    if case == "on SparseCores" and not version("libtpu").startswith("0.0.42"):
        # The compiler of JAX 0.12 waits for less than both parts one after the other.
        assert 0 < report.timeline.exposed_seconds < planned
    else:
        assert report.timeline.exposed_seconds == pytest.approx(planned, rel=0.05)


@needs_libtpu
@pytest.mark.parametrize("axes", [{"x": 8}, {"s": 2, "x": 4}], ids=str)
def test_rings_over_slices_send_what_was_planned(axes):
    """A hop of a ring crosses slices at its ends, and stays within one elsewhere."""
    slices, last = topology("v5e:2x2*2"), next(iter(axes))
    mesh = slices.mesh(axes)
    a, b = (
        jax.ShapeDtypeStruct((1024, 1024), "bfloat16", sharding=jax.NamedSharding(mesh, spec))
        for spec in (jax.P(None, last), jax.P(last, None))
    )
    equation = f"EF_{last}, F_{last}G -> E_{last}G"
    with gspmd.lowering("looped"):
        report = compile_offline(lambda a, b: gspmd.einsum(equation, a, b), a, b, topology=slices)
    assert report.ledger.compare(report.plan).agrees
    assert report.ledger.wire_bytes == report.plan.wire_bytes > 0


@needs_libtpu
def test_the_network_carries_each_byte_once():
    """Gathering 16.8 MB over two slices of 16: each device gets a sixteenth of the other slice's half."""
    report = compiled("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "E_sxyF -> EF")
    whole = 2 * SIZES["E"] * SIZES["F"]
    assert report.ledger.network_bytes == whole // 2 // 16
    assert report.ledger.wire_bytes == whole * 31 // 32


@needs_libtpu
def test_the_report_counts_the_network_apart():
    report = compiled("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "E_sF -> EF")
    assert "32 tpu-v5e devices in 2 slices" in str(report)
    assert "524 kB of it over the network between slices" in str(report)
    assert "tpu-v5e · 2 slices of 16" in str(report)
    assert (
        f'"network_bytes": {report.network_bytes},\n  "planned_network_bytes": {report.network_bytes}'
        in report.to_json()
    )


@needs_libtpu
def test_one_program_for_one_slice_and_for_two():
    """JAX keeps traces by a mesh's shape and kind of device, which do not say how many slices there are."""

    def gather(x):
        return gspmd.reshard(x, "E_xyF -> EF")

    away = []
    for name in ("v5e:4x8", "v5e:4x4*2"):
        slices = topology(name)
        mesh = slices.mesh({"x": 2, "y": 16})
        x = jax.ShapeDtypeStruct((2048, 4096), "bfloat16", sharding=jax.NamedSharding(mesh, jax.P(("x", "y"))))
        with gspmd.lowering("blocking"):
            report = compile_offline(gather, x, topology=slices)
        assert report.ledger.compare(report.plan).agrees
        away.append(report.network_bytes)
    assert away == [0, 2 * 2048 * 4096 // 2 // 16]


@needs_libtpu
def test_gspmd_ledger_reads_a_program_of_several_slices():
    slices = topology("v5e:2x2*2")
    mesh = slices.mesh({"s": 2, "x": 4})
    x = jax.ShapeDtypeStruct((1024, 1024), "bfloat16", sharding=jax.NamedSharding(mesh, jax.P(("s", "x"))))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda x: jax.reshard(x, jax.P(None, None))).lower(x).compile()
    found = gspmd.ledger(program)
    assert found.slices == 2
    assert found.wire_bytes == 2 * 1024 * 1024 * 7 // 8
    assert 0 < found.network_bytes < found.wire_bytes
    assert gspmd.ledger(program, mesh).entries == found.entries
    with pytest.raises(gspmd.PlanError, match="4 devices run it, and the mesh s=2,x=4 has 8"):
        gspmd.ledger(program.as_text(), {"s": 2, "x": 4})


@needs_libtpu
def test_a_mesh_that_is_not_filled_slice_by_slice_is_refused():
    slices = topology("v5e:2x2*2")
    made = slices.mesh({"s": 2, "x": 4})
    mixed = jax.sharding.Mesh(made.devices.T, ("x", "s"), axis_types=made.axis_types)
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.NamedSharding(mixed, jax.P("x")))
    with jax.set_mesh(mixed), pytest.raises(gspmd.PlanError, match="do not fill it one after the other"):
        gspmd.trace(lambda x: gspmd.reshard(x, "E_xF -> EF"), x)
    module = parse("HloModule m, is_scheduled=true, num_partitions=4\n\nENTRY %e (p: f32[4]) -> f32[4] {\n"
                   "  ROOT %p = f32[4]{0} parameter(0)\n}\n")  # fmt: skip
    with pytest.raises(gspmd.PlanError, match="do not fill it one after the other"):
        of_all_slices(module, mixed)
    assert of_all_slices(module, topology("v5e:2x2").mesh({"x": 4})) is module


@needs_libtpu
def test_a_program_lowered_without_compile_offline_is_planned_for_its_slices():
    """The mesh of `jax.set_mesh` says how many there are, also where jit traces."""
    slices = topology("v5e:4x4*2")
    mesh = slices.mesh({"s": 2, "x": 4, "y": 4})
    x = jax.ShapeDtypeStruct((2048, 4096), "bfloat16", sharding=jax.NamedSharding(mesh, jax.P(("s", "x", "y"))))

    def gather(x):
        return gspmd.reshard(x, "E_sxyF -> EF", lowering="blocking")

    with jax.set_mesh(mesh):
        planned = gspmd.trace(gather, x)
        found = gspmd.ledger(jax.jit(gather).lower(x).compile())
    assert found.compare(planned).agrees
    assert found.network_bytes == planned.network_bytes(dict(mesh.shape), slices.chip) > 0
    assert planned.seconds == pytest.approx(
        compiled("v5e:4x4*2", {"s": 2, "x": 4, "y": 4}, "E_sxyF -> EF").plan.seconds
    )


@needs_libtpu
def test_a_transfer_of_a_kind_that_is_not_known():
    text = RECEIVED_FIRST.replace('"ALL_REDUCE"', '"SOME_REDUCE"')
    with pytest.raises(gspmd.PlanError, match="the transfer SOME_REDUCE of send is not known"):
        gspmd.ledger(text, topology("v5e:2x2*2").mesh({"s": 2, "x": 4}))
    with pytest.raises(gspmd.PlanError, match="the mesh has no device 300000"):
        gspmd.ledger(RECEIVED_FIRST.replace("{1,2}x", "{1,3}x"), topology("v5e:2x2*2").mesh({"s": 2, "x": 4}))


RECEIVED_FIRST = """HloModule m, is_scheduled=true, num_partitions=4

ENTRY %e (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %t = token[] after-all()
  %recv = (f32[1024]{0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="a_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send = (f32[1024]{0}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="a_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sd = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %n = f32[1024]{0} sort(%p), dimensions={0}, backend_config={"window_config":{"estimated_cycles":"1500000"}}
  %rd = (f32[1024]{0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %r = f32[1024]{0} get-tuple-element(%rd), index=0
  ROOT %s = f32[1024]{0} add(%r, %n)
}
"""  # noqa: E501


@needs_libtpu
@pytest.mark.parametrize("first", ["recv", "send", "send, and the recv goes through a tuple"])
def test_a_transfer_lasts_from_its_send_until_what_arrives_is_waited_for(first):
    """Either may come first in the schedule; waiting for the end of the send waits for nothing."""
    from gspmd.audit.simulation.simulator import timeline

    lines = RECEIVED_FIRST.splitlines()
    if first != "recv":
        lines[5], lines[6] = lines[6], lines[5]
    if "tuple" in first:  # as a loop passes it on to its next iteration
        kind = "(f32[1024]{0}, u32[], token[])"
        done = next(number for number, line in enumerate(lines) if "recv-done" in line)
        lines[done] = lines[done].replace("recv-done(%recv)", "recv-done(%g)")
        carried = [f"  %tp = ({kind}) tuple(%recv)", f"  %g = {kind} get-tuple-element(%tp), index=0"]
        lines[done:done] = carried
    slices = topology("v5e:2x2*2")
    mesh = slices.mesh({"s": 2, "x": 4})
    module = of_all_slices(parse("\n".join(lines)), mesh)
    assert module.devices == 8
    found = timeline(module, slices.chip, dict(mesh.shape))
    # 1 ms of computing hides what takes 0.1 ms and a little more.
    assert found.compute_seconds > 1e-3
    assert found.exposed_seconds == 0
    assert 1e-4 < found.hidden_seconds < 2e-4
    short = of_all_slices(parse("\n".join(lines).replace("1500000", "15000")), mesh)  # 10 us
    assert timeline(short, slices.chip, dict(mesh.shape)).exposed_seconds == pytest.approx(found.hidden_seconds - 1e-5)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("seed", range(3))
def test_random_moves_over_slices_wait_as_long_as_planned(seed):
    from moves import moves

    found = list(moves(8, ("tpu-v5e:4x4*2", "tpu-v5p:2x2x4*4", "tpu-v4:4x4x4*2", "tpu-v6e:4x4*4"), seed))
    assert [each for each in found if not 0.6 < each.ratio < 1.05] == []  # Few bytes have more hops on one ring.
    assert median(abs(each.ratio - 1) for each in found) < 0.02
