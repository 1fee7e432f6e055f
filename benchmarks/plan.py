"""Measure the time of planning: a first plan, a cached one, and the plans of the gradients.

    python benchmarks/plan.py                  # a table of medians, in milliseconds and microseconds
    python benchmarks/plan.py --json plan.json # the same as plain data

Nothing runs on a device. Before each first plan, every cache of the planner is emptied, so the plan takes as long as in
a new process. A process that has planned the same equation for other sizes needs half as long or less. Plans are
`blocking`, because the additional work for `looped` is not part of the search.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

import gspmd
from gspmd.display import console as printing
from gspmd.lowerings import call
from gspmd.planner.graph import contractions, paths, placements, resharding, search

THREE, FOUR = {"x": 4, "y": 4, "z": 4}, {"w": 2, "x": 4, "y": 4, "z": 4}
FIVE = {"v": 2, "w": 2, "x": 4, "y": 4, "z": 4}
EQUATIONS = [
    ("weight-stationary 2D, in", "BLE_xyz, E_xF_yz -> BLF_yzx", THREE),
    ("weight-stationary 2D, out", "BLF_yzx, F_yzE_x -> BLE_xyz", THREE),
    ("weight-gathered XYZ", "B_xyzLE, E_xF_yz -> B_xyzLF", THREE),
    ("2D, gated", "BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)", THREE),
    ("attention, to the heads", "BLE_xyz, E_xH_yzD -> BLH_yzxD", THREE),
    ("parallel block", "BLF_yz, F_yzE_x + BLH_yzD, H_yzDE_x -> BLE_xyz", THREE),
    ("a sum left partial", "BLF_yz, F_yzE_x -> BLE_x partialsum-yz", THREE),
    ("experts", "GX_xCE_yz, X_xEF_yz -> GX_xCF_yz", THREE),
    ("a move: heads to batch", "BLH_xyzD -> B_xyzLHD", THREE),
    ("2D with data parallelism", "B_wLE_xyz, E_xF_yz -> B_wLF_yzx", FOUR),
    ("2D over four axes", "BLE_wxyz, E_xF_yzw -> BLF_yzxw", FOUR),
    ("gated, four axes", "B_wLE_xyz, (E_xF_yz, E_xF_yz) -> (B_wLF_yzx, B_wLF_yzx)", FOUR),
    ("attention, four axes", "B_wLE_xyz, E_xH_yzD -> B_wLH_yzxD", FOUR),
    ("experts, four axes", "G_wX_xCE_yz, X_xEF_yz -> G_wX_xCF_yz", FOUR),
    ("to the experts", "G_wXCE_xyz -> GX_wCE_xyz", FOUR),
    ("2D, five axes", "B_vwLE_xyz, E_xF_yz -> B_vwLF_yzx", FIVE),
    ("gated, five axes", "B_vwLE_xyz, (E_xF_yz, E_xF_yz) -> (B_vwLF_yzx, B_vwLF_yzx)", FIVE),
    ("attention, five axes", "B_vwLE_xyz, E_xH_yzD -> B_vwLH_yzxD", FIVE),
    ("experts, five axes", "G_vX_wxCE_yz, X_wxEF_yz -> G_vX_wxCF_yz", FIVE),
    ("to the experts, five axes", "G_vwXCE_xyz -> GX_vwCE_xyz", FIVE),
]
SIZES = {"B": 512, "E": 18432, "F": 73728, "H": 64, "D": 256, "G": 64, "X": 64, "C": 64}
LENGTHS = {"decode": 1, "prefill": 2048}


def main() -> None:
    """Measure the plans, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=5, help="first plans per equation (default: %(default)s)")
    options = parser.parse_args()
    rows = [
        measure(*case, stage, options.repeats)
        for case in EQUATIONS
        for stage in (LENGTHS if "L" in case[1] else ["prefill"])
    ]
    printing.console().print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(name: str, equation: str, mesh: dict[str, int], stage: str, repeats: int) -> dict:
    """Return the median seconds of one equation."""
    letters = {c for c in equation if c.isupper()}
    sizes = {d: n for d, n in {**SIZES, "L": LENGTHS[stage]}.items() if d in letters}
    make = lambda: gspmd.plan(equation, sizes, mesh, lowering="blocking")  # noqa: E731
    make()  # warms up numpy, the table of chips and the parser
    first, gradients = [], []
    for _ in range(repeats):
        forget()
        first.append(seconds(make))
        plan = make()
        gradients.append(seconds(lambda: plan.backward))  # noqa: B023
    cached = [seconds(make) for _ in range(200)]
    figures = {"first": first, "cached": cached, "gradients": gradients}
    medians = {f"{key}_seconds": statistics.median(times) for key, times in figures.items()}
    return {"name": name, "stage": stage, "equation": equation, "axes": len(mesh), **medians}


def forget() -> None:
    """Empty the planner's caches."""
    for cached in (call.make_plan, search.search, resharding.chain, contractions.joint, placements.sequences):
        cached.cache_clear()
    paths.forget()


def seconds(call: Callable) -> float:
    """Return the processor seconds of one call; planning is single-threaded, so other load does not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def table(rows: list[dict]) -> Table:
    """Lay the medians out as a table."""
    found = Table(title="planning, medians", title_justify="left")
    for column, justify in (("equation", "left"), ("", "left"), ("axes", "right")):
        found.add_column(column, justify=justify)
    for column in ("first", "its gradients", "cached"):
        found.add_column(column, justify="right")
    for row in rows:
        times = (f"{row['first_seconds'] * 1e3:.1f} ms", f"{row['gradients_seconds'] * 1e3:.1f} ms")
        cached = f"{row['cached_seconds'] * 1e6:.1f} µs"
        found.add_row(row["name"], row["stage"], str(row["axes"]), *times, cached)
    return found


if __name__ == "__main__":
    main()
