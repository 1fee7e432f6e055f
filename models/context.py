"""The context of attention: rotary angles, segments, relative positions, and the output of an encoder.

All blocks of a stack read the same context, so it is moved to its devices once, before the scan over blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate import Spec
from gspmd.layouts import Layout
from gspmd.ops._attention.zigzag import ring_size, zigzag, zigzag_positions

from .config import ModelConfig
from .placement import batch_spec, moved, tokens_spec
from .rotary import Angles, angles_at, query_growth

Pair = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Context:
    """The arrays that attention reads besides the residual stream; None if a model or a batch has no such array.

    Attributes:
        causal: whether tokens attend only to earlier tokens and themselves: True in a decoder, False in an encoder.
        angles: for each config that `ModelConfig.rotary_of` returns, the rotary angles at the position of every token
            in its segment. They are a pair: the angles sharded like queries, and the angles sharded like keys.
        segments: [B, L] int32, the segment of every token, 0 for padding. They are a pair: an array sharded like
            queries, and an array sharded like keys.
        chunks: like `segments`, but every chunk of a text begins a new segment. Chunked layers read it.
        growth: [B, L, 1, 1] float32, the factors by which queries grow with their position in their segment, sharded
            like queries.
        relative: [R, H], the table of the relative position bias.
        memory: [B, T, E], the output of the encoder, sharded as the line `cross.memory`.
        memory_segments: a pair of the segments of the targets [B, L], sharded like the queries of cross-attention, and
            the segments of the source [B, T], sharded like the keys of cross-attention.
        real: [B, L] booleans, False for padding, with the sharding and the order of tokens that experts need.
    """

    causal: bool = True
    angles: Mapping[ModelConfig, tuple[Angles, Angles]] | None = None
    segments: Pair | None = None
    chunks: Pair | None = None
    growth: jax.Array | None = None
    relative: jax.Array | None = None
    memory: jax.Array | None = None
    memory_segments: Pair | None = None
    real: jax.Array | None = None


def context_of(
    config: ModelConfig, layout: Layout, segments: jax.Array | None, relative: jax.Array | None, *, causal: bool
) -> Context:
    """Return the context of a stack, whose segments are sharded as attention and experts need them.

    Args:
        config: the model configuration.
        layout: the layout of the stack.
        segments: [B, L] int32, in the order of the text, sharded as `batch_spec`; None if every row is one text.
        relative: [R, H], the table of the stack's relative position bias, or None if it has none.
        causal: whether the stack is a decoder.
    """
    if segments is None:
        return Context(causal, relative=relative)
    query, key = layout.spec("attention.query"), layout.spec("attention.key")
    ring = ring_size(key) if causal else 1
    placed = in_both(layout, zigzag(segments, ring), query, key)
    angles = growth = chunks = None
    if config.attention_chunk is not None:
        chunks = in_both(layout, zigzag(chunks_in(segments, config.attention_chunk), ring), query, key)
    if any(map(config.grows, config.kinds)):
        of_queries = along_text(layout, zigzag(positions_in(segments), ring), query)
        growth = jax.lax.optimization_barrier(query_growth(of_queries, config))
    if rotaries := config.rotaries:
        positions = in_both(layout, zigzag(positions_in(segments), ring), query, key)
        lengths: tuple[jax.Array | None, jax.Array | None] = None, None
        if any(rotary.by_length for rotary in rotaries):
            lengths = in_both(layout, zigzag(lengths_in(segments), ring), query, key)

        def of_both(rotary: ModelConfig) -> tuple[Angles, Angles]:
            of_query = angles_at(positions[0], rotary, lengths[0])
            return of_query, of_query if positions[1] is positions[0] else angles_at(positions[1], rotary, lengths[1])

        # Without the barrier, compilers may move these operations back into the loop over layers.
        placed_angles = jax.lax.optimization_barrier([of_both(rotary) for rotary in rotaries])
        angles = dict(zip(rotaries, placed_angles))
    real = moved(segments > 0, batch_spec(layout), tokens_spec(layout)) if config.moe else None
    return Context(causal, angles, placed, chunks, growth, relative, real=real)


def with_memory(
    context: Context,
    layout: Layout,
    memory: jax.Array,
    length: int,
    segments: jax.Array | None,
    source_segments: jax.Array | None,
) -> Context:
    """Return the context of a decoder with the output of an encoder added.

    Args:
        context: the context of the decoder's own tokens.
        layout: the layout of the decoder.
        memory: [B, T, E], the output of the encoder, sharded as the line `cross.memory`.
        length: L, the number of tokens in a row of targets.
        segments: [B, L], the segments of the targets, sharded as `batch_spec`, in the order of the text; None if every
            row is one target. The target then attends to segment 1 of the source.
        source_segments: [B, T], the segments of the source, sharded as `batch_spec`; None if every row is one source
            without padding.
    """
    if source_segments is None:
        return replace(context, memory=memory)
    query, key = layout.spec("cross.query"), layout.spec("cross.key")
    if segments is None:
        ones, whole = jnp.ones((memory.shape[0], length), jnp.int32), Spec(("B", "L"), ((), ()))
        targets = moved(ones, whole, Spec(whole.dims, query.axes[:2]))
    else:
        targets = along_text(layout, zigzag(segments, ring_size(layout.spec("attention.key"))), query)
    return replace(context, memory=memory, memory_segments=(targets, along_text(layout, source_segments, key)))


def check_inputs(
    config: ModelConfig,
    tokens: jax.Array,
    source: jax.Array | None,
    segments: jax.Array | None,
    source_segments: jax.Array | None,
) -> None:
    """Raise an error if inputs do not fit together.

    The values of segments are checked too, unless they are tracers.

    Raises:
        ValueError: the inputs do not fit together. The message names the first fault.
    """
    if source is None and config.encoder_layers:
        raise ValueError("this model has an encoder, but there is no source for it.\n  Pass source=, integers [B, T].")
    if source is not None and not config.encoder_layers:
        raise ValueError("this model is decoder-only and reads no source.\n  Leave source out, or set encoder_layers.")
    if source is None and source_segments is not None:
        raise ValueError("there are source_segments, but no source.\n  Pass source=, or leave source_segments out.")
    if source is not None and segments is not None and source_segments is None:
        raise ValueError("targets have segments, but the source has none.\n  Pass source_segments= too.")
    if source is not None and source.shape[:1] != tokens.shape[:1]:
        rows = f"the source has shape {source.shape}, and tokens have shape {tokens.shape}"
        raise ValueError(f"{rows}.\n  Pass a row of source for each row of tokens.")
    for name, given, text in (("segments", segments, tokens), ("source_segments", source_segments, source)):
        if given is None or text is None:
            continue
        if given.shape != text.shape:
            raise ValueError(f"{name} have shape {given.shape}, but their tokens {text.shape}; these must be equal.")
        known = not isinstance(given, jax.core.Tracer) and getattr(given, "is_fully_addressable", True)
        if known and (row := _unordered(np.asarray(given))) is not None:
            raise ValueError(
                f"{name} of row {row} are not in order: they must not decrease, and the 0 of padding comes last.\n"
                "  Number the texts of a row 1, 2 and so on."
            )
        if known and segments is None and np.asarray(given).max(initial=0) > 1:
            raise ValueError("a row has several sources, but its targets have no segments.\n  Pass segments= too.")


def _unordered(segments: np.ndarray) -> int | None:
    """Return the first row in which a segment is negative or segments decrease before the padding, or None."""
    last = np.iinfo(np.int64).max
    wrong = (np.diff(np.where(segments == 0, last, segments.astype(np.int64)), axis=1) < 0).any(axis=1)
    wrong |= (segments < 0).any(axis=1)
    return int(np.argmax(wrong)) if wrong.any() else None


def positions_in(segments: jax.Array) -> jax.Array:
    """Return the position of every token in its segment, given the segments [B, L] of all tokens.

    Example:
        >>> positions_in(jnp.array([[1, 1, 2, 2, 2, 0]]))[0].tolist()
        [0, 1, 0, 1, 2, 0]
    """
    at = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    begins = jnp.concatenate([jnp.ones_like(segments[:, :1]), (segments[:, 1:] != segments[:, :-1])], axis=1)
    return at - jax.lax.cummax(jnp.where(begins > 0, at, 0), axis=1)


def chunks_in(segments: jax.Array, size: int) -> jax.Array:
    """Split segments [B, L] into chunks of `size` tokens, each of which becomes a segment of its own; 0 stays 0.

    Example:
        >>> chunks_in(jnp.array([[1, 1, 1, 2, 2, 0]]), 2)[0].tolist()
        [1, 1, 2, 3, 3, 0]
    """
    begins = positions_in(segments) % size == 0
    return jnp.where(segments > 0, jnp.cumsum(begins, axis=1, dtype=jnp.int32), 0)


def lengths_in(segments: jax.Array) -> jax.Array:
    """Return, for every token, the number of tokens in its segment, given the segments [B, L] of all tokens.

    Example:
        >>> lengths_in(jnp.array([[1, 1, 2, 2, 2, 0]]))[0].tolist()
        [2, 2, 3, 3, 3, 1]
    """
    return positions_in(segments) + jnp.flip(positions_in(jnp.flip(segments, axis=1)), axis=1) + 1


def token_positions(layout: Layout, length: int, segments: jax.Array | None) -> np.ndarray | jax.Array:
    """Return the positions of a decoder's tokens, in the order in which `Transformer.hidden` gets the tokens.

    Args:
        layout: the layout of the decoder.
        length: number of tokens in a row.
        segments: [B, L], in the order of the text, sharded as `batch_spec`; None if every row is one text.

    Returns:
        [L] constants if `segments` is None, otherwise [B, L], sharded as `batch_spec`.
    """
    devices = ring_size(layout.spec("attention.key"))
    return zigzag_positions(length, devices) if segments is None else zigzag(positions_in(segments), devices)


def in_both(layout: Layout, x: jax.Array, query: Spec, key: Spec) -> Pair:
    """Return the results of `along_text` for queries and for keys.

    If queries and keys shard batch and length alike, both results are the same object, because kernels on TPUs test
    whether they are.
    """
    of_query = along_text(layout, x, query)
    return of_query, of_query if query.axes[:2] == key.axes[:2] else along_text(layout, x, key)


def along_text(layout: Layout, x: jax.Array, spec: Spec) -> jax.Array:
    """Reshard an array [B, L] from `batch_spec` to the mesh axes that shard batch and length in `spec`."""
    whole = batch_spec(layout)
    return moved(x, whole, Spec(whole.dims, spec.axes[:2]))
