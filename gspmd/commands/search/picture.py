"""The picture of seconds against bytes: the cheapest layout for each amount of memory on one mesh, and presets."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any

from gspmd.audit.simulation.bars import FAINT, INK, PALETTE
from gspmd.commands.search.written import seconds, where
from gspmd.display.units import amount_of_bytes
from gspmd.search.answers import SearchResult
from gspmd.search.answers.frontier import SEEN, Point
from gspmd.search.answers.presets import Placed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FRONT, _FOUND, _PRESET = PALETTE["collective-permute"], PALETTE["all-reduce"], PALETTE["einsum"]
_NAMED = 2
"""The maximum number of presets that one label names."""
_NEAR = 0.02, 0.03
"""Marks that are closer to each other than these fractions of the picture's width and height share a label."""
_LETTER, _LINE = 0.0077, 0.042
"""Width and height of a letter of a label, as fractions of the picture's width and height."""
_STEEP = 1.5
"""The axis of seconds is logarithmic if the largest value is more than this many times the smallest."""

_Box = tuple[float, float, float, float]
"""Left, right, bottom and top of a label, as fractions of the picture's width and height."""


@dataclass(frozen=True)
class _Frame:
    """The visible range of bytes, from left to right, and of seconds, from bottom to top, with units."""

    left: float
    right: float
    bottom: float
    top: float

    @property
    def bytes(self) -> tuple[float, str]:
        return (1e9, "GB") if self.right >= 2e9 else (1e6, "MB")

    @property
    def seconds(self) -> tuple[float, str]:
        return next(((one, unit) for one, unit in ((1.0, "s"), (1e-3, "ms")) if self.bottom >= one), (1e-6, "µs"))

    def has(self, held: float, took: float) -> bool:
        """Return whether a point is visible, including the room for a label above it."""
        x, y = self.place(held, took)
        return 0 <= x <= 1 and 0 <= y <= 1 - 1.5 * _LINE

    def place(self, held: float, took: float) -> tuple[float, float]:
        """Return the position of a point, as fractions of the picture's width and height."""
        over = log(took / self.bottom) / log(self.top / self.bottom) if self.steep else None
        height = (took - self.bottom) / (self.top - self.bottom) if over is None else over
        return (held - self.left) / (self.right - self.left), height

    @property
    def steep(self) -> bool:
        return self.top > _STEEP * self.bottom

    def x(self, held: float) -> float:
        return min(held, self.right) / self.bytes[0]

    def y(self, took: float) -> float:
        return took / self.seconds[0]


def figure(finding: SearchResult, front: Sequence[Point], presets: Sequence[Placed], title: str) -> "Figure":
    """Draw the cheapest layout for every amount of memory as a staircase, and shade the area without any layout.

    Args:
        finding: the result of the search, whose answer is marked.
        front: the points of `frontier`.
        presets: the presets and the layouts given with --beside, placed on the answer's mesh. Those within the visible
            area are marked.
        title: the subject of the search, for the title.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    made = Figure(figsize=(9.6, 5.4), dpi=150, layout="constrained")
    axes, frame = made.subplots(), _frame(finding, front, presets)
    _staircase(axes, frame, front, finding.best.search.floor())
    if frame.steep:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    taken = [_found(axes, frame, finding)]
    _presets(axes, frame, presets, taken)
    axes.set_xlim(frame.x(frame.left), frame.x(frame.right))
    axes.set_ylim(frame.y(frame.bottom), frame.y(frame.top))
    axes.set_xlabel(f"{frame.bytes[1]} on each device", color=INK, fontsize=9.5)
    axes.set_ylabel(f"{frame.seconds[1]} a step, planned", color=INK, fontsize=9.5)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.grid(color="#dfe4e9", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, weight="bold", color=INK, pad=22)
    under: Any = {"xy": (0, 1), "xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate(f"mesh {where(finding.best)}    no layout is in the shade", **under, fontsize=9.5, color=INK)
    return made


def _frame(finding: SearchResult, front: Sequence[Point], presets: Sequence[Placed]) -> _Frame:
    """Return the range of bytes and seconds that shows the layouts of interest.

    The bytes extend from the smallest layout to beyond the limit or the largest layout. The seconds extend from the
    cheapest layout to layouts that do not cost much more.
    """
    least, most = front[0].answer.bytes, max(front[-1].answer.bytes, finding.answer.bytes)
    right = max(finding.answer.bytes, min(1.05 * most, SEEN * finding.best.limit))
    right += 0.05 * (right - least)
    low, high = front[-1].answer.seconds, min(front[0].answer.seconds, SEEN * finding.answer.seconds)
    rise = max(high - low, 0.003 * low)
    near = [each.answer.seconds for each in presets if each.answer and each.fits]
    top = max([high, finding.answer.seconds, *(took for took in near if took < low + 2 * rise)])
    left, steep = max(least - 0.06 * (right - least), 0.0), top / low
    if steep > _STEEP:
        return _Frame(left, right, low / steep**0.13, top * steep**0.12)
    top += 0.12 * max(top - low, 0.01 * low)
    return _Frame(left, right, max(low - 0.1 * (top - low), 0.5 * low), top)


def _staircase(axes: Any, frame: _Frame, front: Sequence[Point], floor: float) -> None:
    """Draw the points, the steps between them, and the shade; `floor` is a lower bound on the bytes of all layouts."""
    x, y = [frame.x(each.answer.bytes) for each in front], [frame.y(each.answer.seconds) for each in front]
    top, right = frame.y(frame.top), frame.x(frame.right)
    # The shade of a point ends at the limit up to which it is the cheapest: beyond that nothing is known.
    ends = [frame.x(each.limit) for each in front]
    shade = {"step": "post", "color": _FRONT, "alpha": 0.08, "linewidth": 0}
    bounds = [max(frame.y(each.answer.bound), frame.y(frame.bottom)) for each in front]
    # Nothing holds less than the floor. Above it there may be layouts that no search has found, slower than the bound.
    begin = frame.x(max(frame.left, min(floor, front[0].answer.bytes)))
    axes.fill_between([frame.x(frame.left), begin, *ends], [top, *bounds, bounds[-1]], frame.y(frame.bottom), **shade)
    axes.step([x[0], *x, right], [top, *y, y[-1]], where="post", color=_FRONT, linewidth=1.8, zorder=3)
    axes.plot(x, y, "o", color=_FRONT, markersize=4.5, zorder=4)
    unsure = [n for n, each in enumerate(front) if not each.answer.complete]
    axes.plot([x[n] for n in unsure], [y[n] for n in unsure], "o", color="white", markersize=2.6, zorder=4)


def _presets(axes: Any, frame: _Frame, presets: Sequence[Placed], taken: list[_Box]) -> None:
    """Draw a mark for each preset that fits; presets at nearly the same position share one label."""
    places: list[tuple[float, float, list[str]]] = []
    for each in presets:
        if not (each.answer and each.fits and frame.has(each.answer.bytes, each.answer.seconds)):
            continue
        held, took = each.answer.bytes, each.answer.seconds
        axes.plot([frame.x(held)], [frame.y(took)], "D", color=_PRESET, markersize=5.5, zorder=5)
        at = frame.place(held, took)
        near = (names for *other, names in places
                if all(abs(one - two) < by for one, two, by in zip(at, frame.place(*other), _NEAR)))  # fmt: skip
        names = next(near, None)
        if names is None:
            places.append((held, took, [each.name]))
        else:
            names.append(each.name)
    for held, took, names in sorted(places):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        taken.append(_label(axes, frame, held, took, ", ".join(names[:_NAMED]) + more, _PRESET, taken))


def _found(axes: Any, frame: _Frame, finding: SearchResult) -> _Box:
    """Draw the answer and the memory limit; return the box of the answer's label."""
    limit, answer = finding.best.limit, finding.answer
    if limit < frame.right:
        axes.axvline(frame.x(limit), color=FAINT, linewidth=1.1, linestyle=(0, (4, 3)), zorder=2)
        left = limit > frame.left + 0.3 * (frame.right - frame.left)
        style = {"fontsize": 8.5, "color": FAINT, "va": "top", "ha": "right" if left else "left"}
        style["xytext"] = (-5 if left else 5, -6)
        place = frame.x(limit), frame.y(frame.top)
        axes.annotate(f"{amount_of_bytes(limit)} may be used", place, textcoords="offset points", **style)
    style = {"markersize": 15, "markeredgecolor": "white", "markeredgewidth": 0.8, "zorder": 6}
    axes.plot([frame.x(answer.bytes)], [frame.y(answer.seconds)], "*", color=_FOUND, **style)
    text = f"found: {seconds(answer.seconds)}, {amount_of_bytes(answer.bytes)}"
    return _label(axes, frame, answer.bytes, answer.seconds, text, _FOUND, (), below=True)


def _label(
    axes: Any,
    frame: _Frame,
    held: float,
    took: float,
    text: str,
    color: str,
    taken: Sequence[_Box],
    below: bool = False,
) -> _Box:
    """Write a name beside a mark, to its right if there is room, and above any label in the way."""
    x, y = frame.place(held, took)
    width, right = _LETTER * len(text), x < 0.55
    left = x + 0.008 if right else x - 0.008 - width
    low = y - 0.02 - _LINE if below else y + 0.012
    while any(left < r and l < left + width and low < t and b < low + _LINE for l, r, b, t in taken):
        low += _LINE
    if low > y + 0.02:
        line = {"color": color, "linewidth": 0.7, "zorder": 5, "transform": axes.transAxes}
        axes.plot([x, x], [y, low + 0.5 * _LINE], **line)
    style: Any = {"fontsize": 8.5, "color": color, "weight": "bold", "zorder": 7, "va": "center"}
    middle = left if right else left + width
    axes.text(middle, low + 0.5 * _LINE, text, transform=axes.transAxes, ha="left" if right else "right", **style)
    return left, left + width, low, low + _LINE
