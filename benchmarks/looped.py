"""Compare the predicted seconds of all lowerings, for PaLM 540B's feed-forward layer compiled for 64 TPU v4.

    python benchmarks/looped.py --json looped.json --write docs/looped.md      # all of it: 15 rows, about three hours
    python benchmarks/looped.py --layouts weight-stationary-2d --tokens 4096   # one row

Seconds are simulated (`gspmd.audit.timeline`) from the cycles that the TPU compiler estimates, with transfers at the
links' full rate. Nothing runs. Each cell is measured in a process of its own, because the compiler reads its flags only
once.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from time import perf_counter

from page import write_between

from gspmd.display.units import amount_of_bytes

EMBED, FEED_FORWARD = 18432, 73728
TOPOLOGY, MESH = "tpu-v4:4x4x4", {"x": 4, "y": 4, "z": 4}
LAYOUTS = ("weight-stationary-1d", "weight-stationary-2d", "weight-gathered-xyz")
TOKENS = (64, 512, 4096, 65536, 1 << 20)
MODES = "--xla_tpu_all_gather_collective_matmul_mode={0} --xla_tpu_reduce_scatter_collective_matmul_mode={0}"
DECOMPOSED = "--xla_tpu_decompose_all_gather_einsum=true --xla_tpu_decompose_einsum_reduce_scatter=true"
COLUMNS = {
    "xla": ("xla", ""),
    "xla, decomposed": ("xla", DECOMPOSED),
    "xla, post-spmd": ("xla", MODES.format("post_spmd")),
    "blocking": ("blocking", ""),
    "blocking, conservative": ("blocking", MODES.format("post_spmd_conservative")),
    "one-way": ("looped:one-way", ""),
    "halves": ("looped:halves", ""),
    "paired": ("looped:paired", ""),
    "auto": ("auto", ""),
}
"""Maps the name of a column to its lowering and the compiler's flags."""
MARKS = ("<!-- table: python benchmarks/looped.py -->", "<!-- end of table -->")


@dataclass(frozen=True)
class Cell:
    """One program, with its simulated seconds or the reason why it has none."""

    layout: str
    tokens: int
    column: str
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    compute_seconds: float = 0.0
    temporary_bytes: int = 0
    compile_seconds: float = 0.0
    failure: str = ""


def main() -> None:
    """Fill the table cell by cell."""
    options = parsed()
    if options.cell:
        layout, tokens, column = options.cell
        print(json.dumps(asdict(measured(layout, int(tokens), column))))
        return
    wanted = list(product(options.layouts.split(","), map(int, options.tokens.split(",")), COLUMNS))
    known = kept(options.json) if options.resume else {}
    with ThreadPoolExecutor(options.jobs) as pool:
        cells = []
        for cell in pool.map(lambda each: known.get(each) or in_a_process(*each, options.timeout), wanted):
            cells.append(cell)
            print(f"{cell.layout} {cell.tokens} {cell.column}: {text(cell)}", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in cells], indent=1))
    page = "\n".join(table(cells))
    print(page)
    if options.write:
        write_between(options.write, MARKS, page)


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="default: %(default)s")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="per batch; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="cells compiled side by side (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a cell (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the cells to a file")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the --json file has")
    parser.add_argument("--write", type=Path, help="replace the table in a page")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def kept(path: Path) -> dict[tuple[str, int, str], Cell]:
    """Read the successful cells of an earlier run, whether it finished or was interrupted."""
    cells = [Cell(**each) for each in json.loads(path.read_text())] if path.exists() else []
    return {(cell.layout, cell.tokens, cell.column): cell for cell in cells if not cell.failure}


def in_a_process(layout: str, tokens: int, column: str, timeout: float) -> Cell:
    """Measure a cell in a process with the column's compiler flags."""
    command = [sys.executable, __file__, "--cell", layout, str(tokens), column]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": COLUMNS[column][1]}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Cell(layout, tokens, column, failure=f"not compiled in {timeout:.0f} s")
    if done.returncode:
        return Cell(layout, tokens, column, failure=reason(done.stderr.strip().splitlines()[-1]))
    return Cell(**json.loads(done.stdout.splitlines()[-1]))


def reason(error: str) -> str:
    """Return a table's text for the error of a program that did not compile."""
    held = re.search(r"RESOURCE_EXHAUSTED.*\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", error)
    if not held:
        return error[:200]
    needed, offered = (amount_of_bytes(float(gibibytes) * 2**30) for gibibytes in held.groups())
    return f"does not fit: {needed} of {offered}"


def measured(layout: str, tokens: int, column: str) -> Cell:
    """Compile the layer and simulate it."""
    import jax

    from gspmd.audit import timeline, topology
    from gspmd.audit.hlo import parse
    from gspmd.lowerings import names

    names.LOWERINGS = (*names.LOWERINGS, "looped:one-way")  # measured although it is not a public choice
    target = topology(TOPOLOGY)
    mesh = target.mesh(MESH)
    layer, operands = feed_forward(layout, tokens, mesh, COLUMNS[column][0])
    start = perf_counter()
    with jax.set_mesh(mesh):
        compiled = jax.jit(layer).lower(*operands).compile()
    taken = perf_counter() - start
    run = timeline(parse(compiled.as_text()), target.chip, MESH, torus=target.rings(mesh))
    memory = compiled.memory_analysis().temp_size_in_bytes
    return Cell(layout, tokens, column, run.step_seconds, run.exposed_seconds, run.compute_seconds, memory, taken)


def feed_forward(layout: str, tokens: int, mesh, lowering: str):
    """Return the gated layer, W_out · (silu(W_gate x) ⊙ W_in x), and its abstract operands in bfloat16."""
    import jax
    import jax.numpy as jnp

    import gspmd
    from gspmd.layouts import Layout

    ffn = Layout.load(layout).section("ffn")
    specs = [gspmd.Spec.parse(str(spec)) for spec in (ffn.residual, ffn.w_in, ffn.w_gate, ffn.w_out)]
    sizes = {"B": tokens, "L": 1, "E": EMBED, "F": FEED_FORWARD}
    via_in, via_out = (None if via is None else str(via) for via in (ffn.in_via, ffn.out_via))

    def layer(x, w_in, w_gate, w_out):
        equation = f"{ffn.residual}, ({ffn.w_in}, {ffn.w_gate}) -> ({ffn.hidden}, {ffn.hidden})"
        hidden, gate = gspmd.einsum(equation, x, (w_in, w_gate), via=via_in, lowering=lowering)
        out = f"{ffn.hidden}, {ffn.w_out} -> {ffn.residual}"
        return gspmd.einsum(out, jax.nn.silu(gate) * hidden, w_out, via=via_out, lowering=lowering)

    def operand(spec: gspmd.Spec) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, spec.partition_spec())
        return jax.ShapeDtypeStruct([sizes[dim] for dim in spec.dims], jnp.bfloat16, sharding=sharding)

    return layer, [operand(spec) for spec in specs]


def table(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a Markdown table for each layout, with a row for each number of tokens."""
    for layout in dict.fromkeys(cell.layout for cell in cells):
        yield f"\n### {layout}\n"
        yield f"| tokens | {' | '.join(COLUMNS)} | xla ÷ best looped | blocking ÷ best looped, hidden |"
        yield f"|--:|{'--:|' * len(COLUMNS)}--:|--:|"
        for tokens in dict.fromkeys(cell.tokens for cell in cells if cell.layout == layout):
            row = {cell.column: cell for cell in cells if (cell.layout, cell.tokens) == (layout, tokens)}
            best = min((cell.seconds for cell in row.values() if cell.seconds), default=0.0)
            yield f"| {tokens:,} | {' | '.join(text(row[name], best) for name in COLUMNS)} | {summary(row)} |"


def text(cell: Cell, best: float = 0.0) -> str:
    """Format a cell: the predicted time, then its exposed communication; the best of a row is bold."""
    if cell.failure:
        return cell.failure
    whole = amount(cell.seconds)
    whole = f"**{whole}**" if whole == amount(best) else whole
    return f"{whole} ({amount(cell.exposed_seconds)})"


def summary(row: dict[str, Cell]) -> str:
    """Return the speedups of the best schedule over `xla` and `blocking`, and the share of communication that it hides.

    The papers compare with the compiler's own program, which is `xla`. The share is the part of the exposed
    communication of `blocking` that is hidden.
    """
    looped = [row[name] for name in ("one-way", "halves", "paired") if row[name].seconds]
    if not looped:
        return " | "
    best = min(looped, key=lambda cell: cell.seconds)
    xla, blocking = row["xla"], row["blocking"]
    against_xla = f"{xla.seconds / best.seconds:.2f} ×" if xla.seconds else ""
    if not blocking.seconds:
        return f"{against_xla} | "
    hidden = 1 - best.exposed_seconds / blocking.exposed_seconds if blocking.exposed_seconds else 0.0
    share = blocking.exposed_seconds / blocking.seconds
    return f"{against_xla} | {blocking.seconds / best.seconds:.2f} ×, {hidden:.0%} of {share:.0%}"


def amount(seconds: float) -> str:
    """Format seconds with three digits, in micro- or milliseconds."""
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


if __name__ == "__main__":
    main()
