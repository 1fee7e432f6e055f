"""Plot latency against cost per token of PaLM 8B, 62B and 540B on TPU v4, each point in the planner's layout.

    python benchmarks/pareto.py --json pareto.json      # plan every point, compile the frontiers; continues old runs
    python benchmarks/pareto.py --from pareto.json --image docs/images/palm-pareto.png --write docs/palm.md

As in figure 1 of Pope et al. 2022, each point is a decode step with 2048 tokens of context in the cache, or the prefill
of a prompt of 2048 tokens, with one batch size and number of chips. Cost is chips · seconds / tokens. For each point,
all layouts of `serving_layouts` are ranked by the planned seconds of the actual step (`rank_serving`). A plan leaves
out the work between products, so a compiled program is slower. Points on the frontier are compiled until every point on
the frontier is compiled. All other points are off the frontier even with their planned seconds. Needs the compiler for
TPUs, but no TPU.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from page import called, place_labels, write_between
from palm import File, compiled

import gspmd_models as models
from gspmd import host
from gspmd.annotate import Spec
from gspmd.audit import topology
from gspmd.commands import configs
from gspmd.display import images
from gspmd.display.units import amount_of_seconds
from gspmd.training.toml import load_toml
from gspmd_models.decoding import rank_serving, serving_layouts

CHIPS = {"palm-8b": (8, 16, 32), "palm-62b": (16, 32, 64), "palm-540b": (64, 128, 256)}
SLICES = {8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
BATCHES = {"decode": (1, 4, 16, 64, 256, 512), "prefill": (1, 16, 64, 512)}
PRESETS = {
    "decode": ("weight-stationary-2d", "weight-stationary-1d"),
    "prefill": ("weight-stationary-2d", "weight-stationary-1d", "weight-gathered-x", "weight-gathered-xy",
                "weight-gathered-xyz"),
}  # fmt: skip
CONTEXT = 2048
FEW = 64
"""The maximum number of rows served with int8 weights, as in the paper; larger batches are served in bfloat16."""
MARKS = ("<!-- points: python benchmarks/pareto.py -->", "<!-- end of points -->")
NAMES = {"palm-8b": "PaLM 8B", "palm-62b": "PaLM 62B", "palm-540b": "PaLM 540B"}


@dataclass(frozen=True)
class Point:
    """One phase of a model on a number of chips, with a number of rows, in the layout that the planner picks.

    Attributes:
        seconds: planned seconds of a step.
        compiled: simulated seconds of the compiled step; 0 if it was not compiled.
    """

    model: str
    phase: str
    chips: int
    batch: int
    weights: str
    layout: str
    seconds: float
    compiled: float = 0.0

    @property
    def latency(self) -> float:
        """Seconds of a step: those of the compiled step or, if it was not compiled, the planned seconds."""
        return self.compiled or self.seconds

    @property
    def cost(self) -> float:
        """Chip-seconds per token."""
        return self.chips * self.latency / (self.batch * (CONTEXT if self.phase == "prefill" else 1))


def main() -> None:
    """Plan and compile the points, draw the plot, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CHIPS, help="only this one")
    parser.add_argument("--phase", choices=BATCHES, help="only this one")
    parser.add_argument("--json", type=Path, help="keep the points in this file, and continue from it")
    parser.add_argument("--from", dest="given", type=Path, nargs="+", help="take the points of these files")
    parser.add_argument("--no-compile", action="store_true", help="plan only")
    parser.add_argument("--image", type=Path, help="draw the points")
    parser.add_argument("--write", type=Path, help="replace the table of the frontiers in a page")
    options = parser.parse_args()
    if options.given:
        points = [point for path in options.given for point in read(path)]
    else:
        host.start(1, "cpu")  # for JAX itself: the slices' devices exist for the compiler only
        points = measure(options)
    if options.image:
        draw(points, options.image)
    text = "\n".join(table(points))
    print(text)
    if options.write:
        write_between(options.write, MARKS, text)


def measure(options: argparse.Namespace) -> list[Point]:
    """Plan every point, then compile points until all of the frontiers are compiled."""
    points = read(options.json) if options.json and options.json.exists() else []
    for model in [options.model] if options.model else CHIPS:
        for phase in [options.phase] if options.phase else BATCHES:
            there = {(point.chips, point.batch) for point in points if (point.model, point.phase) == (model, phase)}
            for chips, batch in sorted({(chips, batch) for chips in CHIPS[model] for batch in BATCHES[phase]} - there):
                points += plan(model, phase, chips, batch)
                keep(options.json, points)
            while not options.no_compile:
                of_both = [point for point in points if (point.model, point.phase) == (model, phase)]
                if not (new := next((point for point in frontier(of_both) if not point.compiled), None)):
                    break
                points[points.index(new)] = measured(new)
                keep(options.json, points)
    return points


def read(path: Path) -> list[Point]:
    """Read the points of a file."""
    return [Point(**each) for each in json.loads(path.read_text())]


def keep(path: Path | None, points: Iterable[Point]) -> None:
    """Write the points into a file."""
    if path:
        path.write_text(json.dumps([asdict(point) for point in points], indent=1))


def plan(model: str, phase: str, chips: int, batch: int) -> list[Point]:
    """Plan a point in its fastest layout; the list is empty if no layout fits."""
    mesh, config, weights = slice_of(chips)[1], config_of(model), "int8" if batch <= FEW else "bfloat16"
    length = CONTEXT if phase == "prefill" else 1
    ranked = rank_serving(
        config, layouts(config, phase, mesh), mesh, phase, batch=batch, room=CONTEXT, length=length, weights=weights,
        lowerings=("blocking",),
    )  # fmt: skip
    if not ranked or ranked[0].reason:
        return []
    print(f"{model} {phase} {chips} chips, {batch} rows, {weights}: {ranked[0]}", flush=True)
    return [Point(model, phase, chips, batch, weights, ranked[0].name, ranked[0].seconds)]


def measured(point: Point) -> Point:
    """Compile a point.

    If the program does not fit, the seconds of the point are infinite, which keeps the point off every frontier.
    """
    machine, mesh = slice_of(point.chips)
    config = config_of(point.model)
    layout = next(each for each in layouts(config, point.phase, mesh) if each.name == point.layout)
    length = CONTEXT if point.phase == "prefill" else 1
    report = compiled(config, layout, machine, mesh, point.phase, point.batch, CONTEXT, length, point.weights)
    seconds = report.timeline.step_seconds if report.fits and report.timeline else float("inf")
    print(
        f"  compiled: {point.model} {point.chips} chips, {point.batch} rows: {amount_of_seconds(seconds)}", flush=True
    )
    return replace(point, compiled=seconds)


def slice_of(chips: int):
    """Return a slice, and a mesh along its torus axes."""
    machine = topology(f"tpu-v4:{SLICES[chips]}")
    return machine, machine.mesh(dict(zip("xyz", machine.shape)))


def config_of(model: str) -> models.ModelConfig:
    """Return the configuration of a model."""
    return load_toml(File, configs.find(model)).model


def layouts(config: models.ModelConfig, phase: str, mesh) -> list:
    """Return the layouts to try.

    Heads are padded to a multiple of the number of devices, or otherwise of the number of devices along y and z.
    """
    alone = mesh.shape["y"] * mesh.shape["z"]
    padded = [-(-config.heads // share) * share for share in (mesh.devices.size, alone)]
    heads = next((size for size in padded if size < 2 * config.heads), config.heads)
    found = serving_layouts(PRESETS[phase], long=False)
    return [each.override({"padding.H": heads}) if heads > config.heads else each for each in found]


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other point of their model and phase beats in latency and cost, fastest first."""
    points, best = sorted(points, key=lambda point: (point.latency, point.cost)), []
    for point in points:
        if point.latency < float("inf") and all(point.cost < other.cost for other in best):
            best.append(point)
    return best


def table(points: list[Point]) -> list[str]:
    """Format the frontiers as Markdown tables."""
    lines = []
    for phase in BATCHES:
        for model in CHIPS:
            of_model = [point for point in points if (point.model, point.phase) == (model, phase)]
            if not of_model:
                continue
            lines += ["", f"**{NAMES[model]}, {phase}** ({len(of_model)} points planned)", ""]
            lines += [
                "| chips | rows | weights | layout, queries, cache | a step, planned | compiled | chip-ms per token |"
            ]
            lines += ["|--:|--:|---|---|--:|--:|--:|"]
            lines += [
                f"| {p.chips} | {p.batch} | {p.weights} | `{p.layout}` | {amount_of_seconds(p.seconds)} | "
                f"{amount_of_seconds(p.compiled) if p.compiled else ''} | {1e3 * p.cost:.3g} |"
                for p in frontier(of_model)
            ]
    return lines[1:]


COLORS = {"palm-8b": "#009e73", "palm-62b": "#0072b2", "palm-540b": "#d55e00"}
INK, FAINT = "#27313d", "#8b96a3"
SHORT = {"weight-stationary-2d": "2D", "weight-stationary-1d": "1D", "weight-gathered-x": "WG x",
         "weight-gathered-xy": "WG xy", "weight-gathered-xyz": "WG xyz"}  # fmt: skip
TITLES = {
    "decode": ("Decoding, 2048 tokens of context", "milliseconds per step"),
    "prefill": ("Reading a prompt of 2048 tokens", "seconds"),
}


def draw(points: list[Point], path: Path) -> None:
    """Draw latency against cost in a panel for each phase, with labelled frontiers in full color."""
    from matplotlib.figure import Figure

    style = {"font.family": "DejaVu Sans", "font.size": 10}
    import matplotlib

    with matplotlib.rc_context(style):
        figure = Figure(figsize=(15, 7.6), dpi=160, layout="constrained")
        figure.suptitle(
            "Serving PaLM on TPU v4: latency against cost, in the layout that the planner picks", fontsize=15,
            color=INK, weight="bold", x=0.012, ha="left",
        )  # fmt: skip
        panels = [
            panel(axes, [point for point in points if point.phase == phase], phase)
            for axes, phase in zip(figure.subplots(1, 2), BATCHES)
        ]
        figure.draw_without_rendering()  # labels are placed relative to everything else, which must be laid out first
        figure.set_layout_engine("none")
        for axes, best in zip(figure.axes, panels):
            place_labels(axes, [(said(point), spot, point.model) for point, spot in best])
        fastest = {
            name: min(each.latency for each in points if (each.model, each.phase) == (name, "decode"))
            for name in COLORS
        }
        figures = ", ".join(f"{name} {amount_of_seconds(seconds)}" for name, seconds in fastest.items())
        images.save(figure, path, "Serving PaLM on TPU v4: latency against cost", figures, called())


Spot = tuple[float, float]


def panel(axes, points: list[Point], phase: str) -> list[tuple[Point, Spot]]:
    """Draw one phase, and return the points of its frontiers with their coordinates."""
    kept, scale = [], 1e3 if phase == "decode" else 1.0
    for model, color in COLORS.items():
        of_model = [point for point in points if point.model == model and point.latency < float("inf")]
        best = frontier(of_model)
        rest = [point for point in of_model if point not in best]
        spot = lambda group: ([p.latency * scale for p in group], [1e3 * p.cost for p in group])  # noqa: E731
        axes.scatter(*spot(rest), s=16, color=color, alpha=0.22, linewidths=0, zorder=2)
        axes.plot(*spot(best), color=color, linewidth=1.8, alpha=0.85, zorder=3)
        for weights, face in (("int8", "white"), ("bfloat16", color)):
            for marker, simulated in (("o", True), ("D", False)):
                group = [point for point in best if (point.weights, bool(point.compiled)) == (weights, simulated)]
                axes.scatter(
                    *spot(group), s=46, marker=marker, facecolor=face, edgecolor=color, linewidth=1.6, zorder=4
                )
        kept += [(point, (point.latency * scale, 1e3 * point.cost)) for point in best]
        if best:
            axes.annotate(
                NAMES[model], kept[-1][1], xytext=(0, -26), ha="center", textcoords="offset points", fontsize=12,
                weight="bold", color=color,
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel=TITLES[phase][1], ylabel="chip-milliseconds per token")
    axes.set_title(TITLES[phase][0], loc="left", color=INK, fontsize=12)
    axes.grid(True, which="major", color="#e3e7ec", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, which="both", length=3)
    axes.margins(x=0.16, y=0.11)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter("")
    note = (
        "labels: rows × chips, weights, attention; open: int8, filled: bfloat16; circles: compiled, diamonds: planned"
    )
    axes.text(0.0, -0.115, note if phase == "decode" else "", transform=axes.transAxes, fontsize=8.5, color=FAINT)
    return kept


def said(point: Point) -> str:
    """Return a point's label: rows and chips, the layout of the weights, and the axes that shard attention's batch."""
    preset, query, _ = point.layout.split()
    held = Spec.parse(query)
    over = [f"{dim}_{''.join(axes)}" for dim, axes in zip(held.dims, held.axes) if axes and dim in "BL"]
    return f"{point.batch} × {point.chips} chips\n{SHORT[preset]}, {' '.join(over) or 'heads'}"


if __name__ == "__main__":
    main()
