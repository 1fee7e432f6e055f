"""Span corruption: random spans of a text are taken out as noise, for a model to restore (T5, §3.1.4)."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SpanNoise:
    """Random spans of one or more tokens of a text; in the source, each span is replaced by a sentinel.

    A window of n tokens has m = round(density × n) tokens of noise in round(m / mean) spans, but at least one token and
    one span. The lengths of the spans, and of the stretches of text before them, are drawn uniformly. A window begins
    with text and ends with noise.

    Attributes:
        density: the fraction of tokens that are noise.
        mean: mean number of tokens of a span.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
        arXiv:1910.10683, §3.1.4.
    """

    density: float = 0.15
    mean: float = 3.0

    def counts(self, window: int) -> tuple[int, int]:
        """Return the numbers of noise tokens and of spans in a window of at least two tokens.

        >>> SpanNoise().counts(568)
        (85, 28)
        """
        noise = min(max(round(window * self.density), 1), window - 1)
        return noise, min(max(round(noise / self.mean), 1), window - noise)

    def lengths(self, window: int) -> tuple[int, int]:
        """Return the numbers of tokens of source and target, each including one sentinel per span and an end token.

        >>> SpanNoise().lengths(568)
        (512, 114)
        """
        noise, spans = self.counts(window)
        return window - noise + spans + 1, noise + spans + 1

    def window(self, source_length: int) -> int:
        """Return the size of the largest window whose source has at most `source_length` tokens.

        `source_length` must be at least 3.

        >>> SpanNoise().window(512)
        568
        """
        window = 2
        while self.lengths(window + 1)[0] <= source_length:
            window += 1
        return window

    def mask(self, window: int, random: np.random.Generator) -> np.ndarray:
        """Draw a boolean mask [window], which is true for the tokens of a window that are noise.

        >>> SpanNoise(density=0.4, mean=2).mask(10, np.random.default_rng(0)).astype(int).tolist()
        [0, 0, 0, 0, 0, 1, 1, 0, 1, 1]
        """
        noise, spans = self.counts(window)
        lengths = np.stack([_parts(window - noise, spans, random), _parts(noise, spans, random)], axis=1)
        return np.repeat(np.tile([False, True], spans), lengths.ravel())


def corrupt(tokens: np.ndarray, mask: np.ndarray, sentinel: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source, with one sentinel for each span of noise, and the target, with each sentinel and its span.

    Args:
        tokens: the window, [N].
        mask: [N], true for tokens of noise.
        sentinel: the id of the first sentinel; each further sentinel has the next lower id.

    Example:
        >>> source, target = corrupt(np.arange(6), np.array([0, 1, 1, 0, 0, 1], bool), 99)
        >>> source.tolist(), target.tolist()
        ([0, 99, 3, 4, 98], [99, 1, 2, 98, 5])
    """
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    sentinels = sentinel - np.arange(begins.sum())
    source = np.where(begins, 0, tokens.astype(np.int64))
    source[begins] = sentinels
    within = np.cumsum(mask)[begins] - 1  # where each span begins among the tokens of noise
    return source[~mask | begins], np.insert(tokens[mask].astype(np.int64), within, sentinels)


def _parts(items: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """Draw a random split of `items` items into `parts` parts, and return the lengths of the parts, [parts].

    Each part has at least one item, and all such splits are equally likely.
    """
    cuts = np.sort(random.choice(items - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=items)
