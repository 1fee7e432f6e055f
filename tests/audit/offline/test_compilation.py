"""Compiling for machines that are not there: what fits, what it holds, and what does not fit."""

import json
import re
from dataclasses import replace
from importlib import util

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd.audit import compile_offline, hlo, topology
from gspmd.audit.arguments import argument_numbers
from gspmd.audit.offline import memory
from gspmd.audit.offline.compilation import _NEEDED, _OFFERED, _amount, _compile, _overfilled, _too_large
from gspmd.audit.offline.names import read_name
from gspmd.audit.offline.topology import Topology
from gspmd.commands import compile as offline
from gspmd.hardware.links import collective_seconds
from gspmd.tracing.program_plan import ProgramPlan
from gspmd.training import ShardingConfig
from gspmd_models.remat.prediction import predicted
from tests.references.models import TINY

pytestmark = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
MESH = {"x": 4, "y": 4, "z": 4}


@pytest.fixture(scope="module")
def slice64():
    return topology("tpu-v4:4x4x4")


@pytest.fixture(scope="module")
def report(slice64):
    return compile_offline(layer, *placed(slice64), topology=slice64)


def layer(x, w):
    return gspmd.einsum("BLE_xyz, E_xF_yz -> BLF_yzx", x, w, lowering="blocking")


def placed(slice64, width=1024):
    with jax.set_mesh(slice64.mesh(MESH)):
        x = gspmd.annotate(jax.ShapeDtypeStruct((512, 1, width), "bfloat16"), "BLE_xyz")
        return x, gspmd.annotate(jax.ShapeDtypeStruct((width, 4 * width), "bfloat16"), "E_xF_yz")


def test_a_program_that_the_compiler_refuses_is_told_with_its_options():
    """libtpu 0.0.50 refuses some that 0.0.42 takes: a compiler that refuses stands for it."""

    class Lowered:
        def compile(self, compiler_options):
            assert compiler_options == {"fused": True, "tuned": 0}
            raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: not on viperfish")

    with pytest.raises(gspmd.PlanError) as error:
        _compile(Lowered(), {"fused": True}, {"fused": False, "tuned": 0})
    assert str(error.value) == (
        "cannot compile the program with fused=True.\n  The compiler says: FAILED_PRECONDITION: not on viperfish"
    )


def test_the_failure_of_a_pass_is_told_with_the_flag_that_leaves_it_out():
    class Lowered:
        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure (while_loop_all_reduce_code_motion.cc:1125)")

    with pytest.raises(
        gspmd.PlanError, match="--xla_disable_hlo_passes=while-loop-all-reduce-code-motion to XLA_FLAGS"
    ):
        _compile(Lowered(), {}, {})


@pytest.mark.slow
@pytest.mark.takes(3)
def test_what_a_step_keeps_on_the_host_is_what_is_predicted():
    """The inputs of all blocks are there, and each crosses the link once in each direction."""
    model = replace(TINY, vocabulary=256, embed=256, layers=4, heads=2, kv_heads=2, head_size=128, feed_forward=256)
    reports, rows = {}, {}
    for offload in (False, True):
        settings = offline.CompileSettings(
            topology="tpu-v5e:2x2", phase="train", batch=8, length=256, dtype="bfloat16",
            model=replace(model, offload=offload), sharding=ShardingConfig(layout="zero-3", lowering="blocking"),
        )  # fmt: skip
        target = topology(settings.topology)
        reports[offload] = offline.compiled(settings, target)
        mesh = offline.mesh_of(settings, target)
        given = settings.model, offline.layout_of(settings), mesh, settings.batch, settings.length, settings.dtype
        rows[offload] = next(row for row in predicted(*given) if row.remat == settings.model.remat)
    inputs = 4 * 2 * 256 * 256 * 2  # layers, rows of a device, tokens, E, bytes
    assert rows[True].host_bytes == rows[False].bytes == inputs
    assert reports[True].host_bytes == inputs
    assert reports[False].host_bytes == 0
    assert json.loads(reports[True].to_json())["host_bytes"] == inputs
    assert re.search(r"^host memory +1\.05 MB per device *$", str(reports[True]), re.MULTILINE)
    moved = [part for part in reports[True].timeline.parts if part.axes == ("host memory",)]
    assert sum(part.count for part in moved) == 2 * 4
    link = reports[True].topology.chip.host_bandwidth
    rounding = 1e-15  # of seconds that are differences of times
    assert sum(part.seconds for part in moved) >= 2 * inputs / link - rounding


def test_what_fits_is_reported_with_its_ledger_and_its_timeline(report):
    assert report.fits
    # [512, 1, 16] of the residual and [256, 256] of the weight, two bytes each
    assert report.argument_bytes == 2 * 512 * 16 + 2 * 256 * 256
    given = [buffer.bytes for buffer in report.buffers if buffer.kind == "argument"]
    assert sum(given) == report.argument_bytes
    # gathered over yz: [512, 1, 256], which is so small that it goes over z and then over y; reduce-scattered over x
    assert report.ledger.by_kind_and_axes() == {
        ("all-gather", ("z",)): (1, 2 * 512 * 64 * 3 // 4),
        ("all-gather", ("y",)): (1, 2 * 512 * 256 * 3 // 4),
        ("reduce-scatter", ("x",)): (1, 2 * 512 * 256 * 3 // 4),
    }
    assert report.ledger.compare(report.plan).agrees
    assert report.flops == 2 * 512 * 256 * 256
    assert report.timeline.step_seconds == report.timeline.compute_seconds + report.timeline.exposed_seconds
    # each over a ring of 4: two links, and 2 hops
    scattered = next(step for step in report.plan.steps if step.kind == "reduce-scatter")
    over_z, over_y = (
        collective_seconds("all-gather", (axis,), {axis: 4}, 2 * 512 * size, report.topology.chip)
        for axis, size in (("z", 64), ("y", 256))
    )
    assert report.timeline.exposed_seconds == pytest.approx(over_z + over_y + scattered.seconds)
    assert hlo.parse(report.hlo).is_scheduled


def test_a_loop_that_asks_the_data_makes_the_work_and_the_seconds_a_lower_bound(report):
    note = "the trips of loop w depend on computed values; it is counted once"
    least = replace(report, ledger=replace(report.ledger, notes=(note,)))
    rows = {line.split()[0]: line for line in str(least).splitlines() if line.startswith(("work", "time "))}
    assert all("at least" in line for line in rows.values())
    assert rows.keys() == {"work", "time"}
    assert "at least" not in str(report)
    assert [json.loads(each.to_json())["is_lower_bound"] for each in (least, report)] == [True, False]


def test_the_report_prints_and_is_json(report):
    printed = str(report)
    for words in ("64 tpu-v4 devices, mesh x=4 y=4 z=4", "fits", "planned and compiled", "timeline of jit_layer"):
        assert words in printed
    figures = json.loads(report.to_json())
    assert figures["fits"] is True
    assert figures["bytes_per_device"] == report.bytes_per_device
    seconds = {f"{name}_seconds" for name in ("step", "compute", "hidden", "exposed")}
    assert {*seconds, "wire_bytes", "flops", "mfu"} <= set(figures)


def test_arguments_that_do_not_fit_are_not_compiled(slice64):
    told = []
    large = compile_offline(layer, *placed(slice64, 2**20), topology=slice64, progress=told.append)
    assert not large.fits
    assert told == ["planning"]
    assert large.argument_bytes > large.hbm_bytes
    assert large.reason.startswith("Its arguments alone take")
    assert large.buffers[0].name == "1"  # the weight, the second argument
    assert large.wire_bytes == large.plan.wire_bytes
    assert "does not fit" in str(large)
    assert json.loads(large.to_json())["step_seconds"] is None
    shown = str(large)
    assert "0 B" not in shown
    assert "per device, as planned" in shown
    assert "compiled in" not in shown


@pytest.mark.parametrize(("name", "fits"), {"tpu-v4:4x4x4": True, "h100:8": False}.items())
def test_the_compiler_for_tpus_says_what_fits_and_the_one_for_gpus_refuses_nothing(name, fits):
    chip, shape, _ = read_name(name)
    target = Topology(name, chip, shape, ())
    assert not _overfilled(chip.hbm_bytes, target)
    assert (not _overfilled(chip.hbm_bytes + 1, target)) == fits


def test_temporaries_that_do_not_fit_are_the_compilers_words(slice64):
    with jax.set_mesh(slice64.mesh(MESH)):
        a = gspmd.annotate(jax.ShapeDtypeStruct((2**18, 2**14), "bfloat16"), "BE_x")
    squared = lambda a: jnp.einsum("be,ce->bc", a, a, out_sharding=jax.P()).sum(1)  # noqa: E731
    large = compile_offline(squared, a, topology=slice64)
    assert not large.fits
    assert "Ran out of memory" in large.reason
    # 2^18 rows of 2^12 are the argument; the product is 2^18 by 2^18, in bfloat16 or wider
    assert large.argument_bytes == 2 * 2**18 * 2**12
    assert large.temporary_bytes >= 2 * 2**36
    assert large.buffers[0].kind == "temporary"
    assert large.buffers[0].array.shape == (2**18, 2**18)
    assert large.buffers[0].name.startswith("offline/test_compilation.py:")
    argument = next(buffer for buffer in large.buffers if buffer.kind == "argument")
    assert argument.remedy == "shard it over yz too: up to 1/16"


def test_what_the_compiler_needs_is_not_counted_twice():
    small = topology("tpu-v5e:2x2")
    with jax.set_mesh(small.mesh({"x": 4})):
        a = gspmd.annotate(jax.ShapeDtypeStruct((4 * 2**15, 2**16), "float32"), "B_xE")
    large = compile_offline(lambda a: a * 2, a, topology=small)
    assert not large.fits
    # 8 GiB go in and 8 GiB come out; nothing else is held
    assert large.bytes_per_device == pytest.approx(2 * 8 * 2**30, rel=1e-3)


def test_the_values_of_a_gradient_through_integers_have_sizes():
    def f(x, n):
        return jax.lax.scan(lambda c, i: (c * i.astype("float32"), c), x, n)[1].sum()

    jaxpr = jax.make_jaxpr(jax.grad(f))(jax.numpy.ones(4), jax.numpy.arange(3)).jaxpr
    assert memory.values(jaxpr, manual=True)[0].array.shape == (3, 4)


def test_a_mesh_of_other_devices_is_refused(slice64):
    x, w = placed(slice64)
    with pytest.raises(gspmd.PlanError) as refused:
        compile_offline(layer, x, w, topology="tpu-v5p:4x4x4")
    assert str(refused.value) == (
        "cannot compile for tpu-v5p:4x4x4: an argument, or mesh=, has a mesh of 64 devices that are not its own.\n"
        "  Make the mesh with topology('tpu-v5p:4x4x4').mesh(...), over all 64."
    )
    with pytest.raises(gspmd.PlanError, match="there are two meshes, x=4,y=4,z=4 and x=64"):
        compile_offline(layer, x, w, topology=slice64, mesh={"x": 64})


def test_what_the_host_holds_takes_no_memory_of_the_device(slice64):
    x, _ = placed(slice64)
    kept = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host"))
    assert [buffer.name for buffer in memory.arguments((x, kept, 3.0), MESH)] == ["0"]


def test_values_that_a_program_keeps_on_the_host_take_no_memory_of_the_device(slice64):
    mesh = slice64.mesh(MESH)

    def kept(x):
        return jax.device_put(x + 1, jax.memory.Space.Host), x * 2

    with jax.set_mesh(mesh):
        x = gspmd.annotate(jax.ShapeDtypeStruct((512, 1, 1024), "bfloat16"), "BLE_xyz")
        program = jax.make_jaxpr(kept)(x).jaxpr
    # The sum is on the device before it is moved; what is moved is not.
    assert [each.array.shape for each in memory.values(program)] == [(512, 1, 16)] * 2


def test_amounts_are_read_from_either_of_the_compilers_sentences():
    early = "total memory required for HLO temporaries (67.71G) exceeds available HBM (30.75G)."
    late = "Ran out of memory in memory space hbm. Used 37.25G of 30.75G hbm. Exceeded hbm capacity by 6.50G."
    assert [_amount(_NEEDED, early), _amount(_OFFERED, early)] == [round(67.71 * 2**30), round(30.75 * 2**30)]
    assert [_amount(_NEEDED, late), _amount(_OFFERED, late)] == [round(37.25 * 2**30), round(30.75 * 2**30)]


def test_donated_arguments_are_not_held_twice(slice64):
    x, _ = placed(slice64)
    kept = compile_offline(lambda x: x + 1, x, topology=slice64)
    given = compile_offline(lambda x: x + 1, x, topology=slice64, donate_argnums=(0,))
    assert kept.output_bytes - given.output_bytes == x.size * 2 // 64


def test_a_position_without_an_argument_is_told_from_what_is_no_position():
    remedy = "\n  Give the numbers of arguments, counted from 0, such as donate_argnums=(0,)."
    for given, count, fact in (
        ((5,), 1, "names an argument that does not exist: the function was given 1 argument."),
        ((0, -3), 2, "names an argument that does not exist: the function was given 2 arguments."),
        (("x",), 1, "is not a sequence of numbers of arguments."),
    ):
        with pytest.raises(gspmd.PlanError) as refused:
            argument_numbers("donate_argnums", given, count)
        assert str(refused.value) == f"donate_argnums={given} {fact}{remedy}"
    assert argument_numbers("donate_argnums", [0, -1], 3) == (0, 2)


def test_the_mesh_is_that_of_the_arguments_or_given(slice64):
    plain = jax.ShapeDtypeStruct((8, 8), "float32")
    with pytest.raises(gspmd.PlanError) as refused:
        compile_offline(lambda x: x + 1, plain, topology=slice64)
    assert str(refused.value) == (
        "cannot compile for tpu-v4:4x4x4: no argument is on a mesh.\n"
        "  Give mesh=, such as mesh={'x': 4, 'y': 4, 'z': 4}, or arguments with shardings."
    )
    assert compile_offline(lambda x: x + 1, plain, topology="tpu-v4:4x4x4", mesh=MESH).mesh == MESH


def test_an_error_of_the_function_is_its_own(slice64):
    x, w = placed(slice64)
    with pytest.raises(gspmd.SpecError):
        compile_offline(lambda x, w: gspmd.einsum("BLE_xyz, EF_x -> BLF_x", x, w), x, w, topology=slice64)


def test_a_buffer_is_as_large_as_its_tiles():
    module = hlo.parse(
        "HloModule m\n\nENTRY %main (p: f32[8,128]) -> f32[3,5] {\n"
        "  %p = f32[8,128]{1,0:T(8,128)} parameter(0)\n"
        "  %v = bf16[512,4608]{1,0:T(8,128)(2,1)S(3)} fusion(%p), kind=kLoop, calls=%f\n"
        "  ROOT %s = f32[3,5]{1,0:T(8,128)} slice(%p), slice={[0:3],[0:5]}\n}\n"
    )
    [only] = memory.temporaries(module)  # what lies in vector memory is none
    assert only.bytes == 4 * 8 * 128


def test_the_compilers_amounts_are_told_in_the_units_of_all_others(slice64):
    late = "Used 37.25G of 30.75G hbm. Exceeded hbm capacity by 6.50G."
    report = _too_large(slice64, MESH, ProgramPlan(()), (), late, 0.0)
    assert report.reason == "Used 40 GB of 33 GB hbm. Exceeded hbm capacity by 6.98 GB."
    assert report.hbm_bytes == round(30.75 * 2**30)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"topology": None}, "topology=None: it is not a topology"),
        ({"topology": ["tpu-v4:4x4x4"]}, "it is not a topology"),
        ({"mesh": "x=64"}, "mesh='x=64': it is not a mesh"),
        ({"mesh": 64}, "mesh=64: it is not a mesh"),
        ({"flops": "many"}, "flops='many' is not a number of FLOPs"),
    ],
)
def test_wrong_types_are_named(given, told):
    with pytest.raises(gspmd.PlanError) as refused:
        compile_offline(lambda x: x, 1.0, **{"topology": "tpu-v4:4x4x4", **given})
    assert told in str(refused.value)


def test_the_report_fits_a_terminal(report, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(report).splitlines())) <= 80
    assert "…" not in str(report)
    assert repr(report).startswith("<Report for tpu-v4:4x4x4: fits, ")
    assert len(repr(report)) < 120


def test_options_of_the_compiler_are_those_of_this_program():
    """A product that may use little of the chip's own memory is cut into small tiles, and takes longer.

    They are checked and taken under the mesh of the arguments as without one.
    """
    chip = topology("tpu-v6e:2x2")
    with jax.set_mesh(chip.mesh({"x": 4})):
        a = gspmd.annotate(jax.ShapeDtypeStruct((2048, 1024), "bfloat16"), "RE")
        b = gspmd.annotate(jax.ShapeDtypeStruct((1024, 1024), "bfloat16"), "EF")
        usual, narrow = (
            compile_offline(jnp.matmul, a, b, topology=chip, compiler_options=options).timeline.step_seconds
            for options in (None, {"xla_tpu_scoped_vmem_limit_kib": 2048})
        )
    assert narrow > 1.5 * usual


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"xla_tpu_scoped_vmem_limit": 65536}, "with xla_tpu_scoped_vmem_limit=65536 on tpu.\n  The compiler says: "),
        ({"xla_tpu_scoped_vmem_limit_kib": "lots"}, "with xla_tpu_scoped_vmem_limit_kib=lots on tpu.\n  The compiler "),
    ],
)
def test_an_option_that_the_compiler_does_not_know_is_named_before_anything_is_planned(slice64, options, words):
    def never(x, w):
        raise AssertionError("it was traced")

    with pytest.raises(gspmd.PlanError, match=re.escape(words)):
        compile_offline(never, *placed(slice64), topology=slice64, compiler_options=options)
