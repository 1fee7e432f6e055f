"""Rematerialization by name: which activations a block keeps for its backward pass.

A block names the activations that may be kept (`jax.ad_checkpoint.checkpoint_name`). `ModelConfig.remat` selects

    none        every array that a gradient reads
    selective   inputs and outputs of products, norms and attention; attention's logits, softmax and weighted sum, and
                elementwise operations, are computed again
    dots        products with weights; everything else is computed again
    dots-except-hidden  the same as dots, without the widest activations: the hidden layer of feed-forward layers, and
                the keys and values of all heads that latent attention makes of its latents
    full        the block's input

Under every choice, the planned program of attention recomputes its logits, as FlashAttention does, because the logits
are larger than all kept arrays together. Under the lowering "xla", `none` keeps the logits. If a TPU's kernel computes
attention, `selective` and `none` also keep the logarithms of the softmax denominators, and the weighted sum is not
recomputed.

Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 5, for selective; Chen et al. 2016 (arXiv 1604.06174) for
    full.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from gspmd.ops._attention.local import MIXED
from gspmd.ops.interface.planned_op import STATISTIC

PRODUCTS = (
    "attention.query", "attention.key", "attention.value", "attention.expanded", "attention.added", "ffn.hidden",
    "moe.logits", "moe.hidden", "moe.answers", "lora.middle", STATISTIC,
)  # fmt: skip
"""Names of the activations that `dots` keeps: products with weights, and the statistics of norms, which are small."""
WIDEST = ("attention.expanded", "ffn.hidden", "moe.hidden")
"""Names of the activations that `dots` keeps and `dots-except-hidden` recomputes."""
OPERANDS = (
    "norm", "attention.rotated", MIXED, "cross.residual", "ffn.residual", "ffn.active", "moe.slots", "moe.active",
)  # fmt: skip
"""Names that `selective` keeps in addition: operands of products, norms and attention, if a gradient reads them."""


def recomputed(body: Callable, remat: str) -> Callable:
    """Return a function that computes the block `body` and whose backward pass recomputes activations as `remat` says.

    `remat` is one of `REMATS`.

    Example:
        >>> import jax.numpy as jnp
        >>> def block(x):
        ...     return jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.exp(x), "ffn.hidden"))
        >>> jax.grad(recomputed(block, "dots"))(0.0).item() == jax.grad(block)(0.0).item()
        True
    """
    if remat == "none":
        return body
    narrow = tuple(name for name in PRODUCTS if name not in WIDEST)
    kept = {"full": (), "dots-except-hidden": narrow, "dots": PRODUCTS, "selective": PRODUCTS + OPERANDS}[remat]
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*kept) if kept else None)
