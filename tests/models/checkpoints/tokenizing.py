"""Small tokenizers of the kinds in public checkpoints, and folders with the other files of such checkpoints."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

BEGIN, END = "<s>", "</s>"


def byte_level(special: tuple[str, ...] = (BEGIN, END)) -> tokenizers.Tokenizer:
    """Return a tokenizer like GPT-2's, Llama 3's and Qwen's: merged bytes, spaces at the beginning of words."""
    vocabulary = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the")]
    vocabulary |= {a + b: 256 + at for at, (a, b) in enumerate(merges)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special])
    return backend


def pieces(special: tuple[str, ...] = ("<unk>", BEGIN, END)) -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's: pieces with ▁ for spaces, a space at the first word, bytes for the rest."""
    named = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    named += ["th", "the", "▁the", "▁a"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    vocabulary = {piece: at for at, piece in enumerate(named)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=special[0])
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([*special])
    return backend


def gemma() -> tokenizers.Tokenizer:
    """Return a tokenizer like Gemma's: pieces with ▁ for spaces, none before the first word."""
    backend = pieces(("<unk>", BEGIN, END, "<pad>", "<mask>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def unigram() -> tokenizers.Tokenizer:
    """Return a tokenizer like T5's: the likeliest pieces, with ▁ for spaces."""
    scores = [("<pad>", 0.0), (END, 0.0), ("<unk>", 0.0), ("▁", -2.0), ("the", -1.0), ("▁a", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram([*scores, *((letter, -3.0) for letter in "theand")], unk_id=2))
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<pad>", END, "<unk>"])
    return backend


#: The last step of tokenizer.json, by the tokens that it adds.
STEPS = {"nothing": "$A", "begin": f"{BEGIN} $A", "end": f"$A {END}", "both": f"{BEGIN} $A {END}"}


def with_step(backend: tokenizers.Tokenizer, adds: str | None) -> tokenizers.Tokenizer:
    """Give a tokenizer one of `STEPS`, a step that adds nothing and moves offsets ("bytes"), or none."""
    if adds == "bytes":
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    elif adds is not None:
        numbered = [(token, backend.token_to_id(token)) for token in (BEGIN, END) if backend.token_to_id(token)]
        backend.post_processor = processors.TemplateProcessing(single=STEPS[adds], special_tokens=numbered)
    return backend


def folder(at: Path, backend: tokenizers.Tokenizer, settings: dict[str, Any], **files: Any) -> Path:
    """Write a tokenizer and the files beside it to a folder; `config={...}` is config.json."""
    at.mkdir(exist_ok=True)
    backend.save(str(at / "tokenizer.json"))
    for name, entries in (files | {"tokenizer_config": settings}).items():
        (at / f"{name}.json").write_text(json.dumps(entries), encoding="utf-8")
    return at
