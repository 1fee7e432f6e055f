"""Measure one card: accuracy against float64, products, kernels by bytes, attention, training steps, experts.

    python benchmarks/device.py --out device                     # on one H100 or H200, in five minutes
    python benchmarks/device.py --small --parts agreement        # on any machine, to see that it runs

There is one device, so every mesh axis has size 1, and only computation is measured, not communication. Times are
medians of repetitions inside one compiled loop whose trips depend on each other. So the times include neither the host
nor program launches; launches have a row of their own. A part that fails becomes a row that says so. The folder gets
table.md, and results.json with every measurement. benchmarks/gpu.py fits the model of a card to these measurements.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

import gspmd
from gspmd import ops
from gspmd.hardware.chips import CHIPS
from gspmd.layouts import Layout
from gspmd.lowerings.in_force import planned_for
from gspmd.moe import MoEConfig, expert_layer
from gspmd.moe.dropless.grouped import FORMS, grouped_matmul
from gspmd.training import OptimizerConfig
from gspmd.training.toml import from_mapping
from gspmd_models import ModelConfig, abstract_key, batch_spec, build, step
from gspmd_models.decoding.programs import serving_program

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
LOWERINGS = ("xla", "blocking", "looped", "auto")
ROUTERS = ("switch", "gshard", "top-k", "st-moe", "expert-choice", "noisy-top-k")


class Step(NamedTuple):
    """A training step: model, sequences of a batch, their length, dtype of the model, and layout."""

    config: ModelConfig
    batch: int
    length: int
    dtype: str = "bfloat16"
    layout: str = "megatron-1d"


class Decoding(NamedTuple):
    """A decode step of Llama 3.1 8B: rows, tokens that the cache has room for, and dtype of the stored weights."""

    rows: int
    room: int = 2048
    weights: str = "bfloat16"


_150M = ModelConfig(
    vocabulary=32768, embed=768, layers=12, heads=12, kv_heads=12, head_size=64, feed_forward=2048, tied=False
)
_1B = ModelConfig(
    vocabulary=32768, embed=2048, layers=16, heads=16, kv_heads=8, head_size=128, feed_forward=8192, tied=False,
    remat="full",
)  # fmt: skip
STEPS = {
    "150M": Step(_150M, 16, 1024),
    "150M, float32": Step(_150M, 16, 1024, "float32"),
    "150M, every other layer 8 experts": Step(replace(_150M, moe=MoEConfig(experts=8)), 16, 1024, layout="gshard"),
    "1B": Step(_1B, 8, 2048),
    "3B": Step(replace(_1B, embed=3072, layers=28, heads=24, vocabulary=128256), 8, 2048),
}
"""The training steps."""

DECODED = {
    **{f"bfloat16, {rows} row{'s' * (rows > 1)}": Decoding(rows) for rows in (1, 2, 8, 64, 256)},
    **{f"int8 weights, {rows} row{'s' * (rows > 1)}": Decoding(rows, weights="int8") for rows in (1, 8, 64)},
    "bfloat16, 8 rows, room for 16384": Decoding(8, 16384),
}
"""The decode steps."""


def mesh(device: jax.Device | None = None) -> jax.sharding.Mesh:
    """Return a mesh of one device with the three mesh axes of the layouts; by default this is the first device."""
    axes, one = (AxisType.Explicit,) * 3, [device or jax.devices()[0]]
    return jax.make_mesh((1, 1, 1), ("x", "y", "z"), axis_types=axes, devices=one)


def microseconds(run: Callable, x: Any, trips: int, *beside: Any, rounds: int = 5) -> tuple[float, float]:
    """Return the median microseconds of one trip of `x = run(x, *beside)`, and the spread over rounds as a fraction."""
    looped = jax.jit(lambda x, *beside: lax.fori_loop(0, trips, lambda _, x: run(x, *beside), x))
    jax.block_until_ready(looped(x, *beside))
    took = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(looped(x, *beside))
        took.append((time.perf_counter() - begun) / trips * 1e6)
    return median(took), (max(took) - min(took)) / median(took)


def error(found: Any, wanted: np.ndarray) -> float:
    """Return the largest difference between found and wanted numbers, relative to the largest wanted number."""
    return float(np.max(np.abs(np.asarray(found, np.float64) - wanted)) / np.max(np.abs(wanted)))


# -- agreement ---------------------------------------------------------------------------------------------------------


def agreement(small: bool) -> Iterator[Row]:
    """Compare operations in float32 and bfloat16 with numpy in float64."""
    rng = np.random.default_rng(0)
    size = 32 if small else 256
    a, b, c = (rng.standard_normal((size, size)) / size**0.5 for _ in range(3))
    for lowering in LOWERINGS:
        for dtype in ("float32", "bfloat16"):
            x, w, v = (jnp.asarray(each, dtype) for each in (a, b, c))
            x64, w64, v64 = (np.asarray(each, np.float64) for each in (x, w, v))

            def both(x, w, v):
                h = gspmd.einsum("BE, E_xF_y -> BF", gspmd.annotate(x, "BE"), gspmd.annotate(w, "E_xF_y"))
                return gspmd.einsum("BF, FE -> BE", h, gspmd.annotate(v, "FE"))

            with jax.set_mesh(mesh()), gspmd.lowering(lowering), jax.default_matmul_precision("highest"):
                out, pull = jax.vjp(both, x, w, v)
                gradient = pull(jnp.ones_like(out))[1]
            ones = np.ones((size, size))
            yield {"what": f"two products, {lowering}", "dtype": dtype, "error": error(out, x64 @ w64 @ v64)}
            wanted = x64.T @ (ones @ v64.T)
            yield {"what": f"gradient of a weight, {lowering}", "dtype": dtype, "error": error(gradient, wanted)}
    for dtype in ("float32", "bfloat16"):
        yield from _attention_agrees(rng, dtype, 64 if small else 512)
        yield from _vectors_agree(rng, dtype)
    yield from _experts_agree(rng)
    yield from _steps_agree()


def _softmaxed(scores: np.ndarray) -> np.ndarray:
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def _attention_agrees(rng: np.random.Generator, dtype: str, length: int) -> Iterator[Row]:
    heads, groups, depth = 8, 2, 64
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, n, depth)), dtype) for n in (heads, groups, groups))
    q64, k64, v64 = (np.asarray(each, np.float64) for each in (q, k, v))
    k64, v64 = (np.repeat(each, heads // groups, axis=2) for each in (k64, v64))
    scores = np.einsum("blhd,bmhd->bhlm", q64, k64) / depth**0.5
    scores[:, :, ~np.tri(length, dtype=bool)] = -np.inf
    wanted = np.einsum("bhlm,bmhd->blhd", _softmaxed(scores), v64)
    with jax.set_mesh(mesh()), jax.default_matmul_precision("highest"):
        found = ops.attention(q, k, v, "BLHD", "BLKD", causal=True)
        yield {"what": "causal attention, 8 query heads on 2", "dtype": dtype, "error": error(found, wanted)}
        # The last token again, with a cache of all others: in the dtype, and in int8, whose error includes rounding.
        held = [jnp.swapaxes(each, 1, 2) for each in (k, v)]
        last, lengths = [each[:, -1:] for each in (q, k, v)], jnp.full(2, length - 1)
        found = ops.cached_attention(*last, *held, "BLHD", "BLKD", "BKTD", lengths=lengths)
        yield {"what": "cached attention, one token", "dtype": dtype, "error": error(found, wanted[:, -1:])}
        (k8, k_scales), (v8, v_scales) = map(ops.quantize_heads, held)
        found = ops.cached_attention(
            *last, k8, v8, "BLHD", "BLKD", "BKTD", lengths=lengths, key_scales=k_scales, value_scales=v_scales
        )
        yield {"what": "cached attention, int8 cache", "dtype": dtype, "error": error(found, wanted[:, -1:])}


def _vectors_agree(rng: np.random.Generator, dtype: str) -> Iterator[Row]:
    x, scale = jnp.asarray(rng.standard_normal((64, 1024)), dtype), jnp.asarray(rng.standard_normal(1024), "float32")
    x64, s64 = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    table, ids = jnp.asarray(rng.standard_normal((512, 128)), dtype), jnp.asarray(rng.integers(0, 512, (4, 32)))
    with jax.set_mesh(mesh()):
        wanted = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * s64
        yield {"what": "RMS norm", "dtype": dtype, "error": error(ops.rms_norm(x, scale, "BE", "E"), wanted)}
        found = ops.softmax(x.astype("float32"), "BV", "V")
        yield {"what": "softmax", "dtype": dtype, "error": error(found, _softmaxed(x64))}
        found = ops.embed(ids, table, "BL, VE -> BLE")
        yield {
            "what": "embedding",
            "dtype": dtype,
            "error": error(found, np.asarray(table, np.float64)[np.asarray(ids)]),
        }


def _experts_agree(rng: np.random.Generator) -> Iterator[Row]:
    """Compare the expert layer on the card and on the host, in float32, so that both devices route tokens alike."""
    layout = Layout.load("gshard").section("moe")
    for router in ROUTERS:
        for dispatch in ("sort", "onehot", "dropless"):
            if dispatch == "dropless" and router != "top-k":
                continue
            config = MoEConfig(experts=4, router=router, dispatch=dispatch)
            weights = {"router": (64, 4), "w_in": (4, 64, 128), "w_out": (4, 128, 64)}
            if router == "noisy-top-k":
                weights["router_noise"] = (64, 4)
            values = {name: rng.standard_normal(shape).astype("float32") / 8 for name, shape in weights.items()}
            x = rng.standard_normal((4, 64, 64)).astype("float32")
            found = []
            for device in (jax.devices()[0], jax.devices("cpu")[0]):
                with jax.set_mesh(mesh(device)), jax.default_matmul_precision("highest"):
                    placed = {name: _placed(value, layout, name) for name, value in values.items()}
                    x_there = _placed(x, layout, "groups")
                    layer = partial(expert_layer, layout=layout, config=config, activation="relu", train=False)
                    found.append(np.asarray(jax.jit(layer)(x_there, placed)[0]))
            yield {"what": f"experts, {router}, {dispatch}", "dtype": "float32", "error": error(found[0], found[1])}


def _placed(x: Any, section: Any, line: str) -> jax.Array:
    """Place an array by a line of a layout's section."""
    return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), section.spec(line).partition_spec()))


def _steps_agree() -> Iterator[Row]:
    """Compare the losses of twenty steps on the card with those on the host."""
    dense = ModelConfig(vocabulary=256, embed=64, layers=2, heads=4, kv_heads=2, head_size=16, feed_forward=128)
    routed = replace(dense, moe=MoEConfig(experts=4, router="switch"))
    for name, config in (("dense", dense), ("Switch", routed)):
        curves = [_losses(config, device, 20) for device in (jax.devices()[0], jax.devices("cpu")[0])]
        worst = max(abs(one / other - 1) for one, other in zip(*curves))
        yield {"what": f"20 training steps, {name}: loss", "dtype": "float32", "error": worst}


def _losses(config: ModelConfig, device: jax.Device, steps: int) -> list[float]:
    one = mesh(device)
    layout = Layout.load("gshard" if config.moe else "megatron-1d")
    tokens = np.random.default_rng(1).integers(0, 256, (8, 65)).astype("int32")
    with jax.set_mesh(one), jax.default_matmul_precision("highest"):
        model = build(config, layout, one, jax.random.key(0))
        state = step.initial_state(model, OptimizerConfig(learning_rate=1e-2), steps, one)
        update = jax.jit(step.training_step(model, OptimizerConfig(learning_rate=1e-2), steps))
        batch = jax.device_put(tokens, jax.NamedSharding(one, batch_spec(layout).partition_spec()))
        losses = []
        for _ in range(steps):
            state, figures = update(state, batch, jax.random.key(1))
            losses.append(float(figures["loss"]))
    return losses


# -- speed -------------------------------------------------------------------------------------------------------------


def products(small: bool) -> Iterator[Row]:
    """Time products in bfloat16, accumulated in float32: square, thin and batched products."""
    shapes = [(1, n, n, n) for n in ((256, 512) if small else (512, 1024, 2048, 4096, 8192, 16384))]
    if not small:
        shapes += [(1, m, k, n) for k, n in ((4096, 4096), (4096, 16384), (16384, 4096), (8192, 28672))
                   for m in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)]  # fmt: skip
        shapes += [(g, m, k, n) for g, m, k, n in ((8, 1024, 4096, 14336), (64, 128, 2048, 8192), (128, 512, 128, 512),
                                                   (256, 2048, 128, 2048), (32, 8192, 128, 128))]  # fmt: skip
    for groups, m, k, n in shapes:
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (groups, m, k), jnp.bfloat16)
        w = jax.random.normal(keys[1], (groups, k, n), jnp.bfloat16) / k**0.5
        back = jax.random.normal(keys[2], (groups, n, k), jnp.bfloat16) / n**0.5
        flops = 2 * groups * m * k * n

        def run(x, w, back):  # two products, so that the result has the shape of the operand of the next trip
            return jnp.matmul(jnp.matmul(x, w), back)

        trips = 2 if small else max(2, min(200, int(2e14 / max(flops, 2 * groups * k * n * 400))))
        took, spread = microseconds(run, x, trips, w, back)
        took /= 2
        yield {"what": f"{groups} x " * (groups > 1) + f"{m} x {k} x {n}", "us": took, "spread": spread,
               "tflops": flops / took / 1e6, "gbps": 2 * groups * (m * k + k * n + m * n) / took / 1e3,
               "groups": groups, "m": m, "k": k, "n": n}  # fmt: skip


def kernels(small: bool) -> Iterator[Row]:
    """Time kernels, with the bytes that they read and write, and program launches."""
    for power in (10, 14) if small else (10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30):
        x = jnp.ones(2**power // 4, jnp.float32)
        trips = max(4, min(2000, 2**33 // 2**power))
        took, spread = microseconds(lambda x: x * 1.0001 + 1e-6, x, trips)
        amount = 2 * 2**power
        yield {"what": f"x * a + b, {amount // 2:,} bytes", "us": took, "spread": spread, "gbps": amount / took / 1e3,
               "bytes": amount}  # fmt: skip
    rows = 256 if small else 16384
    x = jax.random.normal(jax.random.key(0), (rows, 4096), jnp.bfloat16)
    scale = jnp.ones(4096)
    amount = 2 * 2 * x.size
    with jax.set_mesh(mesh()):
        named = {
            "RMS norm": lambda x: ops.rms_norm(x, scale, "BE", "E"),
            "softmax": lambda x: jax.nn.softmax(x, axis=-1) + x,
            "transpose": lambda x: x.T.reshape(x.shape) + 1,
            "rows gathered": lambda x: x[(jnp.arange(rows) * 7919 + x[0, 0].astype(int)) % rows],
            "scatter-add": lambda x: x.at[(jnp.arange(rows) * 7919) % rows].add(x),
            "top 2 of 64": lambda x: x + lax.top_k(x.reshape(-1, 64), 2)[0].sum().astype(x.dtype) * 0,
        }
        for name, run in named.items():
            took, spread = microseconds(run, x, 4 if small else 100)
            yield {"what": f"{name}, [{rows}, 4096]", "us": took, "spread": spread, "gbps": amount / took / 1e3,
                   "bytes": amount}  # fmt: skip
    tiny = jax.jit(lambda x: x + 1)
    y = tiny(jnp.zeros(8))
    begun = time.perf_counter()
    for _ in range(1000):
        y = tiny(y)
    jax.block_until_ready(y)
    yield {"what": "launch of a program from the host", "us": (time.perf_counter() - begun) * 1e3, "spread": 0.0}


def causal_flops(length: int, batch: int = 0, heads: int = 32, depth: int = 128) -> int:
    """Return the FLOPs of causal attention, which are half of the FLOPs of its two products.

    The mask leaves out the other half. Batch 0 means 16384 tokens in all.
    """
    return 2 * (batch or 16384 // length) * heads * length * length * depth


def attention(small: bool) -> Iterator[Row]:
    """Time causal attention in gspmd and in `jax.nn.dot_product_attention`."""
    for length in (128,) if small else (2048, 8192):
        batch, heads, groups, depth = (1, 4, 2, 64) if small else (16384 // length, 32, 8, 128)
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (jax.random.normal(key, (batch, length, n, depth), jnp.bfloat16)
                   for key, n in zip(keys, (heads, groups, groups)))  # fmt: skip
        flops = causal_flops(length, batch, heads, depth)
        ways = {"gspmd": lambda q, k, v: ops.attention(q, k, v, "BLHD", "BLKD", causal=True)}
        for how in ("xla", "cudnn"):
            ways[how] = partial(jax.nn.dot_product_attention, is_causal=True, implementation=how)
        with jax.set_mesh(mesh()):
            for name, run in ways.items():
                try:
                    took, spread = microseconds(run, q, 2 if small else 10, k, v)
                except Exception as fault:
                    yield {"what": f"{name}, length {length}", "failed": f"{type(fault).__name__}: {fault}"[:200]}
                    continue
                yield {"what": f"{name}, length {length}", "us": took, "spread": spread, "tflops": flops / took / 1e6}


def experts(small: bool) -> Iterator[Row]:
    """Time the expert layer and a dense layer with the same FLOPs, forward and backward."""
    batch, length, embed, hidden = (2, 64, 64, 128) if small else (16, 2048, 2048, 8192)
    x = jax.random.normal(jax.random.key(0), (batch, length, embed), jnp.bfloat16)
    layout, dtype = Layout.load("gshard").section("moe"), jnp.bfloat16
    w_in, w_out = (jax.random.normal(jax.random.key(n), shape, dtype) / 50
                   for n, shape in ((1, (embed, hidden)), (2, (hidden, embed))))  # fmt: skip

    def dense(x, weights):
        return jnp.matmul(jax.nn.relu(jnp.matmul(x, weights[0])), weights[1])

    def timed(layer, weights, trips):
        def run(x, weights):
            out, pull = jax.vjp(layer, x, weights)
            dx, dw = pull(out)
            # The next trip depends on every gradient, but its values hardly change.
            return x + (0.001 * dx + sum(each.mean() * 1e-9 for each in jax.tree.leaves(dw))).astype(x.dtype)

        return microseconds(run, x, trips, weights, rounds=3)

    with jax.set_mesh(mesh()):
        x = _placed(x, layout, "groups")
        base, spread = timed(dense, (w_in, w_out), 2 if small else 10)
        flops = 3 * 2 * 2 * batch * length * embed * hidden
        yield {"what": "dense, forward and backward", "us": base, "spread": spread, "tflops": flops / base / 1e6}
        for router, k, dispatch in (("switch", 1, "sort"), ("top-k", 1, "dropless"), ("gshard", 2, "sort")):
            given = {"k": k} if router == "top-k" else {}
            config = MoEConfig(experts=8, router=router, dispatch=dispatch, **given)
            weights = {"router": jax.random.normal(jax.random.key(3), (embed, 8)),
                       "w_in": jnp.broadcast_to(w_in, (8, embed, hidden)) + 0,
                       "w_out": jnp.broadcast_to(w_out, (8, hidden, embed)) + 0}  # fmt: skip
            weights = {name: _placed(value, layout, name) for name, value in weights.items()}
            layer = lambda x, w: expert_layer(x, w, layout, config, activation="relu", train=True)[0]  # noqa: E731, B023
            took, spread = timed(layer, weights, 2 if small else 10)
            yield {"what": f"8 experts, {router}, k = {k}, {dispatch}", "us": took, "spread": spread,
                   "of dense, FLOPs alike": took / (k * base)}  # fmt: skip


def grouped(small: bool) -> Iterator[Row]:
    """Time products of rows sorted by expert, in each form of the product, and a dense product with the same FLOPs."""
    rows, embed, hidden = (256, 64, 128) if small else (32768, 2048, 8192)
    x = jax.random.normal(jax.random.key(0), (rows, embed), jnp.bfloat16)
    flops = 3 * 2 * rows * embed * hidden

    def both(product, x, w):  # forward and backward
        out, pull = jax.vjp(product, x, w)
        dx, dw = pull(out)
        return x + (0.001 * dx + dw.mean() * 1e-9).astype(x.dtype)

    w = jax.random.normal(jax.random.key(1), (embed, hidden), jnp.bfloat16) / 50
    base, spread = microseconds(partial(both, jnp.matmul), x, 2 if small else 10, w, rounds=3)
    yield {"what": "dense", "us": base, "spread": spread, "tflops": flops / base / 1e6}
    for experts in (4,) if small else (8, 64):
        sizes = jnp.full(experts, rows // experts)
        for form in FORMS:
            product = lambda x, w: grouped_matmul(x, w, sizes, form=form)  # noqa: E731, B023
            each = jnp.broadcast_to(w, (experts, embed, hidden)) + 0
            took, spread = microseconds(partial(both, product), x, 2 if small else 5, each, rounds=3)
            yield {"what": f"{experts} experts, {form}", "us": took, "spread": spread, "tflops": flops / took / 1e6,
                   "of dense": took / base}  # fmt: skip


def training(small: bool) -> Iterator[Row]:
    """Time whole training steps, and compare their time and their memory with the plan."""
    tiny = ModelConfig(vocabulary=256, embed=64, layers=2, heads=4, kv_heads=2, head_size=16, feed_forward=128)
    chip, one, before = card(), mesh(), 0.0
    for name, each in STEPS.items() if not small else [("tiny", Step(tiny, 4, 64))]:
        config, batch, length, layout = each.config, each.batch, each.length, Layout.load(each.layout)
        with jax.set_mesh(one):
            model = build(config, layout, one, jax.random.key(0), each.dtype)
            made = step.training_step(model, OptimizerConfig(), 100)
            state = step.initial_state(model, OptimizerConfig(), 100, one)
            del model
            tokens = np.random.default_rng(0).integers(0, config.vocabulary, (batch, length + 1)).astype("int32")
            data = jax.device_put(tokens, jax.NamedSharding(one, batch_spec(layout).partition_spec()))
            with gspmd.lowering("blocking"), planned_for(chip):
                planned = gspmd.trace(made, state, data, abstract_key(one)).seconds
            update = jax.jit(made, donate_argnums=0).lower(state, data, jax.random.key(0)).compile()
            took = []
            for number in range(8):
                begun = time.perf_counter()
                state, figures = update(state, data, jax.random.key(number))
                jax.block_until_ready(figures)
                took.append(time.perf_counter() - begun)
        seconds = median(took[2:])
        flops = config.flops_per_token(length) * batch * length
        row = {"what": f"{name}, {batch} x {length}", "us": seconds * 1e6,
               "spread": (max(took[2:]) - min(took[2:])) / seconds,
               "tflops": flops / seconds / 1e12, "MFU": flops / seconds / chip.flops("bfloat16"),
               "tokens/s": batch * length / seconds, "planned us": planned * 1e6,
               "GB": update.memory_analysis().peak_memory_in_bytes / 1e9}  # fmt: skip
        del state, figures, update
        # The allocator's peak is that of the process so far: it is the peak of this step only if it has risen.
        used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
        yield row | ({"GB of the process": used} if used > before else {})
        before = used


def decoding(small: bool) -> Iterator[Row]:
    """Time decode steps with a full cache, and compare them with their plan."""
    tiny = ModelConfig(vocabulary=256, embed=64, layers=2, heads=4, kv_heads=2, head_size=16, feed_forward=128)
    one, model = mesh(), tiny if small else llama_8b()
    for name, each in DECODED.items() if not small else [("tiny", Decoding(2, 64))]:
        served = decoded(each, model, one)
        with jax.set_mesh(one), gspmd.lowering("blocking"):
            with planned_for(card()):
                planned = gspmd.trace(served.step, *served.arguments).seconds
            weights, tokens, cache = jax.tree.map(filled, served.arguments)
            cache = replace(cache, lengths=jnp.full_like(cache.lengths, each.room - 64))
            run, took = jax.jit(served.step, donate_argnums=2), []
            for _ in range(6):
                begun = time.perf_counter()
                for _ in range(8):
                    logits, cache = run(weights, tokens, cache)
                jax.block_until_ready(logits)
                took.append((time.perf_counter() - begun) / 8)
        seconds = median(took[1:])
        yield {"what": name, "us": seconds * 1e6, "spread": (max(took[1:]) - min(took[1:])) / seconds,
               "tokens/s": each.rows / seconds, "planned us": planned * 1e6}  # fmt: skip
        del weights, cache, logits


def llama_8b() -> ModelConfig:
    """Return the model of the decode steps."""
    return from_mapping(ModelConfig, tomllib.loads((ROOT / "configs" / "llama-3.1-8b.toml").read_text())["model"])


def decoded(each: Decoding, config: ModelConfig, on: jax.sharding.Mesh) -> Any:
    """Return the program of a decode step, with abstract arguments."""
    layout, stored = Layout.load("weight-stationary-1d"), None if each.weights == "bfloat16" else each.weights
    return serving_program(config, layout, on, "decode", batch=each.rows, room=each.room, weights=stored)


def filled(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of equal small numbers, with the shape, dtype and sharding of an abstract array.

    Products of equal numbers draw less power than products of real weights. So a step that is bound by products may be
    somewhat faster here than in use. Decode steps are bound by memory instead.
    """
    return jax.jit(lambda: jnp.full(x.shape, 1 if jnp.issubdtype(x.dtype, jnp.integer) else 0.01, x.dtype),
                   out_shardings=x.sharding)()  # fmt: skip


def card() -> Any:
    """Return the figures of the card, found by its name; if the card is not listed, return the figures of an H100."""
    kind = jax.devices()[0].device_kind.lower()
    return next((chip for name, chip in CHIPS.items() if name in kind.replace(" ", "-")), CHIPS["h100"])


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "agreement": agreement, "products": products, "kernels": kernels, "training": training, "decoding": decoding,
    "attention": attention, "experts": experts, "grouped": grouped,
}  # fmt: skip


def head() -> dict[str, str]:
    """Return the card, the driver and the versions of software."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        smi = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        smi = ""
    device = jax.devices()[0]
    return {"card": smi or device.device_kind, "platform": device.client.platform_version.splitlines()[0],
            "jax": jax.__version__, "python": platform.python_version()}  # fmt: skip


def markdown(facts: dict[str, str], rows: list[Row]) -> str:
    """Return all rows as tables, one for each part."""
    lines = [", ".join(f"{name} {text}" for name, text in facts.items())]
    for part in dict.fromkeys(row["part"] for row in rows):
        of = [row for row in rows if row["part"] == part]
        hidden = ("part", "groups", "m", "k", "n", "bytes")
        columns = list(dict.fromkeys(name for row in of for name in row if name not in hidden))
        lines += ["", f"**{part}**", "", f"| {' | '.join(columns)} |", "|:--" + "|--:" * (len(columns) - 1) + "|"]
        for row in of:
            cells = (row.get(name, "") for name in columns)
            lines.append(
                "| " + " | ".join(f"{each:.3g}" if isinstance(each, float) else str(each) for each in cells) + " |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the parts, and write all results so far after each row."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--small", action="store_true", help="sizes that fit a CPU")
    flags.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas")
    flags.add_argument("--out", default="", help="folder for table.md and results.json; printed if not given")
    flags.add_argument("--budget", type=float, default=300.0, help="seconds after which no further row starts")
    asked = flags.parse_args()
    begun, facts, rows = time.perf_counter(), head(), list[Row]()
    for part in asked.parts.split(","):
        made = PARTS[part](asked.small)
        while time.perf_counter() - begun < asked.budget:
            try:
                row = next(made)
            except StopIteration:
                break
            except Exception:
                traceback.print_exc()
                row = {"what": f"the rest of {part}", "failed": traceback.format_exc().splitlines()[-1][:200]}
            rows.append({"part": part, **row})
            print(f"{time.perf_counter() - begun:6.1f} s", rows[-1], file=sys.stderr, flush=True)
            if asked.out:
                Path(asked.out).mkdir(parents=True, exist_ok=True)
                (Path(asked.out) / "results.json").write_text(json.dumps({**facts, "rows": rows}, indent=1))
                (Path(asked.out) / "table.md").write_text(markdown(facts, rows))
        else:
            rows.append({"part": part, "what": "cut by --budget"})
    print(markdown(facts, rows))


if __name__ == "__main__":
    main()
