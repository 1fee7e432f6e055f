"""Fit the model of a GPU to a card's measurements, and compare its predictions with measurements left out of the fit.

    python benchmarks/gpu.py          # on benchmarks/results/device-h200.json; figures for chips.toml and matmul.toml
    python benchmarks/gpu.py --steps docs/gpus.md  # compile the measured steps offline, simulate them, write the tables

The measurements are those of benchmarks/device.py. The fit covers products by cuBLAS, the bandwidth of other kernels,
fused attention, and the seconds of a launch. The model is not fitted to training and decode steps; instead, their
simulated seconds are compared with the measured seconds. The simulation needs JAX's plugin for CUDA (pip install
'gspmd[gpu-offline]') but no GPU.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf, log
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device import DECODED, STEPS, causal_flops, decoded, llama_8b
from page import write_between
from scipy.optimize import least_squares

import gspmd
from gspmd.audit import compile_offline, topology
from gspmd.audit.offline.report import Report
from gspmd.hardware.chips import Chip, chip
from gspmd.hardware.matmul import Efficiency, traffic
from gspmd.layouts import Layout
from gspmd.training import OptimizerConfig
from gspmd_models import abstract, abstract_key, batch_spec, step

RESULTS = Path(__file__).parent / "results" / "device-h200.json"
CARD = "h200"
# Numbers of kernels in one trip of the timed loops, including the kernel that counts trips. XLA records five kernels or
# more as one launch (a CUDA graph), so these few are launched one by one.
SCALE_KERNELS, PRODUCT_KERNELS = 2, 3
# Kernels that pass over their bytes twice in a trip: the loop copies its carry (compile one offline to see it).
TWICE = ("RMS norm", "softmax", "transpose", "rows gathered")
LARGE = 2 * 2**26  # bytes that do not fit in the cache of the card, read and written


def main() -> None:
    """Print the figures, and with --steps write the simulated steps beside the measured ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=Path, help="page that gets the tables of simulated and measured steps")
    options = parser.parse_args()
    rows, card = json.loads(RESULTS.read_text())["rows"], chip(CARD)
    launch = launch_seconds(rows)
    fitted = fit(rows, launch, card)
    off = np.exp(np.abs(errors(rows, launch, card, fitted))) - 1
    print(f"launch_seconds = {launch:.2g}")
    print(f"stream_efficiency = {stream_efficiency(rows, card):.3f}")
    print(f"attention_efficiency = {attention_efficiency(rows, card):.3f}")
    for name in ("overhead_seconds", "matrix_efficiency", "read_efficiency", "write_efficiency"):
        print(f"{name} = {getattr(fitted, name):.3g}")
    print(f"{len(off)} products, off by {np.median(off):.1%} (median), {np.quantile(off, 0.9):.1%} (90%)")
    if options.steps:
        if missing := [mark for mark in MARKS.values() if mark[0] not in options.steps.read_text()]:
            sys.exit(f"{options.steps} has no {missing[0][0]}")
        for name, compiled in (("training", training_steps), ("decoding", decode_steps)):
            head = [*COLUMNS, *(MEMORY if name == "training" else ())]
            lines = [f"| {' | '.join(head)} |", "|:--" + "|--:" * (len(head) - 1) + "|"]
            for row, report in compiled(part(rows, name)):
                lines.append(line(row, report))
                print(lines[-1], report.timeline, sep="\n", flush=True)
            write_between(options.steps, MARKS[name], "\n".join(lines))


MARKS = {
    name: (f"<!-- {name}: python benchmarks/gpu.py --steps -->", f"<!-- end of {name} -->")
    for name in ("training", "decoding")
}
COLUMNS = ("step", "planned", "simulated", "measured", "simulated / measured")
MEMORY = ("memory, compiled offline", "memory, held")


def line(row: Mapping[str, Any], report: Report) -> str:
    """Return the line of a step in its table."""
    found, measured = report.timeline, row["us"] * 1e-6
    assert found is not None  # The steps fit in the card's memory.
    seconds = (row["planned us"] * 1e-6, found.step_seconds, measured)
    held = f"{row['GB of the process']:.1f} GB" if "GB of the process" in row else ""
    memory = [f"{report.peak_bytes / 1e9:.1f} GB", held] if "GB" in row else []
    cells = [row["what"], *(f"{each * 1e3:.1f} ms" for each in seconds), f"{found.step_seconds / measured:.2f}"]
    return f"| {' | '.join([*cells, *memory])} |"


def part(rows: Sequence[dict], name: str) -> list[dict]:
    """Return the rows of one part of the measurement."""
    return [row for row in rows if row["part"] == name]


def launch_seconds(rows: Sequence[dict]) -> float:
    """Return the seconds of one launch, from loops over an array so small that nothing else takes time."""
    small = [row["us"] for row in part(rows, "kernels") if row["what"].startswith("x * a + b") and row["bytes"] < 2**24]
    return median(small) * 1e-6 / SCALE_KERNELS


def stream_efficiency(rows: Sequence[dict], card: Chip) -> float:
    """Return the share of the memory's bandwidth that kernels on large arrays reach."""
    found = []
    for row in part(rows, "kernels"):
        twice = 2 if row["what"].startswith(TWICE) else 1
        if row.get("bytes", 0) >= LARGE and (twice == 2 or row["what"].startswith("x * a + b")):
            found.append(twice * row["bytes"] / (row["us"] * 1e-6 - twice * card.kernel_seconds) / card.hbm_bandwidth)
    return median(found)


def attention_efficiency(rows: Sequence[dict], card: Chip) -> float:
    """Return the share of the peak FLOP/s that fused attention reaches, without the seconds for moving its bytes."""
    found = []
    for row in part(rows, "attention"):
        if row["what"].startswith("cudnn"):
            length = int(row["what"].rpartition(" ")[2])
            flops, moved = causal_flops(length), 16384 * 128 * 2 * (2 * 32 + 2 * 8)  # queries, results; keys, values
            found.append(flops / (row["us"] * 1e-6 - moved / card.stream_bandwidth) / card.bf16_flops)
    return geometric_mean(found)


def efficiency(overhead: float, matrix: float, read: float, write: float) -> Efficiency:
    """Return the constants of a GPU.

    A tile is the product that one instruction of a warp group computes (wgmma, m64n8k16).
    """
    return Efficiency(overhead, 0.0, 0.0, matrix, read, write, inf, inf, inf, 8, 64, 16)


def errors(rows: Sequence[dict], launch: float, card: Chip, fitted: Efficiency) -> list[float]:
    """Return the logarithm of modelled over measured seconds of each product.

    A trip of the measured loop runs two products and a counter.
    """
    found = []
    for row in part(rows, "products"):
        sizes = (row["groups"], row["m"], row["k"], row["n"])
        modelled = fitted.seconds(sizes, traffic(sizes, "bfloat16"), "bfloat16", card, False) + card.kernel_seconds / 2
        found.append(log(max(modelled, PRODUCT_KERNELS * launch / 2) / (row["us"] * 1e-6)))
    return found


def fit(rows: Sequence[dict], launch: float, card: Chip) -> Efficiency:
    """Fit the constants to the logarithms that `errors` returns, with a loss that discounts outliers."""
    least, start, most = np.log([[1e-7, 0.1, 0.1, 0.1], [3e-6, 0.7, 0.8, 0.8], [1e-4, 1, 1, 1]])
    off = lambda logs: errors(rows, launch, card, efficiency(*map(exp, logs)))  # noqa: E731
    return efficiency(*map(exp, least_squares(off, start, bounds=(least, most), loss="soft_l1", f_scale=0.1).x))


def training_steps(rows: Sequence[dict]) -> Iterator[tuple[dict, Report]]:
    """Compile the measured training steps, and yield each measurement with its report."""
    machine = topology(f"{CARD}:1")
    mesh = machine.mesh({"x": 1, "y": 1, "z": 1})
    for row in rows:
        if (each := STEPS.get(row["what"].rpartition(", ")[0])) is None:
            continue  # It says what was not measured.
        config, batch, length, layout = each.config, each.batch, each.length, Layout.load(each.layout)
        with jax.set_mesh(mesh):
            model = abstract(config, layout, mesh, each.dtype)
            made = step.training_step(model, OptimizerConfig(), 100)
            state = step.abstract_state(model, OptimizerConfig(), 100, mesh)
        place = jax.NamedSharding(mesh, batch_spec(layout).partition_spec())
        tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32, sharding=place)
        given, flops = (state, tokens, abstract_key(mesh)), config.flops_per_token(length) * batch * length
        yield row, compile_offline(made, *given, topology=machine, donate_argnums=(0,), flops=flops)


def decode_steps(rows: Sequence[dict]) -> Iterator[tuple[dict, Report]]:
    """Compile the measured decode steps, and yield each measurement with its report."""
    machine, llama = topology(f"{CARD}:1"), llama_8b()
    mesh = machine.mesh({"x": 1, "y": 1, "z": 1})
    for row in rows:
        if row["what"] not in DECODED:
            continue  # It says what was not measured.
        served = decoded(DECODED[row["what"]], llama, mesh)
        with gspmd.lowering("blocking"):
            report = compile_offline(served.step, *served.arguments, topology=machine, donate_argnums=(2,))
        yield row, report


if __name__ == "__main__":
    main()
