"""Collectives written so that the TPU compiler keeps them; as they are planned it rewrites some of them.

Found by compiling for v4 with jax 0.10.2 (libtpu 0.0.42); `python scripts/compile_offline.py` shows what is left:

- a gather or a reduce-scatter over three torus axes at once becomes an all-reduce, with twice the bytes. Over two axes
  and then the third it sends what was planned, and is compiled as written;
- a reduce-scatter of two-byte numbers along the last dimension becomes an all-reduce where the pieces fill the lanes of
  the vector unit, or where nothing else can. With the scattered dimension in front it stays; the transpose costs less
  than the bytes.
"""

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
_RINGS = 2  # torus axes that one gather or reduce-scatter can run over
_ROWS = 1024  # rows that fill the lanes instead, where the compiler lays the last dimension across them


def is_target() -> bool:
    """Whether the program is being traced for a TPU."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.device_kind.startswith("TPU")


def all_gather(x: jax.Array, axes: tuple[str, ...], dimension: int, mesh: Mapping[str, int]) -> jax.Array:
    """A tiled gather over mesh axes, major first: over the last axes, and then over the first two."""
    major, minor = _split(axes, mesh)
    for part in (minor, major):
        x = lax.all_gather(x, part, axis=dimension, tiled=True) if part else x
    return x


def reduce_scatter(x: jax.Array, axes: tuple[str, ...], dimension: int, mesh: Mapping[str, int]) -> jax.Array:
    """A tiled reduce-scatter over mesh axes, major first: over the first two axes, and then over the rest."""
    for part in _split(axes, mesh):
        x = _scatter(x, part, dimension, prod(mesh[axis] for axis in part)) if part else x
    return x


def _split(axes: tuple[str, ...], mesh: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The first two axes that have more than one device, with those of one between them, and the others."""
    wide = [place for place, axis in enumerate(axes) if mesh[axis] > 1]
    end = wide[_RINGS] if len(wide) > _RINGS else len(axes)
    return axes[:end], axes[end:]


def _scatter(x: jax.Array, axes: tuple[str, ...], dimension: int, parts: int) -> jax.Array:
    if not _leads(x, dimension, parts):
        return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    front = jnp.moveaxis(x, dimension, 0)
    pieces = front.reshape(parts, front.shape[0] // parts, -1)
    piece = lax.psum_scatter(pieces, axes, scatter_dimension=0, tiled=False)
    return jnp.moveaxis(piece.reshape(front.shape[0] // parts, *front.shape[1:]), 0, dimension)


def _leads(x: jax.Array, dimension: int, parts: int) -> bool:
    """Whether the compiler would sum the whole along the last dimension."""
    if x.dtype.itemsize > 2 or dimension != x.ndim - 1 or x.ndim == 1:
        return False
    return x.shape[-1] // parts % LANES == 0 or x.shape[-2] < _ROWS
