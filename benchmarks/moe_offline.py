"""Compare an expert layer with a dense layer on as many rows, both with gradients and compiled offline for TPUs.

    python benchmarks/moe_offline.py --json layers.json --write docs/moe.md       # minutes

Sizes are GShard's (E = 1024, F = 8192, ReLU, top-2), on 256 TPU v5p with two experts each. The expert layer has the
router, the dispatch, both all-to-alls, the products, the combine, and its whole backward pass. Needs the compiler for
TPUs, but no TPU.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from page import Kept, write_between

import gspmd
from gspmd import host
from gspmd.audit import compile_offline, topology
from gspmd.moe import MoEConfig, expert_layer

SLICE, EMBED, HIDDEN, EXPERTS, GROUPS, TOKENS = "tpu-v5p:4x8x8", 1024, 8192, 512, 4, 256
"""The slice, E, F, X, groups per device, and tokens per group."""
MARKS = ("<!-- layer: python benchmarks/moe_offline.py -->", "<!-- end of layer -->")


def main() -> None:
    """Compile the layers that are not in the file, print the table, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="keep what was compiled in this file, and take it from there")
    parser.add_argument("--write", type=Path, help="replace the table in a page")
    options = parser.parse_args()
    host.keep_compiled(False)  # JAX cannot read back what was compiled for devices that are not there
    host.start(1, "cpu")  # for JAX itself: the slice's devices exist for the compiler only
    text = "\n".join(table(Kept(options.json)))
    print(text)
    if options.write:
        write_between(options.write, MARKS, text)


def table(kept: Kept) -> Iterator[str]:
    """Yield a table of the seconds of both layers, which shows the seconds of computing and of waiting separately."""
    found = {name: kept(name, lambda each=name: measured(each)) for name in LAYERS}
    yield "| layer | computing | products | other | of dense | waiting |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, each in found.items():
        share = each["compute"] / found["dense"]["compute"]
        cells = (f"{each[part] * 1e6:.0f} µs" for part in ("compute", "products", "other"))
        yield f"| {name} | {' | '.join(cells)} | {share:.2f} | {each['waiting'] * 1e6:.0f} µs |"


def measured(name: str) -> dict[str, Any]:
    """Return the seconds of one layer's program."""
    target, layout = topology(SLICE), gspmd.Layout.load("gshard").section("moe")
    with jax.set_mesh(target.mesh({"x": target.num_devices, "y": 1, "z": 1})), gspmd.lowering("blocking"):
        line = compile_offline(*LAYERS[name](layout, target.num_devices * GROUPS), topology=target).timeline
    spent = lambda category: sum(part.seconds for part in line.parts if part.category == category)  # noqa: E731
    return {
        "compute": line.compute_seconds, "products": spent("einsum"), "other": spent("other"),
        "waiting": line.exposed_seconds,
    }  # fmt: skip


def dense(layout: Any, groups: int) -> tuple:
    """Return a dense layer and its arguments.

    Its weights are unsharded, and it has as many rows as the experts have slots.
    """
    rows = EXPERTS * CONFIG.capacity(TOKENS)
    x = abstract((groups, rows, EMBED), "G_xyzLE")

    def layer(x, w_in, w_out, cotangent):
        def answers(x, w_in, w_out):
            h = jax.nn.relu(gspmd.einsum("G_xyzLE, EF -> G_xyzLF", x, w_in, via="G_xyzLE, EF"))
            return gspmd.einsum("G_xyzLF, FE -> G_xyzLE", h, w_out, via="G_xyzLF, FE")

        y, pull = jax.vjp(answers, x, w_in, w_out)
        return y, pull(cotangent)

    return layer, x, abstract((EMBED, HIDDEN), "EF"), abstract((HIDDEN, EMBED), "FE"), x


def experts(layout: Any, groups: int) -> tuple:
    """Return the expert layer and its abstract arguments."""
    x = abstract((groups, TOKENS, EMBED), layout.groups)
    weights = {
        "router": abstract((EMBED, EXPERTS), layout.router, "float32"),
        "w_in": abstract((EXPERTS, EMBED, HIDDEN), layout.w_in),
        "w_out": abstract((EXPERTS, HIDDEN, EMBED), layout.w_out),
    }

    def layer(x, weights, cotangent):
        def answers(x, weights):
            key = jax.random.key(0)
            return expert_layer(x, weights, layout, CONFIG, key=key, train=True, activation="relu")[:2]

        (y, loss), pull = jax.vjp(answers, x, weights)
        return y, pull((cotangent, jnp.ones_like(loss)))

    return layer, x, weights, x


def abstract(shape: tuple[int, ...], spec: Any, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    """Return an abstract array with its sharding."""
    return gspmd.annotate(jax.ShapeDtypeStruct(shape, dtype), spec)


CONFIG = MoEConfig(experts=EXPERTS, router="gshard", capacity_factor=1.0)
LAYERS = {"dense": dense, "experts": experts}

if __name__ == "__main__":
    main()
