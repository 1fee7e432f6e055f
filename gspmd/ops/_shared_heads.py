"""The key heads that a device's query heads share, if queries are sharded over more mesh axes than keys are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Share:
    """The key heads of a device's query heads, if query heads are sharded over more axes than key heads.

    Key heads are split further over the axes `sliced`. Devices along the axes `common` share the `heads` key heads that
    are left, and each uses one of them.
    """

    sliced: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    heads: int = 1
    sharers: int = 1
    """Devices along `common` that use the same key head."""

    def pick(self, *keys: "jax.Array") -> tuple["jax.Array", ...]:
        """Pick the head of [B, T, K, ...] that this device uses, if it uses one of several; in a shard_map."""
        if self.heads == 1:
            return keys
        import jax  # layouts ask for shares without it

        from gspmd.ops.interface.planned_op import shard_index

        mine = shard_index(self.common) // self.sharers
        return tuple(jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in keys)


def share(finer: Sequence[str], heads: int, mesh: Mapping[str, int]) -> Share | None:
    """Find how query heads that are also sharded over the `finer` axes share the `heads` key heads of a device.

    Returns:
        The share; None if some device would need parts of two groups.
    """
    sliced, common = [], list(finer)
    while common and heads % mesh[common[0]] == 0:
        sliced.append(common.pop(0))
        heads //= mesh[sliced[-1]]
    if not common:
        return Share(tuple(sliced))
    devices = prod(mesh[axis] for axis in common)
    return None if devices % heads else Share(tuple(sliced), tuple(common), heads, devices // heads)
