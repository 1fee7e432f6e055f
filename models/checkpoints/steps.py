"""The processing steps of tokenizers whose class in transformers does not read the steps from tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

# The contractions, words, digits and runs of other characters into which Qwen splits texts.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = ("GPT2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "Qwen2Tokenizer")
_PIECES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def rebuild(backend: tokenizers.Tokenizer, made_by: str, settings: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Replace the processing steps of tokenizer.json by the steps that the tokenizer's class in transformers builds.

    Since version 5 of transformers, such a class reads the vocabulary, the merges, the added tokens and the last step
    from tokenizer.json, but decides by itself how a text is normalized and split. Some files of Llama 2 and its
    descendants contain other steps. With these steps, a space before a text or after a special token would get a
    different id. The classes of GPT-NeoX and T5 also decide which tokens begin and end a text.

    Args:
        backend: the tokenizer of the library, with the steps of tokenizer.json.
        made_by: the name of the class, from `special.class_of`. Classes that read all steps leave the tokenizer
            unchanged.
        settings: the entries of tokenizer_config.json.
        named: the special tokens by name.
    """
    model, prefix = backend.model, settings.get("add_prefix_space")
    if isinstance(model, models.BPE) and made_by in (*_BYTES, *_PIECES):
        of_bytes, unknown = made_by in _BYTES, named.get("unk_token", "")
        model.dropout, model.ignore_merges = None, False
        model.fuse_unk, model.byte_fallback = not of_bytes, not of_bytes
        if of_bytes or made_by == "LlamaTokenizer" or backend.token_to_id(unknown) is None:
            model.unk_token = None
        else:
            model.unk_token = unknown
        backend.normalizer = _NORMALIZERS.get(made_by)
        if of_bytes:
            backend.pre_tokenizer, backend.decoder = _bytes(made_by, prefix is True), decoders.ByteLevel()
        else:
            backend.pre_tokenizer = _pieces(made_by, prefix is not False, settings.get("legacy") is True)
            parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            strips = made_by == "CodeLlamaTokenizer" or (made_by == "LlamaTokenizer" and prefix is not False)
            backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    if made_by == "GPTNeoXTokenizer":
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    end = named.get("eos_token", "")
    number = backend.token_to_id(end)
    if isinstance(model, models.Unigram) and made_by == "T5Tokenizer" and number is not None:
        split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
        backend.pre_tokenizer = pre_tokenizers.Sequence(split)
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
        backend.post_processor = processors.TemplateProcessing(single=["$A", end], special_tokens=[(end, number)])


_NORMALIZERS = {
    "GemmaTokenizer": normalizers.Replace(" ", "▁"),
    **dict.fromkeys(("Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer"), normalizers.NFC()),
}


def _bytes(made_by: str, prefix: bool) -> pre_tokenizers.PreTokenizer:
    """Return a splitter of texts into words of bytes; if `prefix` is set, a space is first put before the text."""
    if made_by == "Qwen2Tokenizer":
        split = pre_tokenizers.Split(Regex(_QWEN), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if made_by != "CohereTokenizer":
        return words
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


def _pieces(made_by: str, prefix: bool, legacy: bool) -> pre_tokenizers.PreTokenizer:
    """Return a splitter of texts into pieces in which ▁ stands for spaces.

    If `prefix` is set, the first piece begins with ▁. For LlamaTokenizer in legacy files, every piece after a special
    token then also begins with ▁. The splitter of GemmaTokenizer is an exception: it only splits texts after spaces.
    """
    if made_by == "GemmaTokenizer":
        return pre_tokenizers.Split(" ", "merged_with_previous")
    scheme = "always" if legacy and made_by == "LlamaTokenizer" else "first"
    return pre_tokenizers.Metaspace(prepend_scheme=scheme if prefix else "never", split=False)
