"""Operations on weights other than products: casts to a dtype, scales of int8, and padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts import Layout
from gspmd.layouts.rules.sizes import Padded, paddings

from .config import ModelConfig
from .tensors import latent_widths, line_sizes, tensor_sizes

SCALES = {
    "embedding.table": ("scale", "output.bias"),
    "attention.w_q": ("s_q", "attention.b_q"),
    "attention.w_k": ("s_k", "attention.b_k"),
    "attention.w_v": ("s_v", "attention.b_v"),
    "attention.w_o": ("s_o", "attention.b_o"),
    "attention.w_q_down": ("s_q_down", "attention.b_q_down"),
    "attention.w_q_up": ("s_q_up", "attention.b_q_up"),
    "attention.w_k_down": ("s_k_down", "attention.b_k_down"),
    "attention.w_k_up": ("s_k_up", "attention.b_k_up"),
    "attention.w_v_up": ("s_v_up", "attention.b_v_up"),
    "cross.w_q": ("s_q", "cross.b_q"),
    "cross.w_k": ("s_k", "cross.b_k"),
    "cross.w_v": ("s_v", "cross.b_v"),
    "cross.w_o": ("s_o", "cross.b_o"),
    "ffn.w_in": ("s_in", "ffn.b_in"),
    "ffn.w_gate": ("s_gate", "ffn.b_gate"),
    "ffn.w_out": ("s_out", "ffn.b_out"),
    "moe.w_in": ("s_in", "moe.b_in"),
    "moe.w_gate": ("s_gate", "moe.b_in"),
    "moe.w_out": ("s_out", "moe.b_out"),
    "moe.shared_in": ("s_in", "moe.shared_bias"),
    "moe.shared_gate": ("s_gate", "moe.shared_bias"),
    "moe.shared_out": ("s_out", "ffn.b_out"),
    "output.table": ("scale", "output.bias"),
}
"""The name and the layout key of a matrix's scales, by the layout key of the matrix. Only int8 matrices have scales."""


def matrix(weight: nnx.Param, dtype: Any) -> jax.Array:
    """Return a weight as an operand of a product: in the compute dtype, or as int8, which is cast in the product."""
    return weight[...] if weight[...].dtype == jnp.int8 else weight[...].astype(dtype)


def cast_matrices(blocks: Any, dtype: Any) -> Any:
    """Return the stacked weights of blocks, with `matrix` applied to every matrix.

    Because the cast comes before the loop over layers, gradients are stacked in the compute dtype, in which they are
    computed. If this is bfloat16, the loop writes half as many bytes as with float32, and clipping and the optimizer
    read half as many.
    """

    def cast(path: tuple, weight: jax.Array) -> jax.Array:
        is_matrix = any(str(getattr(part, "key", "")).startswith("w_") for part in path)
        return weight.astype(dtype) if is_matrix and weight.dtype != jnp.int8 else weight

    return jax.tree.map_with_path(cast, blocks)


def scaled(x: jax.Array, scale: jax.Array, spec: Spec, scale_spec: Spec) -> jax.Array:
    """Multiply x, the product with an int8 weight, by the scales of x's last dimensions, in float32.

    `spec` is the spec of x. If the scales are sharded differently from the last dimensions of x, they are resharded
    first.
    """
    used = Spec(scale_spec.dims, spec.axes[-len(scale_spec.dims) :])
    factor = scale if used == scale_spec else gspmd.reshard(scale, Equation.move(scale_spec, used))
    return (x.astype(jnp.float32) * jnp.expand_dims(factor, range(x.ndim - factor.ndim))).astype(x.dtype)


def masked(x: jax.Array, padded: Padded | None, dim: str, spec: Spec) -> jax.Array:
    """Set x to 0 where `dim` is padding, so that no values or gradients pass; return x if `padded` is None."""
    return x if padded is None else x * along(padded.origins >= 0, dim, spec).astype(x.dtype)


def along(values: np.ndarray, dim: str, spec: Spec) -> jax.Array:
    """Return float32 constants along one dimension of a tensor sharded as `spec`; all other dimensions have size 1."""
    whole, x = Spec((dim,), ((),)), jnp.asarray(values, jnp.float32)
    if axes := spec.axes_of(dim):
        x = gspmd.reshard(x, Equation.move(whole, whole.with_axes(dim, axes)))
    return jnp.expand_dims(x, [at for at, letter in enumerate(spec.dims) if letter != dim])


def pad(values: jax.Array, padding: tuple[Padded | None, ...]) -> jax.Array:
    """Insert zeros for padding between and after the real values."""
    for at, each in enumerate(padding):
        if each:
            before, after = values.shape[:at], values.shape[at + 1 :]
            runs = values.reshape(*before, each.runs, each.length, *after)
            more = [(0, each.wide_runs - each.runs), (0, each.wide_length - each.length)]
            wide = jnp.pad(runs, [*[(0, 0)] * at, *more, *[(0, 0)] * len(after)])
            values = wide.reshape(*before, each.size, *after)
    return values


def wide_sizes(config: ModelConfig, layout: Layout, batch: int = 1, length: int = 1) -> dict[str, int]:
    """Return the sizes of the model's dimensions, padded as the layout requires, for `line_sizes`."""
    padded = layout.padded if isinstance(layout, Layout) else dict
    wide = padded(config.sizes(batch, length)) | latent_widths(config)
    if config.moe is None:
        return wide
    shared, dense = config.moe.shared_width, config.moe.dense_feed_forward
    return wide | {
        "shared": padded({"F": shared})["F"] if shared else config.moe.shared * wide["F"],
        "dense": padded({"F": dense})["F"] if dense else wide["F"],
    }


def padded_dimensions(config: ModelConfig, layout: Layout, key: str = "") -> dict[str, Padded]:
    """Return the dimensions of parameters that are padded, by the layout or by `vocabulary_multiple`.

    Args:
        config: the model configuration.
        layout: a `gspmd.Layout`, or any mapping from keys of a layout to specs.
        key: the layout key of a tensor whose F has another size than usual, such as `moe.shared_in`.
    """
    sizes, wide = (line_sizes(each, key) for each in (tensor_sizes(config), wide_sizes(config, layout)))
    return paddings({dim: sizes[dim] for dim in "VHKF"}, wide)
