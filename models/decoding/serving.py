"""Models for serving: experts drop no token, and each phase has a layout over the same set of stored weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from gspmd.annotate import LayoutError, Spec
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested
from gspmd.layouts.rules.keys import ENCODER

from ..config import ModelConfig
from ..parameters import parameter_specs
from ..transformer import Transformer, arrays
from .cache import CROSS, SELF, cache_spec


class GenerationError(ValueError):
    """The error for text that cannot be generated. The message gives the reason."""


def phases(
    layout: Layout,
    prefill: Any = None,
    *,
    sizes: tuple[Mapping[str, int], Mapping[str, int]] | None = None,
    mesh: Any = None,
) -> tuple[Any, Any]:
    """Return the layouts for reading prompts and for decoding, which store weights and cache in the same way.

    Args:
        layout: a `gspmd.Layout`. Its phase `decode` is used for decoding, and sets how weights and cache are stored in
            both returned layouts.
        prefill: the layout whose phase `prefill` is used for reading prompts; by default `layout`.
        sizes: the sizes for prefill and the sizes for decoding (see `Layout.check`). They are needed if the layouts
            have alternatives.
        mesh: the mesh, which decides between alternatives together with `sizes`.

    Raises:
        LayoutError: the layouts have different mesh axes, or no alternative of a section fits the mesh.

    Example:
        >>> from gspmd.layouts import Layout
        >>> stationary, gathered = Layout.load("weight-stationary-2d"), Layout.load("weight-gathered-xyz")
        >>> mesh, sizes = {"x": 2, "y": 2, "z": 2}, ModelConfig().sizes(batch=8, length=1)
        >>> prefill, decode = phases(stationary, gathered, sizes=(sizes, sizes), mesh=mesh)
        >>> prefill["ffn.w_in"], prefill["ffn.hidden"], decode["ffn.hidden"]
        ('E_xF_yz', 'B_xyzLF', 'BLF_yzx')

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.2.3, in which weights are gathered for prefill and stationary
        for decoding.
    """
    reading, decode = (layout if prefill is None else prefill).phase("prefill"), layout.phase("decode")
    if sizes is not None:
        reading, decode = (each.resolved(of, mesh) for each, of in zip((reading, decode), sizes))
    return reading.stored_as(decode), decode


def check_seeds(seed: int, texts: int) -> None:
    """Check that the seeds of all texts fit into 32 bits; larger seeds would wrap around to the seeds of other texts.

    Args:
        seed: seed of the first text; each further text has the next seed.
        texts: number of texts.

    Raises:
        GenerationError: a seed is negative, or larger than 2³² - 1.
    """
    if seed < 0:
        raise GenerationError(f"seed is {seed}; it must be at least 0")
    if seed + texts > 2**32:
        of = f", and the last of {texts} texts has seed {seed + texts - 1}" if texts > 1 else ""
        raise GenerationError(f"seed is {seed}{of}; a seed must be less than 2**32")


def check_rows(layout: Layout, mesh: Mapping[str, int]) -> None:
    """Raise an error if a layout shards B differently in the caches of texts and of sources.

    Each device copies rows of both caches locally, so it must have the same rows of the two caches.

    Args:
        layout: the layout for decoding.
        mesh: sizes of the mesh axes. Axes of size 1 shard nothing.

    Raises:
        LayoutError: the mesh axes that shard B differ between the caches.
    """
    own, source = (cache_spec(layout, line).without_trivial(mesh) for line in (SELF, CROSS))
    if own.axes_of("B") != source.axes_of("B"):
        raise LayoutError(
            f"layout '{layout.name}' puts a text and its source on different devices: the cache of texts is "
            f"'{layout.cache(SELF)}', and the cache of sources '{layout.cache(CROSS)}'.\n"
            '  Shard B alike in [cache] "attention.key" and "cross.key".'
        )


def check_lengths(layout: Layout, sizes: Mapping[str, int], mesh: Any, room: int, source: int = 0) -> None:
    """Check a layout for serving, where the caches of texts and of sources have different lengths T.

    Args:
        layout: the layout of a phase.
        sizes: size of each dimension except T.
        mesh: see `Layout.check`.
        room: length of the cache of texts, or 0 for a program that has no cache of texts.
        source: length of the cache of sources, or 0 for a decoder-only model.

    Raises:
        LayoutError: the layout does not fit the sizes.
    """
    if not source:
        layout.check({**sizes, "T": room}, mesh)
        return
    texts = {f"cache.{SELF}": layout.cache(SELF)}
    sources = {f"cache.{CROSS}": layout.cache(CROSS), CROSS: layout[CROSS], "cross.memory": layout["cross.memory"]}
    for length, others, own in ((room, sources, texts), (source, texts, sources)):
        whole = {key: str(Spec.parse(text).with_axes("T", ())) for key, text in others.items()}
        if length:
            layout.override({**own, **whole}).check({**sizes, "T": length}, mesh)


def check_source(config: ModelConfig, source: int, room: int | None) -> None:
    """Raise an error if sources are longer than the cache, or longer than the model's limit.

    Args:
        config: the model configuration.
        source: number of tokens of the longest source.
        room: number of tokens of a source that the cache can hold; None if the cache will be made long enough.

    Raises:
        GenerationError: the source is too long. The message states its length and the limit.
    """
    if room is not None and source > room:
        raise GenerationError(
            f"a source has {source} tokens, but the cache has room for {room}; shorten the source, or raise "
            "source_length"
        )
    if config.context_length is not None and source > config.context_length:
        raise GenerationError(
            f"a source has {source} tokens, but the model was made for at most {config.context_length} "
            "(context_length; max_position_embeddings in the config.json of most checkpoints); shorten it"
        )


def check_length(config: ModelConfig, prompt: int, tokens: int) -> None:
    """Check that texts are no longer than the model's context.

    Args:
        config: the model configuration.
        prompt: number of tokens of the longest prompt.
        tokens: the largest number of tokens that a text adds to its prompt.

    Raises:
        GenerationError: a text is too long. The message states its length and the limit.
    """
    if config.context_length is not None and prompt + tokens > config.context_length:
        raise GenerationError(
            f"a prompt of {prompt} tokens and {tokens} more make a text of {prompt + tokens}, but the model was made "
            f"for at most {config.context_length} (context_length; max_position_embeddings in the config.json of most "
            "checkpoints), beyond which its output degrades silently; shorten the prompt, or ask for fewer tokens"
        )


def for_serving(config: ModelConfig) -> ModelConfig:
    """Return the config for reading prompts and decoding, in which experts drop no token.

    Experts with a capacity serve the tokens of a group in some order until their slots are full, so a token's output
    depends on the other tokens of the group. The output may depend on later tokens. In the routers gshard and st-moe,
    the first choices of later tokens are served before the second choice of an earlier token. Some routers serve
    confident tokens first. The output always depends on the number of tokens that are read at a time. Text that is read
    in chunks or token by token has no such group. Hence no token is dropped here (`dispatch` is "dropless"), and each
    row is a group. The logits equal the logits of a full forward pass wherever that pass drops no token.

    Raises:
        GenerationError: the router lets experts choose among all tokens of a group.
    """
    moe = config.moe
    if moe is None:
        return config
    if not moe.causal:
        raise GenerationError(
            f"router {moe.router} cannot generate text: its experts choose among all tokens of a group, "
            "so what it learned depends on tokens that are not generated yet. Train with another router to generate."
        )
    return replace(config, moe=replace(moe, dispatch="dropless", groups=None))


def served(model: Transformer, layout: Layout) -> Transformer:
    """Return the model under another layout for serving; parameters that this layout shards differently are moved.

    Raises:
        LayoutError: the layout pads the dimensions of the model to other sizes.
    """
    config = for_serving(model.config)
    values: dict[str, Any] = dict(arrays(model))
    mesh, wanted = jax.sharding.get_mesh(), parameter_specs(config, layout)
    wrong = [(path, shape) for path, (_, shape) in wanted.items() if values[path].shape != shape]
    if wrong:
        path, shape = wrong[0]
        raise LayoutError(
            f"cannot serve the model in layout '{layout.name}': {len(wrong)} parameters would have different shapes, "
            f"such as {path}: {values[path].shape} in the model, {shape} in the layout.\n"
            "  Build or load the model in this layout, or give the layout the same [padding] as the model's."
        )
    for path, (spec, _) in wanted.items():
        where, x = jax.sharding.NamedSharding(mesh, spec.partition_spec()), values[path]
        if isinstance(x, jax.ShapeDtypeStruct):
            values[path] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        elif isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            values[path] = jax.device_put(x, where)
    return Transformer(config, layout, nested(values), model.dtype)


def one_position(model: Transformer) -> Transformer:
    """Return the model with a layout for single positions, in which no activation shards L."""
    return Transformer(model.config, model.layout.one_position(), nested(arrays(model)), model.dtype)


def least_rows(config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh) -> int:
    """Return the smallest number of rows that is divisible by the number of shards of B in all activations and caches.

    For a model with experts, it is also divisible by the number of shards of G, the groups of tokens.
    """
    stacks = [layout, *([layout.stack(ENCODER)] if config.encoder_layers else [])]
    batch = [spec.axes_of("B") for stack in stacks for spec in (*_activations(stack), cache_spec(layout))]
    if config.encoder_layers:
        batch += [spec.axes_of("B") for spec in _of_sources(layout)]
    if config.moe:
        batch += [stack.spec("moe.groups").axes_of("G") for stack in stacks]
    return _least(mesh, batch)


def least_length(layout: Layout, mesh: jax.sharding.Mesh) -> int:
    """Return the smallest number of positions that is divisible by the number of shards of L in all activations."""
    return _least(mesh, [spec.axes_of("L") for spec in _activations(layout)])


def least_source(layout: Layout, mesh: jax.sharding.Mesh) -> int:
    """Return the smallest source length that is divisible by the number of its shards in all tensors."""
    inner = [spec.axes_of("L") for spec in _activations(layout.stack(ENCODER))]
    return _least(mesh, [*inner, *(spec.axes_of("T") for spec in _of_sources(layout))])


def _of_sources(layout: Layout) -> list[Spec]:
    """Return the specs of the encoder's output, of keys and values computed from it, and of the cache of sources."""
    return [layout.spec("cross.memory"), layout.spec(CROSS), cache_spec(layout, CROSS)]


def _activations(layout: Layout) -> list[Spec]:
    """Return the specs of tokens, blocks' activations and logits, without `ffn.hidden` if all layers have experts."""
    keys = ("attention.residual", "attention.query", "attention.key", "ffn.residual", "ffn.hidden")
    written = (key for key in keys if key != "ffn.hidden" or key in layout.table)
    return [layout.spec(key) for key in ("embedding.tokens", *written, "output.logits")]


def _least(mesh: jax.sharding.Mesh, held: list[tuple[str, ...]]) -> int:
    return math.lcm(*(math.prod(mesh.shape[axis] for axis in axes) for axes in held))
