"""Causal self-attention on TPUs by splash attention, the Pallas kernels that come with JAX.

The backward pass reads the output of the forward pass and the logarithms of the softmax denominators. It runs two
kernels: one for the gradient of the queries, and one for the gradients of keys and values. JAX offers these kernels
only behind its own `jax.custom_vjp`, which would run the forward kernel again. So this file calls them by their private
names; no other file does. JAX also has one kernel for all three gradients, with five products instead of seven. But for
every block of keys it returns a separate part of the queries' gradient, and the sum of these parts costs more than the
kernel saves. For 4 rows of 64 heads and 4,096 tokens, the one kernel takes 12.5 ms, of which the sum takes 4.9 ms, and
the two kernels take 11.6 ms (libtpu 0.0.42, v5p).
"""

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.lowerings import in_force
from gspmd.ops._attention import blocks
from gspmd.ops._attention.online import group, ungroup
from gspmd.ops._attention.terms import UNLIMITED, Limits, Terms, positions
from gspmd.ops.interface.kernels import KernelWork

_WITHOUT = "TPU v2", "TPU v3"
"""Chips for which the kernels do not compile, because the chips' matrix units do not read bfloat16 from memory."""
_LANES = 128
_LONGEST = 1024, 512
"""The largest number of queries or keys in a block, and the largest number of keys in a product.

They are the fastest ones according to the compiler's schedules for v5p and v6e.
"""
_WIDEST = 512
"""The largest number of bytes in the D elements of a head for which blocks may be as long as `_LONGEST` says.

Blocks of wider heads may only be half as long, so that they fit into the memory of the core.
"""
_STEP = 2**17
"""The fixed cost of a step of the grid, given as the number of logits that take the same time.

According to the compiler's schedules of the three kernels together, a step costs 0.6 µs, and 65,536 logits of heads of
size 128 take 0.3 µs (libtpu 0.0.42, v5p).
"""
_PRECISIONS = None, "default", "fastest", "bfloat16"
"""The values of the option `jax_default_matmul_precision` that stand for JAX's default precision of products.

The kernels do not compile for other precisions.
"""
_MOST = 64
"""The largest number of blocks of queries.

There is a limit because JAX visits all blocks of a mask in Python, and the core holds a table of these blocks.
"""


def fits(q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct, v: jax.ShapeDtypeStruct) -> bool:
    """Return whether the kernels are used for queries [B, L, H, D], and keys and values [B, L, K, D].

    The devices must be TPUs other than v2 and v3. The kernels compute causal self-attention on one device, in bfloat16
    or float32, with products in JAX's default precision, and with any window, chunk, soft cap and sinks. They are used
    only if there are too many logits for memory.
    """
    if not in_force.is_tpu() or in_force.device_kind() in _WITHOUT:
        return False
    config: Any = jax.config  # in JAX 0.10 its type hints lack the options
    if config.jax_default_matmul_precision not in _PRECISIONS:
        return False
    if q.shape[1] != k.shape[1] or not q.dtype == k.dtype == v.dtype:
        return False
    if _Schedule.of(q.shape[1], q.shape[3] * q.dtype.itemsize).count > _MOST:
        return False
    logits = q.shape[0] * q.shape[2] * q.shape[1] ** 2
    return q.dtype in (jnp.bfloat16, jnp.float32) and logits > blocks.LARGEST


@dataclass(frozen=True)
class Form:
    """The options of the kernels: the factor of the logits, the window or chunk, and the soft cap."""

    scale: float
    limits: Limits = UNLIMITED


@dataclass(frozen=True)
class _Schedule:
    """The blocks of the kernels.

    There are as many queries as keys, and queries and keys are padded at the end to a whole number of blocks. The
    padding comes after every query, so no query sees it in causal attention. With a window or a chunk, shorter blocks
    may be faster, since they contain fewer keys that no query sees.
    """

    count: int
    block: int
    limits: Limits

    @classmethod
    def of(cls, length: int, head_bytes: int, limits: Limits = UNLIMITED) -> "_Schedule":
        longest = _LONGEST[0] if head_bytes <= _WIDEST else _LONGEST[0] // 2
        whole, *shorter = (cls._cut(length, longest // parts, limits) for parts in (1, 2, 4))
        if limits.reach is None:
            return whole
        fitting = [each for each in shorter if each.block > _LANES and each.count <= _MOST]
        return min((whole, *fitting), key=lambda each: (each._cost, each.count))

    @classmethod
    def _cut(cls, length: int, longest: int, limits: Limits) -> "_Schedule":
        count = ceil(length / max(longest, _LANES))
        return cls(count, ceil(length / count / _LANES) * _LANES, limits)

    @property
    def _cost(self) -> int:
        """The estimated time of the kernels for one head, in units of the time for one logit."""
        return sum(self.seen) * (self.block**2 + _STEP)

    @property
    def _first(self) -> list[int]:
        """The index of the first block of keys that each block of queries sees.

        The last block of keys that block i of the queries sees is block i of the keys.
        """
        if self.limits.reach is None:
            return [0] * self.count
        return [max(self.limits.first(at * self.block) // self.block, 0) for at in range(self.count)]

    @property
    def seen(self) -> list[int]:
        """The number of blocks of keys that each block of queries sees."""
        return [at + 1 - first for at, first in enumerate(self._first)]

    @property
    def seeing(self) -> list[int]:
        """The number of blocks of queries that see each block of keys."""
        return [sum(first <= at for first in self._first[at:]) for at in range(self.count)]

    @property
    def length(self) -> int:
        return self.count * self.block

    def kernel(self) -> Any:
        # imported here and below: importing Pallas takes a third of a second, and other attention does not need it
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import (
            CausalMask,
            ChunkedCausalMask,
            LocalMask,
            MultiHeadMask,
        )

        lanes = self.block // _LANES
        product = _LANES * max(n for n in range(1, _LONGEST[1] // _LANES + 1) if lanes % n == 0)
        sizes = splash.BlockSizes(
            block_q=self.block, block_kv=self.block, block_kv_compute=product,
            block_q_dkv=self.block, block_kv_dkv=self.block, block_kv_dkv_compute=product,
            block_q_dq=self.block, block_kv_dq=self.block,
        )  # fmt: skip
        # All heads have the same mask.
        shape, window, chunk = (self.length, self.length), self.limits.window, self.limits.chunk
        mask: Any = CausalMask(shape)
        if window is not None:
            mask = LocalMask(shape, (window - 1, 0), offset=0)
        elif chunk is not None:
            mask = ChunkedCausalMask(shape, chunk)
        options = {"block_sizes": sizes, "save_residuals": True, "attn_logits_soft_cap": self.limits.softcap}
        return splash.make_splash_mqa_single_device(MultiHeadMask([mask]), **options)

    def work(self, q: jax.Array, k: jax.Array, products: int) -> KernelWork:
        """Return the work of a kernel, from which tools count the kernel's FLOPs and bytes.

        `products` is the number of products for each block. It is 2 in the forward kernel, 3 in the kernel for the
        gradient of the queries, and 4 in the kernel for the gradients of keys and values.
        """
        rows, _, heads, size = q.shape
        of_head, width = rows * heads, size * q.dtype.itemsize
        seen = sum(self.seen)
        # Each kernel reads or writes two arrays with the length of the queries and two with the length of the keys;
        # some of them for every block, the others once. Statistics, of 32 bits, have 128 copies in the forward kernel,
        # 1 in the kernel for queries and 8 in the kernel for keys.
        blocks, once = 2 * of_head * seen * self.block * width, 2 * of_head * self.length * width
        keys, statistics = 2 * rows * k.shape[2] * self.length * width, 4 * of_head * self.length
        moved = {
            2: blocks + once + _LANES * statistics,
            3: blocks + once + of_head * self.length * width + 2 * statistics,
            4: blocks + 2 * keys + 16 * statistics * seen // self.count,
        }
        return KernelWork(
            flops=2 * products * of_head * seen * self.block**2 * size,
            bytes=moved[products],
            # The kernels shrink the grid to the largest number of blocks that one block sees, or that see one block.
            steps=of_head * self.count * max(self.seeing if products == 4 else self.seen),
            blocks=of_head * seen,
            rows=(rows * k.shape[2] if products == 4 else of_head) * self.count,
        )

    def by_key_head(self, x: jax.Array, key_heads: int) -> jax.Array:
        """Return an array [B, L, H, ...] as [B·K, Q, L, ...], padded along L to a whole number of blocks.

        The two cores of a chip divide the work along B·K.
        """
        x = jnp.pad(x, ((0, 0), (0, self.length - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        x = group(x, key_heads)
        return x.reshape(-1, *x.shape[2:])

    def segments(self, x: jax.Array | None, key_heads: int) -> Any:
        """Return segments [B, L] as [B·K, L], repeated for every key head and padded along L to whole blocks.

        The result has this array twice, for the queries and for the keys. It is None if there are no segments.
        """
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        if x is None:
            return None
        x = jnp.repeat(jnp.pad(x, ((0, 0), (0, self.length - x.shape[1]))), key_heads, axis=0)
        return splash.SegmentIds(x, x)

    def by_query(self, x: jax.Array, q: jax.Array) -> jax.Array:
        """Return an array [B·K, Q, L, ...] as [B, L, H, ...], without padding: the result has the L of `q`."""
        x = ungroup(x.reshape(q.shape[0], -1, *x.shape[1:]))
        return x[:, : q.shape[1]]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def attended(
    form: Form, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Compute causal attention [B, L, H, D] on one device, and the normalizer [B, L, H] of each query, in float32.

    The normalizer is log Σ exp over the logits of a query and the sink of its head. The derivatives of this function
    are computed by attention in blocks.

    Args:
        form: the factor of the logits, the window or the chunk, and the soft cap.
        q: [B, L, H, D].
        k, v: [B, L, K, D]; K divides H.
        segments: [B, L] int32, the segments of the tokens, which are both queries and keys; None if there are no
            segments. Here, tokens of segment 0 attend to each other.
        sinks: [H], an additional logit for each head, without a value; None if there are no sinks.
    """
    schedule = _Schedule.of(q.shape[1], q.shape[3] * q.dtype.itemsize, form.limits)
    scaled, keys, values = (schedule.by_key_head(x, k.shape[2]) for x in (_scaled(q, form.scale), k, v))
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(k.shape[2], -1), (q.shape[0], 1))  # [B·K, Q], in the order of `by_key_head`
    with schedule.work(q, k, products=2).scope():
        ids = schedule.segments(segments, k.shape[2])
        out, (normaliser,) = jax.vmap(schedule.kernel())(scaled, keys[:, 0], values[:, 0], ids, sinks)
    return schedule.by_query(out, q), schedule.by_query(normaliser, q)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def gradients(
    form: Form, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, out: jax.Array,
    normaliser: jax.Array, g: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients of queries, keys and values, from the results of `attended` and the output's cotangent.

    `out` and `normaliser` are the results of `attended`, and `g` is the cotangent of `out`.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    schedule = _Schedule.of(q.shape[1], q.shape[3] * q.dtype.itemsize, form.limits)
    kernel, block = schedule.kernel(), schedule.block
    scaled, keys, values, out, normaliser, g = (
        schedule.by_key_head(x, k.shape[2]) for x in (_scaled(q, form.scale), k, v, out, normaliser, g)
    )
    mean = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    options = {name: kernel.kwargs[name] for name in ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function")}
    options |= dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash.QKVLayout.HEAD_DIM_MINOR)
    options |= {"bq": block, "bkv": block, "interpret": kernel.kwargs["interpret"]}

    def of_queries(q, k, v, ids, normaliser, g, mean):
        info = kernel.dq_mask_info
        return splash._splash_attention_bwd_dq(q, k, v, ids, None, normaliser, g, mean, mask_info=info, **options)

    def of_keys(q, k, v, ids, normaliser, g, mean):
        rest = {"mask_info": kernel.dkv_mask_info, "bkv_compute": kernel.kwargs["block_sizes"].block_kv_dkv_compute}
        return splash._splash_attention_bwd_dkv(
            q, k, v, ids, None, normaliser, g, mean, use_fused_bwd_kernel=False, **rest, **options
        )[1:]

    operands = scaled, keys[:, 0], values[:, 0], schedule.segments(segments, k.shape[2]), normaliser, g, mean
    with schedule.work(q, k, products=3).scope():
        d_q = jax.vmap(of_queries)(*operands)
    with schedule.work(q, k, products=4).scope():
        d_keys = jax.vmap(of_keys)(*operands)
    d_k, d_v = (schedule.by_query(x[:, None], q) for x in d_keys)
    return _scaled(schedule.by_query(d_q, q), form.scale), d_k, d_v


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


# -- derivatives of `attended` and `gradients`, which the kernels lack ----------------------------------------------


@attended.defjvp
def _attended_tangent(form, primals, tangents):
    segments, sinks = primals[3:]

    def in_blocks(q, k, v, sinks=None):
        blocked, queries = _in_blocks(form, q, k), q.shape[1]
        terms = _terms(blocked, segments, queries, form.limits)
        found = blocks.attended(blocked, _grouped(blocked, q, k), k, v, terms, q.dtype, sinks=sinks)
        out, top, total = (ungroup(x[:, :, :, :queries]) for x in found)
        return out, top + jnp.log(total)

    moving = (0, 1, 2) if sinks is None else (0, 1, 2, 4)
    return jax.jvp(in_blocks, tuple(primals[at] for at in moving), tuple(tangents[at] for at in moving))


@gradients.defjvp
def _gradients_tangent(form, primals, tangents):
    segments = primals[3]

    def in_blocks(q, k, v, out, normaliser, g):
        blocked, queries = _in_blocks(form, q, k), q.shape[1]
        q, out, normaliser, g = (_grouped(blocked, x, k) for x in (q, out, normaliser, g))
        terms = _terms(blocked, segments, queries, form.limits)
        d_q, *rest = blocks.gradients(blocked, (q, k, v, terms, out, normaliser, jnp.ones_like(normaliser)), g)
        return tuple(x.astype(k.dtype) for x in (ungroup(d_q[:, :, :, :queries]), *rest))

    return jax.jvp(in_blocks, (*primals[:3], *primals[4:]), (*tangents[:3], *tangents[4:]))


def _terms(form: blocks.Form, segments: jax.Array | None, length: int, limits: Limits) -> Terms:
    """Return the terms of the logits, with the queries padded to a whole number of blocks.

    Queries of segment 0 see no key here, unlike in the kernel.
    """
    pair = None if segments is None else (segments, segments)
    placed = None if limits.reach is None else (positions(length), positions(length))
    return Terms(segments=pair, positions=placed, limits=limits).with_more_queries(-length % form.blocks.queries)


def _in_blocks(form: Form, q: jax.Array, k: jax.Array) -> blocks.Form:
    rows, queries, heads, _ = q.shape
    found = blocks.Blocks.of(rows, heads, queries, k.shape[1]) or blocks.Blocks(rows, queries, queries)
    return blocks.Form(found, form.scale, causal=True)


def _grouped(form: blocks.Form, x: jax.Array, k: jax.Array) -> jax.Array:
    x = group(x, k.shape[2])
    return jnp.pad(x, ((0, 0),) * 3 + ((0, -x.shape[3] % form.blocks.queries),) + ((0, 0),) * (x.ndim - 4))
