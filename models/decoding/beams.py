"""Beam search on the devices: the likeliest beginnings of every text are continued, and the best complete text wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate import Spec
from gspmd.lowerings.program import context, run
from gspmd.ops.interface.planned_op import shard_index

from ..blocks import part
from ..placement import moved
from ..transformer import Transformer
from .cache import Cache, cache_spec
from .prefix import on_rows
from .serving import GenerationError
from .steps import decode_step

MOST_BEAMS = 64
"""The largest number of beams of a text. Each beam has a row of the cache."""

_LOWEST = np.float32(-1e9)
"""The score of a beam or a complete text that does not exist yet, the same as in transformers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BeamSearch:
    """The beams of G texts, b for each text in adjacent rows. This is the carry of the loop; its buffers are donated.

    Attributes:
        cache: the cache of the tokens read so far, with G · b rows.
        tokens: [G · b] int32, the last token of each beam, which has not been read yet.
        scores: [G, b] float32, the sum of the log-probabilities of each beam's new tokens. The best beam comes first.
        texts: [G, b, M] int32, the new tokens of each beam.
        end_scores: [G, b] float32, the scores of the best texts that have ended. The best text comes first.
        end_texts: [G, b, M] int32, the new tokens of the texts that have ended.
        end_lengths: [G, b] int32, the number of new tokens of the texts that have ended, without a stop token; -1 where
            no text has ended yet.
        going: [G] bool, whether a beam may still become better than the texts that have ended.
        undefined: [G] bool, whether some logits were NaN or infinite.
        step: int32, the number of new tokens in each beam.
    """

    cache: Cache
    tokens: jax.Array
    scores: jax.Array
    texts: jax.Array
    end_scores: jax.Array
    end_texts: jax.Array
    end_lengths: jax.Array
    going: jax.Array
    undefined: jax.Array
    step: jax.Array


BeamLoop = Callable[[Mapping[str, jax.Array], BeamSearch, jax.Array, jax.Array], BeamSearch]


def check_beams(
    beams: int, length_penalty: float, samples: int, draws: bool, vocabulary: int, stops: int, n_best: int = 1
) -> None:
    """Raise an error if beam search does not support the settings, or if its settings are given without beams.

    Args:
        beams: the number of beams of each text; 0 for no beam search.
        length_penalty: the exponent of a text's length.
        samples: number of texts for each prompt.
        draws: whether any sampling setting differs from its default.
        vocabulary: number of tokens in the vocabulary.
        stops: number of tokens that end a text.
        n_best: number of texts for each prompt that the search returns.

    Raises:
        GenerationError: the settings have faults. The message lists all faults.
    """
    faults = []
    if not 0 <= beams <= MOST_BEAMS:
        faults.append(f"beams is {beams}; it must be from 0 to {MOST_BEAMS} (0 draws tokens instead)")
    if not np.isfinite(length_penalty):
        faults.append(f"length_penalty is {length_penalty}; it must be a finite number")
    if not beams and length_penalty != 1:
        faults.append(f"length_penalty is {length_penalty}, but there are no beams; set beams, or leave it out")
    if beams and samples != 1:
        faults.append(f"samples is {samples}, but beam search draws no samples; set n_best for more texts of a prompt")
    if not beams and n_best != 1:
        faults.append(f"n_best is {n_best}, but there are no beams; set beams, or samples to draw more texts")
    if 0 < beams <= MOST_BEAMS and not 1 <= n_best <= beams:
        faults.append(f"n_best is {n_best}; it must be at least 1, and at most beams ({beams})")
    if beams and draws:
        faults.append("sampling is set, but beam search draws no tokens; leave out sampling and seed")
    if 1 < n_best <= beams and n_best > vocabulary - stops > 0:
        faults.append(f"n_best is {n_best}; it must be at most {vocabulary - stops}, the tokens that do not end a text")
    if beams and vocabulary <= stops:
        faults.append(f"all {vocabulary} tokens of the vocabulary end a text; at least one must continue it")
    if faults:
        raise GenerationError("cannot search with beams:\n" + "\n".join(f"  {fault}" for fault in faults))


def beam_loop(model: Transformer, beams: int, length_penalty: float, stop: Sequence[int]) -> BeamLoop:
    """Build the loop of beam search, a function (weights, search, limit, most) -> search.

        score(text) = sum over its new tokens of log p(token | earlier tokens) / |new tokens| ^ length_penalty

    In each step the b beams of a text are continued by all tokens, and the (1 + stop tokens) · b likeliest
    continuations, but at least 2 b, are kept. A continuation that ends in a stop token is called an end, if it is among
    the b likeliest. The b likeliest continuations without a stop token are the next beams. The b ends with the best
    scores are kept. A text is complete under two conditions: it has b ends, and the score of its best beam, at the
    beam's present length, is not above the worst score of an end. When the limit on tokens is reached, beams end as
    they are.

    Every device finds the likeliest tokens in its own part of the vocabulary, and only these tokens are gathered, not
    the logits. All beams of a text are on one device. So each device reorders the rows of its own cache, layer by
    layer, without sending anything. Rows of encoded sources are the same for all beams, and stay in place.

    Args:
        model: the model, as for `decode_step`.
        beams: b, the number of beams of each text.
        length_penalty: the exponent of a text's length. A value above 0 favors longer texts, and a value below 0 favors
            shorter texts.
        stop: the tokens that end a text. They count in the text's length and score, but are not part of the text.

    Returns:
        A pure function of the weights, the search, and two int32 scalars: the number of steps after which the function
        returns, and the largest number of new tokens of a text. Compile it with the search donated. All arrays except
        weights and cache are replicated.

    Source: Wu et al. 2016 (arXiv 1609.08144), section 7, for scores normalized by length.
    Differs: the penalty is |Y|^α instead of ((5 + |Y|) / 6)^α, and there is no coverage penalty. Texts and searches end
        as in `generate(num_beams=b, do_sample=False, early_stopping=False)` of transformers, which finds the same
        texts. A beam that ends is replaced by the next beam, and the search does not wait for a longer text that might
        overtake the ends.
    """
    decode = decode_step(model)
    spec = model.layout.one_position().spec("output.logits").without("L")
    rows_of_cache = Spec(("B",), (cache_spec(model.layout).axes_of("B"),))
    kept = max(2, 1 + len(set(stop))) * beams

    def one_step(weights: Mapping[str, jax.Array], search: BeamSearch, most: jax.Array) -> BeamSearch:
        groups, _, room = search.texts.shape
        logits, cache = decode(weights, search.tokens, search.cache)
        with part(model.layout, "output"), jax.named_scope("beams"):
            values, ids = likeliest(logits, spec, kept)  # [G · b, C], C at least `kept` if the vocabulary has as many
        undefined = (~jnp.isfinite(values[:, 0])).reshape(groups, beams).any(axis=1) & search.going
        totals = (values.reshape(groups, beams, -1) + search.scores[:, :, None]).reshape(groups, -1)
        best, at = jax.lax.top_k(totals, min(kept, totals.shape[1]))
        parents, tokens = at // values.shape[1], _picked(ids.reshape(groups, -1), at)
        written = jnp.arange(room)[None, None] == search.step
        texts = jnp.where(written, tokens[:, :, None], _picked(search.texts, parents))
        over, new = search.step + 1 == most, search.step + 1
        stops = jnp.isin(tokens, jnp.asarray(stop, jnp.int32)) if stop else jnp.zeros(tokens.shape, bool)

        scores, following = jax.lax.top_k(jnp.where(stops, best + _LOWEST, best), beams)
        next_parents = _picked(parents, following)

        ends = (stops | over) & (jnp.arange(best.shape[1])[None] < beams) & search.going[:, None]
        normal = jnp.asarray(np.arange(1, room + 1) ** float(length_penalty), jnp.float32)
        found = jnp.where(ends, best / normal[search.step], _LOWEST)
        end_scores, chosen = jax.lax.top_k(jnp.concatenate([search.end_scores, found], axis=1), beams)
        lengths = jnp.where(ends, jnp.where(stops, search.step, new), -1)
        end_lengths = _picked(jnp.concatenate([search.end_lengths, lengths], axis=1), chosen)
        end_texts = _picked(jnp.concatenate([search.end_texts, texts], axis=1), chosen)

        worst = jnp.where((end_lengths < 0).any(axis=1), _LOWEST, end_scores[:, -1])
        going = search.going & ~undefined & ~over & (scores[:, 0] / normal[search.step] > worst)

        first = jnp.arange(groups, dtype=jnp.int32)[:, None] * beams
        sources = moved((first + next_parents).reshape(-1) % _rows_on_a_device(rows_of_cache, groups * beams),
                        rows_of_cache.with_axes("B", ()), rows_of_cache)  # fmt: skip
        with jax.named_scope("cache"):
            layers = on_rows(cache, sources, model.layout, "reorder", _reordered)
        return BeamSearch(
            Cache(*layers, cache.lengths, cache.source, cache.totals), _picked(tokens, following).reshape(-1), scores,
            _picked(texts, following), end_scores, end_texts, end_lengths, going, search.undefined | undefined, new,
        )  # fmt: skip

    def loop(weights: Mapping[str, jax.Array], search: BeamSearch, limit: jax.Array, most: jax.Array) -> BeamSearch:
        def unfinished(search: BeamSearch) -> jax.Array:
            return (search.step < limit) & jnp.any(search.going)

        return jax.lax.while_loop(unfinished, lambda search: one_step(weights, search, most), search)

    return loop


def likeliest(logits: jax.Array, spec: Spec, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the likeliest tokens of every row and their log-probabilities, replicated.

    Every device finds `count` tokens in its own part of the vocabulary. With n parts, n · (count + 1) float32 and n ·
    count int32 per row are gathered.

    Args:
        logits: [B, V] float32.
        spec: the spec of the logits.
        count: the number of tokens to find. If the vocabulary has fewer tokens, all of them are found.

    Returns:
        [B, C] float32 log-probabilities, the largest first, and [B, C] int32 tokens. Among equally likely tokens, the
        lowest comes first. If logits of a row are NaN or infinite, the row's first log-probability is not finite.
    """
    found = Spec(("B", "C"), spec.axes)
    whole = Spec(("B", "C"), ((), ()))
    body = _likeliest(spec.axes[1], count)
    each, at = run(context(), f"likeliest of {spec}", (), body, (spec,), (found, found), logits)
    parts = each.shape[1] - at.shape[1]  # each part has one column more in `each`: its logsumexp
    each, at = moved(each, found, whole), moved(at, found, whole)
    each = each.reshape(each.shape[0], parts, -1)
    values, sums = each[:, :, :-1].reshape(each.shape[0], -1), each[:, :, -1]
    best, order = jax.lax.top_k(values, min(count, values.shape[1]))
    return best - jax.nn.logsumexp(sums, axis=1, keepdims=True), _picked(at, order)


@lru_cache(maxsize=64)
def _likeliest(axes: tuple[str, ...], count: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    def body(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, at = jax.lax.top_k(logits, min(count, logits.shape[1]))
        total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        return jnp.concatenate([values, total], axis=1), at + shard_index(axes) * logits.shape[1]

    return body


def _picked(x: jax.Array, at: jax.Array) -> jax.Array:
    """Pick entries [G, n, ...] of x [G, m, ...] by the indices `at` [G, n]."""
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)


def _rows_on_a_device(rows: Spec, count: int) -> int:
    """Return the number of rows on one device if there are `count` rows on all devices together."""
    return rows.local_shape({"B": count}, dict(jax.sharding.get_abstract_mesh().shape))[0]


def _reordered(array: jax.Array, sources: jax.Array) -> jax.Array:
    """Return layers [N, B, K, ...] in which row b is the old row sources[b].

    Layers are reordered in place, one by one. If there is only one layer, its heads are reordered one by one. So only
    one layer or head is in memory twice.
    """
    along = 0 if array.shape[0] > 1 else 2

    def part(number: jax.Array, array: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(array, number, 1, axis=along)
        return jax.lax.dynamic_update_slice_in_dim(array, jnp.take(rows, sources, axis=1), number, axis=along)

    return jax.lax.fori_loop(0, array.shape[along], part, array)


def begin(cache: Cache, tokens: jax.Array, groups: int, texts: int, beams: int, room: int) -> BeamSearch:
    """Return the state of a search whose beams have no new tokens yet.

    At first all beams of a text are equal. So all beams except the first begin with the lowest score.

    Args:
        cache: the cache after reading the prompts without their last tokens.
        tokens: [G · b] int32, the last token of the prompt of each row.
        groups: G, the number of texts for which there are rows.
        texts: number of real texts among the G texts. The remaining texts only fill up rows.
        beams: b, the number of beams of each text.
        room: M, the size of the arrays for a text's new tokens. It is at least the largest number of new tokens.
    """
    lowest: Any = np.full((groups, beams), _LOWEST)
    nothing: Any = np.zeros((groups, beams, room), np.int32)
    first: Any = np.where(np.arange(beams)[None] == 0, np.float32(0), lowest)
    lengths: Any = np.full((groups, beams), -1, np.int32)
    going: Any = np.arange(groups) < texts
    undefined: Any = np.zeros(groups, np.bool_)
    step: Any = np.int32(0)
    return BeamSearch(cache, tokens, first, nothing, lowest, nothing, lengths, going, undefined, step)
