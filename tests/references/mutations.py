"""Damaged files: as a failing disk, another version, a stranger or a typing error would leave them."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

DEEP = 100_000

#: Values that may replace any value of JSON.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "x" * 5000, "a\0b", "\ud800", "../../x", "/dev/zero", "0", [], {}, [None], [[1, 2], 3], {"a": {"b": None}},
    [0] * 1000, [-1, 2],
)  # fmt: skip
#: Values that Python cannot write as JSON or that it writes slowly.
TEXTS = ("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "9" * 5000, "1e999", "[" * 60 + "]" * 60)
#: Texts that may follow the equals sign in TOML.
TOML = (
    "", "nonsense", "true", "0", "-1", "3", "0.5", "nan", "inf", "-inf", "1e400", str(2**31), str(2**63), "9" * 5000,
    "0x" + "f" * 5000, '""', '"x"', f'"{"x" * 5000}"', r'"a\u0000b"', '"../../x"', '"/dev/zero"', "[]", "[[]]",
    '["", 3]', "{}", "{a = {b = 1}}", "1979-05-27", "2020-02-31", "[" * DEEP, "[" * 60 + "]" * 60, '"""', '"É²"',
    '"x=y"', "[1, 2]",
)  # fmt: skip


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return bytes as a disk or a transfer leaves them."""
    kind = draw.randrange(7)
    at = draw.randrange(len(data) + 1)
    if kind == 0 or not data:
        return b""
    if kind == 1:
        return data[:at]
    if kind == 2:
        return bytes(len(data))
    if kind == 3:
        return data[:at] + draw.randbytes(8) + data[at + 8 :]
    if kind == 4:
        return data[:at] + data[at // 2 :]
    if kind == 5:
        return draw.randbytes(len(data))
    flipped = bytearray(data)
    for _ in range(draw.choice((1, 1, 8))):
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def other_json(value: Any, draw: random.Random) -> bytes:
    """Return the JSON of a value with one or two entries replaced, missing, repeated or nested too deeply."""
    text = json.dumps(value)
    marks = {}
    for number in range(draw.choice((1, 1, 1, 2))):
        mark = f"mark{number}"
        marks[f'"{mark}"'] = draw.choice(TEXTS) if draw.random() < 0.2 else json.dumps(draw.choice(VALUES))
        value = json.loads(text)
        holder, key = draw.choice([*_places({"": value}, "")])
        kind = draw.randrange(8)
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[f"{key}_x"] = holder.pop(key)
        elif kind == 2 and isinstance(holder, dict):
            marks[f'"{mark}"'] = f"{json.dumps(holder[key])}, {json.dumps(key)}: {json.dumps(draw.choice(VALUES))}"
            holder[key] = mark
        else:
            holder[key] = mark
        text = json.dumps(holder.get("") if "" in holder and len(holder) == 1 else value)
    for mark, instead in marks.items():
        text = text.replace(mark, instead)
    return text.encode(errors="surrogatepass")


def _places(holder: Any, key: Any) -> Iterator[tuple[Any, Any]]:
    yield holder, key
    value = holder[key]
    inner = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for each in inner:
        yield from _places(value, each)


def other_toml(text: str, draw: random.Random) -> bytes:
    """Return TOML with one or two values, keys or headers replaced."""
    for _ in range(draw.choice((1, 1, 1, 2))):
        lines = text.splitlines(keepends=True)
        at = draw.choice([number for number, line in enumerate(lines) if re.match(r'\s*[\w"\[]', line)] or [0])
        key, equals, _ = lines[at].partition("=")
        kind = draw.randrange(8)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, lines[at])
        elif kind == 2:
            lines[at] = draw.choice(
                ("[a]\n", "[[a]]\n", "x = 1\n", "[" + ".".join("a" * 70) + "]\n", ".".join("b" * 9) + " = 1\n")
            )
        elif kind == 3 and equals:
            lines[at] = f"{key.strip()}x = {draw.choice(TOML)}\n"
        else:
            lines[at] = f"{key.strip()} = {draw.choice(TOML)}\n"
        text = "".join(lines)
    return text.encode()
