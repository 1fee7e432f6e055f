"""The metrics of a layer's router: the auxiliary loss and statistics."""

import jax
import jax.numpy as jnp

from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation, Via
from gspmd.moe.config import ROUTERS, MoEConfig
from gspmd.moe.places import GroupedSpecs
from gspmd.moe.routers.routing import Routing, every_token, finite, log_scores, per_expert
from gspmd.ops._einsum import einsum

_SUMS = ("dropped", "entropy", "confidence")  # Sums over tokens.


def summarize(routing: Routing, logits: jax.Array, config: MoEConfig, mask: jax.Array | None) -> jax.Array:
    """Return the terms of each group that `figures` adds up over all groups, [G, 6 + X].

    The first three terms are the loss, 1 if the group has a real token (otherwise 0), and the number of real tokens.
    The next three terms are sums over the real tokens: of the fraction of dropped choices, of the entropy of the
    router's probabilities, and of the largest probability. The last X terms are the number of choices of each expert.
    """
    real = every_token(logits, mask)
    scores = log_scores(finite(logits[..., : config.experts]), config)
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(scores), axis=-1)
    p = jnp.exp(log_p)
    per_token = jnp.stack([_dropped(routing, config), -jnp.sum(p * log_p, axis=-1), jnp.max(p, axis=-1)], axis=-1)
    sums = jnp.sum(jnp.where(real[..., None], per_token, 0), axis=1)
    loss = sum(routing.losses.values(), jnp.zeros(real.shape[:1], jnp.float32))
    tokens = jnp.sum(real, axis=1, dtype=jnp.float32)
    ahead = jnp.stack([loss, (tokens > 0).astype(jnp.float32), tokens], axis=1)
    return jnp.concatenate([ahead, sums, _sent(routing, config)], axis=1)


def figures(
    summary: jax.Array, places: GroupedSpecs, config: MoEConfig, *, padded: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Reduce the summaries of all groups to the mean loss and statistics, by one all-reduce over the mesh axes of G.

    If training updates the bias for choosing experts, the statistics include "sent" [X], the number of choices of each
    expert.
    """
    spec = places.per_group("S")
    # With this via each device sums its own groups first, so that the all-reduce does not grow with their number.
    total = einsum(Equation.move(spec, Spec(("S",), ((),))), summary, via=Via.of(spec))
    loss, groups, tokens, sums, sent = total[0], total[1], total[2], total[3:6], total[6:]
    stats = {"load": sent / jnp.maximum(1, jnp.sum(sent))}
    stats |= dict(zip(_SUMS, sums / jnp.maximum(1, tokens)))
    stats |= {"sent": sent} if config.bias_rate else {}
    # Without padding the divisor is static, so recomputation in the backward pass needs no second all-reduce.
    real_groups = jnp.maximum(1, groups) if padded else summary.shape[0]
    return loss / real_groups, jax.tree.map(jax.lax.stop_gradient, stats)


def no_figures(config: MoEConfig) -> dict[str, jax.Array]:
    """Return the statistics of a layer without tokens, which are all 0."""
    of_experts = ("load", *["sent"] * bool(config.bias_rate))
    return {**dict.fromkeys(of_experts, jnp.zeros(config.experts)), **dict.fromkeys(_SUMS, jnp.float32(0))}


def _sent(routing: Routing, config: MoEConfig) -> jax.Array:
    """Count the choices of each expert in each group, [G, X]; choices that got no slot are counted too."""
    waited = (routing.slot >= 0).astype(jnp.float32)
    # In expert choice, choice i is expert i, which saves a look-up whose time would grow with X².
    at_expert = waited if ROUTERS[config.router].by_experts else per_expert(waited, routing.expert, config.experts)
    return jnp.sum(at_expert, axis=1)


def _dropped(routing: Routing, config: MoEConfig) -> jax.Array:
    """Return the fraction of each token's choices that got no slot, [G, L].

    In expert choice, this is 1 for a token that no expert took, and otherwise 0.
    """
    if ROUTERS[config.router].by_experts:
        return ~jnp.any(routing.kept, axis=-1)
    return jnp.mean(routing.slot >= config.capacity(routing.slot.shape[1]), axis=-1)
