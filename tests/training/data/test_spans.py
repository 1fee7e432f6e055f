"""Span corruption: T5's numbers, nothing lost, and spans of the asked share and length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspmd.training.data.spans import SpanNoise, corrupt

SENTINEL = 10_000


def splice(source, target, sentinels):
    """The text again: each sentinel of the source is replaced by what follows it in the target."""
    spans, last = {}, None
    for token in target:
        if token in sentinels:
            last = spans.setdefault(token, [])
        else:
            last.append(token)
    return [each for token in source for each in (spans[token] if token in sentinels else [token])]


@given(
    window=st.integers(2, 300),
    density=st.floats(0.01, 0.99),
    mean=st.floats(1, 20),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_source_and_target_splice_to_the_text(window, density, mean, seed):
    noise, text = SpanNoise(density, mean), np.arange(window, dtype=np.uint16)
    mask = noise.mask(window, np.random.default_rng(seed))
    count, spans = noise.counts(window)
    assert (len(mask), mask.sum(), (np.diff(mask.astype(int), prepend=0) > 0).sum()) == (window, count, spans)
    assert not mask[0]
    assert mask[-1]
    source, target = corrupt(text, mask, SENTINEL)
    assert (len(source) + 1, len(target) + 1) == noise.lengths(window)
    sentinels = [SENTINEL - number for number in range(spans)]
    assert [token for token in source if token in sentinels] == sentinels
    assert [token for token in target if token in sentinels] == sentinels
    assert sorted([*source, *target]) == sorted([*text, *sentinels * 2])
    assert splice(source, target, sentinels) == [*text]


def test_share_of_noise_and_mean_span_are_those_asked_for():
    random, noise = np.random.default_rng(0), SpanNoise()
    masks = np.stack([noise.mask(568, random) for _ in range(200)])
    begins = (np.diff(masks.astype(int), axis=1, prepend=0) > 0).sum()
    assert masks.mean() == pytest.approx(0.15, abs=0.001)
    assert masks.sum() / begins == pytest.approx(3, abs=0.05)
    # Lengths are drawn uniformly among the splits: of spans with mean 3, about a third has one token.
    lengths = np.concatenate(
        [np.diff(np.flatnonzero(np.diff(mask, prepend=False, append=False)))[::2] for mask in masks]
    )
    assert np.mean(lengths == 1) == pytest.approx(27 / 84, abs=0.02)
    assert masks[:, 100:500].mean() == pytest.approx(0.15, abs=0.01)  # wherever the token stands


@pytest.mark.parametrize(("source", "window", "target"), [(512, 568, 114), (1024, 1137, 229), (256, 284, 58)])
def test_windows_are_as_long_as_those_of_t5(source, window, target):
    """The numbers that T5's `random_spans_helper` gives for density 0.15 and mean 3."""
    noise = SpanNoise()
    assert noise.window(source) == window
    assert noise.lengths(window)[1] == target
    assert noise.lengths(window)[0] <= source < noise.lengths(window + 1)[0]
