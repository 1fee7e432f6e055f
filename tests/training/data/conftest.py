"""Tokenizers small enough to be made in a test, and a separate cache."""

from itertools import product
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = "the quick brown fox jumps over the lazy dog, and then it  sleeps.\n"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Return the folder of this test's tokens."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GSPMD_CACHE", str(folder))
    return folder / "tokens"


@pytest.fixture(scope="session")
def backend():
    """Return a tokenizer with merges of bytes, as GPT-2's, and an end-of-text token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
    )
    blanks = ["".join(blank * 2 for blank in pair) for pair in product(("\n", " ", "  ", " \n", "\n\n"), repeat=2)]
    made.train_from_iterator([WORDS * 20, *blanks * 30], trainer)
    return made


@pytest.fixture
def tokenizer(backend):
    """Return a replacement for `gspmd_models.checkpoints.Tokenizer`."""
    return SimpleNamespace(backend=backend, ends=frozenset({0}))


@pytest.fixture
def with_begin(backend):
    """Return the same, which also adds a token before a text, and cuts texts to three tokens."""
    other = Tokenizer.from_str(backend.to_str())
    other.add_special_tokens(["<s>"])
    begin = other.token_to_id("<s>")
    other.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", begin)])
    other.enable_truncation(3)
    return SimpleNamespace(backend=other, ends=frozenset({0}), begin=begin)
