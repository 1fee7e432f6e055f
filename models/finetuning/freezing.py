"""Which parameters are trained: all but those that a pattern freezes; with adapters, these alone."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from gspmd.annotate.errors import suggestion
from gspmd.training.toml import ConfigError

from ..config import ModelConfig
from ..parameters import parameters, stages_axes


def trained_paths(config: ModelConfig, layout: Any, frozen: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the paths of the parameters that are trained, in the order of `parameters`.

    Args:
        config: the model; with `lora`, only adapters are trained.
        layout: a `gspmd.Layout`.
        frozen: patterns of paths, such as `blocks.0.attention.*`, or of the layout's keys, `attention.*`.

    Raises:
        ConfigError: a pattern matches no parameter, nothing is left to train, or the layout splits the layers into
            stages, which train all of theirs.

    Example:
        >>> from gspmd.layouts import Layout
        >>> trained_paths(ModelConfig(), Layout.load("replicated"), frozen=("blocks.*", "embedding.*"))
        ('output.norm',)
    """
    rows, faults = parameters(config, layout), []
    keys = {path: f"{row.key}{path[-2:]}" if path.endswith(("_a", "_b")) else row.key for path, row in rows.items()}
    still: set[str] = set()
    for pattern in frozen:
        found = {path for path, key in keys.items() if fnmatchcase(path, pattern) or fnmatchcase(key, pattern)}
        if not found:
            near = suggestion(pattern, (*keys, *keys.values())).strip() or f"They are {', '.join(keys)}."
            faults.append(f"frozen has {pattern!r}, which matches no parameter. {near}")
        still |= found
    if config.lora:
        still |= {path for path in rows if f"{path[:-2]}" not in rows or not path.endswith(("_a", "_b"))}
    if not faults and len(still) == len(rows):
        faults.append(f"frozen {', '.join(map(repr, frozen))} leaves no parameter to train.")
    if still and stages_axes(layout):
        faults.append("the stages of a pipeline train all parameters; leave [lora] and frozen out, or the stages.")
    if faults:
        raise ConfigError("cannot train this model:", faults)
    return tuple(path for path in rows if path not in still)
