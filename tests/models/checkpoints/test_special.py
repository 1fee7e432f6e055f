"""Tokens that begin and end a text, and special tokens, against transformers' AutoTokenizer."""

import json
from itertools import product

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from gspmd_models.checkpoints import CheckpointError, tokenizer
from tests.models.checkpoints.tokenizing import BEGIN, END, byte_level, folder, gemma, pieces, unigram, with_step

TEXTS = ["the end", " a the", "naïve 12 日本\n\n x", f"{BEGIN}the{END} a", "<x> the <y>", ""]
NAMED = {"bos_token": BEGIN, "eos_token": END}
GEMMA = {"pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
STEPS = (None, "nothing", "begin", "end", "both")

# class, tokenizer, what a file of such a class names
CLASSES = [
    ("PreTrainedTokenizerFast", byte_level, {}),
    ("PreTrainedTokenizerFast", pieces, {}),
    ("LlamaTokenizerFast", byte_level, {}),
    ("LlamaTokenizerFast", pieces, {}),
    ("LlamaTokenizer", pieces, {"legacy": False}),
    ("GemmaTokenizerFast", gemma, GEMMA),
    ("GemmaTokenizer", gemma, GEMMA),
    ("Qwen2Tokenizer", byte_level, {"pad_token": END, "unk_token": END}),
    ("GPT2TokenizerFast", byte_level, {"unk_token": END}),
    ("CohereTokenizerFast", byte_level, {"pad_token": END}),
    ("GPTNeoXTokenizerFast", byte_level, {}),
    ("T5TokenizerFast", unigram, {"extra_ids": 0}),
    ("NoSuchTokenizerFast", byte_level, {}),
    (None, byte_level, {}),
]


def alike(transformers, at, texts=TEXTS):
    wanted, found = transformers.AutoTokenizer.from_pretrained(str(at)), tokenizer(at)
    for text in texts:
        assert found.encode(text) == wanted.encode(text), (text, type(wanted).__name__)
        assert found.encode(text, special=False) == wanted.encode(text, add_special_tokens=False), text
    return wanted, found


@pytest.mark.parametrize(("named", "make", "more"), CLASSES, ids=lambda value: getattr(value, "__name__", None))
def test_ends_are_those_of_transformers_for_each_class(transformers, named, make, more, tmp_path):
    """Whatever add_bos_token, add_eos_token and tokenizer.json say."""
    flags = [(None, None), (True, False), (False, True), (True, True), (False, False)]
    of_class = {} if named is None else {"tokenizer_class": named}
    for step, (begin, end) in product(STEPS, flags):
        if make is unigram and step in ("begin", "both"):
            continue  # it has no such token
        given = {name: flag for name, flag in (("add_bos_token", begin), ("add_eos_token", end)) if flag is not None}
        names = {"eos_token": END} if make is unigram else NAMED
        alike(transformers, folder(tmp_path, with_step(make(), step), names | of_class | more | given))


FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "cohere", "cohere2", "phi", "phi3", "gptj",
    "gpt2", "gpt_neox", "olmo", "olmo2", "olmoe", "stablelm", "granite", "falcon", "starcoder2", "glm4", "gpt_bigcode",
)  # fmt: skip


OTHER_STEPS = {
    "bytes": byte_level,
    "pieces": pieces,
    "pieces, spaces normalised": lambda: changed(pieces(), normalizers.Sequence(LLAMA), None),
    "pieces of words": lambda: changed(pieces(), None, pre_tokenizers.Metaspace()),
    "digits": lambda: changed(byte_level(), normalizers.NFKC(), pre_tokenizers.Sequence(DIGITS)),
}
LLAMA = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
DIGITS = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]


def changed(backend, normalizer, pre_tokenizer):
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    return backend


SPACES = ["the  a", " the", f"{BEGIN}the{END} a {BEGIN} the", "a12 34\n\n  ½ ﬁ", "don't  \n the", "<unk> ø"]


@pytest.mark.parametrize("steps", OTHER_STEPS)
@pytest.mark.parametrize(
    "named",
    ["PreTrainedTokenizerFast", "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer",
     "GPT2Tokenizer", "CohereTokenizer", "GPTNeoXTokenizer"],
)  # fmt: skip
def test_texts_are_split_as_the_class_of_transformers_does(transformers, named, steps, tmp_path):
    """Whatever tokenizer.json says: a class of its own takes no more than vocabulary and last step from it."""
    of_bytes = steps in ("bytes", "digits")
    if named in ("GemmaTokenizer", "CodeLlamaTokenizer") and of_bytes:
        return  # they have an unknown token, which these vocabularies lack
    for more in ({}, {"add_prefix_space": True}, {"add_prefix_space": False, "legacy": True}, {"legacy": True}):
        backend = with_step(OTHER_STEPS[steps](), "begin")
        at = folder(tmp_path, backend, NAMED | {"tokenizer_class": named} | more)
        wanted, found = alike(transformers, at, SPACES)
        for text in SPACES:
            assert found.decode(found.encode(text), special=True) == wanted.decode(wanted.encode(text)), text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_is_that_which_transformers_takes_for_the_family(transformers, family, tmp_path):
    """GPT-NeoX's adds nothing, whatever tokenizer.json says: its name counts for some families only."""
    classes = (None, "GPTNeoXTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast")
    for named in classes:
        of_class = {} if named is None else {"tokenizer_class": named}
        backend = with_step(byte_level(("<unk>", BEGIN, END, "<pad>", "<mask>")), "both")
        at = folder(tmp_path, backend, NAMED | GEMMA | of_class, config={"model_type": family})
        wanted = transformers.AutoTokenizer.from_pretrained(str(at))
        if type(wanted).__name__ != "GemmaTokenizer":  # which cannot read bytes
            assert tokenizer(at).encode("the end") == wanted.encode("the end"), named


def without_special(make=byte_level) -> tokenizers.Tokenizer:
    """A tokenizer whose file has the begin and end tokens in its vocabulary, and says nothing else of them."""
    parts = json.loads(make().to_str())
    parts["model"]["vocab"] |= {token["content"]: token["id"] for token in parts["added_tokens"]}
    parts["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


def token(content, **flags):
    return {"__type": "AddedToken", "content": content} | flags


DESCRIBED = {
    "260": {"content": BEGIN, "lstrip": True, "rstrip": True, "special": True},
    "261": {"content": END, "special": False},
    "262": {"content": "<x>", "special": True, "normalized": False},
}
FILES = [
    ({}, {}),
    (NAMED, {}),
    ({"bos_token": token(BEGIN, lstrip=True), "eos_token": token(END, rstrip=True)}, {}),
    ({"bos_token": "<x>", "pad_token": "<y>"}, {}),
    ({"bos_token": BEGIN, "eos_token": None, "added_tokens_decoder": DESCRIBED}, {}),
    ({"additional_special_tokens": ["<x>", END]}, {}),
    ({"extra_special_tokens": ["<y>", END]}, {}),
    ({"extra_special_tokens": {"image_token": "<x>"}}, {}),
    ({"image_token": "<x>", "add_bos_token": True}, {}),
    ({"bos_token": "<y>"}, {"special_tokens_map": {"bos_token": "<x>", "eos_token": {"content": END, "lstrip": True}}}),
    (NAMED, {"added_tokens": {"<x>": 262}}),
    (NAMED | {"split_special_tokens": True}, {}),
]


@pytest.mark.parametrize("make", [byte_level, without_special], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("entries", "files"), FILES)
def test_special_tokens_are_those_of_transformers(transformers, entries, files, make, tmp_path):
    at = folder(tmp_path, make(), {"tokenizer_class": "PreTrainedTokenizerFast"} | entries, **files)
    wanted, found = alike(transformers, at)
    assert found.named == wanted.special_tokens_map
    assert len(found) == len(wanted)
    for text in TEXTS:
        ids = found.encode(text)
        assert found.decode(ids) == wanted.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def pairs(transformers, tmp_path_factory):
    """Tokenizers here and in transformers, of the same files."""
    made = []
    for number, (named, make, more) in enumerate(CLASSES):
        if make is unigram:
            continue
        at = tmp_path_factory.mktemp(f"made{number}")
        entries = NAMED | more | ({} if named is None else {"tokenizer_class": named})
        made.append(alike(transformers, folder(at, with_step(make(), "begin"), entries)))
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(st.sampled_from([BEGIN, END, " ", "the", "th", " a", "\n"]) | st.text(max_size=5)).map("".join))
def test_any_text_has_the_ids_of_transformers(pairs, text):
    for wanted, found in pairs:
        assert found.encode(text) == wanted.encode(text), type(wanted).__name__


def test_special_tokens_may_be_texts_or_tables_with_their_content(tmp_path):
    """transformers itself wants `__type` in such a table since version 5; files of earlier versions lack it."""
    for begin in (BEGIN, {"content": BEGIN}, token(BEGIN)):
        found = tokenizer(folder(tmp_path, without_special(), {"bos_token": begin, "eos_token": {"content": END}}))
        assert (found.begin, found.ends, found.named) == (260, {261}, NAMED)
        assert found.encode(f"{BEGIN}the{END}") == [260, 257, 261]


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ({"added_tokens_decoder": ["<x>"]}, "added_tokens_decoder of tokenizer_config.json must be an object"),
        (
            {"added_tokens_decoder": {"x": {}}},
            "added_tokens_decoder of tokenizer_config.json must be an object",
        ),
        (
            {"added_tokens_decoder": {"1": {"text": "<x>"}}},
            "tokenizer_config.json describes a token as {'text': '<x>'}",
        ),
        ({"extra_special_tokens": [3]}, "tokenizer_config.json describes a token as 3; it must be a string, or a"),
        ({"pad_token": [3]}, r"pad_token of tokenizer_config.json is \[3\]; it must be the text of a token"),
    ],
)
def test_faulty_special_tokens_are_one_message(entries, fault, tmp_path):
    with pytest.raises(CheckpointError, match=fault):
        tokenizer(folder(tmp_path, byte_level(), entries))
