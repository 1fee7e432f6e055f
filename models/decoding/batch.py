"""What is generated together: texts in rows, their prompts in chunks, and the sizes of both programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from ..transformer import Transformer
from .cache import cache_spec
from .prefix import Shares, shares
from .serving import GenerationError, least_length, least_rows


@dataclass(frozen=True)
class Sizes:
    """The sizes that the programs are compiled for.

    Attributes:
        rows: of the decode loop, R.
        prefill_rows: of a prefill, P.
        chunk: tokens of a row that a prefill step reads.
        room: tokens of a row that the cache has room for, T.
    """

    rows: int
    prefill_rows: int
    chunk: int
    room: int


@dataclass(frozen=True)
class Batch:
    """Prompts and the rows they are read in.

    Attributes:
        prompts: token ids of each.
        texts: how many there are: samples of every prompt, side by side.
        sizes: of the programs.
        shares: which prompt each row reads, and what the rows of texts copy.
        owners: for each row of text, the number of its prompt; None for a row without a text.
    """

    prompts: tuple[np.ndarray, ...]
    texts: int
    sizes: Sizes
    shares: Shares
    owners: tuple[int | None, ...]

    def last(self) -> tuple[np.ndarray, np.ndarray]:
        """The last token of every row's prompt, which the decode loop reads, and how many stand before it; [R] each."""
        of_rows = [np.zeros(1, np.int32) if owner is None else self.prompts[owner] for owner in self.owners]
        return np.array([ids[-1] for ids in of_rows], np.int32), np.array([len(ids) - 1 for ids in of_rows], np.int32)

    def chunks(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The tokens [P, chunk] and counts [P] of every prefill step: all of the prompts but their last tokens."""
        size = self.sizes.chunk
        read = [() if number is None else self.prompts[number][:-1] for number in self.shares.prompts]
        steps = []
        for start in range(0, max(map(len, read)), size):
            parts = [ids[start : start + size] for ids in read]
            padded = np.zeros((len(parts), size), np.int32)
            for row, part in zip(padded, parts):
                row[: len(part)] = part
            steps.append((padded, np.array([len(part) for part in parts], np.int32)))
        return steps


def make_batch(
    model: Transformer,
    reader: Transformer,
    mesh: jax.sharding.Mesh,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    samples: int,
    chunk: int,
    cache_length: int | None,
) -> Batch:
    """Lay out prompts and texts for a model in its decode layout, and for the same `reader` in its prefill layout.

    Raises:
        GenerationError: nothing to continue, a token that the model does not have, or a text longer than the cache.
        LayoutError: the mesh does not divide the model's sizes, the rows, the chunk or the cache.
    """
    held, longest = _checked(model, prompts, tokens, samples), max(map(len, prompts))
    # The last token of a text is never read.
    needed = longest + tokens - 1
    if cache_length is not None and needed > cache_length:
        raise GenerationError(
            f"a prompt of {longest} tokens and {tokens} more need a cache of {needed} tokens, and it has room for "
            f"{cache_length}; shorten them, or give the cache more"
        )
    each = least_rows(reader.config, reader.layout, mesh)
    texts, multiple = samples * len(held), math.lcm(each, least_rows(model.config, model.layout, mesh))
    rows = _rounded(texts, multiple)
    owners = tuple(text // samples if text < texts else None for text in range(rows))
    found = shares(owners, _parts(mesh, cache_spec(model.layout).axes_of("B")), each)
    room = cache_length or _rounded(needed, _parts(mesh, cache_spec(model.layout).axes_of("T")))
    whole = min(chunk, _rounded(max(longest - 1, 1), least_length(reader.layout, mesh)))
    sizes = Sizes(rows, len(found.prompts), whole, room)
    reader.layout.check(reader.config.sizes(sizes.prefill_rows, whole) | {"T": room}, mesh)
    model.layout.one_position().check(model.config.sizes(rows, 1) | {"T": room}, mesh)
    return Batch(held, texts, sizes, found, owners)


def _checked(model: Transformer, prompts: Sequence[Sequence[int]], tokens: int, samples: int) -> tuple[np.ndarray, ...]:
    """The prompts as arrays, once everything about them holds."""
    if not len(prompts):
        raise GenerationError("there is no prompt to continue; give at least one")
    for name, value in (("tokens", tokens), ("samples", samples)):
        if value < 1:
            raise GenerationError(f"{name} is {value}; it must be at least 1")
    vocabulary, held = model.config.vocabulary, tuple(np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts)
    for number, ids in enumerate(held):
        if not ids.size:
            which = f" (prompt {number + 1} of {len(held)})" if len(held) > 1 else ""
            raise GenerationError(f"cannot continue an empty prompt{which}; give at least one token")
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if wrong.size:
            raise GenerationError(f"token {wrong[0]} is none of the model's, which are 0 to {vocabulary - 1}")
    return held


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _parts(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
