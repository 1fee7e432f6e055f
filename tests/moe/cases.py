"""Logits that routers find hard: random, tied, crowded, scarce, padded."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    name: str
    logits: np.ndarray  # [G, L, X] float32
    mask: np.ndarray | None  # [G, L] bool
    factor: float


def _random(seed, shape, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _mask(seed, shape):
    return np.random.default_rng(seed).random(shape) < 0.7


def _padding_group():
    mask = _mask(3, (3, 20))
    mask[1] = False
    return mask


CASES = [
    Case("random", _random(0, (64, 64, 8)), None, 1.25),
    Case("roomy", _random(1, (8, 33, 4)), None, 8.0),
    Case("overflow", _random(2, (16, 64, 8)), None, 0.25),
    Case("one slot", _random(3, (8, 16, 8)), None, 0.01),
    Case("ties", np.round(_random(4, (32, 48, 6), 1.0)), None, 1.0),
    Case("all equal", np.zeros((2, 24, 5), np.float32), None, 1.0),
    Case("one expert", np.tile(np.eye(6, dtype=np.float32)[2] * 9, (2, 30, 1)), None, 1.0),
    Case("fewer tokens than experts", _random(5, (8, 3, 16)), None, 1.0),
    Case("one token", _random(6, (4, 1, 8)), None, 1.0),
    Case("extreme", _random(7, (4, 32, 8), 300.0), None, 1.0),
    Case("padding", _random(8, (16, 40, 8)), _mask(1, (16, 40)), 1.0),
    Case("padding and ties", np.round(_random(9, (8, 40, 4), 1.0)), _mask(2, (8, 40)), 0.5),
    Case("a group of padding", _random(10, (3, 20, 4)), _padding_group(), 1.0),
]
