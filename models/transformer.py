"""The decoder-only transformer: embedding, scanned blocks, logits; every tensor sharded by a layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested
from gspmd.ops._argmax import PADDING
from gspmd.ops._attention.zigzag import in_order, ring_size, zigzag
from gspmd.ops._embedding import embed

from .blocks import Block, ParallelBlock, part
from .config import ModelConfig
from .experts import moved
from .layer import Layer
from .parameters import check_placed, initialise, parameters, stages_axes
from .remat.names import recomputed
from .vectors import along, cast_matrices, padded_dimensions, scaled

Figures = dict[str, jax.Array]
Stack = tuple[Any, Any]


class Transformer(nnx.Module):
    """Tokens [B, L] to logits [B, L, V].

    Blocks repeat with a period of `ModelConfig.period`. Those at the same position of the period are stacked in a
    leading N; each step of a scan over N runs one period.
    """

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any = jnp.float32):
        self.config, self.layout, self.dtype = config, layout, dtype
        self.embedding = Embedding(config, layout, weights["embedding"], dtype)
        self.blocks = blocks(config, layout, weights["blocks"], dtype)
        self.output = Output(config, layout, weights["output"], dtype)

    def __call__(
        self, tokens: jax.Array, *, key: jax.Array | None = None, train: bool = False
    ) -> tuple[jax.Array, Figures]:
        """Return the logits, placed as `output.logits`, and the figures of the expert layers, stacked over layers.

        Args:
            tokens: [B, L] integers, placed as `embedding.tokens`.
            key: random key of the routers, for training.
            train: whether to use the routers' random draws and capacity of training.
        """
        at = self.layout.spec
        devices, (into, out) = ring_size(at("attention.key")), map(at, ("embedding.tokens", "output.logits"))
        x, figures = self.hidden(_reordered(zigzag, tokens, into, devices), key=key, train=train)
        return _reordered(in_order, self.logits(x), out, devices), figures

    def hidden(
        self, tokens: jax.Array, *, key: jax.Array | None = None, train: bool = False
    ) -> tuple[jax.Array, Figures]:
        """Return the residual stream [B, L, E] after the last block, before the last norm, and the experts' figures.

        Args:
            tokens: [B, L] integers, placed as `embedding.tokens`, in zigzag order if `attention.key`
                shards L; the stream has the same order.
            key: random key of the routers, for training.
            train: whether to use the routers' random draws and capacity of training.
        """
        with part(self.layout, "embedding"):
            x = self.embedding(tokens)
        keys = None if key is None else jax.random.split(key, self.config.layers // self.config.period)
        definition, weights = self.stacked()
        return run_blocks(self.config, (definition, cast_matrices(weights, self.dtype)), x, keys, train=train)

    def stacked(self) -> Stack:
        """Return the blocks of one period, and the weights of all periods, stacked in a leading N for a scan.

        If a pipeline shards N over stages, the weights are gathered: only `loss` runs in stages.
        """
        definition, weights = nnx.split(self.blocks)
        if not stages_axes(self.layout):
            return definition, weights
        rows, gathered = parameters(self.config, self.layout), []
        for path, leaf in nnx.to_flat_state(weights):
            spec = rows[".".join(map(str, ("blocks", *path)))].spec
            # The leaf belongs to the model, whose weights must stay sharded: so it is not changed in place.
            gathered.append((path, leaf.replace(moved(leaf.get_value(), spec, spec.with_axes("N", ())))))
        return definition, nnx.from_flat_state(gathered)

    def logits(self, x: jax.Array) -> jax.Array:
        """Return float32 logits [B, L, V] of a residual stream [B, L, E] that is placed as `stream`."""
        with part(self.layout, "output"):
            return self.output(x, self.embedding)


def run_blocks(
    config: ModelConfig, stack: Stack, x: jax.Array, keys: jax.Array | None, *, train: bool, in_loop: bool = True
) -> tuple[jax.Array, Figures]:
    """Run stacked blocks one after the other.

    Args:
        config: the configuration of the model.
        stack: the blocks of one period, and the weights of N periods.
        x: [B, L, E], the residual stream.
        keys: [N] random keys of the routers, for training.
        train: whether to use the routers' random draws and capacity of training.
        in_loop: whether to scan them; otherwise each is traced by itself, and nothing is recomputed.

    Returns:
        The residual stream after the last block, and the experts' figures, stacked over N.
    """
    definition, weights = stack

    def step(x: jax.Array, layer: tuple[Any, jax.Array | None]) -> tuple[jax.Array, Figures]:
        weights, key = layer
        figures: Figures = {}
        for block in nnx.merge(definition, weights):
            x, of_block = block(x, key=key, train=train)
            figures |= of_block
        return x, figures

    repeats = jax.tree.leaves(weights)[0].shape[0]
    if not in_loop:
        each = []
        for number in range(repeats):
            x, figures = step(x, jax.tree.map(lambda leaf, at=number: leaf[at], (weights, keys)))
            each.append(figures)
        return x, jax.tree.map(lambda *rows: jnp.stack(rows), *each)
    # With one repeat, recomputation saves no memory: the backward pass would hold all recomputed arrays at once.
    return jax.lax.scan(recomputed(step, config.remat_name if repeats > 1 else "none"), x, (weights, keys))


class Embedding(Layer):
    """The embedding table."""

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, jax.Array], dtype: Any):
        super().__init__(config, layout.section("embedding"), weights, dtype)
        self.factor = math.sqrt(config.embed) if config.scale_embedding else 1.0

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return rows of the table, times √E if the configuration scales them, placed as the residual stream."""
        equation, options = self.at.equation(f"tokens, table -> {stream_line(self.config)}"), {}
        if self.parameter("scale") is not None:
            along_rows = self.at.spec("table").without("E")
            scales = moved(self.vector("scale"), self.at.spec("output.bias"), along_rows)
            options = {"scales": scales, "dtype": self.dtype}
        return embed(tokens, self.matrix("table"), equation, **options) * self.factor  # [B, L] -> [B, L, E]


class Output(Layer):
    """The last norm, and the logits by the embedding table or an untied one."""

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, jax.Array], dtype: Any):
        super().__init__(config, layout.section("output"), weights, dtype)
        self.padded = padded_dimensions(config, layout).get("V")

    def __call__(self, x: jax.Array, embedding: Embedding) -> jax.Array:
        """Return float32 logits [B, L, V] of x, by the tied table and its scales, or by an untied one."""
        line, holder = ("embedding.table", embedding) if self.config.tied else ("table", self)
        where, logits = stream_line(self.config), self.at.spec("logits")
        out, y = f"{where}, {line} -> logits", self.normed(where, x)  # [B, L, E] -> [B, L, V]
        table = holder.matrix("table")
        product = self.at.einsum(out, y, table, via="in_via", preferred_element_type=jnp.float32)
        product = self.adapted(out, product, y)
        if (scale := holder.parameter("scale")) is not None:
            product = scaled(product, scale[...], logits, self.at.spec("bias"))
        if (bias := self.parameter("bias")) is not None:
            product = self.at.add_bias("logits, bias", product, bias[...])
        if self.padded is None:
            return product
        return product + along(np.where(self.padded.origins < 0, PADDING, 0.0), "V", logits)  # no token is padding


def _reordered(order: Callable[[jax.Array, int], jax.Array], x: jax.Array, spec: Spec, devices: int) -> jax.Array:
    """Change the order of tokens of an array that is sharded along L: it is gathered, reordered and sharded again."""
    if devices == 1:
        return x
    whole = spec.with_axes("L", ())
    x = order(gspmd.reshard(x, Equation.move(spec, whole)), devices)
    return gspmd.reshard(x, Equation.move(whole, spec))


def blocks(config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any) -> nnx.List:
    """Return the blocks of one period, each with the weights of all periods, stacked in a leading N."""
    block = ParallelBlock if config.block == "parallel" else Block
    return nnx.List([block(config, layout, weights[str(i)], dtype) for i in range(config.period)])


def stream_line(config: ModelConfig) -> str:
    """Return the line of the residual stream between blocks, which is that of the first layer of a block."""
    return "attention.residual" if config.block == "serial" else "ffn.residual"


def stream(config: ModelConfig, layout: Layout) -> Spec:
    """Return the spec of the residual stream between blocks."""
    return layout.spec(stream_line(config))


def build(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, key: jax.Array, dtype: Any = jnp.float32
) -> Transformer:
    """Build a model with initial parameters, each drawn with its sharding.

    Args:
        config: sizes and choices.
        layout: a `gspmd.Layout`.
        mesh: devices with the layout's axes.
        key: one random key; the same key gives the same model on every mesh and in every layout.
        dtype: compute dtype, float32 or bfloat16. Parameters, norms, softmax, router and loss are float32.

    Returns:
        A Flax NNX module. Call it under `jax.set_mesh(mesh)`.

    Raises:
        ValueError: a spec does not fit the model or the mesh, or the config asks for int8.
    """
    if config.int8:
        raise ValueError("cannot build a model of int8 weights from a key. Build it with int8 off, and quantize it.")
    rows = parameters(config, layout)
    check_placed("cannot build the model", rows, mesh)
    return Transformer(config, layout, nested(initialise(rows, mesh, key)), jnp.dtype(dtype))


def arrays(model: Transformer) -> dict[str, jax.Array]:
    """Return the model's parameters by path, in the order of `parameters`: the tree that a training step updates."""
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    return {path: leaves[path].get_value() for path in parameters(model.config, model.layout)}


def mesh_of(values: Mapping[str, Any]) -> Mesh:
    """Return the mesh on which parameters are placed.

    Raises:
        ValueError: the parameters are not placed on a mesh of devices.
    """
    sharding = getattr(next(iter(values.values())), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise ValueError("the model's parameters are not placed on a mesh.\n  Build or load the model on one.")
    return sharding.mesh


def with_arrays(model: Transformer, values: Mapping[str, Any]) -> Transformer:
    """Return the same model with other parameters, by path; `values` may be tracers, or shapes."""
    return Transformer(model.config, model.layout, nested(values), model.dtype)
