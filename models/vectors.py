"""What a layer does with its vectors: the norm before it and the biases after its products, by the configuration."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import nnx

from gspmd.annotate import Spec
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
