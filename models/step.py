"""Training, evaluation and forward steps of a model, for arrays or for abstract arrays.

`import gspmd_models` does not import this module, because this module needs `gspmd.training` and its libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.annotate import Spec
from gspmd.annotate.errors import LayoutError
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested
from gspmd.layouts.rules.keys import ENCODER
from gspmd.training.config import OptimizerConfig
from gspmd.training.model import Row
from gspmd.training.model.trainable import Batch
from gspmd.training.state import TrainState
from gspmd.training.step import Step, Update, building

from .config import ModelConfig
from .finetuning.freezing import CHOICE_BIAS, balanced_paths, trained_paths
from .objective import loss, only_within, predicted
from .parameters import gradient_specs, optimizer_specs, parameters, stages_axes
from .placement import batch_spec, moved
from .shapes import WIDE
from .stages import check_rounds, check_splits, for_stages
from .transformer import Transformer, arrays, with_arrays

Parameters = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Language:
    """The transformer as a `gspmd.training.model.Trainable`, the interface from which training steps are built.

    Attributes:
        config: the model configuration.
        dtype: compute dtype.
        schedule: the pipeline schedule if the layout has stages: `"1f1b"`, `"gpipe"` or `"zero-bubble"`.
        rounds: number of chunks of layers per pipeline stage.
        masked: whether some tokens of a batch are read but not predicted; see the argument `masked` of
            `gspmd_models.loss`.
        packed: whether batches have segments, because rows hold several texts or padding.
        source_length: T, the number of tokens that an encoder reads; 0 for a decoder-only model.

    Example:
        >>> from gspmd.layouts import Layout
        >>> from gspmd.training import OptimizerConfig
        >>> from gspmd.training.step import Update, abstract_program
        >>> program = abstract_program(Language(ModelConfig()), Update(OptimizerConfig(), steps=10), batch=8, length=64)
        >>> step, state, tokens, key = program(Layout.load("megatron-1d"), jax.make_mesh((1, 1, 1), ("x", "y", "z")))
        >>> state.params["blocks.0.ffn.w_in"].shape, tokens.shape
        ((4, 128, 256), (8, 65))
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    schedule: str = "1f1b"
    rounds: int = 1
    masked: bool = False
    packed: bool = False
    source_length: int = 0

    def sizes(self, batch: int, length: int) -> dict[str, int]:
        """Return the size of every dimension; T is the length of the source if there is one."""
        return self.config.sizes(batch, length, self.source_length)

    def widths(self, length: int) -> dict[str, int]:
        """Return the number of columns of each array of a batch: tokens, and any source and segments."""
        found = {"tokens": length + 1}
        if self.packed:
            found["segments"] = length + 1
        if self.config.encoder_layers:
            found["source"] = self.source_length
            if self.packed:
                found["source_segments"] = self.source_length
        return found

    def rows(self, layout: Layout) -> dict[str, Row]:
        """Return the line, the spec and the shape of every parameter, by its path in the module."""
        return {
            path: Row(row.key, row.spec, row.shape, row.key.rpartition(".")[2] in WIDE)
            for path, row in parameters(self.config, layout).items()
        }

    def optimizer_specs(self, layout: Layout) -> dict[str, Spec]:
        """Return the spec of each parameter's optimizer state."""
        return optimizer_specs(self.config, layout)

    def gradient_specs(self, layout: Layout) -> dict[str, Spec]:
        """Return the spec that each parameter's gradient has when the optimizer gets it."""
        return gradient_specs(self.config, layout)

    def trained(self, layout: Layout, frozen: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the paths of the trained parameters: only the adapters, if there are any (`ModelConfig.lora`)."""
        return trained_paths(self.config, layout, frozen)

    def batch_spec(self, layout: Layout) -> Spec:
        """Return the spec of a batch of tokens [B, L+1]."""
        return batch_spec(layout)

    def cut(self, layout: Layout, microbatches: int) -> int:
        """Return the number of microbatches into which the step cuts a batch.

        It is 1 for a pipeline, which cuts the batch by itself.
        """
        return 1 if stages_axes(layout) else microbatches

    def for_loss(self, layout: Layout, microbatches: int) -> Any:
        """Return the layout with the specs that parameters have in the loss, from `Layout.for_loss` or `for_stages`."""
        return for_stages(self.config, layout) if stages_axes(layout) else layout.for_loss(microbatches)

    def predicted(self, layout: Layout, tokens: Batch) -> jax.Array | None:
        """Return the number of tokens over which the loss of a batch is averaged, or None for all tokens."""
        # Read from the batch, not from `packed`: `training_step` builds steps that leave this setting out.
        segments = tokens.get("segments") if isinstance(tokens, Mapping) else None
        if segments is not None:
            return predicted(layout, only_within(_tokens(tokens), segments))
        return predicted(layout, _tokens(tokens)) if self.masked else None

    def loss(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: Batch,
        key: jax.Array,
        microbatches: int,
        predicted: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the loss and the metrics of a microbatch, or in a pipeline of the whole batch."""
        model, how = self._placed(layout, params), self._masked | _beside(tokens)
        if stages_axes(layout):
            how |= {"schedule": self.schedule, **self._rounds(layout, microbatches)}
        if predicted is not None:
            how["total"] = predicted / self.cut(layout, microbatches)
        value, figures = loss(model, _tokens(tokens), key=key, **how)
        return value, figures if predicted is None else figures | {"predicted": predicted}

    def adjusted(
        self,
        layout: Layout,
        still: Parameters,
        figures: Mapping[str, jax.Array],
        parts: int,
        frozen: Sequence[str] = (),
    ) -> tuple[Parameters, Mapping[str, jax.Array]]:
        """Change the biases for choosing experts to bias_i + rate · sign(mean load - load_i), in every layer.

        The load of an expert is the number of times that tokens of the whole batch chose the expert. It is counted
        before any token is dropped because of the capacity.

        Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1; DeepSeek-V3
            (arXiv 2412.19437), section 2.1.2.
        """
        figures = dict(figures)
        if (mean := figures.pop("sent", None)) is None:
            return still, figures
        sent = jnp.round(mean * parts)  # so that numbers of choices are exact, and equal numbers compare as equal
        assert self.config.moe is not None
        way = jnp.sign(jnp.sum(sent, axis=-1, keepdims=True) - self.config.moe.experts * sent)
        rows, ways = parameters(self.config, layout), self._by_bias(layout, way)
        after = {}
        for path in balanced_paths(self.config, layout, frozen):
            spec = rows[path].spec
            new = still[path] + self.config.moe.bias_rate * moved(ways[path], Spec(spec.dims, ((), ())), spec)
            after[path] = jax.lax.select(figures["non_finite"] == 0, new, still[path])
        return {**still, **after}, figures

    def cross_entropy(self, layout: Layout, params: Mapping[str, Any], tokens: Batch, microbatches: int) -> jax.Array:
        """Return the mean next-token cross-entropy of a batch in evaluation."""

        def entropy(params: Parameters, tokens: Batch) -> jax.Array:
            how = self._rounds(layout, microbatches) | self._masked | _beside(tokens)
            return loss(self._placed(layout, params), _tokens(tokens), train=False, **how)[1]["cross_entropy"]

        if not stages_axes(layout) or jax.sharding.get_abstract_mesh().are_all_axes_explicit:
            return entropy(params, tokens)
        # On a mesh of Auto axes, stages run under Explicit axes, where every lowering works.
        specs = {path: row.spec.partition_spec() for path, row in parameters(self.config, layout).items()}
        placed = specs, jax.tree.map(lambda _: batch_spec(layout).partition_spec(), tokens)
        return jax.sharding.explicit_axes(entropy, in_sharding=placed)(dict(params), tokens)

    def check(
        self, layout: Layout, mesh: Any, batch: int, length: int, microbatches: int = 1, frozen: Sequence[str] = ()
    ) -> None:
        """Check that a layout fits a training step and an evaluation with these sizes (`check_step`)."""
        check_step(self.config, layout, mesh, batch, length, microbatches, frozen, self.source_length)

    def _placed(self, layout: Layout, params: Mapping[str, Any]) -> Transformer:
        return Transformer(self.config, layout, nested(params), self.dtype)

    def _by_bias(self, layout: Layout, way: jax.Array) -> dict[str, jax.Array]:
        """Split `way` [expert layers, X] into one array [N, X] for each bias, by the path of the bias.

        The rows of `way` for the encoder's layers come first.
        """
        config, found = self.config, {}
        ahead = sum(map(config.is_sparse, range(config.encoder_layers)))
        for path, row in parameters(config, layout).items():
            if row.key != CHOICE_BIAS:
                continue
            in_encoder = path.startswith("encoder.")
            place = int(path.partition("blocks.")[2].partition(".")[0])
            numbers = config.weight_stacks(config.encoder_layers if in_encoder else None)[place]
            at = [sum(map(config.is_sparse, range(number))) + (0 if in_encoder else ahead) for number in numbers]
            step = at[1] - at[0] if len(at) > 1 else 1  # the layers of a stack are equally far apart
            found[path] = way[at[0] : at[-1] + 1 : step]
            assert len(found[path]) == row.shape[0], path  # a single row would be added to all
        return found

    @property
    def _masked(self) -> dict[str, Any]:
        return {"masked": True} if self.masked else {}

    def _rounds(self, layout: Layout, microbatches: int) -> dict[str, Any]:
        return {"microbatches": microbatches, "rounds": self.rounds} if stages_axes(layout) else {}


def _tokens(batch: Batch) -> jax.Array:
    return batch["tokens"] if isinstance(batch, Mapping) else batch


def _beside(batch: Batch) -> dict[str, jax.Array]:
    """Return the arrays of a batch other than its tokens."""
    return {name: x for name, x in batch.items() if name != "tokens"} if isinstance(batch, Mapping) else {}


def check_step(
    config: ModelConfig,
    layout: Layout,
    mesh: Any,
    batch: int,
    length: int,
    microbatches: int = 1,
    frozen: Sequence[str] = (),
    source_length: int = 0,
) -> None:
    """Check, before a model is built, that a layout fits a training step and an evaluation with these sizes.

    Args:
        config: the model configuration.
        layout: a `gspmd.Layout`, resolved.
        mesh: a mesh with the layout's mesh axes, or the sizes of these axes.
        batch: number of sequences per step, over all devices.
        length: number of tokens per sequence.
        microbatches: number of parts into which the batch is cut.
        frozen: patterns for the paths of parameters that are not trained, as for `trained_paths`.
        source_length: number of tokens per source, if the model has an encoder.

    Raises:
        LayoutError: the layout does not fit. The message lists every fault.
    """
    each = batch // microbatches
    sizes = {**config.sizes(each, length, source_length), "B": batch, "M": microbatches}
    if config.encoder_layers:
        if axes := stages_axes(layout):
            check_splits(config, getattr(mesh, "shape", mesh).get(axes[0], 1))
        layout.stack(ENCODER).check(sizes | {"L": source_length}, mesh, dropless=config.is_dropless)
        for train in (True, False):
            check_slots(config, layout.stack(ENCODER), mesh, each if train else batch, source_length, train=train)
    layout.check(sizes, mesh, dropless=config.is_dropless)
    rows = parameters(config, layout)  # the layout has no faults by now
    layout.check(sizes, mesh, trained={rows[path].key for path in trained_paths(config, layout, frozen)})
    check_slots(config, layout, mesh, each, length, train=True)
    # Evaluation has its own capacity factor; without this check a run would fail only at its first evaluation.
    check_slots(config, layout, mesh, batch, length, train=False)


def check_slots(config: ModelConfig, layout: Layout, mesh: Any, batch: int, length: int, *, train: bool) -> None:
    """Check that the sizes of the mesh axes that shard the experts' slots divide the number of slots.

    Dropless experts have no slots, so there is nothing to check.

    Args:
        config, layout, mesh, length: as for `check_step`.
        batch: number of sequences whose tokens are routed together.
        train: whether to use the capacity of experts in training. Otherwise their capacity in evaluation is used.

    Raises:
        LayoutError: the sizes of the mesh axes do not divide the slots. The message lists every fault.
    """
    moe = config.moe
    if moe is None or config.is_dropless:
        return
    factor, used = ("capacity_factor", moe) if train else ("evaluation_capacity_factor", moe.evaluation())
    sizes = config.sizes(batch, length)
    try:
        layout.check(sizes | {"C": used.capacity(batch * length // sizes["G"])}, mesh)
    except LayoutError as error:
        remedy = f"C is the number of slots of an expert for each group: model.moe.{factor} is {getattr(moe, factor)}."
        raise LayoutError(f"{error}\n  {remedy}", error.faults) from None


def training_step(
    model: Transformer,
    optimizer: OptimizerConfig,
    steps: int,
    microbatches: int = 1,
    schedule: str = "1f1b",
    rounds: int = 1,
    *,
    frozen: Sequence[str] = (),
    parameter_dtype: Any = jnp.float32,
) -> Step:
    """Build an uncompiled training step, a function (state, batch, key) -> (state, metrics).

    A gradient is reduced only once, when it moves to its spec in [optimizer], in two cases: if it is a partial sum in
    the layout's [gradients], or if there are several microbatches (see `Layout.for_loss`). In a pipeline, this holds
    for the mesh axes along which pipelines run side by side (`gspmd_models.stages.for_stages`).

    Args:
        model: a model. Its arrays may be abstract, because only its configuration, layout and dtype are used.
        optimizer: the optimizer's settings, such as its learning rate and weight decay.
        steps: total number of updates.
        microbatches: number of parts of a batch. They are computed one after the other, which saves memory, or they
            follow one another through the stages of a pipeline. The loss and the metrics are computed for the whole
            batch. Groups of tokens that span sequences, the experts' capacity, the auxiliary losses and random draws
            are separate for each microbatch.
        schedule: the schedule of the pipeline, `"1f1b"`, `"gpipe"` or `"zero-bubble"`.
        rounds: number of chunks of layers per stage of a pipeline. If it is more than 1, the schedule is interleaved.
        frozen: patterns for the paths of parameters that are not trained, as for `trained_paths`. These parameters have
            no gradients and no optimizer state. If the model has adapters (`ModelConfig.lora`), all other parameters
            are frozen too.
        parameter_dtype: dtype in which matrices are stored. If it is not float32, the optimizer keeps float32 master
            copies.

    Returns:
        A pure function of a state (from `initial_state` or `abstract_state`), tokens [B, L+1] sharded as `batch_spec`,
        and a random key. Call or lower this function under `jax.set_mesh`.

    Raises:
        PlanError: there are several rounds but no stages; or [gradients] has a partial sum over mesh axes along which
            no pipelines run side by side.
    """
    update = Update(optimizer, steps, microbatches, tuple(frozen), parameter_dtype)
    return building.training_step(_language(model, schedule, rounds), model.layout, update)


def initial_state(
    model: Transformer,
    optimizer: OptimizerConfig,
    steps: int,
    mesh: jax.sharding.Mesh,
    *,
    frozen: Sequence[str] = (),
    parameter_dtype: Any = jnp.float32,
) -> TrainState:
    """Return the state before the first update: all parameters, and the optimizer state of the trained parameters."""
    update = Update(optimizer, steps, frozen=tuple(frozen), parameter_dtype=parameter_dtype)
    return building.initial_state(_language(model), model.layout, arrays(model), update, mesh)


def abstract_state(
    model: Transformer,
    optimizer: OptimizerConfig,
    steps: int,
    mesh: jax.sharding.Mesh,
    *,
    frozen: Sequence[str] = (),
    parameter_dtype: Any = jnp.float32,
) -> TrainState:
    """Return the shapes, dtypes and shardings of `initial_state`; the model's arrays may be abstract."""
    update = Update(optimizer, steps, frozen=tuple(frozen), parameter_dtype=parameter_dtype)
    return building.abstract_state(_language(model), model.layout, arrays(model), update, mesh)


def abstract_gradients(
    model: Transformer, params: Parameters, mesh: jax.sharding.Mesh, frozen: Sequence[str] = ()
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings of the gradients of all trained parameters, after they are summed.

    Partial sums are reduced into the layout's specs of the optimizer state, as in ZeRO-2.

    Args:
        model: a model, whose arrays may be abstract.
        params: the parameters, or their shapes, by path.
        mesh: the mesh of the parameters.
        frozen: patterns for the paths of parameters that are not trained, as for `training_step`.
    """
    return building.abstract_gradients(_language(model), model.layout, params, mesh, frozen)


def evaluation_step(
    model: Transformer, microbatches: int = 1, rounds: int = 1
) -> Callable[[Parameters, jax.Array], jax.Array]:
    """Build the function (parameters, tokens [B, L+1]) -> mean next-token cross-entropy in nats, without random draws.

    Args:
        model: a model. Its arrays may be abstract, as for `training_step`.
        microbatches: number of parts of a batch that follow one another through the stages of a pipeline.
        rounds: number of chunks of layers per stage of a pipeline.

    Raises:
        PlanError: there are several rounds but no stages.
    """
    return building.evaluation_step(_language(model, rounds=rounds), model.layout, microbatches)


def forward_step(model: Transformer) -> Callable[..., jax.Array]:
    """Build the function (parameters, tokens [B, L]) -> float32 logits [B, L, V], which uses no key/value cache.

    The logits are sharded as the line `output.logits`. For an encoder–decoder, a source [B, T] is the third argument.
    """

    def forward(params: Parameters, tokens: jax.Array, source: jax.Array | None = None) -> jax.Array:
        return with_arrays(model, params)(tokens, source=source)[0]

    return forward


def _language(model: Transformer, schedule: str = "1f1b", rounds: int = 1) -> Language:
    check_rounds(rounds, model.layout)
    return Language(model.config, model.dtype, schedule, rounds)
