"""A gather over several axes of a 3D torus, as permutes that keep the links of all these axes busy.

On TPU v4 and v5p the compiler's own gather over several axes goes round one ring through all devices, and uses the
links of one axis only. Here every shard is cut into two parts for each axis, which are sent in opposite directions. A
part goes round one axis first. Then, together with the blocks received there, it goes round the next axis. Each
of these pairs of parts begins with a different axis, so at any time the pairs use different links. Each block that
arrives is written to its position while the next blocks are sent.

This gather is fast, as compiled for v4 and v5p (`python benchmarks/torus_gather.py`), for these reasons:

- everything that arrives along one axis is sent round the next axis as one block. If shards were sent separately, there
  would be more permutes than the compiler runs at a time, and the compiler would not choose permutes that use different
  links;
- all parts have the same size, even if axes have different sizes. If the sizes were chosen to keep all links busy for
  the same time, the permutes would wait for one another (4x4x8: 11.8 ms instead of 9.8);
- blocks are written directly into the result. If they were stacked and joined at the end, they would be copied twice;
- blocks begin and end at borders of tiles. Otherwise every block would be reordered when it arrives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.lowerings.allocation import blank
from gspmd.lowerings.looped.rings import shard_parts
from gspmd.planner.spans import cut

_LANES = 128
_COLUMN = 32
"""Bytes in one lane of a tile: 8 rows of four-byte elements, or 16 rows of two-byte elements."""


def cut_along(shape: Sequence[int], itemsize: int, dimension: int, axes: int) -> int | None:
    """Return the dimension along which to cut shards for a gather over several axes.

    The result is None if the shards are too small to be cut.

    Args:
        shape: the shape of a shard, without dimensions of size 1.
        itemsize: bytes of an element.
        dimension: the dimension that is gathered.
        axes: the number of mesh axes with more than one device.

    Example:
        >>> cut_along((18432, 4608), 2, 1, 2), cut_along((18432, 4608), 2, 0, 2), cut_along((4608,), 2, 0, 2)
        (0, 1, None)
    """
    tile = _tile(len(shape), itemsize)
    if shape[dimension] < tile[dimension]:
        return None  # permutes would also send the padding of tiles
    others = (place for place in range(len(shape)) if place != dimension)
    return next((place for place in others if shape[place] // tile[place] >= 2 * axes), None)


def gather(
    x: jax.Array,
    axes: Sequence[str],
    dimension: int,
    along: int,
    mesh: Mapping[str, int],
    zero: jax.Array | int = 0,
) -> jax.Array:
    """Gather a dimension over mesh axes, which are listed from major to minor.

    Shards are cut into parts along the dimension `along`. Shards that are not whole tiles get a separate dimension, and
    are reordered at the end. Sending starts only once `zero` is known. To make the gather wait for certain arrays, the
    caller computes `zero` from them (`tpu.zero_after`).

    Source: Jain and Sabharwal 2010, *Optimal bucket algorithms for large MPI collectives on torus interconnects* (ICS):
        parts of the data go round the axes in different orders at the same time.
    """
    axes = tuple(axis for axis in axes if mesh[axis] > 1)
    if x.shape[dimension] % _tile(x.ndim, x.dtype.itemsize)[dimension]:
        shards = gather(x[None], axes, 0, along + 1, mesh, zero)
        shape = _times(x.shape, dimension, shards.shape[0])
        return jnp.moveaxis(shards, 0, dimension).reshape(shape)
    parts = zip(shard_parts(axes, "halves", len(axes)), _cuts(x, along, 2 * len(axes)))
    walks = [
        _Walk(lax.dynamic_slice_in_dim(x, start + zero, size, axis=along), start, part.axes[::-1], part.sign)
        for part, (start, size) in parts
    ]
    for stage in range(len(axes) - 1):
        blocks = [blank(_times(walk.block.shape, dimension, mesh[walk.axes[stage]]), x.dtype) for walk in walks]
        for number, place, piece in _round(walks, stage, axes, dimension, mesh):
            blocks[number] = _put(blocks[number], piece, {dimension: place})
        for walk, block in zip(walks, blocks):
            walk.block = block
    whole = blank(_times(x.shape, dimension, prod(mesh[axis] for axis in axes)), x.dtype)
    for number, place, piece in _round(walks, len(axes) - 1, axes, dimension, mesh):
        whole = _put(whole, piece, {dimension: place, along: walks[number].start})
    return whole


@dataclass
class _Walk:
    """The path of one part of every shard round the axes, one axis after another.

    Attributes:
        block: the part, gathered over the axes so far, with the shards in their final order.
        start: the position at which the part begins, in the dimension along which shards are cut.
        axes: the axes in the order in which the part is sent round them.
        sign: the direction, +1 or -1.
    """

    block: jax.Array
    start: int
    axes: tuple[str, ...]
    sign: int


def _round(
    walks: Sequence[_Walk], stage: int, axes: Sequence[str], dimension: int, mesh: Mapping[str, int]
) -> Iterator[tuple[int, jax.Array, jax.Array]]:
    """Send the blocks of all walks at the same time, each round one axis.

    Yields:
        The index of a walk, a piece's position along the gathered dimension, and the piece to be written there.
    """
    blocks = [walk.block for walk in walks]
    for hop in range(max(mesh[walk.axes[stage]] for walk in walks)):
        for number, walk in enumerate(walks):
            axis, size = walk.axes[stage], mesh[walk.axes[stage]]
            if hop >= size:
                continue
            if hop:
                to = [(place, (place + walk.sign) % size) for place in range(size)]
                blocks[number] = lax.ppermute(blocks[number], axis, to)
            origin = (lax.axis_index(axis) - hop * walk.sign) % size
            # Shards along outer axes are not adjacent in the result: the shards along this axis are between them.
            outer = prod(mesh[each] for each in walk.axes[:stage] if axes.index(each) < axes.index(axis))
            length = blocks[number].shape[dimension] // outer
            for place in range(outer):
                piece = lax.slice_in_dim(blocks[number], place * length, (place + 1) * length, axis=dimension)
                yield number, (place * size + origin) * length, piece


def _put(whole: jax.Array, piece: jax.Array, places: Mapping[int, jax.Array | int]) -> jax.Array:
    # Cast to one dtype: with x64 enabled, positions and literals have 64 bits.
    starts = [lax.convert_element_type(places.get(dimension, 0), "int32") for dimension in range(whole.ndim)]
    return lax.dynamic_update_slice(whole, piece, starts)


def _times(shape: Sequence[int], dimension: int, times: int) -> list[int]:
    return [size * times if place == dimension else size for place, size in enumerate(shape)]


def _cuts(x: jax.Array, along: int, parts: int) -> list[tuple[int, int]]:
    """Return the start and the length of nearly equal parts of the dimension `along`.

    The parts are whole tiles if possible, except for the last part, which takes the rest.
    """
    size, tile = x.shape[along], _tile(x.ndim, x.dtype.itemsize)[along]
    unit = tile if size // tile >= parts else 1
    starts = [start * unit for start, _ in cut(size // unit, parts)]
    return [(start, end - start) for start, end in pairwise([*starts, size])]


def _tile(rank: int, itemsize: int) -> list[int]:
    """Return the size of a memory tile along each dimension of an array."""
    return [*[1] * (rank - 2), *[max(1, _COLUMN // itemsize), _LANES][-rank:]]
