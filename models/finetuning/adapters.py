"""The product with a weight that has a low-rank adapter, and the weight that they merge into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation

from ..vectors import matrix
from .config import TARGETS


def adapter_specs(key: str, weight: Spec) -> tuple[Spec, Spec]:
    """Return the specs of A and B, from that of their weight: A has its inputs, B its outputs, and R is unsharded.

    Example:
        >>> [str(spec) for spec in adapter_specs("ffn.w_in", Spec.parse("E_xF_yz"))]
        ['E_xR', 'RF_yz']
    """
    inputs, outputs = TARGETS[key]
    a = replace(weight, dims=(*inputs, "R"), axes=(*map(weight.axes_of, inputs), ()))
    return a, replace(weight, dims=("R", *outputs), axes=((), *map(weight.axes_of, outputs)))


def hold_adapters(module: nnx.Module, weights: Mapping[str, Any]) -> None:
    """Give a layer the adapters that there are among its weights: `w_q_a` and `w_q_b` of `w_q`."""
    for name in weights:
        if name.endswith(("_a", "_b")):
            setattr(module, name, nnx.Param(weights[name]))


def adapted(
    module: Any, name: str, key: str, product: jax.Array, x: jax.Array, operand: Spec, weight: Spec, result: Spec
) -> jax.Array:
    """Add (alpha / rank) · (x·A)·B to the product of x and a weight; without an adapter, the product as it is.

    The two products beside the weight's cost 2·R/E + 2·R/F of it, and need no gradient of a matrix as large as the
    weight, which merging them at every step would.

    Args:
        module: the layer that holds the adapters, if there are any.
        name: of the weight in the layer.
        key: of the weight in the layout.
        product: x·W.
        x: the weight's operand.
        operand, weight, result: the specs of x, of the weight and of the product.
    """
    down, up = (getattr(module, f"{name}_{side}", None) for side in "ab")
    if down is None:
        return product
    a, b = adapter_specs(key, weight)
    kept = [dim for dim in operand.dims if dim not in TARGETS[key][0]]
    middle = Spec((*kept, "R"), (*map(operand.axes_of, kept), ()))
    narrow = gspmd.einsum(Equation.product(operand, a, middle), x, matrix(down, x.dtype))
    narrow = checkpoint_name(narrow, "lora.middle")
    wide = gspmd.einsum(Equation.product(middle, b, result), narrow, matrix(up, x.dtype))
    lora = module.config.lora
    return product + (lora.alpha / lora.rank * wide).astype(product.dtype)
