"""Drawings of a schedule as text and as a figure, with a row for each stage and a column for each slot."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import, and only needed for pictures

Ticks = Sequence[Mapping[str, Sequence[Any]]]
"""For each tick, a mapping from kind of work to slot. A slot has the `Work` of each stage, or None if the stage waits.
"""

_COLOURS = {
    "forward": ("#cfe3f7", "#2f6fb0"),
    "backward": ("#d9f0d3", "#3a8f3a"),
    "weights": ("#f7e3c0", "#b07a1f"),
}
_INK, _IDLE = "#1f2933", "#eef0f2"


def text(title: str, ticks: Ticks) -> str:
    """Draw a schedule as text.

    F3 is the forward pass of microbatch 3, B3 is its backward pass, and a dot is a waiting stage. If backward passes
    are split, W3 is the part that computes gradients of weights. Bars separate ticks. With several rounds, a letter
    names the round, so that F3a is in the first round.

    Args:
        title: the first line of the text.
        ticks: the ticks of the schedule.
    """
    stages, several = len(next(slot for tick in ticks for slot in tick.values())), _has_rounds(ticks)
    rows = [  # empty for a tick in which this stack has no work
        [[_name(kind, slot[stage], several) for kind, slot in tick.items()] or [""] for tick in ticks]
        for stage in range(stages)
    ]
    width = max(len(name) for row in rows for tick in row for name in tick)
    first = len(f"stage {stages - 1}")
    lines = [
        " │ ".join([f"stage {stage}".ljust(first), *(" ".join(name.ljust(width) for name in tick) for tick in row)])
        for stage, row in enumerate(rows)
    ]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _has_rounds(ticks: Ticks) -> bool:
    return any(work and work.round for tick in ticks for slot in tick.values() for work in slot)


def _name(kind: str, work: Any, several: bool) -> str:
    """Return the text of a stage's work in a slot, such as `F3`."""
    if work is None:
        return "."
    return f"{kind[0].upper()}{work.microbatch}{chr(ord('a') + work.round) if several else ''}"


def figure(title: str, ticks: Ticks) -> "Figure":
    """Draw a schedule as a matplotlib figure, in which time runs to the right, stages are rows, and waiting is gray.

    Args:
        title: the title of the figure.
        ticks: the ticks of the schedule.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    slots = [(kind, slot) for tick in ticks for kind, slot in tick.items()]
    kinds, stages, several = dict.fromkeys(kind for kind, _ in slots), len(slots[0][1]), _has_rounds(ticks)
    # A backward pass repeats the forward pass, and has two products for each product of the forward pass, one of them
    # for the gradient of weights.
    lengths = {"forward": 1.0, "backward": 2.0 if "weights" in kinds else 3.0, "weights": 1.0}
    whole = sum(lengths[kind] for kind, _ in slots)
    made = Figure(figsize=(max(6.0, min(20.0, 0.28 * whole)), 1.1 + 0.45 * stages), dpi=150)
    made.set_layout_engine("constrained")
    axes, start = made.subplots(), 0.0
    for kind, slot in slots:
        for stage, work in enumerate(slot):
            fill, edge = _COLOURS[kind] if work else (_IDLE, "white")
            style: dict[str, Any] = {"facecolor": fill, "edgecolor": edge, "linewidth": 0.6}
            axes.add_patch(Rectangle((start, stage + 0.06), lengths[kind], 0.88, **style))
            if work:
                middle = start + lengths[kind] / 2, stage + 0.5
                axes.text(*middle, _name(kind, work, several)[1:], ha="center", va="center", fontsize=7, color=_INK)
        start += lengths[kind]
    axes.set(xlim=(0, whole), ylim=(stages, 0), xlabel="time, in forward passes of a chunk")
    axes.set_yticks([stage + 0.5 for stage in range(stages)])
    axes.set_yticklabels([f"stage {stage}" for stage in range(stages)])
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    colours = [_COLOURS[kind] for kind in kinds]
    legend = [Rectangle((0, 0), 1, 1, facecolor=fill, edgecolor=edge) for fill, edge in colours]
    legend.append(Rectangle((0, 0), 1, 1, facecolor=_IDLE, edgecolor="white"))
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
    axes.legend(legend, [*kinds, "waiting"], ncols=4, fontsize=7, frameon=False, **place)
    axes.set_title(title, fontsize=9, loc="left", color=_INK)
    return made
