"""Ranking of layouts for serving a model, by the planned seconds of the step that generation runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import jax

import gspmd
from gspmd.annotate import LayoutError, PlanError, Spec, SpecError
from gspmd.display.plain import printable
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.hardware.chips import Chip
from gspmd.hardware.chips import chip as chip_named
from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import PHASES

from ..config import ModelConfig
from .cache import cache_spec
from .programs import Program, serving_program
from .serving import GenerationError

FEED_FORWARD = (
    "weight-stationary-2d", "weight-stationary-1d", "weight-gathered-x", "weight-gathered-xy", "weight-gathered-xyz"
)  # fmt: skip
"""The presets whose feed-forward layers `serving_layouts` tries."""

_REFUSALS = LayoutError, SpecError, PlanError
"""The errors that mean that sizes or a mesh do not fit a layout. Any other error is raised."""


@dataclass(frozen=True, repr=False)
class Served:
    """The planned cost of a step under one layout and lowering, per device; infinite if the layout does not fit.

    Attributes:
        name: the name of the layout.
        lowering: the lowering of the step's equations.
        seconds: seconds of the step. They are the sum of `collectives`, `products` and `attention`, which only a looped
            lowering overlaps.
        collectives: seconds of the planned collectives.
        products: seconds of the planned matrix products. Each product takes its compute time or its memory time,
            whichever is larger.
        attention: seconds of attention to cached and new tokens, the larger of compute time and memory time. A decode
            step reads its whole cache.
        wire_bytes: bytes that one device sends.
        held_bytes: bytes of weights and cache on one device.
        reason: the reason why the layout does not fit; empty if it fits.
    """

    name: str
    lowering: str
    seconds: float
    collectives: float = 0.0
    products: float = 0.0
    attention: float = 0.0
    wire_bytes: int = 0
    held_bytes: int = 0
    reason: str = ""

    def __str__(self) -> str:
        figures = self.collectives, self.products, self.attention
        parts = " + ".join(amount_of_seconds(part) for part in figures)
        cost = f"{amount_of_seconds(self.seconds)} = {parts}; {amount_of_bytes(self.wire_bytes)} sent"
        says = f"does not fit: {self.reason.splitlines()[0]}" if self.reason else cost
        return printable(f"{self.name}, {self.lowering}: {says}")

    def __repr__(self) -> str:
        return f"<Served {self}>"


def rank_serving(
    config: ModelConfig,
    layouts: Iterable[Layout],
    mesh: jax.sharding.Mesh,
    phase: str,
    *,
    batch: int,
    room: int,
    length: int = 1,
    chip: str | Chip = "tpu-v4",
    lowerings: Sequence[str] = ("blocking", "looped"),
    dtype: Any = "bfloat16",
    weights: Any = None,
    cache: Any = None,
) -> list[Served]:
    """Rank whole-model layouts for a phase by the planned seconds of its step, fastest first.

    The step that generation runs is traced by `gspmd.trace`, and its seconds are

        seconds = collectives + products
                  + layers · max(4 b l h (t + l) D / peak, 2 b t k (D · itemsize + s) / bandwidth)

    where one device has b rows, l new tokens, h query heads, t cached tokens and k key/value heads. s is 4 bytes, for
    the scale of each token and head, if the cache is int8, and otherwise 0. Bandwidth is the bandwidth of main memory.
    Products take the seconds that a plan gives them, either by their FLOPs or by the bytes of their weights and
    activations. So a decode step with few rows is limited by reading its weights. A step with many rows and a long
    context is limited by reading its cache.

    Args:
        config, mesh, phase, batch, room, length, dtype, weights, cache: see `serving_program`.
        layouts: the layouts to rank, such as those from `serving_layouts`.
        chip: the hardware.
        lowerings: the lowerings of equations. Each lowering is tried with every layout.

    Returns:
        One `Served` for each layout and lowering. Layouts that do not fit come last, with the reason.

    Raises:
        LayoutError: a layout is wrong for all models and meshes.
        GenerationError: the program cannot be built (see `serving_program`); the router reads later tokens (expert
            choice); or the model has an encoder.

    Example:
        >>> mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"))
        >>> layouts = serving_layouts(["weight-gathered-xy"], long=False)
        >>> ranked = rank_serving(
        ...     ModelConfig(layers=2), layouts, mesh, "decode", batch=4, room=32, lowerings=["blocking"])
        >>> ranked[0].seconds > 0, ranked[0].wire_bytes
        (True, 0)

    Leaves out: the work between products (norms, activations, softmax), and the overlap that the compiler finds by
    itself.

    Source: Pope et al. 2022 (arXiv 2211.05102), sections 2 and 3, for compute time, memory time and communication time.
    """
    if config.encoder_layers:
        raise GenerationError("layouts are ranked for decoder-only models, but this one has an encoder; name a layout")
    chip, ranked = chip_named(chip), []
    stored: dict[str, Any] = {"dtype": dtype, "weights": weights, "cache": cache}
    for layout in layouts:
        layout.check()
        try:
            program = serving_program(config, layout, mesh, phase, batch=batch, room=room, length=length, **stored)
        except _REFUSALS as error:
            ranked.append(Served(layout.name, lowerings[0], inf, reason=str(error)))
            continue
        held = _held(program)
        if held > chip.hbm_bytes:
            reason = f"weights and cache take {amount_of_bytes(held)} of {amount_of_bytes(chip.hbm_bytes)}."
            ranked.append(Served(layout.name, lowerings[0], inf, held_bytes=held, reason=reason))
            continue
        attention = _attention(
            config, program.layout, dict(mesh.shape), batch, length, room, chip, dtype, cache or dtype
        )
        ranked += [_planned(layout.name, name, program, mesh, held, attention) for name in lowerings]
    return sorted(ranked, key=lambda served: served.seconds)


def _planned(name: str, lowering: str, program: Program, mesh: Any, held: int, attention: float) -> Served:
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        try:
            plan = gspmd.trace(program.step, *program.arguments)
        except _REFUSALS as error:
            return Served(name, lowering, inf, held_bytes=held, reason=str(error))
    products = sum(entry.step.seconds * entry.trips for entry in plan.entries if entry.step.kind == "einsum")
    seconds = plan.seconds + attention
    return Served(name, lowering, seconds, plan.seconds - products, products, attention, plan.wire_bytes, held)


def _held(program: Program) -> int:
    """Return the bytes of weights and cache on one device."""
    leaves = jax.tree.leaves([program.arguments[at] for at in (program.stored, program.donated) if at is not None])
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _attention(
    config: ModelConfig, layout: Layout, mesh: Mapping[str, int], batch: int, length: int, room: int, chip: Chip,
    dtype: Any, kept_as: Any,
) -> float:  # fmt: skip
    """Return the seconds that attention takes in all layers on one device.

    Attention runs where the cache is, so mesh axes that shard the batch or the length of the cache do not shard query
    heads.
    """
    query, cache = layout.spec("attention.query"), cache_spec(layout)
    over = lambda axes: prod(mesh[axis] for axis in axes)  # noqa: E731
    apart = {*cache.axes_of("B"), *cache.axes_of("T")}
    sizes = layout.padded(config.sizes(batch, length) | {"T": room})
    heads = sizes["H"] / over(axis for axis in query.axes_of("H") if axis not in apart)
    rows, cached = batch / over(cache.axes_of("B")), sizes["T"] / over(cache.axes_of("T"))
    kept = sizes["K"] / over(cache.axes_of("K"))
    read = length / over(query.axes_of("L"))
    kind = jax.numpy.dtype(kept_as)
    seconds = 0.0
    for number in range(config.layers):
        reach = config.reach_of(config.layer_kind(number)) or room
        seen = min(cached, reach / over(cache.axes_of("T")))
        each = 2 * config.head_size  # elements of a key and its value
        if config.latent is not None and length == 1:  # a prompt has keys and values of all heads
            each = 2 * sizes["Z"]
        arrays, size = (2 * kept, config.head_size) if config.latent is None else (1, sizes["Z"])
        operations = 2 * rows * read * heads * (seen + min(length, reach)) * each
        scales = 4 if config.latent is None else 8  # a latent and its rotated key have one scale each
        moved = arrays * rows * seen * (size * kind.itemsize + scales * (kind == jax.numpy.int8))
        seconds += max(operations / chip.flops(chip.arithmetic(str(dtype))), moved / chip.hbm_bandwidth)
    return seconds


def serving_layouts(
    presets: Sequence[str] = FEED_FORWARD, *, several_keys: bool = False, long: bool = True
) -> Iterator[Layout]:
    """Yield whole-model layouts for serving: every feed-forward preset with every sharding of attention that fits it.

    Attention is sharded in one of three ways. In the first, mesh axes shard the heads. In the second, one, two or all
    mesh axes shard the batch, and the remaining mesh axes shard the heads. In the third, mesh axes that would otherwise
    have to divide the heads shard the positions of a prompt. The cache may also be sharded over the length of the
    context. A layout's name consists of the preset, the spec of queries and the spec of the cache.

    Args:
        presets: names of layouts over the mesh axes x, y and z.
        several_keys: whether key/value heads are sharded like query heads (multi-head). Otherwise they are unsharded
            (multiquery).
        long: whether to also try caches sharded over T, for contexts too long for one device.

    Example:
        >>> [layout.name for layout in serving_layouts(["weight-gathered-xy"], long=False)]
        ['weight-gathered-xy B_xyLH_zD B_xyTKD', 'weight-gathered-xy B_xyzLHD B_xyzTKD']
    """
    for preset in presets:
        base, seen = Layout.load(preset), set()
        projection, residual = base.spec("attention.w_q"), base.spec("attention.residual")
        split = residual.axes_of("B")
        heads = [*projection.axes_of("H"), *(axis for axis in projection.axes_of("E") if axis not in split)]
        for rows in ((), ("z",), ("y", "z"), ("x", "y"), ("x", "y", "z"), ("x",)):
            if rows[: len(split)] != split:
                continue
            free = [axis for axis in heads if axis not in rows]
            of_heads = [axis for axis in free if axis in projection.axes_of("H")]
            spread = tuple(axis for axis in free if axis not in of_heads)
            for kept, positions in ((free, ()), (of_heads, ()), (of_heads, spread)):
                for context in ((), tuple(axis for axis in "xyz" if axis not in rows))[: 1 + long]:
                    query = Spec(("B", "L", "H", "D"), (rows, positions, tuple(kept), ()))
                    keys = () if not several_keys or context else tuple(kept)
                    key = Spec(("B", "L", "K", "D"), (rows, (), keys, ()))
                    cache = Spec(("B", "T", "K", "D"), (rows, context, keys, ()))
                    name = f"{preset} {query} {cache}"
                    if name in seen:
                        continue
                    seen.add(name)
                    specs = {"attention.query": query, "attention.key": key}
                    specs |= {f"{phase}.{key}": spec for phase in PHASES for key, spec in specs.items()}
                    yield replace(base.override(specs | {"cache.attention.key": cache}), name=name)
