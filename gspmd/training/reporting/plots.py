"""Plots of a run: the loss curve, and the load of every expert over the steps."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gspmd.display import images

_INK, _MUTED, _FAINT, _BLUE, _RED, _GREEN = "#22272e", "#57606a", "#d8dee6", "#1f6feb", "#d1495b", "#2a9d68"
# The largest number of columns of a heat map: more columns would be too narrow to see.
_COLUMNS = 240
# The height of a label, including the space above it, as a fraction of the axes.
_LABEL = 0.055


def loss_curve(rows: Sequence[dict[str, Any]], path: str | Path, name: str = "") -> None:
    """Draw bits per byte over the steps, for training, held-out text and gzip; each curve is labeled at its end.

    Args:
        rows: the objects of metrics.jsonl.
        path: the PNG file to write.
        name: the name of the run, for the title.
    """
    trained = [row for row in rows if row.get("bits_per_byte") is not None]
    tested = [row for row in rows if row.get("val_bits_per_byte") is not None]
    gzip = [row["gzip_bits_per_byte"] for row in rows if row.get("gzip_bits_per_byte") is not None][-1:]
    figure, axes = _figure(8, 4.5)
    steps, bits = [row["step"] for row in trained], np.array([row["bits_per_byte"] for row in trained])
    smooth, ends = _smooth(bits), []
    axes.plot(steps, bits, color=_BLUE, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth, "o" if len(bits) == 1 else "-", color=_BLUE, markersize=5, linewidth=2)
    ends += [(float(smooth[-1]), "training", _BLUE)] if len(bits) else []
    if tested:
        points = [row["step"] for row in tested], [row["val_bits_per_byte"] for row in tested]
        axes.plot(*points, color=_RED, linewidth=1.2, zorder=3)
        ends.append((points[1][-1], "held out", _RED))
    if gzip:
        axes.axhline(gzip[0], color=_GREEN, linestyle=(0, (4, 3)), linewidth=1.4)
        ends.append((gzip[0], "gzip", _GREEN))
    _title(axes, "bits per byte", name)
    axes.set_xlabel("step", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    # The first steps are far above all others: clip them.
    if len(bits) > 20:
        top = min(bits.max(), 2.2 * np.median(bits))
        floor = min(bits.min(), *(value for value, *_ in ends))
        axes.set_ylim(floor - 0.06 * (top - floor), top + 0.03 * (top - floor))
    # Points at the edges are drawn whole; points beyond are left out, since matplotlib would make room for them.
    top = axes.get_ylim()[1]
    seen = [(row["step"], value) for row in tested if (value := row["val_bits_per_byte"]) <= top]
    dots = [step for step, _ in seen], [value for _, value in seen]
    axes.plot(*dots, "o", color=_RED, markersize=5, clip_on=False, zorder=3)
    _label_ends(axes, ends)
    images.save(figure, path, name or "loss curve", f"{steps[-1]} steps" if steps else "")


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Label each curve at its end with its name and last value; overlapping labels are moved apart.

    If a curve ends outside the clipped axes, its label is at the edge of the axes. A label at the curve's value would
    leave no room for the axes.
    """
    low, high = axes.get_ylim()
    heights = _apart([min(max((value - low) / (high - low), 0.0), 1.0) for value, *_ in ends], _LABEL)
    for (value, what, color), height in zip(ends, heights, strict=True):
        axes.text(1.015, height, f"{what} {value:.3f}", transform=axes.transAxes, color=color, va="center", fontsize=10)


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights in [0, 1] apart, as much up as down, so that neighbors differ by at least `gap`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    up, down = list(heights), list(heights)
    for below, above in pairwise(order):
        up[above] = max(up[above], up[below] + gap)
    for above, below in pairwise(reversed(order)):
        down[below] = min(down[below], down[above] - gap)
    return [(high + low) / 2 for high, low in zip(up, down, strict=True)]


def expert_load(rows: Sequence[dict[str, Any]], path: str | Path, name: str = "") -> bool:
    """Draw each expert's load over the steps; every layer has a panel, with the layer's last metrics in its title.

    Args:
        rows: the objects of metrics.jsonl. The value of `load` is [layers, X], the fraction of a layer's choices that
            each expert gets. The values of `dropped`, `entropy` and `confidence`, [layers], appear in the titles if an
            object has them.
        path: the PNG file to write.
        name: the name of the run, for the title.

    Returns:
        Whether there was a load to draw.
    """
    loaded = [row for row in rows if np.ndim(row.get("load", 0)) == 2 and np.size(row["load"])]
    if not loaded:
        return False
    edges, load = _binned(loaded)
    layers, experts = load.shape[1:]
    height = 1.9 if layers <= 6 else 1.2
    figure = Figure(figsize=(9, 1.2 + height * layers), dpi=150, layout="constrained")
    figure.suptitle("load of every expert", x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    figure.text(0.99, 0.985, name, ha="right", va="top", fontsize=10, color=_MUTED)
    for layer, axes in enumerate(figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]):
        mesh = _heat(axes, edges, load[:, layer].T * experts)
        axes.set_title(f"expert layer {layer + 1} of {layers}", loc="left", fontsize=10, color=_INK)
        axes.set_title(_ending(loaded, layer), loc="right", fontsize=9, color=_MUTED)
    axes.set_xlabel("step", color=_INK)
    bar = figure.colorbar(mesh, ax=figure.axes, shrink=0.9, aspect=30, extend="both", ticks=[0.25, 0.5, 1, 2, 4])
    bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"])
    bar.ax.minorticks_off()
    bar.ax.tick_params(colors=_INK, length=0)
    bar.set_label("times an equal share", color=_INK)
    bar.outline.set_visible(False)
    images.save(figure, path, name or "load of every expert", f"{rows[-1]['step']} steps")
    return True


def _binned(loaded: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays for the heat map.

    The first array has the edges of the map's columns, in training steps, [columns + 1]. The second array has the mean
    load of each column, [columns, layers, X].
    """
    steps, load = np.array([row["step"] for row in loaded]), np.array([row["load"] for row in loaded], float)
    starts = np.unique(np.linspace(0, len(steps), min(len(steps), _COLUMNS) + 1).astype(int))[:-1]
    counts = np.diff([*starts, len(steps)])
    mean = np.add.reduceat(load, starts, axis=0) / counts[:, None, None]
    return np.append(steps[starts] - 0.5, steps[-1] + 0.5), mean


def _heat(axes: Axes, edges: np.ndarray, shares: np.ndarray) -> QuadMesh:
    """Draw one panel of loads [X, columns], on a logarithmic scale around the balanced load."""
    experts = len(shares)
    mesh = axes.pcolormesh(
        edges, np.arange(experts + 1) - 0.5, np.maximum(shares, 1e-9), cmap="RdBu_r", norm=LogNorm(0.25, 4)
    )
    _style(axes)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(False)
    axes.invert_yaxis()
    axes.set_ylabel("expert", color=_INK)
    axes.set_yticks(range(experts) if experts <= 16 else range(0, experts, -(-experts // 8)))
    if experts <= 32:
        axes.hlines(np.arange(1, experts) - 0.5, edges[0], edges[-1], color="white", linewidth=1.2)
    return mesh


def _ending(loaded: Sequence[dict[str, Any]], layer: int) -> str:
    """Return the text for the title of a layer's panel: its metrics, averaged over the last tenth of the steps."""
    last = loaded[-max(1, len(loaded) // 10) :]
    said = []
    for name, text in (
        ("dropped", "{:.1%} dropped"),
        ("entropy", "entropy {:.2f}"),
        ("confidence", "confidence {:.2f}"),
    ):
        values = [row[name][layer] for row in last if np.ndim(row.get(name, 0)) == 1 and row[name][layer] is not None]
        said += [text.format(np.mean(values))] if values else []
    return "at the end: " + ", ".join(said) if said else ""


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    _style(axes)
    return figure, axes


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def _title(axes: Axes, title: str, name: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK)
    axes.set_title(name, loc="right", fontsize=10, color=_MUTED)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Smooth a curve by local linear regression, over about a fiftieth of its length to either side.

    Unlike a moving or an exponential average, the regression does not lag behind a falling curve, and is not biased at
    the ends.
    """
    width = len(values) // 50
    if not width:
        return values
    offsets = np.arange(-2 * width, 2 * width + 1)
    weights = np.exp(-((offsets / width) ** 2))
    moment = lambda what, power: np.correlate(what, weights * offsets**power, "same")  # noqa: E731
    w0, w1, w2 = (moment(np.ones(len(values)), power) for power in range(3))
    v0, v1 = (moment(values, power) for power in range(2))
    return (w2 * v0 - w1 * v1) / (w0 * w2 - w1**2)
