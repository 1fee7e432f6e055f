"""Error messages as a command prints them: a few lines, in which the first faults are complete."""

import re
from collections.abc import Iterator, Sequence

LINES = 8
"""The maximum number of lines of a message that a command prints. The error itself lists all faults."""


def told(error: BaseException) -> str:
    """Return the message of an error in at most `LINES` lines, leaving out faults that do not fit.

    >>> from gspmd.training.toml import ConfigError
    >>> print(told(ConfigError("cannot train:", [f"setting {number} is wrong." for number in range(20)])))
    ConfigError: cannot train:
      setting 0 is wrong.
      setting 1 is wrong.
      setting 2 is wrong.
      setting 3 is wrong.
      setting 4 is wrong.
      setting 5 is wrong.
      ... and 14 more.
    """
    first, *lines = f"{type(error).__name__}: {error}".splitlines()
    if len(lines) < LINES:
        return "\n".join([first, *lines])
    # `Layout.mesh_for` ends its message with a remedy for all faults.
    last = [lines.pop()] if lines[-1].startswith("  With ") else []
    blocks = [*_blocks(lines)]
    kept: list[str] = []
    room = LINES - 2 - len(last)
    number = len(getattr(error, "faults", ())) or len(blocks)
    while blocks and (not kept or len(kept) + len(blocks[0]) <= room):
        kept += blocks.pop(0)
        number -= 1
    return "\n".join([first, *kept[:room], f"  ... and {number} more." if number > 0 else "  ...", *last])


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the lines of each fault: a single line, or notation with a caret below it and an explanation."""
    block: list[str] = []
    drawn = any(re.fullmatch(r" +\^+", line) for line in lines)
    for line, after in zip(lines, [*lines[1:], ""]):
        begins = bool(re.fullmatch(r" +\^+", after)) if drawn else not line.startswith("   ")
        if begins and block:
            yield block
            block = []
        block.append(line)
    yield block
