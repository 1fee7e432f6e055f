"""Expert dropout: training sets random hidden activations of experts to 0, the same activations on every mesh."""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, run
from gspmd.ops.interface.planned_op import shard_index

KEY = Spec(("K",), ((),))
"""The spec of the two words of a key, which are replicated."""


@dataclass(frozen=True)
class Dropout:
    """Expert dropout of one layer.

    The random numbers of a row depend only on the row's group, its expert and its position in the expert's queue. So
    these numbers are the same in every layout and for every form of dispatch.

    Attributes:
        rate: the fraction of hidden activations that become 0; all other activations are divided by 1 - rate.
        tokens: the number of tokens in a group, which is also the largest possible length of an expert's queue.
        features: F, the width of the hidden activations.

    Source: Fedus et al., *Switch Transformers*, arXiv 2101.03961, §2.4 (expert dropout).
    """

    rate: float
    tokens: int
    features: int

    def scale(self, key: jax.Array, group, expert, slot, first: jax.Array | int, size: int) -> jax.Array:
        """Draw the dropout factors of rows, each 0 or 1/(1 - rate), for `size` features from feature `first` on.

        Args:
            key: the two words of a threefry key.
            group, expert, slot: the group, the expert and the slot of each row, as three arrays of equal shape.
            first, size: the index of the first feature, and the number of features.

        Returns:
            The factors, float32, in the shape of the rows with a further last dimension of `size`.
        """
        key = jax.random.wrap_key_data(key, impl="threefry2x32")

        def of_row(group, place):
            bits = jax.random.bernoulli(
                jax.random.fold_in(jax.random.fold_in(key, group), place), 1 - self.rate, (self.features,)
            )
            return jax.lax.dynamic_slice_in_dim(bits, first, size)

        place = expert * self.tokens + slot
        kept = jax.vmap(of_row)(group.reshape(-1), place.reshape(-1)).reshape(*place.shape, size)
        return jnp.where(kept, jnp.float32(1 / (1 - self.rate)), jnp.float32(0))

    def scaled(self, h: jax.Array, factors: jax.Array) -> jax.Array:
        """Multiply hidden activations by their dropout factors in float32, and round to the activations' dtype."""
        return (h.astype(jnp.float32) * factors).astype(h.dtype)

    def of_slots(self, key: jax.Array, spec: Spec, shape: tuple[int, ...], start: int = 0) -> jax.Array:
        """Draw the dropout factors for a device's shard [G, X, C, F] of slots, inside a shard_map.

        Args:
            key: the two words of a threefry key.
            spec: the spec of the hidden activations.
            shape: the shape of the shard.
            start: the index of the first slot, if slots are cut into chunks.
        """
        at = {dim: shard_index(spec.axes_of(dim)) * size for dim, size in zip(spec.dims, shape)}
        of = {dim: at[dim] + jax.lax.broadcasted_iota(jnp.int32, shape[:3], d) for d, dim in enumerate("GXC")}
        return self.scale(key, of["G"], of["X"], start + of["C"], at["F"], shape[3])

    def of_rows(self, key: jax.Array, spec: Spec, shape: tuple[int, ...], counts: tuple[int, int], origin) -> jax.Array:
        """Draw the dropout factors for a device's sorted rows, [G, 1, C, F], inside a shard_map.

        Args:
            key: the two words of a threefry key.
            spec: the spec of the hidden activations.
            shape: the shape of the rows on this device.
            counts: the numbers of groups and of experts on a device.
            origin: three arrays: the local group of each row, its local expert, and its position in the expert's queue.
        """
        group, expert, slot = origin
        at = {dim: shard_index(spec.axes_of(dim)) for dim in spec.dims}
        group, expert = at["G"] * counts[0] + group, at["X"] * counts[1] + expert
        return self.scale(key, group, expert, slot, at["F"] * shape[3], shape[3]).reshape(shape)


def key_words(key: jax.Array) -> jax.Array:
    """Derive the two words of a threefry key from a key of any generator."""
    return jax.random.bits(key, (2,), jnp.uint32)


def drop(ctx: Context, h: jax.Array, spec: Spec, words: jax.Array, dropout: Dropout) -> jax.Array:
    """Apply dropout to hidden activations [G, X, C, F]; nothing is sent, and the gradient only needs `words`."""
    return _drop(ctx, spec, dropout, h, words)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _drop(ctx: Context, spec: Spec, dropout: Dropout, h: jax.Array, words: jax.Array) -> jax.Array:
    return run(ctx, f"dropout {spec}", (), _body(spec, dropout), (spec, KEY), spec, h, words)


def _forward(ctx: Context, spec: Spec, dropout: Dropout, h: jax.Array, words: jax.Array):
    return _drop(ctx, spec, dropout, h, words), words


def _backward(ctx: Context, spec: Spec, dropout: Dropout, words: jax.Array, g: jax.Array):
    return _drop(ctx, spec, dropout, g, words), None


_drop.defvjp(_forward, _backward)


@lru_cache(maxsize=256)
def _body(spec: Spec, dropout: Dropout):
    return lambda h, words: dropout.scaled(h, dropout.of_slots(words, spec, h.shape))
