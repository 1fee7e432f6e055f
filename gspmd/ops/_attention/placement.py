"""Where attention to a cache is computed: the cache stays, and the queries come to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from gspmd.annotate.spec import Spec
from gspmd.ops._attention.heads import Share, share


@dataclass(frozen=True)
class Placement:
    """Where everything lies while a device attends to its part of the cache."""

    query: Spec
    key: Spec
    cache: Spec
    share: Share


def placement(
    query: Spec, key: Spec, cache: Spec, shape: tuple[int, ...], key_heads: int, mesh: Mapping[str, int]
) -> Placement:
    """Bring the queries to the cache, and leave alone the mesh axes that the cache does not use, where that works.

    Args:
        query, key, cache: where they lie.
        shape: of the queries.
        key_heads: how many heads keys and cache have.
        mesh: sizes of its axes.
    """
    rows, length, heads, _ = shape
    query, cache = query.without_trivial(mesh), cache.without_trivial(mesh)
    batch, parts, held, _ = cache.axes
    free = [tuple(axis for axis in axes if axis not in cache.used) for axes in query.axes]

    def many(*axes: str) -> int:
        return prod(mesh[axis] for axis in axes)

    for axis in free[0]:
        if rows % many(*batch, axis) == 0:
            batch += (axis,)
    finer: tuple[str, ...] = ()
    for axis in free[2]:
        if heads % many(*held, *finer, axis) == 0 and share((*finer, axis), key_heads // many(*held), mesh):
            finer += (axis,)
    shared = share(finer, key_heads // many(*held), mesh)
    new = parts if length % many(*parts) == 0 else ()
    picked = (*held, *shared.sliced)
    return Placement(
        Spec(query.dims, (batch, free[1], (*held, *finer), ())),
        Spec(key.dims, (batch, new, picked, ())),
        Spec(cache.dims, (batch, parts, picked, ())),
        shared,
    )
