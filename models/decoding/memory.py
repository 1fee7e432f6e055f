"""The order of dimensions in the memory of a device, which the compiler for TPUs cares about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from .cache import Cache


def orders_memory(mesh: jax.sharding.Mesh) -> bool:
    """Whether the order of dimensions in memory matters: on TPUs a matrix in another is copied before it is used."""
    return mesh.devices.flat[0].platform == "tpu"


def heads_first(cache: Cache) -> Cache:
    """Return an abstract cache whose keys and values stand in memory by heads, then positions, as TPUs read them best.

    With the positions first, the compiler for TPUs brings every layer into that order before it multiplies: three times
    the seconds of a step with 8 key/value heads on a device (jaxlib 0.10.2, libtpu 0.0.42). One head needs nothing, and
    neither shapes nor specs change. A program that takes such a cache has to return it so: `formats`. It does not
    help everywhere: with 8 heads and room for 1024 tokens the loop copies half of such a cache (docs/decoding.md).
    """

    def placed(leaf: Any) -> Any:
        if leaf.ndim < 5 or leaf.sharding.shard_shape(leaf.shape)[3] == 1:
            return leaf
        where = Format(Layout((0, 1, 3, 2, 4)), leaf.sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(placed, cache)


def formats(tree: Any) -> Any:
    """The placement and order in memory of every array of a tree of shapes, for `out_shardings`."""
    return jax.tree.map(lambda leaf: leaf.format, tree)


def in_best_order(
    weights: dict[str, jax.Array], step: Callable, donated: int | tuple[int, ...], *others: Any
) -> dict[str, jax.Array]:
    """Return weights in the order that the compiler chooses for a step that reads them.

    In JAX's own order, the compiler for TPUs copies query projections with few heads on a device in every layer: 7 of
    38 ms of a decode step of PaLM 540B on 64 TPU v4 (libtpu 0.0.42). Those weights are copied once here.

    Args:
        weights: placed arrays.
        step: a function of them and of `others`, which may be abstract.
        donated: number of the argument that the step overwrites.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights)
    chosen = jax.tree.map(lambda leaf: Format(Layout.AUTO, leaf.sharding), shapes)
    given = jax.tree.map(lambda leaf: leaf.format, others)
    jitted = jax.jit(step, in_shardings=(chosen, *given), donate_argnums=donated)
    orders = jitted.lower(shapes, *others).compile().input_formats[0][0]
    return {path: x if x.format == orders[path] else jax.device_put(x, orders[path]) for path, x in weights.items()}
