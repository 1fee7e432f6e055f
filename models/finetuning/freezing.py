"""The parameters that are trained: all that no pattern freezes, or only the adapters if there are any."""

from __future__ import annotations

from collections.abc import Sequence

from gspmd.layouts import Layout
from gspmd.training.model.trainable import trained_paths as of_patterns

from ..config import ModelConfig
from ..parameters import parameters, stages_axes


def trained_paths(config: ModelConfig, layout: Layout, frozen: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the paths of the parameters that are trained, in the order of `parameters`.

    Args:
        config: the model; with `lora`, only adapters are trained.
        layout: a `gspmd.Layout`.
        frozen: patterns of paths, such as `blocks.0.attention.*`, or of the layout's keys, `attention.*`.

    Raises:
        ConfigError: a pattern matches no parameter, nothing is left to train, or the layout splits the layers into
            stages, which always train all parameters.

    Example:
        >>> from gspmd.layouts import Layout
        >>> trained_paths(ModelConfig(), Layout.load("replicated"), frozen=("blocks.*", "embedding.*"))
        ('output.norm',)
    """
    rows = parameters(config, layout)
    keys = {path: f"{row.key}{path[-2:]}" if path.endswith(("_a", "_b")) else row.key for path, row in rows.items()}
    still: set[str] = set()
    if config.lora:
        still = {path for path in rows if f"{path[:-2]}" not in rows or not path.endswith(("_a", "_b"))}
    return of_patterns(keys, frozen, still, stages=bool(stages_axes(layout)))
