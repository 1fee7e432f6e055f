"""Random texts for parsers: made of pieces of notation, and valid ones that are broken somewhere."""

import random
import time
from collections.abc import Callable, Iterator, Sequence

PIECES = [
    "A", "B", "E_x", "E_xy", "E_{data,model}", "E_?", "_", "x", "data", "{", "}", "(", ")", "()", ",", "+", "->", "-",
    ">", "=>", "→", " ", "\n", "\x1c", "partialsum-", "reduced-", "partialsum-x", "(partialsum-{x,y})", "?", "1", "é",
    "ª", "-->", "<-", "=", ":", "⟶", "\\to", "*", ";", "·", ", ", ",)", "F_z", "BLE_xyz", "E_xF_yz", "\ufe0f", "\0",
    "x=2", "=2", "|", "[", "]", '"', "٣", "²", "Ⅷ", "9", "-1", "0", "1_0", "1e9", "\u202e", "\ud800", "𝔹", "%s", "\\",
]  # fmt: skip
TIMES = (40, 300, 2000)  # repetitions of a piece in a long text
SECONDS = 5.0  # seconds of the processor for one text
MESSAGE = 20_000  # characters


def texts(seed: int, count: int, right: Sequence[str]) -> Iterator[str]:
    """Yield `count` texts: of pieces, of one piece many times, and valid ones with a few characters changed."""
    draw = random.Random(seed)
    for number in range(count):
        if number % 100 == 0:
            yield _deep(draw, right)
        elif number % 2:
            yield "".join(draw.choices(PIECES, k=draw.randrange(15)))
        else:
            yield _nearly_right(draw, right)


def _deep(draw: random.Random, right: Sequence[str]) -> str:
    """Return a long text: a few pieces over and over, perhaps within a valid one."""
    long = "".join(draw.choices(PIECES, k=draw.randrange(1, 4))) * draw.choice(TIMES)
    text = draw.choice(right)
    at = draw.randrange(len(text) + 1)
    return draw.choice([long, text[:at] + long + text[at:]])


def _nearly_right(draw: random.Random, right: Sequence[str]) -> str:
    text = list(draw.choice(right))
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(text))
        text[at : at + draw.randrange(3)] = draw.choice(["", draw.choice(PIECES), chr(draw.randrange(0x3000))])
        text = text or [" "]
    return "".join(text)


def faults(read: Callable[[str], object], given: Iterator[str], refused: type[Exception]) -> list[str]:
    """Return the faults of a reader: an error of another type, an overlong message, or too long a time.

    Args:
        read: a function that reads one text, and checks its result.
        given: the texts.
        refused: the errors that it may raise.
    """
    found = []
    for text in given:
        start, wrong = time.process_time(), ""
        try:
            read(text)
        except refused as error:
            message = str(error)
            wrong = f"a message of {len(message)} characters" if len(message) > MESSAGE else ""
            wrong = wrong or ("no message" if not message.strip() else "")
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[:300]}"
        if (took := time.process_time() - start) > SECONDS:
            wrong = f"{took:.1f} s"
        if wrong:
            short = repr(text) if len(text) < 300 else f"{text[:60]!r}, of {len(text)} characters"
            found.append(f"{short}: {wrong}")
    return found
