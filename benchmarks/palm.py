"""Reproduce the tables of Pope et al. 2022 from programs compiled offline: PaLM 540B served on 64 TPU v4.

    python benchmarks/palm.py                                    # all of it, half an hour on two cores
    python benchmarks/palm.py --only contexts --write docs/palm.md
    python benchmarks/palm.py --only rows --row decode-512 --json rows.json

`contexts` is table 1, the longest context. `rows` is table 2, latency and MFU; each row is in the paper's layout, in
the planner's choice, and in faster layouts. `hand` compares the decode step with a handwritten decode step
(`decode_by_hand.py`). The programs are those of `gspmd generate`. Needs the compiler for TPUs, but no TPU.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import jax
from page import Kept, write_tables

import gspmd
from gspmd import host
from gspmd.audit import Report, Topology, compile_offline, topology
from gspmd.commands import configs
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.layouts import Layout
from gspmd.training.toml import load_toml
from gspmd_models import ModelConfig, abstract_cache
from gspmd_models.decoding import rank_serving, serving_layouts, serving_program

SHARE = 0.3
"""The fraction of a chip's 32 GiB of memory that the cache may take (the paper's table 1)."""
HEADS = {"padding.H": 64}
TILE = 8
BATCH = "weight-stationary-2d B_xyzLHD B_xyzTKD"
GATHERED = "weight-gathered-xyz B_xyzLHD B_xyzTKD"
LONGEST = (
    ("multi-head, 64 heads of 128", "weight-stationary-2d BLH_yzxD BTK_yzxD", {128: 1320, 512: 330}),
    ("multiquery, head-sharded", "weight-stationary-2d BLH_yzxD BTKD", {128: 660, 512: 165}),
    ("multiquery, batch-sharded", BATCH, {128: 43_000, 512: 10_700}),
)
"""Table 1: attention, layout, and the longest context by batch."""


@dataclass(frozen=True)
class File:
    """The part of a configuration file that this benchmark reads."""

    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True)
class Row:
    """A row of table 2: a program, its layout, and the measured seconds and MFU.

    Attributes:
        steps: number of executions of the program: 64 for the 64 tokens of a decode.
        faster: further layouts and lowerings to compile, each with a number; heads are padded to a multiple of this
            number.
    """

    phase: str
    batch: int
    layout: str
    seconds: float
    mfu: float
    weights: str = "bfloat16"
    steps: int = 1
    faster: tuple[tuple[str, str, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens, over all rows and steps."""
        return self.batch * (2048 if self.phase == "prefill" else self.steps)


ROWS = {
    "prefill-1-int8": Row(
        "prefill", 1, "weight-stationary-2d BLH_yzxD BTKD", 0.29, 0.43, "int8",
        faster=(("weight-stationary-2d BL_xH_yzD BTKD", "blocking", 1),),
    ),
    "decode-64-int8": Row("decode", 64, BATCH, 1.82, 0.14, "int8", 64, faster=((BATCH, "blocking", 1),)),
    "prefill-512": Row("prefill", 512, GATHERED, 85.2, 0.76, faster=((GATHERED, "blocking", 1),)),
    "decode-512": Row("decode", 512, BATCH, 6.0, 0.33, steps=64, faster=((BATCH, "auto", 1),)),
}  # fmt: skip
"""Table 2. Prompts have 2048 tokens; a decode adds 64, so its cache has room for 2112."""


def main() -> None:
    """Measure the chosen rows, print the tables, and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="default: all")
    parser.add_argument("--row", choices=ROWS, nargs="+", default=list(ROWS), help="of `rows`; default: all")
    parser.add_argument("--json", type=Path, help="keep what was compiled in this file, and take it from there")
    parser.add_argument("--write", type=Path, help="replace the tables in a page")
    options = parser.parse_args()
    host.start(1, "cpu")  # for JAX itself: the slice's devices exist for the compiler only
    tables = {name: SECTIONS[name] for name in options.only}
    write_tables("palm.py", tables, Kept(options.json), options.row, options.write)


def longest(kept: Kept, rows: Sequence[str]) -> Iterator[str]:
    """Yield table 1: the longest context whose cache fits into the cache's share of a chip's memory."""
    yield "| attention | batch | layout | cache per token of context | longest context | paper | |"
    yield "|---|--:|---|--:|--:|--:|--:|"
    for name, layout, measured in LONGEST:
        for batch, paper in measured.items():
            found = kept(f"{name} {batch}", lambda n=name, at=layout, b=batch: context(n, at, b))
            per_token = amount_of_bytes(found["per_token"])
            yield (
                f"| {name} | {batch} | `{layout}` | {per_token} | **{found['longest']:,}** | {paper:,} | "
                f"{found['longest'] / paper:.3f} |"
            )


def context(name: str, layout: str, batch: int) -> dict[str, Any]:
    """Return the longest context, computed from the bytes of the caches that are arguments of compiled decode steps.

    The bytes of one position come from the difference between two programs; T is padded to whole tiles of 8 positions.
    """
    machine, mesh = slice64()
    several = name.startswith("multi-head")
    config = replace(palm(), heads=64, kv_heads=64, head_size=128) if several else palm()
    at = layout_named(layout, several_keys=several).override(HEADS)
    room = SHARE * machine.chip.hbm_bytes
    expected = abstract_cache(config, at.resolved(), mesh, batch, TILE, "bfloat16").keys[0]
    guess = int(room / (2 * prod(expected.sharding.shard_shape(expected.shape)) * 2)) * TILE

    def held(tokens: int) -> int:
        """Return the bytes of weights and cache on one chip."""
        report = compiled(config, at, machine, mesh, "decode", batch, tokens)
        assert report.fits, report.reason
        return report.argument_bytes

    half = guess // 2 // TILE * TILE
    per_token = (held(guess) - held(half)) / (guess - half)
    return {"per_token": per_token, "longest": int(room / per_token) // TILE * TILE}


def slice64() -> tuple[Topology, jax.sharding.Mesh]:
    """Return a slice of 64 chips, and a mesh with one axis along each axis of its torus."""
    machine = topology("tpu-v4:4x4x4")
    return machine, machine.mesh({"x": 4, "y": 4, "z": 4})


def palm() -> ModelConfig:
    """Return PaLM 540B."""
    return load_toml(File, configs.find("palm-540b")).model


def layout_named(name: str, several_keys: bool = False) -> Layout:
    """Return the layout with this name among the layouts from which the planner chooses."""
    return next(each for each in serving_layouts(several_keys=several_keys) if each.name == name)


def compiled(config, layout, machine, mesh, phase, batch, room, length=1, weights=None, lowering="blocking") -> Report:
    """Compile the program of a phase for a slice."""
    program = serving_program(config, layout, mesh, phase, batch=batch, room=room, length=length, weights=weights)
    with gspmd.lowering(lowering):
        return compile_offline(
            program.step, *program.arguments, topology=machine, mesh=mesh,
            donate_argnums=(program.donated,), auto_layout_argnums=(program.stored,),
        )  # fmt: skip


def latencies(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yield table 2: every row in the paper's layout, the planner's choice, and faster layouts."""
    yield "| row | layout, lowering | heads | computing | waiting | seconds | paper | | MFU | paper |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name in names:
        row = ROWS[name]
        choice = kept(f"{name} choice", lambda row=row: chosen(row))["layout"]
        for number, (layout, lowering, heads) in enumerate(((row.layout, "blocking", 64), *row.faster)):
            found = kept(
                f"{name} {layout} {lowering} {heads}", lambda *_, a=(row, layout, lowering, heads): measured(*a)
            )
            seconds = found["step"] * row.steps
            mfu = 2 * palm().num_parameters * row.tokens / (64 * 275e12 * seconds)
            whose = "the paper's" + (" and the planner's" if choice == layout else "") if not number else "another"
            parts = (amount_of_seconds(found[part]) for part in ("computing", "waiting"))
            yield (
                f"| {name}, {whose} | `{layout}`, {lowering} | {-(-48 // heads) * heads} | "
                f"{' | '.join(parts)} | **{seconds:.3g}** | "
                f"{row.seconds:g} | {seconds / row.seconds:.2f} | {mfu:.0%} | {row.mfu:.0%} |"
            )


def chosen(row: Row) -> dict[str, Any]:
    """Return the layout that the planner picks for a row, with heads padded as in the paper."""
    mesh, length = slice64()[1], 2048 if row.phase == "prefill" else 1
    ranked = rank_serving(
        palm(), [each.override(HEADS) for each in serving_layouts()], mesh, row.phase, batch=row.batch,
        room=2048 if row.phase == "prefill" else 2112, length=length, weights=row.weights, lowerings=("blocking",),
    )  # fmt: skip
    return {"layout": ranked[0].name, "ranked": [str(each) for each in ranked[:5]]}


def measured(row: Row, layout: str, lowering: str, heads: int) -> dict[str, Any]:
    """Return the simulated seconds of one execution."""
    machine, mesh = slice64()
    at = layout_named(layout).override({"padding.H": heads}) if heads > 1 else layout_named(layout)
    length = 2048 if row.phase == "prefill" else 1
    room = 2048 if row.phase == "prefill" else 2112
    report = compiled(palm(), at, machine, mesh, row.phase, row.batch, room, length, row.weights, lowering)
    line = report.timeline
    assert line, report.reason
    return {
        "step": line.step_seconds, "computing": line.compute_seconds, "waiting": line.exposed_seconds,
        "hidden": line.hidden_seconds, "as_planned": report.ledger.compare(report.plan).agrees,
        "temporaries": report.temporary_bytes,
    }  # fmt: skip


def by_hand(kept: Kept, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of the decode step of table 2's last row, in notation and by hand."""
    figures = kept("by hand", compared)
    yield "| decode, 512 rows | in notation | by hand | |"
    yield "|---|--:|--:|--:|"
    for what, (ours, theirs) in figures.items():
        yield f"| {what} | {ours:,.4g} | {theirs:,.4g} | {ours / theirs:.3f} |"


def compared() -> dict[str, tuple[float, float]]:
    """Return the figures of both programs."""
    import decode_by_hand

    machine, mesh = slice64()
    layout, sizes = layout_named(BATCH).override(HEADS), replace(decode_by_hand.Sizes(), vocabulary=257_024)
    program = serving_program(palm(), layout, mesh, "decode", batch=512, room=2112)
    by_hand, args, donated = decode_by_hand.program("decode", sizes, mesh)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        seconds = seconds_to_trace((program.step, program.arguments), (by_hand, args))
    ours = compiled(palm(), layout, machine, mesh, "decode", 512, 2112)
    theirs = compile_offline(by_hand, *args, topology=machine, donate_argnums=donated, auto_layout_argnums=(0,))
    return {
        "TFLOP per chip": (ours.flops / 1e12, theirs.flops / 1e12),
        "GB sent per chip": (ours.wire_bytes / 1e9, theirs.wire_bytes / 1e9),
        "ms on the timeline": (ours.timeline.step_seconds * 1e3, theirs.timeline.step_seconds * 1e3),
        "ms to trace and lower": tuple(each * 1e3 for each in seconds),
    }


def seconds_to_trace(*programs: tuple[Any, Any], times: int = 25) -> list[float]:
    """Return the median processor seconds to trace and lower each function with its arguments.

    The functions take turns, so that other load on the machine affects all of them alike. The first turn, which makes
    plans and fills JAX's caches, is not counted.
    """
    took: list[list[float]] = [[] for _ in programs]
    for _ in range(1 + times):
        for seconds, (fn, args) in zip(took, programs):
            began = time.process_time()
            jax.jit(lambda *given, fn=fn: fn(*given)).lower(*args)
            seconds.append(time.process_time() - began)
    return [median(seconds[1:]) for seconds in took]


SECTIONS = {"contexts": longest, "rows": latencies, "hand": by_hand}

if __name__ == "__main__":
    main()
