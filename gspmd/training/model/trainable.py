"""The interface of models from which training steps are built; `Own` and `gspmd_models.step` implement it."""

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
"""The tokens of a step, int32 [B, L+1], or several arrays of integers by name.

A model has several arrays if it has a source, or if its rows hold several texts. Their names are `tokens` and
`segments`, both [B, L+1], and `source` and `source_segments`, both [B, T]. All arrays are sharded as
`Trainable.batch_spec`.
"""


@dataclass(frozen=True)
class Row:
    """One parameter under a layout.

    Attributes:
        line: the line of the layout that has the parameter's spec, the same for every layer.
        spec: the spec of the array, with N first if layers are stacked.
        shape: the shape of the whole array.
        float32: whether the parameter is stored in float32, whatever `parameter_dtype` is.
    """

    line: str
    spec: Spec
    shape: tuple[int, ...]
    float32: bool

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter has two or more dimensions besides N; only such parameters have weight decay."""
        return len(set(self.spec.dims) - {"N"}) > 1


class Trainable(Protocol):
    """A model that can be trained under any layout: parameters, their specs, and a loss.

    Parameters are a mapping from path to array.
    """

    def sizes(self, batch: int, length: int) -> Mapping[str, int]:
        """Return the size of every dimension by its letter."""

    def rows(self, layout: Layout) -> Mapping[str, Row]:
        """Return every parameter by its path, with its line, spec and shape in a layout."""

    def optimizer_specs(self, layout: Layout) -> Mapping[str, Spec]:
        """Return the spec of each parameter's optimizer state."""

    def gradient_specs(self, layout: Layout) -> Mapping[str, Spec]:
        """Return the spec in which the optimizer gets each parameter's gradient."""

    def trained(self, layout: Layout, frozen: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the paths of the trained parameters, which no pattern of `frozen` matches."""

    def batch_spec(self, layout: Layout) -> Spec:
        """Return the spec of a batch of tokens [B, L+1]."""

    def widths(self, length: int) -> Mapping[str, int]:
        """Return the width of each array of a batch, if `length` tokens are predicted in each row of the batch.

        If `tokens` is the only array, a batch is this array itself, not a mapping.
        """

    def cut(self, layout: Layout, microbatches: int) -> int:
        """Return the number of parts into which the step cuts a batch: 1 if the loss itself cuts the batch."""

    def for_loss(self, layout: Layout, microbatches: int) -> Layout:
        """Return the layout for the loss of a training step, with `EF reduced-x` where a gradient is a partial sum."""

    def predicted(self, layout: Layout, tokens: Batch) -> jax.Array | None:
        """Return the number of tokens over which the loss of a batch is averaged, or None for all tokens.

        The number is counted over the whole batch and not per microbatch, because microbatches may differ in the number
        of predicted tokens.
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
        """Return the loss and the metrics of a training step; `predicted` is what the method `predicted` returned."""

    def adjusted(
        self,
        layout: Layout,
        still: Mapping[str, jax.Array],
        figures: Figures,
        parts: int,
        frozen: Sequence[str] = (),
    ) -> tuple[Mapping[str, jax.Array], Figures]:
        """Return the untrained parameters and the metrics after a step.

        A model may update its untrained parameters by a rule of its own.

        Args:
            layout: the layout of the parameters.
            still: the untrained parameters before the step.
            figures: the metrics of the step, averaged over microbatches. If the metric `non_finite` is 1, no parameter
                may change.
            parts: number of microbatches.
            frozen: patterns of parameters that are not trained.
        """

    def cross_entropy(self, layout: Layout, params: Mapping[str, Any], tokens: Batch, microbatches: int) -> jax.Array:
        """Return the mean cross-entropy of a batch in an evaluation."""

    def check(
        self, layout: Layout, mesh: Any, batch: int, length: int, microbatches: int = 1, frozen: Sequence[str] = ()
    ) -> None:
        """Raise an error if a training step of these sizes, or its evaluation, cannot run under a resolved layout.

        Raises:
            LayoutError: the layout has faults; the message lists all of them.
        """


def trained_paths(
    keys: Mapping[str, str],
    frozen: Sequence[str] = (),
    still: Collection[str] = (),
    staged: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the paths of the parameters that are trained, in the order of `keys`.

    Args:
        keys: the line of the layout that has each parameter's spec, by the parameter's path.
        frozen: patterns of paths, such as `blocks.0.attention.*`, or of lines, such as `attention.*`.
        still: further paths that are not trained.
        staged: paths of parameters in pipeline stages, which must all be trained.

    Raises:
        ConfigError: a pattern matches no parameter, no parameter is left to train, or a parameter in stages is not
            trained.

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
