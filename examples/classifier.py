"""A custom model: an encoder that reads a window of text in both directions and classifies the next character.

    gspmd train --model examples/classifier:Classifier --layout examples/classifier.toml --length 32 --steps 200

A batch is [B, L+1] tokens: the window and the byte after it, whose kind is the label. The "bits per byte" that a run
reports are bits per label here; `accuracy` is the fraction of windows whose label is the kind with the largest logit.

Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3, the encoder; Su et al. 2021 (arXiv 2104.09864), rotary
positions. Differs: norms come before the layers, and the head classifies the mean over positions.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import gspmd
from gspmd.annotate import Equation
from gspmd.ops import argmax, attention, cross_entropy, embed
from gspmd.training.model import Constant, Normal, Parameter, mean

KINDS = ("space", "lower case", "upper case", "digit", "other")


@dataclass(frozen=True)
class Classifier:
    """An encoder, with its sizes; its layers are scanned."""

    vocabulary: int = 256
    """Number of token ids."""
    embed: int = 64
    """Width of the residual stream."""
    heads: int = 8
    """Number of attention heads."""
    head_size: int = 16
    """Size of a head."""
    feed_forward: int = 128
    """Width of the feed-forward blocks."""
    layers: int = 2
    """Number of layers."""

    def sizes(self, batch, length):
        """Return the size of every dimension."""
        return {
            "B": batch, "L": length, "V": self.vocabulary, "E": self.embed, "H": self.heads, "D": self.head_size,
            "F": self.feed_forward, "Y": len(KINDS),
        }  # fmt: skip

    def parameters(self, layout):
        """Return every parameter by its path."""
        inward = Normal(self.embed**-0.5)
        from_heads = Normal((2 * self.layers * self.heads * self.head_size) ** -0.5)
        from_hidden = Normal((2 * self.layers * self.feed_forward) ** -0.5)
        of_layer = {
            "attention_norm": ("norm", "E", Constant(1.0)),
            "attention_norm_bias": ("norm_bias", "E", Constant(0.0)),
            "w_q": ("w_q", "EHD", inward),
            "w_k": ("w_k", "EHD", inward),
            "w_v": ("w_v", "EHD", inward),
            "w_o": ("w_o", "HDE", from_heads),
            "norm": ("norm", "E", Constant(1.0)),
            "norm_bias": ("norm_bias", "E", Constant(0.0)),
            "w_in": ("w_in", "EF", inward),
            "b_in": ("b_in", "F", Constant(0.0)),
            "w_out": ("w_out", "FE", from_hidden),
        }
        return {
            "table": Parameter("embedding.table", "VE", Normal(1.0)),
            **{
                f"layers.{name}": Parameter(f"encoder.{line}", dims, begin, self.layers)
                for name, (line, dims, begin) in of_layer.items()
            },
            "head.w": Parameter("head.w", "EY", inward),
            "head.bias": Parameter("head.bias", "Y", Constant(0.0)),
        }

    def loss(self, layout, params, tokens, key, train):
        """Return the mean cross-entropy for the kind of each window's last token, and the run's figures."""
        at, head = layout.section("encoder"), layout.section("head")
        normed = "stream, norm, norm_bias"
        heads = at.spec("heads")

        def layer(x, w):
            y = at.layer_norm(normed, x, w["attention_norm"], w["attention_norm_bias"])
            into_heads = "stream, (w_q, w_k, w_v) -> (heads, heads, heads)"
            q, k, v = at.einsum(into_heads, y, (w["w_q"], w["w_k"], w["w_v"]))  # [B, L, E] -> 3 × [B, L, H, D]
            y = attention(rotated(q), rotated(k), v, heads, heads.rename({"H": "K"}), causal=False)
            x = x + at.einsum("heads, w_o -> stream", y, w["w_o"])
            y = at.layer_norm(normed, x, w["norm"], w["norm_bias"])
            h = at.add_bias("hidden, b_in", at.einsum("stream, w_in -> hidden", y, w["w_in"]), w["b_in"])
            return x + at.einsum("hidden, w_out -> stream", jax.nn.gelu(h), w["w_out"]), None

        embedding = layout.section("embedding")
        batch = embedding.spec("tokens").with_axes("L", ())
        window = gspmd.reshard(tokens[:, :-1], Equation.move(batch, embedding.spec("tokens")))
        label = gspmd.reshard(kind(tokens[:, -1]), Equation.move(batch.without("L"), head.spec("logits").without("Y")))
        x = embed(window, params["table"], embedding.equation("tokens, table -> encoder.stream"))
        x, _ = jax.lax.scan(layer, x, params["layers"])
        x = at.move("stream -> head.pooled", x) / window.shape[1]  # [B, L, E] -> [B, E]
        logits = head.einsum("pooled, w -> logits", x, params["head"]["w"], preferred_element_type=jnp.float32)
        logits = head.add_bias("logits, bias", logits, params["head"]["bias"])
        spec = head.spec("logits")
        entropy = mean(cross_entropy(logits, label, spec), spec.without("Y"))
        right = (argmax(jax.lax.stop_gradient(logits), spec, "Y") == label).astype(jnp.float32)
        return entropy, {"cross_entropy": entropy, "accuracy": mean(right, spec.without("Y"))}


def kind(byte):
    """Return the index in `KINDS` of every byte."""

    def between(first, last):
        return (byte >= ord(first)) & (byte <= ord(last))

    tests = [(byte == 32) | (byte == 10), between("a", "z"), between("A", "Z"), between("0", "9")]
    return jnp.select(tests, [jnp.full_like(byte, number) for number in range(4)], jnp.full_like(byte, 4))


def rotated(x):
    """Return queries or keys [B, L, H, D], rotated by their positions."""
    length, size = x.shape[1], x.shape[3]
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, size, 2) / size)
    cos, sin = (jnp.asarray(f(angles)[None, :, None, :], x.dtype) for f in (np.cos, np.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
