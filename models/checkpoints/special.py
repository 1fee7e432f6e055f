"""Special tokens named in files other than tokenizer.json, and the class that transformers uses for a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from .files import CheckpointError, read_json

CONFIG = "tokenizer_config.json"

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The entries of tokenizer_config.json that name a special token, in the order in which missing tokens are added."""

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

_GENERIC = "TokenizersBackend"
"""The class of transformers that reads a tokenizer from tokenizer.json alone."""

_END = "<|endoftext|>"

#: Class in transformers -> its special tokens, unless tokenizer_config.json names others or null.
_OF_CLASS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "CodeLlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>", "sep_token": "<SEP>",
        "pad_token": "<PAD>", "cls_token": "<CLS>", "mask_token": "<MASK_TOKEN>",
    },
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}  # fmt: skip

#: model_type in config.json -> the tokenizer class that transformers has for it; other families have none.
_OF_FAMILY = {
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "phi", "starcoder2", "opt"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("t5", "mt5", "switch_transformers"), "T5Tokenizer"),
    **dict.fromkeys(("mistral", "mixtral", "ministral", "phi3", "phimoe", "stablelm"), _GENERIC),
    **dict.fromkeys(("granite", "granitemoe", "glm", "glm4", "glm4_moe", "gpt_bigcode"), _GENERIC),
    **dict.fromkeys(("olmo2", "olmo3", "nemotron"), _GENERIC),
}

#: Families whose published tokenizer_config.json names a wrong class; that in `_OF_FAMILY` is used instead.
_MISNAMED = {"qwen2", "phi3", "phimoe", "nemotron"}


def read_settings(folder: Path, doing: str) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json, and of files that older versions of transformers wrote.

    These files are special_tokens_map.json and added_tokens.json. They are read only if tokenizer_config.json has no
    `added_tokens_decoder`.

    Raises:
        CheckpointError: a file cannot be read.
    """
    settings = optional(folder / CONFIG, doing)
    if "added_tokens_decoder" in settings:
        return settings
    settings |= optional(folder / "special_tokens_map.json", doing)
    added = {str(number): {"content": token} for token, number in optional(folder / "added_tokens.json", doing).items()}
    return settings | {"added_tokens_decoder": added} if added else settings


def optional(path: Path, doing: str) -> dict[str, Any]:
    """Return the entries of a JSON file; empty if there is no such file."""
    return read_json(path, doing) if os.path.lexists(path) else {}


def class_of(settings: Mapping[str, Any], config: Mapping[str, Any], tokenizer: str) -> str:
    """Return the name of the class that transformers' AutoTokenizer uses for a checkpoint.

    Args:
        settings: the entries of tokenizer_config.json.
        config: the entries of config.json.
        tokenizer: the text of tokenizer.json.
    """
    named = str(settings.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    family = config.get("model_type")
    registered = _OF_FAMILY.get(family, "") if isinstance(family, str) else ""
    if named == "LlamaTokenizer" and '"ByteLevel"' in tokenizer and family not in _MISNAMED:
        return _GENERIC  # as in Llama 3; the class of Llama 2 has pieces with ▁ for spaces
    if named and registered and named != registered:
        chosen = registered if registered == _GENERIC or family in _MISNAMED else named
        return chosen if chosen in _OF_CLASS else _GENERIC
    return named or registered or _GENERIC


def texts(settings: Mapping[str, Any], made_by: str, doing: str) -> dict[str, str]:
    """Return the special tokens by name, such as bos_token; tokens that the settings lack come from the class.

    Raises:
        CheckpointError: an entry is neither a token's text nor a table with its `content`.
    """
    given = {name: settings[name] for name in NAMED if name in settings}
    more = settings.get("extra_special_tokens")  # a list names no tokens
    own = {name: token for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)}
    found = _OF_CLASS.get(made_by, {}) | given | own | (more if isinstance(more, dict) else {})
    contents = {name: _content(name, token, doing) for name, token in found.items()}
    return {name: content for name, content in contents.items() if content is not None}


def _content(name: str, token: Any, doing: str) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is None or isinstance(text, str):
        return text
    raise CheckpointError(doing, [f"{name} of {CONFIG} is {token!r:.80}; it must be the text of a token."])


def add(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], doing: str) -> None:
    """Add the tokens that the settings describe or name to a tokenizer, if the tokenizer does not have them.

    A token that is already in the vocabulary keeps its id, and is afterwards recognized in a text as a whole.

    Raises:
        CheckpointError: a description is faulty.
    """
    described = settings.get("added_tokens_decoder") or {}
    if not isinstance(described, dict) or not all(number.isdecimal() for number in described):
        raise CheckpointError(doing, [f"added_tokens_decoder of {CONFIG} must be an object from ids to tokens."])
    tokens = [_token(described[number], False, doing) for number in sorted(described, key=int)]
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    by_name = texts({name: token for name, token in settings.items() if name != "extra_special_tokens"}, "", doing)
    special = [settings.get(name, text) for name, text in by_name.items()]
    special += [*(more.values() if isinstance(more, dict) else more if isinstance(more, list) else [])]
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
    for token in (_token(each, True, doing) for each in special):
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    backend.add_tokens(tokens)


def _token(described: Any, special: bool, doing: str) -> tokenizers.AddedToken:
    entries = described if isinstance(described, dict) else {"content": described}
    flags = {name: entries[name] for name in _FLAGS if name in entries}
    if not isinstance(entries.get("content"), str) or not all(isinstance(flag, bool) for flag in flags.values()):
        fault = f"{CONFIG} describes a token as {described!r:.120}; it must be a string, or a table with its content."
        raise CheckpointError(doing, [fault])
    return tokenizers.AddedToken(entries["content"], **(flags | ({"special": True} if special else {})))
