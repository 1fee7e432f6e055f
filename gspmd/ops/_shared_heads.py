"""The key heads that each device has and uses, if query heads are sharded over more mesh axes than key heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Share:
    """The division of key heads among devices, if query heads are sharded over more mesh axes than key heads.

    The additional mesh axes of the query heads are `sliced` and `common`. Key heads are split over `sliced` too, and
    devices along `common` have the same key heads. If there are mesh axes in `common`, a device has `heads` key heads
    after the split and uses one of them. Otherwise it uses all key heads that it has, and `heads` is 1.
    """

    sliced: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    heads: int = 1
    sharers: int = 1
    """The number of devices along `common` that use the same key head."""

    def pick(self, *keys: "jax.Array") -> tuple["jax.Array", ...]:
        """Return arrays [B, T, K, ...] with only the key head that this device uses.

        If the device uses all key heads that it has, the arrays are returned unchanged. The call must be inside a
        shard_map.
        """
        if self.heads == 1:
            return keys
        import jax  # imported here: layouts call `share` without JAX

        from gspmd.ops.interface.planned_op import shard_index

        mine = shard_index(self.common) // self.sharers
        return tuple(jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in keys)


def share(finer: Sequence[str], heads: int, mesh: Mapping[str, int]) -> Share | None:
    """Find how devices divide `heads` key heads if the query heads are also sharded over the mesh axes `finer`.

    Returns:
        The division, or None if some device would have query heads of several groups, but not whole groups. A group is
        the query heads that use the same key head.
    """
    sliced, common = [], list(finer)
    while common and heads % mesh[common[0]] == 0:
        sliced.append(common.pop(0))
        heads //= mesh[sliced[-1]]
    if not common:
        return Share(tuple(sliced))
    devices = prod(mesh[axis] for axis in common)
    return None if devices % heads else Share(tuple(sliced), tuple(common), heads, devices // heads)
