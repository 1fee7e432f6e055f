"""Single steps with a cache: encode sources, read a chunk of prompts (prefill), or read one token per row (decode)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import gspmd
from gspmd import ops
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation, Via
from gspmd.planner.unknown import is_unknown

from ..blocks import part
from ..context import Context
from ..placement import batch_spec, moved, tokens_spec
from ..rotary import Angles, angles_at, query_growth
from ..transformer import Transformer, stream, with_arrays
from .cache import CROSS, Cache, cache_spec, is_by_layer, stacked
from .serving import one_position

Weights = Mapping[str, jax.Array]


def encode_step(
    model: Transformer, *, dtype: Any = None, int8: bool = False
) -> Callable[[Weights, jax.Array, jax.Array], Cache]:
    """Build a step that encodes the sources of an encoder–decoder.

    The step is a function (weights, tokens, counts) -> cache. A source is encoded only once, because the keys and
    values that each block of the decoder computes from it stay the same.

    Args:
        model: a model with the config of `for_serving`; it may be abstract. Its layout has the specs of weights and
            activations; `Layout.stack("encoder")` has the specs of the encoder, and `Layout.cache("cross.key")` the
            spec of keys and values.
        dtype: the dtype in which keys and values are stored; None for the compute dtype.
        int8: whether to store keys and values as int8 instead, with a float32 scale for each token and head.

    Returns:
        A pure function of the weights (from `arrays`), tokens [B, T] sharded as `batch_spec`, and counts [B] int32, the
        number of real tokens in each row. The remaining tokens are padding on the right, to which nothing attends. The
        function returns a `Cache` to be used as the `source` field of another `Cache`.

    Raises:
        ValueError: the model has no encoder.
    """
    if not model.config.encoder_layers:
        raise ValueError("this model is decoder-only, and encodes no source.\n  Use its prefill_step.")
    layout, kept = model.layout, jnp.dtype(model.dtype if dtype is None else dtype)
    key, held = layout.spec(CROSS), cache_spec(layout, CROSS)

    def encode(weights: Weights, tokens: jax.Array, counts: jax.Array) -> Cache:
        placed = with_arrays(model, weights)
        real = jnp.arange(tokens.shape[1])[None] < counts[:, None]
        segments = moved(real.astype(jnp.int32), Spec(("B", "L"), ((), ())), batch_spec(layout))
        memory, _ = placed.encode(tokens, segments)
        _, definition, blocks = placed.stacked()

        def layer(memory: jax.Array, weights: Any) -> tuple[jax.Array, list[Any]]:
            with part(layout, "cross"):
                return memory, [block.cross.keys(memory) for block in nnx.merge(definition, weights)]

        of_places = jax.lax.scan(layer, memory, blocks)[1]
        with jax.named_scope("cache"):
            (keys, key_scales), (values, value_scales) = (
                zip(*(_kept(x, key, held, kept, int8) for x in each)) for each in zip(*of_places)
            )
        return Cache(keys, values, key_scales if int8 else None, value_scales if int8 else None, counts)

    return encode


def _kept(x: jax.Array, key: Spec, held: Spec, dtype: Any, int8: bool) -> tuple[jax.Array, jax.Array | None]:
    """Change keys or values [N, B, T, K, D] to the cache's order [N, B, K, T, D], with scales if `int8` is set."""
    if not int8:
        return moved(x.astype(dtype), stacked(key), stacked(held)), None
    numbers, scales = ops.quantize_heads(x)
    of_scales = moved(scales, stacked(key.without("D")), stacked(held.without("D")))
    return moved(numbers, stacked(key), stacked(held)), of_scales


def prefill_step(
    model: Transformer, *, fresh: bool = False
) -> Callable[[Weights, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]:
    """Build a step that reads one chunk of prompts.

    The step is a function (weights, tokens, counts, cache) -> (logits, cache). All chunks run through the same program.
    The cache tells where each row continues.

    Args:
        model: a model with the config of `for_serving`; it may be abstract. Its layout has the specs of weights,
            activations and cache.
        fresh: whether the cache is still empty, as before the first chunk, so that tokens attend only to one another.
            The cache is then not read, unless query heads are split so that a device has parts of two groups.

    Returns:
        A pure function, to be compiled with the cache donated. It takes the weights (from `arrays`), tokens [B, L]
        sharded as `embedding.tokens`, counts [B] int32 of the real tokens in each row, and the cache. The remaining
        tokens of a row are padding on the right. It returns float32 logits [B, V] after the last real token of each
        row, and the cache with the tokens added. The logits are sharded as `output.logits` without L, and are
        meaningless for a row without real tokens.
    """

    def prefill(weights: Weights, tokens: jax.Array, counts: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        placed = with_arrays(model, weights)
        x, cache = _read(placed, tokens, counts, cache, fresh)
        residual = stream(model.config, model.layout)
        # A product with a one-hot vector picks the last real token exactly, and works if L is sharded.
        position = Spec(("B", "L"), (residual.axes_of("B"), residual.axes_of("L")))
        chosen = jnp.arange(tokens.shape[1])[None] == counts[:, None] - 1
        chosen = moved(chosen.astype(x.dtype), Spec(("B", "L"), ((), ())), position)
        pick = Equation.product(residual, position, residual.without("L"))
        there = Via.of(residual, position)  # multiply in place, so that nothing is sent
        last = gspmd.einsum(pick, x, chosen, via=there, precision=jax.lax.Precision.HIGHEST)
        return _logits(one_position(model), weights, last[:, None]), cache

    return prefill


def decode_step(model: Transformer) -> Callable[[Weights, jax.Array, Cache], tuple[jax.Array, Cache]]:
    """Build a step that reads one token of every row.

    The step is a function (weights, tokens, cache) -> (logits, cache).

    Args:
        model: a model, as for `prefill_step`. A single position cannot be sharded, so L is unsharded even if the layout
            shards it.

    Returns:
        A pure function, to be compiled with the cache donated. It takes the weights, tokens [B], which are not sharded,
        and the cache. It returns float32 logits [B, V], sharded as `output.logits` without L, and the cache with the
        tokens added.
    """
    short = one_position(model)

    def decode(weights: Weights, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        placed = with_arrays(short, weights)
        ids = moved(tokens[:, None], Spec(("B", "L"), ((), ())), short.layout.spec("embedding.tokens"))
        x, cache = _read(placed, ids, None, cache)
        return _logits(short, weights, x), cache

    return decode


def _logits(model: Transformer, weights: Weights, x: jax.Array) -> jax.Array:
    """Return the logits [B, V] of a single position, given its residual stream [B, 1, E]."""
    # The barrier makes the weights wait for x. Otherwise libtpu 0.0.42 loads the table into a v4's fast memory before
    # the first layer, and the layers lack that room: PaLM 8B on 8 chips then reads a prompt in 42.8 ms instead of 38.2.
    weights, x = jax.lax.optimization_barrier((weights, x))
    return with_arrays(model, weights).logits(x)[:, 0]


def _read(
    model: Transformer, tokens: jax.Array, counts: jax.Array | None, cache: Cache, fresh: bool = False
) -> tuple[jax.Array, Cache]:
    """Return the residual stream [B, L, E] after the last block, and the cache with the new tokens added.

    A row adds the number of tokens in `counts`, or all L tokens if `counts` is None. The layers only read the cache,
    and return their new keys and values, which are written together after the last layer. So no loop over layers
    carries the cache, and no loop can copy it. Stacked layers run as a scan. Layers that are not stacked are traced one
    by one, because only a weight that is a separate array can be loaded while other layers run.
    """
    layout, length = model.layout, tokens.shape[1]
    whole = Spec(("B", "L"), ((), ()))
    positions = None
    if model.config.positions in ("sinusoidal", "learned"):
        positions = cache.lengths[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        positions = moved(positions, whole, batch_spec(layout))
    with part(layout, "embedding"):
        x = model.embedding(tokens, positions)
    context = Context(relative=model.table)
    if counts is not None and model.config.moe:
        real = jnp.arange(length)[None] < counts[:, None]
        context = replace(context, real=moved(real, whole, tokens_spec(layout)))
    chunk = replace(Chunk.at(cache, length, model), counts=counts, fresh=fresh)
    first, definition, weights = model.stacked()
    read, lead = cache.source, model.config.lead
    # The cache's arrays for the blocks before the repeating ones, and for those that repeat.
    alone, repeating = ([each and each[part] for each in cache.layers] for part in (slice(lead), slice(lead, None)))

    def run(x: jax.Array, blocks: Sequence[Any], held: Any, of_source: Any) -> tuple[jax.Array, list[Any]]:
        """Run blocks, for example one pattern; return the residual stream and the blocks' new keys and values."""

        def at(place: int, arrays: Any) -> list[Any]:
            return [each and each[place] for each in arrays]

        pasts = [
            LayerCache(chunk, at(place, held), None if read is None else [*at(place, of_source), read.lengths])
            for place in range(len(blocks))
        ]
        for block, past in zip(blocks, pasts):
            x, _ = block(x, context, key=None, train=False, past=past)
        return x, [past.new for past in pasts]

    def layer(x: jax.Array, of_layer: tuple[Any, Any, Any]) -> tuple[jax.Array, list[Any]]:
        weights, held, of_source = of_layer
        return run(x, nnx.merge(definition, weights), held, of_source)

    if model.config.stacked:
        ahead, blocks = [nnx.merge(*each) for each in first], None
    else:
        blocks = nnx.merge(definition, jax.tree.map(lambda leaf: leaf[0], weights))
        ahead = blocks[:lead]
    x, new = run(x, ahead, jax.tree.map(lambda leaf: leaf[0], alone), None)
    new = jax.tree.map(lambda row: row[None], new)
    if blocks is None:
        x, others = jax.lax.scan(layer, x, (weights, repeating, None if read is None else read.layers))
    else:
        each, pattern, by_layer = [], model.config.pattern, is_by_layer(cache, model.config)
        for number in range(model.config.repeats):
            begin = number * pattern
            if by_layer:  # arrays [1, B, ...]
                held = [kind and [leaf[0] for leaf in kind[begin : begin + pattern]] for kind in repeating]
            else:
                held = jax.tree.map(lambda leaf, at=number: leaf[at], repeating)
            x, made = run(x, blocks[lead + begin : lead + begin + pattern], held, None)
            each.append(made)
        if by_layer:
            others = jax.tree.map(lambda row: row[None], [layer for made in each for layer in made])
        else:
            others = jax.tree.map(lambda *rows: jnp.stack(rows), *each)
    new = [*new, *others]
    key, added = layout.spec("attention.key"), length if counts is None else counts
    if model.config.latent is not None:
        key = key.with_axes(key.dims[2], ())  # one key for all heads
    with jax.named_scope("cache"):
        keys, values, key_scales, value_scales = (
            held
            and tuple(
                _written(array, each[which], chunk, key, ring) for array, each, ring in zip(held, new, chunk.rings)
            )
            for which, held in enumerate(cache.layers)
        )
    return x, Cache(keys, values, key_scales, value_scales, cache.lengths + added, cache.source, cache.totals)


def _written(array: jax.Array, new: jax.Array, chunk: Chunk, key: Spec, ring: bool) -> jax.Array:
    """Append new keys, values or scales to each row of an array of all layers, and return the array.

    Entries after a row's real tokens are overwritten later by the row's next tokens. In a ring, such entries would
    replace tokens that are still attended to, so they are not written there.
    """
    narrow = array.ndim == 4  # scales, which lack dimension D
    specs = (spec.without(spec.dims[3]) if narrow else spec for spec in (chunk.spec, key))
    real: dict[str, Any] = {"ring": True, "counts": chunk.counts} if ring else {}
    return ops.write_cache(array, new, *specs, lengths=chunk.lengths, **real)


@dataclass(frozen=True)
class Chunk:
    """The values that all layers of one step share.

    Attributes:
        lengths: [B] int32, the number of tokens of each row that are already in the cache.
        spec: the spec of one layer's cache.
        source_spec: the spec of one layer's cache of encoded sources.
        angles: the rotary angles at the positions of the chunk's tokens (from `angles_at`), by the kind of layer and
            the mesh axes that shard B and L; empty unless queries and keys are rotated.
        growth: the factors by which queries grow at the positions of the chunk's tokens; None if no layer has growing
            queries.
        rings: for each stack of layers, whether its cache is a ring. This is so in sliding and chunked layers.
        counts: [B] int32, the number of real tokens in each row, or None if all tokens are real.
        fresh: whether the cache is still empty.
    """

    lengths: jax.Array
    spec: Spec
    source_spec: Spec
    angles: Mapping[tuple[str, tuple[tuple[str, ...], ...]], Angles]
    growth: jax.Array | None
    rings: tuple[bool, ...]
    counts: jax.Array | None = None
    fresh: bool = False

    @classmethod
    def at(cls, cache: Cache, length: int, model: Transformer) -> Chunk:
        """Describe the next `length` tokens of a cache's rows, with angles computed for all layers."""
        layout, config, lengths = model.layout, model.config, cache.lengths
        positions = lengths[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        totals = None if cache.totals is None else jnp.broadcast_to(cache.totals[:, None], positions.shape)
        whole = Spec(("B", "L"), ((), ()))
        places = dict.fromkeys(layout.spec(key).axes[:2] for key in ("attention.query", "attention.key"))
        wanted, made = [], []
        for axes in places:
            of_rows = Spec(whole.dims, axes)
            for rotary in config.rotaries:
                lengths_of = moved(totals, whole, of_rows) if totals is not None and rotary.by_length else None
                wanted.append((rotary, axes))
                made.append(angles_at(moved(positions, whole, of_rows), rotary, lengths_of))
        growth = None
        if any(map(config.grows, config.kinds)):
            of_queries = Spec(whole.dims, layout.spec("attention.query").axes[:2])
            growth = query_growth(moved(positions, whole, of_queries), config)
        # Without the barrier, the TPU compiler moves these few operations back into the loop over layers.
        made, growth = jax.lax.optimization_barrier((made, growth))
        found = dict(zip(wanted, made))
        rotated = [(kind, rotary) for kind in config.kinds if (rotary := config.rotary_of(kind)) is not None]
        angles = {(kind, axes): found[rotary, axes] for kind, rotary in rotated for axes in places}
        held = cache_spec(layout, latent=config.latent is not None)
        stacks = config.weight_stacks() if is_by_layer(cache, config) else config.stacks()
        rings = tuple(config.reach_of(config.layer_kind(layers[0])) is not None for layers in stacks)
        return cls(lengths, held, cache_spec(layout, CROSS), angles, growth, rings)


class LayerCache:
    """The cached keys and values of one layer, which attention reads, and the `new` ones, which attention adds.

    `new` holds keys, values and their scales in the same order as `Cache.layers`; the scales are None unless the cache
    is int8. If the dtype of the cache is narrower than the compute dtype, new keys and values are rounded to it before
    the chunk attends to itself, so that results do not depend on where chunks end.

    Args:
        chunk: the description of the step's tokens.
        held: the cached keys and values, and their scales.
        source: the cached keys, values and scales of an encoded source, with the number [B] of the source's tokens in
            each row; None for a decoder-only model.
    """

    def __init__(self, chunk: Chunk, held: Sequence[Any], source: Sequence[Any] | None):
        keys, values, key_scales, value_scales = held
        self.chunk, self.held, self.scales = chunk, (keys, values), (key_scales, value_scales)
        self.source, self.new = source, tuple[Any, ...]()

    def angles(self, spec: Spec, kind: str) -> Angles:
        """Return the rotary angles at the chunk's positions in layers of `kind`, sharded like B and L of `spec`."""
        return self.chunk.angles[kind, spec.axes[:2]]

    def growth(self) -> jax.Array:
        """Return the factors [B, L, 1, 1] by which queries grow at the chunk's positions, sharded like queries."""
        assert self.chunk.growth is not None, "queries of this model do not grow"
        return self.chunk.growth

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, query_spec: Spec, key_spec: Spec, **options: Any
    ) -> jax.Array:
        """Attend with rotated queries to the cache and, causally, to the keys `k` and values `v` of the chunk."""
        scales: dict[str, Any] = {}
        if self.scales[0] is None:
            self.new = k.astype(self.held[0].dtype), v.astype(self.held[1].dtype), None, None
            k, v = self.new[0].astype(k.dtype), self.new[1].astype(v.dtype)
        else:
            (keys, key_scales), (values, value_scales) = ops.quantize_heads(k), ops.quantize_heads(v)
            self.new = keys, values, key_scales, value_scales
            k = (keys * key_scales[..., None]).astype(k.dtype)
            v = (values * value_scales[..., None]).astype(v.dtype)
            scales = {"key_scales": self.scales[0], "value_scales": self.scales[1]}
        heads, shared = query_spec.axes[2], k.shape[2]
        devices = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in heads)
        if self.chunk.fresh and (shared % devices == 0 or devices % shared == 0):  # no device has parts of two groups
            # With a cache, keys may be sharded differently from queries; without one, they are moved to match.
            held = key_spec.axes[2]
            # In a search the spec is unknown, and `attention` itself requires keys and queries to share their leading
            # axes.
            stays = held == heads[: len(held)] or is_unknown(held)
            near = (query_spec.axes[0], (), held if stays else (), ())
            beside = Spec(key_spec.dims, near)
            k, v = moved(k, key_spec, beside), moved(v, key_spec, beside)
            return ops.attention(q, k, v, query_spec, beside, **options)
        cached_k, cached_v = self.held
        room = cached_k.shape[self.chunk.spec.dims.index("T")]
        # The cache of a short text may be shorter than a window or a chunk, which then hides no token.
        if "window" in options:
            options["window"] = min(options["window"], room + 1)
        if options.get("chunk", 0) > room:
            del options["chunk"]
        return ops.cached_attention(
            q, k, v, cached_k, cached_v, query_spec, key_spec, self.chunk.spec, lengths=self.chunk.lengths,
            **scales, **options,
        )  # fmt: skip

    @property
    def fresh(self) -> bool:
        """Whether the cache is still empty, so that the new tokens attend only to one another."""
        return self.chunk.fresh

    def keep(self, latent: jax.Array, rank: int) -> jax.Array:
        """Add the new tokens' latents [B, L, Z] to the cache; return them in their own dtype, rounded as in the cache.

        In an int8 cache the latent, of `rank` elements, and the rotated key have separate scales. This is because only
        the latent is normalized. With a single scale, the smaller values would be rounded to 0.
        """
        each = latent[:, :, None]  # [B, L, 1, Z]
        if self.scales[0] is None:
            self.new = each.astype(self.held[0].dtype), None, None, None
            return self.new[0][:, :, 0].astype(latent.dtype)
        (whole, scales), (rest, rest_scales) = map(ops.quantize_heads, (each[..., :rank], each[..., rank:]))
        self.new = jnp.concatenate([whole, rest], axis=-1), None, scales, rest_scales
        kept = jnp.concatenate([whole * scales[..., None], rest * rest_scales[..., None]], axis=-1)
        return kept[:, :, 0].astype(latent.dtype)

    def attend_latents(
        self, q: jax.Array, latent: jax.Array, rank: int, query_spec: Spec, key_spec: Spec, **options: Any
    ) -> jax.Array:
        """Attend with queries [B, L, H, Z] to the cached latents and, causally, to the chunk's latents [B, L, Z]."""
        if self.scales[0] is not None:
            options |= {"key_scales": self.scales[0], "rest_scales": self.scales[1]}
        # The latent and its rotated key together are the key of all heads; the latent alone is their value.
        return ops.cached_attention(
            q, latent[:, :, None], None, self.held[0], None, query_spec, key_spec, self.chunk.spec,
            lengths=self.chunk.lengths, value_width=rank, **options,
        )  # fmt: skip

    def attend_source(self, q: jax.Array, query_spec: Spec, key_spec: Spec, **options: Any) -> jax.Array:
        """Attend with queries to the keys and values of each row's source, except for the source's padding."""
        assert self.source is not None, "a decoder with cross-attention needs a cache with an encoded source"
        keys, values, key_scales, value_scales, lengths = self.source
        scales = {} if key_scales is None else {"key_scales": key_scales, "value_scales": value_scales}
        return ops.cached_attention(
            q, None, None, keys, values, query_spec, key_spec, self.chunk.source_spec, lengths=lengths,
            **scales, **options,
        )  # fmt: skip
