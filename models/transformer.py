"""The decoder-only transformer: embedding, scanned blocks, logits; every tensor placed by a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts.section import SectionSpecs
from gspmd.layouts.vias import whole_length
from gspmd.ops._embedding import embed
from gspmd.ops._norm import rms_norm
from models.blocks import Block, ParallelBlock, part
from models.config import ModelConfig
from models.experts import moved, tokens_spec
from models.parameters import initialise, nested, parameters

Figures = dict[str, jax.Array]


class Transformer(nnx.Module):
    """Tokens [B, L] to logits [B, L, V].

    Blocks of one place in the repeating pattern are stacked over a leading N and scanned; a step of the scan runs the
    whole pattern once (`ModelConfig.period` blocks).
    """

    def __init__(self, config: ModelConfig, layout: Any, weights: Mapping[str, Any], dtype: Any = jnp.float32):
        self.config, self.layout, self.dtype = config, layout, dtype
        block = ParallelBlock if config.block == "parallel" else Block
        self.embedding = Embedding(config, layout, weights["embedding"], dtype)
        self.blocks = nnx.List([block(config, layout, weights["blocks"][str(i)], dtype) for i in range(config.period)])
        self.output = Output(config, layout, weights["output"], dtype)

    def __call__(
        self, tokens: jax.Array, *, key: jax.Array | None = None, train: bool = False
    ) -> tuple[jax.Array, Figures]:
        """Logits, placed as `output.logits`, and the figures of the expert layers, each stacked over them.

        Args:
            tokens: [B, L] integers, placed as `embedding.tokens`.
            key: randomness of the routers; needed in training only.
            train: whether routers draw, and which capacity they have.
        """
        x, figures = self.hidden(tokens, key=key, train=train)
        return self.logits(x), figures

    def hidden(
        self, tokens: jax.Array, *, key: jax.Array | None = None, train: bool = False, mask: jax.Array | None = None
    ) -> tuple[jax.Array, Figures]:
        """The residual stream behind the last block, [B, L, E], before the last norm; and the experts' figures.

        Args:
            tokens: [B, L] integers, placed as `embedding.tokens`.
            key: randomness of the routers; needed in training only.
            train: whether routers draw, and which capacity they have.
            mask: [B, L] bool, placed as the tokens: False for padding, which no expert spends a slot on. Attention
                needs none where padding stands behind the text. None when every token is real.
        """
        with part(self.layout, "embedding"):
            x = self.embedding(tokens)
        if mask is not None and self.config.moe:
            mask = moved(mask, Spec.parse(self.layout["embedding.tokens"]), tokens_spec(self.layout))
        definition, weights = nnx.split(self.blocks)
        repeats = self.config.layers // self.config.period
        keys = None if key is None else jax.random.split(key, repeats)

        def step(x: jax.Array, layer: tuple[Any, jax.Array | None]) -> tuple[jax.Array, Figures]:
            weights, key = layer
            figures: Figures = {}
            for block in nnx.merge(definition, weights):
                x, found = block(x, key=key, train=train, mask=mask)
                figures |= found
            return x, figures

        # With one repeat a backward pass holds all that it recomputed at once: nothing would be saved.
        remat = self.config.remat and repeats > 1
        return jax.lax.scan(jax.checkpoint(step) if remat else step, x, (weights, keys))

    def logits(self, x: jax.Array, *, short: bool = False) -> jax.Array:
        """Logits of a residual stream, both placed by the layout; float32.

        Args:
            x: [B, L, E], placed as `stream`.
            short: L is a position or a few, which the mesh need not divide: every tensor has its length whole.
        """
        tied = self.embedding.table if self.config.tied else None
        with part(self.layout, "output"):
            return self.output(x, tied, short)


class Embedding(nnx.Module):
    """The table of token vectors."""

    def __init__(self, config: ModelConfig, layout: Any, weights: Mapping[str, jax.Array], dtype: Any):
        self.dtype = dtype
        at = SectionSpecs(layout.section("embedding"))
        self.equation = Equation.product(at.tokens, at.table, stream(config, layout))
        self.table = nnx.Param(weights["table"])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Rows of the table, times √E, as they enter the residual stream."""
        table = self.table[...].astype(self.dtype)
        return embed(tokens, table, self.equation) * math.sqrt(table.shape[1])


class Output(nnx.Module):
    """The last norm and the product with the table, tied or the model's own."""

    def __init__(self, config: ModelConfig, layout: Any, weights: Mapping[str, jax.Array], dtype: Any):
        self.epsilon, self.dtype = config.norm_epsilon, dtype
        self.residual, self.specs = stream(config, layout), SectionSpecs(layout.section("output"))
        self.table_spec = Spec.parse(layout["embedding.table" if config.tied else "output.table"])
        self.norm = nnx.Param(weights["norm"])
        self.table = None if config.tied else nnx.Param(weights["table"])
        self.vocabulary, self.rows = config.vocabulary, config.table_rows

    def __call__(self, x: jax.Array, tied: nnx.Param | None, short: bool = False) -> jax.Array:
        """Logits [B, L, V] in float32, of an x whose length is whole on every device if it is `short`."""
        residual, logits, via = self.residual, self.specs.logits, self.specs.in_via
        if short:
            residual, logits, via = residual.with_axes("L", ()), logits.with_axes("L", ()), whole_length(via)
        table = (self.table if tied is None else tied)[...].astype(self.dtype)
        y = rms_norm(x, self.norm[...], residual, self.specs.norm, epsilon=self.epsilon)
        equation = Equation.product(residual, self.table_spec, logits)
        found = gspmd.einsum(equation, y, table, via=via, preferred_element_type=jnp.float32)
        return found if self.rows == self.vocabulary else found + self._padding(logits)

    def _padding(self, logits: Spec) -> jax.Array:
        """[1, 1, V]: 0 for a token, and for padding a logit that nothing chooses; finite, so that 0 · it is 0."""
        bias = jnp.where(jnp.arange(self.rows) < self.vocabulary, 0.0, -1e30).astype(jnp.float32)
        whole = Spec(("V",), ((),))
        return gspmd.reshard(bias, Equation.move(whole, whole.with_axes("V", logits.axes_of("V"))))[None, None]


def stream(config: ModelConfig, layout: Any) -> Spec:
    """Where the residual stream lies between blocks: as their first layer reads it."""
    return Spec.parse(layout["attention.residual" if config.block == "serial" else "ffn.residual"])


def build(
    config: ModelConfig, layout: Any, mesh: jax.sharding.Mesh, key: jax.Array, dtype: Any = jnp.float32
) -> Transformer:
    """A model with fresh parameters, each drawn where the layout places it.

    Args:
        config: sizes and choices.
        layout: a `gspmd.Layout`.
        mesh: devices with the layout's axes.
        key: one random key; the same key gives the same model on every mesh, in every layout.
        dtype: what it computes in, float32 or bfloat16. Parameters, norms, softmax, router and loss are float32.

    Returns:
        A Flax NNX module. Call it under `jax.set_mesh(mesh)`.

    Raises:
        ValueError: if a spec does not fit the model or the mesh.
    """
    rows = parameters(config, layout)
    return Transformer(config, layout, nested(initialise(rows, mesh, key)), jnp.dtype(dtype))


def arrays(model: Transformer) -> dict[str, jax.Array]:
    """The model's parameters by path, in the order of `parameters`: the tree that a training step carries."""
    found = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    return {path: found[path].get_value() for path in parameters(model.config, model.layout)}


def with_arrays(model: Transformer, values: Mapping[str, jax.Array]) -> Transformer:
    """The same model with other parameters, by path; `values` may be tracers."""
    return Transformer(model.config, model.layout, nested(values), model.dtype)
