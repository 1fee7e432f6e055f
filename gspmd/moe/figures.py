"""What a layer reports of its router: the loss that is trained on, and statistics for people."""

import jax
import jax.numpy as jnp

from gspmd.collectives.einsum import einsum
from gspmd.moe.config import MoEConfig
from gspmd.moe.places import Places
from gspmd.moe.routing import Routing, counts, every_token


def summarize(routing: Routing, logits: jax.Array, config: MoEConfig, mask: jax.Array | None) -> jax.Array:
    """Per group: its losses, whether it holds a real token, choices without a slot, choices per expert: [G, 3 + X]."""
    real = every_token(logits, mask)
    chosen = sum(counts(routing.expert[..., k], real, config.experts) for k in range(config.choices))
    overflow = jnp.sum(routing.slot >= config.capacity(logits.shape[1]), axis=(1, 2), dtype=jnp.float32)
    loss, is_real = sum(routing.losses.values()), jnp.any(real, axis=1).astype(jnp.float32)
    return jnp.concatenate([jnp.stack([loss, is_real, overflow], axis=1), chosen], axis=1)


def figures(summary: jax.Array, places: Places, *, padded: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean loss and the statistics of all groups, from one sum over the axes of G."""
    spec = places.per_group("S")
    # Summed where it lies, so that what travels does not grow with the number of groups.
    total = einsum(f"{spec} -> S", summary, via=str(spec))
    loss, groups, overflow, chosen = total[0], total[1], total[2], total[3:]
    choices = jnp.maximum(1, jnp.sum(chosen))
    stats = {"load": chosen / choices, "dropped": overflow / choices}
    # Without padding the divisor is known, and recomputation in a backward pass needs no second sum.
    real_groups = jnp.maximum(1, groups) if padded else summary.shape[0]
    return loss / real_groups, jax.tree.map(jax.lax.stop_gradient, stats)
