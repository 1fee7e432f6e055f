"""The product of a low-rank adapter, and the specs of its two matrices."""

from __future__ import annotations

from dataclasses import replace

import jax
from jax.ad_checkpoint import checkpoint_name

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation

from .config import TARGETS


def adapter_specs(key: str, weight: Spec) -> tuple[Spec, Spec]:
    """Return the specs of an adapter's matrices A and B, given the spec of the weight.

    A has the weight's input dimensions, and B has the weight's output dimensions. R is unsharded.

    Example:
        >>> [str(spec) for spec in adapter_specs("ffn.w_in", Spec.parse("E_xF_yz"))]
        ['E_xR', 'RF_yz']
    """
    inputs, outputs = TARGETS[key]
    a = replace(weight, dims=(*inputs, "R"), axes=(*map(weight.axes_of, inputs), ()))
    return a, replace(weight, dims=("R", *outputs), axes=((), *map(weight.axes_of, outputs)))


def adapter(key: str, product: Equation, x: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
    """Multiply x by a low-rank adapter, (x·A)·B; the result is sharded like the product of x and the weight.

    If the product sums over the weight's output dimensions, as the product of queries and w_k_up does in decoding, x is
    first multiplied by B: (x·Bᵀ)·Aᵀ.

    The two products cost R/E + R/F times as much as the product with the weight. If A and B were merged into the weight
    in every step instead, a gradient as large as the weight would be needed.

    Args:
        key: the weight's key in the layout.
        product: the equation of x, the weight and their product.
        x: the operand that the weight multiplies.
        down, up: the matrices A and B.
    """
    operand, weight, result = product.specs
    a, b = adapter_specs(key, weight)
    kept = [dim for dim in operand.dims if dim in result.dims and dim not in TARGETS[key][0]]
    middle = Spec((*kept, "R"), (*map(operand.axes_of, kept), ()))
    first, then = (a, down), (b, up)
    if any(dim in TARGETS[key][1] and dim not in result.dims for dim in operand.dims):
        first, then = then, first
    narrow = checkpoint_name(gspmd.einsum(Equation.product(operand, first[0], middle), x, first[1]), "lora.middle")
    return gspmd.einsum(Equation.product(middle, then[0], result), narrow, then[1])
