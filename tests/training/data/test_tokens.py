"""Tokens of a corpus against the tokenizer itself: every text once, on one side, with what stands around it."""

import json
import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gspmd.training import data
from gspmd.training.data import preparation, shards, sources
from gspmd.training.data.tokens import of_bytes, of_tokenizer
from gspmd.training.toml import ConfigError
from tests.training.data.conftest import WORDS


def documents(count, seed=0):
    draw, words = random.Random(seed), WORDS.split()
    return [f"{number} " + " ".join(draw.choices(words, k=draw.randint(1, 60))) for number in range(count)]


@pytest.fixture
def jsonl(tmp_path):
    """A function of texts that writes them to a file of JSON lines."""

    def write(texts, name="a.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(tmp_path / name)

    return write


def texts_of(tokens, backend, end=0):
    """The texts of tokens, cut at the id of their end."""
    cuts = [-1, *np.flatnonzero(np.asarray(tokens) == end), len(tokens)]
    return [backend.decode(list(map(int, tokens[first + 1 : last]))) for first, last in pairwise(cuts)]


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_every_record_is_in_one_part_once(jsonl, tokenizer, fraction):
    texts = documents(200)
    corpus = data.load([jsonl(texts)], fraction=fraction, tokenizer=tokenizer)
    train, held_out = (texts_of(part, tokenizer.backend) for part in (corpus.train, corpus.validation))
    assert sorted(train + held_out) == sorted(texts)
    assert corpus.files == (len(train), len(held_out))
    assert fraction / 2 <= sum(map(len, held_out)) / sum(map(len, texts)) <= 2 * fraction
    # The order is that of the file, and the ids are the tokenizer's.
    ids = [tokenizer.backend.encode(text).ids for text in texts if text in set(train)]
    assert list(corpus.train) == [number for each in ids for number in [0, *each]][1:]


@pytest.mark.parametrize("count", [2, 3, 10])
def test_of_few_records_some_are_held_out_and_some_are_not(jsonl, tokenizer, count):
    corpus = data.load([jsonl(documents(count))], tokenizer=tokenizer)
    assert min(corpus.files) > 0
    assert sum(corpus.files) == count


def test_one_record_cannot_be_held_out(jsonl):
    with pytest.raises(ConfigError, match="there is one record, so none can be held out; give more records, or its"):
        data.load([jsonl(["only"])])


def test_copies_of_a_record_are_in_one_part(jsonl, tokenizer):
    texts = documents(40)
    corpus = data.load([jsonl(texts * 3)], fraction=0.3, tokenizer=tokenizer)
    train, held_out = (texts_of(part, tokenizer.backend) for part in (corpus.train, corpus.validation))
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 120


def test_records_and_files_of_text_together(jsonl, tmp_path, tokenizer):
    texts = documents(60)
    jsonl(texts[:50])
    for number, text in enumerate(texts[50:]):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = data.load([f"{tmp_path}/*"], fraction=0.3, tokenizer=tokenizer)
    found = [text for part in (corpus.train, corpus.validation) for text in texts_of(part, tokenizer.backend)]
    assert sorted(found) == sorted(texts)
    assert corpus.unit == "record"


def test_a_text_begins_with_what_the_tokenizer_puts_there_and_is_not_cut(jsonl, with_begin):
    texts = documents(20)
    corpus = data.load([jsonl(texts)], fraction=0.2, tokenizer=with_begin)
    assert corpus.train[0] == corpus.validation[0] == with_begin.begin
    assert (np.asarray(corpus.train) == with_begin.begin).sum() == corpus.files[0]
    assert len(corpus.train) + len(corpus.validation) > 20 * 5


def test_what_stands_between_two_texts(backend):
    made = lambda ends, backend=backend: of_tokenizer(SimpleNamespace(backend=backend, ends=ends))  # noqa: E731
    assert made({7, 5}).between == (5,)
    assert made(()).between == (0,)  # <|endoftext|>, by its name
    plain = Tokenizer(models.BPE(vocab={"Ċ": 0, "a": 1}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert made((), plain).between == (0,)  # a line feed
    assert of_bytes().between == (0,)


def test_bits_per_byte_are_of_the_bytes_of_the_held_out_texts(jsonl, tokenizer):
    texts = documents(100)
    of_ids = data.load([jsonl(texts)], fraction=0.2, tokenizer=tokenizer)
    plain = data.load([jsonl(texts)], fraction=0.2)
    assert plain.bytes_per_token == 1.0
    assert plain.files == of_ids.files
    assert of_ids.bytes_per_token * len(of_ids.validation) == pytest.approx(len(plain.validation))
    assert of_ids.gzip_bits_per_byte == plain.gzip_bits_per_byte


@pytest.mark.parametrize(("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_ids_take_as_few_bytes_as_they_need(size, dtype):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": size - 1}, "a"))
    assert of_tokenizer(SimpleNamespace(backend=backend, ends={0})).dtype() == dtype


def test_long_texts_and_many_records_make_several_shards_and_batches(jsonl, tmp_path, tokenizer, monkeypatch):
    texts = [*documents(30), " ".join(documents(60, seed=1))]
    whole = data.load([jsonl(texts)], tokenizer=tokenizer)
    monkeypatch.setattr(sources, "PIECE", 512)
    monkeypatch.setattr(preparation, "BATCH", 2000)
    monkeypatch.setattr(shards, "SHARD", 100)
    parts = data.load([jsonl(texts)], tokenizer=tokenizer, cache=tmp_path / "other")
    assert len(list((tmp_path / "other").glob("*/train-*"))) == -(-len(whole.train) // 100)
    np.testing.assert_array_equal(parts.train, whole.train)
    np.testing.assert_array_equal(parts.validation, whole.validation)
    assert parts.identity() == whole.identity()
