"""Pictures of a run: the loss curve, and the share of the tokens that each expert got."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_INK, _FAINT, _BLUE, _RED, _GREEN = "#22272e", "#d8dee6", "#1f6feb", "#d1495b", "#2a9d68"


def loss_curve(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draws bits per byte over the steps, with the held-out figures and gzip's.

    Args:
        rows: objects of metrics.jsonl.
        path: the PNG to write.
    """
    trained = [row for row in rows if row.get("bits_per_byte") is not None]
    tested = [row for row in rows if row.get("val_bits_per_byte") is not None]
    figure, axes = _figure(8, 4.5)
    steps, bits = [row["step"] for row in trained], np.array([row["bits_per_byte"] for row in trained])
    axes.plot(steps, bits, color=_BLUE, alpha=0.25, linewidth=1)
    axes.plot(steps, _smooth(bits), color=_BLUE, linewidth=2, label="training")
    if tested:
        points = [row["step"] for row in tested], [row["val_bits_per_byte"] for row in tested]
        axes.plot(*points, "o-", color=_RED, markersize=5, linewidth=1.2, label=f"held out: {points[1][-1]:.3f}")
    gzip = [row["gzip_bits_per_byte"] for row in rows if row.get("gzip_bits_per_byte") is not None]
    if gzip:
        axes.axhline(gzip[-1], color=_GREEN, linestyle=(0, (4, 3)), linewidth=1.4, label=f"gzip: {gzip[-1]:.3f}")
    _label(axes, "bits per byte", "step", "bits per byte")
    axes.legend(frameon=False, loc="upper right")
    # The first steps stand far above all others; what matters happens below.
    if len(bits) > 20:
        axes.set_ylim(0.9 * min(bits.min(), *(gzip or [np.inf])), min(bits.max(), 2.2 * np.median(bits)))
    _save(figure, path)


def expert_load(rows: Sequence[dict[str, Any]], path: str | Path) -> bool:
    """Draws each expert's share of the tokens over the steps, one panel for each layer of experts.

    Args:
        rows: objects of metrics.jsonl; their `load` is [layers, X], each row summing to one when nothing is dropped.
        path: the PNG to write.

    Returns:
        Whether there was a load to draw.
    """
    loaded = [row for row in rows if np.ndim(row.get("load")) == 2 and np.size(row["load"])]
    if not loaded:
        return False
    steps, load = [row["step"] for row in loaded], np.array([row["load"] for row in loaded])
    load = load / np.maximum(load.sum(-1, keepdims=True), 1e-9)
    layers, experts = load.shape[1:]
    figure = Figure(figsize=(9, 0.8 + 1.9 * layers), dpi=150, layout="constrained")
    for layer, axes in enumerate(np.atleast_1d(figure.subplots(layers, 1, sharex=True))):
        _style(axes)
        image = axes.imshow(
            load[:, layer].T * experts, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest",
            extent=(steps[0] - 0.5, steps[-1] + 0.5, experts - 0.5, -0.5),
        )  # fmt: skip
        axes.grid(False)
        axes.set_ylabel("expert", color=_INK)
        axes.set_yticks(range(experts) if experts <= 16 else range(0, experts, -(-experts // 8)))
        axes.set_title(f"layer of experts {layer + 1} of {layers}", loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("step", color=_INK)
    bar = figure.colorbar(image, ax=figure.axes, label="share of the tokens, 1 = an equal share", shrink=0.9)
    bar.outline.set_visible(False)
    _save(figure, path)
    return True


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


def _label(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK)
    axes.set_xlabel(across, color=_INK)
    axes.set_ylabel(up, color=_INK)


def _smooth(values: np.ndarray) -> np.ndarray:
    """An exponential average over about a fiftieth of the curve, without the pull of its first value."""
    keep = 1 - 1 / max(1.0, len(values) / 50)
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight)
    return np.array(out)


def _save(figure: Figure, path: str | Path) -> None:
    FigureCanvasAgg(figure).print_png(str(path))
