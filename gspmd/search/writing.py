"""Writing a layout that was found as the text of a TOML file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import permutations
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from gspmd.layouts.mesh import factorise
from gspmd.layouts.rules.keys import is_override

if TYPE_CHECKING:
    from gspmd.layouts import Layout


def document(
    header: Iterable[str],
    mesh: Mapping[str, int],
    lines: Mapping[str, str],
    lowering: str = "blocking",
    comments: Mapping[str, str] = MappingProxyType({}),
    base: Layout | None = None,
) -> str:
    """Return the text of a layout file, with sections and lines in the given order.

    Args:
        header: lines of the comment at the top.
        mesh: sizes of the mesh axes.
        lines: every line by its key; an overriding line has its section in front, as in `"optimizer.ffn.w_in"`.
        lowering: the lowering that the layout sets.
        comments: the comment after each line, by key.
        base: the layout whose program was searched. Its [dimensions] are written too. Its custom lines that the program
            does not use are written unsharded, because a different program of the model, such as decoding, may use
            them.

    Example:
        >>> print(document(["found"], {"x": 4}, {"ffn.w_in": "EF_x", "optimizer.ffn.w_in": "E_xF"}))
        # found
        <BLANKLINE>
        [mesh]
        axes = ["x"]
        factor = ["x"]
        <BLANKLINE>
        [lowering]
        default = "blocking"
        <BLANKLINE>
        [ffn]
        w_in = "EF_x"
        <BLANKLINE>
        [optimizer]
        "ffn.w_in" = "E_xF"
        <BLANKLINE>
    """
    spare = {} if base is None else {
        key: dims for key, dims in base.own.items() if dims and isinstance(dims, str) and key not in lines
    }  # fmt: skip
    lines = {**lines, **spare}
    comments = {**comments, **dict.fromkeys(spare, "not in the program that was searched")}
    letters = [] if base is None else [f"{letter} = {_quoted(text)}" for letter, text in base.dimensions.items()]
    blocks = [
        "\n".join(f"# {line}".rstrip() for line in header),
        "\n".join(["[mesh]", *mesh_lines(mesh)]),
        *(["\n".join(["[dimensions]", *letters])] if letters else []),
        f'[lowering]\ndefault = "{lowering}"',
        *(block(name, lines, keys, comments) for name, keys in _sections(lines)),
    ]
    return "\n\n".join(blocks) + "\n"


def _quoted(text: str) -> str:
    # TOML has the escapes of JSON, except those for the halves of a character beyond U+FFFF; DEL must be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def mesh_lines(mesh: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines of `[mesh]`: the mesh axes, and how a number of devices is factored over them.

    >>> [*mesh_lines({"x": 2, "y": 4})]
    ['axes = ["x", "y"]', 'factor = ["y", "x"]']
    """
    axes, devices = tuple(mesh), prod(mesh.values())
    # The `factor` list that gives this mesh without --mesh, if there is one.
    fits = (order for count in range(1, len(axes) + 1) for order in permutations(axes, count)
            if factorise(devices, axes, order) == dict(mesh))  # fmt: skip
    for name, names in (("axes", axes), ("factor", next(fits, axes))):
        yield f"{name} = [{', '.join(f'{chr(34)}{axis}{chr(34)}' for axis in names)}]"


def _sections(lines: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield every section with the keys of its lines; overriding sections come last."""
    found: dict[str, list[str]] = {}
    for key in lines:
        found.setdefault(key.partition(".")[0], []).append(key)
    yield from sorted(found.items(), key=lambda item: is_override(item[1][0]))


def block(
    name: str,
    lines: Mapping[str, str],
    keys: Collection[str] | None = None,
    comments: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return one section as text: its name, then its lines.

    Only lines with the given keys are written; by default all lines are. The argument `comments` is as in `document`.

    >>> print(block("ffn", {"ffn.w_in": "EF_x", "ffn.hidden": "BLF_x"}))
    [ffn]
    w_in   = "EF_x"
    hidden = "BLF_x"
    """
    keys = lines if keys is None else keys
    inside = [key.partition(".")[2] for key in keys]
    names = [f'"{key}"' if "." in key else key for key in inside]  # Quoted in a section that overrides others.
    texts = [f'"{lines[key]}"' for key in keys]
    widths = max(map(len, names), default=0), max(map(len, texts), default=0)
    rows = [f"[{name}]"]
    for key, left, text in zip(keys, names, texts):
        behind = f"  # {comments[key]}" if key in comments else ""
        rows.append(f"{left.ljust(widths[0])} = {text.ljust(widths[1])}{behind}".rstrip())
    return "\n".join(rows)
