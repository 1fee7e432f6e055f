"""Conversion between text and token ids with a checkpoint's tokenizer.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from gspmd.reading import ReadError, folder_fault, read_text

from . import chat, special, steps
from .files import CheckpointError

FILE, GENERATION = "tokenizer.json", "generation_config.json"


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with the ids that end a text.

    Attributes:
        ends: the ids of end-of-text tokens.
        begin: the id of the beginning-of-text token, or None if there is none.
        settings: the entries of tokenizer_config.json.
        named: the special tokens by name, such as bos_token.
        templates: the chat templates, by name.

    Args:
        backend: the tokenizer of the library. Its truncation and padding are turned off, as they are in transformers
            unless the caller asks for them.
        ends: the ids of end-of-text tokens.
        begin: the id of the beginning-of-text token.
        settings: the entries of tokenizer_config.json.
        named: the special tokens by name, such as bos_token.
        templates: the chat templates, by name. The template "default" is used unless the caller names another one.

    Example:
        >>> of_bytes = byte_tokenizer()
        >>> of_bytes.encode("é!"), of_bytes.decode([195, 169, 33])
        ([195, 169, 33], 'é!')
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        ends: Iterable[int] = (),
        begin: int | None = None,
        settings: Mapping[str, Any] | None = None,
        named: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.ends, self.begin, self.settings = backend, frozenset(ends), begin, dict(settings or {})
        self.named, self.templates = dict(named or {}), dict(templates or {})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: any text.
            special: whether to add the tokens that begin and end a text, if the tokenizer has such a step.
        """
        return self.backend.encode(text, add_special_tokens=special).ids

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], *, template: str = "", prompt: bool = True, **variables: Any
    ) -> str:
        """Return the text that the checkpoint's chat template makes of a chat; see `chat` for the arguments and errors.

        Example:
            >>> simple = "{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}<assistant>"
            >>> of_bytes = Tokenizer(byte_tokenizer().backend, templates={"default": simple})
            >>> of_bytes.chat_text([{"role": "user", "content": "Hi!"}])
            '<user>Hi!<assistant>'
        """
        doing = "cannot render a chat:"
        if not template and variables.get("tools") is not None and "tool_use" in self.templates:
            template = "tool_use"
        name = chat.chosen(self.templates, template, doing)
        given = {"tools": None, "documents": None} | self.named | variables
        given |= {"messages": chat.checked(messages, doing), "add_generation_prompt": prompt}
        return chat.render(self.templates[name], name, given, doing)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, template: str = "", prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Return the ids of a chat, like transformers' `apply_chat_template`; the template writes all special tokens.

        The template is a program that comes with the checkpoint. It runs in jinja2's sandbox, in a separate process
        with limits on time, memory and output.

        Args:
            messages: the turns, such as `{"role": "user", "content": "Hi!"}`.
            template: the name of the template, if the checkpoint has several. The default is "tool_use" if there is
                such a template and `tools` are given, otherwise "default".
            prompt: whether the text ends with the beginning of an answer, which the model continues.
            **variables: further variables for the template, such as `tools` (a list of JSON schemas) or
                `enable_thinking`.

        Raises:
            CheckpointError (a ValueError): there is no template; or the template is faulty, refuses the messages or
                exceeds a limit.
        """
        return self.encode(self.chat_text(messages, template=template, prompt=prompt, **variables), special=False)

    def source(self, text: str) -> list[int]:
        """Return the ids of a text for an encoder, followed by an end-of-text token if there is one, as in training.

        Example:
            >>> byte_tokenizer(358).source("f"), byte_tokenizer().source("f")
            ([102, 256], [102])
        """
        ids = self.encode(text)
        ended = not self.ends or (ids and ids[-1] in self.ends)
        return ids if ended else [*ids, min(self.ends)]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids; bytes that are not valid UTF-8 become U+FFFD.

        Args:
            tokens: the ids.
            special: whether to include special tokens, such as the end-of-text token.
        """
        return self.backend.decode(list(tokens), skip_special_tokens=not special)

    def stream(self) -> TextStream:
        """Return a decoder that takes one id at a time, to show a text while it is generated."""
        return TextStream(self)

    def __len__(self) -> int:
        """Return the number of ids, including the ids of added tokens."""
        return self.backend.get_vocab_size()

    def __contains__(self, token: int) -> bool:
        """Return whether a token has this id. A model's table may have more rows than there are tokens."""
        return self.backend.id_to_token(int(token)) is not None

    def save(self, directory: str | os.PathLike) -> None:
        """Write tokenizer.json and tokenizer_config.json to a folder."""
        self.backend.save(str(Path(directory) / FILE))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | self.settings | chat.written(self.templates)
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (Path(directory) / "tokenizer_config.json").write_text(text, encoding="utf-8")


class TextStream:
    """A decoder that takes ids one at a time; its pieces, joined, are the text of all ids.

    A character whose UTF-8 bytes are spread over several tokens is returned with the last of these tokens.

    Example:
        >>> stream = byte_tokenizer().stream()
        >>> [stream.add(token) for token in "né".encode()], stream.end()
        (['n', '', 'é'], '')
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""
        self._decoder = decoders.DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """Add an id, and return the text that this id completes, which is empty in the middle of a character."""
        self._tokens.append(int(token))
        piece = self._decoder.step(self._tokenizer.backend, int(token)) or ""
        self._shown += piece
        return piece

    def end(self) -> str:
        """Return the rest of the text, with U+FFFD for the bytes of an incomplete character."""
        return self._tokenizer.decode(self._tokens)[len(self._shown) :]


def tokenizer(directory: str | os.PathLike) -> Tokenizer:
    """Read the tokenizer of a checkpoint; it gives the same ids as transformers' AutoTokenizer.

    The ids that end a text come from the first of three sources that has such ids: generation_config.json, config.json,
    and the entry `eos_token` of tokenizer_config.json. The id that begins a text is found in the same way.

    The last step of tokenizer.json decides which tokens `encode` adds to a text. As in transformers since version 5,
    add_bos_token and add_eos_token of tokenizer_config.json are ignored. The classes of GPT-NeoX and T5 are exceptions,
    because they decide by themselves which tokens are added: GPT-NeoX adds no token, and T5 adds an end-of-text token.
    Some classes also decide how a text is split (`steps.rebuild`). Tokens that tokenizer_config.json names or describes
    are added if tokenizer.json does not have them.

    Args:
        directory: the checkpoint's folder, with tokenizer.json; or the path of such a file under any name.

    Raises:
        CheckpointError (a ValueError): tokenizer.json is missing; or this file or another file of the tokenizer cannot
            be read.
    """
    folder, file = Path(directory), FILE
    doing = f"cannot read the tokenizer of checkpoint {str(folder)!r}:"
    if os.path.isfile(folder) or (folder.suffix == ".json" and not os.path.isdir(folder)):
        folder, file, doing = folder.parent, folder.name, f"cannot read the tokenizer {str(folder)!r}:"
    if fault := folder_fault(folder):
        raise CheckpointError(doing, [f"{fault}. Name the folder of a checkpoint, or its {FILE}."])
    if not os.path.lexists(folder / file):
        instead = _instead(folder) if file == FILE else f"give the path of a {FILE}."
        raise CheckpointError(doing, [f"{file} is missing; {instead}"])
    text, backend = _backend(folder / file, doing)
    settings = special.read_settings(folder, doing)
    files = {name: special.optional(folder / name, doing) for name in (GENERATION, "config.json")}
    made_by = special.class_of(settings, files["config.json"], text)
    named = special.texts(settings, made_by, doing)
    special.add(backend, settings, doing)
    steps.rebuild(backend, made_by, settings, named)
    backend.encode_special_tokens = settings.get("split_special_tokens") is True
    ends, begins = (_ids(kind, files, named, backend, doing) for kind in ("eos", "bos"))
    templates = chat.read_templates(folder, settings, doing)
    return Tokenizer(backend, ends, begins[0] if begins else None, settings, named, templates)


def _instead(folder: Path) -> str:
    """Return the remedy for a folder that has no tokenizer.json."""
    known = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.bpe")
    found = [name for name in known if os.path.lexists(folder / name)]
    if not found:
        return "download it with the rest of the checkpoint."
    there = f"there is {' and '.join(found)}"
    if {"sentencepiece.bpe.model", "vocab.json"} <= {*found}:
        return (
            f"{there}, the files of M2M-100, which transformers does not convert; encode texts with its "
            "M2M100Tokenizer, and call gspmd_models.Generator with the ids."
        )
    return f"{there}; convert it: transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes {FILE}."


def _ids(
    kind: str,
    files: Mapping[str, Mapping[str, Any]],
    named: Mapping[str, str],
    backend: tokenizers.Tokenizer,
    doing: str,
) -> list[int]:
    """Return the ids of end-of-text ("eos") or beginning-of-text ("bos") tokens.

    The ids come from the first file that has them. If no file has them, the id of the token in `named` is used.
    """
    key = f"{kind}_token_id"
    for file, entries in files.items():
        found = entries.get(key)
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in ids):
                fault = f"{key} of {file} is {found!r:.80}; it must be a token's id, or a list of ids."
                raise CheckpointError(doing, [fault])
            return ids
    token = named.get(f"{kind}_token")
    found = None if token is None else backend.token_to_id(token)
    return [] if found is None else [found]


def _backend(path: Path, doing: str) -> tuple[str, tokenizers.Tokenizer]:
    """Read a tokenizer's file, and parse its text with the library.

    The library does not open the file itself, because it would wait forever if the file were a FIFO.
    """
    try:
        text = read_text(path)
        return text, tokenizers.Tokenizer.from_str(text)
    except ReadError as error:
        fault = f"{path.name} cannot be read: {error}."
    except BaseException as error:  # the library's panics are not Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        fault = f"{path.name} cannot be read: {error!s:.500}."
    raise CheckpointError(doing, [fault])


def byte_tokenizer(vocabulary: int = 256) -> Tokenizer:
    """Return the tokenizer of byte-level models: each id is a byte of the text's UTF-8.

    Args:
        vocabulary: number of ids. A number above 256 is for an encoder–decoder on bytes. Id 256 then ends every text,
            id 257 begins every text of the decoder, and the last ids, counted down, are the sentinels `<extra_id_0>`,
            `<extra_id_1>` and so on.

    Example:
        >>> byte_tokenizer().encode("def f"), len(byte_tokenizer())
        ([100, 101, 102, 32, 102], 256)
        >>> byte_tokenizer(358).encode("f(<extra_id_0>)")
        [102, 40, 357, 41, 256]
    """
    # The library represents bytes as characters: printable ones as themselves, the others as characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if vocabulary <= 256:
        return Tokenizer(backend)
    # Sentinels are not special tokens, so that a decoded text shows them.
    named = ["</s>", "<s>", *(f"<extra_id_{number}>" for number in range(vocabulary - 259, -1, -1))]
    backend.add_special_tokens(named[:2][: vocabulary - 256])
    backend.add_tokens(named[2:])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 256)])
    return Tokenizer(backend, ends=[256])


def keep_tokenizer(folder: Path, tokenizer: Tokenizer, checkpoint: str) -> None:
    """Save a run's tokenizer in the run's folder, with config.json and the generation settings of its checkpoint.

    `gspmd generate` and `gspmd export` read these files.

    Args:
        folder: the folder in which the files are saved. It is created if needed.
        tokenizer: the tokenizer.
        checkpoint: the folder of the checkpoint from which training started; empty if there is none.
    """
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    ids = {"eos_token_id": sorted(tokenizer.ends) or None, "bos_token_id": tokenizer.begin}
    kept = folder / GENERATION
    if checkpoint and not kept.exists():  # a resume may not have the checkpoint any more
        entries = special.optional(Path(checkpoint) / GENERATION, f"cannot read checkpoint {checkpoint!r}:")
    else:
        entries = special.optional(kept, f"cannot read the tokenizer of the run {str(folder.parent)!r}:")
    kept.write_text(json.dumps(entries | ids) + "\n", encoding="utf-8")
    if checkpoint and not (folder / "config.json").exists():
        shutil.copyfile(Path(checkpoint) / "config.json", folder / "config.json")
