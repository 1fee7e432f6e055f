"""Compare planned with compiled seconds over all presets, and the layout that `gspmd search` finds without compiling.

    python benchmarks/ranks.py --folder ranked --write docs/accuracy.md \\
        --errors gspmd/search/answers/errors.toml                          # about 45 minutes
    python benchmarks/ranks.py --folder ranked --step qwen-decode

For each step `gspmd search` prices every preset and writes the layout that it finds; then `gspmd compile` compiles all
of them, each on the mesh, with the remat and in the microbatches that the search gave it. The table has Kendall's rank
correlation of planned and compiled seconds over the presets (with programs within 0.1% of each other as ties, and
without ties), the ratios of planned to compiled seconds and, over all programs, of planned to compiled bytes, and the
compiled seconds of the layout that was found and of the best preset. Figures are kept in the folder and not made again,
so use a new folder if plans or programs have changed. Needs the compilers for TPUs and for GPUs, but no TPU or GPU.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from page import write_between

from gspmd.display.units import amount_of_seconds

QWEN = "--config llama-3.1-70b --model.feed-forward 29568 --model.vocabulary 152064 --model.qkv-bias"
"""Qwen2 72B, except for the base of its rotary embedding."""

STEPS = {
    "qwen-decode": f"{QWEN} --topology tpu-v5e:4x4 --phase decode --batch 64 --length 2048",
    "llama-8b-prefill": "--config llama-3.1-8b --topology tpu-v6e:2x4 --phase prefill --batch 16 --length 2048",
    "palm-62b-decode": "--config palm-62b --topology tpu-v4:2x2x4 --phase decode --batch 256 --length 2048",
    "mixtral-decode": "--config mixtral-8x7b --topology tpu-v5e:4x4 --phase decode --batch 256 --length 2048",
    "palm-540b-prefill": "--config palm-540b --topology tpu-v4:4x4x4 --phase prefill --batch 64 --length 2048",
    "llama-8b-train": "--config llama-3.1-8b --topology tpu-v5e:4x4 --phase train --batch 32 --length 2048",
    "palm-8b-train": "--config palm-8b --topology tpu-v4:2x2x4 --phase train --batch 64 --length 2048",
    "llama-8b-train-h100": (
        "--config llama-3.1-8b --topology h100:2x8 --phase train --batch 32 --length 2048 --model.layers 8"
    ),
    "mixtral-train-h100": (
        "--config mixtral-8x7b --topology h100:2x8 --phase train --batch 32 --length 2048 --model.layers 8"
    ),
    "llama-8b-train-v5p": "--config llama-3.1-8b --topology tpu-v5p:2x2x4 --phase train --batch 64 --length 2048",
}
"""Flags of `gspmd search` and `gspmd compile`: steps of serving, and of training."""
SEARCHED = dict.fromkeys(
    ("llama-8b-train-h100", "mixtral-train-h100", "llama-8b-train-v5p"), "--remat full --microbatches 1"
)
"""Further flags of `gspmd search`, which without these flags searches every choice of remat and of microbatches."""
COMPILED = {
    "mixtral-decode": "--model.no-stacked",
    "llama-8b-train-v5p": "--compiler-options xla_tpu_rematerialization_min_size_in_bytes=1000000000000",
}
"""Further flags of `gspmd compile`, which its report recommends.

Experts' weights would be copied out of stacks, and products computed again although the program fits in memory.
"""
FOUND = "found"
TIE = 0.001
"""The relative difference up to which two programs count as equally fast, so that plans need not rank them."""
MARKS = "<!-- ranks: python benchmarks/ranks.py -->", "<!-- end of ranks -->"


def main() -> None:
    """Search and compile the chosen steps, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=STEPS, nargs="+", default=list(STEPS), help="default: all")
    parser.add_argument("--folder", type=Path, required=True, help="where figures are kept, and taken from")
    parser.add_argument("--write", type=Path, help="replace the table in a page")
    parser.add_argument("--errors", type=Path, help="write the errors to expect, gspmd/search/answers/errors.toml")
    parser.add_argument("--at-once", type=int, default=2, help="number of programs that are compiled side by side")
    given = parser.parse_args()
    if (given.write or given.errors) and len(given.step) < len(STEPS):
        parser.error("--write and --errors are for all steps; leave --step out.")
    given.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in given.step:
        found[name] = compared(name, given.folder, given.at_once)
        print(f"{name}: {STEPS[name]}")
        for each in sorted(found[name], key=lambda each: each["compiled"] or float("inf")):
            print(f"  {line(each)}", flush=True)
    table = "\n".join(rows(found))
    print(table)
    if given.write:
        write_between(given.write, MARKS, table)
    if given.errors:
        given.errors.write_text("\n".join(errors(found)) + "\n")


def line(program: Mapping[str, Any]) -> str:
    """Return a line of text with a program's planned and compiled seconds."""
    compiled = program["compiled"]
    off = f"{program['planned'] / compiled:.2f}" if compiled else ""
    shown = amount_of_seconds(compiled) if compiled else "does not fit"
    names = ", ".join(program["same"]) or program["name"]
    return f"{names:38s} planned {amount_of_seconds(program['planned']):>9s}, compiled {shown:>9s}  {off}"


def compared(step: str, folder: Path, at_once: int) -> list[dict[str, Any]]:
    """Return the planned and the compiled seconds of each preset and of the layout that the search found."""
    layout, figures = folder / f"{step}.toml", folder / f"{step}.json"
    if not figures.exists():
        part = figures.with_suffix(".part")
        flags = shlex.split(f"{STEPS[step]} {SEARCHED.get(step, '')}")
        command = [sys.executable, "-m", "gspmd", "search", *flags, "--out", str(layout), "--json", str(part)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        part.rename(figures)
    searched = json.loads(figures.read_text())
    presets: dict[tuple, dict[str, Any]] = {}
    for each in searched["presets"]:
        if each["fits"] and each["seconds"]:
            # On this mesh several presets may be the same layout: equal in seconds and bytes, to all digits.
            same = presets.setdefault((each["seconds"], each["bytes"]), {**each, "same": []})
            same["same"].append(each["name"])
    programs = [
        *({**each, "layout": each["name"], "lowering": "blocking"} for each in presets.values()),
        {**searched, "name": FOUND, "layout": str(layout), "lowering": None, "same": []},
    ]
    with ThreadPoolExecutor(at_once) as pool:
        return [*pool.map(lambda each: _compiled(step, each, folder), programs)]


def _compiled(step: str, program: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a program's figures; compile it if they are not in the folder."""
    mesh = ",".join(f"{axis}={size}" for axis, size in program["mesh"].items())
    # A training step is priced in its best remat and microbatches, and compiled with them.
    trained = [program["remat"], str(program["microbatches"])] if program["remat"] else []
    further = shlex.split(COMPILED.get(step, ""))
    kept = folder / f"{'-'.join([step, program['name'], mesh, *trained, *further])}.json"
    if not kept.exists():
        flags = ["--layout", program["layout"], "--mesh", mesh]
        if program["lowering"]:
            flags += ["--lowering", program["lowering"]]
        flags += further
        if trained:
            flags += ["--model.remat", trained[0], "--microbatches", trained[1]]
        part = kept.with_suffix(".part")
        command = [sys.executable, "-m", "gspmd", "compile", *shlex.split(STEPS[step]), *flags]
        done = subprocess.run([*command, "--json", part], capture_output=True, text=True)
        if not part.exists():  # The exit code is 1 if it does not fit.
            raise SystemExit(f"{shlex.join(map(str, command))}\n{done.stderr}")
        part.rename(kept)
    report = json.loads(kept.read_text())
    return {
        "name": program["name"],
        "same": program["same"],
        "planned": program["seconds"],
        "compiled": report["step_seconds"] if report["fits"] else None,
        "memory": program["bytes"] / report["bytes_per_device"],
    }


def kendall(pairs: list[tuple[float, float]], tie: float = 0.0) -> float:
    """Return Kendall's rank correlation (tau-b) of two quantities.

    A tied pair counts neither as in order nor as out of order.

    Args:
        pairs: the two quantities of each item.
        tie: the relative difference up to which two items are tied.
    """
    agree = apart = ties = others = 0
    order = lambda a, b: 0 if abs(a - b) <= tie * min(a, b) else (a > b) - (a < b)  # noqa: E731
    for (a, b), (c, d) in combinations(pairs, 2):
        one, two = order(a, c), order(b, d)
        agree += one * two
        apart += 1
        ties += not one
        others += not two
    return agree / ((apart - ties) * (apart - others)) ** 0.5 if apart > max(ties, others) else float("nan")


def errors(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the file of expected errors.

    For each phase and chip, the expected error is the median over all programs of presets.
    """
    yield "# Median of |planned / compiled - 1|, by phase and chip. Written by python benchmarks/ranks.py --errors"
    each: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, programs in found.items():
        words = shlex.split(STEPS[step])
        phase, topology = (words[words.index(flag) + 1] for flag in ("--phase", "--topology"))
        each[phase][topology.partition(":")[0]] += [
            abs(program["planned"] / program["compiled"] - 1)
            for program in programs
            if program["compiled"] and program["name"] != FOUND
        ]
    for phase, chips in sorted(each.items()):
        yield f"\n[{phase}]"
        yield from (f"{chip} = {median(ratios):.2g}" for chip, ratios in sorted(chips.items()))


def rows(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the table."""
    names = "step", "programs", "rank correlation", "without ties", "planned / compiled", "memory", "found"
    yield f"| {' | '.join(names)} | best preset | found / preset |"
    yield f"|:--|{'--:|' * 8}"
    for step, programs in found.items():
        presets = [each for each in programs if each["name"] != FOUND and each["compiled"]]
        ours = next(each for each in programs if each["name"] == FOUND)
        best = min(presets, key=lambda each: each["compiled"])
        seconds = [each["planned"] / each["compiled"] for each in presets]
        held = [each["memory"] for each in programs]
        pairs = [(each["planned"], each["compiled"]) for each in presets]
        cells = [
            step,
            str(len(presets)),
            f"{kendall(pairs, TIE):.2f}",
            f"{kendall(pairs):.2f}",
            *(f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}" for ratios in (seconds, held)),
            amount_of_seconds(ours["compiled"]) if ours["compiled"] else "does not fit",
            f"{amount_of_seconds(best['compiled'])}, {best['name']}",
            f"**{ours['compiled'] / best['compiled']:.3f}**" if ours["compiled"] else "",
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
