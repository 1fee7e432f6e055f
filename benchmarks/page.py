"""Output of benchmarks: figures in a file, tables between two marks of a page, and labels in a plot."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def called() -> str:
    """Return the command line of this benchmark in the form in which its docstring shows it."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def check_marks(path: Path, marks: tuple[str, str]) -> None:
    """Exit with a message if a page lacks one of two marks, before figures are made that would then be lost."""
    if not path.is_file():
        raise SystemExit(f"There is no page {path}.")
    for mark in marks:
        if mark not in path.read_text():
            raise SystemExit(f"The page {path} has no line {mark!r}, which marks where the figures belong.")


def write_between(path: Path, marks: tuple[str, str], content: str) -> None:
    """Replace the text between two marks of a page, which both have to be there."""
    check_marks(path, marks)
    before, _, rest = path.read_text().partition(marks[0])
    path.write_text(f"{before}{marks[0]}\n{content}\n\n{marks[1]}{rest.partition(marks[1])[2]}")


class Kept:
    """Figures of compiled programs by name, saved in a file so that a later run can continue."""

    def __init__(self, path: Path | None):
        self.path = path
        self.figures: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def __call__(self, name: str, measure: Any) -> dict[str, Any]:
        """Return the figures under a name; if there are none, measure them by calling `measure`."""
        if name not in self.figures:
            self.figures[name] = measure()
            if self.path:
                self.path.write_text(json.dumps(self.figures, indent=1))
        return self.figures[name]


def write_tables(
    script: str,
    tables: Mapping[str, Callable[[Kept, Sequence[str]], Iterable[str]]],
    kept: Kept,
    names: Sequence[str],
    page: Path | None,
) -> None:
    """Print tables of the saved figures of the chosen names; if a page is given, write the tables into it."""
    for name, table in tables.items():
        text = "\n".join(table(kept, names))
        print(text, flush=True)
        if page:
            marks = f"<!-- {name}: python benchmarks/{script} --only {name} -->", f"<!-- end of {name} -->"
            write_between(page, marks, text)


INK, FAINT = "#22272e", "#d8dee6"
"""Colours of the text and of the lines of a plot."""


def style(axes: Any, title: str, along: str) -> None:
    """Give axes of matplotlib a title and a label below, light lines and no frame."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_xlabel(along, color=INK)


NEAR = [(8, 0), (6, 7), (6, -7), (-8, 0), (-6, 7), (-6, -7)]
FAR = [(20, 14), (20, -14), (-20, 14), (-20, -14), (30, 30)]


def place_labels(axes: Any, labels: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Label the points of a plot where there is free space; a point without space gets no label.

    Args:
        axes: axes of matplotlib, already drawn except for the labels.
        labels: text, point and curve of each label; no text crosses the line that joins the points of a curve.
    """
    inside, taken = axes.get_window_extent(), [text.get_window_extent().padded(2) for text in axes.texts]
    spots = axes.transData.transform([spot for _, spot, _ in labels]) if labels else []
    marks = [*spots]
    for one, other, begin, end in zip(labels, labels[1:], spots, spots[1:]):
        if one[2] == other[2]:
            marks += [begin + (end - begin) * step / 40 for step in range(1, 40)]
    for words, spot, _ in labels:
        for x, y in [*NEAR, *FAR, *((2 * x, 2 * y) for x, y in FAR)]:
            line = {"arrowprops": {"arrowstyle": "-", "color": "#8b96a3", "linewidth": 0.6}} if abs(x) > 8 else {}
            text = axes.annotate(
                words, spot, xytext=(x, y), textcoords="offset points", fontsize=7.2, color="#27313d", zorder=5,
                ha="left" if x > 0 else "right", va="center", linespacing=1.15, **line,
            )  # fmt: skip
            box = text.get_window_extent()
            clear = not any(box.overlaps(other) for other in taken) and not any(box.contains(*mark) for mark in marks)
            if clear and inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1):
                taken.append(box.padded(2))
                break
            text.remove()
