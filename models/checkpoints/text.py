"""Text to token ids and back, by a checkpoint's tokenizer.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gspmd.reading import ReadError, read_text

from .files import CheckpointError, read_json

FILE = "tokenizer.json"


class Tokenizer:
    """A tokenizer of the library `tokenizers`, with the ids that end a text.

    Attributes:
        ends: ids of end-of-text tokens.
        begin: id of the beginning-of-text token; None if none is named.
        settings: tokenizer_config.json.

    Args:
        backend: the library's tokenizer. Its truncation and padding are turned off: a prompt is neither cut nor
            filled up, as in transformers, where the caller asks for either.
        ends: ids of end-of-text tokens.
        begin: id of the beginning-of-text token.
        settings: what tokenizer_config.json says.

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
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.ends, self.begin, self.settings = backend, frozenset(ends), begin, dict(settings or {})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: any text.
            special: whether to add what tokenizer.json adds around a text, such as a beginning-of-text token.
        """
        return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            tokens: ids.
            special: whether to show special tokens, such as that of the end of a text.
        """
        return self.backend.decode(list(tokens), skip_special_tokens=not special)

    def stream(self) -> TextStream:
        """Return what decodes ids one after another, for text that is shown while it is generated."""
        return TextStream(self)

    def __len__(self) -> int:
        """Number of ids, with those of added tokens."""
        return self.backend.get_vocab_size()

    def save(self, directory: str | os.PathLike) -> None:
        """Write tokenizer.json and tokenizer_config.json to a folder."""
        self.backend.save(str(Path(directory) / FILE))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | self.settings
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (Path(directory) / "tokenizer_config.json").write_text(text, encoding="utf-8")


class TextStream:
    """Ids to text, one at a time: the pieces joined are the text of all ids.

    A character whose UTF-8 bytes are spread over several tokens comes with the last of them.

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
        """Return the text that another id completes; empty in the middle of a character."""
        self._tokens.append(int(token))
        piece = self._decoder.step(self._tokenizer.backend, int(token)) or ""
        self._shown += piece
        return piece

    def end(self) -> str:
        """Return what was held back: U+FFFD for bytes of a character that was not completed."""
        return self._tokenizer.decode(self._tokens)[len(self._shown) :]


def tokenizer(directory: str | os.PathLike) -> Tokenizer:
    """Read a checkpoint's tokenizer.

    The ids that end a text are those of generation_config.json, else of config.json, else the `eos_token` of
    tokenizer_config.json; that of its beginning likewise. Whether a prompt begins with it is for tokenizer.json to say.

    Args:
        directory: the checkpoint's folder, with tokenizer.json; or the path of such a file, of any name.

    Raises:
        CheckpointError: a ValueError: tokenizer.json is missing or cannot be read.
    """
    folder, file = Path(directory), FILE
    doing = f"cannot read the tokenizer of checkpoint {str(folder)!r}:"
    if os.path.isfile(folder) or (folder.suffix == ".json" and not os.path.isdir(folder)):
        folder, file, doing = folder.parent, folder.name, f"cannot read the tokenizer {str(folder)!r}:"
    if not os.path.lexists(folder / file):
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.bpe") if os.path.lexists(folder / name)]
        remedy = (
            f"there is {' and '.join(others)}; convert it: transformers' AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(DIR) writes tokenizer.json."
            if others
            else "take it from where the checkpoint comes from."
        )
        raise CheckpointError(doing, [f"{file} is missing; {remedy}"])
    backend = _backend(folder / file, doing)
    settings = _optional(folder / "tokenizer_config.json", doing)
    named = [(name, _optional(folder / name, doing)) for name in ("generation_config.json", "config.json")]
    ends, begins = (_ids(kind, named, settings, backend, doing) for kind in ("eos", "bos"))
    return Tokenizer(backend, ends, begins[0] if begins else None, settings)


def _ids(
    kind: str,
    named: Sequence[tuple[str, Mapping[str, Any]]],
    settings: Mapping[str, Any],
    backend: tokenizers.Tokenizer,
    doing: str,
) -> list[int]:
    """The ids of end-of-text ("eos") or beginning-of-text ("bos") tokens, of the first file that names some."""
    key = f"{kind}_token_id"
    for file, entries in named:
        found = entries.get(key)
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in ids):
                fault = f"{key} of {file} is {found!r:.80}; it must be a token's id, or a list of ids."
                raise CheckpointError(doing, [fault])
            return ids
    token = settings.get(f"{kind}_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        fault = f"{kind}_token of tokenizer_config.json is {token!r:.80}; it must be a token's text."
        raise CheckpointError(doing, [fault])
    found = None if token is None else backend.token_to_id(token)
    return [] if found is None else [found]


def _backend(path: Path, doing: str) -> tokenizers.Tokenizer:
    """Read a file by the library, which is handed its text: it would wait for ever for a FIFO."""
    try:
        return tokenizers.Tokenizer.from_str(read_text(path))
    except ReadError as error:
        fault = f"{path.name} cannot be read: {error}."
    except BaseException as error:  # the library raises plain Exceptions, and panics, which are none
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        fault = f"{path.name} cannot be read: {error!s:.500}."
    raise CheckpointError(doing, [fault])


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of models on bytes: an id is a byte of the text's UTF-8.

    Example:
        >>> byte_tokenizer().encode("def f"), len(byte_tokenizer())
        ([100, 101, 102, 32, 102], 256)
    """
    # The library writes bytes as characters: a printable one as itself, the others as those from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def _optional(path: Path, doing: str) -> dict[str, Any]:
    return read_json(path, doing) if os.path.lexists(path) else {}


def keep_tokenizer(folder: Path, tokenizer: Tokenizer, checkpoint: str) -> None:
    """Keep the tokenizer with the run, for `gspmd generate` and `gspmd export`, and the checkpoint's config.json."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    ids = {"eos_token_id": sorted(tokenizer.ends) or None, "bos_token_id": tokenizer.begin}
    (folder / "generation_config.json").write_text(json.dumps(ids) + "\n", encoding="utf-8")
    if checkpoint and not (folder / "config.json").exists():
        shutil.copyfile(Path(checkpoint) / "config.json", folder / "config.json")
