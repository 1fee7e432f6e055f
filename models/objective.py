"""The training objective: the mean cross-entropy of the next token, plus the auxiliary losses of routers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested
from gspmd.layouts.rules.keys import ENCODER
from gspmd.ops._attention.zigzag import ring_size, zigzag
from gspmd.ops._cross_entropy import cross_entropy
from gspmd.pipeline import Schedule, Stages, in_rounds, pipelined
from gspmd.pipeline.microbatches import cut_batch

from .blocks import part
from .config import ModelConfig
from .context import Context, check_inputs, context_of, token_positions, with_memory
from .layer import Layer
from .parameters import ParameterRow, parameters, stages_axes
from .placement import batch_spec, label_spec, moved
from .stages import check_rounds, schedule_of
from .transformer import (
    Embedding,
    Output,
    Stack,
    Transformer,
    arrays,
    blocks,
    embedded_source,
    in_encoder,
    memory_of,
    run_blocks,
    run_first,
    stream,
)  # fmt: skip
from .vectors import cast_matrices

Values = dict[str, jax.Array]

Chunk = tuple[jax.Array, jax.Array, Values]
"""The results of a chunk of layers: the residual stream, the experts' auxiliary loss, and the experts' metrics."""

SCALAR = Spec((), ())
"""The spec of a scalar."""


def loss(
    model: Transformer,
    tokens: jax.Array,
    *,
    source: jax.Array | None = None,
    segments: jax.Array | None = None,
    source_segments: jax.Array | None = None,
    key: jax.Array | None = None,
    train: bool = True,
    schedule: str = "1f1b",
    microbatches: int = 1,
    rounds: int = 1,
    masked: bool = False,
    total: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the mean next-token cross-entropy in nats; in training, add the auxiliary losses of expert layers.

    Args:
        model: a sharded model.
        tokens: [B, L+1] integers, sharded as `batch_spec`; every token except the first is predicted. A compiled
            program cannot detect an id outside the vocabulary. Such an id is embedded as zeros, and as a label it has a
            logit of 0.
        source: [B, T] integers for the encoder of an encoder–decoder, sharded as `batch_spec`.
        segments: [B, L+1] integers, sharded as `batch_spec`: the number of the text to which each token belongs,
            counted from 1, and 0 for padding at the end of a row. The first token of a text and padding are not
            predicted, and the mean is taken over all remaining tokens. None if every row is a single text.
        source_segments: [B, T], the number of the text to which each token of the source belongs. Text s in `segments`
            is generated from text s of the source.
        key: random key of the routers.
        train: whether to add auxiliary losses and to use the routers' random draws.
        schedule: "1f1b", "gpipe" or "zero-bubble", if the layout has stages; see `gspmd.pipeline`.
        microbatches: number of parts of the batch that go through the stages in turn. The routers' random draws differ
            between parts.
        rounds: number of chunks of layers per stage: each microbatch goes through the stages this many times.
        masked: whether some tokens, such as the tokens of a prompt, are read but not predicted. Such a token t is given
            as its complement `~t`, which is negative, and the mean is taken over the predicted tokens only.
        total: number of tokens over which the mean is taken; by default the number of predicted tokens in `tokens`. If
            `tokens` are one part of a batch, pass the number of predicted tokens in the whole batch, divided by the
            number of parts. The mean over the parts is then the mean over the batch, even if some parts have more
            predicted tokens than others.

    Returns:
        The loss, a float32 scalar, and a dictionary of metrics. The dictionary has `cross_entropy`. For a model with
        experts it also has `aux_loss`, summed over the expert layers, and for each of these layers `load` [expert
        layers, X], `dropped`, `entropy` and `confidence`, which `gspmd.moe.expert_layer` describes.
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    if segments is not None:
        tokens, masked = only_within(tokens, segments), True
        segments = segments[:, :-1]
    inner = {"source": source, "segments": segments, "source_segments": source_segments}
    if table := schedule_of(model.config, model.layout, mesh, schedule, microbatches, rounds):
        total = predicted(model.layout, tokens) if masked and total is None else total
        return _pipelined(model, tokens, inner, key, train, table, total, *stages_axes(model.layout))
    check_rounds(rounds, model.layout)
    if microbatches > 1:
        raise PlanError("microbatches go through stages, but this layout has no stages.\n  Leave microbatches at 1.")
    total = predicted(model.layout, tokens) if masked and total is None else total
    inputs, labels = split_tokens(tokens, model.layout)
    x, figures = model.hidden(inputs if total is None else _read(inputs), **inner, key=key, train=train)
    entropy = _mean_cross_entropy(model.layout, model.logits(x), labels, total)
    aux = {"cross_entropy": entropy, **_summary(figures)}
    return (entropy + aux["aux_loss"] if train and figures else entropy), aux


def _mean_cross_entropy(
    layout: Layout, logits: jax.Array, labels: jax.Array, total: jax.Array | None = None
) -> jax.Array:
    """Return the mean cross-entropy of all labels.

    If `total` is given, return the sum over the non-negative labels, divided by `total`.
    """
    with part(layout, "output"):
        if total is None:
            each = cross_entropy(logits, labels, layout["output.logits"])
        else:
            each = cross_entropy(logits, _read(labels), layout["output.logits"])
            # Not a product with 0: the entropy of a masked label may be infinite.
            each = jnp.where(labels < 0, jnp.float32(0), each)
        summed = gspmd.reshard(each, Equation.move(label_spec(layout), SCALAR))
        return summed / (each.size if total is None else total)


def predicted(layout: Layout, tokens: jax.Array) -> jax.Array:
    """Return the number of predicted tokens in a batch, at least 1.

    All tokens are predicted, except the first token of each row and tokens that are negative.

    Args:
        layout: a `gspmd.Layout`.
        tokens: [B, L+1] integers, sharded as `batch_spec`; a token t that is not predicted is given as its complement
            `~t`.
    """
    with part(layout, "output"):
        each = (tokens[:, 1:] >= 0).astype(jnp.float32)
        return jnp.maximum(gspmd.reshard(each, Equation.move(batch_spec(layout), SCALAR)), 1.0)


def only_within(tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """Mark padding, and the first token of each text except the row's first text, as read but not predicted.

    Args:
        tokens, segments: [B, L+1], as for `loss`.

    Example:
        >>> only_within(jnp.array([[5, 6, 7, 8, 0]]), jnp.array([[1, 1, 2, 2, 0]])).tolist()
        [[5, 6, -8, 8, -1]]

    Raises:
        ValueError: segments and tokens have different shapes.
    """
    if segments.shape != tokens.shape:
        raise ValueError(f"segments have shape {segments.shape}, but tokens have {tokens.shape}; these must be equal.")
    within = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) | (tokens[:, 1:] < 0)
    return jnp.concatenate([tokens[:, :1], jnp.where(within, tokens[:, 1:], ~tokens[:, 1:])], axis=1)


def _read(tokens: jax.Array) -> jax.Array:
    """Replace each complement `~t` among the tokens by the token t."""
    return jnp.where(tokens < 0, ~tokens, tokens)


def _pipelined(
    model: Transformer,
    tokens: jax.Array,
    inner: Mapping[str, jax.Array | None],
    key: jax.Array | None,
    train: bool,
    table: Schedule,
    total: jax.Array | None,
    axis: str,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the loss of a model whose layers are split into stages along a mesh axis.

    The first stage embeds the tokens, and the last stage computes the loss.
    """
    config, dtype = model.config, model.dtype
    check_inputs(config, tokens[:, :-1], **inner)
    rows, values = parameters(config, model.layout), arrays(model)
    prefixes = ("encoder.", "") if config.encoder_layers else ("",)
    stacked = [_stacked(values, prefix, config.lead) for prefix in prefixes]
    shared = {path: value for path, value in values.items() if not any(path in each for each in stacked)}
    weights = tuple(_in_rounds(each, rows, table.rounds, dtype) for each in stacked)
    data = rows["embedding.table"].spec.reduced  # `for_stages` gives all weights the same axes; empty in evaluation
    layout, placed = model.layout.inside(data), batch_spec(model.layout)
    whole = {"tokens": tokens} | {name: x for name, x in inner.items() if x is not None}
    batches: dict[str, Any] = {name: cut_batch(x, placed, table.microbatches) for name, x in whole.items()}
    if total is not None:  # divided so that the mean over microbatches and pipelines is over all predicted tokens
        parts = table.microbatches * math.prod(jax.sharding.get_abstract_mesh().shape[each] for each in data)
        batches["total"] = jnp.full((table.microbatches,), total / parts)
    if train and key is not None:
        keys = key[None]
        if table.microbatches > 1:
            keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(table.microbatches))
        batches["keys"] = jax.vmap(partial(_keys, config))(keys)
    # A backward pass in two parts is split between the operations of layers, so they must not be hidden in a loop.
    how = _Stacks(config, layout, dtype, table.stages * table.rounds, train, in_loop="weights" not in table.kinds)
    stages, streams = [Stages(how.target, how.decoder, how.last, chunk_reads_shared=True)], [stream(config, layout)]
    if config.encoder_layers:
        stages.insert(0, Stages(how.source, how.encoder, chunk_reads_shared=True))
        streams.insert(0, stream(config, layout.stack(ENCODER)))
    held = {path: rows[path].spec.without_partial() for path in shared}
    value, each = pipelined(stages, table, axis=axis, stream=streams, shared=held, data=data)(shared, weights, batches)
    figures = _of_all_layers(jax.lax.stop_gradient(each), axis)
    aux = _summary(figures)
    entropy = value - aux["aux_loss"] if train and figures else value
    return value, {"cross_entropy": jax.lax.stop_gradient(entropy), **aux}


@dataclass(frozen=True)
class _Stacks:
    """The computations of a model's stages, for `gspmd.pipeline.Stages`: embedding, chunks of layers, and loss.

    Attributes:
        config: the model configuration.
        layout: the layout inside the shard_map of the stages. It is the decoder's layout and contains the encoder's
            section.
        dtype: compute dtype.
        chunks: the number of chunks of layers in a stack.
        train: whether to use the routers' random draws and capacity for training.
        in_loop: whether to scan over the layers of a chunk.
    """

    config: ModelConfig
    layout: Layout
    dtype: Any
    chunks: int
    train: bool
    in_loop: bool

    def source(self, shared: Values, batch: Values) -> jax.Array:
        """Embed the source."""
        segments = in_encoder(self.layout, batch.get("source_segments"))
        weights = nested(shared)["embedding"]
        return embedded_source(self.config, self.layout, weights, batch["source"], segments, self.dtype)

    def target(self, shared: Values, batch: Values) -> jax.Array:
        """Embed the tokens of the decoder, and run the leading layers, which come before the repeating ones."""
        inputs, _ = split_tokens(batch["tokens"], self.layout)
        with part(self.layout, "embedding"):
            table = Embedding(self.config, self.layout, nested(shared)["embedding"], self.dtype)
            at = token_positions(self.layout, inputs.shape[1], batch.get("segments"))
            x = table(_read(inputs) if "total" in batch else inputs, at)
        if not self.config.lead:
            return x
        first = Stack.of(blocks(self.config, self.layout, nested(shared)["blocks"], self.dtype), self.config.lead)
        context = context_of(self.config, self.layout, batch.get("segments"), shared.get("relative"), causal=True)
        first = first.cast(self.dtype).first
        return run_first(self.config, first, x, context, None, train=self.train, in_loop=self.in_loop)[0]

    def encoder(
        self, shared: Values, weights: Mapping[str, Any], x: jax.Array, batch: Values, number: jax.Array
    ) -> Chunk:
        """Run a chunk of the encoder's layers."""
        at = self.layout.stack(ENCODER)
        segments = in_encoder(self.layout, batch.get("source_segments"))
        context = context_of(self.config, at, segments, shared.get("encoder.relative"), causal=False)
        keys = batch["keys"][0] if "keys" in batch else None
        # The backward pass computes a chunk again, except for its output, which no loss reads here. A loop of one turn
        # would hide from the plan that the output is left out.
        in_loop = self.in_loop and self.config.encoder_layers > self.chunks * self.config.pattern
        return self._chunk(at, weights, x, context, keys, number, in_loop)

    def decoder(
        self,
        shared: Values,
        weights: Mapping[str, Any],
        x: jax.Array,
        batch: Values,
        number: jax.Array,
        encoded: jax.Array | None = None,
    ) -> Chunk:
        """Run a chunk of the decoder's layers; `encoded` is the output of an encoder before its last norm, or None."""
        segments = batch.get("segments")
        context = context_of(self.config, self.layout, segments, shared.get("relative"), causal=True)
        if encoded is not None:
            section = self.layout.stack(ENCODER).section("output")
            norm = Layer(self.config, section, nested(shared)["encoder"]["output"], self.dtype)
            memory = memory_of(self.config, self.layout, norm, encoded)
            context = with_memory(context, self.layout, memory, x.shape[1], segments, batch.get("source_segments"))
        keys = batch["keys"][-1] if "keys" in batch else None
        return self._chunk(self.layout, weights, x, context, keys, number, self.in_loop)

    def last(self, shared: Values, x: jax.Array, batch: Values) -> jax.Array:
        """Compute the cross-entropy of one microbatch."""
        of = nested(shared)
        embedding = Embedding(self.config, self.layout, of["embedding"], self.dtype)
        with part(self.layout, "output"):
            logits = Output(self.config, self.layout, of["output"], self.dtype)(x, embedding)
        labels = split_tokens(batch["tokens"], self.layout)[1]
        return _mean_cross_entropy(self.layout, logits, labels, batch.get("total"))

    def _chunk(
        self,
        layout: Layout,
        weights: Mapping[str, Any],
        x: jax.Array,
        context: Context,
        keys: jax.Array | None,
        number: jax.Array,
        in_loop: bool,
    ) -> Chunk:
        """Run a chunk of a stack's layers; `keys` are the random keys of all chunks of the stack."""
        stack = Stack.of(blocks(self.config, layout, weights, self.dtype), 0).cast(self.dtype)
        if keys is not None:
            each = keys.shape[0] // self.chunks
            keys = jax.lax.dynamic_slice_in_dim(keys, number * each, each)
        x, figures = run_blocks(self.config, stack, x, context, keys, train=self.train, in_loop=in_loop)
        return x, jnp.sum(figures["aux_loss"]) if self.train and figures else jnp.float32(0), figures


def _stacked(values: Values, prefix: str, lead: int) -> Values:
    """Return the weights of a stack's repeating blocks, by path; `lead` is the number of blocks before them."""
    of_blocks = {path: path.removeprefix(f"{prefix}blocks.") for path in values if path.startswith(f"{prefix}blocks.")}
    return {path: values[path] for path, within in of_blocks.items() if int(within.partition(".")[0]) >= lead}


def _in_rounds(values: Values, rows: Mapping[str, ParameterRow], rounds: int, dtype: Any) -> dict[str, Any]:
    """Return the weights of a stack's repeating blocks in the form that `pipelined` needs: [R, N, ...] for R rounds.

    The weights are nested first by the position of their block in the repeating pattern, and then by their names.
    """
    prefix = next(iter(values)).partition("blocks.")[0]
    short = {path: path.removeprefix(f"{prefix}blocks.") for path in values}
    stacked = nested({short[path]: value for path, value in values.items()})
    if rounds == 1:
        return jax.tree.map(lambda value: value[None], stacked)
    # matrices are cast first, so that they are sent in the compute dtype, with fewer bytes
    specs = nested({short[path]: rows[path].spec for path in values})
    return jax.tree.map(partial(in_rounds, rounds=rounds), cast_matrices(stacked, dtype), specs)


def _keys(config: ModelConfig, key: jax.Array) -> tuple[jax.Array, ...]:
    """Split the random key of a batch as `BlockStack.run` does.

    Return, for each stack, one key for each period of its repeating blocks.
    """
    if not config.encoder_layers:
        return (jax.random.split(key, config.lead + config.repeats)[config.lead :],)
    layers = config.encoder_layers, config.layers
    return tuple(jax.random.split(each, count // config.pattern) for each, count in zip(jax.random.split(key), layers))


def _of_all_layers(each: Sequence[Values], axis: str) -> Values:
    """Gather the metrics [N, ...] of all layers of all stacks onto every stage; layers of the encoder come first."""
    found = [{name: _of_layers(x, axis) for name, x in figures.items()} for figures in each]
    return {name: jnp.concatenate([figures[name] for figures in found]) for name in found[0]}


def _of_layers(x: jax.Array, axis: str) -> jax.Array:
    """Gather the metrics [R, N/R, ...] of R rounds onto every stage, and return them as [N, ...], by layer."""
    dims, rest = ("R", "N", "A", "B", "C")[: x.ndim], ((),) * (x.ndim - 2)
    x = moved(x, Spec(dims, ((), (axis,), *rest)), Spec(dims, ((), (), *rest)))
    return x.reshape(-1, *x.shape[2:])


def split_tokens(tokens: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Split tokens [B, L+1] into inputs and labels [B, L], sharded and ordered for `Transformer.hidden`."""
    whole = batch_spec(layout)
    devices = ring_size(layout.spec("attention.key"))
    inputs, labels = zigzag(tokens[:, :-1], devices), zigzag(tokens[:, 1:], devices)
    inputs = gspmd.reshard(inputs, Equation.move(whole, layout.spec("embedding.tokens")))
    return inputs, gspmd.reshard(labels, Equation.move(whole, label_spec(layout)))


def _summary(figures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return figures | {"aux_loss": jnp.sum(figures["aux_loss"])} if figures else {}
