"""The transformer: embedding, scanned blocks, logits and an optional encoder, with every tensor sharded by a layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from gspmd.layouts.rules.keys import ENCODER
from gspmd.ops._argmax import PADDING
from gspmd.ops._attention.zigzag import in_order, ring_size, zigzag
from gspmd.ops._embedding import embed

from .blocks import Block, ParallelBlock, part
from .config import ModelConfig, Remat
from .context import Context, check_inputs, context_of, positions_in, token_positions, with_memory
from .layer import Layer
from .parameters import check_placed, initialise, parameters, stages_axes
from .placement import batch_spec, moved
from .remat.names import recomputed
from .vectors import along, cast_matrices, padded_dimensions, scaled

Figures = dict[str, jax.Array]


class Stack(NamedTuple):
    """The blocks of an encoder or decoder, split into Flax graph definitions and weights (`nnx.split`).

    Attributes:
        first: the graph definition and the weights of each block before the repeating blocks. These weights have no
            leading dimension N.
        definition: the graph definition of one period, the blocks that are repeated.
        weights: the weights of all periods, stacked in a leading dimension N for a scan.
    """

    first: tuple[tuple[Any, Any], ...]
    definition: Any
    weights: Any

    @classmethod
    def of(cls, blocks: Sequence[nnx.Module], lead: int) -> Stack:
        """Make a stack from blocks; the first `lead` blocks do not repeat."""
        first = (nnx.split(block) for block in blocks[:lead])
        return cls(tuple((graph, one_layer(own)) for graph, own in first), *nnx.split(nnx.List(blocks[lead:])))

    def cast(self, dtype: Any) -> Stack:
        """Return the blocks with their matrices cast to a compute dtype."""
        first = tuple((graph, cast_matrices(own, dtype)) for graph, own in self.first)
        return self._replace(first=first, weights=cast_matrices(self.weights, dtype))

    @property
    def repeats(self) -> int:
        """N, the number of periods."""
        return jax.tree.leaves(self.weights)[0].shape[0]


def one_layer(weights: Any) -> Any:
    """Remove the leading dimension from the weights [1, ...] of a single layer."""
    return jax.tree.map(lambda leaf: leaf[0], weights)


class BlockStack(nnx.Module):
    """The blocks of a decoder or of an encoder, and the stack's table of relative position biases if there is one.

    After the first `ModelConfig.lead` blocks, blocks repeat with a period. The weights of blocks at the same position
    of the period are stacked in a leading dimension N (`ModelConfig.weight_stacks`). Each step of a scan over N runs
    one period.

    Attributes:
        within: the path of this stack of blocks in the model.
    """

    within: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any):
        self.config, self.layout, self.dtype = config, layout, dtype
        self.blocks = blocks(config, layout, weights["blocks"], dtype)
        if "relative" in weights:
            self.relative = nnx.Param(weights["relative"])

    @property
    def table(self) -> jax.Array | None:
        """The table of relative position biases [R, H], or None if the model has none."""
        table = getattr(self, "relative", None)
        return None if table is None else table[...]

    def run(self, x: jax.Array, context: Context, *, key: jax.Array | None, train: bool) -> tuple[jax.Array, Figures]:
        """Return the residual stream [B, L, E] after the blocks, and the experts' metrics, stacked over layers."""
        stack = self.stacked().cast(self.dtype)
        keys = None if key is None else jax.random.split(key, len(stack.first) + stack.repeats)
        return run_blocks(self.config, stack, x, context, keys, train=train)

    def stacked(self) -> Stack:
        """Return the blocks in the form that a scan needs.

        If a pipeline shards N over stages, the weights are gathered, because only `loss` runs in stages.
        """
        lead = self.config.lead if self.config.stacked else 0
        stack = Stack.of([*self.blocks], lead)
        if not stages_axes(self.layout):
            return stack
        rows, gathered = parameters(self.config, self.layout), []
        for (place, *path), leaf in nnx.to_flat_state(stack.weights):
            assert isinstance(place, int)
            spec = rows[".".join(map(str, (*self.within, "blocks", lead + place, *path)))].spec
            # The leaf belongs to the model, whose weights must stay sharded: so it is not changed in place.
            gathered.append(((place, *path), leaf.replace(moved(leaf.get_value(), spec, spec.with_axes("N", ())))))
        return stack._replace(weights=nnx.from_flat_state(gathered))


class Encoder(BlockStack):
    """The blocks that map an embedded source [B, T, E] to the residual stream [B, T, E] of the encoder.

    Every token attends to all tokens of its segment. The layout is `Layout.stack("encoder")` of the model's layout.
    """

    within = ("encoder",)

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any):
        super().__init__(config, layout, weights, dtype)
        self.output = Layer(config, layout.section("output"), weights["output"], dtype)

    def __call__(
        self, x: jax.Array, segments: jax.Array | None, *, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Figures]:
        """Return the residual stream after the last block, and the experts' metrics.

        `memory_of` turns the residual stream into the decoder's memory.
        """
        context = context_of(self.config, self.layout, segments, self.table, causal=False)
        return self.run(x, context, key=key, train=train)


class Transformer(BlockStack):
    """The whole model: it maps tokens [B, L], and a source [B, T] if there is an encoder, to logits [B, L, V]."""

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any = jnp.float32):
        super().__init__(config, layout, weights, dtype)
        self.embedding = Embedding(config, layout, weights["embedding"], dtype)
        if config.encoder_layers:
            self.encoder = Encoder(config, layout.stack(ENCODER), weights["encoder"], dtype)
        self.output = Output(config, layout, weights["output"], dtype)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        source: jax.Array | None = None,
        segments: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, Figures]:
        """Return the logits, sharded as `output.logits`, and the metrics of the expert layers, stacked over layers.

        Args:
            tokens: [B, L] integers, sharded as `embedding.tokens`. A compiled program cannot detect an id outside the
                vocabulary. Such an id is embedded as zeros.
            source, segments, source_segments: as for the method `hidden`.
            key: random key for the routers in training.
            train: whether to use the routers' random draws, and the experts' capacity for training.
        """
        at = self.layout.spec
        devices, (into, out) = ring_size(at("attention.key")), map(at, ("embedding.tokens", "output.logits"))
        tokens = _reordered(zigzag, tokens, into, devices)
        x, figures = self.hidden(
            tokens, source=source, segments=segments, source_segments=source_segments, key=key, train=train
        )
        return _reordered(in_order, self.logits(x), out, devices), figures

    def hidden(
        self,
        tokens: jax.Array,
        *,
        source: jax.Array | None = None,
        segments: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, Figures]:
        """Return the residual stream [B, L, E] after the last block, before the last norm, and the experts' metrics.

        Args:
            tokens: [B, L] integers, sharded as `embedding.tokens`. They are in zigzag order if `attention.key` shards
                L, and the residual stream has the same order.
            source: [B, T] integers that the encoder reads, sharded as `batch_spec`; for an encoder–decoder only.
            segments: [B, L] integers in the order of the text, sharded as `batch_spec`: the number of the text to which
                each token belongs, counted from 1, and 0 for padding at the end. Tokens attend only to their own text.
                In every text positions begin at 0. None if every row is one text.
            source_segments: [B, T], the number of the text to which each token of the source belongs. Text s in
                `segments` attends to text s of the source in the same row, or to nothing if the source has no text s.
            key: random key for the routers in training.
            train: whether to use the routers' random draws, and the experts' capacity for training.

        Raises:
            ValueError: the model has an encoder but `source` is missing; or the model has no encoder but a source is
                given; or segments do not fit the tokens.
        """
        check_inputs(self.config, tokens, source, segments, source_segments)
        context = context_of(self.config, self.layout, segments, self.table, causal=True)
        figures: Figures = {}
        if source is not None:
            of_encoder, key = (None, None) if key is None else jax.random.split(key)
            memory, figures = self.encode(source, source_segments, key=of_encoder, train=train)
            context = with_memory(context, self.layout, memory, tokens.shape[1], segments, source_segments)
        with part(self.layout, "embedding"):
            x = self.embedding(tokens, token_positions(self.layout, tokens.shape[1], segments))
        x, of_decoder = self.run(x, context, key=key, train=train)
        both = {name: jnp.concatenate([figures[name], found]) for name, found in of_decoder.items() if figures}
        return x, both or of_decoder

    def encode(
        self,
        source: jax.Array,
        segments: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[jax.Array, Figures]:
        """Return the memory [B, T, E] of a source, sharded as `cross.memory`, and the metrics of the encoder's experts.

        Args:
            source, segments: the same as the arguments `source` and `source_segments` of the method `hidden`.
            key, train: as for the method `hidden`.
        """
        if not self.config.encoder_layers:
            raise ValueError("this model is decoder-only, and encodes nothing.\n  Set encoder_layers.")
        segments = in_encoder(self.layout, segments)
        x = embedded_source(self.config, self.layout, self.embedding.weights, source, segments, self.dtype)
        x, figures = self.encoder(x, segments, key=key, train=train)
        return memory_of(self.config, self.layout, self.encoder.output, x), figures

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the float32 logits [B, L, V] of a residual stream [B, L, E], whose spec is the result of `stream`."""
        with part(self.layout, "output"):
            return self.output(x, self.embedding)


def run_blocks(
    config: ModelConfig,
    stack: Stack,
    x: jax.Array,
    context: Context,
    keys: jax.Array | None,
    *,
    train: bool,
    in_loop: bool = True,
) -> tuple[jax.Array, Figures]:
    """Run stacked blocks one after the other.

    Args:
        config: the model configuration.
        stack: the blocks.
        x: [B, L, E], the residual stream.
        context: the arrays that attention reads besides x. They are the same for all blocks.
        keys: random keys for the routers in training: one for each block of `Stack.first`, and then one for each
            period.
        train: whether to use the routers' random draws, and the experts' capacity for training.
        in_loop: whether to scan the blocks. Otherwise each block is traced by itself, and nothing is recomputed.

    Returns:
        The residual stream after the last block, and the metrics of the experts, stacked over layers.
    """
    count = len(stack.first)  # none in a chunk of a pipeline's stage: the first stage runs them before its chunks
    of_first, keys = (None, None) if keys is None else (keys[:count], keys[count:])
    x, ahead = run_first(config, stack.first, x, context, of_first, train=train, in_loop=in_loop)
    definition, weights, repeats = stack.definition, stack.weights, stack.repeats
    lead = config.lead if config.stacked else 0
    sparse = sum(config.is_sparse(lead + place) for place in range(config.period))

    def step(x: jax.Array, layer: tuple[Any, jax.Array | None]) -> tuple[jax.Array, Figures]:
        weights, key = layer
        each: list[Figures] = []
        for place, block in enumerate(nnx.merge(definition, weights)):
            of_block = key if key is None or sparse <= 1 else jax.random.fold_in(key, place)
            # Blocks that do not repeat are recomputed one by one.
            remat = config.remat_name if in_loop and config.is_one_pattern else "none"
            x, figures = _run_block(
                *nnx.split(block), x, context, of_block, train=train, remat=remat, offload=config.offload
            )
            each += [figures] if figures else []
        if sparse <= 1:
            return x, each[0] if each else {}
        return x, jax.tree.map(lambda *rows: jnp.stack(rows), *each)

    if not in_loop:
        each = []
        for number in range(repeats):
            x, figures = step(x, jax.tree.map(lambda leaf, at=number: leaf[at], (weights, keys)))
            each.append(figures)
        return x, _of_layers(ahead, jax.tree.map(lambda *rows: jnp.stack(rows), *each), sparse)
    # With one repeat, recomputation alone saves no memory: the backward pass would hold all recomputed arrays at the
    # same time. Blocks of a pattern that does not repeat are recomputed one by one, above.
    again = repeats > 1 or (config.offload and not config.is_one_pattern)
    in_pass = recomputed(step, config.remat_name if again else "none", config.offload)
    x, figures = jax.lax.scan(in_pass, x, (weights, keys))
    return x, _of_layers(ahead, figures, sparse)


def run_first(
    config: ModelConfig,
    first: Sequence[tuple[Any, Any]],
    x: jax.Array,
    context: Context,
    keys: jax.Array | None,
    *,
    train: bool,
    in_loop: bool = True,
) -> tuple[jax.Array, list[Figures]]:
    """Run the blocks before the repeating blocks; the backward pass recomputes each of them by itself.

    The arguments are the same as for `run_blocks`.

    Returns:
        The residual stream, and the metrics of each block that has experts.
    """
    each, remat = [], config.remat_name if in_loop else "none"
    for number, (definition, weights) in enumerate(first):
        key = None if keys is None else keys[number]
        x, figures = _run_block(definition, weights, x, context, key, train=train, remat=remat, offload=config.offload)
        each += [figures] if figures else []
    return x, each


def _run_block(
    definition: Any,
    weights: Any,
    x: jax.Array,
    context: Context,
    key: jax.Array | None,
    *,
    train: bool,
    remat: Remat,
    offload: bool,
) -> tuple[jax.Array, Figures]:
    """Run one block; `remat` and `offload` are those of `recomputed`."""

    def run(x: jax.Array, weights: Any, key: jax.Array | None) -> tuple[jax.Array, Figures]:
        return nnx.merge(definition, weights)(x, context, key=key, train=train)

    return recomputed(run, remat, offload)(x, weights, key)


def _of_layers(ahead: Sequence[Figures], figures: Figures, sparse: int) -> Figures:
    """Return the metrics of all layers with experts, stacked over layers.

    Args:
        ahead: the metrics of each layer with experts that comes before the repeating layers.
        figures: the metrics of the repeating layers, [N, ...], or [N, sparse, ...] if a period has several layers with
            experts.
        sparse: number of layers with experts in a period.
    """
    if sparse > 1:
        figures = {name: x.reshape(-1, *x.shape[2:]) for name, x in figures.items()}
    if not ahead:
        return figures
    return {name: jnp.concatenate([jnp.stack([each[name] for each in ahead]), x]) for name, x in figures.items()}


class Embedding(Layer):
    """The embedding of tokens: a lookup in the embedding table."""

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, jax.Array], dtype: Any):
        super().__init__(config, layout.section("embedding"), weights, dtype)
        self.factor = math.sqrt(config.embed) if config.scale_embedding else 1.0

    @property
    def weights(self) -> dict[str, jax.Array]:
        """The embedding table and, if it is int8, its scales, by name."""
        found = {name: self.parameter(name) for name in ("table", "scale")}
        return {name: value[...] for name, value in found.items() if value is not None}

    def __call__(self, tokens: jax.Array, positions: np.ndarray | jax.Array | None = None) -> jax.Array:
        """Return rows of the table, sharded as the residual stream, and multiplied by √E if `scale_embedding` is set.

        If the model has position embeddings, they are added. If it has a norm of embeddings, the sum is normalized.

        Args:
            tokens: [B, L], sharded as `embedding.tokens`.
            positions: [L] or [B, L], sharded as `batch_spec`: the positions of the tokens. They are used if the model
                has position embeddings; None stands for 0 to L - 1.
        """
        equation, options = self.at.equation(f"tokens, table -> {stream_line(self.config)}"), {}
        if self.parameter("scale") is not None:
            along_rows = self.at.spec("table").without("E")
            scales = moved(self.vector("scale"), self.at.spec("output.bias"), along_rows)
            options = {"scales": scales, "dtype": self.dtype}
        x = embed(tokens, self.matrix("table"), equation, **options) * self.factor  # [B, L] -> [B, L, E]
        if self.config.positions in ("sinusoidal", "learned"):
            x = x + self.added(tokens.shape, positions, equation.outputs[0]).astype(x.dtype)
        return self.normed(stream_line(self.config), x) if self.config.embedding_norm else x

    def added(self, shape: tuple[int, ...], positions: np.ndarray | jax.Array | None, spec: Spec) -> jax.Array:
        """Return position embeddings [B, L, E] or [1, L, E], sharded as the residual stream, whose spec is `spec`."""
        positions = np.arange(shape[1]) if positions is None else positions
        batch = self.at.spec("tokens").with_axes("L", ())
        if self.config.positions == "learned":
            return self.learned(positions, shape, batch)
        return sinusoids(self.config, positions, batch, spec)

    def learned(self, positions: np.ndarray | jax.Array, shape: tuple[int, ...], batch: Spec) -> jax.Array:
        """Return learned position embeddings [B, L, E] for `positions`, sharded as the residual stream."""
        if isinstance(positions, np.ndarray):
            # Only constants are checked: they number the tokens of a whole row. An array has positions in the texts of
            # a packed row, or in a prompt, whose length is checked before; positions of padding do not matter.
            if shape[1] > (most := self.config.context_length or 0):
                raise ValueError(f"a sequence has {shape[1]} tokens, but this model has {most} learned positions.")
            positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), shape)
            batch = Spec(batch.dims, ((), ()))
        placed = moved(positions, batch, self.at.spec("tokens"))
        line = f"tokens, positions -> {stream_line(self.config)}"
        return embed(placed, self.matrix("positions"), self.at.equation(line))  # [B, L] -> [B, L, E]


def in_encoder(layout: Layout, segments: jax.Array | None) -> jax.Array | None:
    """Reshard the segments of a source [B, T] from `batch_spec` of the model to `batch_spec` of the encoder."""
    if segments is None:
        return None
    return moved(segments, batch_spec(layout), batch_spec(layout.stack(ENCODER)))


def embedded_source(
    config: ModelConfig,
    layout: Layout,
    weights: Mapping[str, jax.Array],
    source: jax.Array,
    segments: jax.Array | None,
    dtype: Any,
) -> jax.Array:
    """Return the embedded tokens [B, T, E] of a source, sharded as the encoder's residual stream.

    Args:
        config: the model configuration.
        layout: the layout of the decoder, including the encoder's section.
        weights: the weights of the embedding.
        source: [B, T], as for `Transformer.hidden`.
        segments: the segments of the source, from `in_encoder`.
        dtype: compute dtype.
    """
    inner = layout.stack(ENCODER)
    placed = moved(source, batch_spec(layout), inner.spec("embedding.tokens"))
    with part(inner, "embedding"):
        embedding = Embedding(config, inner, weights, dtype)
        return embedding(placed, None if segments is None else positions_in(segments))


def memory_of(config: ModelConfig, layout: Layout, output: Layer, x: jax.Array) -> jax.Array:
    """Return the memory [B, T, E] of a decoder, the normalized output of an encoder, sharded as `cross.memory`.

    Args:
        config: the model configuration.
        layout: the layout of the decoder, including the encoder's section.
        output: the encoder's last norm.
        x: [B, T, E], the residual stream after the encoder's last block.
    """
    inner = layout.stack(ENCODER)
    with part(inner, "output"):
        x = output.normed(stream_line(config), x)
    return moved(x, stream(config, inner), layout.spec("cross.memory").rename({"T": "L"}))


def sinusoids(config: ModelConfig, positions: np.ndarray | jax.Array, batch: Spec, spec: Spec) -> jax.Array:
    """Return sinusoidal position embeddings [B, L, E] sharded as `spec`; B is 1 if `positions` are constants.

        [b, l, i] = sin(p · w_i) for i < E/2, else cos(p · w_(i - E/2));  w_i = 10000^(-i / (E/2 - 1))

    Args:
        config: the model configuration; `position_offset` is added to every position.
        positions: [L] constants, or [B, L] sharded as `batch`.
        batch: the spec of a batch of tokens, with L unsharded.
        spec: the spec of the residual stream.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5.
    Differs: all sines come before all cosines, and the longest wavelength is exactly 10000 · 2π, as in tensor2tensor,
        fairseq and M2M-100.
    """
    half = config.embed // 2
    waves = 10000.0 ** (-np.arange(half) / max(half - 1, 1))
    if isinstance(positions, np.ndarray):
        at = along(positions + config.position_offset, "L", spec)
    else:
        placed = moved(positions + config.position_offset, batch, Spec(batch.dims, spec.axes[:2]))
        at = placed.astype(jnp.float32)[:, :, None]
    angles = at * along(np.concatenate([waves, waves]), "E", spec)
    # Products instead of jnp.where, which refuses operands of different shardings, here over B and L, and over E.
    sines = along(np.arange(2 * half) < half, "E", spec)
    return sines * jnp.sin(angles) + (1 - sines) * jnp.cos(angles)


class Output(Layer):
    """The last norm, and the product that gives the logits, with the tied embedding table or an untied table."""

    def __init__(self, config: ModelConfig, layout: Layout, weights: Mapping[str, jax.Array], dtype: Any):
        super().__init__(config, layout.section("output"), weights, dtype)
        self.padded = padded_dimensions(config, layout).get("V")

    def __call__(self, x: jax.Array, embedding: Embedding) -> jax.Array:
        """Return the float32 logits [B, L, V] of x [B, L, E].

        They are computed with the embedding table and its scales if the table is tied, otherwise with a table of their
        own.
        """
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
        if (bound := self.config.logit_softcap) is not None:
            product = bound * jnp.tanh(product / bound)
        if self.padded is None:
            return product
        # Rows of padding get the lowest logits, so that none of them is chosen as a token.
        return product + along(np.where(self.padded.origins < 0, PADDING, 0.0), "V", logits)


def _reordered(order: Callable[[jax.Array, int], jax.Array], x: jax.Array, spec: Spec, devices: int) -> jax.Array:
    """Change the order of tokens in an array that is sharded along L: gather it, reorder it and shard it again."""
    if devices == 1:
        return x
    whole = spec.with_axes("L", ())
    x = order(gspmd.reshard(x, Equation.move(spec, whole)), devices)
    return gspmd.reshard(x, Equation.move(whole, spec))


def blocks(config: ModelConfig, layout: Layout, weights: Mapping[str, Any], dtype: Any) -> nnx.List:
    """Return the blocks of a period, each with the weights of all periods, stacked in a leading dimension N."""
    block = ParallelBlock if config.block == "parallel" else Block
    stacks = config.weight_stacks()
    return nnx.List(
        block(config, layout, weights[place], dtype, config.layer_kind(stacks[int(place)][0]))
        for place in sorted(weights, key=int)
    )


def stream_line(config: ModelConfig) -> str:
    """Return the layout key of the residual stream between blocks, which is the input of a block's first layer."""
    return "attention.residual" if config.block == "serial" else "ffn.residual"


def stream(config: ModelConfig, layout: Layout) -> Spec:
    """Return the spec of the residual stream between blocks."""
    return layout.spec(stream_line(config))


def build(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, key: jax.Array, dtype: Any = jnp.float32
) -> Transformer:
    """Build a model with initial parameters, each drawn with its sharding.

    Args:
        config: the model configuration.
        layout: a `gspmd.Layout`.
        mesh: a mesh of devices with the layout's mesh axes.
        key: a random key. The same key gives the same model on every mesh and in every layout.
        dtype: compute dtype, float32 or bfloat16. Parameters, norms, softmax, router and loss are float32.

    Returns:
        A Flax NNX module. Call it under `jax.set_mesh(mesh)`.

    Raises:
        ValueError: a spec does not fit the model or the mesh, or the model configuration asks for int8.
    """
    if config.int8:
        raise ValueError("cannot build a model of int8 weights from a key. Build it with int8 off, and quantize it.")
    rows = parameters(config, layout)
    check_placed("cannot build the model", rows, mesh)
    return Transformer(config, layout, nested(initialise(rows, mesh, key)), jnp.dtype(dtype))


def arrays(model: Transformer) -> dict[str, jax.Array]:
    """Return a mapping from path to parameter array, in the order of `parameters`.

    This mapping is what a training step takes and updates.
    """
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    return {path: leaves[path].get_value() for path in parameters(model.config, model.layout)}


def mesh_of(values: Mapping[str, Any]) -> Mesh:
    """Return the mesh over which parameters are sharded.

    Raises:
        ValueError: the parameters are not on a mesh of devices.
    """
    sharding = getattr(next(iter(values.values())), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise ValueError("the model's parameters are not placed on a mesh.\n  Build or load the model on one.")
    return sharding.mesh


def with_arrays(model: Transformer, values: Mapping[str, Any]) -> Transformer:
    """Return the same model with other parameters; `values` maps paths to arrays, tracers or shapes."""
    return Transformer(model.config, model.layout, nested(values), model.dtype)
