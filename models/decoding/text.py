"""Incremental decoding of tokens to text, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Text:
    """A text that is shown while it is generated.

    Args:
        tokenizer: a tokenizer whose `stream` decodes one token at a time (`gspmd_models.checkpoints.Tokenizer`).
        prompt: the tokens before the text, which decide whether it begins with a space.
        stop: strings that end the text; they are not shown.

    Attributes:
        ended: whether a stop string was found, or `end` was called.

    Example:
        >>> from gspmd_models.checkpoints import byte_tokenizer
        >>> text = Text(byte_tokenizer(), b"def", stop=["\\n\\n"])
        >>> text.add(b" f():\\n"), text.add(b" x\\n\\ny"), text.ended
        (' f():', '\\n x', True)
    """

    def __init__(self, tokenizer: Any, prompt: Iterable[int] = (), stop: Sequence[str] = ()):
        self._stream, self._stop, self._held = tokenizer.stream(), tuple(stop), ""
        self.ended = False
        for token in prompt:
            self._stream.add(token)

    def add(self, tokens: Iterable[int]) -> str:
        """Add tokens, and return the text that can be shown; a suffix that may begin a stop string is held back."""
        return "" if self.ended else self._shown("".join(map(self._stream.add, tokens)))

    def end(self) -> str:
        """End the text, and return the part that was held back."""
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
