"""Encodings of texts as tokens: bytes as they are, or the ids of a tokenizer."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Usual names of tokens that mark the end of a text.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


@dataclass(frozen=True)
class Encoding:
    """An encoding of texts as tokens: the tokens around texts, and a function that encodes pieces of texts.

    Attributes:
        vocabulary: number of ids.
        begin: ids at the beginning of every text.
        between: ids between two texts.
        end: the id that ends a source or a target of an encoder–decoder; None if there is no such token.
        digest: a string that identifies the tokenizer; empty for bytes.
        encode: a function from a list of pieces in UTF-8 to an array of ids for each piece.
    """

    vocabulary: int
    begin: tuple[int, ...]
    between: tuple[int, ...]
    end: int | None
    digest: str
    encode: Callable[[Sequence[bytes]], list[np.ndarray]]

    def dtype(self, *, masked: bool = False) -> np.dtype:
        """Return the smallest integer type that holds the ids, little-endian on every machine.

        Args:
            masked: whether the type also holds the complements `~t` of ids. They are below 0, and stand for tokens that
                are not predicted.
        """
        return np.min_scalar_type(-self.vocabulary if masked else self.vocabulary - 1).newbyteorder("<")


def of_bytes() -> Encoding:
    """Return the encoding whose tokens are the bytes of a text.

    Text in ASCII, Latin or UTF-8 does not contain the byte 0, which therefore separates texts. A source or a target
    ends with the id 256, one above the largest byte.

    >>> of_bytes().encode([b"ab"])[0].tolist(), of_bytes().dtype().name, of_bytes().dtype(masked=True).name
    ([97, 98], 'uint8', 'int16')
    """
    return Encoding(256, (), (0,), 256, "", lambda pieces: [np.frombuffer(piece, np.uint8) for piece in pieces])


def of_tokenizer(tokenizer: Any) -> Encoding:
    """Return the encoding of a tokenizer, which encodes pieces on all cores.

    Every text begins with the tokens that the tokenizer puts before a text, such as a beginning-of-text token. Texts
    are separated by the tokens that the tokenizer puts after a text. If it puts none there, texts are separated by the
    first of the following that exists: the tokenizer's first end-of-text token, a special token with a usual name for
    the end of a text, or a line feed.

    Args:
        tokenizer: an object such as `gspmd_models.checkpoints.Tokenizer`. Its attribute `backend` is a tokenizer of the
            library `tokenizers`, and its attribute `ends` has the ids that end a text.
    """
    # Truncation and padding are turned off in a copy.
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.no_truncation()
    backend.no_padding()
    vocabulary = number_of_ids(backend)
    dtype = np.min_scalar_type(vocabulary - 1)
    before, after = _around(backend)
    ends = tuple(sorted(tokenizer.ends or usual_ends(backend))[:1])
    between = after or ends or tuple(backend.encode("\n", add_special_tokens=False).ids)

    def encode(pieces: Sequence[bytes]) -> list[np.ndarray]:
        texts = [piece.decode() for piece in pieces]
        return [np.array(each.ids, dtype) for each in backend.encode_batch_fast(texts, add_special_tokens=False)]

    around = f"{before} {between}"
    digest = hashlib.sha256((backend.to_str() + around).encode()).hexdigest()[:16]
    end = after[-1] if after else next(iter(ends), None)
    return Encoding(vocabulary, before, between, end, digest, encode)


def usual_ends(backend: Any) -> frozenset[int]:
    """Return the id of the special token with a usual name for the end of a text, as a set of at most one id.

    The set is used for a tokenizer that declares no end.
    """
    special = {token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    return frozenset([special[name] for name in _ENDS if name in special][:1])


def number_of_ids(backend: Any) -> int:
    """Return one more than the largest id of a tokenizer of the library `tokenizers`, whose ids may have gaps."""
    return 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=0)


def _around(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer puts before and after a text."""
    plain, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return tuple(whole[:at]), tuple(whole[at + len(plain) :])
    return (), ()
