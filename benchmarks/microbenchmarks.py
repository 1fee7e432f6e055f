"""Compare predicted with published seconds of single products and gathers on TPU7x.

    python benchmarks/microbenchmarks.py            # print the table, in a few minutes
    python benchmarks/microbenchmarks.py --write    # and write it into docs/plans.md

Google has published the rates that its TPUs reach in these programs. Here they are compiled by the compiler for TPUs,
without the compiler's options that are published with them, and their time is simulated; no TPU is needed. A planned
time is that of `gspmd.trace`.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from page import write_between

import gspmd
from gspmd import host
from gspmd.audit import compile_offline, topology
from gspmd.display.units import amount_of_bytes, amount_of_seconds

PAGE = Path(__file__).parents[1] / "docs" / "plans.md"
MARKS = "<!-- microbenchmarks: python benchmarks/microbenchmarks.py -->", "<!-- end of microbenchmarks -->"
SLICE = "tpu7x:2x2x1"
"""Four chips of two devices each."""
PRODUCTS = {4096: 893e12}
"""n of a bfloat16 product of two n × n matrices -> published FLOP/s of one device. Source: tpu-recipes,
microbenchmarks/ironwood. It also has 956e12 for n = 32,768, which takes the compiler much longer."""
GATHERS = {64: 71.77e9, 256: 129.19e9, 1024: 161.90e9, 4096: 174.77e9, 16384: 178.77e9}
"""Rows of a shard f32[rows, 8, 128] -> published bytes per second that a chip receives. Shards are gathered over four
chips. Both devices of a chip do so at the same time, and each receives three shards. Source: Google's
accelerator-microbenchmarks, Ironwood/guides/collectives/all_gather.md."""


class Row(NamedTuple):
    """A program with its seconds: published, in the compiled program, and by the plan."""

    program: str
    published: float
    compiled: float
    planned: float


def rows() -> Iterator[Row]:
    """Yield every published product and gather, compiled and planned."""
    mesh = topology(SLICE).mesh({"x": 4, "y": 2})  # four chips, and the two devices of each
    for size, rate in PRODUCTS.items():
        matrix = jax.ShapeDtypeStruct((size, size), "bfloat16", sharding=jax.NamedSharding(mesh, jax.P(None, None)))
        yield Row(f"product, n = {size:,}", 2 * size**3 / rate, *seconds(product, matrix, matrix))
    sharding = jax.NamedSharding(mesh, jax.P("x", "y", None))
    for size, rate in GATHERS.items():
        # Both devices of a chip have shards of their own. If they had the same shards, as the published programs have,
        # the plan would gather a half on each device and exchange the halves within the chip.
        whole = jax.ShapeDtypeStruct((4 * size, 2 * 8, 128), "float32", sharding=sharding)
        held = 4 * size * 8 * 128
        yield Row(f"gather of 4 × {amount_of_bytes(held)}", 2 * 3 * held / rate, *seconds(gather, whole))


def product(one: jax.Array, other: jax.Array) -> jax.Array:
    """Multiply two matrices on every device."""
    return gspmd.einsum("MK, KN -> MN", one, other)


def gather(shards: jax.Array) -> jax.Array:
    """Gather a tensor over the chips."""
    return gspmd.reshard(shards, "A_xB_yC -> AB_yC")


def seconds(program: Callable[..., jax.Array], *arguments: jax.ShapeDtypeStruct) -> tuple[float, float]:
    """Return the seconds of a program under lowering `blocking`: compiled, and by the plan."""
    with gspmd.lowering("blocking"):
        report = compile_offline(program, *arguments, topology=topology(SLICE))
    assert report.timeline is not None, report.reason
    return report.timeline.step_seconds, report.plan.seconds


def table(found: list[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| program | published | compiled | compiled / published | planned | planned / published |"
    yield "|---|--:|--:|--:|--:|--:|"
    for row in found:
        times = [amount_of_seconds(each) for each in (row.published, row.compiled, row.planned)]
        ratios = [row.compiled / row.published, row.planned / row.published]
        yield f"| {row.program} | {times[0]} | {times[1]} | **{ratios[0]:.2f}** | {times[2]} | {ratios[1]:.2f} |"


def main() -> None:
    """Print the table, and write it into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into docs/plans.md")
    options = parser.parse_args()
    host.keep_compiled(False)
    host.start(1, "cpu")
    text = "\n".join(table([*rows()]))
    print(text)
    if options.write:
        write_between(PAGE, MARKS, text)


if __name__ == "__main__":
    main()
