"""Random moves between shardings: the planned seconds of their collectives beside those of the compiled program.

    python benchmarks/moves.py                          # 200 moves on v4, v5p and v5e, about four minutes
    python benchmarks/moves.py --moves 40 --chips tpu-v6e:4x4 tpu7x:2x2x4 --seed 1
    python benchmarks/moves.py --moves 40 --chips "tpu-v5e:4x4*2" "tpu-v5p:2x2x4*4"   # over several slices

Each move brings a bfloat16 tensor of 1 MB to 3 GB from one random sharding to another. The planned seconds are the
seconds of the plan's collectives. The compiled seconds are the seconds in which the timeline waits for collectives. The
seconds of slices and copies are shown separately, because in a program of one move most of them copy the result. A
gather that goes round each axis of a torus includes its copies, also in the plan. So the plan of such a move is
compared with the whole program. Each move is also compiled by the compiler's own partitioner (`jax.sharding.reshard`),
to compare whole programs.
"""

import argparse
import random
from collections.abc import Iterator
from math import inf, log2, prod, sqrt
from statistics import median
from typing import NamedTuple

import jax

import gspmd
from gspmd.annotate import Spec
from gspmd.audit import compile_offline, topology

CHIPS = ("tpu-v4:4x4x4", "tpu-v5p:4x4x4", "tpu-v5e:4x4", "tpu-v4:2x2x4", "tpu-v5p:4x4x8", "tpu-v5e:8x8")
SMALLEST, LARGEST = 20, 31.5
"""Binary logarithms of the bytes of a whole tensor."""


class Move(NamedTuple):
    """A move, and its seconds: planned, and in the compiled program waiting for collectives and computing.

    If the move has a gather that goes round each axis of a torus, `waits` is the time of the whole program, including
    its computation.

    Attributes:
        takes: seconds of the whole program.
        own: seconds of the program that the compiler's partitioner makes; infinite if this program does not fit.
    """

    chip: str
    equation: str
    sizes: tuple[int, ...]
    steps: str
    planned: float
    waits: float
    computes: float
    goes_round_each_axis: bool
    takes: float
    own: float

    @property
    def ratio(self) -> float:
        """Planned over compiled seconds; infinite if the compiled program waits for nothing."""
        return self.planned / self.waits if self.waits else inf


def specs(axes: tuple[str, ...], rng: random.Random) -> tuple[str, str]:
    """Draw two different shardings of a matrix."""
    while True:
        drawn = []
        for _ in range(2):
            held: dict[str, list[str]] = {"E": [], "F": [], "": []}
            for axis in rng.sample(axes, len(axes)):
                held[rng.choice(["E", "F", ""])].append(axis)
            drawn.append("".join(dim + ("_" + "".join(held[dim]) if held[dim] else "") for dim in "EF"))
        if drawn[0] != drawn[1]:
            return drawn[0], drawn[1]


def moves(count: int, chips: tuple[str, ...], seed: int) -> Iterator[Move]:
    """Yield random moves, compiled. Moves that only slice are drawn again."""
    rng = random.Random(seed)
    while count:
        found = compiled(rng.choice(chips), rng)
        if found is not None:
            count -= 1
            yield found


def compiled(name: str, rng: random.Random) -> Move | None:
    """Draw a move on a slice and compile it; return None if the move is too small or too large, or sends nothing."""
    slices = topology(name)
    # Several slices are a separate axis, and so are the two devices of a chip.
    shape = (*([slices.slices] * (slices.slices > 1)), *slices.shape, *([slices.cores] * (slices.cores > 1)))
    axes = dict(zip("xyzw", shape))
    before, after = specs(tuple(axes), rng)
    # Shards of whole tiles: 8 rows of 128 lanes.
    units = {"E": 8, "F": 128}
    for spec in (before, after):
        for dim, unit in (("E", 8), ("F", 128)):
            units[dim] = max(units[dim], unit * prod(axes[axis] for axis in Spec.parse(spec).axes_of(dim)))
    size = 2 ** rng.uniform(SMALLEST, LARGEST) / 2  # elements
    # About as long as wide: for shards of a few very long rows the compiler takes minutes.
    rows = units["E"] * 2 ** max(0, round(log2(sqrt(size) / units["E"]) + rng.randint(-2, 2)))
    columns = units["F"] * 2 ** max(0, round(log2(size / rows / units["F"])))
    if not SMALLEST <= log2(2 * rows * columns) <= LARGEST:
        return None
    sizes, equation = {"E": rows, "F": columns}, f"{before} -> {after}"
    plan = gspmd.plan(equation, sizes, axes, chip=slices.chip, lowering="blocking")
    planned = sum(step.seconds for step in plan.steps if step.is_collective)
    if not planned:
        return None
    sharding = jax.NamedSharding(slices.mesh(axes), Spec.parse(before).partition_spec())
    x = jax.ShapeDtypeStruct((rows, columns), "bfloat16", sharding=sharding)
    with gspmd.lowering("blocking"):
        report = compile_offline(lambda x: gspmd.reshard(x, equation), x, topology=slices)
    if report.timeline is None:  # It does not fit.
        return None
    steps = ", ".join(step.name for step in plan.steps)
    # A gather that goes round each axis is traced and compiled as permutes. Shards of less than a tile are gathered by
    # the compiler's all-gather instead.
    traced = report.plan.by_kind_and_axes()
    gathers = [tuple(sorted(step.axes)) for step in plan.steps if step.kind == "all-gather" and len(step.axes) > 1]
    each = any(("collective-permute", along) in traced for along in gathers)
    target = jax.NamedSharding(sharding.mesh, Spec.parse(after).partition_spec())
    with jax.set_mesh(sharding.mesh):
        own = compile_offline(lambda x: jax.sharding.reshard(x, target), x, topology=slices).timeline
    return Move(
        name,
        equation,
        (rows, columns),
        steps,
        planned,
        report.timeline.step_seconds if each else report.timeline.exposed_seconds,
        report.timeline.compute_seconds,
        each,
        report.timeline.step_seconds,
        own.step_seconds if own else inf,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = []
    for each in moves(given.moves, tuple(given.chips), given.seed):
        found.append(each)
        print(
            f"{each.chip:14s} {each.equation:22s} {each.sizes[0]:6d} x {each.sizes[1]:<8d} planned "
            f"{1e6 * each.planned:9.1f} us, waits {1e6 * each.waits:9.1f}, computes {1e6 * each.computes:9.1f}  "
            f"{each.ratio:5.2f}, of the compiler's own {each.takes / each.own:5.2f}  {each.steps}",
            flush=True,
        )
    for chip in dict.fromkeys(each.chip for each in found):
        ratios = sorted(each.ratio for each in found if each.chip == chip)
        beside = sorted(each.takes / each.own for each in found if each.chip == chip)
        print(
            f"{chip:14s} {len(ratios):4d} moves: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {median(ratios):.2f}; "
            f"of the compiler's own {beside[0]:.2f} to {beside[-1]:.2f}, median {median(beside):.2f}"
        )
    for least, most in ((0, 2**23), (2**23, 2**28), (2**28, 2**40)):
        ratios = sorted(each.ratio for each in found if least <= 2 * prod(each.sizes) < most)
        if ratios:
            print(f"{least:>13,d} to {most:,d} bytes, {len(ratios)}: {ratios[0]:.2f} to {ratios[-1]:.2f}")
    errors = [abs(each.ratio - 1) for each in found]
    print(f"all: median error {median(errors):.1%}, largest {max(errors):.0%}")


if __name__ == "__main__":
    main()
