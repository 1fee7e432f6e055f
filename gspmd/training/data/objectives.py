"""Training objectives whose rows are not windows of text: packed documents, span corruption, prefixes and pairs.

A row is a dictionary of int32 arrays. For a decoder-only model it has `tokens` [L+1] and `segments` [L+1], for an
encoder–decoder also `source` [T] and `source_segments` [T]; `tokens` is then the row of the decoder. Segments number
the documents of a row, from 1; padding, which comes last, has 0. Source segment s belongs to target segment s. A
token is predicted from the previous one if both are in one segment.
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
    """Training rows, by index."""

    def __len__(self) -> int: ...

    def row(self, index: int, random: np.random.Generator) -> Row:
        """Return a row, whose random choices are drawn from `random`."""


class Objective(Protocol):
    """An objective, which makes training rows of a part of a corpus.

    Attributes:
        borders: whether the borders of texts are kept.
        paired: whether texts form pairs.
        predicts_texts: whether whole texts, or whole targets, are predicted, not only spans of them.
    """

    borders: ClassVar[bool]
    paired: ClassVar[bool]
    predicts_texts: ClassVar[bool]

    def examples(self, part: "Part", length: int) -> Rows | Items:
        """Return the rows of a part of the corpus, or the items that are packed into rows."""

    def text_share(self, length: int) -> float:
        """Return the mean share of the predicted tokens that come from texts; sentinels and ends stand for no bytes."""

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the rows; they must not change when a run is resumed."""


@dataclass(frozen=True)
class Part:
    """A part of a corpus.

    Attributes:
        tokens: the tokens of its texts, joined, [N].
        starts: the index of each text's first token, and the end of the last text, [texts + 1]; a source and its target
            are two texts. None if borders are not kept.
    """

    tokens: np.ndarray | Tokens
    starts: np.ndarray | Tokens | None = None


@dataclass(frozen=True)
class PackedText:
    """Next-token prediction, with documents packed into rows.

    A document longer than a row is cut into pieces; each piece begins with the last token of the previous one.
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
    """Span corruption: the source is a window of text in which sentinels replace spans; the target has the spans.

    Attributes:
        source_length: tokens of a source, which determines the window.
        start: the token before a target.
        end: the token after a source and after a target.
        sentinel: the first sentinel; the next one has the id below it.
        noise_density: share of the window's tokens that are noise.
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
        """The distribution of the spans."""
        return SpanNoise(self.noise_density, self.mean_span)

    @property
    def window(self) -> int:
        """The tokens of text that fill a source."""
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
        source_length: tokens of a source.
        start: the token before a target.
        end: the token after a source and after a target.
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
        """Return the size of the largest window whose two parts fit into source and target, wherever it is split."""
        return min(self.source_length, length)


@dataclass(frozen=True)
class Pairs:
    """Pairs of a source and a target, such as a text and its translation.

    Attributes:
        source_length: tokens of a source.
        start: the token before a target.
        end: the token after a source and after a target.
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
    """Return the objective of a run; None for windows of next-token prediction.

    Sentinels are the tokenizer's `<extra_id_0>`, `<extra_id_1>`, ... if it has them, and otherwise the last ids of the
    vocabulary, counted down. A byte is its own id, and 256 ends a source or a target.

    Args:
        config: a `TrainingConfig`.
        vocabulary: the vocabulary of the model.
        start: the model's start token.
        tokenizer: see `load`; None if tokens are bytes.

    Raises:
        ConfigError: the vocabulary has no room for these tokens, a row has no room for a target, or the tokenizer adds
            tokens to a text besides its end token.
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
    """Return a tokenizer's first sentinel; None if it has no sentinels.

    Raises:
        ConfigError: it has fewer sentinels than a window has spans.
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
    """The rows of an encoder–decoder, each made from pairs of a source and a target."""

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
    """Return a row of texts, one after another, and their segments, both int32 [length], with zeros at the end."""
    tokens, segments = np.zeros((2, length), np.int32)
    at = 0
    for number, text in enumerate(texts, 1):
        tokens[at : at + len(text)], segments[at : at + len(text)] = text, number
        at += len(text)
    return tokens, segments


class _Split:
    """Windows of text, each split into a source and a target; the rest after the last whole window is dropped."""

    def __init__(self, tokens: np.ndarray | Tokens, window: int, split: Any, sides: _Sides):
        self._tokens, self._window, self._split, self._sides = tokens, window, split, sides

    def __len__(self) -> int:
        return len(self._tokens) // self._window

    def row(self, index: int, random: np.random.Generator) -> Row:
        tokens = self._tokens[index * self._window : (index + 1) * self._window]
        return self._sides.row([self._split(tokens, random)])


class _Pieces:
    """Documents, cut into pieces that fit into a row. A document of one token has no piece: nothing is predicted."""

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
        return np.stack([middle - begin + 1, end - middle + 2], axis=1)  # with their start and end tokens

    def row(self, items: np.ndarray) -> Row:
        borders = (self._starts[2 * item : 2 * item + 3] for item in items)
        return self._sides.row(
            [(self._tokens[begin:middle], self._tokens[middle:end]) for begin, middle, end in borders]
        )


class _Single:
    """Rows with one item each."""

    def __init__(self, items: Items):
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def row(self, index: int, random: np.random.Generator) -> Row:
        return self._items.row(np.array([index]))
