"""Experts without capacity, dispatch `dropless`: rows, sorted by expert, stay where they arrive."""

from collections.abc import Iterator, Mapping, Sequence

from gspmd.annotate import Fault, Spec, parse_via
from gspmd.annotate.errors import listed
from gspmd.layouts.rules.line import Line
from gspmd.layouts.rules.table import LayoutTable

INPUT = "moe.expert_input"


def rows_faults(layout: LayoutTable, mesh: Mapping[str, int]) -> Iterator[Fault]:
    """Yield a fault for every line of [moe] that would move rows, or a part of them, within a product.

    An expert's rows are as many as the router sends it, so no collective of a fixed size exchanges them, and C, the
    room that they have, is whole on every device.

    Args:
        layout: without alternatives or faults.
        mesh: sizes of its axes.
    """
    lines = {name: text for name, text in layout.table.items() if isinstance(text, str)}
    if INPUT not in lines:
        return
    there = Spec.parse(lines[INPUT])
    wanted = {"G": there.axes_of("G"), "X": there.axes_of("X"), "C": ()}
    for name in (INPUT, "moe.hidden", "moe.in_via", "moe.out_via"):
        if name in lines:
            specs = parse_via(lines[name]).specs if name.endswith("_via") else (Spec.parse(lines[name]),)
            stay = [_staying(spec, wanted) for spec in specs]
            moved = _moved(specs, stay, mesh)
            if moved:
                do = "does" if len(moved) == 1 else "do"
                fact = f"rows of dispatch 'dropless' stay where they arrive, and {listed(moved)} {do} not lie as there."
                remedy = f"Write '{', '.join(map(str, stay))}', as moe.expert_input has them, or take dispatch 'sort'."
                yield Line(name, lines[name]).at_text(fact, remedy)


def _staying(spec: Spec, wanted: Mapping[str, tuple[str, ...]]) -> Spec:
    """Return a spec with its rows where they arrive; what lies over the same mesh axes otherwise gives way."""
    taken = {axis for dim in spec.dims for axis in wanted.get(dim, ())}
    rest = (tuple(axis for axis in axes if axis not in taken) for axes in spec.axes)
    return Spec(spec.dims, tuple(wanted.get(dim, axes) for dim, axes in zip(spec.dims, rest)))


def _moved(specs: Sequence[Spec], stay: Sequence[Spec], mesh: Mapping[str, int]) -> list[str]:
    """Return the dimensions of rows that lie elsewhere, but for mesh axes of size 1."""
    pairs = [(a.without_trivial(mesh), b.without_trivial(mesh)) for a, b in zip(specs, stay)]
    return [d for d in "GXC" if any(d in a.dims and a.axes_of(d) != b.axes_of(d) for a, b in pairs)]
