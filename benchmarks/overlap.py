"""Measure how much faster training steps on GPUs are because moves of weights run beside products.

    python benchmarks/overlap.py --json overlap.json --write docs/accuracy.md    # about a minute for each step

XLA:GPU runs a collective beside products that do not need its result. *Collectives* are the seconds of all of them in
the timeline of the compiled program, and *hidden* is the part that runs beside other kernels. *May be hidden* are the
planned seconds of weights' moves in loops, of each at most its share of the products. *Planned* is what `gspmd search`
gives for the layout, and *without overlap* is the plan in which all collectives count. The fraction is the difference
between the plan without overlap and the compiled step, divided by what may be hidden. `gspmd.search.finding.HIDES` is
the fraction that a search uses. Needs the compiler for GPUs, but no GPU.
"""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from memory import priced
from page import Kept, check_marks, write_between

from gspmd import host
from gspmd.audit import topology
from gspmd.commands import compile as command
from gspmd.display.units import amount_of_seconds
from gspmd.search.finding import HIDES

LLAMA_2 = "--config llama-2-70b --model.layers 4 --topology h100:2x8 --batch 16 --length 4096"
GPT = "--config gpt-3 --model.layers 4 --length 2048"
PALM = "--config palm-8b --model.layers 8 --topology h100:1x8 --batch 16 --length 2048 --mesh x=8"
SHORT = "--config llama-3.1-8b --model.layers 8 --topology h100:2x8 --batch 16 --length 512 --mesh x=16"
STEPS = {
    "llama-2-zero-3": f"{LLAMA_2} --layout zero-3 --mesh x=16",
    "llama-2-megatron": f"{LLAMA_2} --layout megatron-1d --mesh x=8,y=2",
    "gpt-zero-3": f"{GPT} --topology h100:4x8 --batch 32 --layout zero-3 --mesh x=32",
    "gpt-gathered-x": f"{GPT} --topology h200:4x8 --batch 64 --layout weight-gathered-x --mesh x=8,y=4",
    "short-zero-3": f"{SHORT} --layout zero-3",
    "palm-zero-3": f"{PALM} --layout zero-3",
    "palm-data-parallel": f"{PALM} --layout data-parallel",
}
"""Flags of `gspmd compile`, without those below."""
FLAGS = "--phase train --lowering blocking --model.remat full --microbatches 1"
MARKS = "<!-- overlap: python benchmarks/overlap.py -->", "<!-- end of overlap -->"


def main() -> None:
    """Plan and compile the chosen steps, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=STEPS, nargs="+", default=list(STEPS), help="default: all")
    parser.add_argument("--json", type=Path, help="keep what was compiled in this file, and take it from there")
    parser.add_argument("--write", type=Path, help="replace the table in a page")
    given = parser.parse_args()
    if given.write:
        if len(given.step) < len(STEPS):
            parser.error("--write is for all steps; leave --step out.")
        check_marks(given.write, MARKS)
    host.keep_compiled(False)  # JAX cannot read back what was compiled for devices that are not there
    host.start(1, "cpu")  # for JAX itself: the GPUs exist for the compiler only
    kept, found = Kept(given.json), {}
    for name in given.step:
        settings = command.parse(shlex.split(f"{STEPS[name]} {FLAGS}"))
        found[name] = planned(settings) | kept(f"{STEPS[name]} {FLAGS}", partial(compiled, settings))
        print(row(name, found[name]), flush=True)
    text = "\n".join(table(found))
    print(text)
    if given.write:
        write_between(given.write, MARKS, text)


def compiled(settings: command.CompileSettings) -> dict[str, Any]:
    """Return the seconds of a step as compiled, and those of collectives beside other kernels."""
    report = command.compiled(settings, topology(settings.topology))
    assert report.timeline is not None, report.reason
    timeline = report.timeline
    return {
        "compiled": timeline.step_seconds,
        "hidden": timeline.hidden_seconds,
        "collectives": timeline.hidden_seconds + timeline.exposed_seconds,
    }


def planned(settings: command.CompileSettings) -> dict[str, Any]:
    """Return the seconds of a step as a search plans them, those without overlap, and those that may be hidden."""
    question, answer = priced(settings)
    at = [answer.picks[option.name] for option in question.prices.choices]
    saved = -sum(float(table[tuple(at[number] for number in of)]) for of, table in question.hidden)
    return {"planned": answer.seconds, "apart": answer.seconds + saved, "may be hidden": saved / HIDES}


def fraction(found: Mapping[str, Any]) -> float:
    """Return the part of what may be hidden by which the compiled step is faster than the plan without overlap."""
    return (found["apart"] - found["compiled"]) / found["may be hidden"]


def row(name: str, found: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    names = "collectives", "hidden", "may be hidden", "apart", "planned", "compiled"
    parts = [amount_of_seconds(found[each]) for each in names]
    ratios = (f"{found[each] / found['compiled']:.2f}" for each in ("apart", "planned"))
    return f"| {name} | {' | '.join(parts)} | {' | '.join(ratios)} | {fraction(found):.2f} |"


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table, and a line about the fraction."""
    names = "step", "collectives", "hidden", "may be hidden", "without overlap", "planned", "compiled"
    yield f"| {' | '.join(names)} | without overlap / compiled | planned / compiled | fraction |"
    yield f"|:--|{'--:|' * 9}"
    yield from (row(name, each) for name, each in found.items())
    yield ""
    yield f"The median of the fractions is {median(map(fraction, found.values())):.2f}."


if __name__ == "__main__":
    main()
