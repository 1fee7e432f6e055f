"""The trained parameters: all parameters that no pattern freezes, or only the adapters if there are any.

Biases for choosing experts are not trained, because no loss depends on them. Steps adjust these biases by the experts'
loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gspmd.layouts import Layout
from gspmd.training.model.trainable import trained_paths as of_patterns

from ..config import ModelConfig
from ..parameters import ParameterRow, parameters, stages_axes

CHOICE_BIAS = "moe.choice_bias"
"""The layout key of the biases for choosing experts."""


def trained_paths(config: ModelConfig, layout: Layout, frozen: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the paths of the trained parameters, in the order of `parameters`.

    Args:
        config: the model configuration. If it has `lora`, only adapters are trained.
        layout: a `gspmd.Layout`.
        frozen: patterns of paths, such as `blocks.0.attention.*`, or of keys of the layout, such as `attention.*`.

    Raises:
        ConfigError: a pattern matches no parameter; no parameter is left to train; or parameters are frozen in a layout
            with pipeline stages. Stages train all parameters except the biases for choosing experts.

    Example:
        >>> from gspmd.layouts import Layout
        >>> trained_paths(ModelConfig(), Layout.load("replicated"), frozen=("blocks.*", "embedding.*"))
        ('output.norm',)
    """
    rows = parameters(config, layout)
    still = {path for path, row in rows.items() if row.key == CHOICE_BIAS}
    staged = rows.keys() - still if stages_axes(layout) else ()
    if config.lora:
        still = {path for path in rows if f"{path[:-2]}" not in rows or not path.endswith(("_a", "_b"))}
    return of_patterns(_keys(rows), frozen, still, staged)


def balanced_paths(config: ModelConfig, layout: Layout, frozen: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the paths of the biases for choosing experts that training steps adjust, in the order of `parameters`.

    Frozen biases are not adjusted. No bias is adjusted if the model has no `moe.bias_rate`, or if it has adapters.

    Args:
        config, layout, frozen: see `trained_paths`.
    """
    if config.lora or not (config.moe and config.moe.bias_rate):
        return ()
    rows = parameters(config, layout)
    return tuple(path for path in of_patterns(_keys(rows), frozen) if rows[path].key == CHOICE_BIAS)


def _keys(rows: Mapping[str, ParameterRow]) -> dict[str, str]:
    """Return the layout key of every parameter, by its path; keys of an adapter's matrices end in `_a` or `_b`."""
    return {path: f"{row.key}{path[-2:]}" if path.endswith(("_a", "_b")) else row.key for path, row in rows.items()}
