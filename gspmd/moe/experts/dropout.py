"""Expert dropout: of the hidden activations of experts, some are 0 in training, the same ones on every mesh."""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import run
from gspmd.ops.planned_op import shard_index

KEY = Spec(("K",), ((),))
"""Where the two words of a key lie: on every device."""


@dataclass(frozen=True)
class Dropout:
    """Expert dropout of one layer.

    A row's random numbers are those of its group, its expert and its place in that expert's queue, and so the same
    wherever it lies, and whichever the form of dispatch.

    Attributes:
        rate: the share of hidden activations that become 0; the others are divided by what is left.
        tokens: tokens of a group, the longest a queue can be.
        features: F, the width of the hidden activations.

    Source: Fedus et al., *Switch Transformers*, arXiv 2101.03961, §2.4 (expert dropout).
    """

    rate: float
    tokens: int
    features: int

    def scale(self, key: jax.Array, group, expert, slot, first: jax.Array | int, size: int) -> jax.Array:
        """The factors of rows, 0 or 1/(1 - rate), for `size` features from `first` on.

        Args:
            key: two words of a threefry key.
            group, expert, slot: of each row, one shape.
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
        """Hidden activations times their factors, in float32, rounded to their own dtype."""
        return (h.astype(jnp.float32) * factors).astype(h.dtype)

    def of_slots(self, key: jax.Array, spec: Spec, shape: tuple[int, ...], start: int = 0) -> jax.Array:
        """The factors of a device's piece [G, X, C, F] of slots that lie as `spec`, inside a shard_map.

        Args:
            shape: of the piece.
            start: the number of the first slot, where slots are cut into chunks.
        """
        at = {dim: shard_index(spec.axes_of(dim)) * size for dim, size in zip(spec.dims, shape)}
        of = {dim: at[dim] + jax.lax.broadcasted_iota(jnp.int32, shape[:3], d) for d, dim in enumerate("GXC")}
        return self.scale(key, of["G"], of["X"], start + of["C"], at["F"], shape[3])

    def of_rows(self, key: jax.Array, spec: Spec, shape: tuple[int, ...], counts: tuple[int, int], origin) -> jax.Array:
        """The factors of sorted rows, [G, 1, C, F].

        Args:
            counts: how many groups and experts a device has.
            origin: group and expert of each row on its device, and its place in that expert's queue.
        """
        group, expert, slot = origin
        at = {dim: shard_index(spec.axes_of(dim)) for dim in spec.dims}
        group, expert = at["G"] * counts[0] + group, at["X"] * counts[1] + expert
        return self.scale(key, group, expert, slot, at["F"] * shape[3], shape[3]).reshape(shape)


def key_words(key: jax.Array) -> jax.Array:
    """A key of a layer as two words that a threefry key can be made of, whatever the key's own generator."""
    return jax.random.bits(key, (2,), jnp.uint32)


def drop(h: jax.Array, spec: Spec, words: jax.Array, dropout: Dropout) -> jax.Array:
    """Drop some of the hidden activations [G, X, C, F], which lie as `spec`; nothing is sent, nor kept."""
    return _drop(spec, dropout, h, words)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _drop(spec: Spec, dropout: Dropout, h: jax.Array, words: jax.Array) -> jax.Array:
    return run(f"dropout {spec}", (), _body(spec, dropout), (spec, KEY), spec, h, words)


def _forward(spec: Spec, dropout: Dropout, h: jax.Array, words: jax.Array):
    return _drop(spec, dropout, h, words), words


def _backward(spec: Spec, dropout: Dropout, words: jax.Array, g: jax.Array):
    return _drop(spec, dropout, g, words), None


_drop.defvjp(_forward, _backward)


@lru_cache(maxsize=256)
def _body(spec: Spec, dropout: Dropout):
    return lambda h, words: dropout.scaled(h, dropout.of_slots(words, spec, h.shape))
