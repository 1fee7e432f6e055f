"""Compare a mixture-of-experts layer with a dense feed-forward layer of the same FLOPs, and with other libraries.

    python benchmarks/moe_layer.py --quick                                   # under a minute
    python benchmarks/moe_layer.py --json moe.json --write docs/moe.md       # 8 and 32 experts, k = 1 and 2
    python benchmarks/moe_layer.py --size 1024,256,1024 65536,256,1024 --only dense sort dropless

All programs of a case run in turns over several rounds, so that other load on the machine affects all programs alike.
The figures are medians. The sizes are the number of tokens, E and F. By default they are 4096,256,1024 in float32 on
CPUs, and 65536,4096,14336 in bfloat16 on GPUs. The other libraries need `pip install haliax==1.4.dev453
levanter==1.2.dev1644 gitpython chex`, preferably in a separate environment.
"""

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import jax
import jax.numpy as jnp
import moe_peers
from jax.sharding import AxisType
from page import write_between

import gspmd
from gspmd import host
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig, expert_layer

SIZES = {"cpu": (4096, 256, 1024), "gpu": (65536, 4096, 14336), "tpu": (65536, 4096, 14336)}
GROUP = 512  # tokens per group in the one-hot forms, whose time grows with the square of this number
FORWARD, BOTH = "forward", "forward + gradient"
DENSE, DENSE_DROPLESS, GROUPED = "dense", "dense, k · T rows", "sort, groups"
MARKS = ("<!-- table: python benchmarks/moe_layer.py -->", "<!-- end of table -->")


@dataclass(frozen=True)
class Case:
    """One layer to measure.

    Every implementation has X · C = factor · k · tokens slots, or k · tokens rows if it has no slots.
    """

    tokens: int
    embed: int
    hidden: int
    experts: int
    k: int
    activation: str
    dtype: str
    factor: float = 1.25

    @property
    def groups(self) -> int:
        """The number of equal groups of about GROUP tokens in the one-hot forms."""
        return max(count for count in range(1, max(1, self.tokens // GROUP) + 1) if self.tokens % count == 0)

    def config(self, form: str, groups: int) -> MoEConfig:
        """Return our config, with the same routing as the other libraries: a softmax, then its k largest entries."""
        return MoEConfig(
            self.experts, router="top-k", k=self.k, renormalize=self.k > 1, capacity_factor=self.factor,
            dispatch=form, groups=groups,
        )  # fmt: skip

    def rows(self, name: str) -> int:
        """Return the number of rows that the experts of an implementation compute."""
        if name == DENSE_DROPLESS or equal(name) == DENSE_DROPLESS:
            return self.k * self.tokens
        groups = self.groups if "one" in name or "groups" in name else 1
        return groups * self.experts * self.config("sort", groups).capacity(self.tokens // groups)

    @property
    def needed_bytes(self) -> int:
        """Bytes of the buffers that the gradient needs.

        The buffers are the slots and their outputs [X, C, E], and hidden activations [X, C, F]. For swiglu, the hidden
        activations are both halves with their cotangents. For other nonlinearities, they are the nonlinearity's input
        and output, and one cotangent.
        """
        wide = 4 if self.activation == "swiglu" else 3
        return self.rows("sort") * (2 * self.embed + wide * self.hidden) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Row:
    """The measurements of one implementation."""

    implementation: str
    experts: int
    k: int
    tokens: int
    rows: int
    step: str
    milliseconds: float
    temporary_bytes: int
    ratio_to_dense: float
    tflops: float


def equal(name: str) -> str:
    """Return the name of the dense layer with the same FLOPs."""
    return DENSE_DROPLESS if name in ("dropless", "plain ragged_dot", "haliax", "levanter") else DENSE


def main() -> None:
    """Measure the layers, print the tables, and write the results."""
    options = parsed()
    host.quiet_libtpu()
    if not options.fresh_memory:
        keep_freed_memory()
    platform = jax.default_backend()
    print(f"{jax.devices()[0].device_kind}, {moe_peers.versions()}", flush=True)
    sizes = options.size or [(1024, 128, 256) if options.quick else SIZES[platform]]
    dtype = options.dtype or ("float32" if platform == "cpu" else "bfloat16")
    rows, skipped = kept(options.json) if options.add else {}, set()
    for size, experts, k in product(sizes, options.experts, options.k):
        case = Case(*size, experts, k, options.activation, dtype)
        found = list(measured(case, options.only, options.rounds, skipped))
        print("\n".join(table(case, found)), flush=True)
        rows |= {(case, each.implementation, each.step): each for each in found}
    if options.json:
        written = [
            {**asdict(case), **asdict(row), "pass": row.step, "platform": platform} for (case, *_), row in rows.items()
        ]
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    if options.write:
        cases = dict.fromkeys(case for case, *_ in rows)
        pages = [line for each in cases for line in table(each, [row for (c, *_), row in rows.items() if c == each])]
        write_between(options.write, MARKS, "\n".join(pages))


def kept(path: Path) -> dict[tuple, Row]:
    """Read the results of an earlier run."""
    taken = lambda kind, each: kind(**{field.name: each[field.name] for field in fields(kind)})  # noqa: E731
    rows = [(taken(Case, each), taken(Row, each)) for each in json.loads(path.read_text())]
    return {(case, row.implementation, row.step): row for case, row in rows}


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    parser.add_argument("--size", type=size, nargs="+", help="tokens,E,F; default: 4096,256,1024 on CPUs")
    parser.add_argument("--experts", type=int, nargs="+", help="default: 8 32, with --quick 8")
    parser.add_argument("--k", type=int, nargs="+", help="choices of a token; default: 1 2, with --quick 2")
    parser.add_argument("--activation", default="swiglu", choices=("swiglu", "gelu"), help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPUs, else bfloat16")
    parser.add_argument("--rounds", type=int, help="default: 9, with --quick 5")
    only = "only these implementations, and always the dense ones"
    parser.add_argument("--only", nargs="+", choices=tuple(IMPLEMENTATIONS), help=only)
    parser.add_argument("--quick", action="store_true", help="a small case, in less than a minute")
    parser.add_argument("--fresh-memory", action="store_true", help="let the C library return freed memory")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    parser.add_argument("--add", action="store_true", help="keep the results of other programs in the --json file")
    parser.add_argument("--write", type=Path, help="replace the tables in a page")
    options = parser.parse_args()
    if options.add and not (options.json and options.json.exists()):
        parser.error("--add keeps the results of a --json file; give an existing one")
    options.experts = options.experts or ([8] if options.quick else [8, 32])
    options.k = options.k or ([2] if options.quick else [1, 2])
    options.rounds = options.rounds or (5 if options.quick else 9)
    return options


def keep_freed_memory() -> None:
    """Let malloc keep freed memory.

    Otherwise every run's buffers are new pages, which the operating system fills with zeros.

    The buffers of a training step stay allocated, so a benchmark that frees memory would overestimate the cost of the
    gradients of many experts' weights.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1), (-2, 2**28)):  # arenas, mmaps, trimming, padding
            library.mallopt(option, value)


def dense(case: Case) -> Callable:
    """Build a single feed-forward layer."""

    def layer(weights, x):
        return moe_peers.activated(case, jnp.matmul, x, weights)

    return layer


def ours(case: Case, form: str, groups: int) -> Callable:
    """Build `gspmd.moe.expert_layer` on one device."""
    config, layout = case.config(form, groups), Layout.load("replicated").section("moe")

    def layer(weights, x):
        x = x.reshape(groups, -1, x.shape[-1])
        y, _, _ = expert_layer(x, weights, layout, config, train=True, activation=case.activation)
        return y.reshape(-1, y.shape[-1])

    return layer


IMPLEMENTATIONS: dict[str, Callable[[Case], Callable]] = {
    DENSE: dense,
    DENSE_DROPLESS: dense,
    "sort": lambda case: ours(case, "sort", 1),
    GROUPED: lambda case: ours(case, "sort", case.groups),
    "onehot": lambda case: ours(case, "onehot", case.groups),
    "dropless": lambda case: ours(case, "dropless", 1),
    **moe_peers.PEERS,
}
"""The implementations to measure, by name; each is built only when it is measured."""


def inputs(case: Case, name: str) -> tuple:
    """Return the weights, the tokens, and the cotangent of the outputs."""
    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape, jnp.float32)  # noqa: E731
    shapes = {
        "w_in": (case.embed, case.hidden),
        "w_gate": (case.embed, case.hidden),
        "w_out": (case.hidden, case.embed),
    }
    if case.activation != "swiglu":
        del shapes["w_gate"]
    experts = () if name.startswith("dense") else (case.experts,)
    weights = {n: (draw(i, *experts, *s) / s[0] ** 0.5).astype(case.dtype) for i, (n, s) in enumerate(shapes.items())}
    if experts:
        weights["router"] = draw(7, case.embed, case.experts) / case.embed**0.5
    tokens = case.tokens if experts else case.rows(name)
    return weights, *(draw(n, tokens, case.embed).astype(case.dtype) for n in (8, 9))


def forward_and_gradient(layer: Callable, weights, x, cotangent) -> tuple:
    """Return the outputs, and the gradients of all weights and of the tokens."""
    y, pullback = jax.vjp(layer, weights, x)
    return y, pullback(cotangent)


def measured(case: Case, only: list[str] | None, rounds: int, skipped: set[str]) -> Iterator[Row]:
    """Compile all programs, run them in turns, and yield medians."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])  # Auto for haliax
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        programs = dict(compiled(case, only, skipped))
    shared = {True: inputs(case, DENSE), False: inputs(case, "sort")}
    arrays = {name: inputs(case, name) if name == DENSE_DROPLESS else shared[name == DENSE] for name, _ in programs}
    times = {key: [] for key in programs}
    for number in range(rounds + 1):
        for key, program in programs.items():
            start = perf_counter()
            jax.block_until_ready(program(*arrays[key[0]]))
            times[key] += [perf_counter() - start] * (number > 0)
    for (name, step), program in programs.items():
        seconds, base = median(times[name, step]), median(times[equal(name) if name != DENSE_DROPLESS else name, step])
        memory = program.memory_analysis().temp_size_in_bytes
        flops = 2 * case.rows(name) * case.embed * case.hidden * (3 if case.activation == "swiglu" else 2)
        flops *= 3 if step == BOTH else 1
        yield Row(name, case.experts, case.k, case.tokens, case.rows(name), step, seconds * 1e3, memory,
                  seconds / base, flops / seconds / 1e12)  # fmt: skip


def compiled(case: Case, only: list[str] | None, skipped: set[str]) -> Iterator[tuple[tuple[str, str], Callable]]:
    """Yield both programs of every available implementation.

    If an implementation is not available, the reason is printed once.
    """
    for name, build in IMPLEMENTATIONS.items():
        if (only and name not in (*only, DENSE, DENSE_DROPLESS)) or (name == GROUPED and case.groups == 1):
            continue
        try:
            layer, arrays = build(case), jax.eval_shape(partial(inputs, case, name))
            steps = {FORWARD: lambda w, x, _, layer=layer: layer(w, x), BOTH: partial(forward_and_gradient, layer)}
            for step, function in steps.items():
                yield (name, step), jax.jit(function).lower(*arrays).compile()
        except ImportError as error:
            if name not in skipped:
                print(f"{name} is skipped: {error}", flush=True)
            skipped.add(name)


def table(case: Case, rows: list[Row]) -> Iterator[str]:
    """Yield a Markdown table with a row for each implementation, and columns for the forward pass and the gradient."""
    shape = f"T={case.tokens} E={case.embed} F={case.hidden}, {case.experts} experts, k={case.k}"
    yield f"\n{shape}, {case.activation}, {case.dtype}; buffers of the gradient {case.needed_bytes / 1e6:.0f} MB\n"
    yield "| implementation | rows | forward ms | of dense | forward + gradient ms | of dense | temporary MB |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    by_name = {(row.implementation, row.step): row for row in rows}
    for name in dict.fromkeys(row.implementation for row in rows):
        one, both = by_name[name, FORWARD], by_name[name, BOTH]
        cells = [f"{value:.{digits}f}" for row in (one, both) for value, digits in
                 ((row.milliseconds, 1), (row.ratio_to_dense, 2))]  # fmt: skip
        yield f"| {name} | {one.rows:,} | {' | '.join(cells)} | {both.temporary_bytes / 1e6:.0f} |"


if __name__ == "__main__":
    main()
