"""The training objective: mean cross-entropy of the next token plus the routers' auxiliary losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.annotate.errors import LayoutError, PlanError, report
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested
from gspmd.layouts.rules.faults import Line, one_for_each_cause
from gspmd.layouts.variants import data_axes
from gspmd.ops._attention.zigzag import ring_size, zigzag
from gspmd.ops._cross_entropy import cross_entropy
from gspmd.pipeline import Schedule, Stages, in_rounds, pipelined
from gspmd.pipeline.microbatches import cut_batch

from .blocks import part
from .config import ModelConfig
from .experts import moved
from .parameters import parameters, stages_axes
from .transformer import Embedding, Output, Transformer, arrays, blocks, run_blocks, stream
from .vectors import cast_matrices

Values = dict[str, jax.Array]

SCALAR = Spec((), ())
"""The spec of a scalar."""
_SHOWN = 6
"""Most parameters that one error names."""


def loss(
    model: Transformer,
    tokens: jax.Array,
    *,
    key: jax.Array | None = None,
    train: bool = True,
    schedule: str = "1f1b",
    microbatches: int = 1,
    rounds: int = 1,
    masked: bool = False,
    total: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the mean next-token cross-entropy in nats, plus the expert layers' auxiliary losses in training.

    Args:
        model: a placed model.
        tokens: [B, L+1] integers, placed as `batch_spec`; every token but the first is predicted.
        key: random key of the routers.
        train: whether to add auxiliary losses and use the routers' random draws.
        schedule: "1f1b", "gpipe" or "zero-bubble", where the layout splits the layers into stages: `gspmd.pipeline`.
        microbatches: parts of the batch that follow one another through the stages. The routers draw anew for each.
        rounds: how often each of them goes round the stages: chunks of layers of a stage.
        masked: whether some tokens are read and not predicted, such as those of a prompt: they stand as their
            complement, `~t`, which is below 0. The mean is then over the others.
        total: the number of tokens that the mean is over, as of `predicted`; those of `tokens` by default. For a part
            of a batch it is that of the whole batch divided by the number of parts, so that the mean over parts is
            that of the whole, however many tokens of each are predicted.

    Returns:
        A float32 scalar, and its parts: `cross_entropy`; with experts also `aux_loss`, the sum over their layers, and
        of each layer `load` [expert layers, X], `dropped`, `entropy` and `confidence`, see `gspmd.moe.expert_layer`.
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    if table := schedule_of(model.config, model.layout, mesh, schedule, microbatches, rounds):
        total = predicted(model.layout, tokens) if masked and total is None else total
        return _pipelined(model, tokens, key, train, table, total, *stages_axes(model.layout))
    check_rounds(rounds, model.layout)
    if microbatches > 1:
        raise PlanError("microbatches go through stages, and this layout has no stages.\n  Leave microbatches at 1.")
    total = predicted(model.layout, tokens) if masked and total is None else total
    inputs, labels = split_tokens(tokens, model.layout)
    x, figures = model.hidden(inputs if total is None else _read(inputs), key=key, train=train)
    entropy = _mean_cross_entropy(model.layout, model.logits(x), labels, total)
    aux = {"cross_entropy": entropy, **_summary(figures)}
    return (entropy + aux["aux_loss"] if train and figures else entropy), aux


def _mean_cross_entropy(
    layout: Layout, logits: jax.Array, labels: jax.Array, total: jax.Array | None = None
) -> jax.Array:
    """The mean over all labels, or, of a `total`, over that many: those that are not below 0."""
    with part(layout, "output"):
        if total is None:
            each = cross_entropy(logits, labels, layout["output.logits"])
        else:
            each = cross_entropy(logits, _read(labels), layout["output.logits"])
            # Not a product with 0: what stands behind a mask may be infinite.
            each = jnp.where(labels < 0, jnp.float32(0), each)
        summed = gspmd.reshard(each, Equation.move(label_spec(layout), SCALAR))
        return summed / (each.size if total is None else total)


def predicted(layout: Layout, tokens: jax.Array) -> jax.Array:
    """Return the number of tokens of a batch that are predicted, at least 1: all but the first, and those below 0.

    Args:
        layout: a `gspmd.Layout`.
        tokens: [B, L+1] integers, placed as `batch_spec`, some of them as their complement.
    """
    with part(layout, "output"):
        each = (tokens[:, 1:] >= 0).astype(jnp.float32)
        return jnp.maximum(gspmd.reshard(each, Equation.move(batch_spec(layout), SCALAR)), 1.0)


def _read(tokens: jax.Array) -> jax.Array:
    """The tokens themselves, where some stand as their complement."""
    return jnp.where(tokens < 0, ~tokens, tokens)


def schedule_of(
    config: ModelConfig,
    layout: Layout,
    mesh: Mapping[str, int],
    schedule: str = "1f1b",
    microbatches: int = 1,
    rounds: int = 1,
) -> Schedule | None:
    """Make the schedule of the stages that a layout splits a model's layers into; None where it does not.

    Args:
        config: the model's.
        layout: a `gspmd.Layout`.
        mesh: sizes of its axes.
        schedule, microbatches, rounds: as of `loss`.

    Raises:
        PlanError: as of `Schedule.of`, or the layers do not make so many rounds of stages, or groups of tokens span
            the sequences that microbatches part.
    """
    if not (axes := stages_axes(layout)):
        return None
    table, layers = Schedule.of(schedule, mesh[axes[0]], microbatches, rounds), config.sizes(1, 1)["N"]
    if layers % (table.stages * rounds):
        raise PlanError(
            f"{layers} stacked layers do not make {rounds} rounds of {table.stages} stages.\n"
            f"  Their number has to be a multiple of {table.stages * rounds}: change layers, rounds or mesh."
        )
    if microbatches > 1 and config.moe and config.moe.groups:
        raise PlanError(
            f"cannot cut a batch into {microbatches} microbatches that has {config.moe.groups} groups of tokens.\n"
            "  Leave moe.groups out, so that each sequence is a group, or train with one microbatch."
        )
    return table


def check_rounds(rounds: int, *layouts: Any) -> None:
    """Refuse rounds where there are no stages, in none of the layouts.

    Raises:
        PlanError: so.
    """
    if rounds > 1 and not any(map(stages_axes, layouts)):
        raise PlanError(f"rounds is {rounds}, and no layout here has stages to go round; set rounds to 1.")


def check_stages(rounds: int, schedule: str, *layouts: Any) -> None:
    """Refuse rounds, or another schedule than the default, where there are no stages, in none of the layouts.

    Raises:
        PlanError: so.
    """
    check_rounds(rounds, *layouts)
    if schedule != "1f1b" and not any(map(stages_axes, layouts)):
        raise PlanError(f"schedule is {schedule}, and no layout here has stages; leave it out.")


def check_lowering_of_stages(config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, schedule: str) -> None:
    """Refuse lowering `xla` in stages that cannot be trained with it, before anything is traced.

    The compiler's choice needs a region of Auto axes within the shard_map of the stages. Under Auto axes there is none,
    unless gradients are partial sums, which are taken under Explicit axes; and a backward pass in two parts cannot cut
    it. Lookups of embeddings are planned in stages, whatever the lowering.

    Raises:
        LayoutError: naming every such line of [lowering].
    """
    stages = stages_axes(layout)
    data = () if config.moe else data_axes(layout)
    if not stages or not {*mesh.axis_names} - {*stages, *data}:  # arrays are whole in the stages
        return
    if AxisType.Auto in mesh.axis_types and not data:
        fact, remedy = "stages under Auto mesh axes cannot leave collectives to the compiler.", "or Explicit axes"
    elif schedule == "zero-bubble":
        fact, remedy = "a backward pass in two parts cannot leave collectives to the compiler.", "or another schedule"
    else:
        return
    feed_forward = ("ffn", "moe") if config.moe and config.moe.every > 1 else ("moe",) if config.moe else ("ffn",)
    parts = ("default", "attention", *feed_forward, "output")
    wrong = [part for part in parts if layout.lowerings.get(part) == "xla"]
    faults = [Line(part, "xla", "lowering").at_text(fact, f"Use 'blocking', {remedy}.") for part in wrong]
    if faults:
        doing = f"cannot train with schedule {schedule} in the stages of layout '{layout.name}'"
        raise report(LayoutError, doing, one_for_each_cause(faults))


def for_stages(config: ModelConfig, layout: Layout) -> Any:
    """Return a layout with parameters as the loss of a pipeline takes them in training: `EF_yz reduced-x`.

    Their gradients are partial sums until the end of the step, over the mesh axes along which pipelines run side by
    side (`data_axes`). In a model with experts there are none: experts, or their random draws, are those of all tokens.

    Raises:
        PlanError: [gradients] has partial sums over other axes.
    """
    data = () if config.moe else data_axes(layout)
    given, faults = {}, []
    for row in parameters(config, layout).values():
        gradient, spec = Spec.parse(layout.gradient(row.key)), layout.spec(row.key)
        if (inside := {*gradient.partial} - {*data}) and row.key not in given:
            faults.append(
                f"the gradient of {row.key} over {', '.join(sorted(inside))}: write '{spec.with_partial(data)}' in "
                f"[gradients], not '{gradient}'."
            )
        given[row.key] = spec.with_partial(data).cotangent
    if faults:
        fact = (
            "stages settle gradients for each microbatch, but over a mesh axis that splits the batch and nothing else:"
        )
        more = [f"... and {len(faults) - _SHOWN} more."] if len(faults) > _SHOWN else []
        if config.moe:
            more.append("No axis does in a model with experts: these, or their random draws, are those of all tokens.")
        raise PlanError("\n  ".join([fact, *faults[:_SHOWN], *more]))
    return layout.override(given)


def _pipelined(
    model: Transformer,
    tokens: jax.Array,
    key: jax.Array | None,
    train: bool,
    table: Schedule,
    total: jax.Array | None,
    axis: str,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a model whose layers are stages along a mesh axis: embedding in the first, loss in the last."""
    config, dtype = model.config, model.dtype
    rows, values = parameters(config, model.layout), arrays(model)
    shared = {path: value for path, value in values.items() if not path.startswith("blocks.")}
    stacked = nested({path: value for path, value in values.items() if path not in shared})
    specs = nested({path: rows[path].spec for path in values})
    if table.rounds > 1:  # matrices are sent as they are used
        move = partial(in_rounds, rounds=table.rounds)
        weights = jax.tree.map(move, cast_matrices(stacked, dtype), {"blocks": specs["blocks"]})
    else:
        weights = jax.tree.map(lambda value: value[None], stacked)
    data = rows["embedding.table"].spec.reduced  # as all weights of `for_stages`; none in evaluation
    layout, periods = model.layout.inside(data), config.layers // config.period
    batches: dict[str, Any] = {"tokens": cut_batch(tokens, batch_spec(model.layout), table.microbatches)}
    if total is not None:  # the mean over microbatches and pipelines is then over the predicted tokens of all of them
        parts = table.microbatches * math.prod(jax.sharding.get_abstract_mesh().shape[each] for each in data)
        batches["total"] = jnp.full((table.microbatches,), total / parts)
    if train and key is not None:
        keys = key[None]
        if table.microbatches > 1:
            keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(table.microbatches))
        batches["keys"] = jax.vmap(lambda key: jax.random.split(key, periods))(keys)

    def first(shared: Values, batch: Values) -> jax.Array:
        inputs, _ = split_tokens(batch["tokens"], layout)
        with part(layout, "embedding"):
            table = Embedding(config, layout, nested(shared)["embedding"], dtype)
            return table(_read(inputs) if "total" in batch else inputs)

    def chunk(
        weights: Mapping[str, Any], x: jax.Array, batch: Values, number: jax.Array
    ) -> tuple[jax.Array, jax.Array, Values]:
        definition, held = nnx.split(blocks(config, layout, weights["blocks"], dtype))
        stack = definition, cast_matrices(held, dtype)
        each = periods // (table.stages * table.rounds)
        keys = jax.lax.dynamic_slice_in_dim(batch["keys"], number * each, each) if "keys" in batch else None
        # A backward pass is split in two between the operations of layers, and not inside a loop over them.
        x, figures = run_blocks(config, stack, x, keys, train=train, in_loop="weights" not in table.kinds)
        return x, jnp.sum(figures["aux_loss"]) if train and figures else jnp.float32(0), figures

    def last(shared: Values, x: jax.Array, batch: Values) -> jax.Array:
        of = nested(shared)
        embedding = Embedding(config, layout, of["embedding"], dtype)
        with part(layout, "output"):
            logits = Output(config, layout, of["output"], dtype)(x, embedding)
        return _mean_cross_entropy(layout, logits, split_tokens(batch["tokens"], layout)[1], batch.get("total"))

    held, at = {path: rows[path].spec.without_partial() for path in shared}, stream(config, layout)
    run = pipelined(Stages(first, chunk, last), table, axis=axis, stream=at, shared=held, data=data)
    value, figures = run(shared, weights, batches)
    figures = {name: _of_layers(x, axis) for name, x in jax.lax.stop_gradient(figures).items()}
    aux = _summary(figures)
    entropy = value - aux["aux_loss"] if train and figures else value
    return value, {"cross_entropy": jax.lax.stop_gradient(entropy), **aux}


def _of_layers(x: jax.Array, axis: str) -> jax.Array:
    """The figures of all layers [N, ...], whole on every stage, from those of the rounds [R, N/R, ...]."""
    dims, rest = ("R", "N", "A", "B", "C")[: x.ndim], ((),) * (x.ndim - 2)
    x = moved(x, Spec(dims, ((), (axis,), *rest)), Spec(dims, ((), (), *rest)))
    return x.reshape(-1, *x.shape[2:])


def batch_spec(layout: Layout) -> Spec:
    """The spec of a batch of tokens [B, L+1]: `embedding.tokens` with L unsharded, since few meshes divide L+1."""
    return layout.spec("embedding.tokens").with_axes("L", ())


def label_spec(layout: Layout) -> Spec:
    """The spec of labels [B, L]: that of the logits without V."""
    return layout.spec("output.logits").without("V")


def split_tokens(tokens: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Split [B, L+1] into inputs and labels, each [B, L], placed and ordered as `Transformer.hidden` takes them."""
    whole = batch_spec(layout)
    devices = ring_size(layout.spec("attention.key"))
    inputs, labels = zigzag(tokens[:, :-1], devices), zigzag(tokens[:, 1:], devices)
    inputs = gspmd.reshard(inputs, Equation.move(whole, layout.spec("embedding.tokens")))
    return inputs, gspmd.reshard(labels, Equation.move(whole, label_spec(layout)))


def _summary(figures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return figures | {"aux_loss": jnp.sum(figures["aux_loss"])} if figures else {}
