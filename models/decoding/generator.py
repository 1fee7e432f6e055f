"""Text generation: prompts are continued, and tokens are returned in bursts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd.interruption import answering
from gspmd.layouts import Layout
from gspmd.lowerings.in_force import current as current_lowering

from ..placement import batch_spec
from ..shapes import abstract_tokens
from ..transformer import Transformer, arrays, with_arrays
from .batch import Batch, Sizes, coarse, make_batch
from .beams import BeamSearch, beam_loop, begin, check_beams
from .cache import Cache, abstract_cache, abstract_whole, cache_spec, zeros
from .loop import NOTHING, PLAIN, UNDEFINED, Sampling, WrittenTexts, decode_loop
from .memory import Formats, any_order, format_of, not_finite, put, shapes
from .prefix import copy_rows
from .serving import GenerationError, check_seeds, for_serving, served
from .steps import decode_step, encode_step, prefill_step


@dataclass(frozen=True)
class Burst:
    """The next tokens of every text, which reach the host together.

    Attributes:
        tokens: the new tokens of each text, in order; empty for a text that has ended.
        ended: for each text, whether the text is complete.
        seconds: seconds since the prompts were sent to the devices, not counting compilation.
        scores: the score of each text that beam search found (see `beam_loop`); empty before the search ends, and for
            sampled texts.
    """

    tokens: list[list[int]]
    ended: list[bool]
    seconds: float
    scores: Sequence[float] = ()


@dataclass(frozen=True)
class Generated:
    """Generated texts, with the time that they took.

    Attributes:
        texts: the tokens of each text, without its prompt and without a stop token.
        first_token: seconds until every text had its first token. In beam search, seconds until all texts were
            complete.
        seconds: seconds until the last token.
        scores: the score of each text that beam search found (see `beam_loop`); empty for sampled texts.
    """

    texts: list[list[int]]
    first_token: float
    seconds: float
    scores: Sequence[float] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all texts, without the first token of each text; 0 if there are no further tokens."""
        later = sum(max(0, len(text) - 1) for text in self.texts)
        return later / (self.seconds - self.first_token) if later and self.seconds > self.first_token else 0.0


class Generator:
    """A generator that continues prompts, or writes a text per source of an encoder–decoder, on all devices of a mesh.

    Each source is encoded once, before prompts are read. Prompts are read in chunks of fixed length, except for the
    last token of each prompt, which the decode loop reads. The loop stays on the devices for a burst of steps. A prompt
    that several texts share is read once. Apart from rounding, a text depends only on its source, its prompt, its seed
    and the settings, and not on other texts, chunks, bursts or layouts.

    The devices hold the weights only once. They are sharded as the layout stores them, in the memory order that the
    compiler chose for the decode loop. The attribute `model` is replaced by a model with these weights. If the caller
    keeps the old model too, weights that were moved take memory twice.

    Args:
        model: a sharded model. Its experts drop no token (see `for_serving`).
        layout: a `gspmd.Layout`; by default the layout of the model. Its phase `prefill` is for reading sources and
            prompts. Its phase `decode` is for decoding, and has the specs of stored weights and cache. If the layout
            has alternatives, the number of rows in a batch decides which of them is used.
        prefill: another layout for reading prompts, with the same mesh axes as `layout`.
        chunk: the largest number of tokens of a prompt that are read in one step.
        burst: number of tokens of each text that are copied to the host together.
        int8: whether keys and values are stored as int8, with a float32 scale for each token and head.
        compiled: a function that is called when all programs have been compiled, before the first program runs. It may
            make several processes wait for one another.

    Raises:
        GenerationError: `burst` is less than 1, or the router looks at later tokens (expert choice).

    Example:
        >>> import gspmd_models as models
        >>> from gspmd.layouts import Layout
        >>> layout, mesh = Layout.load("weight-stationary-2d"), jax.make_mesh((1, 1, 1), ("x", "y", "z"))
        >>> with jax.set_mesh(mesh):
        ...     model = models.build(models.ModelConfig(layers=1), layout, mesh, jax.random.key(0))
        ...     generate = Generator(model)
        ...     texts = generate([[1, 2, 3], [4]], tokens=5, sampling=Sampling(temperature=0)).texts
        >>> [len(text) for text in texts]
        [5, 5]

        Two sources of an encoder–decoder, and the likeliest texts that four beams find:

        >>> config = models.ModelConfig(layers=1, encoder_layers=1)
        >>> with jax.set_mesh(mesh):
        ...     generate = Generator(models.build(config, layout, mesh, jax.random.key(0)))
        ...     texts = generate(None, tokens=5, sources=[[1, 2, 3], [4]], beams=4).texts
        ...     best = generate(None, tokens=5, sources=[[1, 2, 3], [4]], beams=4, n_best=3)
        >>> [len(text) for text in texts]
        [5, 5]
        >>> best.texts[::3] == texts, len(best.scores), best.scores[0] >= best.scores[1] >= best.scores[2]
        (True, 6, True)

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.2.3, for two layouts over one set of weights; Agrawal et al.
        2023, SARATHI (arXiv 2308.16369), for prefill in chunks.
    """

    def __init__(
        self,
        model: Transformer,
        layout: Layout | None = None,
        prefill: Layout | None = None,
        *,
        chunk: int = 128,
        burst: int = 8,
        int8: bool = False,
        compiled: Callable[[], None] = lambda: None,
    ):
        if burst < 1:
            raise GenerationError(f"burst is {burst}; it must be at least 1")
        for_serving(model.config)
        self.model, self.layout, self.prefill = model, model.layout if layout is None else layout, prefill
        self.chunk, self.burst, self.int8, self.compiled = chunk, burst, int8, compiled
        self._models: dict[Any, Transformer] = {}  # a model with shapes in place of weights
        self._compiled: dict[Any, Any] = {}
        self._formats: dict[Any, Formats] = {}  # formats of the weights, by their shardings

    def __call__(self, prompts: Sequence[Sequence[int]] | None, tokens: int, **options: Any) -> Generated:
        """Continue prompts, and return all texts when they are complete; see `stream` for arguments and errors."""
        bursts = list(self.stream(prompts, tokens, **options))
        texts = [[token for new in parts for token in new] for parts in zip(*(burst.tokens for burst in bursts))]
        # With beams, every burst but the last is empty.
        first = next((burst.seconds for burst in bursts if any(burst.tokens)), bursts[-1].seconds)
        return Generated(texts, first, bursts[-1].seconds, bursts[-1].scores)

    def stream(
        self,
        prompts: Sequence[Sequence[int]] | None,
        tokens: int,
        *,
        sources: Sequence[Sequence[int]] | None = None,
        samples: int = 1,
        sampling: Sampling = PLAIN,
        seed: int = 0,
        beams: int = 0,
        length_penalty: float = 1.0,
        n_best: int = 1,
        stop: Sequence[int] = (),
        cache_length: int | None = None,
        source_length: int | None = None,
        ended: Collection[int] = (),
    ) -> Iterator[Burst]:
        """Continue prompts, yielding burst by burst; call and iterate under `jax.set_mesh`.

        Args:
            prompts: the token ids of each prompt, with at least one token. For an encoder–decoder, these are the tokens
                with which each text begins after the configuration's `start_token`, such as the token of a language;
                None if texts begin with `start_token` alone.
            tokens: the largest number of tokens that a text adds to its prompt.
            sources: for an encoder–decoder, the token ids of each source, with at least one token. There is one source
                for each prompt.
            samples: number of texts for each prompt. Text number i, counting over all prompts, has the seed `seed + i`.
            sampling: the settings by which tokens are drawn.
            seed: seed of the first text; the seeds of all texts must be from 0 to 2³² - 1.
            beams: number of beams in a search for the likeliest text (see `beam_loop`); 0 for sampling.
            length_penalty: the search divides the score of a text by the text's length to the power of this number.
            n_best: number of texts for each prompt that the search returns, at most `beams`. The best text comes first.
            stop: tokens that end a text. They are not part of the text.
            cache_length: number of tokens of a text that the cache can hold. The default is the number needed, or
                slightly more.
            source_length: number of tokens of a source that the cache can hold. The default is the number needed, or
                slightly more.
            ended: indices of texts to end early, to which the caller may add between two bursts. Texts of beam search
                do not end early.

        Returns:
            An iterator of bursts. The first burst has the first token of every text. In beam search, all bursts before
            the last one are empty, and the last burst has `n_best` texts for each prompt, with their scores.

        Raises:
            GenerationError: there is nothing to continue; a prompt has a token outside the vocabulary; a text is longer
                than the cache, or longer than the model was made for; a seed has more than 32 bits; the model has an
                encoder but there are no sources; the model has no encoder but there are sources; settings contradict
                each other; or, while iterating, the logits of a text are NaN. In the last case, the burst with the
                tokens before the NaN is yielded first.
            LayoutError: the mesh axes do not divide the model's sizes, the rows, the chunk or the cache.
        """
        draws, stop = sampling != PLAIN or seed != 0, tuple(stop)
        check_beams(beams, length_penalty, samples, draws, self.model.config.vocabulary, len(set(stop)), n_best)
        rooms = {"cache_length": cache_length, "source_length": source_length}
        batch = self.batch(prompts, tokens, sources=sources, samples=samples, beams=beams, **rooms)
        check_seeds(seed, batch.texts)
        if beams:
            return self._searched(batch, tokens, beams, float(length_penalty), n_best, stop)
        return self._bursts(batch, tokens, sampling, seed, stop, ended)

    def batch(
        self,
        prompts: Sequence[Sequence[int]] | None,
        tokens: int,
        *,
        sources: Sequence[Sequence[int]] | None = None,
        samples: int = 1,
        beams: int = 0,
        cache_length: int | None = None,
        source_length: int | None = None,
    ) -> Batch:
        """Arrange prompts in rows and chunks; arguments and errors are the same as for `stream`."""
        config, mesh = self.model.config, jax.sharding.get_mesh()
        return make_batch(
            config, self.layout, self.prefill, mesh, prompts, tokens, sources=sources, samples=samples, beams=beams,
            chunk=self.chunk, cache_length=cache_length, source_length=source_length,
        )  # fmt: skip

    def _bursts(
        self, batch: Batch, tokens: int, sampling: Sampling, seed: int, stop: tuple[int, ...], ended: Collection[int]
    ) -> Iterator[Burst]:
        sizes, numbers = batch.sizes, np.arange(batch.sizes.rows)
        loop, reading = self._loop(sizes, sampling, stop), self._reading(batch)
        self.compiled()
        weights = self._stored(sizes.decode)
        seeds = _put(np.where(numbers < batch.texts, seed + numbers, 0), np.uint32)
        empty = jax.block_until_ready(reading["empty"]())
        began = time.perf_counter()
        cache, last = self._read(batch, tokens, reading, weights, empty)
        rows = WrittenTexts(cache, last, _put(np.where(numbers < batch.texts, tokens, 0)))

        def launch(limit: int) -> jax.Array:
            nonlocal rows
            alive = [number not in ended for number in numbers]
            rows, written = loop(weights, rows, seeds, _put(alive, np.bool_), _put(limit))
            return written

        # The next burst is launched before the tokens of this one are fetched, so that the devices never wait.
        limits = [1, *[self.burst] * -(-(tokens - 1) // self.burst)]
        coming, counts = launch(limits[0]), np.zeros(batch.texts, np.int32)
        for steps, following in zip(limits, (*limits[1:], 0)):
            written, coming = coming, launch(following) if following else coming
            found = np.asarray(written)[: batch.texts, :steps]
            real, undefined = found >= 0, (found == UNDEFINED).any(axis=1)
            counts += real.sum(axis=1)
            over = ((found == NOTHING).any(axis=1) & ~undefined | (counts == tokens)).tolist()
            if real.any() or not undefined.any():
                yield Burst([row[row >= 0].tolist() for row in found], over, time.perf_counter() - began)
            if undefined.any():
                text = int(undefined.argmax())
                raise GenerationError(_undefined(text, int(counts[text]), not_finite(weights), self.model.dtype))
            if all(over):
                return

    def _searched(
        self, batch: Batch, tokens: int, beams: int, length_penalty: float, n_best: int, stop: tuple[int, ...]
    ) -> Iterator[Burst]:
        sizes, groups = batch.sizes, batch.sizes.rows // beams
        loop, reading = self._beams(sizes, beams, length_penalty, stop, coarse(tokens)), self._reading(batch)
        self.compiled()
        weights = self._stored(sizes.decode)
        empty = jax.block_until_ready(reading["empty"]())
        began = time.perf_counter()
        cache, last = self._read(batch, tokens, reading, weights, empty)
        search = begin(cache, last, groups, batch.texts, beams, coarse(tokens))
        search = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else _put(x, x.dtype), search)
        count = batch.texts * n_best
        nothing: list[list[int]] = [[] for _ in range(count)]
        for limit in range(self.burst, tokens + self.burst, self.burst):
            search = loop(weights, search, _put(limit), _put(tokens))
            if not np.asarray(search.going).any():
                break
            yield Burst(nothing, [False] * count, time.perf_counter() - began)
        if (undefined := np.asarray(search.undefined)).any():
            text = int(undefined.argmax())
            raise GenerationError(_undefined(text, None, not_finite(weights), self.model.dtype))
        ends = search.end_texts, search.end_lengths, search.end_scores
        best, lengths, scores = (np.asarray(x)[: batch.texts, :n_best].reshape(count, *x.shape[2:]) for x in ends)
        found = [row[:length].tolist() for row, length in zip(best, lengths)]
        yield Burst(found, [True] * count, time.perf_counter() - began, scores.tolist())

    def _read(
        self, batch: Batch, tokens: int, reading: dict[str, Any], weights: dict[str, jax.Array], cache: Cache
    ) -> tuple[Cache, jax.Array]:
        """Read sources and prompts into an empty cache; return the cache, and each row's last prompt token."""
        steps, by_length = self.programs(batch.sizes), cache.totals is not None
        if by_length:
            cache = replace(cache, totals=_put(batch.totals(tokens, batch.shares.prompts)))
        if batch.sources:
            read, counts = batch.source_tokens()
            placed = jax.device_put(read, steps["encode"][1][1].sharding)
            cache = replace(cache, source=reading["encode"](weights, placed, _put(counts)))
        for ids, counts in batch.chunks():
            placed = jax.device_put(ids, steps["prefill"][1][1].sharding)
            cache = reading["prefill"](weights, placed, _put(counts), cache)
        last, before = batch.last()
        if batch.shares.sources is not None:
            chosen = jax.device_put(batch.shares.sources, _sources(batch.sizes).sharding)
            of_sources = _put(batch.source_lengths()) if batch.sources else None
            totals = _put(batch.totals(tokens, batch.owners)) if by_length else None
            cache = reading["share"](cache, chosen, _put(before), of_sources, totals)
        return cache, _put(last)

    # -- programs, compiled once for each set of sizes ----------------------------------------------------------------

    def programs(self, sizes: Sizes, *, fresh: bool = False) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
        """Return the steps `prefill` and `decode` (see `prefill_step`, `decode_step`), each with abstract arguments.

        With an encoder, `encode` (see `encode_step`) comes first.
        """
        mesh, reader, writer = jax.sharding.get_mesh(), self._served(sizes.prefill), self._served(sizes.decode)
        small, large = (self.abstract_cache(sizes, rows) for rows in (sizes.prefill_rows, sizes.rows))
        tokens = abstract_tokens(sizes.prefill, mesh, sizes.prefill_rows, sizes.chunk)
        each, one = (abstract_whole(mesh, (rows,), jnp.int32) for rows in (sizes.prefill_rows, sizes.rows))
        encode: dict[str, tuple[Callable, tuple[Any, ...]]] = {}
        if sizes.source:
            where = NamedSharding(mesh, batch_spec(sizes.prefill).partition_spec())
            ids: Any = jax.ShapeDtypeStruct((sizes.prefill_rows, sizes.source), jnp.int32, sharding=where)
            encode = {"encode": (encode_step(reader, int8=self.int8), (arrays(reader), ids, each))}
        return encode | {
            "prefill": (prefill_step(reader, fresh=fresh), (arrays(reader), tokens, each, small)),
            "decode": (decode_step(writer), (arrays(writer), one, large)),
        }

    def _loop(self, sizes: Sizes, sampling: Sampling, stop: tuple[int, ...]) -> Any:
        """Return the compiled program that decodes a burst."""
        weights, each, large = self.programs(sizes)["decode"][1]
        rows, mesh = WrittenTexts(large, each, each), jax.sharding.get_mesh()
        inputs = ((sizes.rows,), jnp.uint32), ((sizes.rows,), jnp.bool_), ((), jnp.int32)
        others = [abstract_whole(mesh, *shape) for shape in inputs]
        function = decode_loop(self._served(sizes.decode), sampling, stop, self.burst)
        name, out = ("loop", sizes, sampling, stop, self.burst), (_places(rows), each.sharding)
        return self._decoding(name, function, (weights, rows, *others), out)

    def _beams(self, sizes: Sizes, beams: int, length_penalty: float, stop: tuple[int, ...], room: int) -> Any:
        """Return the compiled program that continues a beam search."""
        weights, each, large = self.programs(sizes)["decode"][1]
        mesh = jax.sharding.get_mesh()
        search = begin(large, each, sizes.rows // beams, 0, beams, room)
        whole = lambda x: x if hasattr(x, "sharding") else abstract_whole(mesh, x.shape, x.dtype)  # noqa: E731
        like: BeamSearch = jax.tree.map(whole, search)
        count = abstract_whole(mesh, (), jnp.int32)
        function = beam_loop(self._served(sizes.decode), beams, length_penalty, stop)
        name = ("beams", sizes, beams, length_penalty, stop, room)
        return self._decoding(name, function, (weights, like, count, count), _places(like))

    def _decoding(self, name: Any, function: Callable, given: Sequence[Any], out: Any) -> Any:
        """Return a compiled loop of decode steps.

        The first loop that is compiled for weights with these shardings chooses the memory order of the weights, for
        all programs.
        """
        weights = given[0]
        formats = self._formats.get(_placements(weights)) or any_order(weights)
        loop = self._program(name, function, given, 1, out, formats)
        self._formats.setdefault(_placements(weights), loop.input_formats[0][0])
        return loop

    def _reading(self, batch: Batch) -> dict[str, Any]:
        """Return the programs that run before the decode loop, by name.

        `empty` makes an empty cache. `encode`, `prefill` and `share` are present if they are needed.
        """
        sizes, chunks = batch.sizes, len(batch.chunks())
        fresh = chunks == 1  # nothing is cached before the only chunk
        steps = self.programs(sizes, fresh=fresh)
        (read, given), (_, (weights, each, large)) = steps["prefill"], steps["decode"]
        small, formats = given[-1], self._formats[_placements(weights)]
        alone = replace(small, source=None)
        found = {"empty": self._program(("empty", sizes), lambda: zeros(alone), (), (), _places(alone))}
        if batch.sources:
            function, inputs = steps["encode"]
            found["encode"] = self._program(("encode", sizes), function, inputs, (), _places(small.source), formats)
        if chunks:
            name, out = ("prefill", sizes, fresh), _places(small)
            found["prefill"] = self._program(name, lambda *given: read(*given)[1], given, 3, out, formats)
        if batch.shares.sources is not None:
            of_sources, totals = each if batch.sources else None, large.totals
            inputs = (small, _sources(sizes), each, of_sources, totals)
            copied = partial(copy_rows, layout=sizes.decode)
            found["share"] = self._program(("share", sizes), copied, inputs, (), _places(large))
        return found

    def _stored(self, layout: Layout) -> dict[str, jax.Array]:
        """Return the weights in the sharding and format that a layout's programs need.

        Weights with another sharding or format are converted, and `model` then has the converted weights.
        """
        model, weights = self._served(layout), arrays(self.model)
        formats = self._formats[_placements(arrays(model))]
        if any(format_of(x) != formats[path] for path, x in weights.items()):
            # Without references to the weights, each old copy can be freed; modules of Flax have reference cycles.
            self.model = model
            gc.collect()
            try:
                put(weights, formats)
            finally:
                self.model = with_arrays(model, weights)
        return weights

    def _served(self, layout: Layout) -> Transformer:
        """Return the model under another layout, with shapes instead of weights."""
        key = layout, jax.sharding.get_mesh()
        if key not in self._models:
            self._models[key] = served(with_arrays(self.model, shapes(arrays(self.model))), layout)
        return self._models[key]

    def _program(
        self,
        name: Any,
        function: Callable,
        given: Sequence[Any],
        donated: int | tuple,
        out: Any,
        weights: Formats | None = None,
    ) -> Any:
        """Return a compiled function; if its first argument is the model's weights, `weights` has their formats.

        The function is compiled only once for each `name`, mesh and lowering.
        """
        key = name, jax.sharding.get_mesh(), current_lowering()
        if key not in self._compiled:
            placed: dict[str, Any] = {}
            if weights is not None:
                placed["in_shardings"] = (weights, *map(_places, given[1:]))
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=out, **placed)
            self._compiled[key] = answering(jitted.lower(*given).compile)
        return self._compiled[key]

    def abstract_cache(self, sizes: Sizes, rows: int) -> Cache:
        """Return an abstract cache with this number of rows and the given sizes."""
        mesh, model = jax.sharding.get_mesh(), self.model
        return abstract_cache(
            model.config, sizes.decode, mesh, rows, sizes.room, model.dtype, int8=self.int8, source_length=sizes.source
        )


def _placements(weights: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(x.sharding for x in weights.values())


def _undefined(text: int, count: int | None, weights: Sequence[str], dtype: Any) -> str:
    """Return the message about a text whose logits are NaN, with the paths of the weights that cause it.

    Args:
        text: the number of the text.
        count: number of tokens of the text before the NaN; None for beam search, in which the texts are lost.
        weights: the paths of the weights that are not finite, which cause the NaN.
        dtype: the compute dtype.
    """
    shown = f"{', '.join(weights[:8])}{f' and {len(weights) - 8} more' if len(weights) > 8 else ''}"
    cause = (
        f"{shown} {'have' if len(weights) > 1 else 'has'} NaN or infinity: use a model whose weights are finite."
        if weights
        else f"Its weights are finite, so the NaN comes from computing in {jnp.dtype(dtype)}: check the model."
    )
    doing = (
        f"search text {text + 1} with beams" if count is None else f"continue text {text + 1} after {count} new tokens"
    )
    return f"cannot {doing}: the model's logits are NaN.\n  {cause}"


def _put(values: Any, dtype: Any = np.int32) -> jax.Array:
    """Replicate an array over all devices."""
    return jax.device_put(np.asarray(values, dtype), NamedSharding(jax.sharding.get_mesh(), jax.P()))


def _places(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _sources(sizes: Sizes) -> jax.ShapeDtypeStruct:
    where = NamedSharding(jax.sharding.get_mesh(), jax.P(cache_spec(sizes.decode).axes_of("B") or None))
    return jax.ShapeDtypeStruct((sizes.rows,), jnp.int32, sharding=where)
