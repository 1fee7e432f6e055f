"""Every activation that a layout places, with its size: the second half of the table printed before step 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gspmd.annotate import Spec
from models.config import ModelConfig
from models.parameters import SHARED, shared_sizes


def activation_specs(
    config: ModelConfig, layout: Any, batch: int, length: int
) -> dict[str, tuple[Spec, tuple[int, ...]]]:
    """Layout key to spec and whole shape of every activation of one training step, in the order of the forward pass.

    Args:
        config: the model.
        layout: a `gspmd.Layout`, or any mapping from its keys to specs.
        batch: sequences per step, over all devices.
        length: tokens per sequence.

    Example:
        >>> layout = {"embedding.tokens": "B_xL", "attention.residual": "B_xLE", "attention.query": "B_xLHD",
        ...           "attention.key": "B_xLKD", "ffn.residual": "B_xLE", "ffn.hidden": "B_xLF",
        ...           "output.logits": "B_xLV"}
        >>> spec, shape = activation_specs(ModelConfig(), layout, batch=8, length=64)["ffn.hidden"]
        >>> str(spec), shape
        ('B_xLF', (8, 64, 256))
    """
    sizes = config.sizes(batch, length)
    if config.moe:
        tokens = batch * length // sizes["G"]
        sizes |= {"C": config.moe.capacity(tokens)}
    table = {}
    for key in _keys(config):
        spec = Spec.parse(layout[key])
        local = sizes | {"L": tokens} if key == "moe.groups" else sizes
        local = shared_sizes(config, sizes) if key in SHARED else local
        table[key] = spec, tuple(local[dim] for dim in spec.dims)
    return table


def _keys(config: ModelConfig) -> Iterator[str]:
    yield from ("embedding.tokens", "attention.residual", "attention.query", "attention.key", "ffn.residual")
    if config.period > 1 or not config.moe:
        yield "ffn.hidden"
    if config.moe:
        yield from ("moe.groups", "moe.dispatched", "moe.expert_input", "moe.hidden")
        if config.moe.shared:
            yield "moe.shared_hidden"
    yield "output.logits"
