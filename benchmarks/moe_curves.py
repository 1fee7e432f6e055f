"""Compare mixtures of experts with dense models of equal FLOPs per token: five models with three seeds each.

    python benchmarks/moe_curves.py --out curves                                 # 15 runs of some minutes each
    python benchmarks/moe_curves.py --out curves --write docs/moe.md             # finished runs are not repeated
    python benchmarks/moe_curves.py --out curves --plot docs/images/moe_curves.png --only-draw

Every run is `scripts/train_moe.py` with the default config on one device, since losses do not depend on the layout. A
finished run is read from its folder; an interrupted one is resumed. The compared models have equal FLOPs per token. A
token in a top-1 mixture uses as many weights as in the dense model. A token in a top-2 mixture uses as many weights as
in a dense model with layers 1.5 F wide, because every other layer is a mixture and uses 2 F. The routers add a quarter
of a percent.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
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
CONFIG = ROOT / "configs" / "default.toml"
SEEDS = (0, 1, 2)
MARKS = ("<!-- table: python benchmarks/moe_curves.py -->", "<!-- end of table -->")

#: Maps a name to its changes of the config's model (moe None for no experts), and the dense model of equal FLOPs.
MODELS = {
    "dense": ({"moe": None}, "dense"),
    "dense, 1.5 F": ({"moe": None, "feed_forward": 384}, "dense, 1.5 F"),
    "switch": ({"router": "switch"}, "dense"),
    "gshard": ({"router": "gshard"}, "dense, 1.5 F"),
    "dropless": ({"router": "switch", "dispatch": "dropless"}, "dense"),
}
COLORS = {
    "dense": "#57606a",
    "dense, 1.5 F": "#57606a",
    "switch": "#1f6feb",
    "gshard": "#d1495b",
    "dropless": "#2a9d68",
}


def main() -> None:
    """Train the missing runs, and write the numbers, the plot and the table."""
    options = _parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    _hold_to_settings(options)
    for seed in options.seeds if not options.only_draw else ():
        for name in options.models:
            _train(options.out, name, seed, options.flags)
            _write_all(options)
    _write_all(options)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/moe-curves"), help="folder of the runs and results.json")
    parser.add_argument("--plot", type=Path, default=None, help="PNG of the curves")
    parser.add_argument("--write", type=Path, default=None, help="page whose table is replaced")
    parser.add_argument("--only-draw", action="store_true", help="train nothing")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="what to train")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="seeds to train with")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags for every run, such as '--steps 40'")
    return parser.parse_args()


def _hold_to_settings(options: argparse.Namespace) -> None:
    """Exit with a message if the folder's runs were made with different flags or a different default config."""
    settings = json.dumps(tomllib.loads(CONFIG.read_text()), indent=1)
    path, now = options.out / "settings.txt", f"{shlex.join(options.flags)}\n{settings}\n"
    if path.exists() and path.read_text() != now and not options.only_draw:
        sys.exit(f"{options.out} has runs with other flags, or with another {CONFIG.name}; give another --out.")
    path.write_text(path.read_text() if path.exists() else now)


def _train(out: Path, name: str, seed: int, more: Sequence[str]) -> None:
    """Train one model to the end, unless the run is already finished."""
    folder = _folder(out, name, seed)
    if _rows(folder)[-1:] and "gzip_bits_per_byte" in _rows(folder)[-1]:
        return
    flags = ["--seed", str(seed), "--devices", "1", "--layout", "replicated", "--sample-bytes", "0"]
    flags += ["--validation-every", "100", "--validation-batches", "8", "--out", str(folder), *more]
    if newest(folder) is not None:
        flags.append("--resume")
    config = out / f"{_folder(out, name, 0).name[:-2]}.toml"
    config.write_text(_toml(_settings(name)))
    command = [str(ROOT / "scripts" / "train_moe.py"), "--config", str(config), *flags]
    print(f"{name}, seed {seed}: python {shlex.join(command)}", flush=True)
    subprocess.run([sys.executable, *command], check=True)


def _folder(out: Path, name: str, seed: int) -> Path:
    return out / f"{name.replace(', ', '-').replace(' ', '')}-{seed}"


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _results(out: Path) -> dict[str, dict[str, Any]]:
    """Return for each model its FLOPs per token and, for each finished seed, the held-out bits per byte by step."""
    found = {}
    for name, (_, rival) in MODELS.items():
        runs = {seed: [row for row in _rows(_folder(out, name, seed)) if "val_bits_per_byte" in row] for seed in SEEDS}
        curves = {
            str(seed): {str(row["step"]): row["val_bits_per_byte"] for row in rows}
            for seed, rows in runs.items()
            if rows and "gzip_bits_per_byte" in rows[-1]
        }
        found[name] = {"flops_per_token": _flops(name), "rival": rival, "seeds": curves}
    return found


def _flops(name: str) -> int:
    settings = _settings(name)
    return from_mapping(ModelConfig, settings["model"]).flops_per_token(settings["training"]["length"])


def _settings(name: str) -> dict[str, Any]:
    """Return the default config's tables with the model's changes."""
    settings, changes = tomllib.loads(CONFIG.read_text()), dict(MODELS[name][0])
    model = settings["model"]
    if "moe" in changes:
        del model["moe"]
        return settings | {"model": model | {key: value for key, value in changes.items() if key != "moe"}}
    return settings | {"model": model | {"moe": model["moe"] | changes}}


def _toml(table: Mapping[str, Any], path: str = "") -> str:
    """Format a table of strings, numbers and nested tables as TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    head = f"[{path}]\n" if path else ""
    inner = [_toml(v, f"{path}.{key}".lstrip(".")) for key, v in table.items() if isinstance(v, Mapping)]
    return "\n".join([head + "\n".join(lines), *inner]) + "\n"


def _write_all(options: argparse.Namespace) -> None:
    results = _results(options.out)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if options.plot and any(len(row["seeds"]) for row in results.values()):
        _draw(results, options.plot)
    if options.write:
        write_between(options.write, MARKS, "\n".join(_table(results)))


def _table(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| model | MFLOP per token | held-out bits per byte, each seed | mean | less than its dense model |"
    yield "| --- | --- | --- | --- | --- |"
    for name, row in results.items():
        ends = _ends(row)
        rivals = _ends(results[row["rival"]])
        gain = f"{mean(rivals) - mean(ends):.3f}" if ends and rivals and name != row["rival"] else ""
        each, average = ", ".join(f"{end:.3f}" for end in ends), f"{mean(ends):.3f}" if ends else ""
        yield f"| {name} | {row['flops_per_token'] / 1e6:.2f} | {each} | {average} | {gain} |"


def _ends(row: Mapping[str, Any]) -> list[float]:
    """Return the last figure of each seed, over all of the held-out text."""
    return [list(curve.values())[-1] for curve in row["seeds"].values()]


def _draw(results: Mapping[str, Any], path: Path) -> None:
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    panels = {"dense": "one expert per token", "dense, 1.5 F": "two experts per token"}
    for axes, (rival, title) in zip(figure.subplots(1, 2, sharey=True), panels.items()):
        style(axes, title, "step")
        for name, row in results.items():
            if row["rival"] == rival and row["seeds"]:
                _curves(axes, name, row, dashed=name == rival)
        if axes.has_data():
            axes.legend(frameon=False, loc="upper right", title="at the end, mean of the seeds", title_fontsize=8)
    figure.axes[0].set_ylabel("held-out bits per byte", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = ", ".join(f"{name} {mean(_ends(row)):.3f}" for name, row in results.items() if _ends(row))
    images.save(figure, path, "held-out bits per byte", ends, called())


def _curves(axes: Axes, name: str, row: Mapping[str, Any], *, dashed: bool) -> None:
    """Draw a thin curve for each seed, and their mean."""
    curves = [{int(step): bits for step, bits in curve.items()} for curve in row["seeds"].values()]
    style = {"color": COLORS[name], "linestyle": (0, (4, 2)) if dashed else "-"}
    for curve in curves:
        axes.plot(list(curve), list(curve.values()), alpha=0.3, linewidth=1, **style)
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    average = [mean(curve[step] for curve in curves) for step in steps]
    axes.plot(steps, average, linewidth=2, label=f"{name}: {average[-1]:.3f}", **style)


if __name__ == "__main__":
    main()
