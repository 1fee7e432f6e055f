"""Which key heads a device's query heads attend to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax

from gspmd.ops.interface.planned_op import shard_index


@dataclass(frozen=True)
class Share:
    """How query heads that are split finer than key heads find theirs.

    `sliced` are the axes over which key heads are split once more; over `common` each device uses one of the `heads`
    key heads left, together with others.
    """

    sliced: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    heads: int = 1
    sharers: int = 1
    """Devices along `common` that use the same key head."""

    def pick(self, *keys: jax.Array) -> tuple[jax.Array, ...]:
        """The one head of [B, T, K, ...] that this device uses, where it uses one of several; inside a shard_map."""
        if self.heads == 1:
            return keys
        mine = shard_index(self.common) // self.sharers
        return tuple(jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in keys)


def share(finer: Sequence[str], heads: int, mesh: Mapping[str, int]) -> Share | None:
    """How query heads that `finer` axes split once more share the `heads` key heads that a device has.

    Returns:
        None where some device would need parts of two groups.
    """
    sliced, common = [], list(finer)
    while common and heads % mesh[common[0]] == 0:
        sliced.append(common.pop(0))
        heads //= mesh[sliced[-1]]
    if not common:
        return Share(tuple(sliced))
    devices = prod(mesh[axis] for axis in common)
    return None if devices % heads else Share(tuple(sliced), tuple(common), heads, devices // heads)
