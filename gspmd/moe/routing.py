"""What every router answers, and the queue in front of each expert that decides who finds a slot."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Where each token goes, and with what weight it comes back.

    Attributes:
        expert: [G, L, k] int32, the chosen experts, first choice first; ties go to the lowest index.
        slot: [G, L, k] int32, the place in that expert's queue; from the capacity on it is overflow; padding has -1.
        gate: [G, L, k] float32, the weight of the expert's answer, 0 where not kept.
        kept: [G, L, k] bool, whether the choice has a slot.
        losses: name to [G] float32, each group's losses, already weighted by the config's coefficient.
    """

    expert: jax.Array
    slot: jax.Array
    gate: jax.Array
    kept: jax.Array
    losses: dict[str, jax.Array]


def top_choices(logits: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` largest logits, largest first, ties to the lowest index.

    Logits are ranked, not their softmax: it is the same order, without the ties that rounding makes.

    Args:
        logits: [..., X].
        count: how many, k ≤ X.

    Returns:
        [..., k] int32.
    """
    # Repeated argmax, not lax.top_k, whose total order puts 0.0 before -0.0. A logit of -inf still beats one taken.
    left = jnp.maximum(logits, jnp.finfo(logits.dtype).min)
    picks = []
    for _ in range(count):
        picks.append(jnp.argmax(left, axis=-1).astype(jnp.int32))
        left = jnp.where(jax.nn.one_hot(picks[-1], logits.shape[-1], dtype=bool), -jnp.inf, left)
    return jnp.stack(picks, axis=-1)


def chosen(values: jax.Array, expert: jax.Array) -> jax.Array:
    """The values of the chosen experts: [..., X] and [..., k] to [..., k].

    Written as a masked sum, whose gradient is a mask too, where a gather's would be a scatter.
    """
    return jnp.sum(jnp.where(_is_chosen(values.shape[-1], expert), values[..., None, :], 0), axis=-1)


def counts(expert: jax.Array, mask: jax.Array, experts: int) -> jax.Array:
    """How many tokens chose each expert: [G, L] and its mask to [G, X] float32."""
    return jnp.sum(_is_chosen(experts, expert) & mask[..., None], axis=-2, dtype=jnp.float32)


def queue(expert: jax.Array, waiting: jax.Array, experts: int) -> jax.Array:
    """The place of each choice in its expert's queue; all first choices stand before second choices.

    Within a choice, tokens stand in their order. Linear in the tokens but for one sort, whatever the number of experts.

    Args:
        expert: [G, L, k] int32.
        waiting: [G, L, k] bool, False for what must take no place.
        experts: number of experts X.

    Returns:
        [G, L, k] int32, from 0; -1 for what does not wait.

    Example:
        >>> expert = jnp.array([[[0, 1], [0, 1], [1, 0]]])
        >>> queue(expert, jnp.ones_like(expert, bool), 2)[0].tolist()
        [[0, 1], [1, 2], [0, 2]]
    """
    groups, tokens, choices = expert.shape
    keys = jnp.where(waiting, expert, experts).swapaxes(1, 2).reshape(groups, choices * tokens)
    places = jax.vmap(lambda k: _places(k, experts))(keys)
    places = places.reshape(groups, choices, tokens).swapaxes(1, 2)
    return jnp.where(waiting, places, -1)


def every_token(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The mask [G, L] of real tokens; all of them when none is given."""
    return jnp.ones(logits.shape[:-1], bool) if mask is None else mask.astype(bool)


def _is_chosen(experts: int, expert: jax.Array) -> jax.Array:
    return jax.nn.one_hot(expert, experts, dtype=bool)


def _places(keys: jax.Array, experts: int) -> jax.Array:
    """Rank of each key among equal keys: [n] in [0, experts] to [n] int32."""
    order, ranked = _stable_sort(keys, experts)
    first = jnp.searchsorted(ranked, jnp.arange(experts + 1, dtype=jnp.int32), side="left").astype(jnp.int32)
    rank = jnp.arange(keys.size, dtype=jnp.int32) - first[ranked]
    return jnp.zeros(keys.size, jnp.int32).at[order].set(rank, unique_indices=True)


def _stable_sort(keys: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    size = keys.size
    if (experts + 1) * size <= jnp.iinfo(jnp.int32).max:
        # One sort of key and position packed in a word is several times faster than a sort of pairs.
        packed = jnp.sort(keys * size + jnp.arange(size, dtype=jnp.int32))
        return packed % size, packed // size
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    return order, keys[order]
