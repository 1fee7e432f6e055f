"""Text generation: prompts in, tokens out, in bursts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd.layouts import Layout
from gspmd.lowerings.in_force import current as current_lowering

from ..shapes import abstract_tokens
from ..transformer import Transformer, arrays, with_arrays
from .batch import Batch, Sizes, make_batch
from .cache import Cache, abstract_cache, abstract_whole, cache_spec, zeros
from .loop import NOTHING, PLAIN, UNDEFINED, Sampling, WrittenTexts, decode_loop
from .memory import Formats, any_order, format_of, not_finite, put, shapes
from .prefix import copy_rows
from .serving import GenerationError, check_seeds, for_serving, served
from .steps import decode_step, prefill_step


@dataclass(frozen=True)
class Burst:
    """New tokens of every text.

    Attributes:
        tokens: of each text, in their order; none for one that has ended.
        ended: whether each text is complete.
        seconds: since the prompts were given to the devices, compilation not counted.
    """

    tokens: list[list[int]]
    ended: list[bool]
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

    The devices hold the weights once: where the layout stores them, in the order of dimensions that the compiler chose
    for the decode loop. `model` is that model; one that the caller keeps as well may hold what was moved once more.

    Args:
        model: a placed model; experts drop no token (see `for_serving`).
        layout: a `gspmd.Layout`, the model's own when None: its phase `prefill` for reading prompts and its phase
            `decode` for decoding, which says where weights and cache lie. The rows of a batch choose its alternatives.
        prefill: another one for reading prompts, of the same mesh axes.
        chunk: the most tokens of a prompt that are read in one step.
        burst: tokens of a text that come to the host together.
        int8: whether keys and values are kept as int8, with a float32 scale for each token and head.
        compiled: called once the programs are compiled, before the first of them runs: processes wait there for one
            another.

    Raises:
        GenerationError: a burst under 1, or a router that reads later tokens.

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
        self._models: dict[Any, Transformer] = {}  # of shapes
        self._compiled: dict[Any, Any] = {}
        self._formats: dict[Any, Formats] = {}  # in which each placement of the weights is stored

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
            seed: of the first text; those of all texts are from 0 to 2³² - 1.
            stop: tokens that end a text; they are not part of it.
            cache_length: tokens that the cache has room for in a row; when None as many as are needed, or a few more.
            ended: numbers of texts that shall end; the caller may add to it between two bursts.

        Returns:
            An iterator; the first burst is the first token of every text.

        Raises:
            GenerationError: nothing to continue, a token that the model does not have, a text longer than the cache or
                than the model was made for, or one whose seed has more than 32 bits; while iterating, a text whose
                logits are NaN, after the burst with all tokens before it.
            LayoutError: the mesh does not divide the model's sizes, the rows, the chunk or the cache.
        """
        batch = self.batch(prompts, tokens, samples=samples, cache_length=cache_length)
        check_seeds(seed, batch.texts)
        return self._bursts(batch, tokens, sampling, seed, tuple(stop), ended)

    def batch(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, samples: int = 1, cache_length: int | None = None
    ) -> Batch:
        """Return how prompts are laid out in rows and chunks; arguments and errors as of `stream`."""
        config, mesh = self.model.config, jax.sharding.get_mesh()
        return make_batch(
            config, self.layout, self.prefill, mesh, prompts, tokens,
            samples=samples, chunk=self.chunk, cache_length=cache_length,
        )  # fmt: skip

    def _bursts(
        self, batch: Batch, tokens: int, sampling: Sampling, seed: int, stop: tuple[int, ...], ended: Collection[int]
    ) -> Iterator[Burst]:
        sizes, whole = batch.sizes, NamedSharding(jax.sharding.get_mesh(), jax.P())
        put = lambda values, dtype=np.int32: jax.device_put(np.asarray(values, dtype), whole)  # noqa: E731
        empty, prefill, share, loop = self._programs(batch, sampling, stop)
        self.compiled()
        weights, (_, ids_like, *_) = self._stored(sizes.decode), self.programs(sizes)["prefill"][1]
        numbers = np.arange(sizes.rows)
        seeds = put(np.where(numbers < batch.texts, seed + numbers, 0), np.uint32)
        cache = jax.block_until_ready(empty())
        began = time.perf_counter()
        for ids, counts in batch.chunks():
            cache = prefill(weights, jax.device_put(ids, ids_like.sharding), put(counts), cache)
        last, before = batch.last()
        if share is not None:
            cache = share(cache, jax.device_put(batch.shares.sources, _sources(sizes).sharding), put(before))
        rows = WrittenTexts(cache, put(last), put(np.where(numbers < batch.texts, tokens, 0)))

        def launch(limit: int) -> jax.Array:
            nonlocal rows
            alive = [number not in ended for number in numbers]
            rows, written = loop(weights, rows, seeds, put(alive, np.bool_), put(limit))
            return written

        # The next burst is on its way to the devices before this one's tokens are looked at.
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

    # -- programs, compiled once for their sizes ----------------------------------------------------------------------

    def programs(self, sizes: Sizes, *, fresh: bool = False) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
        """Return the steps `prefill` and `decode`, as of `prefill_step` and `decode_step`, with abstract arguments."""
        mesh, reader, writer = jax.sharding.get_mesh(), self._served(sizes.prefill), self._served(sizes.decode)
        small, large = (self.abstract_cache(sizes, rows) for rows in (sizes.prefill_rows, sizes.rows))
        tokens = abstract_tokens(sizes.prefill, mesh, sizes.prefill_rows, sizes.chunk)
        each, one = (abstract_whole(mesh, (rows,), jnp.int32) for rows in (sizes.prefill_rows, sizes.rows))
        return {
            "prefill": (prefill_step(reader, fresh=fresh), (arrays(reader), tokens, each, small)),
            "decode": (decode_step(writer), (arrays(writer), one, large)),
        }

    def _programs(self, batch: Batch, sampling: Sampling, stop: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the programs that make an empty cache, read a chunk, copy shared prompts (or None), and decode."""
        sizes, mesh = batch.sizes, jax.sharding.get_mesh()
        fresh = len(batch.chunks()) == 1  # then prompts attend to nothing before them
        steps = self.programs(sizes, fresh=fresh)
        (read, given), (_, (weights, each, large)) = steps["prefill"], steps["decode"]
        small, rows = given[-1], WrittenTexts(large, each, each)
        inputs = ((sizes.rows,), jnp.uint32), ((sizes.rows,), jnp.bool_), ((), jnp.int32)
        others = [abstract_whole(mesh, *shape) for shape in inputs]
        # The first loop over weights that lie so may have them in any order of memory; its choice is all programs'.
        formats = self._formats.get(_placements(weights)) or any_order(weights)
        name, out = ("loop", sizes, sampling, stop, self.burst), (_places(rows), each.sharding)
        function = decode_loop(self._served(sizes.decode), sampling, stop, self.burst)
        loop = self._program(name, function, (weights, rows, *others), 1, out, formats)
        formats = self._formats.setdefault(_placements(weights), loop.input_formats[0][0])
        empty = self._program(("empty", sizes), lambda: zeros(small), (), (), _places(small))
        name, out = ("prefill", sizes, fresh), _places(small)
        prefill = self._program(name, lambda *given: read(*given)[1], given, 3, out, formats)
        share = None
        if batch.shares.sources is not None:
            copied, given = partial(copy_rows, layout=sizes.decode), (small, _sources(sizes), each)
            share = self._program(("share", sizes), copied, given, (), _places(large))
        return empty, prefill, share, loop

    def _stored(self, layout: Layout) -> dict[str, jax.Array]:
        """The weights as the programs of a layout take them; those that are not so are moved, and `model` with them."""
        model, weights = self._served(layout), arrays(self.model)
        formats = self._formats[_placements(arrays(model))]
        if any(format_of(x) != formats[path] for path, x in weights.items()):
            self.model = model  # which lets go of the weights, so that each can leave its old place
            gc.collect()  # modules of Flax refer to themselves
            try:
                put(weights, formats)
            finally:
                self.model = with_arrays(model, weights)
        return weights

    def _served(self, layout: Layout) -> Transformer:
        """The model in a layout, with shapes in place of weights."""
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
        """Compile a function once; `weights` are the formats of its first argument."""
        key = name, jax.sharding.get_mesh(), current_lowering()
        if key not in self._compiled:
            placed: dict[str, Any] = {}
            if weights is not None:
                placed["in_shardings"] = (weights, *map(_places, given[1:]))
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=out, **placed)
            self._compiled[key] = jitted.lower(*given).compile()
        return self._compiled[key]

    def abstract_cache(self, sizes: Sizes, rows: int) -> Cache:
        """Return the shapes of a cache of so many rows."""
        mesh, model = jax.sharding.get_mesh(), self.model
        return abstract_cache(model.config, sizes.decode, mesh, rows, sizes.room, model.dtype, int8=self.int8)


def _placements(weights: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(x.sharding for x in weights.values())


def _undefined(text: int, count: int, weights: Sequence[str], dtype: Any) -> str:
    """Say that the logits of a text give no token, and which weights that comes from."""
    shown = f"{', '.join(weights[:8])}{f' and {len(weights) - 8} more' if len(weights) > 8 else ''}"
    cause = (
        f"{shown} {'have' if len(weights) > 1 else 'has'} NaN or infinity: take a model whose weights are finite."
        if weights
        else f"Its weights are finite, so what is computed from them in {jnp.dtype(dtype)} is not: check the model."
    )
    return f"cannot continue text {text + 1} after {count} new tokens: the model's logits are no numbers.\n  {cause}"


def _places(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _sources(sizes: Sizes) -> jax.ShapeDtypeStruct:
    where = NamedSharding(jax.sharding.get_mesh(), jax.P(cache_spec(sizes.decode).axes_of("B") or None))
    return jax.ShapeDtypeStruct((sizes.rows,), jnp.int32, sharding=where)
