"""Packed weights: four or eight bits per weight, with a scale for each block of weights; they are converted when read.

Two formats of public checkpoints are known: MXFP4, which is used for the experts of gpt-oss, and eight bits in square
blocks, which is used for DeepSeek V3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from .files import StoredTensor

Read = Callable[["StoredTensor"], np.ndarray]
"""A function that returns the contents of a stored tensor, as unsigned integers or float32, in the tensor's shape."""

MXFP4, FP8_BLOCKS = "MXFP4", "F8_E4M3 in blocks"

DTYPES: dict[str, np.dtype] = {MXFP4: np.dtype(jnp.bfloat16), FP8_BLOCKS: np.dtype("float32")}
"""The dtype into which packed weights of each format are converted. bfloat16 holds the values of MXFP4 exactly."""

#: The values of the sixteen 4-bit codes, which have a sign, two bits of exponent and one of fraction.
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
_BLOCK = 128
"""Number of rows, and of columns, of a block of eight-bit weights."""


@dataclass(frozen=True)
class Packed:
    """A tensor that is stored as codes and scales.

    Attributes:
        kind: the storage format, a key of `DTYPES`.
        shape: the shape of the tensor's values.
        codes: the tensor of codes. MXFP4 has [X, R, C/32, 16] bytes of two codes each, for values of shape [X, C, R].
            The eight-bit format has [R, C] codes.
        scales: the tensor of scales. MXFP4 has [X, R, C/32] exponents of two, plus 127. The eight-bit format has
            [⌈R/128⌉, ⌈C/128⌉] float32.
    """

    kind: str
    shape: tuple[int, ...]
    codes: StoredTensor
    scales: StoredTensor

    @property
    def bytes(self) -> int:
        """Number of bytes of codes and scales together."""
        each = 4 if self.kind == FP8_BLOCKS else 1
        return math.prod(self.codes.shape) + each * math.prod(self.scales.shape)

    def values(self, first: int, last: int, read: Read) -> np.ndarray:
        """Return the values at indices `first` to `last` - 1 of the first dimension.

        Args:
            first, last: the first index, and the index after the last one, so that `last` is excluded.
            read: a function that reads a stored tensor.
        """
        codes = read(self.codes)
        if self.kind == FP8_BLOCKS:
            rows, columns = np.arange(first, last) // _BLOCK, np.arange(self.shape[1]) // _BLOCK
            scales = read(self.scales)[rows[:, None], columns[None]]
            return codes[first:last].view(jnp.float8_e4m3fn).astype(np.float32) * scales
        codes = codes[first:last]
        pairs = np.stack([_FP4[codes & 15], _FP4[codes >> 4]], axis=-1)  # the lower four bits come first
        values = np.ldexp(
            pairs.reshape(*codes.shape[:3], 32), read(self.scales)[first:last, ..., None].astype(int) - 127
        )
        whole = values.reshape(*codes.shape[:2], -1).astype(DTYPES[MXFP4])
        return whole.transpose(0, 2, 1)


def unpacked(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, Packed]]:
    """Find the packed tensors of a checkpoint by the names of their parts.

    Returns:
        Two mappings by name: all tensors, and the packed tensors only. In the first mapping, each packed tensor takes
        the place of its codes and scales, under the name of its values. Parts that do not belong together stay as they
        are.
    """
    found = dict(tensors)
    packed: dict[str, Packed] = {}
    for name, codes in tensors.items():
        base, _, ending = name.rpartition("_")
        scales = tensors.get(f"{base}_scales" if ending == "blocks" else f"{name}_scale_inv")
        if scales is None:
            continue
        if ending == "blocks" and (codes.dtype, scales.dtype) == ("U8", "U8") and len(codes.shape) == 4:
            if codes.shape[3] != 16 or scales.shape != codes.shape[:3]:
                continue
            shape = (codes.shape[0], codes.shape[2] * 32, codes.shape[1])
            packed[base] = Packed(MXFP4, shape, codes, scales)
        elif (codes.dtype, scales.dtype) == ("F8_E4M3", "F32") and len(codes.shape) == 2:
            if scales.shape != tuple(-(-size // _BLOCK) for size in codes.shape):
                continue
            packed[name] = Packed(FP8_BLOCKS, codes.shape, codes, scales)
            base = name
        else:
            continue
        for part in (name, f"{base}_scales", f"{base}_scale_inv"):
            found.pop(part, None)
        found[base] = replace(codes, dtype=packed[base].kind, shape=packed[base].shape)
    return found, packed
