"""Operations of matrix products: two per multiplication, however the compiler writes them."""

import random
from importlib import util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gspmd
from gspmd.audit import hlo, topology
from gspmd.audit.hlo.flops import product_flops, uncounted

needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")


def flops(*lines: str, computations: str = "") -> int:
    """Return the FLOPs of the last instruction."""
    return product_flops(*_last(lines, computations))


def told(*lines: str, computations: str = "") -> list[tuple[str, str]]:
    """Return what is said not to be counted of the last instruction."""
    return list(uncounted(*_last(lines, computations)))


def _last(lines: tuple[str, ...], computations: str) -> tuple[hlo.Module, hlo.Computation, hlo.Instruction]:
    body = "\n".join(f"  {line}" for line in lines)
    module = hlo.parse(f"HloModule m\n\n{computations}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n")
    return module, module.entry, module.entry.instructions[-1]


LEFT, RIGHT = "%a = f32[4,64,32]{2,1,0} parameter(0)", "%b = f32[4,32,48]{2,1,0} parameter(1)"
DOT = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"
DNUMS = '"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]'
WORK = 2 * 4 * 64 * 32 * 48


def test_a_dot_with_a_batch():
    assert flops(LEFT, RIGHT, f"%d = f32[4,64,48]{{2,1,0}} dot(%a, %b), {DOT}") == WORK


def test_several_contracted_dimensions_and_none():
    contracted = "lhs_contracting_dims={0,2}, rhs_contracting_dims={0,1}"
    assert flops(LEFT, RIGHT, f"%d = f32[64,48]{{1,0}} dot(%a, %b), {contracted}") == WORK
    outer = "lhs_contracting_dims={}, rhs_contracting_dims={}"
    line = "%d = f32[4,64,32,4,32,48]{5,4,3,2,1,0} dot(%a, %b), "
    assert flops(LEFT, RIGHT, line + outer) == 2 * (4 * 64 * 32) * (4 * 32 * 48)


def test_nothing_is_multiplied_in_an_empty_array():
    empty = "%e = f32[4,0,32]{2,1,0} parameter(2)"
    assert flops(empty, RIGHT, f"%d = f32[4,0,48]{{2,1,0}} dot(%e, %b), {DOT}") == 0


def test_a_fusion_counts_what_is_in_it():
    inner = f"""%deep (p: f32[4,64,32], q: f32[4,32,48]) -> f32[4,64,48] {{
  %p = f32[4,64,32]{{2,1,0}} parameter(0)
  %q = f32[4,32,48]{{2,1,0}} parameter(1)
  ROOT %d = f32[4,64,48]{{2,1,0}} dot(%p, %q), {DOT}
}}
%wide (r: f32[4,64,32], s: f32[4,32,48]) -> f32[4,64,48] {{
  %r = f32[4,64,32]{{2,1,0}} parameter(0)
  %s = f32[4,32,48]{{2,1,0}} parameter(1)
  %f.1 = f32[4,64,48]{{2,1,0}} fusion(%r, %s), kind=kLoop, calls=%deep
  %d.1 = f32[4,64,48]{{2,1,0}} dot(%r, %s), {DOT}
  ROOT %t = f32[4,64,48]{{2,1,0}} add(%f.1, %d.1)
}}
"""
    line = "%f = f32[4,64,48]{2,1,0} fusion(%a, %b), kind=kOutput, calls=%wide"
    assert flops(LEFT, RIGHT, line, computations=inner) == 2 * WORK


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
@pytest.mark.parametrize("nested", [True, False])
def test_calls_of_gpu_libraries(target, nested):
    # the first array is the product, a workspace may follow it
    dnums = f'"alpha_real":1,"dot_dimension_numbers":{{{DNUMS}}},"epilogue":"BIAS"'
    config = f'{{"operation_queue_id":"0","gemm_backend_config":{{{dnums}}}}}' if nested else f"{{{dnums}}}"
    line = "%g = (f32[4,64,48]{2,1,0}, s8[33554432]{0}) custom-call(%a, %b), "
    call = f'{line}custom_call_target="{target}", backend_config={config}'
    assert (flops(LEFT, RIGHT, call), told(LEFT, RIGHT, call)) == (WORK, [])


def test_calls_of_a_cpu_library():
    line = '%g = f32[4,64,48]{2,1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul"'
    assert (flops(LEFT, RIGHT, line), told(LEFT, RIGHT, line)) == (WORK, [])
    turned = "%a = f32[4,32,64]{2,1,0} parameter(0)"
    config = ', backend_config={"onednn_matmul_config":{"transpose_a":true}}'
    assert flops(turned, RIGHT, line + config) == WORK


@pytest.mark.parametrize(
    "target",
    ["__cublas$gemm", "__cublas$lt$matmul", "__cudnn$convForward", "__cudnn$fmhaSoftmaxF8", "__onednn$convolution"],
)
def test_calls_whose_products_nothing_tells_are_named(target):
    line = f'%g = f32[4,64,48]{{2,1,0}} custom-call(%a, %b), custom_call_target="{target}"'
    assert (flops(LEFT, RIGHT, line), told(LEFT, RIGHT, line)) == (0, [("g", target)])
    inner = f"""%fused (a: f32[4,64,32], b: f32[4,32,48]) -> f32[4,64,48] {{
  {LEFT}
  {RIGHT}
  ROOT {line}
}}
"""
    fusion = "%f = f32[4,64,48]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%fused"
    assert told(LEFT, RIGHT, fusion, computations=inner) == [("g", target)]


@pytest.mark.parametrize(
    ("target", "products", "masked", "pairs"),
    [
        ("__cudnn$fmhaSoftmax", 2, "NO_MASK", 6 * 4),
        ("__cudnn$fmhaSoftmax", 2, "CAUSAL", 1 + 2 + 3 + 4 + 4 + 4),
        ("__cudnn$fmhaSoftmaxBackward", 5, "NO_MASK", 6 * 4),
    ],
)
def test_attention_by_cudnn(target, products, masked, pairs):
    queries, keys = "%a = bf16[2,6,8,16]{3,2,1,0} parameter(0)", "%b = bf16[2,4,2,16]{3,2,1,0} parameter(1)"
    config = f'{{"cudnn_fmha_backend_config":{{"mask_type":"{masked}"}}}}'
    line = f'%g = bf16[2,8,6,16]{{3,2,1,0}} custom-call(%a, %b, %b), custom_call_target="{target}"'
    assert flops(queries, keys, f"{line}, backend_config={config}") == products * 2 * 2 * 8 * pairs * 16
    assert told(queries, keys, line) == []


@pytest.mark.parametrize(
    "config",
    ['"mask_type":"PADDING_CAUSAL"', '"mask_type":"PADDING"', '"mask_type":"CAUSAL","sliding_window_length":2'],
)
def test_attention_whose_mask_is_unknown_is_named(config):
    queries, keys = "%a = bf16[2,6,8,16]{3,2,1,0} parameter(0)", "%b = bf16[2,4,2,16]{3,2,1,0} parameter(1)"
    line = '%g = bf16[2,8,6,16]{3,2,1,0} custom-call(%a, %b, %b), custom_call_target="__cudnn$fmhaSoftmax"'
    line += f', backend_config={{"cudnn_fmha_backend_config":{{{config}}}}}'
    assert (flops(queries, keys, line), told(queries, keys, line)) == (0, [("g", "__cudnn$fmhaSoftmax")])


@pytest.mark.parametrize("target", ["Sharding", "SPMDFullToShardShape", "cu_threefry2x32", "TopK", "ConvertIt"])
def test_other_calls_have_none(target):
    line = f'%g = f32[4,64,48]{{2,1,0}} custom-call(%a, %b), custom_call_target="{target}"'
    assert (flops(LEFT, RIGHT, line), told(LEFT, RIGHT, line)) == (0, [])


@pytest.mark.parametrize(
    ("left", "right", "out", "how", "work"),
    [
        # as the TPU compiler writes dots; batch dimensions are windows of which one tap meets an element
        ("256,512", "512,128", "256,128", "dim_labels=bf_io->bf", 2 * 256 * 512 * 128),
        ("2,64,32", "2,32,48", "2,64,48", "window={size=2 lhs_dilate=2}, dim_labels=0bf_0io->0bf", WORK // 2),
        ("4,64,32", "4,32,48", "4,64,48", "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf", WORK),
        (
            "4,8,64,32",
            "4,8,32,48",
            "4,8,64,48",
            "window={size=4x8 stride=3x7 lhs_dilate=4x8}, dim_labels=01bf_01io->01bf",
            8 * WORK,
        ),
        # contracted over a window: one output position, every tap
        ("4,8,64,32", "8,32,48,4", "64,48,1,1", "window={size=4x8}, dim_labels=01bf_1io0->bf01", 8 * WORK),
        # a convolution of 5 taps over 16 positions without padding: 12 of them
        ("2,16,3", "5,3,7", "2,12,7", "window={size=5}, dim_labels=b0f_0io->b0f", 2 * 2 * 3 * 7 * 12 * 5),
        # with two zeros on either side the taps at the borders meet fewer elements: 16 * 5 - 2 * (2 + 1)
        ("2,16,3", "5,3,7", "2,16,7", "window={size=5 pad=2_2}, dim_labels=b0f_0io->b0f", 2 * 2 * 3 * 7 * 74),
        # two groups of features: a tap multiplies 3 of 6: 2 * 12 * 8 * 5 * 3 in all
        ("2,16,6", "5,3,8", "2,12,8", "window={size=5}, dim_labels=b0f_0io->b0f, feature_group_count=2", 2 * 2880),
    ],
)
def test_convolutions(left, right, out, how, work):
    lines = [f"%a = bf16[{left}]{{0}} parameter(0)", f"%b = bf16[{right}]{{0}} parameter(1)"]
    assert flops(*lines, f"%c = bf16[{out}]{{0}} convolution(%a, %b), {how}") == work


def _counted(left: int, kernel: int, out: int, stride: int, low: int, spread: int, hole: int) -> int:
    """Pairs of output position and tap that meet an element, one by one."""
    at = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * hole - low
    return int(np.sum((at >= 0) & (at <= (left - 1) * spread) & (at % spread == 0)))


def test_windows_of_every_kind():
    draw = random.Random(0).randint
    for _ in range(300):
        left, kernel, out = draw(1, 9), draw(1, 9), draw(1, 9)
        stride, spread, hole, low = draw(1, 7), draw(1, 7), draw(1, 4), draw(-4, 9)
        window = f"size={kernel} stride={stride} pad={low}_0 lhs_dilate={spread} rhs_dilate={hole}"
        lines = [f"%a = f32[1,{left},1]{{0}} parameter(0)", f"%b = f32[{kernel},1,1]{{0}} parameter(1)"]
        line = f"%c = f32[1,{out},1]{{0}} convolution(%a, %b), window={{{window}}}, dim_labels=b0f_0io->b0f"
        assert flops(*lines, line) == 2 * _counted(left, kernel, out, stride, low, spread, hole), window


def test_a_million_products_side_by_side():
    # a table of positions and taps would take eight terabytes
    n = 1_000_000
    lines = [f"%a = f32[{n},2,3]{{0}} parameter(0)", f"%b = f32[{n},3,4]{{0}} parameter(1)"]
    window = f"window={{size={n} stride={n - 1} lhs_dilate={n}}}, dim_labels=0bf_0io->0bf"
    assert flops(*lines, f"%c = f32[{n},2,4]{{0}} convolution(%a, %b), {window}") == 2 * n * 2 * 3 * 4


def _layers(x, w):
    return lax.scan(lambda c, one: (jnp.tanh(c @ one), None), x, w)[0]


def _unrolled(x, w):
    for one in w:
        x = jnp.tanh(x @ one)
    return x


def _gradient(layers):
    return jax.grad(lambda x, w: layers(x, w).sum(), (0, 1))


UNROLLED = {
    "scan": (_layers, _unrolled, 1),
    "gradient of a scan": (_gradient(_layers), _gradient(_unrolled), 3),
    "nested": (
        lambda x, w: lax.fori_loop(0, 3, lambda i, c: _layers(c, w), x),
        lambda x, w: _unrolled(_unrolled(_unrolled(x, w), w), w),
        3,
    ),
}


@pytest.mark.parametrize("name", UNROLLED)
def test_a_loop_counts_as_its_unrolled_self(name):
    abstract = jax.ShapeDtypeStruct((16, 32), "float32"), jax.ShapeDtypeStruct((5, 32, 32), "float32")
    *programs, layers = UNROLLED[name]
    looped, unrolled = (gspmd.ledger(jax.jit(f).lower(*abstract).compile(), {}) for f in programs)
    assert looped.flops == pytest.approx(unrolled.flops, rel=0.01)
    assert looped.flops == layers * 5 * 2 * 16 * 32 * 32
    assert looped.notes == ()


TPU = {
    "ij,jk->ik": ({"i": 25, "j": 51, "k": 13}, 1),
    "bij,bjk->bik": ({"b": 3, "i": 64, "j": 32, "k": 48}, 1),
    "abij,abjk->abik": ({"a": 4, "b": 16, "i": 64, "j": 32, "k": 48}, 1),
    "aibj,bjak->iabk": ({"a": 4, "b": 7, "i": 64, "j": 32, "k": 48}, 1),
    "abij,bjka->ik": ({"a": 4, "b": 8, "i": 64, "j": 32, "k": 48}, 1),
    "BTKD,BKQD->BKQT": ({"B": 64, "T": 128, "K": 2, "Q": 3, "D": 256}, 1),
    "ij,j->i": ({"i": 256, "j": 512}, 0),  # a product with a vector is a sum, and no matrix product
}


@needs_libtpu
@pytest.mark.parametrize("einsum", TPU)
def test_dots_of_the_tpu_compiler(einsum):
    sizes, share = TPU[einsum]
    mesh = topology("tpu-v4:2x2x1").mesh({"x": 4}, "auto")
    place = jax.NamedSharding(mesh, jax.P())
    shapes = [tuple(sizes[dim] for dim in term) for term in einsum.partition("->")[0].split(",")]
    abstract = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=place) for shape in shapes]
    compiled = jax.jit(lambda *a: jnp.einsum(einsum, *a)).lower(*abstract).compile()
    assert gspmd.ledger(compiled).flops == pytest.approx(share * 2 * np.prod(list(sizes.values())), rel=0.01)


@needs_libtpu
def test_a_scan_of_the_tpu_compiler():
    mesh = topology("tpu-v4:2x2x1").mesh({"x": 4}, "auto")
    shapes, place = ((64, 256), (6, 256, 256)), jax.NamedSharding(mesh, jax.P())
    abstract = [jax.ShapeDtypeStruct(shape, "float32", sharding=place) for shape in shapes]
    ledger = gspmd.ledger(jax.jit(_gradient(_layers)).lower(*abstract).compile())
    assert ledger.flops == pytest.approx(3 * 6 * 2 * 64 * 256 * 256, rel=0.01)
    assert ledger.entries == ()
