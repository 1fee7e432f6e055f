"""A tensor as text: a table of its blocks, with the devices that hold each of them."""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from gspmd.figures.ownership import Ownership, sizes_text

_ROWS, _COLUMNS, _HOLDERS = 16, 8, 4
"""The maximum numbers of rows, of columns, and of devices per block that are written."""
_GAP = -1
"""The value that stands for indices that are left out."""


def tensor_text(held: Ownership, names: Sequence[int] | None = None) -> str:
    """Draw a tensor of any rank as text: the last sharded dimension runs across, all others run down.

    Each block lists its devices. `0 4` means that devices 0 and 4 hold copies of the block; `0 + 1` means that devices
    0 and 1 hold summands of a partial sum.

    Args:
        held: the blocks of the devices.
        names: the devices' ids, in the order of the mesh; by default 0, 1, ...

    Example:
        >>> from gspmd.annotate import Spec
        >>> print(tensor_text(Ownership(Spec.parse("B_xE_y"), (8, 6), {"x": 2, "y": 2, "z": 2})))
        B_xE_y  8 × 6  on x=2 y=2 z=2: 4 blocks of 4 × 3
                 E 0:3   E 3:6
               ┌───────┬───────┐
        B 0:4  │ 0 1   │ 2 3   │
               ├───────┼───────┤
        B 4:8  │ 4 5   │ 6 7   │
               └───────┴───────┘
    """
    mesh = " ".join(f"{axis}={size}" for axis, size in held.mesh.items()) or "one device"
    lines = [f"{held.spec}  {sizes_text(held.shape)}  on {mesh}: {held.summary}".strip()]
    split: list[int | None] = [at for at, count in enumerate(held.parts) if count > 1]
    *rows, across = split or [None]
    columns = _some(1 if across is None else held.parts[across], _COLUMNS)
    kept = _rows([held.parts[at] for at in rows if at is not None])
    table = [[_cell(held, names, rows, across, row, column) for column in columns] for row in kept]
    heads = [_part(held, [across], (column,)) if across is not None else "" for column in columns]
    sides = [_part(held, rows, row) for row in kept]
    return "\n".join([*lines, *_table(heads, sides, table)])


def _some(count: int, most: int) -> list[int]:
    """Return the indices that are written: all indices, or the first ones, a gap, and the last one."""
    return [*range(count)] if count <= most else [*range(most - 2), _GAP, count - 1]


def _rows(counts: Sequence[int]) -> list[tuple[int, ...]]:
    total = prod(counts)
    if total <= _ROWS:
        return list(product(*map(range, counts)))
    found = []
    for index in _some(total, _ROWS):
        if index == _GAP:
            found.append((_GAP,) * len(counts))
            continue
        place = []
        for count in reversed(counts):
            index, at = divmod(index, count)
            place.append(at)
        found.append(tuple(reversed(place)))
    return found


def _part(held: Ownership, dims: Sequence[int | None], place: Sequence[int]) -> str:
    if _GAP in place:
        return "…"
    words = []
    for at, number in zip(dims, place):
        if at is not None:
            size = held.shape[at] // held.parts[at]
            words.append(f"{held.spec.dims[at]} {number * size}:{(number + 1) * size}")
    return "  ".join(words)


def _cell(
    held: Ownership,
    names: Sequence[int] | None,
    rows: Sequence[int | None],
    across: int | None,
    row: Sequence[int],
    column: int,
) -> str:
    if column == _GAP or _GAP in row:
        return "…"
    place = [0] * len(held.parts)
    for at, number in zip((*rows, across), (*row, column)):
        if at is not None:
            place[at] = number

    def devices(summand: int) -> str:
        return _few(held.copies, " ", lambda copy: named(held.holder(place, summand, copy)))

    def named(device: int) -> str:
        return str(device if names is None else names[device])

    return _few(held.summands, " + ", devices)


def _few(count: int, between: str, word: Callable[[int], str]) -> str:
    return between.join("…" if at == _GAP else word(at) for at in _some(count, _HOLDERS))


def _table(heads: Sequence[str], sides: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    side = max(map(len, sides), default=0)
    before = " " * (side + 2 if side else 0)
    wide = [max(len(head), *(len(row[at]) for row in table)) for at, head in enumerate(heads)]
    lines = (
        [f"{before} {''.join(f' {head.ljust(w)}  ' for head, w in zip(heads, wide))}".rstrip()] if any(heads) else []
    )
    edges = [
        corners[0] + corners[1].join("─" * (w + 2) for w in wide) + corners[2] for corners in ("┌┬┐", "├┼┤", "└┴┘")
    ]
    lines.append(before + edges[0])
    for number, (name, row) in enumerate(zip(sides, table)):
        lines += [before + edges[1]] if number else []
        cells = "│".join(f" {cell.ljust(w)} " for cell, w in zip(row, wide))
        lines.append((f"{name.ljust(side)}  " if side else "") + f"│{cells}│")
    return [*lines, before + edges[2]]
