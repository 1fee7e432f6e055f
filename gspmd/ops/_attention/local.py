"""Attention to keys that are all on the device.

If there are few logits, JAX's function computes the attention. Otherwise a kernel computes it, or it runs in blocks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from gspmd.lowerings import in_force
from gspmd.ops._attention.blocks import Blocks, Form, attended, attention_in_blocks, gradients
from gspmd.ops._attention.online import LOW, Attended, attend, group, ungroup
from gspmd.ops._attention.terms import UNLIMITED, Terms
from gspmd.ops._attention.together import attend_together, suits

Shards = tuple[int, int, int, int]
"""The numbers of shards into which the compiler cuts rows, heads, queries and keys.

All four are 1 if the arrays are those of one device.
"""
ALONE: Shards = (1, 1, 1, 1)

MIXED = "attention.mixed"
"""The name by which `jax.checkpoint` can save the results of attention and the arrays that the gradient reads."""


def local_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    terms: Terms,
    causal: bool,
    scale: float | None,
    shards: Shards = ALONE,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax attention of queries [B, L, H, D] to keys [B, T, K, D].

    If a device has more than 2**25 logits, they are never all in memory at once. A GPU then runs cuDNN's fused
    attention, if cuDNN supports the arrays and options: float16 or bfloat16, a head size up to 128 that is a multiple
    of 8, no mask except `causal`, and no window, chunk, soft cap, bias or sinks. In all other cases with so many
    logits, attention runs in blocks. On a TPU the caller has already tried splash attention.

    Args:
        q, k, v: the arrays of one device, or those of all devices for the compiler to partition.
        terms: the mask of the keys, the soft cap, and the biases of the logits.
        causal: whether query i attends only to keys j ≤ i + terms.ahead.
        scale: the factor of the logits; 1/sqrt(D) when None.
        shards: the number of shards of each dimension, if the arrays are those of all devices.
        sinks: [H], an additional logit for each head, without a value; None if there are no sinks.
    """
    blocks = _blocks(q, k.shape[1], shards, terms)
    if blocks is None:
        return _plain(q, k, v, terms, causal, scale, sinks)
    plain = terms.is_plain and terms.limits == UNLIMITED and sinks is None
    if plain and not (causal and terms.ahead is not None) and _fits_cudnn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal, implementation="cudnn")
    form = Form(blocks, q.shape[3] ** -0.5 if scale is None else scale, causal)
    terms = terms.with_more_queries(-q.shape[1] % blocks.queries)
    found = attention_in_blocks(form, _padded(group(q, k.shape[2]), blocks), k, v, terms, sinks)
    return ungroup(found[:, :, :, : q.shape[1]])


def at_one_width(
    attend: Callable[..., tuple[jax.Array, ...]], q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, ...]:
    """Call `attend` with arrays of the same D: pad the narrower arrays along D, and cut the result to the values' D.

    Args:
        attend: a function of queries, keys and values. It returns a tuple with the result [B, L, H, D] first, and
            perhaps more arrays, which are not cut.
        q, k, v: [B, L, H, D] and [B, T, K, D]; each may have a D of its own.
    """
    width = max(x.shape[3] for x in (q, k, v))
    if q.shape[3] == k.shape[3] == v.shape[3]:
        return attend(q, k, v)
    padding = (((0, 0),) * 3 + ((0, width - x.shape[3]),) for x in (q, k, v))
    out, *others = attend(*(jnp.pad(x, each) if any(each[3]) else x for x, each in zip((q, k, v), padding)))
    return out[..., : v.shape[3]], *others


def _plain(q, k, v, terms: Terms, causal, scale, sinks) -> jax.Array:
    dtype = q.dtype
    if in_force.is_host() and dtype == jnp.float16:  # XLA has no float16 products for CPUs
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if sinks is not None or terms.limits.softcap is not None:  # JAX's function supports neither
        found = _attended(q, k, v, terms, causal, q.shape[3] ** -0.5 if scale is None else scale)
        return found.with_sinks(sinks).output(dtype)
    visible, ahead = terms.visible(), terms.ahead
    mask = None if visible is None else visible[:, None]
    if causal and (mask is not None or ahead is not None):
        # These are positions in the whole sequence: JAX's `is_causal` assumes that the first query and key are at one
        # position.
        rows = (0 if ahead is None else ahead) + jax.lax.broadcasted_iota(jnp.int32, (1, 1, q.shape[1], k.shape[1]), 2)
        past = rows >= jax.lax.broadcasted_iota(jnp.int32, rows.shape, 3)
        mask, causal = past if mask is None else mask & past, False
    if v.shape[3] != k.shape[3]:  # JAX's function does not support this either
        if causal:
            mask = jnp.tril(jnp.ones((1, 1, q.shape[1], k.shape[1]), bool))
        found = _softmaxed(q, k, v, terms, mask, scale).astype(dtype)
    else:
        added = terms.added(terms.chosen(), 1)
        added = None if added is None else added[:, 0]
        found = jax.nn.dot_product_attention(q, k, v, added, mask, scale=scale, is_causal=causal).astype(dtype)
    if mask is None:
        return found
    return jnp.where(jnp.any(mask, axis=3)[:, 0, :, None, None], found, 0)  # without a key, JAX returns the mean


def _softmaxed(q, k, v, terms: Terms, mask: jax.Array | None, scale: float | None) -> jax.Array:
    """Compute attention as JAX's function does, but for values of any width.

    A query that sees no key gets the mean of the values. `_attended` computes the same attention, but keeps 1.5 times
    as many bytes for its gradient, because it also keeps the statistics, and the weights before they are divided by the
    denominator.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    logits = jnp.einsum("bkqld,btkd->bkqlt", group(q, k.shape[2]), k, preferred_element_type=jnp.float32) * scale
    if (added := terms.added(terms.chosen(), k.shape[2])) is not None:
        logits += added
    if mask is not None:
        logits = jnp.where(mask[:, :, None], logits, LOW)
    weights = jax.nn.softmax(logits, axis=-1).astype(k.dtype)
    return ungroup(jnp.einsum("bkqlt,btkd->bkqld", weights, v))


def local_attended(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    terms: Terms,
    causal: bool,
    scale: float,
    *scales: jax.Array,
    width: int | None = None,
    shards: Shards = ALONE,
) -> Attended:
    """Attend to some of the keys, in blocks if there are many logits, and also return the statistics [B, L, H].

    Args:
        q, k, v, terms, causal, scale: the arguments of `local_attention`.
        scales: nothing, or the scales [B, T, K] of int8 keys and of int8 values, which may be followed by the
            `rest_scales` of `online.attend`.
        width: the number of entries of a key before those of `rest_scales`, as in `online.attend`.
        shards: the number of shards of each dimension, if the arrays are those of all devices.
    """
    blocks = _blocks(q, k.shape[1], shards, terms)
    if q.shape[1] == 1 < k.shape[1] and not causal and in_force.is_tpu():
        simple = terms.segments is None and terms.limits.reach is None and not terms.adds
        if shards == ALONE and blocks is None and simple and suits(q.shape[2], k.shape[2], bool(scales)):
            return attend_together(q, k, v, terms.seen, scale, *scales, width=width, limits=terms.limits)
        if q.shape[2] == k.shape[2]:
            # The TPU compiler uses elementwise code for products with one row, which takes twice as long as reading the
            # cache: 232 µs per layer, against 104 µs with two rows (libtpu 0.0.42, v4: 64 rows, 2048 keys of 128).
            two = jnp.pad(q, ((0, 0), (0, 1), (0, 0), (0, 0)))
            terms = terms.with_more_queries(1)
            found = local_attended(two, k, v, terms, causal, scale, *scales, width=width, shards=shards)
            return Attended(*(x[:, :1] for x in found))
    if blocks is None:
        return _attended(q, k, v, terms, causal, scale, *scales, width=width)
    form = Form(blocks, scale, causal, width)
    terms = terms.with_more_queries(-q.shape[1] % blocks.queries)
    found = attended(form, _padded(group(q, k.shape[2]), blocks), k, v, terms, jnp.float32, scales)
    output, top, total = (x[:, :, :, : q.shape[1]] for x in found)
    return Attended(top, total, output * total[..., None]).by_query()


def _attended(
    q, k, v, terms: Terms, causal: bool, scale: float, *scales: jax.Array, width: int | None = None
) -> Attended:
    """Compute the result of `local_attended` with all logits in memory at once."""
    visible = terms.visible()
    visible = None if visible is None else visible[:, None, None]
    if causal:
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, q.shape[1], k.shape[1]), at) for at in (3, 4))
        past = rows + (0 if terms.ahead is None else terms.ahead) >= columns
        visible = past if visible is None else visible & past
    bias, limits = terms.added(terms.chosen(), k.shape[2]), terms.limits
    grouped = group(q, k.shape[2])
    of_scales = dict(zip(("key_scales", "value_scales", "rest_scales"), scales))
    return attend(grouped, k, v, visible, scale, width=width, bias=bias, limits=limits, **of_scales).by_query()


def local_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    terms: Terms,
    causal: bool,
    scale: float,
    out: jax.Array,
    normaliser: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return the float32 gradients that come from some of the keys.

    They are the contribution of these keys to the gradient of the queries, and the gradients of the keys and of their
    values. If there is a bias, the last result is the contribution of these keys to the gradient [R, H] of the bias.

    Args:
        q, k, v, terms, causal, scale: the arguments of `local_attention`.
        out: [B, L, H, D], the output of the queries for all keys to which they attend.
        normaliser: [B, L, H], log Σ exp over all logits of a query.
        g: [B, L, H, D], the cotangent of `out`.
    """
    if not (q.size and k.size):
        return tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v, *terms.table))
    blocks = _blocks(q, k.shape[1], ALONE, terms) or Blocks(q.shape[0], q.shape[1], k.shape[1])
    length, (q, out, normaliser, g) = (
        q.shape[1],
        (_padded(group(x, k.shape[2]), blocks) for x in (q, out, normaliser, g)),
    )
    kept = q, k, v, terms.with_more_queries(-length % blocks.queries), out, normaliser, jnp.ones_like(normaliser)
    d_q, *rest = gradients(Form(blocks, scale, causal), kept, g)
    return ungroup(d_q[:, :, :, :length]), *rest


def _blocks(q: jax.Array, keys: int, shards: Shards, terms: Terms) -> Blocks | None:
    """Return the blocks for one device's part of the arrays, or None if all logits fit in one block.

    Blocks do not cut a dimension that the compiler shards already.
    """
    rows, queries, heads, _ = q.shape
    numbers = heads // shards[1]
    if terms.bias is not None:  # the one-hot buckets of a bias have R numbers for each pair of a query and a key
        numbers = max(numbers, terms.bias.buckets.count)
    blocks = Blocks.of(rows // shards[0], numbers, queries // shards[2], keys // shards[3])
    if blocks is None or shards == ALONE:
        return blocks
    whole = zip((rows, queries, keys), (blocks.rows, blocks.queries, blocks.keys), (shards[0], *shards[2:]))
    return Blocks(*(size if cut > 1 else block for size, block, cut in whole))


def _padded(q: jax.Array, blocks: Blocks) -> jax.Array:
    """Return queries [B, K, Q, L, ...] padded along L to a whole number of blocks; callers drop the padding later."""
    return jnp.pad(q, ((0, 0),) * 3 + ((0, -q.shape[3] % blocks.queries),) + ((0, 0),) * (q.ndim - 4))


def _fits_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Return whether the devices are GPUs whose cuDNN attention supports these arrays.

    This has not been tested on a GPU.
    """
    narrow = q.dtype == k.dtype and q.dtype in (jnp.float16, jnp.bfloat16) and v.shape[3] == k.shape[3]
    return in_force.device_kind().startswith("NVIDIA") and narrow and q.shape[3] % 8 == 0 and q.shape[3] <= 128
