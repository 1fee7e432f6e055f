"""The programs of a phase as they are compiled for devices that need not be there: step, abstract arguments, sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import PHASES

from ..config import ModelConfig
from ..shapes import abstract, abstract_tokens
from ..transformer import arrays
from .cache import abstract_cache, abstract_whole
from .serving import GenerationError, for_serving, phases
from .steps import decode_step, prefill_step


@dataclass(frozen=True)
class Program:
    """A step of `prefill_step` or `decode_step`, and what `jax.jit` or `gspmd.audit.compile_offline` needs for it.

    Attributes:
        layout: of the phase, with one spec for every key.
        step: the pure function.
        arguments: abstract ones: weights, tokens (with their counts in a prefill), cache.
        donated: number of the argument that the step overwrites: the cache.
        stored: number of the argument that is stored once and read in every step: the weights.
        tokens: how many one execution reads, over all rows.
    """

    layout: Layout
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: int
    stored: int
    tokens: int


def serving_program(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    phase: str,
    *,
    batch: int,
    room: int,
    length: int = 1,
    prefill: Any = None,
    dtype: Any = "bfloat16",
    weights: Any = None,
    cache: Any = None,
) -> Program:
    """Build the program that `gspmd generate` runs in a phase, with abstract arguments.

    Args:
        config: of the model; experts drop nothing (`for_serving`).
        layout: a `gspmd.Layout`; its phase `decode` says where weights and cache are stored.
        mesh: devices, possibly of an offline topology.
        phase: `"prefill"` or `"decode"`.
        batch: rows.
        room: tokens that a row of the cache has room for.
        length: tokens that a prefill reads of each row, into an empty cache.
        prefill: another layout for the phase `prefill`, as for `phases`.
        dtype: of activations.
        weights: dtype in which matrices are stored, such as `"int8"`; None for `dtype`.
        cache: dtype in which keys and values are kept, such as `"int8"`, then with a float32 scale for each token and
            head; None for `dtype`.

    Raises:
        LayoutError, SpecError: the layout does not fit the model, the mesh or the sizes.
        GenerationError: there is no such phase, a size is under 1, or a prefill is longer than the room.

    Example:
        >>> from gspmd.layouts import Layout
        >>> mesh, layout = jax.make_mesh((1, 1, 1), ("x", "y", "z")), Layout.load("weight-stationary-2d")
        >>> program = serving_program(ModelConfig(layers=2), layout, mesh, "decode", batch=4, room=32)
        >>> program.tokens, program.arguments[program.donated].room
        (4, 32)
    """
    faults = [
        f"{name} is {n}; it must be at least 1"
        for name, n in {"batch": batch, "room": room, "length": length}.items()
        if n < 1
    ]
    if phase not in PHASES:
        faults.append(f"phase is {phase!r}; it must be {' or '.join(PHASES)}")
    if phase == "prefill" and 0 < room < length:
        faults.append(f"a prefill of {length} tokens needs room for as many, and there is room for {room}")
    if faults:
        raise GenerationError("cannot build this program:\n" + "\n".join(f"  {fault}" for fault in faults))
    config, reading = for_serving(config), phase == "prefill"
    read, written = (config.sizes(batch, tokens) | {"T": room} for tokens in (length, 1))
    used, stored = phases(layout, prefill, sizes=(read, written), mesh=mesh)
    used = used.check(read, mesh) if reading else stored.one_position().check(written, mesh)
    model = abstract(config, used, mesh, dtype, stored=weights or dtype)
    kept = jnp.dtype(cache or dtype)
    held = abstract_cache(config, stored, mesh, batch, room, kept, int8=kept == jnp.int8)
    rows = abstract_whole(mesh, (batch,), jnp.int32)
    if reading:
        tokens = abstract_tokens(used, mesh, batch, length)
        step, given = prefill_step(model, fresh=True), (arrays(model), tokens, rows, held)
        return Program(used, step, given, 3, 0, batch * length)
    return Program(used, decode_step(model), (arrays(model), rows, held), 2, 0, batch)
