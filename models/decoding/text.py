"""The conversion of tokens to text while they are generated, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Text:
    """A text that is shown while it is being generated.

    Args:
        tokenizer: a tokenizer (`gspmd_models.checkpoints.Tokenizer`). Its `stream` decodes one token at a time, and its
            `in` tells whether an id has a token.
        prompt: the tokens before the text. They decide whether the text begins with a space.
        stop: the strings that end the text. They are not shown.

    Attributes:
        ended: whether the text is complete, by a stop string, an id without a token, or a call of `end`.
        unknown: the id that ended the text because the tokenizer has no token for this id, or None. The table of a
            model may have more rows than its tokenizer has tokens, and the model may draw an id of such a row.

    Example:
        >>> from gspmd_models.checkpoints import byte_tokenizer
        >>> text = Text(byte_tokenizer(), b"def", stop=["\\n\\n"])
        >>> text.add(b" f():\\n"), text.add(b" x\\n\\ny"), text.ended
        (' f():', '\\n x', True)
        >>> text = Text(byte_tokenizer())
        >>> text.add([72, 105, 300, 33]), text.ended, text.unknown
        ('Hi', True, 300)
    """

    def __init__(self, tokenizer: Any, prompt: Iterable[int] = (), stop: Sequence[str] = ()):
        self._tokenizer, self._stream, self._stop, self._held = tokenizer, tokenizer.stream(), tuple(stop), ""
        self.ended = False
        self.unknown: int | None = None
        for token in prompt:
            self._stream.add(token)

    def add(self, tokens: Iterable[int]) -> str:
        """Add tokens, and return the text that can be shown.

        The end of the text is held back as long as it may be the beginning of a stop string.
        """
        if self.ended:
            return ""
        pieces, unknown = [], None
        for token in tokens:
            if token not in self._tokenizer:
                unknown = int(token)
                break
            pieces.append(self._stream.add(token))
        shown = self._shown("".join(pieces))
        if self.ended or unknown is None:
            return shown
        self.unknown = unknown
        return shown + self.end()

    def end(self) -> str:
        """End the text, and return the part of the text that was held back."""
        if self.ended:
            return ""
        rest = self._shown(self._stream.end())
        rest, self.ended, self._held = rest + self._held, True, ""
        return rest

    def _shown(self, new: str) -> str:
        whole = self._held + new
        ends = [at for at in map(whole.find, self._stop) if at >= 0]
        if ends:
            self.ended, self._held = True, ""
            return whole[: min(ends)]
        sizes = (size for stop in self._stop for size in range(1, len(stop)) if whole.endswith(stop[:size]))
        kept = len(whole) - max(sizes, default=0)
        self._held = whole[kept:]
        return whole[:kept]
