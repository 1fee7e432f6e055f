"""What a layer does with its vectors: the norm before it, the biases after its products, and what is padding."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.layouts.rules.padding import Padded
from gspmd.ops._bias import add_bias
from gspmd.ops._layer_norm import layer_norm
from gspmd.ops._norm import rms_norm

from .config import ModelConfig


def optional(weights: Mapping[str, jax.Array], name: str) -> nnx.Param | None:
    """The parameter of a name; None where the configuration asks for none."""
    return nnx.Param(weights[name]) if name in weights else None


def norm(
    config: ModelConfig,
    x: jax.Array,
    scale: nnx.Param,
    bias: nnx.Param | None,
    spec: Spec,
    scale_spec: Spec,
    bias_spec: Spec,
) -> jax.Array:
    """Normalise [B, L, E] over E by the configuration's norm; the result lies as x does, at `spec`."""
    if config.norm == "rms":
        return rms_norm(x, scale[...], spec, scale_spec, epsilon=config.norm_epsilon)
    shift = None if bias is None else bias[...]
    return layer_norm(x, scale[...], shift, spec, scale_spec, bias_spec, epsilon=config.norm_epsilon)


def biased(x: jax.Array, bias: nnx.Param | None, spec: Spec, bias_spec: Spec) -> jax.Array:
    """Add a bias over the last dimensions of x, which lies at `spec`; without one, x as it is."""
    return x if bias is None else add_bias(x, bias[...], spec, bias_spec)


def masked(x: jax.Array, padded: Padded | None, dim: str, spec: Spec) -> jax.Array:
    """Set x to 0 where a dimension is padding, so that neither values nor gradients pass; None: nothing is padding."""
    return x if padded is None else x * along(padded.origins >= 0, dim, spec).astype(x.dtype)


def along(values: np.ndarray, dim: str, spec: Spec) -> jax.Array:
    """Float32 constants along one dimension of a tensor that lies at `spec`, with size 1 in the others."""
    whole = Spec((dim,), ((),))
    placed = Equation.move(whole, whole.with_axes(dim, spec.axes_of(dim)))
    others = [at for at, letter in enumerate(spec.dims) if letter != dim]
    return jnp.expand_dims(gspmd.reshard(jnp.asarray(values, jnp.float32), placed), others)
