"""The check that each device has the key heads to which its query heads attend."""

from collections.abc import Mapping
from math import prod

from gspmd.annotate.errors import Fault, PlanError, report
from gspmd.annotate.spec import Spec
from gspmd.ops._shared_heads import share
from gspmd.ops.interface.planned_op import fault

# -- whether a device has the keys that it needs ---------------------------------------------------------------------


def placed(doing: str, query: Spec, key: Spec, heads: int, key_heads: int, mesh: Mapping[str, int]):
    """Check that every device has the keys that it needs, and find how a device picks its key heads.

    Returns:
        The `Share` that picks the key heads, and the mesh axes that shard the sequence of the queries.

    Raises:
        PlanError: the specs would leave some device without keys that it needs; or some device would have query heads
            of several groups that share a key head, but not whole groups.
    """
    query, key = query.without_trivial(mesh), key.without_trivial(mesh)
    held, wanted = key.axes[2], query.axes[2]
    first = f"the mesh axes of {key.dims[2]} have to be the leading mesh axes of {query.dims[2]}, in their order."
    faults = [
        *_unsharded(query, (3,)),
        *(_same(key, 1, query.axes[1], _CUT) if key.axes[1] and query.axes[1] else _unsharded(key, (1,))),
        *_unsharded(key, (3,)),
        *_same(key, 0, query.axes[0], _ROWS),
        *_same(key, 2, wanted[: len(held)], first),
    ]
    if faults:
        raise report(PlanError, doing, faults) from None
    found = share(wanted[len(held) :], key_heads // prod(mesh[axis] for axis in held), mesh)
    if found is None:
        raise report(PlanError, doing, [_misaligned(query, key, heads, key_heads, mesh)]) from None
    return found, query.axes[1]


def check_searchable(doing: str, query: Spec, key: Spec) -> None:
    """Check specs with unknowns, which stand for mesh axes while the search traces a program.

    The check covers the conditions that must hold on any mesh. In addition, the keys must be unsharded along the
    sequence, because the search does not cover keys that go round a ring.

    Raises:
        PlanError: one of these conditions does not hold. The message names the unknowns that the search must then set
            equal to other unknowns, or leave empty.
    """
    faults = [*_unsharded(query, (3,)), *_unsharded(key, (1, 3)), *_same(key, 0, query.axes[0], _ROWS)]
    if faults:
        raise report(PlanError, doing, faults) from None


_ROWS = "the keys of a sequence have to be where its queries are."
_CUT = "keys that are sharded along the sequence go round to queries that are sharded in the same way."


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
    return fault(
        query,
        query.dims[2],
        fact,
        "Shard it over axes whose size divides the number of key heads, or is a multiple of that number.",
    )
