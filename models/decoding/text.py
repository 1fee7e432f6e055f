"""Tokens to text while they come, up to a string that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Text:
    """One text that is shown while it is generated.

    Args:
        tokenizer: with a `stream` that decodes tokens one by one (`gspmd_models.checkpoints.Tokenizer`).
        prompt: the tokens before the text, which decide whether it begins with a space.
        stop: strings that end it; they are not shown.

    Attributes:
        ended: whether a stop string has come, or `end` was called.

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
        """Return what can be shown after these tokens; the beginning of what may be a stop string is held back."""
        return "" if self.ended else self._shown("".join(map(self._stream.add, tokens)))

    def end(self) -> str:
        """Return what was held back, as nothing comes after it."""
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
