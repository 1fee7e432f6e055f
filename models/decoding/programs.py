"""Programs of serving that can be compiled without devices: the step of a phase with its abstract arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.layouts import Layout
from gspmd.layouts.rules.keys import ENCODER, PHASES

from ..config import ModelConfig
from ..shapes import abstract, abstract_source, abstract_tokens
from ..transformer import arrays
from .cache import abstract_cache, abstract_whole
from .serving import GenerationError, check_lengths, for_serving, phases
from .steps import decode_step, encode_step, prefill_step

PROGRAMS = ("encode", *PHASES)
"""The programs of serving. Each phase of a layout has a program, and `encode` uses the layout of prefill."""


@dataclass(frozen=True)
class Program:
    """A step of serving, with everything that `jax.jit` or `gspmd.audit.compile_offline` needs to compile it.

    Attributes:
        layout: the layout of the phase, with alternatives resolved.
        step: the pure function from `encode_step`, `prefill_step` or `decode_step`.
        arguments: the step's abstract arguments: weights, tokens, counts of tokens (except in decoding) and the cache
            (except in encoding).
        donated: index of the argument that the step overwrites, which is the cache; None for encoding.
        stored: index of the argument that is stored and read in every step, which is the weights.
        tokens: number of tokens that one execution reads, over all rows.
    """

    layout: Layout
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: int | None
    stored: int
    tokens: int


def serving_program(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    phase: str,
    *,
    batch: int,
    room: int = 0,
    length: int = 1,
    prefill: Any = None,
    dtype: Any = "bfloat16",
    weights: Any = None,
    cache: Any = None,
    source_length: int = 0,
) -> Program:
    """Build the program that `gspmd generate` runs in a phase, with abstract arguments.

    Args:
        config: the model configuration. In the program its experts drop no token (see `for_serving`).
        layout: a `gspmd.Layout`. Its phase `decode` has the specs of stored weights and cache.
        mesh: a mesh of devices, which may be the devices of an offline topology.
        phase: `"encode"`, `"prefill"` or `"decode"`.
        batch: number of rows.
        room: number of tokens of a text that the cache can hold; not used for `"encode"`.
        length: number of tokens of each row that a prefill reads into an empty cache.
        prefill: another layout for the phase `prefill`, as in `phases`.
        dtype: the dtype of activations.
        weights: the dtype in which matrices are stored, such as `"int8"`; None for `dtype`.
        cache: the dtype in which keys and values are stored; None for `dtype`. `"int8"` adds a float32 scale for each
            token and head.
        source_length: number of tokens of a source that the cache can hold, if the model has an encoder. `"encode"`
            reads sources of this length.

    Raises:
        LayoutError, SpecError: the layout does not fit the model, the mesh or the sizes.
        GenerationError: the phase does not exist; a size is less than 1; a prefill is longer than the room; the model
            has an encoder but there is no room for sources; or there is room for sources but the model has no encoder.

    Example:
        >>> from gspmd.layouts import Layout
        >>> mesh, layout = jax.make_mesh((1, 1, 1), ("x", "y", "z")), Layout.load("weight-stationary-2d")
        >>> program = serving_program(ModelConfig(layers=2), layout, mesh, "decode", batch=4, room=32)
        >>> program.tokens, program.arguments[program.donated].room
        (4, 32)
    """
    encoding = phase == "encode"
    counts = {"batch": batch} if encoding else {"batch": batch, "room": room, "length": length}
    faults = [f"{name} is {n}; it must be at least 1" for name, n in counts.items() if n < 1]
    if phase not in PROGRAMS:
        faults.append(f"phase is {phase!r}; it must be {', '.join(PROGRAMS[:-1])} or {PROGRAMS[-1]}")
    if phase == "prefill" and 0 < room < length:
        faults.append(f"a prefill of {length} tokens needs room for {length}, but room is {room}")
    if config.encoder_layers and source_length < 1:
        faults.append(f"the model has an encoder, but source_length is {source_length}; it must be at least 1")
    if not config.encoder_layers and source_length:
        faults.append(f"the model is decoder-only, but source_length is {source_length}; leave it out")
    if not config.encoder_layers and encoding:
        faults.append("the model is decoder-only, and encodes nothing; its phases are prefill and decode")
    if faults:
        raise GenerationError("cannot build this program:\n" + "\n".join(f"  {fault}" for fault in faults))
    config = for_serving(config)
    read, written = (config.sizes(batch, each) for each in (source_length if encoding else length, 1))
    lengths = {"T": gcd(room, source_length)}  # alternatives are chosen for both caches
    used, stored = phases(layout, prefill, sizes=(read | lengths, written | lengths), mesh=mesh)
    used = stored.one_position() if phase == "decode" else used
    # Encoding runs no block of the decoder, so the mesh axes of the decoder's lines need not divide a source's length.
    given = {dim: size for dim, size in read.items() if not (encoding and dim == "L")}
    check_lengths(used, written if phase == "decode" else given, mesh, 0 if encoding else room, source_length)
    model = abstract(config, used, mesh, dtype, stored=weights or dtype)
    kept, rows = jnp.dtype(cache or dtype), abstract_whole(mesh, (batch,), jnp.int32)
    int8 = kept == jnp.int8
    if encoding:
        used.stack(ENCODER).check(read, mesh)
        arguments = arrays(model), abstract_source(used, mesh, batch, source_length), rows
        return Program(used, encode_step(model, dtype=kept, int8=int8), arguments, None, 0, batch * source_length)
    held = abstract_cache(config, stored, mesh, batch, room, kept, int8=int8, source_length=source_length)
    if phase == "prefill":
        ids = abstract_tokens(used, mesh, batch, length)
        step, given = prefill_step(model, fresh=True), (arrays(model), ids, rows, held)
        return Program(used, step, given, 3, 0, batch * length)
    return Program(used, decode_step(model), (arrays(model), rows, held), 2, 0, batch)
