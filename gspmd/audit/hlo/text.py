"""Scanning HLO text: reading up to a delimiter outside of brackets and strings, and finding integers."""

import re

_OPEN, _CLOSE = "({[", ")}]"


def until(text: str, start: int, stop: str) -> str:
    """Return the text from `start` up to the first `stop` that is outside of brackets and strings.

    >>> until("{0,2}, metadata={}", 0, ",")
    '{0,2}'
    """
    depth, quoted, at = 0, False, start
    while at < len(text):
        character = text[at]
        if quoted:
            at += character == "\\"
            quoted = character != '"'
        elif character == '"':
            quoted = True
        elif depth == 0 and character == stop:
            break
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        at += 1
    return text[start:at]


def integers(text: str) -> tuple[int, ...]:
    """Return every integer in a text, such as an attribute's `{0,2}`.

    >>> integers("{0,2}")
    (0, 2)
    """
    return tuple(int(n) for n in re.findall(r"\d+", text))
