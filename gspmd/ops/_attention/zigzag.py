"""The zigzag order of a sequence that is sharded over devices, in which every device has the same causal work.

Except for attention and experts, a model computes each token by itself. So tokens and labels can be brought into this
order once, while L is still unsharded, without communication. If only attention used this order, the queries, keys,
values and output of every layer would have to be sent to other devices and back.
"""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate.errors import PlanError, shown
from gspmd.annotate.spec import Spec
from gspmd.annotate.validation import whole
from gspmd.ops._attention.online import Attended


def zigzag_positions(length: int, devices: int) -> np.ndarray:
    """Return the position of each token in a sequence in zigzag order.

    The sequence is cut into 2n chunks for n devices. Device i has chunk i, whose tokens attend to few keys, and chunk
    2n - 1 - i, whose tokens attend to many keys.

    Args:
        length: the length of the sequence, which must be a multiple of 2n if n is not 1.
        devices: the number of devices, n.

    Returns:
        [L] integers.

    Raises:
        PlanError: the length is not a multiple of 2n (and n is not 1), or an argument is not a whole number.

    Example:
        >>> zigzag_positions(8, 2).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]

    Source: Zhu, *zigzag ring attention* (public code, 2024); Llama 3 is trained in this order (Grattafiori et al. 2024,
        arXiv 2407.21783, section 3.3.2). Brandon et al. 2023 (arXiv 2311.09431) balance the same work by stripes.
    """
    sizes = whole(length), whole(devices)
    if None in sizes or not (0 <= length < 2**31 and devices >= 1) or (devices > 1 and length % (2 * devices)):
        raise PlanError(
            f"cannot bring a sequence of {shown(length)} tokens into zigzag order over {shown(devices)} devices.\n"
            "  Each device has two chunks of equal length: use a multiple of twice the number of devices."
        )
    if devices == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[: devices - 1 : -1]], axis=1).reshape(-1)


def ring_size(key: Spec) -> int:
    """Return the number of devices over which `key`, the spec of the keys, shards a sequence on the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else prod(mesh.shape[axis] for axis in key.axes[1])


def zigzag(x: jax.Array, devices: int) -> jax.Array:
    """Reorder an array [B, L, ...], which is unsharded along L, from the order of positions into zigzag order.

    >>> zigzag(jnp.arange(8)[None], 2)[0].tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if devices == 1:
        return x
    chunks = x.reshape(x.shape[0], 2 * devices, -1, *x.shape[2:])
    early, late = chunks[:, :devices], jnp.flip(chunks[:, devices:], axis=1)
    return jnp.stack([early, late], axis=2).reshape(x.shape)


def in_order(x: jax.Array, devices: int) -> jax.Array:
    """Reorder an array [B, L, ...], which is unsharded along L, from zigzag order into the order of positions.

    >>> in_order(zigzag(jnp.arange(8)[None], 2), 2)[0].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if devices == 1:
        return x
    pairs = x.reshape(x.shape[0], devices, 2, -1, *x.shape[2:])
    early, late = pairs[:, :, 0], jnp.flip(pairs[:, :, 1], axis=1)
    return jnp.concatenate([early, late], axis=1).reshape(x.shape)


class ZigzagPairs:
    """Two products, each of half of a device's queries with half of another device's keys, without a mask.

    The early half of a device's tokens is its first chunk, and the late half is its second chunk. In one product, the
    late queries of this device attend to the early keys of the other device. The second product depends on `earlier`,
    which is True if the other device is before this one. The early queries then attend to the same early keys. If
    `earlier` is False, the late queries attend to the late keys of the other device. Both products are computed as one
    product with twice the rows.
    """

    def __init__(self, earlier: jax.Array):
        self.earlier = earlier

    def queries(self, x: jax.Array) -> jax.Array:
        """Return the halves of this device's queries [B, L, ...] that the two products use, as [2B, L/2, ...]."""
        early, late = jnp.split(x, 2, axis=1)
        return jnp.concatenate([late, jnp.where(self.earlier, early, late)])

    def keys(self, x: jax.Array) -> jax.Array:
        """Return the halves of the other device's keys [B, L, ...] that the two products use, as [2B, L/2, ...]."""
        early, late = jnp.split(x, 2, axis=1)
        return jnp.concatenate([early, jnp.where(self.earlier, early, late)])

    def found(self, found: Attended) -> Attended:
        """Return the result [B, L, ...] for all queries, merged from the results [2B, L/2, ...] of both products."""
        both, other = (Attended(*half) for half in zip(*(jnp.split(x, 2) for x in found)))
        nothing = Attended(*(jnp.full_like(x, fill) for x, fill in zip(other, (-jnp.inf, 0.0, 0.0))))
        early = Attended(*(jnp.where(self.earlier, x, none) for x, none in zip(other, nothing)))
        late = both.merge(Attended(*(jnp.where(self.earlier, none, x) for x, none in zip(other, nothing))))
        return Attended(*(jnp.concatenate(halves, axis=1) for halves in zip(early, late)))

    def query_gradient(self, g: jax.Array) -> jax.Array:
        """Return the gradient [B, L, ...] of this device's queries; this function is the transpose of `queries`."""
        late, other = jnp.split(g, 2)
        return jnp.concatenate([jnp.where(self.earlier, other, 0), late + jnp.where(self.earlier, 0, other)], axis=1)

    def key_gradient(self, g: jax.Array) -> jax.Array:
        """Return the gradient [B, L, ...] of the other device's keys; this function is the transpose of `keys`."""
        early, other = jnp.split(g, 2)
        return jnp.concatenate([early + jnp.where(self.earlier, other, 0), jnp.where(self.earlier, 0, other)], axis=1)
