"""A batch of texts that are generated together: texts in rows, prompts in chunks, sources, and the layouts for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gspmd.annotate import LayoutError
from gspmd.display.tables import counted
from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import ENCODER

from ..config import ModelConfig
from ..rotary import LONGEST
from .cache import cache_spec
from .prefix import Shares, most_prompts, shares
from .serving import (
    GenerationError,
    check_length,
    check_lengths,
    check_rows,
    check_source,
    for_serving,
    least_length,
    least_rows,
    least_source,
    phases,
)

MOST_TEXTS = 2**16
"""The maximum number of texts in a batch. It is more than caches can hold, but few enough to be counted on the host."""


@dataclass(frozen=True)
class Sizes:
    """The sizes for which programs are compiled.

    Attributes:
        rows: R, the number of rows of the decode loop.
        prefill_rows: P, the number of rows of a prefill.
        chunk: number of tokens of a row that a prefill step reads.
        room: T, the number of tokens of a text that the cache can hold.
        prefill, decode: the layouts of the two phases, from `phases`, with alternatives resolved.
        source: number of tokens of a source that the encoder reads and the cache can hold; 0 for a decoder-only model.
    """

    rows: int
    prefill_rows: int
    chunk: int
    room: int
    prefill: Any
    decode: Any
    source: int = 0


@dataclass(frozen=True)
class Batch:
    """Prompts, and the rows in which they are read and continued.

    Attributes:
        prompts: the token ids of each prompt. In an encoder–decoder these are the decoder's prompts, which begin with
            the start token.
        texts: number of texts. The samples of a prompt are next to each other.
        sizes: the sizes of the programs.
        owners: for each row of the decode loop, the index of the prompt that the row's text continues; None for a row
            without a text.
        shares: the prompt that each row of the prefill reads, and the prefill row that each row of the decode loop
            copies.
        sources: the token ids of each prompt's source; empty for a decoder-only model.
    """

    prompts: tuple[np.ndarray, ...]
    texts: int
    sizes: Sizes
    owners: tuple[int | None, ...]
    shares: Shares
    sources: tuple[np.ndarray, ...] = ()

    def last(self) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's last prompt token and its position, both [R]; the decode loop begins with this token."""
        of_rows = [np.zeros(1, np.int32) if owner is None else self.prompts[owner] for owner in self.owners]
        return np.array([ids[-1] for ids in of_rows], np.int32), np.array([len(ids) - 1 for ids in of_rows], np.int32)

    def totals(self, tokens: int, prompts: Sequence[int | None]) -> np.ndarray:
        """Return the number of tokens that the model reads of each text that adds `tokens` tokens to its prompt.

        `prompts` has the index of each text's prompt. Where it is None, the number is 0.
        """
        return np.array([0 if at is None else len(self.prompts[at]) + tokens - 1 for at in prompts], np.int32)

    def chunks(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return tokens [P, chunk] and counts [P] for every prefill step; the last token of a prompt is left out."""
        size = self.sizes.chunk
        read = [() if number is None else self.prompts[number][:-1] for number in self.shares.prompts]
        steps = []
        for start in range(0, max(map(len, read)), size):
            parts = [ids[start : start + size] for ids in read]
            tokens = np.zeros((len(parts), size), np.int32)
            for row, part in zip(tokens, parts):
                row[: len(part)] = part
            steps.append((tokens, np.array([len(part) for part in parts], np.int32)))
        return steps

    def source_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources' tokens [P, T] in the rows of the prefill, and each row's number of real tokens, [P]."""
        read = [np.zeros(0, np.int32) if at is None else self.sources[at] for at in self.shares.prompts]
        tokens = np.zeros((len(read), self.sizes.source), np.int32)
        for row, ids in zip(tokens, read):
            row[: len(ids)] = ids
        return tokens, np.array([len(ids) for ids in read], np.int32)

    def source_lengths(self) -> np.ndarray:
        """Return the number of tokens of each row's source, [R]."""
        return np.array([0 if owner is None else len(self.sources[owner]) for owner in self.owners], np.int32)


def make_batch(
    config: ModelConfig,
    layout: Layout,
    prefill: Any,
    mesh: jax.sharding.Mesh,
    prompts: Sequence[Sequence[int]] | None,
    tokens: int,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    samples: int = 1,
    beams: int = 0,
    chunk: int = 128,
    cache_length: int | None = None,
    source_length: int | None = None,
) -> Batch:
    """Arrange prompts and texts in rows and chunks, with the smallest number of rows that the mesh divides.

    Args:
        config: the configuration of the model.
        layout: the layout for decoding (see `phases`). The number of rows decides between its alternatives.
        prefill: the layout for reading prompts (see `phases`); None for the same layout as for decoding.
        mesh: a mesh with the mesh axes of both layouts.
        prompts: the token ids of each prompt, with at least one token. If the model has an encoder, the prompt follows
            the start token of each text and may be empty; None if all prompts are empty.
        tokens: the largest number of tokens that a text adds to its prompt.
        sources: the token ids that the encoder reads for each prompt, with at least one token; None for a decoder-only
            model.
        samples: number of texts for each prompt.
        beams: number of beams for each prompt. All beams of a prompt are on one device. 0 for no beam search.
        chunk: the largest number of tokens of a row that are read in one step.
        cache_length: number of tokens of a text that the cache can hold. The default is the number needed, rounded up
            so that few programs serve all lengths.
        source_length: number of tokens of a source that the cache can hold; the default is chosen in the same way.

    Raises:
        GenerationError: there is no prompt; a prompt or a source is empty; a token is not in the vocabulary; or a text
            or a source is longer than the cache, or longer than the model was made for.
        LayoutError: the mesh axes do not divide the model's sizes, the chunk or the cache; or the caches of texts and
            of their sources are on different devices.
    """
    config = for_serving(config)
    given, read = read_sources(config, prompts, sources, source_length)
    held = checked(config, given, tokens, samples=samples, chunk=chunk, cache_length=cache_length)
    needed, texts = max(map(len, held)) + tokens - 1, samples * len(held)  # the last token of a text is never read
    each_row = beams or samples
    rows, reading, decode = _fewest_rows(config, layout, prefill, mesh, each_row * len(held), cache_length, beams)
    owners = tuple(row // each_row if row < each_row * len(held) else None for row in range(rows))
    shards, found = _parts(mesh, cache_spec(decode).axes_of("B")), Shares(owners, None)
    # A prompt that several texts begin with is read once on every device that has some of them.
    for each in range(most_prompts(owners, shards), rows // shards):
        try:
            fewer = _layouts(config, layout, prefill, mesh, rows, each * shards, cache_length)
        except LayoutError:  # the mesh does not divide this number of rows
            continue
        if fewer:
            (reading, decode), found = fewer, shares(owners, shards, each)
            break
    room = cache_length or _rounded(coarse(needed), _parts(mesh, cache_spec(decode).axes_of("T")))
    length = min(chunk, _rounded(coarse(max(map(len, held)) - 1), least_length(reading, mesh)))
    in_source = 0
    if read:
        check_rows(decode, mesh.shape)
        in_source = source_length or _rounded(coarse(max(map(len, read))), least_source(reading, mesh))
    sizes = Sizes(rows, len(found.prompts), length, room, reading, decode, in_source)
    check_lengths(reading, config.sizes(sizes.prefill_rows, length), mesh, room, in_source)
    check_lengths(decode.one_position(), config.sizes(rows, 1), mesh, room, in_source)
    if read:
        reading.stack(ENCODER).check(config.sizes(sizes.prefill_rows, in_source), mesh)
    return Batch(held, texts, sizes, owners, found, read)


def _fewest_rows(
    config: ModelConfig, layout: Layout, prefill: Any, mesh: jax.sharding.Mesh, texts: int, cache_length: int | None,
    beams: int,
) -> tuple[int, Any, Any]:  # fmt: skip
    """Return the smallest number of rows for `texts` texts, and the layouts; beams of one prompt share a device."""
    faults, step = [], max(beams, 1)
    # Every product of mesh axes divides mesh.size, so it divides one of mesh.size consecutive numbers.
    for rows in range(texts, texts + step * mesh.size, step):
        try:
            found = _layouts(config, layout, prefill, mesh, rows, rows, cache_length)
        except LayoutError as error:
            faults.append(error)
            continue
        if found and rows // step % _parts(mesh, cache_spec(found[1]).axes_of("B")) == 0:
            return rows, *found
    raise faults[0]


def _layouts(
    config: ModelConfig, layout: Layout, prefill: Any, mesh: jax.sharding.Mesh, rows: int, prefill_rows: int,
    cache_length: int | None,
) -> tuple[Any, Any] | None:  # fmt: skip
    """Return the layouts for reading and for decoding these rows, or None if the mesh axes do not divide the rows."""
    given = {} if cache_length is None else {"T": cache_length}
    # L, and T unless it is given, are chosen so that the mesh divides them.
    wanted = [{d: n for d, n in config.sizes(batch, 1).items() if d not in "LT"} for batch in (prefill_rows, rows)]
    reading, decode = phases(layout, prefill, sizes=(wanted[0] | given, wanted[1] | given), mesh=mesh)
    fit = prefill_rows % least_rows(config, reading, mesh) == 0 == rows % least_rows(config, decode, mesh)
    return (reading, decode) if fit else None


def read_sources(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]] | None,
    sources: Sequence[Sequence[int]] | None,
    source_length: int | None = None,
) -> tuple[Sequence[Sequence[int]], tuple[np.ndarray, ...]]:
    """Check prompts and sources, and return them; in a model with an encoder, prompts then begin with the start token.

    The arguments are the same as for `make_batch`.

    Raises:
        GenerationError: the model has an encoder but there are no sources; the model has no encoder but there are
            sources; there is not one source for each prompt; a source is empty or too long; or a token is not in the
            vocabulary.
    """
    if not config.encoder_layers:
        if sources is not None or source_length is not None:
            raise GenerationError("this model is decoder-only and reads no sources; give prompts only")
        return () if prompts is None else prompts, ()
    if not sources:
        raise GenerationError("this model has an encoder, but there is no source for it; give at least one")
    if prompts is not None and len(prompts) != len(sources):
        count = f"{counted(len(prompts), 'prompt')} with {counted(len(sources), 'source')}"
        raise GenerationError(f"cannot pair {count}; give one prompt for each source, or no prompts")
    if source_length is not None and source_length < 1:
        raise GenerationError(f"source_length is {source_length}; it must be at least 1")
    read = token_ids(config.vocabulary, sources, "cannot encode an empty source", "source")
    check_source(config, max(map(len, read)), source_length)
    return [[config.start_token, *given] for given in prompts or [()] * len(read)], read


def token_ids(vocabulary: int, texts: Sequence[Sequence[int]], empty: str, called: str) -> tuple[np.ndarray, ...]:
    """Return texts as arrays, after checking that no text is empty and that all tokens are in the vocabulary.

    Args:
        vocabulary: number of tokens.
        texts: the token ids of each text.
        empty: the beginning of the error message for a text without tokens.
        called: the word for a text in error messages, such as "prompt".

    Raises:
        GenerationError: a text is empty, or has a token that is not in the vocabulary.
    """
    held = tuple(np.asarray(text, np.int32).reshape(-1) for text in texts)
    for number, ids in enumerate(held):
        if not ids.size:
            which = f" ({called} {number + 1} of {len(held)})" if len(held) > 1 else ""
            raise GenerationError(f"{empty}{which}; give at least one token")
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if wrong.size:
            raise GenerationError(f"token {wrong[0]} is not in the model's vocabulary, 0 to {vocabulary - 1}")
    return held


def checked(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    samples: int,
    chunk: int,
    cache_length: int | None,
) -> tuple[np.ndarray, ...]:
    """Return the prompts as arrays, after the checks that do not depend on a layout.

    The arguments are the same as for `make_batch`.

    Raises:
        GenerationError: a prompt has a fault that `read_prompts` finds, or a text is longer than the model was made
            for.
    """
    held = read_prompts(config.vocabulary, prompts, tokens, samples=samples, chunk=chunk, cache_length=cache_length)
    check_length(config, max(map(len, held)), tokens)
    return held


def read_prompts(
    vocabulary: int,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    samples: int,
    chunk: int,
    cache_length: int | None,
) -> tuple[np.ndarray, ...]:
    """Return the prompts of any model as arrays, after checking them.

    Args:
        vocabulary: number of tokens in the model's vocabulary.
        prompts, tokens, samples, chunk, cache_length: see `make_batch`.

    Raises:
        GenerationError: there is no prompt; a prompt is empty; a token is not in the vocabulary; a number is less than
            1; or a text is longer than the cache.
    """
    if not len(prompts):
        raise GenerationError("there is no prompt to continue; give at least one")
    for name, value in (("tokens", tokens), ("samples", samples), ("chunk", chunk)):
        if value < 1:
            raise GenerationError(f"{name} is {value}; it must be at least 1")
    held = token_ids(vocabulary, prompts, "cannot continue an empty prompt", "prompt")
    _check_room(max(map(len, held)), tokens, samples * len(held), cache_length)
    return held


def _check_room(longest: int, tokens: int, texts: int, cache_length: int | None) -> None:
    """Raise an error if texts or the cache are too long, or if there are more texts than a batch may have."""
    needed = longest + tokens - 1
    if cache_length is not None and needed > cache_length:
        raise GenerationError(
            f"a prompt of {longest} tokens and {tokens} more need a cache of {needed} tokens, but it has room for "
            f"{cache_length}; shorten them, or raise cache_length"
        )
    if needed > LONGEST:
        raise GenerationError(
            f"a prompt of {longest} tokens and {tokens} more need {needed} positions, but there are at most {LONGEST}; "
            "shorten them"
        )
    if cache_length is not None and cache_length > LONGEST:
        raise GenerationError(f"cache_length is {cache_length}; it must be at most {LONGEST}, the number of positions")
    if texts > MOST_TEXTS:
        raise GenerationError(f"there are {texts} texts, but a batch has at most {MOST_TEXTS}; draw fewer samples")


def coarse(size: int) -> int:
    """Round a size up to 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ..., so that few programs serve all sizes.

    Sizes from 16 on grow by at most a quarter.
    """
    return 16 if size <= 16 else _rounded(size, 2 ** ((size - 1).bit_length() - 3))


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _parts(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
