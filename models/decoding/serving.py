"""Models as they are served: experts that drop nothing, and a layout for each phase over one set of stored weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from gspmd.annotate import LayoutError, Spec
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested

from ..config import ModelConfig
from ..parameters import parameter_specs
from ..transformer import Transformer, arrays
from .cache import cache_spec


class GenerationError(ValueError):
    """Something cannot be generated; the message says what, and why."""


def phases(
    layout: Layout,
    prefill: Any = None,
    *,
    sizes: tuple[Mapping[str, int], Mapping[str, int]] | None = None,
    mesh: Any = None,
) -> tuple[Any, Any]:
    """Return the layouts for reading prompts and for decoding, which store weights and cache alike.

    Args:
        layout: a `gspmd.Layout`; its phase `decode` is the one for decoding, and says how both store.
        prefill: another one for reading prompts, of which the phase `prefill` is taken; `layout` when None.
        sizes: of prefill and of decoding, as for `Layout.check`, where the layouts have alternatives.
        mesh: for these.

    Raises:
        LayoutError: they are of different mesh axes, or none of a section's alternatives divides.

    Example:
        >>> from gspmd.layouts import Layout
        >>> stationary, gathered = Layout.load("weight-stationary-2d"), Layout.load("weight-gathered-xyz")
        >>> mesh, sizes = {"x": 2, "y": 2, "z": 2}, ModelConfig().sizes(batch=8, length=1)
        >>> prefill, decode = phases(stationary, gathered, sizes=(sizes, sizes), mesh=mesh)
        >>> prefill["ffn.w_in"], prefill["ffn.hidden"], decode["ffn.hidden"]
        ('E_xF_yz', 'B_xyzLF', 'BLF_yzx')

    Source: Pope et al. 2022 (arXiv 2211.05102), section 3.2.3: weights gathered for prefill, stationary for decoding.
    """
    reading, decode = (layout if prefill is None else prefill).phase("prefill"), layout.phase("decode")
    if sizes is not None:
        reading, decode = (each.resolved(of, mesh) for each, of in zip((reading, decode), sizes))
    return reading.stored_as(decode), decode


def check_seeds(seed: int, texts: int) -> None:
    """Refuse seeds of texts that do not fit into 32 bits, where they would be those of other texts.

    Args:
        seed: of the first text; each of the others has the next one.
        texts: how many there are.

    Raises:
        GenerationError: one is negative, or larger than 2³² - 1.
    """
    if seed < 0:
        raise GenerationError(f"seed is {seed}; it must be at least 0")
    if seed + texts > 2**32:
        of = f", and the last of {texts} texts has seed {seed + texts - 1}" if texts > 1 else ""
        raise GenerationError(f"seed is {seed}{of}; a seed must be less than 2**32")


def check_length(config: ModelConfig, prompt: int, tokens: int) -> None:
    """Refuse texts that are longer than the model was made for, or than its attention is right for.

    Args:
        config: of the model.
        prompt: tokens of the longest prompt.
        tokens: the most that a text adds to it.

    Raises:
        GenerationError: it says how many there are, and how many there may be.
    """
    text = f"a prompt of {prompt} tokens and {tokens} more"
    if config.context_length is not None and prompt + tokens > config.context_length:
        raise GenerationError(
            f"{text} are a text of {prompt + tokens}, and the model was made for at most {config.context_length} "
            "(context_length; max_position_embeddings in the config.json of most checkpoints), beyond which what it "
            "writes gets worse unnoticed; shorten the prompt, or ask for fewer tokens"
        )
    if fault := config.length_fault(prompt + tokens - 1):  # the last token of a text is never read
        raise GenerationError(f"{text}: {fault}; shorten the prompt, or ask for fewer tokens")


def for_serving(config: ModelConfig) -> ModelConfig:
    """Return the config with which a model reads prompts and decodes: every token gets all the experts it asks for.

    Experts with a capacity serve the tokens of a group in some order until their slots are taken, so what a token gets
    depends on the other tokens of the group: on later ones too where a later token's first choice comes before its
    second (gshard, st-moe) or where confident ones come first, and always on how many are read at a time. Text that
    is read in chunks or token by token has no such group. So nothing is dropped here (`dispatch` "dropless"), and each
    row is a group. The logits are those of a full forward pass wherever that one drops nothing.

    Raises:
        GenerationError: the router lets experts choose among all tokens of a group.
    """
    moe = config.moe
    if moe is None:
        return config
    if not moe.causal:
        raise GenerationError(
            f"router {moe.router} cannot generate text: its experts choose among all tokens of a group, "
            "so what it learned depends on tokens that are not there yet. Train with another router to generate."
        )
    return replace(config, moe=replace(moe, dispatch="dropless", groups=None))


def served(model: Transformer, layout: Layout) -> Transformer:
    """Return the model as it is served in another layout; parameters that this one stores elsewhere are moved once.

    Raises:
        LayoutError: that layout pads the model's dimensions to other sizes.
    """
    config = for_serving(model.config)
    values: dict[str, Any] = dict(arrays(model))
    mesh, wanted = jax.sharding.get_mesh(), parameter_specs(config, layout)
    wrong = [(path, shape) for path, (_, shape) in wanted.items() if values[path].shape != shape]
    if wrong:
        path, shape = wrong[0]
        raise LayoutError(
            f"cannot serve the model in layout '{layout.name}': {len(wrong)} parameters would have other shapes, "
            f"such as {path}: {values[path].shape} in the model, {shape} in the layout.\n"
            "  Build or load the model in this layout, or give this one the [padding] of the model's own."
        )
    for path, (spec, _) in wanted.items():
        where, x = jax.sharding.NamedSharding(mesh, spec.partition_spec()), values[path]
        if isinstance(x, jax.ShapeDtypeStruct):
            values[path] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        elif isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            values[path] = jax.device_put(x, where)
    return Transformer(config, layout, nested(values), model.dtype)


def one_position(model: Transformer) -> Transformer:
    """Return the model in its layout for one position of every sequence, with L whole in every activation."""
    return Transformer(model.config, model.layout.one_position(), nested(arrays(model)), model.dtype)


def least_rows(config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh) -> int:
    """The smallest number of rows that the mesh axes of B divide in every activation and in the cache."""
    batch = [spec.axes_of("B") for spec in (*_activations(layout), cache_spec(layout))]
    if config.moe:
        batch.append(layout.spec("moe.groups").axes_of("G"))
    return _least(mesh, batch)


def least_length(layout: Layout, mesh: jax.sharding.Mesh) -> int:
    """The smallest number of positions that the mesh axes of L divide in every activation."""
    return _least(mesh, [spec.axes_of("L") for spec in _activations(layout)])


def _activations(layout: Layout) -> list[Spec]:
    """Return the activations of tokens and blocks; a layout with experts in all layers has no hidden ones besides."""
    keys = ("attention.residual", "attention.query", "attention.key", "ffn.residual", "ffn.hidden")
    written = (key for key in keys if key != "ffn.hidden" or key in layout.table)
    return [layout.spec(key) for key in ("embedding.tokens", *written, "output.logits")]


def _least(mesh: jax.sharding.Mesh, held: list[tuple[str, ...]]) -> int:
    return math.lcm(*(math.prod(mesh.shape[axis] for axis in axes) for axes in held))
