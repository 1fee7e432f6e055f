"""Compare a small Switch encoder–decoder with its dense T5: the loss by step and by time, as in Switch's figures.

    python benchmarks/switch_curves.py --out curves --plot docs/images/switch_curves.png --write docs/moe.md

Both models are trained by `gspmd train --config switch-small`, side by side on one device and one core each. The task
is span corruption on the source of Python's standard library. The dense model has no experts. Without the routers, both
models have the same FLOPs per token. A finished run is read from its folder; an interrupted one is resumed.

Source: Fedus et al. 2021, Switch Transformers (arXiv 2101.03961), figures 4 to 6.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page import INK, called, style, write_between

from gspmd.display import images
from gspmd.training.checkpoints import newest
from gspmd.training.toml import from_mapping
from gspmd_models import ModelConfig

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "switch-small.toml"
MARKS = ("<!-- table: python benchmarks/switch_curves.py -->", "<!-- end of table -->")
COLORS = {"dense T5": "#57606a", "Switch": "#1f6feb"}
NEAR = 25
"""Steps over which a curve of the loss is averaged, because single batches differ by more than the models do."""


def main() -> None:
    """Train the models that are not trained yet, side by side, and write the plot and the table."""
    options = _parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    running = [_started(options.out, name, core, options.steps) for core, name in enumerate(COLORS)]
    if any(process is not None and process.wait() for process in running):
        sys.exit("a run has failed; its output says why.")
    runs = {name: _rows(options.out, name) for name in COLORS}
    if options.plot:
        _draw(runs, options.plot)
    if options.write:
        write_between(options.write, MARKS, "\n".join(_table(runs)))
    print("\n".join(_table(runs)))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/switch-curves"), help="folder of the runs")
    parser.add_argument("--steps", type=int, default=_settings()["training"]["steps"], help="updates of each run")
    parser.add_argument("--plot", type=Path, default=None, help="PNG of the curves")
    parser.add_argument("--write", type=Path, default=None, help="page whose table is replaced")
    return parser.parse_args()


def _settings() -> dict[str, Any]:
    return tomllib.loads(CONFIG.read_text())


def _started(out: Path, name: str, core: int, steps: int) -> subprocess.Popen | None:
    """Start a run on one core and return its process; return None if the run is finished already."""
    folder = _folder(out, name)
    if _is_finished(folder):
        return None
    flags = ["--devices", "1", "--layout", "replicated", "--out", str(folder), "--steps", str(steps)]
    if newest(folder) is not None:
        flags.append("--resume")
    if name == "dense T5":
        # Without the table [model.moe] there are no experts; everything else is as in the config.
        config = out / "dense.toml"
        text = CONFIG.read_text()
        config.write_text(text[: text.index("[model.moe]")] + text[text.index("[training]") :])
    else:
        config = CONFIG
    command = [sys.executable, "-m", "gspmd", "train", "--config", str(config), *flags]

    def alone() -> None:
        os.sched_setaffinity(0, {core})

    with (out / f"{folder.name}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=alone)


def _folder(out: Path, name: str) -> Path:
    return out / name.lower().replace(" ", "-")


def _is_finished(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and "gzip_bits_per_byte" in path.read_text().splitlines()[-1]


def _rows(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_folder(out, name) / "metrics.jsonl").read_text().splitlines()]


def _seconds(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each update the total seconds of all updates so far, without the seconds of validations."""
    training = _settings()["training"]
    tokens = training["batch"] * training["length"]
    return list(accumulate(tokens / row["tokens_per_second"] for row in rows if "tokens_per_second" in row))


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each step the mean cross-entropy of the last `NEAR` steps."""
    values = [row["cross_entropy"] for row in rows if "cross_entropy" in row]
    return [mean(values[max(0, at - NEAR + 1) : at + 1]) for at in range(len(values))]


def _table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    yield "| model | parameters | MFLOP per token | steps | minutes | loss at the end | held-out bits per byte |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    settings = _settings()
    for name, rows in runs.items():
        table = {key: value for key, value in settings["model"].items() if key != "moe" or name == "Switch"}
        model, training = from_mapping(ModelConfig, table), settings["training"]
        flops = model.flops_per_token(training["length"], training["source_length"]) / 1e6
        losses, minutes = _losses(rows), _seconds(rows)[-1] / 60
        yield (f"| {name} | {model.num_parameters / 1e6:.2f} million | {flops:.1f} | {len(losses)} | {minutes:.1f} | "
               f"{losses[-1]:.3f} | {rows[-1]['val_bits_per_byte']:.3f} |")  # fmt: skip


def _draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    style(by_step, "by step", "step")
    style(by_time, "by time", "minutes on one core")
    for name, rows in runs.items():
        losses, seconds = _losses(rows), _seconds(rows)
        _curve(by_step, name, range(1, len(losses) + 1), losses)
        _curve(by_time, name, [second / 60 for second in seconds], losses)
    by_step.legend(frameon=False, loc="upper right", title="cross-entropy at the end", title_fontsize=8)
    by_step.set_ylabel("cross-entropy of a predicted token, nats", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = ", ".join(f"{name} {_losses(rows)[-1]:.3f}" for name, rows in runs.items())
    images.save(figure, path, "cross-entropy", ends, called())


def _curve(axes: Axes, name: str, along: Sequence[float], losses: Sequence[float]) -> None:
    dashed = (0, (4, 2)) if name == "dense T5" else "-"
    axes.plot(along, losses, linewidth=2, color=COLORS[name], linestyle=dashed, label=f"{name}: {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
