"""Logits that routers find hard: random, tied, crowded, extreme, padded, scarce; in few shapes, which compile fast."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """Groups of logits [G, L, X], their mask of real tokens [G, L], and the capacity factor they are routed with."""

    name: str
    logits: np.ndarray
    mask: np.ndarray | None
    factor: float


def _random(seed: int, groups: int, tokens: int, experts: int, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((groups, tokens, experts)) * scale).astype(np.float32)


def _hard() -> tuple[np.ndarray, np.ndarray]:
    one_expert = np.tile(np.eye(8, dtype=np.float32)[2] * 9, (1, 40, 1))
    kinds = [
        _random(0, 24, 40, 8),
        np.round(_random(1, 16, 40, 8, 1.0)),  # ties, 0.0 against -0.0 among them
        np.zeros((1, 40, 8), np.float32),
        one_expert,
        _random(2, 4, 40, 8, 300.0),
        np.where(_random(3, 4, 40, 8) < 1.0, -np.inf, _random(4, 4, 40, 8)),
    ]
    kinds[-1][..., 5:7] = 0.0  # two experts are always possible
    logits = np.concatenate([np.concatenate(kinds)] * 2)
    mask = np.ones(logits.shape[:2], bool)
    padded = len(mask) // 2  # the same groups again, with padding
    mask[padded:] = np.random.default_rng(5).random(mask[padded:].shape) < 0.7
    mask[-1] = False
    return logits, mask


_LOGITS, _MASK = _hard()
HARD = [Case(f"hard, factor {factor}", _LOGITS, _MASK, factor) for factor in (0.01, 0.5, 8.0)]
SCARCE = [
    Case("fewer tokens than experts", _random(6, 16, 3, 16), None, 1.0),
    Case("one token", _random(7, 4, 1, 8), None, 1.0),
]
MANY = Case("many", _random(8, 512, 16, 8), None, 1.0)
