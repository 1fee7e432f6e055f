"""Memory of a device: arguments by their shardings, temporaries by the layouts that the compiler gives them."""

from importlib import util

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from gspmd.audit import hlo, topology
from gspmd.audit.offline import memory

MESH = {"x": 4, "y": 2}


def on(mesh, shape, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))


def test_arguments_on_one_device_largest_first(make_mesh):
    mesh = make_mesh(MESH, "auto")
    state = {
        "weights": [on(mesh, (64, 32), "x", "y"), on(mesh, (64, 32), ("x", "y"), dtype="bfloat16")],
        "bias": on(mesh, (32,)),
        "step": jax.ShapeDtypeStruct((), "int32"),
    }
    found = memory.arguments((state, on(mesh, (16, 64), None, "x")), MESH)
    assert [(buffer.name, buffer.array.shape, buffer.bytes, buffer.remedy) for buffer in found] == [
        ("0.weights.0", (16, 16), 1024, "more chips, or fewer bits"),
        ("1", (16, 16), 1024, "shard it over y too: up to 1/2"),
        ("0.weights.1", (8, 32), 512, "more chips, or fewer bits"),
        ("0.bias", (32,), 128, "shard it over xy too: up to 1/8"),
        ("0.step", (), 4, "shard it over xy too: up to 1/8"),
    ]
    assert {buffer.kind for buffer in found} == {"argument"}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bool", 7), ("int4", 4), ("int8", 7), ("float8_e4m3fn", 7), ("bfloat16", 14), ("complex64", 56)],
)
def test_bytes_of_a_dtype(dtype, size):
    (buffer,) = memory.arguments(jax.ShapeDtypeStruct((7,), dtype), {})
    assert buffer.bytes == size


def test_a_key_is_two_numbers():
    key = jax.random.key(0)
    (buffer,) = memory.arguments(jax.ShapeDtypeStruct((3,), key.dtype), {})
    assert buffer.bytes == 3 * jax.random.key_data(key).nbytes == 24


def program(*lines: str, computations: str = "") -> hlo.Module:
    body = "\n".join(f"  {line}" for line in ("%p = f32[8,128]{1,0:T(8,128)} parameter(0)", *lines))
    return hlo.parse(f"HloModule m\n\n{computations}\nENTRY %main (p: f32[8,128]) -> f32[] {{\n{body}\n}}\n")


def held(module: hlo.Module) -> list[tuple[str, int]]:
    return [(buffer.name, buffer.bytes) for buffer in memory.temporaries(module)]


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("f32[3,5]{1,0:T(8,128)}", 4 * 8 * 128),
        ("f32[5,3]{0,1:T(8,128)}", 4 * 8 * 128),  # rows and columns the other way round
        ("f32[9,129]{1,0:T(8,128)}", 4 * 16 * 256),
        ("f32[129,9]{0,1:T(8,128)}", 4 * 16 * 256),
        ("f32[7,9,129]{2,1,0:T(8,128)}", 7 * 4 * 16 * 256),
        ("bf16[512,1,288]{0,2,1:T(8,128)(2,1)}", 2 * 512 * 288),  # 512 are minor
        ("bf16[512,1,288]{2,1,0:T(2,128)(2,1)}", 2 * 512 * 2 * 384),
        ("f32[5000]{0:T(1024)}", 4 * 5120),
        ("f32[]{:T(128)}", 4 * 128),
        ("s4[3,5]{1,0:T(8,128)(8,1)E(4)}", 8 * 128 // 2),
        ("f32[0,5]{1,0:T(8,128)}", 0),
        ("f32[<=3,5]{1,0:T(8,128)}", 4 * 8 * 128),
        ("f32[3,5]{1,0}", 60),  # no tiles, as on a host
        ("f32[3,5]", 60),
        ("(f32[3,5]{1,0}, bf16[7]{0})", 60 + 14),
    ],
)
def test_tiles_are_padded(written, size):
    module = program(f"%a = {written} custom-call(%p)")
    assert sum(size for _, size in memory.placed(module.entry.by_name["a"])) == size
    assert sum(size for _, size in held(module)) == size


def test_what_lies_on_the_chip_is_no_buffer():
    mixed = "%b = (f32[8]{0:T(128)S(3)}, f32[8]{0}, u32[]{:S(2)}) custom-call(%p)"
    assert held(program("%a = f32[8,128]{1,0:T(8,128)S(1)} copy(%p)", mixed)) == [("b", 32)]
    assert held(program("%a = f32[8]{0:S(0)} copy(%p)")) == [("a", 32)]


def test_what_names_something_is_no_buffer():
    lines = [
        "%b = f32[1024]{0} bitcast(%p)",
        "%t = (f32[1024]{0}, f32[8,128]{1,0}) tuple(%b, %p)",
        "%g = f32[1024]{0} get-tuple-element(%t), index=0",
        "%c = s32[4]{0} constant({1,2,3,4})",
    ]
    assert held(program(*lines)) == []


def test_what_is_started_is_held_once():
    # what starts a copy, a gather or a wrapped computation carries what goes in as well
    lines = [
        "%s = (f32[8,128]{1,0:S(1)}, f32[8,128]{1,0}, u32[]{:S(2)}) copy-start(%p)",
        "%sd = f32[8,128]{1,0:S(1)} copy-done(%s)",
        "%g = (f32[8,128]{1,0}, f32[32,128]{1,0}) all-gather-start(%p), dimensions={0}",
        "%gd = f32[32,128]{1,0} all-gather-done(%g)",
        "%a = ((f32[8,128]{1,0}), f32[2,128]{1,0}, s32[]{:S(2)}) async-start(%p), calls=%cut",
        "%ad = f32[2,128]{1,0} async-done(%a)",
    ]
    cut = "  %q = f32[8,128]{1,0} parameter(0)\n  ROOT %k = f32[2,128]{1,0} slice(%q)\n"
    cut = f"%cut (q: f32[8,128]) -> f32[2,128] {{\n{cut}}}\n"
    assert held(program(*lines, computations=cut)) == [("gd", 4 * 32 * 128), ("ad", 4 * 2 * 128)]


def test_values_in_a_fusion_are_never_whole_and_those_in_a_loop_are():
    computations = """%fused (q: f32[8,128]) -> f32[8,128] {
  %q = f32[8,128]{1,0} parameter(0)
  ROOT %huge = f32[8,128]{1,0} negate(%q)
}
%body (b: f32[8,128]) -> f32[8,128] {
  %b = f32[8,128]{1,0} parameter(0)
  ROOT %inside = f32[8,128]{1,0} fusion(%b), kind=kLoop, calls=%fused
}
%cond (c: f32[8,128]) -> pred[] {
  %c = f32[8,128]{1,0} parameter(0)
  ROOT %never = pred[] constant(false)
}
"""
    line = "%w = f32[8,128]{1,0} while(%p), condition=%cond, body=%body"
    assert held(program(line, computations=computations)) == [("inside", 4096)]


def test_they_print():
    buffers = memory.arguments({"w[red]": jax.ShapeDtypeStruct((8, 4), "float32")}, {})
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(memory.buffers_table(buffers))
    (row,) = [line for line in capture.get().splitlines() if "argument" in line]
    for part in ("128 B", "w[red]", "float32 [8, 4]", "more chips, or fewer bits"):
        assert part in row


@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("shape", [(100, 100), (3, 5), (7,), (), (2, 9, 130), (129, 1)], ids=str)
def test_as_large_as_the_tpu_compiler_says(dtype, shape):
    mesh = topology("tpu-v4:2x2x1").mesh({"x": 4}, "auto")
    compiled = jax.jit(jnp.negative).lower(on(mesh, shape, dtype=dtype)).compile()
    result = hlo.parse(compiled.as_text()).entry.root
    assert sum(size for _, size in memory.placed(result)) == compiled.memory_analysis().output_size_in_bytes
