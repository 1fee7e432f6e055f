"""The training objective: mean cross-entropy of the next token plus the routers' auxiliary losses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import PlanError
from gspmd.ops._attention.zigzag import ring_size, zigzag
from gspmd.ops._cross_entropy import cross_entropy
from gspmd.pipeline import Schedule, Stages, pipelined

from .blocks import part
from .config import ModelConfig
from .experts import moved
from .parameters import nested, parameters, stages_axes
from .transformer import Embedding, Output, Transformer, arrays, blocks, run_blocks, stream
from .vectors import cast_matrices

Values = dict[str, jax.Array]

SCALAR = Spec((), ())
"""The spec of a scalar."""


def loss(
    model: Transformer,
    tokens: jax.Array,
    *,
    key: jax.Array | None = None,
    train: bool = True,
    schedule: str = "1f1b",
    microbatches: int = 1,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the mean next-token cross-entropy in nats, plus the expert layers' auxiliary losses in training.

    Args:
        model: a placed model.
        tokens: [B, L+1] integers, placed as `batch_spec`; every token but the first is predicted.
        key: random key of the routers.
        train: whether to add auxiliary losses and use the routers' random draws.
        schedule: "1f1b", "gpipe" or "zero-bubble", where the layout splits the layers into stages: `gspmd.pipeline`.
        microbatches: parts of the batch that follow one another through the stages. The routers draw anew for each.

    Returns:
        A float32 scalar, and its parts: `cross_entropy`; with experts also `aux_loss`, the sum over their layers, and
        of each layer `load` [expert layers, X], `dropped`, `entropy` and `confidence`, see `gspmd.moe.expert_layer`.
    """
    if axes := stages_axes(model.layout):
        return _pipelined(model, tokens, key, train, schedule, microbatches, *axes)
    if microbatches > 1:
        raise PlanError("microbatches follow one another through stages, and this layout has none.\n  Leave them at 1.")
    inputs, labels = split_tokens(tokens, model.layout)
    x, figures = model.hidden(inputs, key=key, train=train)
    entropy = _mean_cross_entropy(model.layout, model.logits(x), labels)
    aux = {"cross_entropy": entropy, **_summary(figures)}
    return (entropy + aux["aux_loss"] if train and figures else entropy), aux


def _mean_cross_entropy(layout: Any, logits: jax.Array, labels: jax.Array) -> jax.Array:
    with part(layout, "output"):
        each = cross_entropy(logits, labels, layout["output.logits"])
        return gspmd.reshard(each, Equation.move(label_spec(layout), SCALAR)) / each.size


def _pipelined(
    model: Transformer,
    tokens: jax.Array,
    key: jax.Array | None,
    train: bool,
    schedule: str,
    microbatches: int,
    axis: str,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a model whose layers are stages along a mesh axis: the embedding in the first, the loss in the last.

    Microbatch m has every M-th sequence from the m-th on, so that each device cuts its own sequences.
    """
    config, layout, dtype = model.config, model.layout, model.dtype
    stages = jax.sharding.get_abstract_mesh().shape[axis]
    table, values = Schedule.of(schedule, stages, microbatches), arrays(model)
    shared = {path: value for path, value in values.items() if not path.startswith("blocks.")}
    weights = {path: value[None] for path, value in values.items() if path not in shared}
    rows, periods = parameters(config, layout), config.layers // config.period
    batches: dict[str, Any] = {"tokens": _cut(tokens, microbatches, batch_spec(layout), config)}
    if train and key is not None:
        keys = key[None]
        if microbatches > 1:
            keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(microbatches))
        batches["keys"] = jax.vmap(lambda key: jax.random.split(key, periods))(keys)

    def first(shared: Values, batch: Values) -> jax.Array:
        inputs, _ = split_tokens(batch["tokens"], layout)
        with part(layout, "embedding"):
            return Embedding(config, layout, nested(shared)["embedding"], dtype)(inputs)

    def chunk(weights: Values, x: jax.Array, batch: Values, number: jax.Array) -> tuple[jax.Array, jax.Array, Values]:
        definition, held = nnx.split(blocks(config, layout, nested(weights)["blocks"], dtype))
        stack = definition, cast_matrices(held, dtype)
        each = periods // stages
        keys = jax.lax.dynamic_slice_in_dim(batch["keys"], number * each, each) if "keys" in batch else None
        # A backward pass is split in two between the operations of layers, and not inside a loop over them.
        x, figures = run_blocks(config, stack, x, keys, train=train, in_loop=schedule != "zero-bubble")
        return x, jnp.sum(figures["aux_loss"]) if train and figures else jnp.float32(0), figures

    def last(shared: Values, x: jax.Array, batch: Values) -> jax.Array:
        of = nested(shared)
        tied = Embedding(config, layout, of["embedding"], dtype)
        with part(layout, "output"):
            logits = Output(config, layout, of["output"], dtype)(x, (tied.table, tied.scale) if config.tied else None)
        return _mean_cross_entropy(layout, logits, split_tokens(batch["tokens"], layout)[1])

    specs = {path: rows[path].spec for path in shared}
    run = pipelined(Stages(first, chunk, last), table, axis=axis, stream=stream(config, layout), shared=specs)
    value, figures = run(shared, weights, batches)
    figures = {name: moved(x[0], *_rows_of(x[0], axis)) for name, x in jax.lax.stop_gradient(figures).items()}
    aux = _summary(figures)
    entropy = value - aux["aux_loss"] if train and figures else value
    return value, {"cross_entropy": jax.lax.stop_gradient(entropy), **aux}


def _cut(tokens: jax.Array, count: int, spec: Spec, config: ModelConfig) -> jax.Array:
    """Cut a batch [B, L] that lies as `spec` into microbatches [M, B/M, L], on each device its own rows."""
    parts = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in spec.axes_of("B"))
    if tokens.shape[0] % (count * parts):
        raise PlanError(
            f"cannot cut {tokens.shape[0]} sequences, {parts} ways over devices, into {count} microbatches.\n"
            f"  Give a batch that is a multiple of {count * parts}."
        )
    if count > 1 and config.moe and config.moe.groups:
        raise PlanError(
            f"cannot cut a batch into {count} microbatches that has {config.moe.groups} groups of tokens.\n"
            "  Leave moe.groups out, so that each sequence is a group, or train with one microbatch."
        )
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    cut = Spec((*"BML",), (spec.axes_of("B"), (), spec.axes_of("L"))).partition_spec()
    shape = (tokens.shape[0] // count, count, tokens.shape[1])
    return jnp.swapaxes(jax.lax.reshape(tokens, shape, out_sharding=cut if explicit else None), 0, 1)


def _rows_of(x: jax.Array, axis: str) -> tuple[Spec, Spec]:
    """Where the figures of layers [N, ...] are, and the same whole on every stage."""
    dims, rest = ("N", "A", "B", "C")[: x.ndim], ((),) * (x.ndim - 1)
    return Spec(dims, ((axis,), *rest)), Spec(dims, ((), *rest))


def batch_spec(layout: Any) -> Spec:
    """The spec of a batch of tokens [B, L+1]: `embedding.tokens` with L unsharded, since few meshes divide L+1."""
    return layout.spec("embedding.tokens").with_axes("L", ())


def label_spec(layout: Any) -> Spec:
    """The spec of labels [B, L]: that of the logits without V."""
    return layout.spec("output.logits").without("V")


def split_tokens(tokens: jax.Array, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Split [B, L+1] into inputs and labels, each [B, L], placed and ordered as `Transformer.hidden` takes them."""
    whole = batch_spec(layout)
    devices = ring_size(layout.spec("attention.key"))
    inputs, labels = zigzag(tokens[:, :-1], devices), zigzag(tokens[:, 1:], devices)
    inputs = gspmd.reshard(inputs, Equation.move(whole, layout.spec("embedding.tokens")))
    return inputs, gspmd.reshard(labels, Equation.move(whole, label_spec(layout)))


def _summary(figures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return figures | {"aux_loss": jnp.sum(figures["aux_loss"])} if figures else {}
