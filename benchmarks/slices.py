"""Bytes and seconds on the network between slices: training on 1 to 64 slices of 256 TPU v5p, and PaLM on two pods.

    python benchmarks/slices.py --json benchmarks/results/slices.json --write docs/slices.md   # half an hour
    python benchmarks/slices.py --json benchmarks/results/slices.json --plot docs/images/slices.png

The step of Llama 2 70B has one row of 4,096 tokens for each chip, and each slice has a copy of the model
(benchmarks/slices.toml). libtpu compiles it for all slices; nothing runs. The programs of two and of 64 slices differ
in what they send.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from page import Kept, called, style, write_tables

import gspmd
from gspmd import host
from gspmd.audit import topology
from gspmd.commands import compile as command
from gspmd.display import images

SLICES = (1, 2, 4, 16, 64)
LAYOUT = "benchmarks/slices.toml"
PALM = (
    "--phase train --config palm-540b --lowering blocking --layout benchmarks/slices.toml --model.remat full "
    "--topology tpu-v4:12x16x16*2 --mesh x=2,y=256,z=12 --batch 2048 --length 2048 "
    "--model.vocabulary-multiple 768 "
    "--set attention.w_k=E_yKD --set attention.w_v=E_yKD --set attention.key=B_xyLKD"
)
"""PaLM 540B on two pods of 3,072 v4, each of which splits the model in 12 and its half of the batch in 256 (Chowdhery
et al. 2022, arXiv 2204.02311, section 4)."""


def command_of(slices: int) -> str:
    """Return the flags of the training step on a number of slices."""
    name = "tpu-v5p:4x8x8" + (f"*{slices}" if slices > 1 else "")
    return (
        f"--phase train --config llama-2-70b --lowering blocking --layout {LAYOUT} "
        f"--model.remat dots-except-hidden --topology {name} --mesh x={slices},y=64,z=4 --batch {256 * slices} "
        "--length 4096"
    )


def measured(kept: Kept, slices: int) -> dict[str, Any]:
    """Return the figures of the compiled step on a number of slices."""
    flags = command_of(slices)

    def compiled() -> dict[str, Any]:
        settings = command.parse(flags.split())
        report = command.compiled(settings, topology(settings.topology))
        assert report.ledger is not None
        assert report.timeline is not None
        away = [part for part in report.timeline.parts if part.axes == ("x",)]
        return {
            "step": report.timeline.step_seconds,
            "waits": report.timeline.exposed_seconds,
            "away": sum(part.seconds for part in away),
            "away_exposed": sum(part.exposed for part in away),
            "network_bytes": report.ledger.network_bytes,
            "planned_network_bytes": report.plan.network_bytes(report.mesh, report.topology.chip),
            "wire_bytes": report.ledger.wire_bytes,
            "planned_wire_bytes": report.plan.wire_bytes,
        }

    return kept(flags, compiled)


def growth(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of the step on growing numbers of slices."""
    yield (
        "| slices | chips | step | throughput of a chip, relative to one slice | sent over the network by a chip "
        "| as planned | seconds on the network | waiting | all bytes, compiled / planned |"
    )
    yield "|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    alone = measured(kept, 1)
    for slices in SLICES:
        found = measured(kept, slices)
        away, planned = found["network_bytes"], found["planned_network_bytes"]
        yield (
            f"| {slices} | {256 * slices:,} | {found['step']:.2f} s | {alone['step'] / found['step']:.1%} "
            f"| {away / 1e6:,.1f} MB | {planned / 1e6:,.1f} MB | {found['away'] * 1e3:,.0f} ms "
            f"| {found['away_exposed'] * 1e3:,.1f} ms | {found['wire_bytes'] / found['planned_wire_bytes']:.4f} |"
        )


def palm(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of the bytes that PaLM's step sends between its pods, planned and published."""

    def planned() -> dict[str, Any]:
        settings = command.parse(PALM.split())
        target = topology(settings.topology)
        mesh = command.mesh_of(settings, target)
        program, args, _ = command.program_of(settings, command.layout_of(settings), mesh)
        with jax.set_mesh(mesh), gspmd.lowering("blocking"):
            plan = gspmd.trace(program, *args)
        return {"network_bytes": plan.network_bytes(dict(mesh.shape), target.chip)}

    found = kept(PALM, planned)
    a_host = 4 * found["network_bytes"] / 1e9
    yield "| PaLM 540B, two pods of 3,072 v4 | planned | published |"
    yield "|---|--:|--:|"
    yield f"| gradients that a host of four chips sends to the other pod | {a_host:.2f} GB | about 1.3 GB |"


def draw(kept: Kept, path: Path) -> None:
    """Draw the seconds in which a step uses the network, and the part of these seconds in which the step waits."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    several = SLICES[1:]
    figures = [measured(kept, slices) for slices in several]
    axes = plt.figure(figsize=(7.2, 3.6), dpi=160, layout="constrained").add_subplot()
    places = range(len(several))
    axes.bar(places, [1e3 * each["away"] for each in figures], width=0.55, color="#9db7d5", label="on the network")
    axes.bar(places, [1e3 * each["away_exposed"] for each in figures], width=0.55, color="#c44e52", label="waited for")
    for place, each in zip(places, figures):
        share = measured(kept, 1)["step"] / each["step"]
        axes.annotate(f"{share:.1%}", (place, 1e3 * each["away"]), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(places, [f"{slices} · {256 * slices:,}" for slices in several])
    style(
        axes,
        "Milliseconds of a step's gradients between slices",
        "slices · chips; above each bar a chip's throughput, of that on one slice",
    )
    axes.legend(frameon=False, loc="upper left")
    axes.margins(y=0.2)
    seconds = ", ".join(f"{1e3 * each['away']:.0f} ms" for each in figures)
    images.save(axes.get_figure(), path, "Milliseconds of a step's gradients between slices", seconds, called())


def main() -> None:
    """Compile, print the tables, and write or draw them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES), help="default: all")
    parser.add_argument("--json", type=Path, help="keep the figures in this file, and take them from there")
    parser.add_argument("--write", type=Path, help="replace the tables in a page")
    parser.add_argument("--plot", type=Path, help="draw what a step waits for, as PNG")
    options = parser.parse_args()
    host.keep_compiled(False)
    host.start(1, "cpu")
    kept = Kept(options.json)
    write_tables("slices.py", {name: TABLES[name] for name in options.only}, kept, (), options.write)
    if options.plot:
        draw(kept, options.plot)


TABLES = {"growth": growth, "palm": palm}

if __name__ == "__main__":
    main()
