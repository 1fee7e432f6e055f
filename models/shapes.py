"""Abstract models, inputs and activations: shapes, dtypes and shardings with which to compile without devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.annotate import Spec
from gspmd.layouts import Layout
from gspmd.layouts.initial import abstract as _placed
from gspmd.layouts.initial import nested
from gspmd.layouts.rules.keys import ENCODER

from .config import ModelConfig
from .parameters import ParameterRow, check_placed, parameters
from .placement import batch_spec
from .tensors import line_sizes
from .transformer import Transformer
from .vectors import wide_sizes

WIDE = (
    "norm", "norm_bias", "q_norm", "k_norm", "q_norm_all", "k_norm_all", "sinks", "positions", "latent_norm",
    "q_latent_norm", "b_q", "b_k", "b_v", "b_q_down", "b_q_up", "b_k_down", "b_k_up", "b_v_up", "b_o", "b_in", "b_gate",
    "b_out", "bias", "relative", "router", "router_noise", "router_bias", "choice_bias", "shared_bias", "shared_mix",
)  # fmt: skip
"""Names of the parameters that are always float32: norms, biases, scales, routers and tables of relative positions."""


def abstract(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    dtype: Any = jnp.float32,
    *,
    stored: Any = jnp.float32,
) -> Transformer:
    """Return a model like `build`, but with `jax.ShapeDtypeStruct`s as parameters, so that nothing is allocated.

    Args:
        config: the model configuration.
        layout: a `gspmd.Layout`.
        mesh: a mesh with the layout's mesh axes. Its devices may be those of an offline topology.
        dtype: compute dtype.
        stored: the dtype in which matrices are stored, float32 for training. Norms, biases and routers are always
            float32. If it is int8, the model also has the scales that `quantize` adds.

    Returns:
        A model whose parameters, from `arrays`, are abstract arguments for lowering a program. Inside the program,
        `with_arrays` puts the real arguments into the model.

    Raises:
        ValueError: a spec does not fit the model or the mesh.

    Example:
        >>> from gspmd.layouts import Layout
        >>> from gspmd_models.transformer import arrays
        >>> mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"))
        >>> model = abstract(ModelConfig(), Layout.load("replicated"), mesh, "bfloat16", stored="bfloat16")
        >>> arrays(model)["blocks.0.ffn.w_in"].shape, arrays(model)["output.norm"].dtype
        ((4, 128, 256), dtype('float32'))
    """
    config = replace(config, int8=jnp.dtype(stored) == jnp.int8)
    rows = parameters(config, layout)
    check_placed("cannot place the model", rows, mesh)
    values = {path: _placed(row.spec, row.shape, stored_dtype(row, stored), mesh) for path, row in rows.items()}
    return Transformer(config, layout, nested(values), jnp.dtype(dtype))


def abstract_tokens(layout: Layout, mesh: jax.sharding.Mesh, batch: int, length: int) -> jax.ShapeDtypeStruct:
    """Return the abstract input of a forward step: int32 [B, L], sharded as `embedding.tokens`."""
    return _placed(layout.spec("embedding.tokens"), (batch, length), jnp.int32, mesh)


def abstract_source(layout: Layout, mesh: jax.sharding.Mesh, batch: int, length: int) -> jax.ShapeDtypeStruct:
    """Return the abstract source for an encoder–decoder: int32 [B, T], sharded as `batch_spec`."""
    return _placed(batch_spec(layout), (batch, length), jnp.int32, mesh)


def abstract_batch(layout: Layout, mesh: jax.sharding.Mesh, batch: int, length: int) -> jax.ShapeDtypeStruct:
    """Return the abstract input of a training step: int32 [B, L+1], sharded as `batch_spec`."""
    return _placed(batch_spec(layout), (batch, length + 1), jnp.int32, mesh)


def activation_specs(
    config: ModelConfig, layout: Layout, batch: int, length: int, source_length: int = 0
) -> dict[str, tuple[Spec, tuple[int, ...]]]:
    """Return the spec and the global shape of each activation of a training step, by layout key, in forward order.

    Args:
        config: the model configuration.
        layout: a `gspmd.Layout`. For a decoder-only model it may also be any mapping from keys of a layout to specs.
        batch: number of sequences per step, over all devices.
        length: number of tokens per sequence.
        source_length: number of tokens per source of an encoder–decoder. Pass 0 to use `length`. Keys of the encoder
            begin with `encoder.`.

    Example:
        >>> layout = {"embedding.tokens": "B_xL", "attention.residual": "B_xLE", "attention.query": "B_xLHD",
        ...           "attention.key": "B_xLKD", "ffn.residual": "B_xLE", "ffn.hidden": "B_xLF",
        ...           "output.logits": "B_xLV"}
        >>> spec, shape = activation_specs(ModelConfig(), layout, batch=8, length=64)["ffn.hidden"]
        >>> str(spec), shape
        ('B_xLF', (8, 64, 256))
    """
    if not config.encoder_layers:
        return _placed_activations(config, layout, batch, length, _keys(config))
    source = source_length or length
    of_encoder = [key for key in _keys(config) if key != "output.logits" and not key.startswith("cross.")]
    encoder = _placed_activations(config, layout.stack(ENCODER), batch, source, of_encoder)
    table = {f"{ENCODER}.{key}": found for key, found in encoder.items()}
    return table | _placed_activations(config, layout, batch, length, _keys(config), source)


def _placed_activations(
    config: ModelConfig, layout: Layout, batch: int, length: int, keys: Iterable[str], source_length: int = 0
) -> dict[str, tuple[Spec, tuple[int, ...]]]:
    """Return the spec and the global shape of the activations `keys` in one stack of blocks."""
    sizes = wide_sizes(config, layout, batch, length)
    if source_length:
        sizes["T"] = source_length
    if config.moe:
        tokens = batch * length // sizes["G"]
        sizes |= {"C": config.moe.capacity(tokens)}
    table = {}
    for key in keys:
        spec = Spec.parse(layout[key])
        local = sizes | {"L": tokens} if key == "moe.groups" else line_sizes(sizes, key)
        table[key] = spec, tuple(local[dim] for dim in spec.dims)
    return table


def stored_dtype(row: ParameterRow, stored: Any) -> Any:
    """Return the dtype of a parameter in a model whose matrices have dtype `stored`."""
    return jnp.float32 if row.key.rpartition(".")[2] in WIDE else stored


def _keys(config: ModelConfig) -> Iterator[str]:
    yield from ("embedding.tokens", "attention.residual", "attention.query")
    if config.latent is None:
        yield "attention.key"
    else:
        yield from ("attention.latent_query",) * (config.latent.query_rank > 0)
        yield "attention.latent"
    if config.encoder_layers:
        yield from ("cross.memory", "cross.query", "cross.key")
    yield "ffn.residual"
    if config.has_dense_layers:
        yield "ffn.hidden"
    if config.moe:
        yield from ("moe.groups", "moe.dispatched", "moe.expert_input", "moe.hidden")
        if config.moe.shared:
            yield "moe.shared_hidden"
    yield "output.logits"
