"""A canvas: shapes and texts at their positions, and the rectangle that contains them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from gspmd.display.runs import Run
from gspmd.display.theme import SIZES, TEXT
from gspmd.display.xml import escaped
from gspmd.figures.figure import Figure, Text
from gspmd.figures.text import tspans, width

BOLD = 1.15
"""Ratio of the widths of bold and regular letters."""
_MARGIN = 16.0


def number(value: float) -> str:
    """Return a coordinate as text, rounded to hundredths."""
    return f"{round(value, 2):g}"


def attributes(given: dict[str, object]) -> str:
    """Return the attributes of an element as text: `data_step=3` as `data-step="3"`."""
    return "".join(f' {name.rstrip("_").replace("_", "-")}="{escaped(str(value))}"' for name, value in given.items())


class Canvas:
    """The elements of an SVG, and the rectangle that contains them. Coordinates grow to the right and down."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.left = self.top = float("inf")
        self.right = self.bottom = float("-inf")

    def hold(self, left: float, top: float, right: float, bottom: float) -> None:
        """Extend the bounds of the drawing to include a rectangle."""
        self.left, self.top = min(self.left, left), min(self.top, top)
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)

    def rect(self, x: float, y: float, wide: float, high: float, kind: str, rx: float = 0, **more: object) -> None:
        """Draw a rectangle that has a CSS class."""
        title = more.pop("title", None)
        inner = f"><title>{escaped(str(title))}</title></rect>" if title else "/>"
        place = " ".join(f'{name}="{number(n)}"' for name, n in (("x", x), ("y", y), ("width", wide), ("height", high)))
        corner = f' rx="{number(rx)}"' if rx else ""
        self.parts.append(f'<rect class="{kind}" {place}{corner}{attributes(more)}{inner}')
        self.hold(x, y, x + wide, y + high)

    def path(self, points: Sequence[tuple[float, float]], kind: str = "line") -> None:
        """Draw a line through points."""
        places = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.parts.append(f'<polyline class="{kind}" points="{places}"/>')
        for x, y in points:
            self.hold(x, y, x, y)

    def arrow(self, points: Sequence[tuple[float, float]]) -> None:
        """Draw a line through points, with an arrowhead at its end that points down."""
        x, y = points[-1]
        self.path([*points[:-1], (x, y - 4)])
        head = ((x - 3.5, y - 6), (x + 3.5, y - 6), (x, y))
        places = " ".join(f"{number(a)},{number(b)}" for a, b in head)
        self.parts.append(f'<polygon class="head" points="{places}"/>')
        self.hold(x - 3.5, y - 6, x + 3.5, y)

    def text(
        self, x: float, y: float, runs: str | Iterable[Run], kind: str = "ink", anchor: str = "start", **more: object
    ) -> float:
        """Write a text with its baseline at y; return its width."""
        runs = [Run(runs)] if isinstance(runs, str) else list(runs)
        size, wide = _size(kind), width_in(kind, runs)
        left = x - {"start": 0, "middle": 0.5, "end": 1}[anchor] * wide
        self.hold(left, y - 0.8 * size, left + wide, y + 0.3 * size)
        where = f'x="{number(x)}" y="{number(y)}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        self.parts.append(f'<text class="{kind}" {where}{attributes(more)}>{tspans(runs, size)}</text>')
        return wide

    @contextmanager
    def group(self, **given: object) -> Iterator[None]:
        """Put everything that is drawn in the `with` block into one `<g>` element."""
        title = given.pop("title", None)
        self.parts.append(f"<g{attributes(given)}>" + (f"<title>{escaped(str(title))}</title>" if title else ""))
        yield
        self.parts.append("</g>")

    def lines(self, x: float, y: float, words: Sequence[Sequence[Run]], wide: float, kind: str, step: float) -> float:
        """Write words in lines no wider than `wide`, from baseline y on; return the baseline for the next line."""
        line: list[Run] = []
        for word in words:
            if line and width_in(kind, [*line, *word]) > wide:
                self.text(x, y, [*line[:-1], Run(line[-1].text.removesuffix("· "), line[-1].style)], kind)
                line, y = [], y + step
            line += word
        if line:
            self.text(x, y, line, kind)
            y += step
        return y

    def figure(self, title: str, description: str, plain: Text) -> Figure:
        """Return everything that was drawn as a figure, with a margin around it."""
        left, top = self.left - _MARGIN, self.top - _MARGIN
        wide, high = self.right + _MARGIN - left, self.bottom + _MARGIN - top
        return Figure(title, description, plain, (left, top, wide, high), "\n".join(self.parts))


def _size(kind: str) -> float:
    """Return the font size of a CSS class."""
    return next((SIZES[name] for name in kind.split() if name in SIZES), TEXT)


def width_in(kind: str, runs: Sequence[Run] | str) -> float:
    """Return the approximate width of a text that `Canvas.text` writes with a CSS class."""
    runs = [Run(runs)] if isinstance(runs, str) else runs
    return width(runs, _size(kind)) * (BOLD if {"strong", "title"} & {*kind.split()} else 1.0)
