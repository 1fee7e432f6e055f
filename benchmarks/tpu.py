"""Fit the model of a TPU to kernels that others timed on one, and compare compiled kernels with them.

    python benchmarks/tpu.py --chip tpu-v6e                            # constants for matmul.toml and chips.toml
    python benchmarks/tpu.py --chip tpu-v6e --write docs/accuracy.md   # and of timelines, and the table; 8 minutes

benchmarks/results/kernels-v5e.json and kernels-v6e.json have the measurements and their source. Each kernel was timed
in a loop over arrays that together are too large for on-chip memory: an iteration reads its operands from stacks, and
writes its result into a stack. Some products of the v6e have the time of separate calls (the file says which). The
part `fit` gives the constants. The part `check` has products and other kernels of a step of Llama 3 8B, which are left
out of the fit. For the table the same loops are compiled, and their iterations simulated twice: by the cycles that the
compiler estimates, and by the constants. That needs the compiler for TPUs (pip install 'gspmd[tpu]') but no TPU.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, exp, log, prod
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from page import check_marks, write_between
from scipy.optimize import least_squares

from gspmd.audit import compile_offline, topology
from gspmd.audit.simulation.simulator import timeline
from gspmd.hardware.chips import Chip, chip
from gspmd.hardware.matmul import EFFICIENCIES, Efficiency, Traffic

RESULTS = Path(__file__).parent / "results"
TOGETHER = 2**29
"""The bytes of all arrays over which a loop runs, as in the measurement."""
LENGTHS = 10, 100
CHAINS = "chains of 10 and of 100 products with tanh, in on-chip memory"
LARGE = 2**26
"""The least bytes of each array of a kernel whose bandwidth counts."""
MARKS = "<!-- kernels: python benchmarks/tpu.py --chip {} --write -->", "<!-- end of kernels of {} -->"
ROWS, EMBED, FEED_FORWARD, HEADS = 2048, 4096, 14336, 32  # of a prompt of Llama 3 8B

F32, BF16 = jnp.float32, jnp.bfloat16


@dataclass(frozen=True)
class Kernel:
    """A timed kernel.

    Attributes:
        kind: the kind of kernel, a row of the table.
        run: the function.
        shapes: shapes of its operands, in bfloat16.
        sizes: (batch, rows, depth, columns) of a product; None for another kernel.
        moved: the bytes that it reads and writes.
    """

    kind: str
    run: Callable
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, int, int, int] | None
    moved: Traffic


def main() -> None:
    """Print the constants; with --write compile the kernels, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=("tpu-v5e", "tpu-v6e"), default="tpu-v5e", help="the chip of the kernels")
    parser.add_argument("--write", type=Path, help="compile the kernels, and write the table into this page")
    given = parser.parse_args()
    marks = MARKS[0].format(given.chip), MARKS[1].format(given.chip)
    if given.write:
        check_marks(given.write, marks)
    card = chip(given.chip)
    results = json.loads((RESULTS / f"kernels-{given.chip.removeprefix('tpu-')}.json").read_text())
    idle = results["microseconds of an iteration that moves nothing"] * 1e-6
    fitted = fit(results["fit"], idle, card)
    for name in ("overhead_seconds", "matrix_efficiency", "read_efficiency", "write_efficiency", "power"):
        print(f"{name} = {getattr(fitted, name):.3g}")
    print(f"stream_efficiency = {stream_efficiency(results['fit'], idle, card):.3f}")
    for part in ("fit", "check"):
        off = np.exp(np.abs(errors(results[part], idle, card, fitted))) - 1
        print(f"{part}: {len(off)} kernels, off by {np.median(off):.1%} (median), {np.quantile(off, 0.9):.1%} (90%)")
    if given.write:
        print(f"excess_seconds = {excess_seconds(results[CHAINS], card):.2g}")
        print(f"least_seconds = {min(map(_of_an_instruction, results[CHAINS].values())):.2g}")
        text = "\n".join(table({**results["fit"], **results["check"]}, card))
        print(text)
        write_between(given.write, marks, text)


def kernel(name: str) -> Kernel:
    """Return the kernel with a name of the results, such as `gemm_8_4096_14336` or `add_16384KiB`."""
    what, *numbers = name.split("_")
    if what in ("gemm", "bmm"):
        batch, rows, columns, depth = map(int, numbers) if what == "bmm" else (1, *map(int, numbers))
        left, right = (
            ((rows, depth), (depth, columns)) if what == "gemm" else ((batch, rows, depth), (batch, depth, columns))
        )
        kind = "batches of products" if what == "bmm" else _by_rows(rows)
        moved = Traffic(2 * (prod(left) + prod(right)), 2 * batch * rows * columns)
        return Kernel(kind, jnp.matmul, (left, right), (batch, rows, depth, columns), moved)
    if name in STEP:
        run, shapes = STEP[name]
        size = 2 * prod(shapes[0])
        return Kernel("elementwise and norms", run, shapes, None, Traffic(size * len(shapes), size))
    (amount,) = numbers
    size = int(amount[:-3]) * {"KiB": 2**10, "MiB": 2**20}[amount[-3:]]
    shape = (size // 2048, 1024)
    if what == "read":
        return Kernel("sums, which only read", lambda x: jnp.sum(x, dtype=F32), (shape,), None, Traffic(size, 0))
    if what == "write":
        return Kernel(
            "constants, only written", lambda x: jnp.broadcast_to(x[0], shape), ((1,),), None, Traffic(0, size)
        )
    run = {"add": jnp.add, "silu": jax.nn.silu}.get(what, lambda x: x * 2)
    operands = 2 if what == "add" else 1
    return Kernel("elementwise and norms", run, (shape,) * operands, None, Traffic(operands * size, size))


def _by_rows(rows: int) -> str:
    if rows <= 64:
        return "products of 4 to 64 rows"
    return "products of 128 and 256 rows" if rows <= 256 else "products of 512 rows and more"


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(F32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def _softmax(scores: jax.Array) -> jax.Array:
    place = jnp.arange(ROWS)
    masked = jnp.where(place > place[:, None], -jnp.inf, 0.0)
    return jax.nn.softmax(scores.astype(F32) * 128**-0.5 + masked, -1).astype(BF16)


STEP: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "rmsnorm": (_norm, ((ROWS, EMBED),)),
    "softmax": (_softmax, ((8, HEADS // 8, ROWS, ROWS),)),
    "residual_add": (jnp.add, ((ROWS, EMBED),) * 2),
    "silu_mul": (lambda gate, up: jax.nn.silu(gate) * up, ((ROWS, FEED_FORWARD),) * 2),
}
"""Kernels of a prompt of Llama 3 8B other than products."""


def efficiency(card: Chip, overhead: float, matrix: float, read: float, write: float, power: float) -> Efficiency:
    """Return the constants of a TPU, whose tiles are those of its row in matmul.toml."""
    return replace(
        EFFICIENCIES[card.name], overhead_seconds=overhead, matrix_efficiency=matrix, read_efficiency=read,
        write_efficiency=write, power=power,
    )  # fmt: skip


def errors(measured: Mapping[str, float], idle: float, card: Chip, fitted: Efficiency) -> list[float]:
    """Return the logarithm of modelled over measured seconds of each kernel, in a loop with an `idle` time."""
    found = []
    for name, taken in measured.items():
        each = kernel(name)
        if name == "rmsnorm":
            continue  # It is two kernels, which read their operand twice.
        if each.sizes:
            seconds = fitted.seconds(each.sizes, each.moved, "bfloat16", card, False)
        else:
            seconds = fitted.overhead_seconds + fitted.memory_seconds(each.moved, card)
        found.append(log((seconds + idle) / (taken * 1e-6)))
    return found


def fit(measured: Mapping[str, float], idle: float, card: Chip) -> Efficiency:
    """Fit the constants to the logarithms that `errors` returns, with a loss that discounts outliers."""
    least, start, most = np.log([[1e-7, 0.5, 0.5, 0.3, 1], [1e-6, 0.9, 0.9, 0.7, 3], [1e-5, 1, 1, 1, 8]])
    off = lambda logs: errors(measured, idle, card, efficiency(card, *map(exp, logs)))  # noqa: E731
    return efficiency(card, *map(exp, least_squares(off, start, bounds=(least, most), loss="soft_l1", f_scale=0.1).x))


def stream_efficiency(measured: Mapping[str, float], idle: float, card: Chip) -> float:
    """Return the share of the memory's bandwidth that kernels reach that read and write large arrays."""
    found = []
    for name, taken in measured.items():
        each = kernel(name)
        if not each.sizes and each.moved.read and each.moved.written >= LARGE:
            found.append(each.moved.bytes / (taken * 1e-6 - idle) / card.hbm_bandwidth)
    return median(found)


def excess_seconds(chains: Mapping[str, Sequence[float]], card: Chip) -> float:
    """Return the seconds by which the compiler's cycles exceed the time of an instruction in on-chip memory.

    An instruction is a square product with its tanh. Its time is the difference between two chains, so the time of the
    loop around them does not count.
    """
    found = []
    for size, taken in chains.items():
        square = ((int(size), int(size)),)
        moved = Traffic(2 * prod(square[0]), 2 * prod(square[0]))
        both = [simulated(Kernel("", partial(_chain, count), square, None, moved), card)[0] for count in LENGTHS]
        each = _of_an_instruction([1e6 * seconds for seconds in both]), _of_an_instruction(taken)
        found.append(each[0] - each[1])
        print(f"{size} x {size}: {each[0]:.3g} s by cycles, {each[1]:.3g} s timed", flush=True)
    return median(found)


def _of_an_instruction(chains: Sequence[float]) -> float:
    """Return the seconds of one instruction, given the microseconds of a short and of a long chain."""
    return (chains[1] - chains[0]) * 1e-6 / (LENGTHS[1] - LENGTHS[0])


def _chain(count: int, x: jax.Array) -> jax.Array:
    for _ in range(count):
        x = jnp.tanh(x @ x)
    return x


def table(measured: Mapping[str, float], card: Chip) -> Iterator[str]:
    """Yield the lines of the table: for each kind of kernel, simulated over measured seconds in both ways."""
    found, shares = defaultdict(list), []
    for number, (name, taken) in enumerate(measured.items()):
        each = kernel(name)
        # The simulated loop has a second small kernel, which the measured iterations have too.
        ratios = [seconds / (taken * 1e-6) for seconds in simulated(each, card)]
        found[each.kind].append(ratios)
        shares.append(1 / ratios[0])
        print(
            f"{number + 1} of {len(measured)}: {name} {taken} us, " + ", ".join(f"{r:.2f}" for r in ratios), flush=True
        )
    print(f"least_share = {min(shares):.2f}", f"most_share = {max(1, *shares):.2f}", sep="\n")
    yield "| kernels | timed | by the compiler's cycles | by timed kernels |"
    yield "|:--|--:|--:|--:|"
    for kind, ratios in found.items():
        cells = [f"{median(each):.2f}, {min(each):.2f} to {max(each):.2f}" for each in zip(*ratios)]
        yield f"| {kind} | {len(ratios)} | {' | '.join(cells)} |"


def simulated(each: Kernel, card: Chip) -> tuple[float, float]:
    """Return the simulated seconds of an iteration, by the compiler's cycles and by timed kernels."""
    machine = topology(f"{card.name}:2x2")
    count = max(2, min(64, ceil(TOGETHER / each.moved.bytes)))
    made = jax.eval_shape(each.run, *(jax.ShapeDtypeStruct(shape, BF16) for shape in each.shapes))

    def loop(*stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(step: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            # Each iteration depends on the result of the one before, so that nothing moves out of the loop.
            total, results = carried
            last = lax.dynamic_index_in_dim(results, (step + count - 1) % count, keepdims=False)
            total += last.reshape(-1)[0].astype(F32) * 1e-30
            first, *others = (lax.dynamic_index_in_dim(stack, step, keepdims=False) for stack in stacks)
            result = each.run(first + total.astype(first.dtype), *others)
            return total, lax.dynamic_update_index_in_dim(results, result, step, 0)

        results = jnp.zeros((count, *made.shape), made.dtype)
        return lax.fori_loop(0, count, body, (jnp.zeros((), F32), results))

    stacks = [jax.ShapeDtypeStruct((count, *shape), BF16) for shape in each.shapes]
    report = compile_offline(loop, *stacks, topology=machine, mesh={"x": machine.num_devices})
    assert report.module, report.reason
    assert report.timeline, report.reason
    by_cycles = timeline(report.module, replace(card, name="by cycles"), report.mesh)
    (first, second) = (
        next(span.seconds for span in line.spans if span.category == "loop") for line in (by_cycles, report.timeline)
    )
    return first, second


if __name__ == "__main__":
    main()
