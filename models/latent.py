"""Multi-head latent attention: keys and values of all heads are computed from one latent vector per token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.ops import attention

from .attention import Attention, Past
from .context import Context
from .placement import moved
from .rotary import rotate
from .vectors import masked


class LatentAttention(Attention):
    """Self-attention in which keys and values are computed from a latent [B, L, Z] of each token.

    Z is the sum of the latent's rank and the width of one rotated key, which all heads share. The first elements of a
    query are multiplied by keys computed from the latent, and its last elements by the rotated key.

    In training, and where a prompt is read in one chunk, keys and values of all heads are computed. With a cache,
    queries are multiplied by w_k_up instead, and weighted sums of latents are multiplied by w_v_up. Attention then
    reads only the cached latents, which are Z elements per token for all heads together.

    Source: DeepSeek-AI 2024, *DeepSeek-V2* (arXiv 2405.04434), section 2.1.
    """

    def attend(self, where: str, y: jax.Array, context: Context, past: Past | None = None) -> jax.Array:
        """Compute attention on a normed input y [B, L, E].

        `where` names a line of the layout: both the input and the output have the spec of this line.
        """
        config, at = self.config, self.at
        assert config.latent is not None
        rank = config.latent.rank
        q, latent = self.projected(where, y)  # [B, L, E] -> [B, L, H, D] and [B, L, Z]
        # The latent is normalized, and the shared key beside it rotated: [B, L, Z] -> [B, L, Z].
        normed = at.rms_norm("latent, latent_norm", latent[..., :rank], self.vector("latent_norm"), **self.epsilon)
        q, turned = self.turned(q, latent[:, :, None, rank:], context, past)
        latent = jnp.concatenate([normed, turned[:, :, 0]], axis=-1)
        if past is not None:
            latent = past.keep(latent, rank)
        if past is not None and not past.fresh:
            mixed = self.absorbed(q, latent, context, past)
        else:
            mixed = self.expanded(q, latent, context, in_order=past is not None)
        mixed = masked(mixed, self.padded, "H", at.spec("query"))
        out = f"query, w_o -> {where}"  # [B, L, H, D] -> [B, L, E]
        added = self.adapted(out, at.einsum(out, mixed, self.matrix("w_o")), mixed)
        return self.affine(where, checkpoint_name(added, "attention.added"), "o")

    @property
    def epsilon(self) -> dict[str, float]:
        """The keyword argument `epsilon` for the norms of latents."""
        assert self.config.latent is not None
        return {"epsilon": self.config.latent.norm_epsilon}

    def projected(self, where: str, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return queries [B, L, H, D] and latents [B, L, Z], computed from y.

        In some models the queries are computed from a latent [B, L, U] of their own.
        """
        assert self.config.latent is not None
        if not self.config.latent.query_rank:
            into = f"{where}, (w_q, w_k_down) -> (query, latent)"
            q, latent = self.at.einsum(into, y, self.matrices("w_q", "w_k_down"))
            q = self.scaled("query", self.adapted(f"{where}, w_q -> query", q, y), "q")
        else:
            into = f"{where}, (w_q_down, w_k_down) -> (latent_query, latent)"
            down, latent = self.at.einsum(into, y, self.matrices("w_q_down", "w_k_down"))
            down = self.adapted(f"{where}, w_q_down -> latent_query", down, y)
            down = self.scaled("latent_query", checkpoint_name(down, "attention.query"), "q_down")
            down = self.at.rms_norm("latent_query, q_latent_norm", down, self.vector("q_latent_norm"), **self.epsilon)
            of_query = "latent_query, w_q_up -> query"
            q = self.at.einsum(of_query, down, self.matrix("w_q_up"))
            q = self.scaled("query", self.adapted(of_query, q, down), "q_up")
        latent = self.adapted(f"{where}, w_k_down -> latent", latent, y)
        latent = self.scaled("latent", checkpoint_name(latent, "attention.key"), "k_down")
        return checkpoint_name(q, "attention.query"), latent

    def turned(self, q: jax.Array, key: jax.Array, context: Context, past: Past | None) -> tuple[jax.Array, jax.Array]:
        """Rotate the last elements of queries [B, L, H, D], and the shared key [B, L, 1, D], by their positions."""
        assert self.rotary is not None
        first = q.shape[3] - key.shape[3]
        plain, last = q[..., :first], q[..., first:]
        if past is None:
            last, key = self.rotated(self.rotary, last, key, context)
        else:
            specs = self.at.spec("query"), self.at.spec("key")
            last, key = (rotate(x, self.rotary, past.angles(spec, self.kind)) for x, spec in zip((last, key), specs))
        return jnp.concatenate([plain, last], axis=-1), key

    def expanded(self, q: jax.Array, latent: jax.Array, context: Context, *, in_order: bool) -> jax.Array:
        """Attend with keys and values of all heads; return [B, L, H, D], where D is the width of values.

        Args:
            q: the rotated queries [B, L, H, D].
            latent: the latents [B, L, Z].
            context: the context of the step.
            in_order: whether tokens are in the order of the text, as in a prompt, and not in the order that a ring
                uses. If they are and L is sharded, the keys are gathered.
        """
        assert self.config.latent is not None
        query, of_latent, rank = self.at.spec("query"), self.at.spec("latent"), self.config.latent.rank
        # A sequence is in the order of a ring if the layout shards the keys' L, and otherwise in the order of the text.
        keys = query.with_axes("L", () if in_order else self.at.spec("key").axes_of("L"))

        def made(name: str) -> jax.Array:  # [B, L, Z] -> [B, L, H, D]
            equation, x = Equation.product(of_latent, self.at.spec(f"w_{name}"), keys), latent[..., :rank]
            product = self.adapted_by(f"w_{name}", equation, gspmd.einsum(equation, x, self.matrix(f"w_{name}")), x)
            return self.scaled("query", checkpoint_name(product, "attention.expanded"), name)

        k, v = made("k_up"), made("v_up")
        k = jnp.concatenate([k, self.of_every_head(latent[..., rank:], q.shape[2], keys)], axis=-1)
        how: dict[str, Any] = self.scores(context)
        if context.segments and not in_order:
            how["segments"] = context.segments
        return attention(q, k, v, query, keys.rename({"H": "K"}), causal=context.causal, **how)

    def of_every_head(self, key: jax.Array, heads: int, keys: Spec) -> jax.Array:
        """Copy the shared key [B, L, D], sharded like the latent, to every head: [B, L, H, D], with the spec `keys`.

        The copy is written as a product with a vector of ones. Its gradient is a sum over the heads, which are sharded.
        For the gradient of a broadcast, the compiler would choose a collective that no plan counts.
        """
        before = Spec(("B", "L", "D"), (*self.at.spec("latent").axes[:2], ()))
        beside = Spec(before.dims, (*keys.axes[:2], ()))
        each = Spec(("H",), (keys.axes[2],))
        ones = moved(jnp.ones(heads, key.dtype), each.with_axes("H", ()), each)
        return gspmd.einsum(Equation.product(beside, each, keys), moved(key, before, beside), ones)

    def absorbed(self, q: jax.Array, latent: jax.Array, context: Context, past: Past) -> jax.Array:
        """Attend to cached latents instead of keys and values; arguments and result are the same as for `expanded`.

        Queries are multiplied by w_k_up, and the weighted sums of latents are multiplied by w_v_up.
        """
        assert self.config.latent is not None
        rank, first = self.config.latent.rank, q.shape[3] - self.config.latent.rotary
        # The product sums over the channels of w_k_up, so the queries are multiplied by the channels' scales first.
        plain = self.scaled("query", q[..., :first], "k_up")
        into, out = "query, w_k_up -> absorbed", "absorbed, w_v_up -> query"
        there = self.adapted(into, self.at.einsum(into, plain, self.matrix("w_k_up")), plain)  # to [B, L, H, Z]
        there = jnp.concatenate([there, q[..., first:]], axis=-1)
        query = self.at.spec("absorbed").rename({"Z": "D"})
        key = self.at.spec("key")
        mixed = past.attend_latents(there, latent, rank, query, key.with_axes(key.dims[2], ()), **self.scores(context))
        # [B, L, H, Z] -> [B, L, H, D]
        values = self.adapted(out, self.at.einsum(out, mixed, self.matrix("w_v_up")), mixed)
        return self.scaled("query", values, "v_up")

    def scores(self, context: Context) -> dict[str, Any]:
        """Return the arguments of `gspmd.ops.attention` about scores; the scale is for the width of a whole query."""
        scale = self.config.head_size**-0.5 if self.config.attention_scale is None else self.config.attention_scale
        return super().scores(context) | {"scale": scale}
