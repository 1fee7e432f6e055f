"""Self-attention and cross-attention, multi-head, grouped-query or multiquery, with rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts import Layout
from gspmd.layouts.section import Section
from gspmd.ops import Buckets, attention
from gspmd.ops._attention.zigzag import ring_size, zigzag_positions

from .alibi import slopes_of
from .config import ModelConfig
from .context import Context
from .layer import Layer
from .rotary import Angles, cos_sin, query_growth, rotate, turns
from .vectors import masked, padded_dimensions


class Past(Protocol):
    """The cached keys and values of one layer, to which new tokens attend."""

    def angles(self, spec: Spec, kind: str) -> Angles:
        """Return the rotary angles of the new tokens for layers of `kind`; `spec` tells how B and L are sharded."""

    def growth(self) -> jax.Array:
        """Return the factors [B, L, 1, 1] by which the new tokens' queries grow with the position (`query_growth`)."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, query_spec: Spec, key_spec: Spec, **options: Any
    ) -> jax.Array:
        """Attend with `q` to the cached keys and values and to `k` and `v`, which are added to the cache.

        The options are passed to `gspmd.ops.cached_attention`.
        """

    @property
    def fresh(self) -> bool:
        """Whether the cache is still empty, so that the new tokens attend only to one another."""

    def keep(self, latent: jax.Array, rank: int) -> jax.Array:
        """Add latents and rotated keys [B, L, Z] of the new tokens to the cache; return them rounded as in the cache.

        The first `rank` elements of Z are the latent, and the remaining elements are the rotated key.
        """

    def attend_latents(
        self, q: jax.Array, latent: jax.Array, rank: int, query_spec: Spec, key_spec: Spec, **options: Any
    ) -> jax.Array:
        """Attend with queries [B, L, H, Z] to the cached latents and to the latents [B, L, Z] of the new tokens.

        The options are the same as for `attend`.

        Returns:
            [B, L, H, `rank`], the weighted sums of latents.
        """

    def attend_source(self, q: jax.Array, query_spec: Spec, key_spec: Spec, **options: Any) -> jax.Array:
        """Attend with queries to the keys and values of an encoded source, which do not change during decoding."""


class Attention(Layer):
    """Self-attention on the residual stream, causal in a decoder.

    The parallel block calls only the method `core`. It computes the products before and after attention together with
    the products of the feed-forward layer, so that all of them share collectives.

    Args:
        kind: full, sliding, chunked or unrotated; see `ModelConfig.layer_kinds`.
    """

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, jax.Array], dtype: Any, kind: str):
        super().__init__(config, layout.section("attention"), weights, dtype)
        self.kind, self.rotary, self.window = kind, config.rotary_of(kind), config.window_of(kind)
        self.chunk, self.grows = config.chunk_of(kind), config.grows(kind)
        self.padded_heads = padded_dimensions(config, layout)
        self.padded = self.padded_heads.get("H")

    def __call__(self, x: jax.Array, context: Context, past: Past | None = None) -> jax.Array:
        """Return the output [B, L, E], to be added to the residual stream, sharded as the line `attention.residual`."""
        added = self.attend("residual", self.normed_before("residual", x), context, past)
        return self.normed_after("residual", added)

    def attend(self, where: str, y: jax.Array, context: Context, past: Past | None = None) -> jax.Array:
        """Compute attention on a normed input y [B, L, E].

        `where` names a line of the layout: both the input and the output have the spec of this line.
        """
        weights = self.matrices("w_q", "w_k", "w_v")
        # [B, L, E] -> [B, L, H, D], and [B, L, K, D] twice
        products = self.at.einsum(f"{where}, (w_q, w_k, w_v) -> (query, key, key)", y, weights)
        mixed = self.core(*self.heads(where, products, y), context, past)
        out = f"query, w_o -> {where}"  # [B, L, H, D] -> [B, L, E]
        added = self.adapted(out, self.at.einsum(out, mixed, self.matrix("w_o")), mixed)
        return self.affine(where, checkpoint_name(added, "attention.added"), "o")

    def heads(self, where: str, products: Sequence[jax.Array], y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [B, L, H, D], keys and values [B, L, K, D] for a normed input y.

        `products` holds the products of y with the weights of queries, keys and values. Adapters, scales, biases,
        clipping and head norms are applied to the products if the model has them.
        """
        found = []
        for x, line, weight, kept in zip(products, ("query", "key", "key"), "qkv", ("query", "key", "value")):
            x = checkpoint_name(self.adapted(f"{where}, w_{weight} -> {line}", x, y), f"attention.{kept}")
            found.append(self.clipped(self.affine(line, x, weight)))
        q, k, v = found
        if self.config.qk_norm in ("head", "all"):
            q, k = self.normed_heads("query", q, "q_norm", "H"), self.normed_heads("key", k, "k_norm", "K")
        return q, k, v

    def clipped(self, x: jax.Array) -> jax.Array:
        """Clip queries, keys or values to `ModelConfig.qkv_clip`, unless the model has no bound."""
        bound = self.config.qkv_clip
        return x if bound is None else jnp.clip(x, -bound, bound)

    def normed_heads(self, line: str, x: jax.Array, norm: str, heads: str) -> jax.Array:
        """Normalize queries or keys: each head [D] by itself, or all heads [H, D] together if `qk_norm` is "all"."""
        options: dict[str, Any] = {"epsilon": self.config.norm_epsilon}
        if self.config.qk_norm == "head":
            return self.at.rms_norm(f"{line}, {norm}", x, self.vector(norm), **options)
        if (padded := self.padded_heads.get(heads)) is not None:  # padded heads are 0, and not counted
            options["count"] = padded.real * self.config.head_size
        return self.at.rms_norm(f"{line}, {norm}_all", x, self.vector(norm), **options)

    def normed_after_rotation(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normalize rotated queries and keys, each head by itself and without a scale, if `qk_norm` is "rotated"."""
        if self.config.qk_norm != "rotated":
            return q, k
        return _unscaled_norm(q, self.config.norm_epsilon), _unscaled_norm(k, self.config.norm_epsilon)

    def growth_of_text(self, length: int, context: Context) -> jax.Array | np.ndarray:
        """Return the factors that make queries grow with the position, for tokens in the order that training uses."""
        if context.growth is not None:
            return context.growth
        ring = ring_size(self.at.spec("key")) if context.causal else 1
        return query_growth(zigzag_positions(length, ring)[None], self.config)

    def core(self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context, past: Past | None = None) -> jax.Array:
        """Compute softmax attention of queries [B, L, H, D] to keys [B, L, K, D].

        The result is sharded like the queries. If `past` is given, the tokens follow the cached tokens. Otherwise the
        tokens are whole sequences. They are in zigzag order if attention is causal and the spec of keys shards L.
        """
        query, key = self.at.spec("query"), self.at.spec("key")
        how = self.scores(context)
        if past is not None:
            if self.rotary is not None:
                q, k = (rotate(x, self.rotary, past.angles(spec, self.kind)) for x, spec in ((q, query), (k, key)))
                q, k = self.normed_after_rotation(q, k)
            elif self.grows:
                q = _grown(q, past.growth())
            out = past.attend(q, k, v, query, key, **how)
            return masked(out, self.padded, "H", query)
        if self.rotary is not None:
            q, k = checkpoint_name(self.rotated(self.rotary, q, k, context), "attention.rotated")
            q, k = self.normed_after_rotation(q, k)
        elif self.grows:
            q = _grown(q, self.growth_of_text(q.shape[1], context))
        if context.segments:
            how["segments"] = context.segments
            if self.chunk is not None:  # chunks of a text in a packed row are counted from the start of that text
                how["segments"] = context.chunks
                how["window"] = how.pop("chunk")  # a window this long hides no key of a chunk
        out = attention(q, k, v, query, key, causal=context.causal, **how)
        return masked(out, self.padded, "H", query)

    def scores(self, context: Context) -> dict[str, Any]:
        """Return the arguments of `gspmd.ops.attention` that describe this model's scores, except unused ones."""
        found = bias_of(self.config, self.at, context) | {"scale": self.config.attention_scale}
        if self.window is not None:
            found["window"] = self.window
        if self.chunk is not None:
            found["chunk"] = self.chunk
        if self.config.score_softcap is not None:
            found["softcap"] = self.config.score_softcap
        if self.config.positions == "alibi":
            found["slopes"] = slopes_of(self.config, self.padded)
        if (sinks := self.parameter("sinks")) is not None:
            found |= {"sinks": sinks[...], "sinks_spec": self.at.spec("sinks")}
        return found

    def rotated(self, rotary: ModelConfig, q: jax.Array, k: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Rotate queries and keys by their positions, with the rotary embedding of the config `rotary`."""
        query, key = self.at.spec("query"), self.at.spec("key")
        if context.angles is not None:
            of_query, of_key = context.angles[rotary]
            return rotate(q, rotary, of_query), rotate(k, rotary, of_key)
        order = zigzag_positions(q.shape[1], ring_size(key)) if context.causal else np.arange(q.shape[1])
        angles = cos_sin(order, turns(rotary, q.shape[1]))
        if query.axes_of("L") != key.axes_of("L"):
            # Without `_along`, compilers merge the tables of queries and keys into one constant, shard its L like the L
            # of the queries, and gather it for the keys.
            return rotate(q, rotary, _along(query, angles)), rotate(k, rotary, angles)
        return rotate(q, rotary, angles), rotate(k, rotary, angles)


class CrossAttention(Layer):
    """Attention of a decoder's tokens to the output of the encoder.

    Source: Vaswani et al. 2017, *Attention Is All You Need* (arXiv 1706.03762), section 3.2.3.
    """

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, jax.Array], dtype: Any):
        super().__init__(config, layout.section("cross"), weights, dtype)
        self.padded = padded_dimensions(config, layout).get("H")

    def __call__(self, x: jax.Array, context: Context, past: Past | None = None) -> jax.Array:
        """Return the output [B, L, E], to be added to the residual stream, sharded as the line `attention.residual`."""
        stream, query, key = "attention.residual", self.at.spec("query"), self.at.spec("key")
        into, out = f"{stream}, w_q -> query", f"query, w_o -> {stream}"
        y = self.normed(stream, x)
        q = checkpoint_name(self.at.einsum(into, y, self.matrix("w_q")), "attention.query")  # [B, L, E] -> [B, L, H, D]
        q = self.affine("query", self.adapted(into, q, y), "q")
        if past is not None:
            mixed = past.attend_source(q, query, key, scale=self.config.attention_scale)
        else:
            assert context.memory is not None, "a decoder with cross-attention needs the output of its encoder"
            how: dict[str, Any] = {"segments": context.memory_segments} if context.memory_segments else {}
            k, v = self.keys(context.memory)
            mixed = attention(q, k, v, query, key, causal=False, scale=self.config.attention_scale, **how)
        mixed = masked(mixed, self.padded, "H", query)
        # [B, L, H, D] -> [B, L, E]
        added = self.adapted(out, self.at.einsum(out, mixed, self.matrix("w_o")), mixed)
        return self.affine(stream, checkpoint_name(added, "attention.added"), "o")

    def keys(self, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values [B, T, K, D], computed from the encoder's output [B, T, E]."""
        products = self.at.einsum("memory, (w_k, w_v) -> (key, key)", memory, self.matrices("w_k", "w_v"))
        found = []
        for x, weight, kept in zip(products, "kv", ("key", "value")):
            x = checkpoint_name(self.adapted(f"memory, w_{weight} -> key", x, memory), f"attention.{kept}")
            found.append(self.affine("key", x, weight))
        return found[0], found[1]


def _unscaled_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """Divide each head [D] by its root mean square; D is not sharded, so nothing is sent."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def _grown(q: jax.Array, growth: jax.Array | np.ndarray) -> jax.Array:
    """Multiply queries [B, L, H, D] by factors that grow with the position."""
    return (q.astype(jnp.float32) * growth).astype(q.dtype)


def bias_of(config: ModelConfig, at: Section, context: Context) -> dict[str, Any]:
    """Return the arguments of `gspmd.ops.attention` for a relative position bias; empty if there is no bias table."""
    if context.relative is None:
        return {}
    buckets = Buckets(config.relative_buckets, config.relative_distance, bidirectional=not context.causal)
    return {"bias": context.relative, "bias_spec": at.spec("relative"), "buckets": buckets}


def _along(spec: Spec, angles: tuple[np.ndarray, np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Shard the constant cosines and sines of positions, [1, L, 1, R/2], over the mesh axes that shard L in a spec."""
    whole = Spec(("B", "L", "H", "D"), ((), (), (), ()))
    move = Equation.move(whole, whole.with_axes("L", spec.axes_of("L")))
    cos, sin = (gspmd.reshard(jnp.asarray(table), move) for table in angles)
    return cos, sin
