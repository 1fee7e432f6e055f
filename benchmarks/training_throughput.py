"""Measure the overhead of lowering `looped`: tokens per second of a training step on fake devices, for each preset.

    python benchmarks/training_throughput.py                          # every preset, half an hour on two cores
    python benchmarks/training_throughput.py --quick                  # a smaller model, fewer steps: eight minutes
    python benchmarks/training_throughput.py --json throughput.json   # and write the same as plain data

Eight fake devices share the cores of this host. A permute is a memory copy by a core that would otherwise multiply, so
hiding the permute cannot save time. The ratio to lowering `blocking` shows only the extra work of looping, which is
smaller products, copies of chunks, and more instructions. benchmarks/looped.py predicts the gain of looping on devices
with real links.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import gspmd
import gspmd_models as models
from gspmd import host
from gspmd.display.units import mesh_text
from gspmd.layouts import Layout, presets
from gspmd.moe import MoEConfig
from gspmd.training import OptimizerConfig
from gspmd.training.state import shardings
from gspmd.training.step import jit_step
from gspmd_models import step

LOWERINGS = ("blocking", "looped")
NOTE = (
    "communication is a memory copy by the cores that multiply, so hiding it cannot pay: the ratio shows only the "
    "extra work of looping, and says nothing about devices with real links"
)
# Two repeats of a dense block and an expert block, in a scan whose backward pass recomputes.
MODEL = models.ModelConfig(
    vocabulary=256, embed=128, layers=4, heads=8, kv_heads=8, head_size=16, feed_forward=256, moe=MoEConfig(experts=8)
)


@dataclass(frozen=True)
class Load:
    """The timed case: a model, its batch and length, and the numbers of turns and of steps per turn."""

    model: models.ModelConfig = MODEL
    batch: int = 16
    length: int = 128
    turns: int = 15
    steps: int = 3


QUICK = Load(replace(MODEL, layers=2, remat=False), batch=8, length=64, turns=9, steps=2)


@dataclass(frozen=True)
class Row:
    """The figures of one preset: tokens per second of every turn, and seconds of compilation, by lowering."""

    preset: str
    mesh: dict[str, int]
    tokens_per_second: dict[str, list[float]]
    compile_seconds: dict[str, float]

    @property
    def ratios(self) -> list[float]:
        """The ratio of looped's to blocking's tokens per second, for every turn."""
        blocking, looped = (self.tokens_per_second[name] for name in LOWERINGS)
        return [second / first for first, second in zip(blocking, looped)]


def main() -> None:
    """Time every preset and print a table."""
    options = parsed()
    devices, load = host.start(8, "cpu"), QUICK if options.quick else Load()
    rows = []
    for name in options.presets.split(","):
        rows.append(measured(name, load))
        print(line(rows[-1]), file=sys.stderr, flush=True)
        jax.clear_caches()
        if options.json:
            options.json.write_text(json.dumps(plain(rows, load, host.describe(devices)), indent=1))
    print("\n".join(table(rows, load, host.describe(devices))))


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default=",".join(presets()), help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="a smaller model and batch, fewer steps")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    return parser.parse_args()


def measured(name: str, load: Load) -> Row:
    """Compile a preset's step in both lowerings, and time the two programs in turns.

    Other load on the machine then affects both programs alike.
    """
    layout = Layout.load(name)
    mesh = jax.make_mesh(tuple(layout.mesh_for(8).values()), tuple(layout.mesh_for(8)))
    with jax.set_mesh(mesh):
        built = {lowering: compiled(layout.lowered(lowering), mesh, load) for lowering in LOWERINGS}
        found = {lowering: [] for lowering in LOWERINGS}
        for turn in range(load.turns):
            for lowering in LOWERINGS[:: 1 if turn % 2 else -1]:
                seconds = built[lowering][0](load.steps) / load.steps
                found[lowering].append(load.batch * load.length / seconds)
    return Row(name, dict(mesh.shape), found, {lowering: seconds for lowering, (_, seconds) in built.items()})


def compiled(layout: Layout, mesh: jax.sharding.Mesh, load: Load) -> tuple[Callable[[int], float], float]:
    """Return a function that trains a number of steps and returns their seconds, and the seconds of compilation."""
    layout.check(load.model.sizes(load.batch, load.length), mesh)
    with gspmd.lowering(layout.lowering):
        model = models.build(load.model, layout, mesh, jax.random.key(0))
        optimizer = OptimizerConfig()
        state = step.initial_state(model, optimizer, 1000, mesh)
        tokens = placed(np.random.default_rng(0).integers(256, size=(load.batch, load.length + 1)), layout, mesh)
        key = jax.device_put(jax.random.key(1), jax.NamedSharding(mesh, jax.P()))
        begin = time.perf_counter()
        update = jit_step(step.training_step(model, optimizer, 1000), state).lower(state, tokens, key).compile()
        took = time.perf_counter() - begin
    run = timed(update, state, tokens, key)
    run(1)  # the first one warms up
    return run, took


def placed(tokens: np.ndarray, layout: Layout, mesh: jax.sharding.Mesh) -> jax.Array:
    """Place a batch by the layout."""
    return jax.device_put(tokens.astype(np.int32), shardings(models.batch_spec(layout), mesh))


def timed(update: Callable, state: Any, *rest: jax.Array) -> Callable[[int], float]:
    """Return a function that times a number of steps; each call continues from the state after the previous call."""

    def run(steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(steps):
            state, metrics = update(state, *rest)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - begin

    return run


def plain(rows: Sequence[Row], load: Load, devices: str) -> dict:
    """Return the figures as plain data."""
    settings = {"devices": devices, "note": NOTE, "load": asdict(load)}
    return {**settings, "rows": [{**asdict(row), "ratio": statistics.median(row.ratios)} for row in rows]}


def table(rows: Sequence[Row], load: Load, devices: str) -> Iterator[str]:
    """Yield the figures as Markdown, with a note on their limits."""
    yield f"On {devices} {NOTE}.\n"
    yield f"{load.model.num_parameters:,} parameters, {load.batch} × {load.length} tokens, float32. Medians of"
    yield f"{load.turns} turns of {load.steps} steps, one lowering after the other, and quartiles of their ratios.\n"
    yield "| preset | mesh | blocking, tokens/s | looped, tokens/s | looped ÷ blocking | quartiles | compiled in, s |"
    yield "|---|---|---|---|---|---|---|"
    yield from map(line, rows)


def line(row: Row) -> str:
    """Format the figures of one preset as a row."""
    mesh = mesh_text(row.mesh, trivial=False) or "x=1"
    speeds = [f"{statistics.median(row.tokens_per_second[name]):,.0f}" for name in LOWERINGS]
    low, middle, high = statistics.quantiles(row.ratios, n=4)
    seconds = " and ".join(f"{row.compile_seconds[name]:.1f}" for name in LOWERINGS)
    return f"| {row.preset} | {mesh} | {' | '.join(speeds)} | {middle:.2f} | {low:.2f} – {high:.2f} | {seconds} |"


if __name__ == "__main__":
    main()
