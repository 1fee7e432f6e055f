"""Compare two gathers over several torus axes: the compiler's, round one ring, and `blocking`'s, round each axis.

    python benchmarks/torus_gather.py                           # v4 and v5p, 2.7 GB, about four minutes
    python benchmarks/torus_gather.py --chips tpu-v5p:4x4x8 --rows 4096 --columns 32768

Seconds come from the timeline of the compiled program. `gather` is a program with only the gather, in which the
compiler copies the result of its own gather. `product` is a program that multiplies the gathered matrix, which needs no
such copy; the time of a program with only the product is subtracted. `memory` is the memory that the compiler allocates
for `product` in addition to arguments and results, namely for the gathered matrix and for blocks that are being sent.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
from jax import lax

import gspmd
from gspmd.audit import Topology, compile_offline, topology
from gspmd.hardware.links import collective_seconds

CHIPS = ("tpu-v4:4x4x4", "tpu-v5p:4x4x4", "tpu-v5p:4x4x8")
EQUATIONS = ("EF_yz -> EF", "E_yzF -> EF", "EF_xyz -> EF")
ROWS_OF_PRODUCT = 2048


class Gathered(NamedTuple):
    """The figures of a gather.

    Attributes:
        gather: seconds of the program with only the gather.
        product: seconds of the program with the gather and a product, minus the seconds of the product alone.
        memory: bytes of temporaries in the program with both.
    """

    gather: float
    product: float
    memory: int


def gathered(
    slices: Topology, equation: str, sizes: dict[str, int], gather: Callable[[jax.Array], jax.Array]
) -> Gathered:
    """Compile a gather alone and before a product."""
    mesh = slices.mesh(dict(zip("xyz", slices.shape)))
    spec = gspmd.Spec.parse(equation.partition(" -> ")[0])
    x = jax.ShapeDtypeStruct(
        tuple(sizes[dim] for dim in spec.dims), "bfloat16", sharding=jax.NamedSharding(mesh, spec.partition_spec())
    )
    left, whole = (
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(mesh, jax.P()))
        for shape in ((ROWS_OF_PRODUCT, sizes["E"]), (sizes["E"], sizes["F"]))
    )
    seconds, memory = [], []
    for function, arguments in (
        (gather, (x,)),
        (lambda x, left: left @ gather(x), (x, left)),
        (lambda whole, left: left @ whole, (whole, left)),
    ):
        report = compile_offline(function, *arguments, topology=slices)
        assert report.timeline is not None, report.reason
        seconds.append(report.timeline.step_seconds)
        memory.append(report.temporary_bytes)
    return Gathered(seconds[0], seconds[1] - seconds[2], memory[1])


def one_ring(x: jax.Array, dimension: int, parts: Sequence[tuple[str, ...]], before: jax.P) -> jax.Array:
    """Gather by the compiler's own all-gathers, one for each part of the axes."""

    def body(x: jax.Array) -> jax.Array:
        for part in parts:
            x = lax.all_gather(x, part, axis=dimension, tiled=True)
        return x

    return jax.shard_map(body, in_specs=before, out_specs=jax.P(), check_vma=False)(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--rows", type=int, default=18432)
    parser.add_argument("--columns", type=int, default=73728)
    given = parser.parse_args()
    sizes = {"E": given.rows, "F": given.columns}
    print(
        "| slice | gather | one ring: gather, product, memory | each axis: gather, product, memory | ratios | planned |"
    )
    print("|---|---|---|---|---|---|")
    for name in given.chips:
        slices = topology(name)
        mesh = dict(zip("xyz", slices.shape))
        for equation in EQUATIONS:
            spec = gspmd.Spec.parse(equation.partition(" -> ")[0])
            dimension = next(place for place, axes in enumerate(spec.axes) if axes)
            axes = spec.axes[dimension]
            # A gather over all devices is run in two parts, because the compiler would turn a single all-gather into an
            # all-reduce.
            parts = [axes] if len(axes) == 2 else [axes[2:], axes[:2]]

            own = partial(one_ring, dimension=dimension, parts=parts, before=spec.partition_spec())
            ring = gathered(slices, equation, sizes, own)
            each = gathered(
                slices, equation, sizes, lambda x, equation=equation: gspmd.reshard(x, equation, lowering="blocking")
            )
            planned = collective_seconds("all-gather", axes, mesh, 2 * given.rows * given.columns, slices.chip)
            figures = [
                f"{1e3 * found.gather:.1f} ms, {1e3 * found.product:.1f} ms, {found.memory / 1e9:.1f} GB"
                for found in (ring, each)
            ]
            print(
                f"| `{name}` | `{equation}` | {figures[0]} | {figures[1]} "
                f"| {each.gather / ring.gather:.2f}, {each.product / ring.product:.2f} | {1e3 * planned:.1f} ms |",
                flush=True,
            )


if __name__ == "__main__":
    main()
