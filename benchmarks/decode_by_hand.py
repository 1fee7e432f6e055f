"""PaLM's prefill and decode step in plain JAX and shard_map, as a baseline for the same steps in notation.

    python benchmarks/decode_by_hand.py           # the four rows of Pope et al. 2022, table 2, compiled for 64 TPU v4
    python benchmarks/decode_by_hand.py --row decode-64-int8 --hlo decode.hlo

Only the measurement at the end uses gspmd. The model has a parallel block (one norm, one gather of the block's input,
one reduction of its output), multiquery attention, SwiGLU, rotary positions and a scan over layers. The weights are
bfloat16, or int8 with a float32 scale for each column of a result. In notation:

    decode                  weights E_xF_yz, H_yzDE_x; residual BE_xyz; attention and cache over the batch, B_xyz
    prefill, stationary     the same weights; attention over the heads, H_yzx; keys and values whole
    prefill, gathered       the same stored weights, each gathered whole before its product; everything else over B_xyz

The cache [N, B, T, 1, D] is only read inside the scan. The layers return their new keys and values, and one write
after the scan adds them to the cache, so that the cache is never copied.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

X, YZ, XYZ = ("x",), ("y", "z"), ("x", "y", "z")


@dataclass(frozen=True)
class Sizes:
    """One model, batch and length; the defaults are PaLM 540B with its 48 heads padded to 64."""

    layers: int = 118
    embed: int = 18432
    feed_forward: int = 73728
    heads: int = 64
    head_size: int = 256
    vocabulary: int = 262144
    batch: int = 512
    length: int = 2048
    """Tokens of each prompt, which are in the cache of a decode step."""
    cache: int = 2112
    """Positions that the cache can hold."""
    int8: bool = False


ROWS = {
    "prefill-1-int8": ("stationary", Sizes(batch=1, int8=True), 0.29),
    "decode-64-int8": ("decode", Sizes(batch=64, int8=True), 1.82),
    "prefill-512": ("gathered", Sizes(batch=512), 85.2),
    "decode-512": ("decode", Sizes(batch=512), 6.0),
}
"""Rows of table 2: program, sizes, and measured seconds for the prompt's 2048 tokens or for 64 decode steps."""
STEPS = 64


def gather(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """All-gather along a dimension."""
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Reduce-scatter along a dimension, which is first moved to the front.

    Without this move the TPU compiler emits an all-reduce.
    """
    x = jnp.moveaxis(x, dim, 0)
    pieces = x.reshape(lax.axis_size(axes), -1, *x.shape[1:])
    return jnp.moveaxis(lax.psum_scatter(pieces, axes, scatter_dimension=0), 0, dim)


def exchange(x: jax.Array, axes: tuple[str, ...], split: int, joined: int) -> jax.Array:
    """Run an all-to-all that splits one dimension and joins another."""
    return lax.all_to_all(x, axes, split, joined, tiled=True)


def product(equation: str, x: jax.Array, weight: tuple[jax.Array, jax.Array | None]) -> jax.Array:
    """Compute an einsum with a weight.

    An int8 weight is cast when it is read, and its scales multiply the result.
    """
    values, scales = weight
    y = jnp.einsum(equation, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y if scales is None else y * scales).astype(x.dtype)


def norm(x: jax.Array, scale: jax.Array, size: int) -> jax.Array:
    """Compute the RMS norm of [..., E_xyz], or of [..., E] if the scale is unsharded."""
    wide = x.astype(jnp.float32)
    total = jnp.sum(wide * wide, axis=-1, keepdims=True)
    total = total if x.shape[-1] == size else lax.psum(total, XYZ)
    return (wide * lax.rsqrt(total / size + 1e-6) * scale).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Apply rotary positions [B, L] to [B, L, H, D]."""
    size = x.shape[-1]
    angles = positions[:, :, None, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, old_k: jax.Array, old_v: jax.Array, lengths: jax.Array):
    """Attend with a query [B, 1, H, D] to its key and value [B, 1, D], and to the cache [B, T, D] before `lengths`."""
    q = q * q.shape[-1] ** -0.5
    own = jnp.einsum("blhd,bld->bhl", q, k, preferred_element_type=jnp.float32)
    old = jnp.einsum("blhd,btd->bht", q, old_k, preferred_element_type=jnp.float32)
    old = jnp.where(jnp.arange(old.shape[-1]) < lengths[:, None, None], old, -jnp.inf)
    most = jnp.maximum(old.max(-1, keepdims=True), own)
    own, old = jnp.exp(own - most), jnp.exp(old - most)
    values = jnp.einsum("bht,btd->bhd", old.astype(v.dtype), old_v, preferred_element_type=jnp.float32)
    values = (values + own * v) / (old.sum(-1, keepdims=True) + own)
    return values[:, None].astype(q.dtype)


def attend_causally(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend with queries [B, L, H, D] to keys and values [B, L, D] of the same tokens, one sequence at a time."""

    def one(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, k, v = row
        scores = jnp.einsum("lhd,md->hlm", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.tri(q.shape[0], dtype=bool), scores, -jnp.inf)
        return jnp.einsum("hlm,md->lhd", jax.nn.softmax(scores).astype(v.dtype), v)

    return lax.map(one, (q, k, v))


def decode(sizes: Sizes) -> Callable[..., Any]:
    """Build a decode step for shard_map: weights, cache, tokens and lengths [B] to logits [B, V_xyz] and cache."""

    def step(weights, keys, values, tokens, lengths):
        rows = keys.shape[1]
        mine = lax.dynamic_slice(lengths, (lax.axis_index(XYZ) * rows,), (rows,))

        def layer(x, inputs):
            w, old_k, old_v = inputs
            y = gather(norm(x, w["norm"], sizes.embed), YZ, 1)
            q = scatter(product("be,ehd->bhd", y, w["q"]), X, 0)
            k, v = (scatter(product("be,ed->bd", y, w[name]), X, 0) for name in "kv")
            q, k, v = (exchange(part, YZ, 0, 1)[:, None] for part in (q, k, v))
            q, k = rotate(q, mine[:, None]), rotate(k[:, :, None], mine[:, None])[:, :, 0]
            mixed = attend(q, k, v, old_k[:, :, 0], old_v[:, :, 0], mine)[:, 0]
            mixed = gather(exchange(mixed, YZ, 1, 0), X, 0)
            hidden, gate = (scatter(product("be,ef->bf", y, w[name]), X, 1) for name in ("in", "gate"))
            hidden = gather(jax.nn.silu(gate) * hidden, X, 1)
            out = product("bf,fe->be", hidden, w["out"]) + product("bhd,hde->be", mixed, w["o"])
            return x + scatter(out, YZ, 1), (k, v)

        x = embed(weights["table"], tokens[:, None])[:, 0]
        x, new = lax.scan(layer, x, (weights["layers"], keys, values))
        # All leading dimensions are indexed: if whole layers were the windows, the compiler would copy the caches.
        at = jnp.arange(sizes.layers)[:, None], jnp.arange(rows), mine, 0
        keys, values = (old.at[at].set(n[:, :, 0], mode="drop") for old, n in zip((keys, values), new))
        return logits(weights, x, sizes), keys, values

    return step


def prefill(sizes: Sizes, gathered: bool) -> Callable[..., Any]:
    """Build a prefill for shard_map: weights and tokens [B, L] to the last token's logits, and the keys and values."""

    def stationary(x, w):
        y = gather(norm(x, w["norm"], sizes.embed), YZ, 2)
        q = scatter(product("ble,ehd->blhd", y, w["q"]), X, 2)
        k, v = (gather(scatter(product("ble,ed->bld", y, w[name]), X, 1), YZ, 2) for name in "kv")
        k, v = (gather(part, X, 1) for part in (k, v))
        q, k = turned(q, k)
        mixed = gather(attend_causally(q, k, v), X, 2)
        hidden, gate = (scatter(product("ble,ef->blf", y, w[name]), X, 2) for name in ("in", "gate"))
        hidden = gather(jax.nn.silu(gate) * hidden, X, 2)
        out = product("blf,fe->ble", hidden, w["out"]) + product("blhd,hde->ble", mixed, w["o"])
        return x + scatter(out, YZ, 2), (k, v)

    def weight_gathered(x, w):
        def whole(name, columns, rows):
            values, scales = w[name]
            return gather(gather(values, *columns), *rows), scales

        y = norm(x, gather(gather(w["norm"], YZ, 0), X, 0), sizes.embed)
        q = product("ble,ehd->blhd", y, whole("q", (YZ, 1), (X, 0)))
        k, v = (product("ble,ed->bld", y, whole(name, (YZ, 1), (X, 0))) for name in "kv")
        q, k = turned(q, k)
        x = x + product("blhd,hde->ble", attend_causally(q, k, v), whole("o", (YZ, 0), (X, 2)))
        hidden, gate = (product("ble,ef->blf", y, whole(name, (YZ, 1), (X, 0))) for name in ("in", "gate"))
        return x + product("blf,fe->ble", jax.nn.silu(gate) * hidden, whole("out", (YZ, 0), (X, 1))), (k, v)

    def turned(q, k):
        positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        return rotate(q, positions), rotate(k[:, :, None], positions)[:, :, 0]

    def program(weights, tokens):
        if gathered:  # one row of each device at a time, since each part of the table looks up all devices' tokens
            rows = lax.map(lambda row: embed(weights["table"], gather(row[None], XYZ, 0), rows=True), tokens)
            x = rows[:, 0]
        else:
            x = embed(weights["table"], tokens)
        x, (keys, values) = lax.scan(weight_gathered if gathered else stationary, x, weights["layers"])
        last = exchange(x[:, -1], XYZ, 1, 0) if gathered else x[:, -1]
        return logits(weights, last, sizes), keys[:, :, :, None], values[:, :, :, None]

    return program


def embed(table: jax.Array, tokens: jax.Array, rows: bool = False) -> jax.Array:
    """Look tokens [B, L] up in a table [V_xyz, E]; return [B, L, E_xyz] or, if `rows` is true, [B_xyz, L, E]."""
    ids = tokens - lax.axis_index(XYZ) * table.shape[0]
    found = jnp.where(((ids >= 0) & (ids < table.shape[0]))[..., None], table[ids], 0)
    return scatter(scatter(found, X, 0 if rows else 2), YZ, 0 if rows else 2)


def logits(weights: Any, x: jax.Array, sizes: Sizes) -> jax.Array:
    """Apply the last norm and the tied table to x [B, E_xyz]; return float32 logits [B, V_xyz]."""
    y = gather(gather(norm(x, weights["norm"], sizes.embed), YZ, 1), X, 1)
    return jnp.einsum("be,ve->bv", y, weights["table"], preferred_element_type=jnp.float32)


def arguments(sizes: Sizes, mesh: Mesh) -> tuple[dict, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Return the abstract weights and cache."""
    embed, wide, heads, size = sizes.embed, sizes.feed_forward, sizes.heads, sizes.head_size

    def array(shape, spec, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def weight(shape, spec, columns):
        """Return a weight [N, ...] and, for int8, the scales of the dimensions that a product keeps."""
        whole = array((sizes.layers, *shape), (None, *spec), jnp.int8 if sizes.int8 else jnp.bfloat16)
        if not sizes.int8:
            return whole, None
        kept = [(shape[dim], spec[dim]) for dim in columns]
        return whole, array((sizes.layers, *(n for n, _ in kept)), (None, *(s for _, s in kept)), jnp.float32)

    layers = {
        "norm": array((sizes.layers, embed), (None, XYZ), jnp.float32),
        "q": weight((embed, heads, size), ("x", YZ, None), (1, 2)),
        "k": weight((embed, size), ("x", YZ), (1,)),
        "v": weight((embed, size), ("x", YZ), (1,)),
        "o": weight((heads, size, embed), (YZ, None, "x"), (2,)),
        "in": weight((embed, wide), ("x", YZ), (1,)),
        "gate": weight((embed, wide), ("x", YZ), (1,)),
        "out": weight((wide, embed), (YZ, "x"), (1,)),
    }
    table = array((sizes.vocabulary, embed), (XYZ, None), jnp.bfloat16)
    cache = array((sizes.layers, sizes.batch, sizes.cache, 1, size), (None, XYZ, None, None, None), jnp.bfloat16)
    return {"layers": layers, "norm": array((embed,), (XYZ,), jnp.float32), "table": table}, (cache, cache)


def program(name: str, sizes: Sizes, mesh: Mesh) -> tuple[Callable, tuple, tuple[int, ...]]:
    """Return a program by its name in `ROWS`, its abstract arguments, and the indices of the arguments to donate."""
    weights, cache = arguments(sizes, mesh)

    def ints(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))

    vocabulary, rows = P(None, XYZ), P(None, XYZ)
    if name == "decode":
        fn, args, out = (
            decode(sizes),
            (weights, *cache, ints(sizes.batch, spec=P()), ints(sizes.batch, spec=P())),
            (vocabulary, rows, rows),
        )
        donated = (1, 2)
    else:
        gathered = name == "gathered"
        tokens = ints(sizes.batch, sizes.length, spec=P(XYZ) if gathered else P())
        filled = rows if gathered else P()
        fn, args, out, donated = prefill(sizes, gathered), (weights, tokens), (vocabulary, filled, filled), ()
    specs = jax.tree.map(lambda array: array.sharding.spec, args)
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False), args, donated


def main() -> None:
    """Compile the rows, and print the predicted seconds beside the measured ones."""
    from gspmd import host
    from gspmd.audit import compile_offline, topology

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", choices=ROWS, help="only this one")
    parser.add_argument("--hlo", type=Path, help="write its scheduled program to this file")
    options = parser.parse_args()
    host.start(1, "cpu")  # for JAX itself: the slice's devices exist for the compiler only
    machine = topology("tpu-v4:4x4x4")
    mesh = machine.mesh({"x": 4, "y": 4, "z": 4})
    for row in [options.row] if options.row else ROWS:
        name, sizes, measured = ROWS[row]
        fn, args, donated = program(name, sizes, mesh)
        report = compile_offline(fn, *args, topology=machine, donate_argnums=donated, auto_layout_argnums=(0,))
        if options.hlo:
            options.hlo.write_text(report.hlo)
        print(f"{row}: {report!r}")
        if report.timeline:
            seconds = report.timeline.step_seconds * (STEPS if name == "decode" else 1)
            print(f"  {seconds:.3g} s, measured {measured} s: {seconds / measured:.2f}\n  {report.timeline.summary}")


if __name__ == "__main__":
    main()
