"""Rematerialization by name: what the backward pass of a block finds in memory, and what it computes again.

A block names what may be kept where it makes it (`jax.ad_checkpoint.checkpoint_name`). With `ModelConfig.remat`

    none        everything is kept that a gradient reads
    selective   kept are the inputs and outputs of products, of norms and of attention; attention's logits, softmax and
                weighted sum are computed again, and what is elementwise
    dots        kept are the products with weights; everything else is computed again
    dots-except-hidden  as dots, without the feed-forward layer's hidden one, which is the widest
    full        kept is the block's input

Attention as a planned program computes its logits again whatever the choice, as FlashAttention does: they are larger
than all that is kept. Under lowering "xla" `none` keeps them. Where a TPU's kernel computes it, `selective` and `none`
keep the logarithms of its denominators too, and the weighted sum is not computed again.

Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 5, for selective; Chen et al. 2016 (arXiv 1604.06174) for
full.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from gspmd.ops._attention.local import MIXED
from gspmd.ops.interface.planned_op import STATISTIC

PRODUCTS = (
    "attention.query", "attention.key", "attention.value", "attention.added", "ffn.hidden", "moe.logits", "moe.hidden",
    "moe.answers", "lora.middle", STATISTIC,
)  # fmt: skip
"""Names that dots keeps: products with weights, and the statistics of norms, which are small."""
OPERANDS = (
    "norm", "attention.rotated", MIXED, "ffn.residual", "ffn.active", "moe.slots", "moe.active",
)  # fmt: skip
"""Names that selective keeps too: what products, norms and attention take. Of all these JAX keeps what a gradient
reads."""


def recomputed(body: Callable, remat: str) -> Callable:
    """Return a block, as a function, whose backward pass recomputes what `remat`, one of `REMATS`, says.

    Example:
        >>> import jax.numpy as jnp
        >>> def block(x):
        ...     return jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.exp(x), "ffn.hidden"))
        >>> jax.grad(recomputed(block, "dots"))(0.0).item() == jax.grad(block)(0.0).item()
        True
    """
    if remat == "none":
        return body
    narrow = tuple(name for name in PRODUCTS if name not in ("ffn.hidden", "moe.hidden"))
    kept = {"full": (), "dots-except-hidden": narrow, "dots": PRODUCTS, "selective": PRODUCTS + OPERANDS}[remat]
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*kept) if kept else None)
