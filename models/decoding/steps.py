"""One step of reading: a chunk of prompts (prefill), or one token of every row (decode), through a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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

from ..attention import angles_at
from ..blocks import part
from ..experts import moved, tokens_spec
from ..transformer import Transformer, stream, with_arrays
from .cache import Cache, cache_spec
from .serving import one_position

Weights = Mapping[str, jax.Array]


def prefill_step(
    model: Transformer, *, fresh: bool = False
) -> Callable[[Weights, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]:
    """Build the reading of one chunk of prompts: (weights, tokens, counts, cache) -> (logits, cache).

    Chunk after chunk goes through the same program, the cache saying where each row goes on.

    Args:
        model: of `for_serving`, possibly abstract; its layout says where weights, activations and the cache lie.
        fresh: the cache holds no token yet, as for the first chunk: its tokens attend to one another only. The cache
            is then not read, unless query heads are split so that a device has parts of two groups.

    Returns:
        A pure function, to be compiled with the cache donated, of the weights (`arrays`), tokens [B, L] placed as
        `embedding.tokens`, counts [B] int32, how many of a row's tokens are real (the rest is padding on the right),
        and the cache. It returns float32 logits [B, V] after the last real token of each row, placed as
        `output.logits` without L (meaningless for a row without one), and the cache with the tokens in it.
    """

    def prefill(weights: Weights, tokens: jax.Array, counts: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        placed = with_arrays(model, weights)
        x, cache = _read(placed, tokens, counts, cache, fresh)
        residual = stream(model.config, model.layout)
        # The last real token by a product with ones and zeros, so that L may be sharded: it adds zeros to one number.
        position = Spec(("B", "L"), (residual.axes_of("B"), residual.axes_of("L")))
        chosen = jnp.arange(tokens.shape[1])[None] == counts[:, None] - 1
        chosen = moved(chosen.astype(x.dtype), Spec(("B", "L"), ((), ())), position)
        pick = Equation.product(residual, position, residual.without("L"))
        there = Via.of(residual, position)  # nothing has to travel for it
        last = gspmd.einsum(pick, x, chosen, via=there, precision=jax.lax.Precision.HIGHEST)
        return _logits(one_position(model), weights, last[:, None]), cache

    return prefill


def decode_step(model: Transformer) -> Callable[[Weights, jax.Array, Cache], tuple[jax.Array, Cache]]:
    """Build the reading of one token of every row: (weights, tokens, cache) -> (logits, cache).

    Args:
        model: as for `prefill_step`. One position cannot be sharded: whatever the layout says of L, it is whole here.

    Returns:
        A pure function, to be compiled with the cache donated, of the weights, tokens [B], whole on every device, and
        the cache. It returns float32 logits [B, V], placed as `output.logits` without L, and the cache with the tokens.
    """
    short = one_position(model)

    def decode(weights: Weights, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        placed = with_arrays(short, weights)
        ids = moved(tokens[:, None], Spec(("B", "L"), ((), ())), short.layout.spec("embedding.tokens"))
        x, cache = _read(placed, ids, None, cache)
        return _logits(short, weights, x), cache

    return decode


def _logits(model: Transformer, weights: Weights, x: jax.Array) -> jax.Array:
    """Logits [B, V] of the residual stream [B, 1, E] of one position."""
    # The weights wait for x. Else libtpu 0.0.42 brings the table into a v4's fast memory before the first layer, and
    # keeps it there while layers lack the room: reading one prompt takes PaLM 8B 42.8 ms on 8 chips instead of 38.2.
    weights, x = jax.lax.optimization_barrier((weights, x))
    return with_arrays(model, weights).logits(x)[:, 0]


def _read(
    model: Transformer, tokens: jax.Array, counts: jax.Array | None, cache: Cache, fresh: bool = False
) -> tuple[jax.Array, Cache]:
    """The residual stream [B, L, E] after the last block, and the cache with `counts` (None: all L) more tokens.

    Layers are scanned with the cache as something to read, and only their new keys and values come out; all of them
    are written at once after the scan. So no loop over layers carries the cache, and none can copy it.
    """
    layout, length = model.layout, tokens.shape[1]
    with part(layout, "embedding"):
        x = model.embedding(tokens)
    mask = None
    if counts is not None and model.config.moe:
        real = jnp.arange(length)[None] < counts[:, None]
        mask = moved(real, Spec(("B", "L"), ((), ())), tokens_spec(layout))
    chunk = replace(Chunk.at(cache.lengths, length, model), fresh=fresh)
    definition, weights = model.stacked()

    def layer(x: jax.Array, of_layer: tuple[Any, Any]) -> tuple[jax.Array, list[Any]]:
        weights, held = of_layer
        pasts = [LayerCache(chunk, *(each and each[place] for each in held)) for place in range(len(cache.keys))]
        for block, past in zip(nnx.merge(definition, weights), pasts):
            x, _ = block(x, key=None, train=False, mask=mask, past=past)
        return x, [past.new for past in pasts]

    x, new = jax.lax.scan(layer, x, (weights, cache.layers))
    key, added = layout.spec("attention.key"), length if counts is None else counts
    with jax.named_scope("cache"):
        keys, values, key_scales, value_scales = (
            held and tuple(_written(array, each[which], chunk, key) for array, each in zip(held, new))
            for which, held in enumerate(cache.layers)
        )
    return x, Cache(keys, values, key_scales, value_scales, cache.lengths + added)


def _written(array: jax.Array, new: jax.Array, chunk: Chunk, key: Spec) -> jax.Array:
    """Keys, values or scales of all layers, with the new ones behind those of each row."""
    narrow = array.ndim == 4  # scales, which have no D
    specs = (spec.without(spec.dims[3]) if narrow else spec for spec in (chunk.spec, key))
    return ops.write_cache(array, new, *specs, lengths=chunk.lengths)


@dataclass(frozen=True)
class Chunk:
    """The values that the layers of one step share.

    Attributes:
        lengths: [B] int32, the tokens of each row that are in the cache already.
        spec: where the cache of one layer lies.
        angles: `angles_at` the positions of the chunk's tokens, by the mesh axes of B and L with which they are placed.
        fresh: whether no row has a token in the cache.
    """

    lengths: jax.Array
    spec: Spec
    angles: Mapping[tuple[tuple[str, ...], ...], tuple[jax.Array, jax.Array]]
    fresh: bool = False

    @classmethod
    def at(cls, lengths: jax.Array, length: int, model: Transformer) -> Chunk:
        """The next `length` tokens of rows with `lengths`; angles are found here once, and not in every layer."""
        layout = model.layout
        positions = lengths[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        whole, placed = Spec(("B", "L"), ((), ())), {}
        for key in ("attention.query", "attention.key"):
            axes = layout.spec(key).axes[:2]
            placed[axes] = angles_at(moved(positions, whole, Spec(("B", "L"), axes)), model.config)
        # without the barrier the TPU compiler moves these few operations back into the loop over layers
        return cls(lengths, cache_spec(layout), jax.lax.optimization_barrier(placed))


class LayerCache:
    """The cached keys and values of one layer, which an attention reads, and the `new` ones that it leaves.

    `new` holds keys, values and their scales (None where the cache is not int8), as `Cache.layers` does. Those of an
    narrower cache are rounded before the chunk attends to itself, so that results do not depend on where chunks end.
    """

    def __init__(self, chunk: Chunk, keys: Any, values: Any, key_scales: Any, value_scales: Any):
        self.chunk, self.held, self.scales = chunk, (keys, values), (key_scales, value_scales)
        self.new: tuple[Any, ...] = ()

    def angles(self, spec: Spec) -> tuple[jax.Array, jax.Array]:
        """`angles_at` the positions of the tokens that are read, placed as B and L of `spec`."""
        return self.chunk.angles[spec.axes[:2]]

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, query_spec: Spec, key_spec: Spec) -> jax.Array:
        """Attention of rotated queries to the cache and, causally, to the chunk's own keys and values."""
        options: dict[str, Any] = {}
        if self.scales[0] is None:
            self.new = k.astype(self.held[0].dtype), v.astype(self.held[1].dtype), None, None
            k, v = self.new[0].astype(k.dtype), self.new[1].astype(v.dtype)
        else:
            (keys, key_scales), (values, value_scales) = ops.quantize_heads(k), ops.quantize_heads(v)
            self.new = keys, values, key_scales, value_scales
            k = (keys * key_scales[..., None]).astype(k.dtype)
            v = (values * value_scales[..., None]).astype(v.dtype)
            options = {"key_scales": self.scales[0], "value_scales": self.scales[1]}
        heads, shared = query_spec.axes[2], k.shape[2]
        devices = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in heads)
        if self.chunk.fresh and (shared % devices == 0 or devices % shared == 0):  # no device has parts of two groups
            # Where a cache stands between them, keys may lie apart from the queries; here they come to these.
            held = key_spec.axes[2]
            # of lines that are not known yet attention says that their first heads have to lie alike
            stays = held == heads[: len(held)] or is_unknown(held)
            near = (query_spec.axes[0], (), held if stays else (), ())
            beside = Spec(key_spec.dims, near)
            k, v = moved(k, key_spec, beside), moved(v, key_spec, beside)
            return ops.attention(q, k, v, query_spec, beside)
        specs = query_spec, key_spec, self.chunk.spec
        return ops.cached_attention(q, k, v, *self.held, *specs, lengths=self.chunk.lengths, **options)
