"""Text inside XML documents."""

from html import escape
from re import compile as pattern

_FORBIDDEN = pattern("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 forbids, even as character references (production 2 of the standard)."""


def escaped(text: str) -> str:
    """Return a text for the content or an attribute of an XML element, with � in place of characters that XML forbids.

    >>> escaped('a < "b"'), escaped("\\x1b[1m")
    ('a &lt; &quot;b&quot;', '�[1m')
    """
    return escape(_FORBIDDEN.sub("\ufffd", text))
