"""Functions that merge a model's adapters into its weights, and that add new adapters to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

import gspmd
from gspmd.annotate.equation import Equation
from gspmd.layouts.initial import nested

from ..parameters import initialise, parameters
from ..transformer import Transformer, arrays, mesh_of
from .config import LoraConfig


def merge(model: Transformer) -> Transformer:
    """Merge a model's adapters into its weights, W + (alpha / rank) · A·B, and return the model without adapters.

    A model without adapters is returned unchanged. The sum is computed in float32, with the weight's sharding. Call
    this function without a mesh, or under the mesh of the model.

    Source: Hu et al. 2021, LoRA (arXiv 2106.09685), section 4.1, which notes that merged adapters add no latency in
        inference.
    """
    lora = model.config.lora
    if lora is None:
        return model
    values, rows, config = arrays(model), parameters(model.config, model.layout), replace(model.config, lora=None)
    merged = {path: values[path] for path in parameters(config, model.layout)}
    mesh = mesh_of(merged)

    def sum_of(path: str, weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        equation = Equation.product(rows[f"{path}_a"].spec, rows[f"{path}_b"].spec, rows[path].spec)
        added = gspmd.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))
        return (weight.astype(jnp.float32) + lora.alpha / lora.rank * added).astype(weight.dtype)

    def all_of(weights: Mapping[str, jax.Array], adapters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: sum_of(path, w, adapters[f"{path}_a"], adapters[f"{path}_b"]) for path, w in weights.items()}

    adapters = {path: value for path, value in values.items() if path not in merged}
    weights = {path: value for path, value in merged.items() if f"{path}_a" in adapters}
    placed = {path: value.sharding for path, value in weights.items()}
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        merged |= jax.jit(all_of, out_shardings=placed)(weights, adapters)
    return Transformer(config, model.layout, nested(merged), model.dtype)


def with_adapters(model: Transformer, lora: LoraConfig | None, key: jax.Array) -> Transformer:
    """Return the model with new adapters that do not change its results yet: A is random, and B is 0."""
    if lora is None:
        return model
    values, config = arrays(model), replace(model.config, lora=lora)
    rows = {path: row for path, row in parameters(config, model.layout).items() if path not in values}
    values |= initialise(rows, mesh_of(values), key)
    return Transformer(config, model.layout, nested(values), model.dtype)
