"""Attention in blocks of rows, queries and keys, which is used if the logits would not all fit in memory."""

from dataclasses import dataclass
from functools import partial
from math import ceil, isqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gspmd.ops._attention.online import Attended, attend, sink_gradient, sink_statistics, ungroup
from gspmd.ops._attention.terms import UNLIMITED, Limits, Terms, biases, table_gradient

LARGEST = 2**25
"""The largest number of logits on a device, 128 MiB of float32, for which attention does not run in blocks."""
_BLOCK = 2**24
"""Number of logits in a block, which is small enough for a TPU v4 to keep the logits on the chip."""
_LENGTHS = 512, 2048
"""Two numbers: the minimum number of keys in a block, and the maximum number of queries or of keys in a block.

With fewer keys, rescaling the running sums of values takes more time than the products.
"""
_MULTIPLES = 16, 128


@dataclass(frozen=True)
class Blocks:
    """The size of a block. Blocks divide the rows and the queries evenly, but may overlap in their keys."""

    rows: int
    queries: int
    keys: int

    @classmethod
    def of(cls, rows: int, heads: int, queries: int, keys: int) -> "Blocks | None":
        """Return blocks of about `_BLOCK` logits for one device, or None if all logits fit in one block."""
        if rows * heads * queries * keys <= LARGEST:
            return None
        least, most = _LENGTHS
        key_block = _even(keys, min(max(isqrt(_BLOCK // heads), least), most), _MULTIPLES[1])
        fitting = max(_BLOCK // (heads * key_block), 1)
        query_block = _even(queries, min(fitting, most), _MULTIPLES[0])
        fitting = min(max(fitting // query_block, 1), rows)
        return cls(max(n for n in range(1, fitting + 1) if rows % n == 0), query_block, key_block)

    def starts(
        self,
        rows: int,
        queries: int,
        keys: int,
        causal: bool,
        limits: Limits = UNLIMITED,
        ahead: jax.Array | None = None,
    ) -> np.ndarray | jax.Array:
        """Return the starts of n blocks, as an array [n, 4].

        A block has four numbers: the indices of its first row, of its first query, of its first key, and of its first
        key that is not in an earlier block. Keys vary fastest.

        `causal` leaves out blocks whose keys all come after their queries. `limits` also leaves out blocks whose keys
        all come before the window or the chunk of every query in the block. Queries that see no key still have a block.

        With `limits` and `ahead` (see `Terms.ahead`), the starts depend on a number that is known only when the program
        runs. Each block of queries then has as many blocks of keys as its window can touch at most (see `in_reach`).
        """
        if ahead is not None and limits.reach is not None:
            each = [
                (row, query, number)
                for row in range(0, rows, self.rows)
                for query in range(0, queries, self.queries)
                for number in range(self.in_reach(limits.reach))
            ]
            row, query, number = np.array(each, np.int32).reshape(-1, 3).T
            key = self.first_key(query, keys, limits, ahead) + number * self.keys
            return jnp.stack([row, query, jnp.minimum(key, keys - self.keys), key], axis=1)
        return np.array(
            [
                (row, query, min(key, keys - self.keys), key)
                for row in range(0, rows, self.rows)
                for query in np.arange(0, queries, self.queries)
                for key in range(
                    self.first_key(query, keys, limits),
                    min(keys, int(query) + self.queries) if causal else keys,
                    self.keys,
                )
            ],
            np.int32,
        ).reshape(-1, 4)

    def in_reach(self, reach: int) -> int:
        """Return the largest number of blocks of keys that a block of queries can see if a query sees `reach` keys."""
        return (self.queries + reach - 1 + self.keys - 2) // self.keys + 1

    def first_key(self, query: Any, keys: int, limits: Limits, ahead: jax.Array | None = None) -> Any:
        """Return the index at which the first block of keys starts, for the block of queries that begins at `query`."""
        if limits.reach is None:
            return 0
        last = (keys - 1) // self.keys
        if ahead is None:
            first = limits.first_place(query)
        else:
            # `ahead` does not say where chunks begin, so a chunk is treated as a window of its length. All blocks in
            # reach are computed, so the first must not begin so late that the last would extend beyond the keys.
            first, last = query + ahead - limits.reach + 1, last + 1 - self.in_reach(limits.reach)
        return (first // self.keys).clip(0, last) * self.keys


def _even(size: int, most: int, multiple: int) -> int:
    """Return the length, at most about `most`, of the equal blocks into which `size` is cut.

    If there are several blocks, the length is a multiple of `multiple`.
    """
    count = ceil(size / most)
    return size if count == 1 else ceil(size / count / multiple) * multiple


@dataclass(frozen=True)
class Form:
    """The options of attention in blocks, which are everything that `attended` needs besides arrays."""

    blocks: Blocks
    scale: float
    causal: bool
    width: int | None = None
    """Number of leading entries of a key that `key_scales` apply to.

    The other entries have `rest_scales`, as in `online.attend`.
    """

    def starts(self, q: jax.Array, k: jax.Array, terms: Terms) -> np.ndarray | jax.Array:
        """Return the starts of the blocks to compute for queries [B, K, Q, L, D] and keys [B, T, K, D]."""
        causal, (limits, ahead) = self.causal and terms.ahead is None, self.reach(k.shape[1], terms)
        return self.blocks.starts(q.shape[0], q.shape[3], k.shape[1], causal, limits, ahead)

    def reach(self, keys: int, terms: Terms) -> tuple[Limits, jax.Array | None]:
        """Return the limits that decide which blocks are skipped, and `ahead` if the starts of blocks depend on it.

        The limits are `UNLIMITED` if attention is not causal, or if `terms.ahead` is given and a window or a chunk
        causes no block to be skipped. If the starts do not depend on `ahead`, None is returned in its place.
        """
        limits = terms.limits if self.causal else UNLIMITED
        # In causal attention the positions of two tokens differ by at least as much as their places in the array, also
        # in zigzag order; with `ahead` they differ by exactly as much.
        if limits.reach is None or terms.ahead is None:
            return limits, None
        few = self.blocks.in_reach(limits.reach) < ceil(keys / self.blocks.keys)
        return (limits, terms.ahead) if few else (UNLIMITED, None)


def attended(form: Form, q, k, v, terms: Terms, dtype, scales=(), sinks=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute attention block by block, and return the output, and every query's largest logit and denominator.

    Args:
        form: the sizes of blocks, the scale of the logits, and whether query i attends only to keys j ≤ i +
            terms.ahead.
        q: [B, K, Q, L, D]; L is a multiple of the number of queries in a block.
        k, v: [B, T, K, D] of any dtype. Queries and keys have the same D, but values may have another D, which is then
            also the D of the output.
        terms: the mask of the keys, the soft cap, and the biases of the logits.
        dtype: the dtype of the output.
        scales: empty, or the scales [B, T, K] of keys and of values, which may be followed by the `rest_scales` of
            `online.attend`.
        sinks: [H], an additional logit for each head, without a value; None if there are no sinks.
    """
    blocks, shape, reach = form.blocks, q.shape, form.reach(k.shape[1], terms)
    block = (blocks.rows, *shape[1:3], blocks.queries)

    def step(carry, at):
        state, out, top, total = carry
        first = at[3] == blocks.first_key(at[1], k.shape[1], *reach)
        state = Attended(*(jnp.where(first, start, x) for start, x in zip(nothing, state)))
        q_block, k_block, v_block, *of_scales = _cut(form, at, q, k, v, *scales)
        part = _terms(form, at, terms)
        visible, again = _seen(form, at, part), _again(form, at, k.shape[1])
        more = {"again": again, "bias": part.added(part.chosen(), k.shape[2]), "limits": part.limits}
        found = attend(q_block, k_block, v_block, visible, form.scale, *of_scales, width=form.width, **more)
        state = state.merge(found)
        begin = (at[0], 0, 0, at[1])
        out = jax.lax.dynamic_update_slice(out, state.output(dtype), (*begin, 0))
        top, total = (jax.lax.dynamic_update_slice(x, y, begin) for x, y in ((top, state.top), (total, state.total)))
        return (state, out, top, total), None

    begun = (jnp.full(block, -jnp.inf), jnp.zeros(block)) if sinks is None else _sinks(sinks, block)
    nothing = Attended(*begun, jnp.zeros((*block, v.shape[3])))
    results = jnp.zeros((*shape[:4], v.shape[3]), dtype), jnp.zeros(shape[:4]), jnp.zeros(shape[:4])
    return jax.lax.scan(step, (nothing, *results), form.starts(q, k, terms))[0][1:]


def _sinks(sinks: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the largest logit and the denominator [B, K, Q, L] of the sinks [H] alone."""
    return sink_statistics(sinks.reshape(*shape[1:3], 1), shape)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def attention_in_blocks(form: Form, q, k, v, terms: Terms, sinks: jax.Array | None) -> jax.Array:
    """Return softmax attention [B, K, Q, L, D]; neither the forward nor the backward pass has all logits in memory."""
    return attended(form, q, k, v, terms, q.dtype, sinks=sinks)[0]


@attention_in_blocks.defjvp
def _linearised(form: Form, primals, tangents):
    q, k, v, terms, sinks = primals
    out, top, total = attended(form, q, k, v, terms, q.dtype, sinks=sinks)
    kept, tree = jax.tree.flatten((q, k, v, terms, sinks, out, top, total))
    moving = *tangents[:3], *tangents[3].table, *(() if sinks is None else (tangents[4],))
    return out, _tangent.bind(*kept, *moving, form=form, tree=tree, batches=())


def _forward(form: Form, kept, d_q, d_k, d_v, *learned):
    """Return the tangent of the output, from the tangents of queries, keys, values and the operands in `learned`.

    `learned` has the tangents of the bias and of the sinks, if there are any. The probabilities of each block are
    recomputed from the logits of the block.
    """
    q, k, v, terms, sinks, out, top, total = kept
    d_table, d_sinks = learned[: len(terms.table)], learned[len(terms.table) :]

    def step(sums, at):
        d_out, mean = sums
        q_block, k_block, v_block, d_k_block, d_v_block = _cut(form, at, q, k, v, d_k, d_v)
        weights, capped, chosen = _weights(form, at, q_block, k_block, k.shape[1], terms, top, total)
        slope = _product("bkqld,btkd->bkqlt", _queries(form, at, d_q), k_block)
        slope = weights * (slope + _product("bkqld,btkd->bkqlt", q_block, d_k_block)) * form.scale
        slope = terms.limits.uncapped_gradient(slope, capped)
        if chosen is not None:
            slope += weights * biases(chosen, *d_table, k.shape[2])
        part = _product("bkqlt,btkd->bkqld", slope.astype(q.dtype), v_block)
        part += _product("bkqlt,btkd->bkqld", weights.astype(q.dtype), d_v_block)
        begin = (at[0], 0, 0, at[1])
        return (_add(d_out, part, (*begin, 0)), _add(mean, jnp.sum(slope, axis=-1), begin)), None

    starts, mean = form.starts(q, k, terms), jnp.zeros(q.shape[:4])
    if d_sinks:
        of_sink, weight = (x.reshape(1, *q.shape[1:3], 1) for x in (*d_sinks, sinks))
        mean += of_sink * jnp.exp(weight - top) / total
    (d_out, mean), _ = jax.lax.scan(step, (jnp.zeros(out.shape, jnp.float32), mean), starts)
    return (d_out - mean[..., None] * out.astype(jnp.float32)).astype(q.dtype)


def gradients(form: Form, kept, g) -> tuple[jax.Array, ...]:
    """Return the float32 gradients of queries, keys, values and, if there is one, of the table [R, H] of the bias.

    The gradients are computed block by block, and the probabilities of each block are recomputed from its logits. So
    `kept` may have only some of the keys to which the queries attended. The result is then the contribution of these
    keys to each gradient.

    Args:
        form: the options of `attended`.
        kept: the arguments q, k, v and terms of `attended`, followed by the three results of `attended` for all keys.
        g: the cotangent of the output.
    """
    q, k, v, terms, out, top, total = kept
    mean = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def step(sums, at):
        d_q, d_k, d_v, *of_bias = sums
        q_block, k_block, v_block = _cut(form, at, q, k, v)
        g_block, mean_block = (_queries(form, at, x) for x in (g, mean))
        weights, capped, chosen = _weights(form, at, q_block, k_block, k.shape[1], terms, top, total)
        slope = weights * (_product("bkqld,btkd->bkqlt", g_block, v_block) - mean_block[..., None])
        if chosen is not None:
            of_bias = [of_bias[0] + table_gradient(chosen, slope)]
        slope = terms.limits.uncapped_gradient(slope, capped) * form.scale
        weights, slope = weights.astype(g.dtype), slope.astype(q.dtype)
        d_q = _add(d_q, _product("bkqlt,btkd->bkqld", slope, k_block), (at[0], 0, 0, at[1], 0))
        d_k = _add(d_k, _product("bkqlt,bkqld->btkd", slope, q_block), (at[0], at[2], 0, 0))
        d_v = _add(d_v, _product("bkqlt,bkqld->btkd", weights, g_block), (at[0], at[2], 0, 0))
        return (d_q, d_k, d_v, *of_bias), None

    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v, *terms.table))
    return jax.lax.scan(step, sums, form.starts(q, k, terms))[0]


# If JAX transposed `_forward`, the probabilities of all blocks would be in memory. So `_forward` is a primitive, and
# its transpose is `gradients`. Its operands are the leaves of the kept values (of structure `tree`), then the tangents.
# `batches` has the operands' batch dimensions (or None) for each vmap around the primitive, innermost first.
_tangent = Primitive("gspmd_attention_tangent")


def _evaluate(*operands, form: Form, tree, batches):
    count = tree.num_leaves

    def tangent(*operands):
        return _forward(form, jax.tree.unflatten(tree, operands[:count]), *operands[count:])

    for dims in batches:
        tangent = jax.vmap(tangent, in_axes=dims)
    return tangent(*operands)


def _transpose(g, *operands, form: Form, tree, batches):
    count = tree.num_leaves

    def transposed(g, *kept):
        q, k, v, terms, sinks, out, top, total = jax.tree.unflatten(tree, kept)
        found = gradients(form, (q, k, v, terms, out, top, total), g)
        moving = q, k, v, *terms.table
        if sinks is not None:
            given = sinks, *(ungroup(x) for x in (top + jnp.log(total), out, g))
            found, moving = (*found, sink_gradient(*given)), (*moving, sinks)
        return tuple(total.astype(x.dtype) for total, x in zip(found, moving, strict=True))

    for dims in batches:
        transposed = jax.vmap(transposed, in_axes=(0, *dims[:count]))
    found = transposed(ad.instantiate_zeros(g), *operands[:count])
    wanted = (d if ad.is_undefined_primal(x) else None for d, x in zip(found, operands[count:]))
    return [*(None for _ in operands[:count]), *wanted]


def _differentiate(operands, tangents, **form):
    moving = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of(*some):
        at = dict(zip(moving, some))
        return _evaluate(*(at.get(n, x) for n, x in enumerate(operands)), **form)

    return jax.jvp(of, [operands[n] for n in moving], [tangents[n] for n in moving])


def _batch(operands, dims, *, tree, batches, **form):
    count = tree.num_leaves
    size = next(x.shape[dim] for x, dim in zip(operands, dims) if dim is not None)
    # All tangents get the batch dimension: JAX then adds up over the batch the gradients of operands that had no batch
    # dimension.
    tangents = [batching.bdim_at_front(x, dim, size) for x, dim in zip(operands[count:], dims[count:])]
    dims = (*dims[:count], *(0 for _ in tangents))
    return _tangent.bind(*operands[:count], *tangents, tree=tree, batches=(*batches, dims), **form), 0


def _abstract(*operands, tree, **_):
    """Return the type of the output's tangent, which is the type of the queries' tangent with the D of the values."""
    of_queries, _, of_values, *_ = operands[tree.num_leaves :]
    return of_queries.update(shape=(*of_queries.shape[:-1], of_values.shape[-1]))


_tangent.def_impl(_evaluate)
_tangent.def_abstract_eval(_abstract)
mlir.register_lowering(_tangent, mlir.lower_fun(_evaluate, multiple_results=False))
ad.primitive_transposes[_tangent] = _transpose
ad.primitive_jvps[_tangent] = _differentiate
batching.primitive_batchers[_tangent] = _batch


def _weights(form: Form, at, q_block, k_block, keys: int, terms: Terms, top, total):
    """Recompute the probabilities of a block.

    Keys that a query does not see are masked before the exponential, which could overflow for these keys.

    Returns:
        Three values: the probabilities, the scaled and capped logits, and the one-hot buckets of the bias, or None if
        there is no bias.
    """
    part = _terms(form, at, terms)
    capped = part.limits.capped(_product("bkqld,btkd->bkqlt", q_block, k_block) * form.scale)
    chosen = part.chosen()
    added = part.added(chosen, k_block.shape[2])
    logits = capped if added is None else capped + added
    visible, again = _seen(form, at, part), _again(form, at, keys)
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    if again is not None:
        logits = jnp.where(again, -jnp.inf, logits)
    top, total = (_queries(form, at, x)[..., None] for x in (top, total))
    return jnp.exp(logits - top) / total, capped, chosen


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _cut(form: Form, at, q, *keys):
    """Return one block of the queries [B, K, Q, L, D], and one block of each array [B, T, K, ...] in `keys`."""
    sizes = form.blocks.rows, form.blocks.keys
    begins = ((at[0], at[2], *(0,) * (x.ndim - 2)) for x in keys)
    return (
        _queries(form, at, q),
        *(jax.lax.dynamic_slice(x, begin, (*sizes, *x.shape[2:])) for x, begin in zip(keys, begins)),
    )


def _queries(form: Form, at, x):
    """Return one block of an array [B, K, Q, L, ...] with values for each query."""
    rest = (0,) * (x.ndim - 4)
    size = (form.blocks.rows, *x.shape[1:3], form.blocks.queries, *x.shape[4:])
    return jax.lax.dynamic_slice(x, (at[0], 0, 0, at[1], *rest), size)


def _add(whole, part, begin):
    old = jax.lax.dynamic_slice(whole, begin, part.shape)
    return jax.lax.dynamic_update_slice(whole, old + part, begin)


def _terms(form: Form, at, terms: Terms) -> Terms:
    """Return the terms of the logits of one block of queries and keys."""

    def cut(x, begin, size):
        rows, first = (1, 0) if x.shape[0] == 1 else (form.blocks.rows, at[0])
        return jax.lax.dynamic_slice(x, (first, begin), (rows, size))

    return terms.on(lambda x: cut(x, at[1], form.blocks.queries), lambda x: cut(x, at[2], form.blocks.keys))


def _seen(form: Form, at, part: Terms):
    """Return which keys of a block each query sees, as booleans that broadcast to [B, K, Q, L, T].

    None means that every query sees all keys of the block.
    """
    blocks, ahead, visible = form.blocks, part.ahead, part.visible()
    visible = None if visible is None else visible[:, None, None]
    if form.causal:
        shape = (1, 1, 1, blocks.queries, blocks.keys)
        row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (3, 4))
        past = row + at[1] + (0 if ahead is None else ahead) >= column + at[2]
        visible = past if visible is None else visible & past
    return visible


def _again(form: Form, at, keys: int):
    """Return which keys of a block are also in the block before it, or None if blocks do not overlap."""
    if keys % form.blocks.keys == 0:
        return None
    shape = (1, 1, 1, 1, form.blocks.keys)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 4) + at[2] < at[3]
