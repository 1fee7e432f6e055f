"""Text generation: prompts in, tokens out, in bursts."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd.lowerings.default import current as current_lowering

from ..shapes import abstract_tokens
from ..transformer import Transformer, arrays
from .batch import Batch, Sizes, make_batch
from .cache import Cache, abstract_cache, abstract_whole, cache_spec, empty_cache
from .loop import NOTHING, PLAIN, Rows, Sampling, decode_loop
from .prefix import copy_rows
from .serving import for_serving, phases, served
from .steps import prefill_step


@dataclass(frozen=True)
class Burst:
    """New tokens of every text.

    Attributes:
        tokens: of each text, in their order; none for one that has ended.
        seconds: since the prompts were given to the devices, compilation not counted.
    """

    tokens: list[list[int]]
    seconds: float


@dataclass(frozen=True)
class Generated:
    """Texts, and how long they took.

    Attributes:
        texts: the tokens of each, without its prompt and without a stop token.
        first_token: seconds until every text had its first token.
        seconds: seconds until the last one was there.
    """

    texts: list[list[int]]
    first_token: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all texts per second, those after the first ones; 0 where there are no others."""
        later = sum(max(0, len(text) - 1) for text in self.texts)
        return later / (self.seconds - self.first_token) if later else 0.0


class Generator:
    """Continues prompts, on all devices of a mesh.

    Prompts are read in chunks of fixed length, each text's last token by the decode loop, which stays on the devices
    for a burst of steps. A prompt that several texts begin with is read once. What a text is depends on its prompt,
    its seed and the settings alone: neither on the other texts, nor on chunks, bursts or layouts, but for rounding.

    Args:
        model: a placed model. Its layout's phases `prefill` and `decode` are used; experts drop no token
            (see `for_serving`).
        prefill: another `gspmd.Layout` for reading prompts, of the same mesh axes. Weights and cache stay where the
            model's own has them.
        chunk: the most tokens of a prompt that are read in one step.
        burst: tokens of a text that come to the host together.
        int8: whether keys and values are kept as int8, with a float32 scale for each token and head.

    Raises:
        ValueError: a chunk or burst under 1, or a router that reads later tokens.
        LayoutError: the layouts are of different mesh axes.

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

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.2.3, for two layouts over one set of weights; Agrawal et al.
        2023, SARATHI (arXiv 2308.16369), for prefill in chunks.
    """

    def __init__(
        self, model: Transformer, prefill: Any = None, *, chunk: int = 128, burst: int = 16, int8: bool = False
    ):
        for name, value in (("chunk", chunk), ("burst", burst)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for_serving(model.config)
        reading, writing = phases(model.layout, prefill)
        self.model, self.reader = served(model, writing), served(model, reading)
        self.chunk, self.burst, self.int8 = chunk, burst, int8
        self._compiled: dict[Any, Any] = {}

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int, **options: Any) -> Generated:
        """Continue prompts, and return all texts at once; arguments and errors as of `stream`."""
        bursts = list(self.stream(prompts, tokens, **options))
        texts = [[token for new in parts for token in new] for parts in zip(*(burst.tokens for burst in bursts))]
        return Generated(texts, bursts[0].seconds, bursts[-1].seconds)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        samples: int = 1,
        sampling: Sampling = PLAIN,
        seed: int = 0,
        stop: Sequence[int] = (),
        cache_length: int | None = None,
        ended: Collection[int] = (),
    ) -> Iterator[Burst]:
        """Continue prompts, burst by burst; call and iterate under `jax.set_mesh`.

        Args:
            prompts: token ids of each, at least one.
            tokens: the most that a text adds to its prompt.
            samples: texts of each prompt. Text number i, counted over all prompts, has the seed `seed + i`.
            sampling: how tokens are drawn.
            seed: of the first text, from 0 to 2³² - 1.
            stop: tokens that end a text; they are not part of it.
            cache_length: tokens that the cache has room for in a row; as many as are needed when None.
            ended: numbers of texts that shall end; the caller may add to it between two bursts.

        Returns:
            An iterator; the first burst is the first token of every text.

        Raises:
            ValueError: nothing to continue, a token that the model does not have, or a text longer than the cache.
            LayoutError: the mesh does not divide the model's sizes, the rows, the chunk or the cache.
        """
        batch = self.batch(prompts, tokens, samples=samples, cache_length=cache_length)
        return self._bursts(batch, tokens, sampling, seed, tuple(stop), ended)

    def batch(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, samples: int = 1, cache_length: int | None = None
    ) -> Batch:
        """Return how prompts would be laid out in rows and chunks; arguments and errors as of `stream`."""
        mesh, options = jax.sharding.get_mesh(), {"samples": samples, "cache_length": cache_length}
        return make_batch(self.model, self.reader, mesh, prompts, tokens, chunk=self.chunk, **options)

    def _bursts(
        self, batch: Batch, tokens: int, sampling: Sampling, seed: int, stop: tuple[int, ...], ended: Collection[int]
    ) -> Iterator[Burst]:
        sizes, weights, whole = batch.sizes, arrays(self.model), NamedSharding(jax.sharding.get_mesh(), jax.P())
        put = lambda values, dtype=np.int32: jax.device_put(np.asarray(values, dtype), whole)  # noqa: E731
        prefill, share, loop = self._programs(batch, sampling, stop)
        numbers = np.arange(sizes.rows)
        seeds = put((seed + numbers) % 2**32, np.uint32)
        began = time.perf_counter()
        cache = self._empty(sizes.prefill_rows, sizes.room)
        for ids, counts in batch.chunks():
            cache = prefill(weights, jax.device_put(ids, self._tokens(sizes).sharding), put(counts), cache)
        last, before = batch.last()
        if share is not None:
            cache = share(cache, jax.device_put(batch.shares.sources, self._sources(sizes).sharding), put(before))
        rows = Rows(cache, put(last), put(np.where(numbers < batch.texts, tokens, 0)))

        def launch(limit: int) -> jax.Array:
            nonlocal rows
            alive = [number not in ended for number in numbers]
            rows, written = loop(weights, rows, seeds, put(alive, np.bool_), put(limit))
            return written[:, :limit]

        # The next burst is on its way to the devices before this one's tokens are looked at.
        limits = [1, *[self.burst] * -(-(tokens - 1) // self.burst)]
        coming = launch(limits[0])
        for limit in (*limits[1:], 0):
            written, coming = coming, launch(limit) if limit else coming
            found = np.asarray(written)[: batch.texts]
            yield Burst([row[row != NOTHING].tolist() for row in found], time.perf_counter() - began)
            if (found == NOTHING).any(axis=1).all():
                return

    # -- programs, compiled once for their sizes ----------------------------------------------------------------------

    def _programs(self, batch: Batch, sampling: Sampling, stop: tuple[int, ...]) -> tuple[Any, Any, Any]:
        sizes, mesh, weights = batch.sizes, jax.sharding.get_mesh(), arrays(self.model)
        small, large = (self._cache(count, sizes.room) for count in (sizes.prefill_rows, sizes.rows))
        whole = lambda shape, dtype=jnp.int32: abstract_whole(mesh, shape, dtype)  # noqa: E731
        chunk, count = (weights, self._tokens(sizes), whole((sizes.prefill_rows,)), small), (sizes.rows,)
        read = prefill_step(self.reader)
        prefill = self._program(("prefill", sizes), lambda *given: read(*given)[1], chunk, 3)
        share = None
        if batch.shares.sources is not None:
            copied = partial(copy_rows, layout=self.model.layout)
            share = self._program(("share", sizes), copied, (small, self._sources(sizes), whole(count)))
        rows = weights, Rows(large, whole(count), whole(count)), whole(count, jnp.uint32), whole(count, jnp.bool_)
        body = decode_loop(self.model, sampling, stop, self.burst)
        loop = self._program(("loop", sizes, sampling, stop), body, (*rows, whole(())), 1)
        return prefill, share, loop

    def _program(self, name: Any, function: Any, abstract: tuple[Any, ...], donated: int | tuple = ()) -> Any:
        key = name, jax.sharding.get_mesh(), current_lowering()
        if key not in self._compiled:
            self._compiled[key] = jax.jit(function, donate_argnums=donated).lower(*abstract).compile()
        return self._compiled[key]

    def _cache(self, rows: int, room: int) -> Cache:
        mesh, config = jax.sharding.get_mesh(), self.model.config
        return abstract_cache(config, self.model.layout, mesh, rows, room, self.model.dtype, int8=self.int8)

    def _empty(self, rows: int, room: int) -> Cache:
        mesh, config = jax.sharding.get_mesh(), self.model.config
        return empty_cache(config, self.model.layout, mesh, rows, room, self.model.dtype, int8=self.int8)

    def _tokens(self, sizes: Sizes) -> jax.ShapeDtypeStruct:
        return abstract_tokens(self.reader.layout, jax.sharding.get_mesh(), sizes.prefill_rows, sizes.chunk)

    def _sources(self, sizes: Sizes) -> jax.ShapeDtypeStruct:
        where = NamedSharding(jax.sharding.get_mesh(), jax.P(cache_spec(self.model.layout).axes_of("B") or None))
        return jax.ShapeDtypeStruct((sizes.rows,), jnp.int32, sharding=where)
