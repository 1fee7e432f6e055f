"""The specs during attention to a cache, in which the queries are moved to the cache and the cache does not move."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from gspmd.annotate.errors import Fault, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.ops._shared_heads import Share, share

_OPEN = ("?",)
"""The axes of a dimension that is left to the compiler."""


def by_position(doing: str, cache: Spec, key: Spec) -> tuple[int, ...]:
    """Find which dimensions of a cache are batch, length, heads and head size, by the letters of the new keys.

    Args:
        doing: what is being done, for the first line of an error.
        cache: the spec of the cache, with dimensions in any order. It has the letters of `key` for batch, heads and
            head size, and a different letter for the cached length.
        key: the spec of the keys that are added to the cache. Its dimensions are batch, length, heads and, except for
            scales, head size, in this order.

    Returns:
        The indices of batch, length, heads and head size among the dimensions of the cache. There is no head size for
        scales.

    Raises:
        SpecError: the cache lacks one of these dimensions.
    """
    batch, _, *heads = key.dims
    own = [dim for dim in cache.dims if dim not in (batch, *heads)]
    if len(own) != 1 or len(cache.dims) != len(key.dims):
        wanted = ", ".join((batch, *heads))
        fact = f"the cache needs {wanted} of the keys '{key}', in any order, and a letter of its own for the length."
        raise report(SpecError, doing, [Fault(str(cache), 0, len(str(cache)), fact)])
    return tuple(cache.dims.index(dim) for dim in (batch, *own, *heads))


@dataclass(frozen=True)
class CachePlacement:
    """The specs of queries, keys and cache while a device attends to its part of the cache."""

    query: Spec
    key: Spec
    cache: Spec
    share: Share


def placement(
    query: Spec, key: Spec, cache: Spec, shape: tuple[int, ...], key_heads: int, mesh: Mapping[str, int]
) -> CachePlacement:
    """Return the specs of queries, keys and cache while each device attends to its part of the cache.

    Mesh axes that the cache does not use still shard the queries, if the sizes allow it.

    Args:
        query, key, cache: the caller's specs of queries, new keys and cache.
        shape: the shape of the queries.
        key_heads: the number of heads of the keys and of the cache.
        mesh: the size of every mesh axis.
    """
    rows, length, heads, _ = shape
    query, cache = query.without_trivial(mesh), cache.without_trivial(mesh)
    batch, parts, held, _ = (() if axes == _OPEN else axes for axes in cache.axes)
    free = [() if axes == _OPEN else tuple(a for a in axes if a not in cache.used) for axes in query.axes]
    left = [axes if axes == _OPEN else () for axes in query.axes]

    def many(*axes: str) -> int:
        return prod(mesh[axis] for axis in axes)

    for axis in free[0]:
        if rows % many(*batch, axis) == 0:
            batch += (axis,)
    finer: tuple[str, ...] = ()
    shared = Share()  # a device uses all of its key heads unless further axes shard the query heads
    for axis in free[2]:
        found = share((*finer, axis), key_heads // many(*held), mesh)
        if heads % many(*held, *finer, axis) == 0 and found is not None:
            finer, shared = (*finer, axis), found
    new = parts if length % many(*parts) == 0 else ()
    picked = (*held, *shared.sliced)
    return CachePlacement(
        Spec(query.dims, (batch or left[0], free[1] or left[1], (*held, *finer) or left[2], ())),
        Spec(key.dims, (batch, new, picked, ())),
        Spec(cache.dims, (batch, parts, picked, ())),
        shared,
    )
