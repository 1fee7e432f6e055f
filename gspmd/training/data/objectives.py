"""Training objectives other than windows of text: packed documents, span corruption, prefixes and pairs.

A row is a dictionary of int32 arrays. For a decoder-only model the arrays are `tokens` [L+1] and `segments` [L+1]. For
an encoder–decoder, `tokens` and `segments` are the decoder's, and the encoder has `source` [T] and `source_segments`
[T]. Segments number the documents of a row from 1; padding, which comes last, has segment 0. Source segment s belongs
to target segment s. A token is predicted from the token before it if both are in the same segment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from gspmd.training.data.packing import Items, Row
from gspmd.training.data.shards import Tokens
from gspmd.training.data.spans import SpanNoise, corrupt
from gspmd.training.data.tokens import of_bytes, of_tokenizer
from gspmd.training.toml import ConfigError


class Rows(Protocol):
    """Training rows, accessed by index."""

    def __len__(self) -> int: ...

    def row(self, index: int, random: np.random.Generator) -> Row:
        """Return a row, whose random choices are drawn from `random`."""


class Objective(Protocol):
    """A training objective, which turns a part of a corpus into rows.

    Attributes:
        borders: whether the objective needs to know where texts begin and end.
        paired: whether texts form pairs of a source and a target.
        predicts_texts: whether every token of a text, or of a target, is predicted, and not only spans.
    """

    borders: ClassVar[bool]
    paired: ClassVar[bool]
    predicts_texts: ClassVar[bool]

    def examples(self, part: "Part", length: int) -> Rows | Items:
        """Return the rows of a part of the corpus, or items to be packed into rows."""

    def text_share(self, length: int) -> float:
        """Return the mean fraction of predicted tokens that stand for text; sentinels and end tokens do not."""

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the rows, which a resumed run must not change."""


@dataclass(frozen=True)
class Part:
    """The training part or the held-out part of a corpus.

    Attributes:
        tokens: the tokens of the part's texts, joined, [N].
        starts: the index of each text's first token, followed by the end of the last text, [texts + 1]. A source and
            its target count as two texts. None if the objective does not need these indices.
    """

    tokens: np.ndarray | Tokens
    starts: np.ndarray | Tokens | None = None


@dataclass(frozen=True)
class PackedText:
    """Next-token prediction on documents, several of which are packed into a row.

    A document longer than a row is cut into pieces; each piece begins with the last token of the piece before it.
    """

    borders: ClassVar[bool] = True
    paired: ClassVar[bool] = False
    predicts_texts: ClassVar[bool] = True

    def examples(self, part: Part, length: int) -> Items:
        return _Pieces(part, length)

    def text_share(self, length: int) -> float:
        return 1.0

    def identity(self) -> dict[str, Any]:
        return {"pack": True}


@dataclass(frozen=True)
class SpanCorruption:
    """Span corruption (T5): the source is a window of text with sentinels in place of spans; the target has the spans.

    Attributes:
        source_length: number of tokens of a source, which determines the size of the window.
        start: the token that is put before a target.
        end: the token that is put after a source and after a target.
        sentinel: the id of the first sentinel; each further sentinel has the next lower id.
        noise_density: the fraction of a window's tokens that belong to spans.
        mean_span: mean number of tokens of a span.
    """

    borders: ClassVar[bool] = False
    paired: ClassVar[bool] = False
    predicts_texts: ClassVar[bool] = False
    source_length: int
    start: int
    end: int
    sentinel: int
    noise_density: float = 0.15
    mean_span: float = 3.0

    @property
    def noise(self) -> SpanNoise:
        """The random distribution of spans."""
        return SpanNoise(self.noise_density, self.mean_span)

    @property
    def window(self) -> int:
        """The number of tokens of a window of text that, once corrupted, fills a source."""
        return self.noise.window(self.source_length)

    def examples(self, part: Part, length: int) -> Rows:
        def split(tokens: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
            return corrupt(tokens, self.noise.mask(len(tokens), random), self.sentinel)

        return _Split(part.tokens, self.window, split, _Sides(self.source_length, length, self.start, self.end))

    def text_share(self, length: int) -> float:
        return self.noise.counts(self.window)[0] / self.noise.lengths(self.window)[1]

    def identity(self) -> dict[str, Any]:
        return {"objective": "span-corruption", **asdict(self)}


@dataclass(frozen=True)
class Prefix:
    """Prefix language modeling: a window of text is split at a random token into source and target.

    Attributes:
        source_length: number of tokens of a source.
        start: the token that is put before a target.
        end: the token that is put after a source and after a target.
    """

    borders: ClassVar[bool] = False
    paired: ClassVar[bool] = False
    predicts_texts: ClassVar[bool] = True
    source_length: int
    start: int
    end: int

    def examples(self, part: Part, length: int) -> Rows:
        def split(tokens: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
            at = int(random.integers(1, len(tokens)))
            return tokens[:at], tokens[at:]

        sides = _Sides(self.source_length, length, self.start, self.end)
        return _Split(part.tokens, self._window(length), split, sides)

    def text_share(self, length: int) -> float:
        mean = self._window(length) / 2  # The mean length of a target, whose end is predicted too.
        return mean / (mean + 1)

    def identity(self) -> dict[str, Any]:
        return {"objective": "prefix", **asdict(self)}

    def _window(self, length: int) -> int:
        """Return the size of the largest window that fits into source and target wherever the window is split."""
        return min(self.source_length, length)


@dataclass(frozen=True)
class Pairs:
    """Pairs of a source and a target, such as a text and its translation.

    Attributes:
        source_length: number of tokens of a source.
        start: the token that is put before a target.
        end: the token that is put after a source and after a target.
        pack: whether several pairs share a row.
    """

    borders: ClassVar[bool] = True
    paired: ClassVar[bool] = True
    predicts_texts: ClassVar[bool] = True
    source_length: int
    start: int
    end: int
    pack: bool = False

    def examples(self, part: Part, length: int) -> Rows | Items:
        items = _PairItems(part, _Sides(self.source_length, length, self.start, self.end))
        return items if self.pack else _Single(items)

    def text_share(self, length: int) -> float:
        return 1.0

    def identity(self) -> dict[str, Any]:
        return {"objective": "pairs", **asdict(self)}


def objective(config: Any, *, vocabulary: int, start: int, tokenizer: Any = None) -> Objective | None:
    """Return the objective of a run, or None for next-token prediction on windows of text.

    Sentinels are the tokenizer's `<extra_id_0>`, `<extra_id_1>`, ... if it has them, and otherwise the last ids of the
    vocabulary, counted down. If tokens are bytes, a byte is its own id, and 256 ends a source or a target.

    Args:
        config: the `TrainingConfig` of the run.
        vocabulary: the vocabulary size of the model.
        start: the model's start token, which is put before a target.
        tokenizer: the tokenizer that is also given to `gspmd.training.data.load`; None if tokens are bytes.

    Raises:
        ConfigError: the vocabulary has no room for the tokens of text, the start and end tokens, and the sentinels;
            `source_length` or `length` is too small; or the tokenizer has no end token, adds other tokens to a text, or
            has too few sentinels.
    """
    if config.objective == "next-token":
        return PackedText() if config.pack else None
    encoding = of_tokenizer(tokenizer) if tokenizer is not None else of_bytes()
    doing = f"cannot train with the objective {config.objective}:"
    if (end := encoding.end) is None:
        raise ConfigError(doing, ["the tokenizer has no token that ends a text; add one, such as </s>, to it."])
    if encoding.begin or len(encoding.between) > 1:
        around = f"{list(encoding.begin)} before every text, and {list(encoding.between)} after"
        remedy = "rows of sources and targets have only an end token; use a tokenizer that adds no other tokens."
        raise ConfigError(doing, [f"the tokenizer puts {around}; {remedy}"])
    if config.source_length < 3 or config.length < 3:
        sizes = f"source_length is {config.source_length}, and length is {config.length}"
        raise ConfigError(doing, [f"{sizes}; both must be at least 3."])
    sides = {"source_length": config.source_length, "start": start, "end": end}
    ids = max(encoding.vocabulary, start + 1, end + 1)
    needs = f"tokens up to {ids - 1}, with start token {start} and end {end}"
    sentinel = None
    if config.objective == "span-corruption":
        noise = SpanNoise(config.noise_density, config.mean_span)
        window = noise.window(config.source_length)
        spans, target = noise.counts(window)[1], noise.lengths(window)[1]
        if target > config.length:
            fault = f"sources of {config.source_length} tokens have targets of {target}, but length is {config.length}"
            raise ConfigError(doing, [f"{fault}; set length to {target} or more, or source_length to less."])
        if tokenizer is not None:
            sentinel = _sentinel(tokenizer.backend, spans, doing)
        if sentinel is None:
            ids, needs, sentinel = ids + spans, f"{needs}, and {spans} sentinels", vocabulary - 1
    if vocabulary < ids:
        raise ConfigError(doing, [f"model.vocabulary is {vocabulary}, but must be at least {ids}: {needs}."])
    if sentinel is not None:
        drawn = {"noise_density": config.noise_density, "mean_span": config.mean_span}
        return SpanCorruption(**sides, sentinel=sentinel, **drawn)
    return Prefix(**sides) if config.objective == "prefix" else Pairs(**sides, pack=config.pack)


def _sentinel(backend: Any, spans: int, doing: str) -> int | None:
    """Return the id of a tokenizer's first sentinel, or None if it has no sentinels.

    Raises:
        ConfigError: the tokenizer has fewer sentinels than a window has spans.
    """
    first = backend.token_to_id("<extra_id_0>")
    if first is None:
        return None
    if any(backend.token_to_id(f"<extra_id_{number}>") != first - number for number in range(spans)):
        last = f"<extra_id_{spans - 1}>"
        fault = f"a source has {spans} spans, but the tokenizer lacks <extra_id_0> to {last} with descending ids"
        raise ConfigError(doing, [f"{fault}; use a smaller source_length, or a larger mean_span."])
    return first


@dataclass(frozen=True)
class _Sides:
    """A maker of rows for an encoder–decoder from pairs of a source and a target."""

    source_length: int
    length: int
    start: int
    end: int

    @property
    def rooms(self) -> tuple[int, int]:
        return self.source_length, self.length + 1

    def row(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Row:
        source, source_segments = _joined((np.append(source, self.end) for source, _ in pairs), self.source_length)
        targets = (np.concatenate([[self.start], target, [self.end]]) for _, target in pairs)
        tokens, segments = _joined(targets, self.length + 1)
        return {"source": source, "source_segments": source_segments, "tokens": tokens, "segments": segments}


def _joined(texts: Iterable[Any], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a row of several texts and its segments, both int32 [length], padded with zeros at the end."""
    tokens, segments = np.zeros((2, length), np.int32)
    at = 0
    for number, text in enumerate(texts, 1):
        tokens[at : at + len(text)], segments[at : at + len(text)] = text, number
        at += len(text)
    return tokens, segments


class _Split:
    """Windows of text, each split into source and target; tokens after the last whole window are dropped."""

    def __init__(self, tokens: np.ndarray | Tokens, window: int, split: Any, sides: _Sides):
        self._tokens, self._window, self._split, self._sides = tokens, window, split, sides

    def __len__(self) -> int:
        return len(self._tokens) // self._window

    def row(self, index: int, random: np.random.Generator) -> Row:
        tokens = self._tokens[index * self._window : (index + 1) * self._window]
        return self._sides.row([self._split(tokens, random)])


class _Pieces:
    """Documents cut into pieces that fit into a row; a document of one token has no piece, as nothing is predicted."""

    def __init__(self, part: Part, length: int):
        self._tokens, self._length, self.rooms = part.tokens, length, (length + 1,)
        self._starts = np.asarray(part.starts)
        counts = -(-np.maximum(np.diff(self._starts) - 1, 0) // length)
        self._ends = np.cumsum(counts)  # The number of pieces up to the end of each document.
        self._firsts = self._ends - counts

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def sizes(self, items: np.ndarray) -> np.ndarray:
        begins, ends = self._borders(items)
        return (ends - begins)[:, None]

    def row(self, items: np.ndarray) -> Row:
        borders = zip(*self._borders(items))
        tokens, segments = _joined((self._tokens[begin:end] for begin, end in borders), self._length + 1)
        return {"tokens": tokens, "segments": segments}

    def _borders(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        document = np.searchsorted(self._ends, items, "right")
        begins = self._starts[document] + (items - self._firsts[document]) * self._length
        return begins, np.minimum(begins + self._length + 1, self._starts[document + 1])


class _PairItems:
    def __init__(self, part: Part, sides: _Sides):
        self._tokens, self._sides, self.rooms = part.tokens, sides, sides.rooms
        self._starts = np.asarray(part.starts)

    def __len__(self) -> int:
        return len(self._starts) // 2

    def sizes(self, items: np.ndarray) -> np.ndarray:
        begin, middle, end = (self._starts[2 * items + each] for each in range(3))
        return np.stack([middle - begin + 1, end - middle + 2], axis=1)  # including start and end tokens

    def row(self, items: np.ndarray) -> Row:
        borders = (self._starts[2 * item : 2 * item + 3] for item in items)
        return self._sides.row(
            [(self._tokens[begin:middle], self._tokens[middle:end]) for begin, middle, end in borders]
        )


class _Single:
    """Rows of one item each, without packing."""

    def __init__(self, items: Items):
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def row(self, index: int, random: np.random.Generator) -> Row:
        return self._items.row(np.array([index]))
