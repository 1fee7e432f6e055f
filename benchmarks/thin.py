"""Compare the cost of thin matrix products on TPUs, as their compiler estimates it, with the planner's model.

    python benchmarks/thin.py --chip tpu-v4                   # compile offline; measured, model, their ratio
    python benchmarks/thin.py --chip tpu-v4 --json thin.json  # and write the same as plain data
    python benchmarks/thin.py --chip tpu-v4 --fit             # and print a row for gspmd/hardware/matmul.toml

Needs the compiler for TPUs (pip install 'gspmd[tpu]') but no TPU; takes one to ten minutes on two cores. Every product
is compiled in three forms. `plain` is the product by itself. `write` is a loop over chunks of a free dimension; each
product is written to its place in the result. `accumulate` is a loop over chunks of the contracted dimension; each
product is added to a float32 accumulator.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import log, prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.table import Table
from scipy.optimize import least_squares

from gspmd.audit import Topology, topology
from gspmd.audit.hlo import Computation, Instruction, Module, parse
from gspmd.audit.simulation.roofline import cost
from gspmd.display import console as printing
from gspmd.hardware.chips import Chip
from gspmd.hardware.matmul import EFFICIENCIES, Efficiency, Traffic

SLICES = {"tpu-v3": "4x4", "tpu-v4": "4x4x4", "tpu-v5e": "4x4", "tpu-v5p": "4x4x4", "tpu-v6e": "4x4", "tpu7x": "4x4x4"}
DEPTHS = {"tpu-v6e": 256, "tpu7x": 256}  # rows of the matrix unit; 128 for other chips
FORMS = ("plain", "write", "accumulate")
LEFT = (8, 32, 64, 128, 256, 512, 1024, 2048, 8192)
CONTRACTED = (64, 128, 288, 512, 1152, 2304, 4608, 18432)
RIGHT = (128, 256, 512, 1152, 2304, 4608, 8192)
SERIES = ((18432, 1152), (1152, 4608), (4608, 4608))  # weights that are multiplied by ever thinner chunks
# Products whose results and accumulators are too large for on-chip memory.
LARGE = ((8192, 512, 4608), (8192, 1152, 4608), (8192, 4608, 4608), (8192, 288, 8192), (8192, 2304, 8192))
TRIPS = 4
TOGETHER, BYTES = 12, 4e9  # the most products, and roughly the most bytes of arguments, in one program
ON_CHIP = re.compile(r"S\([1-4]\)")  # in a layout, marks an array in on-chip memory

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Sample:
    """One compiled product: its seconds, and the bytes that it reads from and writes to main memory."""

    form: str
    left: int
    contracted: int
    right: int
    seconds: float
    read: int
    written: int

    @property
    def moved(self) -> Traffic:
        """The bytes as a `Traffic`, the form that the model of time takes as its argument."""
        return Traffic(self.read, 0, self.written) if self.form == "accumulate" else Traffic(self.read, self.written)


def main() -> None:
    """Measure the products, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", default="tpu-v4", choices=SLICES, help="default: %(default)s")
    parser.add_argument("--shapes", type=int, default=75, help="random shapes of the grid (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and print them")
    options = parser.parse_args()
    if not options.fit and options.chip not in EFFICIENCIES:
        parser.error(f"{options.chip} has no constants yet: add --fit")
    machine = topology(f"{options.chip}:{SLICES[options.chip]}")
    samples = [
        s for form in FORMS for group in programs(form, shapes(options.shapes)) for s in measure(machine, form, group)
    ]
    fitted = fit(samples, machine.chip) if options.fit else EFFICIENCIES[options.chip]
    rows = [{**asdict(sample), "model": modelled(sample, machine.chip, fitted)} for sample in samples]
    printing.console().print(table(rows, options.chip))
    for form, (count, median, most) in errors(rows).items():
        print(f"{form}: {count} products, |model / measured - 1| {median:.1%} (median), {most:.1%} (90%)")
    if options.fit:
        print(row_text(options.chip, fitted, rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def shapes(count: int) -> list[Shape]:
    """Return a series of ever thinner chunks, the large shapes, and `count` random shapes of the grid."""
    grid = [s for s in product(LEFT, CONTRACTED, RIGHT) if 2**21 <= prod(s) <= 2**38]
    drawn = np.random.default_rng(0).permutation(len(grid))[:count]
    series = [(left, *weight) for left in (16, 64, 256, 1024, 2048) for weight in SERIES]
    return list(dict.fromkeys([*series, *LARGE, *(grid[n] for n in drawn)]))


def plain(x: jax.Array, w: jax.Array, at: jax.Array) -> jax.Array:
    """Multiply once, without a loop."""
    return x @ w


def write(x: jax.Array, w: jax.Array, at: jax.Array) -> jax.Array:
    """Multiply chunks of a free dimension, and write each product to its place."""
    left = x.shape[1]

    def step(k: jax.Array, out: jax.Array) -> jax.Array:
        place = (at + k) % TRIPS
        piece = jax.lax.dynamic_index_in_dim(x, place, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(out, piece @ w, place * left, 0)

    return jax.lax.fori_loop(0, TRIPS, step, jnp.zeros((TRIPS * left, w.shape[1]), x.dtype))


def accumulate(x: jax.Array, w: jax.Array, at: jax.Array) -> jax.Array:
    """Multiply chunks of the contracted dimension, and add up the products."""

    def step(k: jax.Array, total: jax.Array) -> jax.Array:
        place = (at + k) % TRIPS
        pieces = (jax.lax.dynamic_index_in_dim(each, place, keepdims=False) for each in (x, w))
        return total + jnp.matmul(*pieces, preferred_element_type=jnp.float32)

    return jax.lax.fori_loop(0, TRIPS, step, jnp.zeros((x.shape[1], w.shape[2]), jnp.float32))


def operands(form: str, left: int, contracted: int, right: int) -> list[tuple[int, ...]]:
    """Return the shapes of a form's operands; these are the whole operands, with all of their chunks."""
    of_left, of_right = () if form == "plain" else (TRIPS,), (TRIPS,) if form == "accumulate" else ()
    return [(*of_left, left, contracted), (*of_right, contracted, right)]


def programs(form: str, wanted: list[Shape]) -> Iterator[list[Shape]]:
    """Yield the shapes in groups that are small enough for one program."""
    group, size = [], 0
    for shape in wanted:
        more = 2 * sum(map(prod, operands(form, *shape)))
        if group and (size + more > BYTES or len(group) == TOGETHER):
            yield group
            group, size = [], 0
        group, size = [*group, shape], size + more
    yield group


def measure(machine: Topology, form: str, group: list[Shape]) -> Iterator[Sample]:
    """Compile independent products as one program, and yield the cost of each."""
    body = {"plain": plain, "write": write, "accumulate": accumulate}[form]

    def run(at: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        found = []
        for n, (x, w) in enumerate(zip(arrays[::2], arrays[1::2])):
            with jax.named_scope(f"product{n}."):
                found.append(body(x, w, at))
        return found

    module = compiled(machine, run, [each for shape in group for each in operands(form, *shape)])
    computations = [module.entry] if form == "plain" else list(bodies(module))
    for n, shape in enumerate(group):
        yield Sample(form, *shape, *summed(module, computations, f"product{n}./", machine.chip))


def compiled(machine: Topology, run: Callable, sizes: list[tuple[int, ...]]) -> Module:
    """Compile a program in which every device computes the same result by itself."""
    mesh = machine.mesh({"x": machine.num_devices}, "auto")
    place = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=place) for size in sizes]
    at = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    local = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return parse(jax.jit(local).lower(at, *arrays).compile().as_text())


def bodies(module: Module) -> Iterator[Computation]:
    """Yield the bodies of loops."""
    for computation in module.computations.values():
        for each in computation.instructions:
            if each.opcode == "while":
                yield module.computations[each.attribute("body").lstrip("%")]


def summed(module: Module, computations: list[Computation], scope: str, chip: Chip) -> tuple[float, int, int]:
    """Sum the seconds and bytes of the instructions in a scope; asynchronous copies cost nothing."""
    seconds, moved, written = 0.0, 0, 0
    for computation in computations:
        for each in computation.instructions:
            if scope in each.op_name and not each.opcode.endswith(("-start", "-done", "while")):
                found = cost(module, computation, each, chip)
                seconds += found.seconds
                sources = [computation.by_name[name] for name in each.operands]
                moved += sum(map(touched, sources)) if found.flops else found.bytes
                written += touched(each) if found.flops else 0
    return seconds, moved, written


def touched(value: Instruction) -> int:
    """Return the bytes of main memory that a product touches in one chunk of an operand or in its result."""
    array = value.arrays[0]
    on_chip = ON_CHIP.search(value.type) or len(array.shape) < 2
    return 0 if on_chip else array.bytes // prod(array.shape[:-2])


def modelled(sample: Sample, chip: Chip, row: Efficiency) -> float:
    """Return the seconds that the model predicts for a sample, from the bytes that its compiled program moves."""
    sizes = (1, sample.left, sample.contracted, sample.right)
    return row.seconds(sizes, sample.moved, "bfloat16", chip, sample.form == "accumulate")


def fit(samples: Sequence[Sample], chip: Chip) -> Efficiency:
    """Fit the constants to the log ratios of model and measurement, with a loss that discounts outliers."""
    tiles = {"rows": 8, "lanes": 128, "depth": DEPTHS.get(chip.name, 128)}
    row = lambda logs: Efficiency(*np.exp(logs).tolist(), **tiles)  # noqa: E731
    off = lambda logs: [log(modelled(each, chip, row(logs)) / each.seconds) for each in samples]  # noqa: E731
    least = np.log([1e-8, 1e-9, 1e-10, 0.1, 0.1, 0.1, 1e10, 1e9, 1e9])
    start = np.log([2e-6, 1e-6, 1e-7, 0.9, 0.7, 0.7, 2e12, 1e11, 1e11])
    most = np.log([1e-4, 1e-4, 1e-4, 1, 1, 1, 1e14, 1e13, 1e13])
    return row(least_squares(off, start, bounds=(least, most), loss="soft_l1", f_scale=0.1).x)


def errors(rows: list[dict]) -> dict[str, tuple[int, float, float]]:
    """Return the model's errors over all forms, and for each form.

    The errors are the number of products, and the median and the 90th percentile of |ratio - 1|.
    """
    found = {}
    for form in ("all", *FORMS):
        off = [abs(row["model"] / row["seconds"] - 1) for row in rows if form in ("all", row["form"])]
        found[form] = (len(off), float(np.median(off)), float(np.quantile(off, 0.9)))
    return found


def row_text(chip: str, fitted: Efficiency, rows: list[dict]) -> str:
    """Format a row of matmul.toml."""
    count, median, most = errors(rows)["all"]
    figures = "\n".join(f"{key} = {value:.4g}" for key, value in asdict(fitted).items())
    return f"\n[{chip}]\n{figures}\n\n[{chip}.fit]\nproducts = {count}\nmedian = {median:.3f}\nninetieth = {most:.3f}\n"


def table(rows: list[dict], chip: str) -> Table:
    """Lay the measurements and the model out as a table, with the largest errors last."""
    found = Table(title=f"one product on {chip}", title_justify="left")
    for column in (
        "form",
        "left",
        "contracted",
        "right",
        "main memory MB",
        "measured µs",
        "model µs",
        "model / measured",
    ):
        found.add_column(column, justify="left" if column == "form" else "right")
    for row in sorted(rows, key=lambda row: abs(log(row["model"] / row["seconds"]))):
        seconds = [f"{row[key] * 1e6:.2f}" for key in ("seconds", "model")]
        shape = [str(row[key]) for key in ("left", "contracted", "right")]
        found.add_row(
            row["form"],
            *shape,
            f"{(row['read'] + row['written']) / 1e6:.1f}",
            *seconds,
            f"{row['model'] / row['seconds']:.2f}",
        )
    return found


if __name__ == "__main__":
    main()
