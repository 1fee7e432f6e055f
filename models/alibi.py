"""The slopes of ALiBi, attention with linear biases: the amount by which a score falls per token of distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gspmd.layouts.rules.sizes import Padded

    from .config import ModelConfig


def slopes(heads: int, most: float = 8.0) -> np.ndarray:
    """Return the slope of each of n query heads, float64 [H].

        2^(-most · i / n)  for i = 1 .. n, if n is a power of two

    For any other n, the first heads have all slopes of the next lower power of two. The remaining heads have the first,
    the third, the fifth slope and so on of the next higher power of two.

    Args:
        heads: number of query heads.
        most: the exponent of the head with the smallest slope, without its minus sign.

    Example:
        >>> slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    Source: Press et al. 2022, *Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation*
        (arXiv 2108.12409), section 3. The rule for numbers of heads that are not powers of two is in the authors'
        program.
    """
    wide = 1 << (heads - 1).bit_length()
    exponents = most * np.arange(1, wide + 1) / wide
    if wide != heads:  # those of wide / 2 heads, every second one, come first
        exponents = np.concatenate([exponents[1::2], exponents[::2]])[:heads]
    return 2.0**-exponents


def slopes_of(config: ModelConfig, padded: Padded | None) -> tuple[float, ...]:
    """Return the slopes of a model's query heads, in the form of the argument `slopes` of `gspmd.ops.attention`.

    Args:
        config: the model configuration.
        padded: the padding of the heads, or None if there is none. Heads that are padding have slope 0.
    """
    found = slopes(config.heads, config.alibi_max)
    if config.alibi_scaled:
        found = found * (config.head_size**-0.5 if config.attention_scale is None else config.attention_scale)
    if padded is not None:
        found = np.where(padded.origins < 0, 0.0, found[padded.origins])
    return tuple(found.tolist())
