"""Compare the memory that a search plans for training steps with the memory of the compiled programs.

    python benchmarks/memory.py --json memory.json --write docs/accuracy.md    # about a minute for each step
    python benchmarks/memory.py --step llama-zero-3 --ledger 12

Every step is a preset on a mesh, with a choice of remat and a number of microbatches, at a reduced depth. Blocks are
computed in a loop, so more blocks would compile in the same time. *Planned* is the memory that `gspmd search` gives for
the layout. *Compiled* is the largest sum of arguments, results and temporaries at one time, as the compiler assigns
their buffers. `--ledger` prints the largest arrays that the plan counts, and the largest arrays that the compiled
program makes. Needs the compiler for TPUs, but no TPU.
"""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from page import Kept, write_between

from gspmd import host
from gspmd.audit import topology
from gspmd.commands import compile as command
from gspmd.display.units import amount_of_bytes
from gspmd.layouts import Layout
from gspmd.search import Answer
from gspmd.search.answers import Candidate
from gspmd.search.answers.presets import picks_of
from gspmd.search.finding import MeshProblem
from gspmd.training.config import parse_mesh
from gspmd_models.search.phases import problem_of
from gspmd_models.search.workload import Workload

LLAMA = "--config llama-3.1-8b --length 2048"
SHORT = f"{LLAMA} --model.layers 8"
PALM = "--config palm-8b --length 2048"
LARGE = "--config llama-2-70b --model.layers 8 --length 4096"
GPT = "--config gpt-3 --model.layers 8 --length 2048"
MIXTRAL = "--config mixtral-8x7b --model.layers 4 --length 2048"
V4, V5E = "--topology tpu-v4:2x2x4", "--topology tpu-v5e:4x4"
V5P, V6E = "--topology tpu-v5p:4x4x4", "--topology tpu-v6e:4x4"

STEPS = {
    "llama-zero-3": f"{LLAMA} {V5E} --mesh x=16 --layout zero-3 --batch 32",
    "llama-stationary-1d": (
        f"{LLAMA} {V5E} --mesh x=16 --layout weight-stationary-1d --batch 32 --model.remat dots-except-hidden "
        "--microbatches 2"
    ),
    "palm-zero-3": f"{PALM} {V4} --mesh x=4,y=4 --layout zero-3 --batch 64",
    "palm-gathered-x": (
        f"{PALM} {V4} --mesh x=16 --layout weight-gathered-x --batch 64 --model.remat dots-except-hidden"
    ),
    "palm-stationary-1d": (
        f"{PALM} {V4} --mesh x=16 --layout weight-stationary-1d --batch 64 --model.remat selective --microbatches 4"
    ),
    "short-zero-3": f"{SHORT} {V5E} --mesh x=4,y=4 --layout zero-3 --batch 32",
    "short-zero-3-none": f"{SHORT} {V5E} --mesh x=4,y=4 --layout zero-3 --batch 16 --model.remat none",
    "short-zero-3-dots": f"{SHORT} {V6E} --mesh x=4,y=4 --layout zero-3 --batch 64 --model.remat dots --microbatches 2",
    "short-zero-1": f"{SHORT} {V6E} --mesh x=4,y=4 --layout zero-1 --batch 32",
    "short-megatron": f"{SHORT} {V4} --mesh x=4,y=4 --layout megatron-sequence --batch 32",
    "short-megatron-selective": f"{SHORT} {V4} --mesh x=4,y=4 --layout megatron-1d --batch 32 --model.remat selective",
    "short-context": f"{SHORT} {V5P} --mesh x=16,z=4 --layout context-parallel --batch 32",
    "short-stationary-2d": f"{SHORT} {V4} --mesh x=4,y=4 --layout weight-stationary-2d --batch 32",
    "llama-2-zero-3": f"{LARGE} {V5P} --mesh x=64 --layout zero-3 --batch 64",
    "llama-2-megatron-dots": (
        f"{LARGE} {V5P} --mesh x=8,y=8 --layout megatron-sequence --batch 64 --model.remat dots --microbatches 4"
    ),
    "short-gathered-xy": (
        f"{SHORT} {V5E} --mesh x=4,y=4 --layout weight-gathered-xy --batch 32 --model.remat dots-except-hidden"
    ),
    "gpt-megatron": f"{GPT} {V5P} --mesh x=8,y=8 --layout megatron-sequence --batch 64 --model.remat selective",
    "gpt-zero-3": f"{GPT} {V5P} --mesh x=64 --layout zero-3 --batch 64",
    "mixtral-zero-3": f"{MIXTRAL} {V6E} --mesh x=16 --layout zero-3 --batch 16",
    "mixtral-experts": f"{MIXTRAL} {V5E} --mesh x=8,y=2 --layout switch-expert-model --batch 32 --microbatches 2",
}
"""Flags of `gspmd compile` for each step."""
MARKS = "<!-- memory: python benchmarks/memory.py -->", "<!-- end of memory -->"


def main() -> None:
    """Plan and compile the chosen steps, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=STEPS, nargs="+", default=list(STEPS), help="default: all")
    parser.add_argument("--json", type=Path, help="keep what was compiled in this file, and take it from there")
    parser.add_argument("--ledger", type=int, default=0, help="number of the largest arrays to print for each step")
    parser.add_argument("--write", type=Path, help="replace the table in a page")
    given = parser.parse_args()
    host.keep_compiled(False)  # JAX cannot read back what was compiled for devices that are not there
    host.start(1, "cpu")  # for JAX itself: the slice's devices exist for the compiler only
    kept, found = Kept(given.json), {}
    for name in given.step:
        found[name] = measured(name, kept)
        print(row(name, found[name]), flush=True)
        for side in ("largest planned", "largest compiled"):
            for size, what in found[name][side][: given.ledger]:
                print(f"    {side.split()[1]:8s} {amount_of_bytes(size):>8s}  {what}")
    text = "\n".join(table(found))
    print(text)
    if given.write:
        write_between(given.write, MARKS, text)


def measured(name: str, kept: Kept) -> dict[str, Any]:
    """Return the planned and the compiled bytes of a step, with the largest arrays of the plan and of the program."""
    settings = command.parse(shlex.split(f"{STEPS[name]} --phase train --lowering blocking"))
    return planned(settings) | kept(STEPS[name], partial(compiled, settings))


def compiled(settings: command.CompileSettings) -> dict[str, Any]:
    """Return the bytes of a step as compiled, and its largest arrays."""
    report = command.compiled(settings, topology(settings.topology))
    return {
        # A program that the compiler refuses is not compiled, and its message says what it would need.
        "compiled": report.peak_bytes or report.bytes_per_device,
        "room": report.hbm_bytes,
        "largest compiled": [(each.bytes, f"{each.array} {each.name}") for each in report.buffers],
    }


def planned(settings: command.CompileSettings) -> dict[str, Any]:
    """Return the bytes of a step as a search plans them, and the largest arrays that it counts."""
    question, answer = priced(settings)
    return {"planned": answer.bytes, "largest planned": largest(question, answer)}


def priced(settings: command.CompileSettings) -> tuple[MeshProblem, Answer]:
    """Return the search problem of a training step, and what it gives for the layout in the settings."""
    target = topology(settings.topology)
    mesh = parse_mesh(settings.sharding.mesh)
    workload = Workload(
        settings.model, target.chip, settings.batch, settings.length, settings.dtype, microbatches=settings.microbatches
    )
    candidate = Candidate(problem_of(workload, mesh), target.chip.hbm_bytes)
    layout = Layout.load(settings.sharding.layout)
    sizes = {axis: mesh.get(axis, 1) for axis in layout.axes}
    layout = layout.resolved(candidate.sizes, sizes).check(candidate.sizes, sizes)
    return candidate.phase.question, picks_of(candidate, candidate.unlimited_search, layout)


def largest(question: MeshProblem, answer: Answer) -> list[tuple[float, str]]:
    """Return the arrays that the plan counts at the moment of peak memory, largest first.

    Each has its bytes on one device, and the lines that shard it.
    """
    picks, found = [answer.picks[option.name] for option in question.prices.choices], []
    moment, _ = question.peak(answer.picks)
    held = question.program.moments.at(moment)
    for where, arrays in (("argument", held.arguments), ("other", held.others)):
        for array, count in arrays.items():
            size = sum(float(table[tuple(picks[n] for n in of)]) for of, table in question.spread({array: count}))
            names = dict.fromkeys(question.lines.described(name) for name in array.unknowns)
            found.append((size, f"{where} {count} x {amount_of_bytes(array.size)} of {', '.join(names)}"))
    return sorted(found, reverse=True)


def row(name: str, found: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    held, said, room = (amount_of_bytes(found[each]) for each in ("planned", "compiled", "room"))
    over = "" if found["compiled"] <= found["room"] else ": does not fit"
    return f"| {name} | {held} | {said} of {room}{over} | **{found['planned'] / found['compiled']:.2f}** |"


def table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table, and lines about all ratios."""
    yield "| step | planned | compiled | planned / compiled |"
    yield f"|:--|{'--:|' * 3}"
    yield from (row(name, each) for name, each in found.items())
    yield ""
    ratios = [of["planned"] / of["compiled"] for of in found.values()]
    near = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    spread = f"from {min(ratios):.2f} to {max(ratios):.2f}"
    yield f"Median {median(ratios):.2f}, {spread}; {near} of {len(ratios)} are within 5%."


if __name__ == "__main__":
    main()
