"""A corpus: the tokens of texts, with a part of them held out for validation, batched by grain."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import grain
import numpy as np

from gspmd.display.units import amount_of_bytes
from gspmd.training.data.objectives import Objective, Part, Rows
from gspmd.training.data.packing import Items, PackedBatches, PackedRows, Row, count_rows
from gspmd.training.data.shards import Tokens
from gspmd.training.data.split import count_of
from gspmd.training.toml import ConfigError

Batch = np.ndarray | Row


class Batches(Protocol):
    """An endless iterator over batches, with a position that is saved in checkpoints."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """Return the position of the iterator."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the position of the iterator."""


@dataclass(frozen=True)
class Corpus:
    """Tokens of texts, split into a training part and a held-out part.

    Attributes:
        name: a description of where the texts come from.
        train: the tokens of the training texts, joined, [N].
        validation: the tokens of the held-out texts, joined, [N].
        files: number of texts in each part. A file that is cut near its end, because its end is held out, counts in
            both parts.
        gzip_bits_per_byte: bits per byte of the held-out texts under gzip, each text compressed by itself.
        vocabulary: size of the vocabulary, which is the number of ids that tokens can have.
        bytes_per_token: bytes of held-out text per held-out token, counting the separator of two texts as one byte.
        tokenizer: a hash that identifies the tokenizer; empty if tokens are bytes.
        unit: the kind of text, "file", "record" or "pair".
        digest: the hash that `identity` returns, if it is already known.
        objective: the objective that turns the texts into rows. If None, the rows are windows of the joined texts.
        starts: a pair of arrays [texts + 1], for the training part and the held-out part: the index of each text's
            first token, followed by the end of the last text. Both are None if the objective does not need these
            indices.
    """

    name: str
    train: np.ndarray | Tokens
    validation: np.ndarray | Tokens
    files: tuple[int, int]
    gzip_bits_per_byte: float
    vocabulary: int = 256
    bytes_per_token: float = 1.0
    tokenizer: str = ""
    unit: str = "file"
    digest: str = ""
    objective: Objective | None = None
    starts: tuple[np.ndarray | Tokens, np.ndarray | Tokens] | tuple[None, None] = (None, None)

    def describe(self) -> str:
        """Return a line that gives the source and, for each of the two parts, its size and its number of texts."""
        sizes = [f"{len(part):,} tokens" if self.tokenizer else amount_of_bytes(len(part)) for part in self._parts]
        train, held_out = (f"{size} in {count_of(count, self.unit)}" for size, count in zip(sizes, self.files))
        ratio = f", {self.bytes_per_token:.2f} bytes per token" if self.tokenizer else ""
        return f"{self.name}: {train}, and {held_out} held out{ratio}"

    def identity(self) -> str:
        """Return a hash of the tokens and of their split into parts."""
        kept = (part for part in (*self._parts, *self.starts) if part is not None)
        parts = (hashlib.sha256(np.asarray(part).tobytes()).hexdigest() for part in kept)
        return self.digest or digest_of(*parts)

    def batches(self, batch: int, length: int, seed: int, process: int = 0, processes: int = 1) -> Batches:
        """Return an endless iterator over training batches, [B / processes, L+1], reshuffled every epoch.

        Without an objective the tokens are cut into windows of `length` predicted tokens, and all windows are shuffled
        together; tokens after the last whole window are dropped. With an objective, a batch is a dictionary of int32
        arrays (see `gspmd.training.data.objectives`), and spans and splits are drawn anew in every epoch. A batch may
        span two epochs. `get_state` and `set_state` read and set the iterator's position, a small dictionary that is
        saved in checkpoints. This position does not depend on the number of processes.

        Args:
            batch: number of sequences in a batch, over all processes.
            length: number of tokens that a sequence predicts.
            seed: seed of the order of sequences, and of random spans and splits.
            process: the index of this process, which reads batch / processes rows of every batch.
            processes: the number of processes that share a batch.

        Raises:
            ConfigError: `processes` does not divide the batch.
        """
        mine = rows_of(batch, process, processes)
        if self.objective is None:
            rows = grain.MapDataset.source(_Windows(self.train, length)).shuffle(seed=seed % 2**32).repeat()
        else:
            examples = self.objective.examples(Part(self.train, self.starts[0]), length)
            if isinstance(examples, Items):
                return PackedBatches(examples, batch, mine, seed)

            def draw(position: int, index: int) -> Row:
                epoch = position // len(examples)
                return examples.row(index, np.random.default_rng([seed, epoch, index]))

            rows = grain.MapDataset.range(len(examples)).shuffle(seed=seed % 2**32).repeat().map_with_index(draw)
        # A batch of n processes consists of n smaller batches, one for each process.
        parts = rows.batch(len(mine), drop_remainder=True).slice(slice(process, None, processes))
        return iter(parts.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))

    def validation_count(self, batch: int, length: int, limit: int = 0) -> int:
        """Return the number of batches in the held-out part, capped at `limit` unless `limit` is 0."""
        sequences = len(self._held_out_rows(length)) if self.objective else -(-(len(self.validation) - 1) // length)
        whole = -(-sequences // batch)
        return min(whole, limit or whole)

    def validation_batches(
        self, batch: int, length: int, limit: int = 0, process: int = 0, processes: int = 1
    ) -> Iterator[Batch]:
        """Yield the held-out part as full batches, [B / processes, L+1].

        Without an objective, sequences are windows of the joined texts. If there is no limit, every token except the
        first is predicted; sequences overlap as needed to fill all batches, and tokens in an overlap count twice. With
        an objective and no limit, every row appears once, and the last batch is filled up with rows of padding. Spans
        and splits are the same in every validation.

        Args:
            batch: number of sequences in a batch, over all processes.
            length: number of tokens that a sequence predicts.
            limit: the largest number of batches, or 0 for no limit. Sequences are spread evenly over the held-out part.
            process, processes: see `batches`.
        """
        mine, count = rows_of(batch, process, processes), self.validation_count(batch, length, limit)
        if self.objective is None:
            starts = np.linspace(0, len(self.validation) - length - 1, count * batch).round().astype(np.int64)
            for each in starts.reshape(count, batch):
                yield np.stack([self.validation[start : start + length + 1] for start in each[mine.start : mine.stop]])
            return
        rows = self._held_out_rows(length)
        chosen = np.linspace(0, len(rows) - 1, min(count * batch, len(rows))).round().astype(np.int64)
        padding = {name: np.zeros_like(values) for name, values in rows.row(0, np.random.default_rng(0)).items()}
        for first in range(0, count * batch, batch):
            each = [*chosen[first : first + batch]][mine.start : mine.stop]
            made = [rows.row(index, np.random.default_rng(index)) for index in each]
            made += [padding] * (len(mine) - len(made))
            yield {name: np.stack([row[name] for row in made]) for name in padding}

    def training_rows(self, length: int, most: int) -> int:
        """Return the number of distinct training rows, capped at `most`. The corpus must have an objective."""
        assert self.objective is not None
        examples = self.objective.examples(Part(self.train, self.starts[0]), length)
        return count_rows(examples, most) if isinstance(examples, Items) else min(len(examples), most)

    def bytes_per_prediction(self, length: int) -> float:
        """Return the mean number of bytes of held-out text for each predicted token."""
        return self.bytes_per_token * (self.objective.text_share(length) if self.objective else 1.0)

    @property
    def predicts_texts(self) -> bool:
        """Whether every token of a text is predicted, so that bits per byte can be compared with a compressor's."""
        return self.objective is None or self.objective.predicts_texts

    @property
    def masked(self) -> bool:
        """Whether some tokens, such as those of prompts, are read but not predicted.

        Such a token t is stored as `~t`, which is below 0.
        """
        return self.train.dtype.kind == "i"

    @property
    def weighed(self) -> bool:
        """Whether batches may differ in the number of tokens that they predict."""
        return self.masked or self.objective is not None

    def _held_out_rows(self, length: int) -> Rows:
        if length not in self._held_out:
            assert self.objective is not None
            examples = self.objective.examples(Part(self.validation, self.starts[1]), length)
            self._held_out[length] = PackedRows(examples) if isinstance(examples, Items) else examples
        return self._held_out[length]

    @cached_property
    def _held_out(self) -> dict[int, Rows]:
        """A cache of the held-out rows by row length, so that rows are packed only once."""
        return {}

    @property
    def _parts(self) -> tuple[np.ndarray | Tokens, np.ndarray | Tokens]:
        return self.train, self.validation


def digest_of(*parts: str) -> str:
    """Return a short hash of a corpus, given the SHA-256 hashes of its parts."""
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def rows_of(batch: int, process: int, processes: int) -> range:
    """Return the indices of the rows of a batch that a process reads.

    >>> rows_of(8, 1, 4)
    range(2, 4)
    """
    if batch % processes:
        fault = f"{processes} processes do not divide a batch of {batch} sequences; use a multiple of {processes}."
        raise ConfigError("cannot divide the batch among the processes:", [fault])
    each = batch // processes
    return range(process * each, (process + 1) * each)


def check_size(corpus: Corpus, batch: int, length: int) -> None:
    """Raise an error if a text is too short for one training batch or one held-out sequence.

    Raises:
        ConfigError: the text is too short; the message states its length and the length that is needed.
    """
    faults, unit = [], "token" if corpus.tokenizer else "byte"
    trained, held_out = (count_of(len(part), unit) for part in (corpus.train, corpus.validation))
    if corpus.objective is not None:
        if (rows := corpus.training_rows(length, batch)) < batch:
            faults.append(f"the training text is {count_of(rows, 'sequence')}, but a batch needs {batch}.")
        if not corpus.validation_count(batch, length):
            faults.append(f"the held-out text has {held_out}, less than one sequence needs.")
    else:
        if len(corpus.train) < batch * length + 1:
            needs = f"a batch of {batch} sequences of {length} needs {batch * length + 1}."
            faults.append(f"the training text has {trained}, but {needs}")
        if len(corpus.validation) < length + 1:
            needs = f"a sequence of {length} needs {length + 1}."
            faults.append(f"the held-out text has {held_out}, but {needs}")
    if faults:
        # The shortest window is a token and its successor.
        enough = corpus.objective is not None or min(len(corpus.train), len(corpus.validation)) >= 2
        faults.append(f"Give more text with --data{', or lower --batch or --length' * enough}.")
        raise ConfigError(f"cannot train on {corpus.name!r}:", faults)


def stream(corpus: Corpus, config: Any) -> dict[str, Any]:
    """Return the settings that determine the sequence of training batches, for `check_stream` to compare."""
    wanted = {"text": corpus.identity(), "batch": config.batch, "length": config.length, "seed": config.seed}
    wanted |= corpus.objective.identity() if corpus.objective else {}
    return wanted | ({"tokenizer": corpus.tokenizer} if corpus.tokenizer else {})


def check_stream(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise an error if a resumed run would see batches that differ from those of the original run.

    Raises:
        ConfigError: the batches would differ; the message names every setting that differs.
    """
    names = [name for name in dict.fromkeys([*wanted, *saved]) if saved.get(name) != wanted.get(name)]
    was, now = ({name: values.get(name, "not set") for name in names} for values in (saved, wanted))
    faults = [f"{name} was {was[name]}, but is {now[name]}." for name in names if name != "text"]
    if "text" in names:
        faults.insert(0, "the text differs, because of its files, their contents, or validation_fraction.")
    if faults:
        remedy = "Leave out the data flags to use the run's own data, or start anew in another --out."
        raise ConfigError("cannot resume: the batches would differ from those of the run so far.", [*faults, remedy])


class _Windows:
    """Sequences of length + 1 tokens, each of which starts with the last token of the sequence before it."""

    def __init__(self, tokens: np.ndarray | Tokens, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._length
        return self._tokens[start : start + self._length + 1]

    def __repr__(self) -> str:
        return f"windows of {self._length} tokens"
