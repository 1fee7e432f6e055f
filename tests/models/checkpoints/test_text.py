"""Tokenizers: the library's own results, streams that split characters, and what ends a text."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from gspmd_models.checkpoints import CheckpointError, Tokenizer, byte_tokenizer, tokenizer

TEXTS = ["", "plain text", "naïve café", "日本語 and emoji 👩‍👩‍👧 end", " leading and trailing ", "a\n\tb\x00"]


def fallback() -> tokenizers.Tokenizer:
    """A tokenizer as Llama 2's: pieces with ▁ for spaces, bytes for other characters, a begin token before a text."""
    pieces = ["<s>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz▁th▁"]
    vocabulary = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    replace = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(replace)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_ids_of_the_byte_tokenizer_are_the_bytes(text):
    of_bytes = byte_tokenizer()
    assert of_bytes.encode(text) == list(text.encode())
    assert of_bytes.decode(list(text.encode())) == text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 255)))
def test_a_stream_of_any_bytes_joins_to_their_text(tokens):
    of_bytes = byte_tokenizer()
    stream = of_bytes.stream()
    assert "".join([*(stream.add(token) for token in tokens), stream.end()]) == of_bytes.decode(tokens)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_tokenizer, lambda: Tokenizer(fallback())], ids=["bytes", "pieces"])
def test_a_stream_shows_whole_characters_as_soon_as_they_are_there(make, text):
    made = make()
    tokens = made.encode(text)
    stream = made.stream()
    pieces = [stream.add(token) for token in tokens]
    assert "".join([*pieces, stream.end()]) == made.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_of_a_character_that_never_comes_are_shown_at_the_end():
    stream = byte_tokenizer().stream()
    assert [stream.add(token) for token in "n→".encode()[:3]] == ["n", "", ""]
    assert stream.end() == byte_tokenizer().decode(list("n→".encode()[:3]))[1:] != ""


@pytest.fixture
def folder(tmp_path):
    """A folder with the tokenizer of `fallback`."""
    fallback().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_begin_token_is_added_where_tokenizer_json_adds_it(folder):
    read = tokenizer(folder)
    assert read.encode("the") == fallback().encode("the").ids
    assert read.encode("the")[0] == 0
    assert read.encode("the", special=False)[0] != 0
    assert read.decode([*read.encode("the end"), 1]) == "the end"
    assert read.decode([*read.encode("the"), 1], special=True).endswith("</s>")


def test_end_tokens_are_those_of_the_first_file_that_names_some(folder):
    write = lambda name, entries: (folder / name).write_text(json.dumps(entries))  # noqa: E731
    assert tokenizer(folder).ends == frozenset()
    write("tokenizer_config.json", {"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    assert (tokenizer(folder).ends, tokenizer(folder).begin) == ({1}, 0)
    write("config.json", {"eos_token_id": 7})
    assert tokenizer(folder).ends == {7}
    write("generation_config.json", {"eos_token_id": [7, 9], "bos_token_id": 3})
    assert (tokenizer(folder).ends, tokenizer(folder).begin) == ({7, 9}, 3)


def test_a_tokenizer_that_cuts_or_fills_up_does_neither_here(folder):
    texts = "the end of a text", "a"
    wanted = [tokenizer(folder).encode(text) for text in texts]
    backend = fallback()
    backend.enable_truncation(4)
    backend.enable_padding(length=32, pad_id=1, pad_token="</s>")
    backend.save(str(folder / "tokenizer.json"))
    assert [len(backend.encode(text).ids) for text in texts] == [32, 32]
    assert [tokenizer(folder).encode(text) for text in texts] == wanted
    assert [Tokenizer(backend).encode(text) for text in texts] == wanted


@pytest.mark.parametrize("value", ["</s>", True, -1, 2.5, [2, "x"], {}])
def test_an_end_token_that_is_no_id_is_one_message(value, folder):
    (folder / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"eos_token_id of config\.json is .*; it must be a token's id"):
        tokenizer(folder)


def test_an_end_token_that_is_no_text_is_one_message(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": 2}))
    with pytest.raises(CheckpointError, match=r"eos_token of tokenizer_config\.json is 2; it must be the text of"):
        tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {}}))
    assert tokenizer(folder).ends == frozenset()


def test_a_saved_tokenizer_is_read_as_the_same(folder, tmp_path):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"})
    )
    (tmp_path / "out").mkdir()
    tokenizer(folder).save(tmp_path / "out")
    again = tokenizer(tmp_path / "out")
    assert (again.ends, again.settings) == ({1}, tokenizer(folder).settings)
    assert again.encode("the end") == tokenizer(folder).encode("the end")
    assert len(again) == fallback().get_vocab_size()


def test_a_missing_or_broken_tokenizer_is_one_message(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no such folder\. Name the folder of a checkpoint, or its tok"):
        tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; download it with"):
        tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"mine\.json is missing; give the path of a tokenizer\.json\."):
        tokenizer(tmp_path / "mine.json")
    (tmp_path / "sentencepiece.bpe.model").touch()
    (tmp_path / "vocab.json").touch()
    with pytest.raises(CheckpointError, match=r"the files of M2M-100, which transformers does not convert"):
        tokenizer(tmp_path)
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "sentencepiece.bpe.model").unlink()
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"there is tokenizer\.model; convert it"):
        tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        tokenizer(tmp_path)
