"""The picture of seconds against bytes: what memory buys on one mesh, and where the presets are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspmd.audit.simulation.bars import FAINT, INK, PALETTE
from gspmd.commands.search.written import seconds, where
from gspmd.display.units import amount_of_bytes
from gspmd_models.search.answers import Finding
from gspmd_models.search.answers.frontier import SEEN, Point
from gspmd_models.search.answers.presets import Placed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FRONT, _FOUND, _PRESET = PALETTE["collective-permute"], PALETTE["all-reduce"], PALETTE["einsum"]
_NAMED = 2
"""Presets at one place that are named."""


@dataclass(frozen=True)
class _Frame:
    """What of the plane is seen: bytes from left to right, seconds from bottom to top, and the units of both."""

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
        return self.left <= held <= self.right and self.bottom <= took <= self.top

    def x(self, held: float) -> float:
        return min(held, self.right) / self.bytes[0]

    def y(self, took: float) -> float:
        return took / self.seconds[0]


def figure(finding: Finding, front: Sequence[Point], presets: Sequence[Placed], title: str) -> "Figure":
    """Draw the cheapest layout for every amount of memory as a staircase, with the region below in which there is none.

    Args:
        finding: the answer, which is marked.
        front: from `frontier`.
        presets: marked where they are within the picture.
        title: what was searched for.
    """
    from matplotlib.figure import Figure

    made = Figure(figsize=(9.6, 5.4), dpi=150, layout="constrained")
    axes, frame = made.subplots(), _frame(finding, front, presets)
    _staircase(axes, frame, front)
    _presets(axes, frame, presets)
    _found(axes, frame, finding)
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


def _frame(finding: Finding, front: Sequence[Point], presets: Sequence[Placed]) -> _Frame:
    """From the smallest layout to behind the limit or the largest, and from the cheapest to what is not much dearer."""
    least, most = front[0].answer.bytes, max(front[-1].answer.bytes, finding.answer.bytes)
    right = max(finding.answer.bytes, min(1.05 * most, SEEN * finding.best.limit))
    right += 0.05 * (right - least)
    low, high = front[-1].answer.seconds, min(front[0].answer.seconds, SEEN * finding.answer.seconds)
    rise = max(high - low, 0.003 * low)
    near = [each.answer.seconds for each in presets if each.answer and each.fits]
    top = max([high, finding.answer.seconds, *(took for took in near if took < low + 2 * rise)])
    top += 0.12 * max(top - low, 0.01 * low)
    return _Frame(max(least - 0.06 * (right - least), 0.0), right, max(low - 0.1 * (top - low), 0.5 * low), top)


def _staircase(axes: Any, frame: _Frame, front: Sequence[Point]) -> None:
    x, y = [frame.x(each.answer.bytes) for each in front], [frame.y(each.answer.seconds) for each in front]
    top, right = frame.y(frame.top), frame.x(frame.right)
    # A limit within which a point is the cheapest ends the shade that it throws: what lies beyond is not known.
    ends = [frame.x(each.limit) for each in front]
    shade = {"step": "post", "color": _FRONT, "alpha": 0.08, "linewidth": 0}
    bounds = [max(frame.y(each.answer.bound), frame.y(frame.bottom)) for each in front]
    axes.fill_between([frame.x(frame.left), x[0], *ends], [top, *bounds, bounds[-1]], frame.y(frame.bottom), **shade)
    axes.step([x[0], *x, right], [top, *y, y[-1]], where="post", color=_FRONT, linewidth=1.8, zorder=3)
    axes.plot(x, y, "o", color=_FRONT, markersize=4.5, zorder=4)
    unsure = [n for n, each in enumerate(front) if not each.answer.complete]
    axes.plot([x[n] for n in unsure], [y[n] for n in unsure], "o", color="white", markersize=2.6, zorder=4)


def _presets(axes: Any, frame: _Frame, presets: Sequence[Placed]) -> None:
    """A mark for each preset that fits; of those that cost the same the first are named."""
    places: dict[tuple[float, float], list[str]] = {}
    for each in presets:
        if each.answer and each.fits and frame.has(each.answer.bytes, each.answer.seconds):
            places.setdefault((each.answer.bytes, each.answer.seconds), []).append(each.name)
    for (held, took), names in places.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        axes.plot([frame.x(held)], [frame.y(took)], "D", color=_PRESET, markersize=5.5, zorder=5)
        _label(axes, frame, held, took, ", ".join(names[:_NAMED]) + more, _PRESET, above=True)


def _found(axes: Any, frame: _Frame, finding: Finding) -> None:
    """The answer, and the memory that it may use."""
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
    _label(axes, frame, answer.bytes, answer.seconds, text, _FOUND, above=False)


def _label(axes: Any, frame: _Frame, held: float, took: float, text: str, color: str, above: bool) -> None:
    """A name beside a mark, on the right while there is room."""
    right = held < frame.left + 0.55 * (frame.right - frame.left)
    style: Any = {"fontsize": 8.5, "color": color, "weight": "bold", "zorder": 7, "textcoords": "offset points"}
    style |= {"ha": "left" if right else "right", "va": "bottom" if above else "top"}
    offset = (8 if right else -8, 5 if above else -8)
    axes.annotate(text, (frame.x(held), frame.y(took)), xytext=offset, **style)
