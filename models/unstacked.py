"""Weights of blocks as separate arrays, which a TPU can load before it runs the block that uses them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding

from gspmd.layouts.initial import nested

from .parameters import parameters, stages_axes
from .transformer import Transformer, arrays, mesh_of


def unstack(model: Transformer, *, free: bool = False) -> Transformer:
    """Return the model with separate arrays for every block, in place of one array for all blocks of a kind.

    The logits stay the same. A loop over stacked blocks reads each weight only at the product with this weight. The TPU
    compiler loads separate arrays into on-chip memory while earlier blocks run or wait for collectives, so a decode
    step of few rows is faster. The program contains all blocks one after the other, so it takes longer to compile.

    Args:
        model: a model of stacked arrays, from `build`, `load` or `quantize`.
        free: whether to free every array of the given model as soon as it is split, so that the devices never hold two
            copies of all weights. The given model cannot be used afterwards.

    Returns:
        A model with `stacked` off in its configuration, and each weight sharded by the layout.

    Raises:
        ValueError: the model has no stacked weights, it has an encoder, or its layout has pipeline stages.
    """
    if not model.config.stacked:
        raise ValueError("the blocks of this model are not stacked.")
    if stages_axes(model.layout):
        raise ValueError("the blocks of this model are on pipeline stages, which hold stacks; use another layout.")
    config, values = replace(model.config, stacked=False), arrays(model)
    made: dict[str, Any] = {}
    with jax.set_mesh(mesh_of(values)):
        for path, value in values.items():
            if not path.startswith("blocks."):
                made[path] = value
                continue
            place, _, name = path.removeprefix("blocks.").partition(".")
            for number in range(value.shape[0]):
                at = config.stacks()[int(place)][number]
                made[f"blocks.{at}.{name}"] = _taker(value.sharding)(value, number)
            if free:
                value.delete()
    rows = parameters(config, model.layout)
    return Transformer(config, model.layout, nested({path: made[path] for path in rows}), model.dtype)


@lru_cache(maxsize=256)
def _taker(placed: NamedSharding) -> Any:
    """Return a compiled function from a stack [N, ...] and an index to a slice [1, ...]; all blocks use it."""
    return jax.jit(lambda stack, at: jax.lax.dynamic_slice_in_dim(stack, at, 1), out_shardings=placed)
