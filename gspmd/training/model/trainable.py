"""The interface between models and the builder of training steps; `Own` and `gspmd_models.step` implement it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import jax

from gspmd.annotate.errors import suggestion
from gspmd.annotate.spec import Spec
from gspmd.layouts import Layout
from gspmd.training.toml import ConfigError

Figures = Mapping[str, jax.Array]
Batch = jax.Array | Mapping[str, jax.Array]
"""The tokens of a step, int32 [B, L+1]; or, for a model that has a source or whose rows hold several texts, several
arrays [B, ...] of integers by name: `tokens` and `segments` [B, L+1], `source` and `source_segments` [B, T]. All are
sharded as `Trainable.batch_spec`."""


@dataclass(frozen=True)
class Row:
    """One parameter in a layout.

    Attributes:
        line: the line of the layout that shards it, the same for every layer.
        spec: its spec, with N first if layers are stacked.
        shape: its shape.
        float32: whether it is stored in float32, whatever `parameter_dtype` is.
    """

    line: str
    spec: Spec
    shape: tuple[int, ...]
    float32: bool

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter has two or more dimensions besides N: weight decay applies only to such parameters."""
        return len(set(self.spec.dims) - {"N"}) > 1


class Trainable(Protocol):
    """A model for any layout: its parameters, their specs, and its loss. Parameters are arrays by path."""

    def sizes(self, batch: int, length: int) -> Mapping[str, int]:
        """Return the size of every dimension by its letter."""

    def rows(self, layout: Layout) -> Mapping[str, Row]:
        """Return every parameter by its path, sharded as the layout's lines say."""

    def optimizer_specs(self, layout: Layout) -> Mapping[str, Spec]:
        """Return the spec of each parameter's optimizer state."""

    def gradient_specs(self, layout: Layout) -> Mapping[str, Spec]:
        """Return the spec that each parameter's gradient has on its way to the optimizer."""

    def trained(self, layout: Layout, frozen: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the paths of the trained parameters: all that no pattern of `frozen` matches."""

    def batch_spec(self, layout: Layout) -> Spec:
        """Return the spec of a batch of tokens [B, L+1]."""

    def widths(self, length: int) -> Mapping[str, int]:
        """Return the width of each array of a batch whose rows predict `length` tokens.

        A batch that has only `tokens` is this array, not a mapping.
        """

    def cut(self, layout: Layout, microbatches: int) -> int:
        """Return the number of parts into which the step, not the loss, cuts a batch."""

    def for_loss(self, layout: Layout, microbatches: int) -> Layout:
        """Return the layout for the loss of a training step, in which some parameters are `EF reduced-x`."""

    def predicted(self, layout: Layout, tokens: Batch) -> jax.Array | None:
        """Return the number of tokens over which the loss of a batch is averaged; None stands for all tokens.

        The batch is the whole one, because microbatches may have different numbers of predicted tokens.
        """

    def loss(
        self,
        layout: Layout,
        params: Mapping[str, Any],
        tokens: Batch,
        key: jax.Array,
        microbatches: int,
        predicted: jax.Array | None = None,
    ) -> tuple[jax.Array, Figures]:
        """Return the loss of a training step, and its figures; `predicted` is the result of the method `predicted`."""

    def adjusted(
        self,
        layout: Layout,
        still: Mapping[str, jax.Array],
        figures: Figures,
        parts: int,
        frozen: Sequence[str] = (),
    ) -> tuple[Mapping[str, jax.Array], Figures]:
        """Return the untrained parameters after a step, which may change them too, and the figures of the step.

        Args:
            layout: the layout that shards them.
            still: the parameters that are not trained, before the step.
            figures: the figures of the step, means over the microbatches; nothing may change if `non_finite` is 1.
            parts: number of microbatches.
            frozen: patterns of parameters that are not trained.
        """

    def cross_entropy(self, layout: Layout, params: Mapping[str, Any], tokens: Batch, microbatches: int) -> jax.Array:
        """Return the mean cross-entropy of an evaluation."""

    def check(
        self, layout: Layout, mesh: Any, batch: int, length: int, microbatches: int = 1, frozen: Sequence[str] = ()
    ) -> None:
        """Refuse a resolved layout with which a training step of these sizes, or its evaluation, cannot run.

        Raises:
            LayoutError: the layout has faults; the message lists all of them.
        """


def trained_paths(
    keys: Mapping[str, str],
    frozen: Sequence[str] = (),
    still: Collection[str] = (),
    staged: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the paths of the parameters that are trained, in their order.

    Args:
        keys: a mapping from the path of every parameter to its line of the layout.
        frozen: patterns of paths, such as `blocks.0.attention.*`, or of lines, `attention.*`.
        still: further paths that are not trained.
        staged: paths of a model in stages of a pipeline, which are all trained.

    Raises:
        ConfigError: a pattern matches no parameter, no parameter is left to train, or one in stages is not trained.

    Example:
        >>> trained_paths({"table": "embedding.table", "blocks.w_in": "ffn.w_in"}, frozen=("embedding.*",))
        ('blocks.w_in',)
    """
    faults, held = [], {*still}
    for pattern in frozen:
        found = {path for path, key in keys.items() if fnmatchcase(path, pattern) or fnmatchcase(key, pattern)}
        if not found:
            near = suggestion(pattern, (*keys, *keys.values())).strip() or f"They are {', '.join(keys)}."
            faults.append(f"frozen has {pattern!r}, which matches no parameter. {near}")
        held |= found
    if not faults and len(held) == len(keys):
        faults.append(f"frozen {', '.join(map(repr, frozen))} leaves no parameter to train.")
    if held & {*staged}:
        faults.append("the stages of a pipeline train all parameters; leave out [lora] and frozen, or the stages.")
    if faults:
        raise ConfigError("cannot train this model:", faults)
    return tuple(path for path in keys if path not in held)
