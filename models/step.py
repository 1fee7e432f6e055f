"""Training, evaluation and forward steps of a model, for arrays as for their shapes.

Not imported with `models`, since it imports `gspmd.training` and its libraries.
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
from gspmd.training.config import OptimizerConfig
from gspmd.training.model import Row
from gspmd.training.state import TrainState
from gspmd.training.step import Step, Update, building

from .config import ModelConfig
from .finetuning.freezing import trained_paths
from .objective import batch_spec, check_rounds, for_stages, loss, predicted
from .parameters import gradient_specs, optimizer_specs, parameters, stages_axes
from .shapes import WIDE
from .transformer import Transformer, arrays, with_arrays

Parameters = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Language:
    """The transformer as the builder of training steps takes it, a `gspmd.training.model.Trainable`.

    Attributes:
        config: sizes and choices.
        dtype: compute dtype.
        schedule: of a pipeline, where a layout splits the layers into stages: `"1f1b"`, `"gpipe"` or `"zero-bubble"`.
        rounds: of a pipeline, chunks of layers of each stage.
        masked: whether some tokens of a batch are read and not predicted, see `gspmd_models.loss`.

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

    def sizes(self, batch: int, length: int) -> dict[str, int]:
        """Return the size of every dimension."""
        return self.config.sizes(batch, length)

    def rows(self, layout: Layout) -> dict[str, Row]:
        """Return every parameter by its path in the module."""
        return {
            path: Row(row.key, row.spec, row.shape, row.key.rpartition(".")[2] in WIDE)
            for path, row in parameters(self.config, layout).items()
        }

    def optimizer_specs(self, layout: Layout) -> dict[str, Spec]:
        """Return where the optimizer state of each parameter lies."""
        return optimizer_specs(self.config, layout)

    def gradient_specs(self, layout: Layout) -> dict[str, Spec]:
        """Return where the gradient of each parameter lies on its way to the optimizer."""
        return gradient_specs(self.config, layout)

    def trained(self, layout: Layout, frozen: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the paths of the parameters that are trained: with adapters (`ModelConfig.lora`), these alone."""
        return trained_paths(self.config, layout, frozen)

    def batch_spec(self, layout: Layout) -> Spec:
        """Return where a batch of tokens [B, L+1] lies."""
        return batch_spec(layout)

    def cut(self, layout: Layout, microbatches: int) -> int:
        """Return into how many parts the step cuts a batch; the stages of a pipeline take the parts themselves."""
        return 1 if stages_axes(layout) else microbatches

    def for_loss(self, layout: Layout, microbatches: int) -> Any:
        """Return the layout with parameters as the loss takes them: see `Layout.for_loss`, and `for_stages`."""
        return for_stages(self.config, layout) if stages_axes(layout) else layout.for_loss(microbatches)

    def predicted(self, layout: Layout, tokens: jax.Array) -> jax.Array | None:
        """Return the number of tokens that the mean of a batch is over; None for all of them."""
        return predicted(layout, tokens) if self.masked else None

    def loss(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: jax.Array,
        key: jax.Array,
        microbatches: int,
        predicted: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the loss of a training step, and its figures; in stages, of the whole batch."""
        model, how = self._placed(layout, params), self._masked
        if stages_axes(layout):
            how |= {"schedule": self.schedule, **self._rounds(layout, microbatches)}
        if predicted is not None:
            how["total"] = predicted / self.cut(layout, microbatches)
        value, figures = loss(model, tokens, key=key, **how)
        return value, figures if predicted is None else figures | {"predicted": predicted}

    def cross_entropy(
        self, layout: Layout, params: Mapping[str, Any], tokens: jax.Array, microbatches: int
    ) -> jax.Array:
        """Return the mean next-token cross-entropy of an evaluation."""

        def entropy(params: Parameters, tokens: jax.Array) -> jax.Array:
            how = self._rounds(layout, microbatches) | self._masked
            return loss(self._placed(layout, params), tokens, train=False, **how)[1]["cross_entropy"]

        if not stages_axes(layout) or jax.sharding.get_abstract_mesh().are_all_axes_explicit:
            return entropy(params, tokens)
        # Under Auto axes stages train under Explicit ones of the same mesh, which take every lowering.
        specs = {path: row.spec.partition_spec() for path, row in parameters(self.config, layout).items()}
        placed = specs, batch_spec(layout).partition_spec()
        return jax.sharding.explicit_axes(entropy, in_sharding=placed)(dict(params), tokens)

    def check(
        self, layout: Layout, mesh: Any, batch: int, length: int, microbatches: int = 1, frozen: Sequence[str] = ()
    ) -> None:
        """Refuse a layout that a training step of these sizes, or its evaluation, cannot take (`check_step`)."""
        check_step(self.config, layout, mesh, batch, length, microbatches, frozen)

    def _placed(self, layout: Layout, params: Mapping[str, Any]) -> Transformer:
        return Transformer(self.config, layout, nested(params), self.dtype)

    @property
    def _masked(self) -> dict[str, Any]:
        return {"masked": True} if self.masked else {}

    def _rounds(self, layout: Layout, microbatches: int) -> dict[str, Any]:
        return {"microbatches": microbatches, "rounds": self.rounds} if stages_axes(layout) else {}


def check_step(
    config: ModelConfig,
    layout: Layout,
    mesh: Any,
    batch: int,
    length: int,
    microbatches: int = 1,
    frozen: Sequence[str] = (),
) -> None:
    """Refuse a layout that a training step of these sizes, or its evaluation, cannot take, before a model is built.

    Args:
        config: the model's.
        layout: a `gspmd.Layout`, resolved.
        mesh: with the layout's axes, or their sizes.
        batch: sequences per step, over all devices.
        length: tokens per sequence.
        microbatches: parts of the batch.
        frozen: patterns of parameters that stay as they are, as of `trained_paths`.

    Raises:
        LayoutError: with every fault.
    """
    each = batch // microbatches
    sizes = {**config.sizes(each, length), "B": batch, "M": microbatches}
    layout.check(sizes, mesh, dropless=config.is_dropless)
    rows = parameters(config, layout)  # of a layout without faults
    layout.check(sizes, mesh, trained={rows[path].key for path in trained_paths(config, layout, frozen)})
    check_slots(config, layout, mesh, each, length, train=True)
    # Evaluation has a capacity factor of its own, and would be refused only after the first hundred steps.
    check_slots(config, layout, mesh, batch, length, train=False)


def check_slots(config: ModelConfig, layout: Layout, mesh: Any, batch: int, length: int, *, train: bool) -> None:
    """Refuse experts whose slots do not divide as the layout shards them; dropless has no slots of its own.

    Args:
        config, layout, mesh, length: as of `check_step`.
        batch: sequences whose tokens are routed together.
        train: whether the experts have their capacity of training.

    Raises:
        LayoutError: with every fault.
    """
    moe = config.moe
    if moe is None or config.is_dropless:
        return
    factor, used = ("capacity_factor", moe) if train else ("evaluation_capacity_factor", moe.evaluation())
    sizes = config.sizes(batch, length)
    try:
        layout.check(sizes | {"C": used.capacity(batch * length // sizes["G"])}, mesh)
    except LayoutError as error:
        remedy = f"C is the slots that an expert has for each group, by model.moe.{factor} {getattr(moe, factor)}."
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
    """Build one update, not compiled: (state, batch, key) -> (state, metrics).

    A gradient is reduced once, by the move that brings it to where [optimizer] has it, if the layout's [gradients] has
    it as a partial sum, or if there are several microbatches (see `Layout.for_loss`); in a pipeline, over the mesh axes
    along which pipelines run side by side (`gspmd_models.objective.for_stages`).

    Args:
        model: a model, possibly abstract; only its config, layout and dtype are used.
        optimizer: rates and decays.
        steps: total number of updates.
        microbatches: number of parts of a batch that are computed one after the other, which takes less memory, or that
            follow one another through the stages of a pipeline. The loss and its figures are those of the whole batch;
            of experts, groups that span sequences, their capacity and auxiliary losses are those of a microbatch, and
            every microbatch has random draws of its own.
        schedule: of a pipeline, `"1f1b"`, `"gpipe"` or `"zero-bubble"`.
        rounds: of a pipeline, chunks of layers of each stage; with more than one it is interleaved.
        frozen: patterns of parameters that stay as they are, as of `trained_paths`. They have no gradient, so none is
            reduced, and no optimizer state. With adapters (`ModelConfig.lora`) all other parameters stay too.
        parameter_dtype: what matrices are stored in; if not float32, the optimizer has float32 masters.

    Returns:
        A pure function of a state of `initial_state` or `abstract_state`, tokens [B, L+1] placed as `batch_spec`, and a
        random key. Call or lower it under `jax.set_mesh`.

    Raises:
        PlanError: more than one round, and no stages; or [gradients] has a partial sum that stages cannot leave.
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
    """The state before the first update: all parameters, and the initial optimizer state of those that are trained."""
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
    """Shapes, dtypes and shardings of `initial_state`; the model may be abstract."""
    update = Update(optimizer, steps, frozen=tuple(frozen), parameter_dtype=parameter_dtype)
    return building.abstract_state(_language(model), model.layout, arrays(model), update, mesh)


def abstract_gradients(
    model: Transformer, params: Parameters, mesh: jax.sharding.Mesh, frozen: Sequence[str] = ()
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the gradients of all parameters that are trained, once they are no partial sums.

    Partial ones are settled in the optimizer's layout, as ZeRO-2 has it.

    Args:
        model: possibly abstract.
        params: the parameters, or their shapes.
        mesh: the mesh.
        frozen: as of `training_step`.
    """
    return building.abstract_gradients(_language(model), model.layout, params, mesh, frozen)


def evaluation_step(
    model: Transformer, microbatches: int = 1, rounds: int = 1
) -> Callable[[Parameters, jax.Array], jax.Array]:
    """Build (parameters, tokens [B, L+1]) -> mean next-token cross-entropy in nats, without random draws.

    Args:
        model: as for `training_step`.
        microbatches: parts of a batch that follow one another through the stages of a pipeline.
        rounds: how often each goes round them.

    Raises:
        PlanError: more than one round, and no stages.
    """
    return building.evaluation_step(_language(model, rounds=rounds), model.layout, microbatches)


def forward_step(model: Transformer) -> Callable[[Parameters, jax.Array], jax.Array]:
    """Build (parameters, tokens [B, L]) -> float32 logits [B, L, V], placed by the layout; no key/value cache."""

    def forward(params: Parameters, tokens: jax.Array) -> jax.Array:
        return with_arrays(model, params)(tokens)[0]

    return forward


def _language(model: Transformer, schedule: str = "1f1b", rounds: int = 1) -> Language:
    check_rounds(rounds, model.layout)
    return Language(model.config, model.dtype, schedule, rounds)
