"""Draw an error message: the notation on one line, carets under the span that is wrong, the fact and the remedy."""

from collections.abc import Sequence

MOST_FAULTS = 12
"""The maximum number of faults that a message lists.

The message says how many more faults there are; the error's attribute `faults` has all faults.
"""
_WIDEST = 160  # characters of a notation
_LONGEST = 400  # characters of a sentence


def message(doing: str, faults: Sequence[object]) -> str:
    """Return the message of an error: what was being done, the first faults as text, and how many more there are."""
    head = _cut(doing) if len(faults) < 2 else f"{_cut(doing)}: {len(faults):,} faults"
    more = len(faults) - MOST_FAULTS
    rest = [f"  … and {more:,} more."] if more > 0 else []
    return "\n".join([head, *map(str, faults[:MOST_FAULTS]), *rest])


def drawn(text: str, start: int, end: int, fact: str, remedy: str) -> str:
    """Return one fault as text: the notation, the carets, the fact and, if there is one, the remedy.

    >>> print(drawn("B_xLE_q!", 7, 8, "'!' has no meaning in a spec.", ""))
        B_xLE_q!
               ^
      '!' has no meaning in a spec.
    """
    text, start, end = _window(_one_line(text), start, max(end, start + 1))
    lines = [f"    {text}", f"    {' ' * start}{'^' * (end - start)}", f"  {_cut(fact)}"]
    lines += [f"  {_cut(remedy)}"] if remedy else []
    return "\n".join(line.rstrip() for line in lines)


def _window(text: str, start: int, end: int) -> tuple[str, int, int]:
    """Return the part of a long text around a span, and the start and the end of the span in that part."""
    if len(text) <= _WIDEST:
        return text, start, end
    first = max(0, min(start - _WIDEST // 3, len(text) - _WIDEST))
    before, after = "…" * (first > 0), "…" * (first + _WIDEST < len(text))
    shift = first - len(before)
    stop = min(end, first + _WIDEST)
    return f"{before}{text[first : first + _WIDEST]}{after}", start - shift, max(stop, start + 1) - shift


def _cut(text: str) -> str:
    """Return a sentence; if the sentence is too long, its middle is left out."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 2 // 3]} … {text[-_LONGEST // 3 :]}"


def _one_line(text: str) -> str:
    # One printed character for each character of the text, so that the caret is under the right one.
    return "".join(c if c.isprintable() else " " for c in text)
