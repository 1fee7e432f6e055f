"""Attention by the TPU's kernel, interpreted on the host: the numbers and gradients of attention in blocks."""

from functools import partial
from importlib import util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

import gspmd
from gspmd.audit import compile_offline, topology
from gspmd.ops import Buckets, attention, cached_attention
from gspmd.ops._attention import blocks
from gspmd.ops._attention.kernels import splash
from gspmd.ops._attention.local import MIXED
from gspmd.ops._attention.terms import Limits
from gspmd.tracing.jaxprs import all_equations, without_dead_code
from tests.ops.test_attention import plain
from tests.references.attention import written_out


@pytest.fixture
def on_tpu(monkeypatch):
    """Trace as for TPUs, whose kernel has blocks of 128 and runs on the host, from 64 logits on."""
    jax.clear_caches()
    make = splash_attention_kernel.make_splash_mqa_single_device
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mqa_single_device", partial(make, interpret=True))
    monkeypatch.setattr("gspmd.lowerings.in_force.device_kind", lambda: "TPU v5p")
    monkeypatch.setattr(splash, "_LONGEST", (128, 128))
    monkeypatch.setattr(blocks, "LARGEST", 64)
    yield
    jax.clear_caches()


def _arrays(length, heads, key_heads, size, dtype="float32", rows=2):
    rng = np.random.default_rng(0)
    shapes = [(rows, length, heads, size)] + [(rows, length, key_heads, size)] * 2
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def _kernels(fn, *arrays):
    """The kernels that a function calls, by name."""
    program = without_dead_code(jax.make_jaxpr(fn)(*arrays).jaxpr)
    return [str(e.params["name"]) for e in all_equations(program) if e.primitive.name == "pallas_call"]


CASES = {
    # length, heads, key heads, head size, dtype, mesh, query spec, key spec
    "grouped, keys cut less": (200, 4, 2, 40, "float32", {"x": 4}, "BLH_xD", "BTKD"),
    "multiquery": (130, 2, 1, 64, "bfloat16", {"x": 2}, "B_xLHD", "B_xTKD"),
    "multihead": (256, 2, 2, 128, "float32", {"x": 2}, "BLH_xD", "BTK_xD"),
    "grouped": (384, 6, 2, 256, "bfloat16", {"x": 2}, "B_xLHD", "B_xTKD"),
}


def test_what_the_kernels_do_not_take_is_computed_in_blocks(on_tpu, monkeypatch):
    """Each of these would fail in the compiler, or take plain Python minutes."""
    wide = jax.ShapeDtypeStruct((1, 256, 2, 64), "float32")
    narrow = jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16")
    assert splash.fits(wide, wide, wide)
    assert not splash.fits(narrow, narrow, wide)
    assert not splash.fits(wide, narrow, narrow)
    for precision in ("high", "tensorfloat32", "highest"):
        with jax.default_matmul_precision(precision):
            assert not splash.fits(wide, wide, wide)
    long = jax.ShapeDtypeStruct((1, 64 * 128, 2, 64), "float32")
    longer = jax.ShapeDtypeStruct((1, 64 * 128 + 1, 2, 64), "float32")
    assert splash.fits(long, long, long)
    assert not splash.fits(longer, longer, longer)


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if n > 1 else c for n, c in enumerate(CASES)])
def test_values_and_gradients(case, on_tpu, make_mesh, place):
    *sizes, mesh, query, key = CASES[case]
    arrays = _arrays(*sizes)
    g = np.random.default_rng(1).normal(size=arrays[0].shape).astype("float32")

    def value_and_gradients(f):
        def weighted(q, k, v):
            y = f(q, k, v)
            return (y.astype(jnp.float32) * g).sum(), y

        (_, y), gradients = jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True)(*arrays_placed)
        return y, *gradients

    arrays_placed = tuple(x.astype("float32") for x in arrays)
    want = value_and_gradients(plain)
    with jax.set_mesh(made := make_mesh(mesh)), gspmd.lowering("blocking"):
        g = place(made, g, query)
        arrays_placed = tuple(place(made, x, spec) for x, spec in zip(arrays, (query, key, key)))
        got = jax.jit(partial(value_and_gradients, lambda *a: attention(*a, query, key)))()
    for x, exact in zip(got, want):
        limit = (2e-2 if x.dtype == jnp.bfloat16 else 1e-5) * float(jnp.abs(exact).max())
        np.testing.assert_allclose(np.asarray(x, "float32"), exact, rtol=0, atol=limit)


def test_blocks_are_shorter_with_a_short_window():
    """Blocks have 1,024 tokens without a window, or with one as long, and 512 with shorter windows."""
    blocks_of = lambda length, window, size=256: splash._Schedule.of(length, size, Limits(window=window))  # noqa: E731
    sizes = {window: blocks_of(8192, window).block for window in (None, 4096, 1024, 512, 128)}
    assert sizes == {None: 1024, 4096: 1024, 1024: 1024, 512: 512, 128: 512}
    assert blocks_of(65536, 128).block == 1024  # the most blocks that there may be
    assert blocks_of(8192, None, 1024).block == 512  # of wide heads
    in_chunks = {chunk: splash._Schedule.of(8192, 256, Limits(chunk=chunk)).block for chunk in (4096, 1024, 512, 100)}
    assert in_chunks == {4096: 1024, 1024: 1024, 512: 512, 100: 512}
    of_chunks = (splash._Schedule.of(length, 256, Limits(chunk=chunk)) for length, chunk in ((8192, 512), (1300, 400)))
    of_windows = (blocks_of(*each) for each in ((8192, 128), (1300, 1), (4000, 700), (2048, 2048)))
    for found in (*of_windows, *of_chunks):
        at, limits = np.arange(found.length), found.limits
        seen = (at[None] <= at[:, None]) & (at[None] >= limits.first(at)[:, None])
        seen = seen.reshape(found.count, found.block, found.count, found.block)
        assert found.seen == seen.any(axis=(1, 3)).sum(axis=1).tolist()


def test_a_short_window_in_shorter_blocks(on_tpu, monkeypatch, make_mesh):
    monkeypatch.setattr(splash, "_LONGEST", (1024, 128))
    monkeypatch.setattr(splash, "_STEP", 0)
    given = _arrays(600, 2, 1, 40, rows=1)
    assert splash._Schedule.of(600, 160, Limits(window=40)).block == 256
    with jax.set_mesh(make_mesh({"x": 1})), gspmd.lowering("blocking"):
        attend = lambda *a: jnp.sin(attention(*a, "BLHD", "BTKD", window=40)).sum()  # noqa: E731
        got = jax.jit(jax.value_and_grad(attend, argnums=(0, 1, 2)))(*given)
    want = jax.value_and_grad(lambda *a: jnp.sin(written_out(*a, window=40)).sum(), argnums=(0, 1, 2))(*given)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5), got, want)


OPTIONS = [
    {"window": 150, "softcap": 0.8, "sinks": True}, {"window": 128}, {"window": 1, "sinks": True}, {"softcap": 1.5},
    {"window": 129, "sinks": True}, {"chunk": 100, "sinks": True}, {"chunk": 256}, {"chunk": 130, "softcap": 0.8},
]  # fmt: skip


@pytest.mark.turns(1)
@pytest.mark.parametrize("mesh_axes", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_windows_caps_and_sinks(options, mesh_axes, on_tpu, make_mesh, place):
    """Three blocks of queries and keys, of which a window leaves out some; against attention written out."""
    given, options = _arrays(300, 4, 2, 40), dict(options)
    g = _arrays(300, 4, 4, 40)[1]
    query, key, of_sinks = "BLH_xD", "BTK_xD", "H_x"
    if options.pop("sinks", False):
        given += (jnp.asarray([0.5, -1.0, 2.0, 0.0]),)

    def both(f):
        def value_and_gradients(g, *given):
            y, transpose = jax.vjp(lambda q, k, v, *sinks: f(q, k, v, sinks=sinks[0] if sinks else None), *given)
            return y, *transpose(g)

        return value_and_gradients

    want = jax.jit(both(partial(written_out, **options)))(g, *given)
    with jax.set_mesh(made := make_mesh({"x": mesh_axes})), gspmd.lowering("blocking"):
        placed = [place(made, x, spec) for x, spec in zip((g, *given), (query, query, key, key, of_sinks))]
        more = {"sinks_spec": of_sinks} if len(given) == 4 else {}
        mine = both(lambda *a, sinks: attention(*a, query, key, sinks=sinks, **options, **more))
        assert len(_kernels(mine, *placed)) == 3
        got = jax.jit(mine)(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)


LIMITS = [*(Limits(window=size) for size in (None, 1, 100, 128, 129, 130, 300, 512)),
          *(Limits(chunk=size) for size in (1, 100, 128, 129, 200, 256, 300, 450))]  # fmt: skip


@pytest.mark.parametrize("limits", LIMITS)
def test_the_work_of_a_kernel_is_that_of_its_grid(limits, on_tpu):
    """Compare with the tables that JAX makes of the mask: the blocks that are not empty, and the widest row of them."""
    schedule = splash._Schedule.of(512, 256, limits)
    assert (schedule.count, schedule.block) == (4, 128)
    tables = (
        (schedule.kernel().fwd_mask_info, -1, schedule.seen),
        (schedule.kernel().dkv_mask_info, -2, schedule.seeing),
    )
    for info, of_row, seen in tables:
        assert np.count_nonzero(info.block_mask) == sum(seen)
        assert info.block_mask.shape[of_row] == max(seen)


@pytest.mark.slow
@pytest.mark.parametrize("key_heads", [1, 2])
def test_segments(key_heads, on_tpu, make_mesh, monkeypatch):
    """Packed rows, with NaN in padding, of which none reaches a result; against the same in plain code."""
    q, k, v = _arrays(200, 2, key_heads, 40)
    g, of_tokens = _arrays(200, 2, 2, 40)[1], jnp.asarray(np.arange(200)[None] // [[60], [101]] + 1)
    of_tokens = jnp.where(of_tokens > jnp.array([[3], [1]]), 0, of_tokens)

    def value_and_gradients(hidden):
        def both(g, *arrays):
            attend = lambda *a: attention(*a, "BLHD", "BTKD", segments=(of_tokens, of_tokens))  # noqa: E731
            y, transpose = jax.vjp(attend, *arrays)
            return y, *transpose(g)

        arrays = [jnp.where(of_tokens[..., None, None] != 0, x, hidden) for x in (g, q, k, v)]
        return both, arrays

    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("blocking"):
        assert len(_kernels(*(lambda f, a: (f, *a))(*value_and_gradients(0.0)))) == 3
        got = [jax.jit(f)(*arrays) for f, arrays in map(value_and_gradients, (1.0, jnp.nan))]
    jax.clear_caches()
    monkeypatch.setattr("gspmd.lowerings.in_force.device_kind", lambda: "cpu")
    monkeypatch.setattr(blocks, "LARGEST", 2**25)
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("blocking"):
        function, arrays = value_and_gradients(0.0)
        want = jax.jit(function)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, *got)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got[0], want)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"window": 9, "softcap": 0.9, "sinks": jnp.ones(2), "sinks_spec": "H"}], ids=len)
def test_a_prompt_over_a_cache(more, on_tpu, make_mesh):
    q, k, v = _arrays(130, 2, 1, 64)
    held = jnp.ones((2, 8, 1, 64))
    lengths = jnp.array([3, 0])

    def attend(*arrays):
        return cached_attention(*arrays, held, held, "BLHD", "BLKD", "BTKD", lengths=lengths, **more)

    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("blocking"):
        assert _kernels(attend, q, k, v) == ["splash_mqa_fwd_residuals"]
        got = attend(q, k, v)
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("xla"):
        np.testing.assert_allclose(got, attend(q, k, v), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("more", [{}, {"window": 6, "softcap": 0.9, "sinks": jnp.ones(2), "sinks_spec": "H"}], ids=len)
def test_second_derivatives_are_those_of_blocks(more, packed, on_tpu, make_mesh, monkeypatch):
    arrays, of_tokens = _arrays(20, 2, 1, 8, rows=1), jnp.arange(20)[None] // 8
    options = {"segments": (of_tokens, of_tokens) if packed else None} | more

    def curved(q, k, v):
        def slope(k):
            return jax.grad(lambda q: (attention(q, k, v, "BLHD", "BTKD", **options) ** 3).sum())(q)

        return jax.grad(lambda k: (slope(k) ** 2).sum())(k)

    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("blocking"):
        found = jax.jit(curved)(*arrays)
    jax.clear_caches()
    monkeypatch.setattr("gspmd.lowerings.in_force.device_kind", lambda: "cpu")
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("blocking"):
        np.testing.assert_allclose(found, jax.jit(curved)(*arrays), rtol=1e-4, atol=1e-4)


def test_what_the_kernel_takes(on_tpu, make_mesh):
    """Only programs are traced: all else runs in blocks, and under lowering "xla" the compiler partitions those."""
    q, k, v = _arrays(130, 2, 1, 64)

    def asked(lowering="blocking", dtype="float32", keys=130, **options):
        arrays = (x.astype(dtype) for x in (q, k[:, :keys], v[:, :keys]))
        with gspmd.lowering(lowering):
            return len(_kernels(lambda *a: attention(*a, "BLHD", "BTKD", **options), *arrays))

    with jax.set_mesh(make_mesh({"x": 1}, "auto")):
        assert asked() == asked(dtype="bfloat16") == 1
        assert asked("xla") == asked(dtype="float16") == asked(keys=128) == asked(causal=False) == 0
        assert asked(offset=3) == asked(mask=jnp.ones((2, 130), bool)) == 0
        of_tokens = jnp.ones((2, 130), int)
        assert asked(segments=(of_tokens, of_tokens)) == 1
        assert asked(segments=(of_tokens, 2 * of_tokens)) == 0  # where a query may attend to nothing
        assert asked(bias=jnp.ones((32, 2)), bias_spec="RH", buckets=Buckets()) == 0
        assert (
            asked(window=16) == asked(chunk=16) == asked(softcap=2.0) == asked(sinks=jnp.ones(2), sinks_spec="H") == 1
        )
        assert asked(slopes=(1.0, 0.5)) == 0


def test_new_tokens_over_a_cache_are_cut_into_chunks_without_the_kernel(on_tpu, make_mesh):
    """The start of a chunk depends on the length of each row, and the kernel's mask is the same for all."""
    q, k, v = _arrays(130, 2, 1, 64)
    held, lengths = jnp.ones((2, 16, 1, 64)), jnp.array([3, 0])

    def attend(*arrays):
        return cached_attention(*arrays, held, held, "BLHD", "BLKD", "BTKD", lengths=lengths, chunk=16)

    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("blocking"):
        assert not _kernels(attend, q, k, v)


def test_what_is_kept_is_not_computed_again(on_tpu, make_mesh):
    """A scanned layer that keeps attention's result is compared with one that keeps nothing."""
    arrays = _arrays(130, 2, 1, 64)

    def kernels(*kept):
        def layer(q, keys):
            y = attention(checkpoint_name(q, "q"), *keys, "BLHD", "BTKD")
            return jnp.sin(y), None

        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        stacked = jax.checkpoint(layer, policy=policy)
        total = lambda q, *keys: jax.lax.scan(stacked, q, [jnp.stack([x, x]) for x in keys])[0].sum()  # noqa: E731
        return _kernels(jax.grad(total, argnums=(0, 1, 2)), *arrays)

    forward, *backward = "splash_mqa_fwd_residuals", "splash_mqa_dq_no_residuals", "splash_mqa_dkv_no_residuals"
    with jax.set_mesh(make_mesh({"x": 1}, "auto")), gspmd.lowering("blocking"):
        assert kernels("q", MIXED) == [forward, *backward]
        assert kernels() == [forward, forward, *backward]


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
@pytest.mark.parametrize(("more", "blocks_seen", "most"), [({}, 3, 2), ({"chunk": 256}, 2, 1)])
def test_a_compiled_kernel_has_products_and_a_schedule(more, blocks_seen, most, monkeypatch):
    """For a v5p slice; a chip's two cores share the kernel, and the ledger counts the blocks that causality leaves."""
    monkeypatch.setattr(splash, "_LONGEST", (256, 256))
    monkeypatch.setattr(blocks, "LARGEST", 64)
    target = topology("tpu-v5p:2x2x1")
    mesh = target.mesh({"x": 4})
    q, k = (
        jax.ShapeDtypeStruct((4, 512, heads, 128), "bfloat16", sharding=jax.NamedSharding(mesh, jax.P("x")))
        for heads in (4, 2)
    )

    def loss(q, k, v):
        return attention(q, k, v, "B_xLHD", "B_xTKD", **more).astype(jnp.float32).sum()

    with gspmd.lowering("blocking"):
        report = compile_offline(jax.grad(loss, argnums=(0, 1, 2)), q, k, k, topology=target)
    products = 2 + 3 + 4
    assert report.ledger.flops == report.timeline.flops == 2 * products * 4 * blocks_seen * 256**2 * 128
    assert {schedule.trips for schedule in report.module.kernels.values()} == {4 * 2 * most // 2 + 2}
    assert len(report.module.kernels) == 3
    assert not report.timeline.notes + report.ledger.notes
    spans = [span for span in report.timeline.spans if span.instruction in report.module.kernels]
    assert sum(span.seconds for span in spans) > report.timeline.flops / target.chip.flops("bfloat16")
