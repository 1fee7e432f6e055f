"""The base class of all layers, which looks up parameters by name, and applies adapters, scales and biases.

Each layer writes its own equations, such as `at.einsum("hidden, w_out -> residual", ...)`. This base class has the
operations around an equation: the norm before it and, if the model has them, the low-rank adapter, the scales of an
int8 weight and the bias after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from gspmd.annotate.equation import Equation
from gspmd.layouts.naming import names_in
from gspmd.layouts.section import Section

from .config import ModelConfig
from .finetuning.adapters import adapter
from .vectors import matrix, scaled


class Layer(nnx.Module):
    """A layer, whose equations are written with the names of lines in a section of the layout.

    Attributes:
        config: the configuration of the model.
        at: the section of the layout for this layer, such as `layout.ffn`.
        dtype: the compute dtype of products.

    Args:
        weights: the parameters of the layer by name, each of which becomes an attribute. For example, `w_q_a` and
            `w_q_b` are the adapter of `w_q`. Entries that are mappings belong to other layers, and are ignored.
    """

    def __init__(self, config: ModelConfig, at: Section, weights: Mapping[str, Any], dtype: Any):
        self.config, self.at, self.dtype = config, at, dtype
        for name, value in weights.items():
            if not isinstance(value, Mapping):
                setattr(self, name, nnx.Param(value))

    def parameter(self, name: str) -> nnx.Param | None:
        """Return a parameter by its name, or None if the model does not have it."""
        return getattr(self, name, None)

    def vector(self, name: str) -> jax.Array:
        """Return a parameter in the dtype in which it is stored."""
        return getattr(self, name)[...]

    def matrix(self, name: str) -> jax.Array:
        """Return a weight in the compute dtype; a weight that is stored as int8 stays int8."""
        return matrix(getattr(self, name), self.dtype)

    def matrices(self, *names: str) -> tuple[jax.Array, ...]:
        """Return weights in the compute dtype; weights that are stored as int8 stay int8."""
        return tuple(map(self.matrix, names))

    def normed(self, where: str, x: jax.Array, norm: str = "norm") -> jax.Array:
        """Normalize x [B, L, E] over E with the kind of norm that the configuration sets.

        Args:
            where: the name of the layout's line for x and for the result.
            x: the input.
            norm: the name of the scale. The bias, if there is one, is called `<norm>_bias`. All norms of a layer have
                the spec of the layer's line `norm`.
        """
        epsilon = self.config.norm_epsilon
        if self.config.norm == "rms":
            y = self.at.rms_norm(f"{where}, norm", x, self.vector(norm), epsilon=epsilon)
        else:
            bias = self.parameter(f"{norm}_bias")
            bias = None if bias is None else bias[...]
            y = self.at.layer_norm(f"{where}, norm, norm_bias", x, self.vector(norm), bias, epsilon=epsilon)
        return checkpoint_name(y, "norm")

    def normed_before(self, where: str, x: jax.Array) -> jax.Array:
        """Return a part's input: the residual stream x, normalized unless the model has norms only after parts."""
        return x if self.config.norms == "after" else self.normed(where, x)

    def normed_after(self, where: str, x: jax.Array) -> jax.Array:
        """Return a part's output x, normalized unless the model has norms only before parts."""
        return x if self.config.norms == "before" else self.normed(where, x, "norm_after")

    def adapted(self, names: str, product: jax.Array, x: jax.Array) -> jax.Array:
        """Add the product of x and a weight's adapter to `product`, or return `product` if the weight has no adapter.

        Args:
            names: the equation of the product with the weight, such as `"residual, w_q -> query"`.
            product: the product of x and the weight.
            x: the operand that the weight multiplies.
        """
        _, weight, _ = names_in(names)
        return self.adapted_by(weight, self.at.equation(names), product, x)

    def adapted_by(self, weight: str, equation: Equation, product: jax.Array, x: jax.Array) -> jax.Array:
        """Add the product of x and a weight's adapter, like `adapted`, for an equation that is given in specs."""
        assert "." in weight or hasattr(self, weight), f"there is no weight {weight}"
        down, up = (self.parameter(f"{weight}_{side}") for side in "ab")
        if down is None or up is None:
            return product
        lora = self.config.lora
        assert lora is not None
        wide = adapter(self.at.key_of(weight), equation, x, matrix(down, x.dtype), matrix(up, x.dtype))
        return product + (lora.alpha / lora.rank * wide).astype(product.dtype)

    def affine(self, where: str, x: jax.Array, weight: str) -> jax.Array:
        """Multiply a product by the scales of its weight's int8 columns (`s_in`), and add the bias (`b_in`).

        Args:
            where: the name of the layout's line for x and for the result.
            x: the product. Its last dimensions are the dimensions of scales and bias.
            weight: the suffix in the names of scales and bias, after `s_` and `b_`. Both have the spec of the layout's
                line for the bias.
        """
        return self.biased(where, self.scaled(where, x, weight), weight)

    def scaled(self, where: str, x: jax.Array, weight: str) -> jax.Array:
        """Multiply x by the scales `s_<weight>` in float32, if the weight has scales."""
        assert hasattr(self, f"w_{weight}"), f"there is no weight w_{weight}"
        scale = self.parameter(f"s_{weight}")
        return x if scale is None else scaled(x, scale[...], self.at.spec(where), self.at.spec(f"b_{weight}"))

    def biased(self, where: str, x: jax.Array, weight: str) -> jax.Array:
        """Add the bias `b_<weight>` to x, if the weight has a bias."""
        assert hasattr(self, f"w_{weight}"), f"there is no weight w_{weight}"
        bias = self.parameter(f"b_{weight}")
        return x if bias is None else self.at.add_bias(f"{where}, b_{weight}", x, bias[...])
