"""Read figures: their elements, and the places of their texts."""

from collections.abc import Callable
from dataclasses import dataclass
from xml.etree import ElementTree

from gspmd.display.theme import SIZES, TEXT
from gspmd.figures.canvas import BOLD
from gspmd.figures.figure import Figure
from gspmd.figures.text import text_width

Measure = Callable[[str, float, bool], float]
"""The width of a text of a font size, bold or not."""
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Written:
    """A text and the rectangle that it takes."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Written") -> bool:
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > 0.5 and min(self.bottom, other.bottom) - max(self.top, other.top) > 0.5


def root(figure: Figure) -> ElementTree.Element:
    """The document, which is well-formed."""
    return ElementTree.fromstring(figure.svg)


def having(element: ElementTree.Element, **given: object) -> list[ElementTree.Element]:
    """The elements below one with some data attributes; `step=None` for any value."""
    wanted = {f"data-{name}": value for name, value in given.items()}
    return [
        each
        for each in element.iter()
        if all(name in each.attrib and value in (None, each.get(name)) for name, value in wanted.items())
    ]


def words(element: ElementTree.Element) -> list[str]:
    """The texts below an element, as they are read."""
    return ["".join(each.itertext()) for each in element.iter(f"{SVG}text")]


def bars_of(figure: Figure) -> dict[str, tuple[str, list[float]]]:
    """The label of every row of bars, with its text on the right and the lengths of its bars."""
    found = {}
    for row in having(root(figure), bar=None):
        label, told = words(row)
        assert label == row.get("data-bar")
        found[label] = told, [float(each.attrib["width"]) for each in row.iter(f"{SVG}rect")]
    return found


def drawn_width(text: str, size: float, bold: bool) -> float:
    """About the width of a text, as figures allow for it."""
    return text_width(text, size) * (BOLD if bold else 1.0)


def written(figure: Figure, measure: Measure = drawn_width) -> list[Written]:
    """Every text with its place."""
    return [_written(each, measure) for each in root(figure).iter(f"{SVG}text")]


def _written(text: ElementTree.Element, measure: Measure) -> Written:
    classes = text.get("class", "").split()
    size = next((SIZES[name] for name in classes if name in SIZES), TEXT)
    bold = bool({"strong", "title"} & {*classes})
    wide = measure(text.text or "", size, bold)
    for part in text:
        wide += measure(part.text or "", float(part.get("font-size", size)), bold)
        wide += measure(part.tail or "", size, bold)
    x, y = float(text.get("x", 0)), float(text.get("y", 0))
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")] * wide
    return Written("".join(text.itertext()), left, y - 0.75 * size, left + wide, y + 0.1 * size)


def check_places(figure: Figure, measure: Measure = drawn_width) -> None:
    """Check that no two texts meet, and that the picture holds all of them."""
    every = written(figure, measure)
    left, top, wide, high = figure.box
    for number, each in enumerate(every):
        assert left < each.left, each
        assert each.right < left + wide, each
        assert top < each.top, each
        assert each.bottom < top + high, each
        assert [other for other in every[number + 1 :] if each.meets(other)] == [], each
