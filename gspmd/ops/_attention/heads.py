"""The key heads to which a device's query heads attend, and whether the device has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax

from gspmd.annotate.errors import Fault, PlanError, report
from gspmd.annotate.spec import Spec
from gspmd.ops.interface.planned_op import fault, shard_index


@dataclass(frozen=True)
class Share:
    """The key heads that a device's query heads use, if query heads are sharded over more axes than key heads.

    Key heads are split further over the axes `sliced`. Devices along the axes `common` share the `heads` key heads that
    are left, and each uses one of them.
    """

    sliced: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    heads: int = 1
    sharers: int = 1
    """Devices along `common` that use the same key head."""

    def pick(self, *keys: jax.Array) -> tuple[jax.Array, ...]:
        """Pick from [B, T, K, ...] the key head that this device uses, if it uses one of several; in a shard_map."""
        if self.heads == 1:
            return keys
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


# -- whether a device has the keys that it needs ---------------------------------------------------------------------


def placed(doing: str, query: Spec, key: Spec, heads: int, key_heads: int, mesh: Mapping[str, int]):
    """Check that every device has the keys that it needs, and find the share by which it picks its key heads.

    Returns:
        The share, and the axes that shard the queries of a sequence.
    """
    query, key = query.without_trivial(mesh), key.without_trivial(mesh)
    held, wanted = key.axes[2], query.axes[2]
    first = f"the axes of {key.dims[2]} have to be the first of those of {query.dims[2]}."
    faults = [
        *_unsharded(query, (3,)),
        *(_same(key, 1, query.axes[1], _CUT) if key.axes[1] and query.axes[1] else _unsharded(key, (1,))),
        *_unsharded(key, (3,)),
        *_same(key, 0, query.axes[0], "the keys of a sequence have to be where its queries are."),
        *_same(key, 2, wanted[: len(held)], first),
    ]
    if faults:
        raise report(PlanError, doing, faults) from None
    found = share(wanted[len(held) :], key_heads // prod(mesh[axis] for axis in held), mesh)
    if found is None:
        raise report(PlanError, doing, [_misaligned(query, key, heads, key_heads, mesh)]) from None
    return found, query.axes[1]


_CUT = "where keys are cut along the sequence, they go round to queries that are cut alike."


def _unsharded(spec: Spec, positions: tuple[int, ...]) -> list[Fault]:
    return [_moved(spec, at, (), "every device attends over the whole of it.") for at in positions if spec.axes[at]]


def _same(spec: Spec, at: int, axes: tuple[str, ...], why: str) -> list[Fault]:
    return [] if spec.axes[at] == axes else [_moved(spec, at, axes, why)]


def _moved(spec: Spec, at: int, axes: tuple[str, ...], why: str) -> Fault:
    dim = spec.dims[at]
    held = f"is sharded over {', '.join(spec.axes[at])}" if spec.axes[at] else "is unsharded"
    need = f"over {', '.join(axes)}" if axes else "unsharded"
    remedy = f"Move it before: gspmd.reshard(x, '{spec} -> {_with(spec, at, axes)}')."
    return fault(spec, dim, f"dimension {dim} {held}, and has to be {need}: {why}", remedy)


def _with(spec: Spec, at: int, axes: tuple[str, ...]) -> Spec:
    others = tuple(tuple(a for a in held if a not in axes) for held in spec.axes)
    return Spec(spec.dims, others).with_axes(spec.dims[at], axes)


def _misaligned(query: Spec, key: Spec, heads: int, key_heads: int, mesh: Mapping[str, int]) -> Fault:
    local = heads // prod(mesh[axis] for axis in query.axes[2])
    group = heads // key_heads
    fact = (
        f"a device has {local} of {heads} query heads, and {group} query heads share a key head: "
        "some device would need parts of two groups."
    )
    return fault(query, query.dims[2], fact, "Shard it over axes whose size divides the key heads, or is a multiple.")
