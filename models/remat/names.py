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

With `ModelConfig.offload`, the kept arrays are in host memory from the forward pass of a block until its backward pass.
The statistics of norms stay on the device: they are so small that moving them would save little.

Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 5, for selective; Chen et al. 2016 (arXiv 1604.06174) for
    full.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

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
INPUT = "block.input"
"""Name of the input of a block, which every choice keeps. Only moving the input to the host needs the name: otherwise a
recomputed function keeps its arguments without one."""


def recomputed(body: Callable, remat: str, offload: bool = False) -> Callable:
    """Return a function that computes the block `body` and whose backward pass recomputes activations as `remat` says.

    Args:
        body: a function whose first argument is the input of the block.
        remat: one of `REMATS`.
        offload: whether the activations that are not recomputed are kept in host memory. It has no effect if `remat` is
            `none`, under which they have no names.

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
    if offload:
        moved = {INPUT, *kept} - {STATISTIC}
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted({*kept} - moved),
            names_which_can_be_offloaded=sorted(moved),
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(lambda x, *others: body(checkpoint_name(x, INPUT), *others), policy=policy)
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*kept) if kept else None)
