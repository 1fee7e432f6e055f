"""The result of a router, and the queues of the experts, which decide which tokens get a slot."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from gspmd.moe.config import MoEConfig

_MOST = 1e15


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The experts to which each token is sent, and the weights of the experts' outputs.

    Attributes:
        expert: [G, L, k] int32, the chosen experts, first choice first; ties go to the lowest index.
        slot: [G, L, k] int32, the position of the choice in the expert's queue. Only positions below the capacity get a
            slot. The position is -1 for padding and, in expert choice, for tokens that the expert does not take.
        gate: [G, L, k] float32, the weight of the expert's output; 0 if the choice is not kept.
        kept: [G, L, k] bool, whether the choice has a slot.
        losses: a mapping from name to [G] float32, the losses of each group, weighted by the config's coefficients.
        experts, capacity: the X and the C with which tokens were routed; None in a Routing made by hand.
    """

    expert: jax.Array
    slot: jax.Array
    gate: jax.Array
    kept: jax.Array
    losses: dict[str, jax.Array]
    experts: int | None = field(default=None, metadata={"static": True})
    capacity: int | None = field(default=None, metadata={"static": True})


def top_choices(logits: jax.Array, count: int, rest: jax.Array | None = None) -> jax.Array:
    """Return the indices of the `count` largest logits, largest first; ties go to the lowest index.

    The logits are ranked instead of their softmax, because the order is the same, without ties due to rounding.

    Args:
        logits: [..., X].
        count: number of choices, k ≤ X.
        rest: [..., X], finite numbers that rank equal logits, such as the rounding errors of sums. If None, equal
            logits are ranked by index.

    Returns:
        [..., k] int32.
    """
    # Repeated argmax, because lax.top_k would order 0.0 before -0.0. Logits of -inf are raised to the least number, so
    # that they still precede logits that have been chosen, which become -inf.
    left = jnp.maximum(logits, jnp.finfo(logits.dtype).min)
    picks = []
    for _ in range(count):
        pick = jnp.argmax(left, axis=-1) if rest is None else _first_largest(left, rest)
        picks.append(pick.astype(jnp.int32))
        left = jnp.where(jax.nn.one_hot(picks[-1], logits.shape[-1], dtype=bool), -jnp.inf, left)
    return jnp.stack(picks, axis=-1)


def _first_largest(values: jax.Array, rest: jax.Array) -> jax.Array:
    """Return the index of the largest value; among equal values, the largest `rest` decides: [..., X] to [...].

    This is a single reduction. If the maximum were compared with the values in a second loop, a compiler might compute
    the values again in that loop, with another vectorized exponential, and then none of them would equal the maximum.
    """

    def better(one, other):
        (value, extra, at), (value_2, extra_2, at_2) = one, other
        equal = value_2 == value
        first = (extra_2 > extra) | ((extra_2 == extra) & (at_2 < at))
        return tuple(jax.lax.select((value_2 > value) | (equal & first), b, a) for a, b in zip(one, other))

    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    least = (jnp.float32(-jnp.inf), jnp.float32(-jnp.inf), jnp.int32(values.shape[-1] - 1))
    operands = (*jax.lax.stop_gradient((values, rest)), index)
    return jax.lax.reduce(operands, least, better, (values.ndim - 1,))[2]


def chosen(values: jax.Array, expert: jax.Array) -> jax.Array:
    """Select the values of the chosen experts: [..., X] and [..., k] to [..., k].

    This uses masked sums, whose gradient is another masking, while the gradient of a gather would be a scatter. There
    is one sum for each choice, because the gradient of a single sum for all choices would be a sum over [..., k, X].
    The TPU compiler estimates many passes over [..., X] for such a sum.
    """
    choices = [expert[..., k] for k in range(expert.shape[-1])]
    return jnp.stack(
        [jnp.sum(jnp.where(_is_chosen(values.shape[-1], choice), values, 0), axis=-1) for choice in choices], axis=-1
    )


def best_pair(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return all probabilities [..., X], the two best experts [..., 2], and their normalized gates [..., 2]."""
    gates, expert = jax.nn.softmax(logits, axis=-1), top_choices(logits, 2)
    pair = chosen(gates, expert)
    return gates, expert, pair / jnp.sum(pair, axis=-1, keepdims=True)


def exact_sum(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rounded sum of two arrays, and the rounding error, which add up to exactly x + y.

    Example:
        >>> total, error = exact_sum(jnp.float32(12.0), jnp.float32(1e-8))
        >>> float(total), round(float(error), 10)
        (12.0, 1e-08)

    Source: Knuth, *The Art of Computer Programming*, volume 2, §4.2.2, theorem B.
    """
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


def log_scores(logits: jax.Array, config: MoEConfig) -> jax.Array:
    """Return the logarithms of all experts' scores, up to a constant; their softmax gives the normalized scores.

    The result is log(sigmoid(logit)) for sigmoid scores, and the logit itself for softmax scores.
    """
    return jax.nn.log_sigmoid(logits) if config.scores == "sigmoid" else logits


def per_expert(values: jax.Array, expert: jax.Array, experts: int) -> jax.Array:
    """Spread the values of the chosen experts over all experts, [..., k] to [..., X]; other experts get 0."""
    return jnp.sum(jnp.where(_is_chosen(experts, expert), values[..., None], 0), axis=-2)


def counts(expert: jax.Array, mask: jax.Array, experts: int) -> jax.Array:
    """Count the real tokens that chose each expert: [G, L], with the mask of real tokens, to [G, X] float32."""
    return jnp.sum(_is_chosen(experts, expert) & mask[..., None], axis=-2, dtype=jnp.float32)


def assigned(
    expert: jax.Array,
    gate: jax.Array,
    logits: jax.Array,
    config: MoEConfig,
    mask: jax.Array,
    losses: dict[str, jax.Array],
    *,
    granted: jax.Array | None = None,
) -> Routing:
    """Queue tokens at their chosen experts, and keep those that get a slot.

    Args:
        expert: [G, L, k] int32.
        gate: [G, L, k] float32, the weight of the output if the choice gets a slot.
        logits: [G, L, X] float32, the logits or the result of `log_scores`. With `config.priority`, tokens with the
            largest probabilities queue first (`surest_first`).
        config: its capacity and priority are used.
        mask: [G, L] bool, real tokens.
        losses: a mapping from name to [G] float32, the losses of the routing.
        granted: [G, L, k] bool, False for a choice that gets a position in the queue but leaves its slot empty; None if
            there are no such choices.

    Returns:
        The routing.
    """
    waiting = jnp.broadcast_to(mask[..., None], expert.shape)
    slot = queue(expert, waiting, config.experts, surest_first(logits) if config.priority else None)
    kept = (slot >= 0) & (slot < config.capacity(expert.shape[1]))
    kept = kept if granted is None else kept & granted
    return Routing(expert, slot, jnp.where(kept, gate, 0), kept, losses)


def surest_first(logits: jax.Array) -> jax.Array:
    """Return the indices of each group's tokens, largest probability first, in a stable order: [G, L, X] to [G, L].

    The sort key is the logarithm of the odds against the token's best expert (see `log_odds_against`).

    Example:
        >>> surest_first(jnp.array([[[0.0, 0.0], [0.0, 1.0], [40.0, 0.0], [0.0, 30.0]]])).tolist()
        [[2, 3, 1, 0]]

    Source: Riquelme et al., *Scaling Vision with Sparse Mixture of Experts*, arXiv 2106.05974, §4 and Algorithm 2
    (batch-prioritized routing, by the largest gate).

    Differs: tokens are ordered within a group, not across a batch. All first choices still come before all second
    choices.
    """
    return jnp.argsort(jnp.min(log_odds_against(logits), axis=-1), axis=1, stable=True)


def log_odds_against(logits: jax.Array) -> jax.Array:
    """Compute log((1 - p) / p) from each expert's probability p, without ties due to rounding of p near 1.

    Args:
        logits: [..., X] float32, finite.

    Returns:
        [..., X] float32, without a gradient; -inf if there is only one expert.

    Example:
        >>> [round(float(x), 2) for x in log_odds_against(jnp.array([0.0, 50.0]))]
        [50.0, -50.0]
    """
    if logits.shape[-1] == 1:
        return jnp.full_like(logits, -jnp.inf)
    logits = jax.lax.stop_gradient(logits)
    best, is_best = jnp.max(logits, axis=-1, keepdims=True), _is_chosen(logits.shape[-1], jnp.argmax(logits, axis=-1))
    others = jnp.where(is_best, -jnp.inf, logits)
    second = jnp.max(others, axis=-1, keepdims=True)
    rest = _sum_in_any_order(jnp.exp(others - second))
    below = logits - best
    of_others = jnp.log(jnp.exp(second - best) * rest - jnp.expm1(below)) - below
    # The condition is not `below == 0`: a compiler may compute scaled logits again here, unrounded, and then none is 0.
    return jnp.where(is_best, second - best + jnp.log(rest), of_others)


def _sum_in_any_order(parts: jax.Array) -> jax.Array:
    """Sum numbers in [0, 1] in units of 2⁻³⁸, so that the result does not depend on the order of the numbers.

    Sorting the numbers first would also work, but takes ten times as long.
    """
    bits = min(20, 31 - (parts.shape[-1] - 1).bit_length())  # the bits of each number, so that the sum fits a word
    total, rest = jnp.float32(0), parts
    for place in range(1, 1 + -(-38 // bits)):
        rest = rest * 2.0**bits
        whole = jnp.floor(rest)
        rest = rest - whole
        total += jnp.sum(whole.astype(jnp.uint32), axis=-1, keepdims=True).astype(jnp.float32) * 2.0 ** (-bits * place)
    return total


def queue(expert: jax.Array, waiting: jax.Array, experts: int, order: jax.Array | None = None) -> jax.Array:
    """Return the position of each choice in its expert's queue; all first choices precede all second choices.

    Choices of the same rank (first, second, ...) are in the order of the tokens. Except for one sort, the time is
    linear in the number of tokens, and independent of the number of experts.

    Args:
        expert: [G, L, k] int32.
        waiting: [G, L, k] bool, False for choices that get no position.
        experts: number of experts X.
        order: [G, L] int32, the indices of the tokens in the order in which they queue; None for the order of the
            sequence.

    Returns:
        [G, L, k] int32, counted from 0; -1 for choices that do not wait.

    Example:
        >>> expert = jnp.array([[[0, 1], [0, 1], [1, 0]]])
        >>> queue(expert, jnp.ones_like(expert, bool), 2)[0].tolist()
        [[0, 1], [1, 2], [0, 2]]
    """
    groups, tokens, choices = expert.shape
    keys = jnp.where(waiting, expert, experts)
    if order is not None:
        keys = jnp.take_along_axis(keys, order[..., None], axis=1)
    places = jax.vmap(lambda k: _places(k, experts))(keys.swapaxes(1, 2).reshape(groups, choices * tokens))
    places = places.reshape(groups, choices, tokens).swapaxes(1, 2)
    if order is not None:
        places = jnp.take_along_axis(places, jnp.argsort(order, axis=1)[..., None], axis=1)
    return jnp.where(waiting, places, -1)


def finite(logits: jax.Array) -> jax.Array:
    """Cast logits to float32 and clip them to bounds whose squares can be summed, so that no inf - inf arises."""
    low, high = jnp.float32(-_MOST), jnp.float32(_MOST)
    return jax.lax.clamp(low, logits.astype(jnp.float32), high)  # jnp.clip's gradient needs three masks


def every_token(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return the mask [G, L] of real tokens; if `mask` is None, all tokens are real."""
    return jnp.ones(logits.shape[:-1], bool) if mask is None else mask.astype(bool)


def _is_chosen(experts: int, expert: jax.Array) -> jax.Array:
    return jax.nn.one_hot(expert, experts, dtype=bool)


def _places(keys: jax.Array, experts: int) -> jax.Array:
    """Return, for each key, the number of equal keys before it: keys [n] in [0, experts] to [n] int32."""
    order, ranked = _stable_sort(keys, experts)
    place = jnp.arange(keys.size, dtype=jnp.int32)
    begins = jnp.concatenate([jnp.ones(1, bool), ranked[1:] != ranked[:-1]])
    # The running maximum is the place where the run of equal keys begins; a search would be a loop for each expert.
    rank = place - jax.lax.cummax(jnp.where(begins, place, 0))
    return jnp.zeros(keys.size, jnp.int32).at[order].set(rank, unique_indices=True)


def _stable_sort(keys: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    size = keys.size
    if 0 < (experts + 1) * size <= jnp.iinfo(jnp.int32).max:
        # Sorting one word with key and position is several times faster than sorting pairs.
        packed = jnp.sort(keys * size + jnp.arange(size, dtype=jnp.int32))
        return packed % size, packed // size
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    return order, keys[order]
