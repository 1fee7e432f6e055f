"""The key heads of each device, if query heads are sharded over more mesh axes than key heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Share:
    """The division of key heads among devices, if query heads are sharded over more mesh axes than key heads.

    Key heads are split further over the mesh axes `sliced`. A device then has `heads` key heads, which are the same for
    all devices along the mesh axes `common`, and uses one of these heads.
    """

    sliced: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    heads: int = 1
    sharers: int = 1
    """The number of devices along `common` that use the same key head."""

    def pick(self, *keys: "jax.Array") -> tuple["jax.Array", ...]:
        """Pick, inside a shard_map, the head of [B, T, K, ...] that this device uses, if it has several."""
        if self.heads == 1:
            return keys
        import jax  # imported here: layouts call `share` without JAX

        from gspmd.ops.interface.planned_op import shard_index

        mine = shard_index(self.common) // self.sharers
        return tuple(jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in keys)


def share(finer: Sequence[str], heads: int, mesh: Mapping[str, int]) -> Share | None:
    """Find how devices divide `heads` key heads if their query heads are also sharded over the mesh axes `finer`.

    Returns:
        The division, or None if the query heads of some device would belong to parts of two groups.
    """
    sliced, common = [], list(finer)
    while common and heads % mesh[common[0]] == 0:
        sliced.append(common.pop(0))
        heads //= mesh[sliced[-1]]
    if not common:
        return Share(tuple(sliced))
    devices = prod(mesh[axis] for axis in common)
    return None if devices % heads else Share(tuple(sliced), tuple(common), heads, devices // heads)
