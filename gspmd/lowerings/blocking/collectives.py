"""Planned steps in the body of a shard_map: each step becomes JAX collectives, in a scope that names the step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.annotate.spec import Spec
from gspmd.lowerings import in_force
from gspmd.lowerings.scopes import step_scope
from gspmd.planner.steps import Chain, Step
from gspmd.planner.unknown import UnknownStep

After = Sequence[jax.Array]
"""Arrays that must be computed before a gather starts, if the gather goes round each axis of a TPU's torus.

`blocking.tpu.all_gather` gives the reason.
"""


def emit(chain: Chain, x: jax.Array, mesh: Mapping[str, int], *, reduce: str = "sum", after: After = ()) -> jax.Array:
    """Run a chain of steps on a device's shard of a tensor, inside a shard_map over the whole mesh.

    Args:
        chain: the steps and their numbers, which appear in the names of their scopes.
        x: the shard, with its dimensions in the order of the first step's `before`.
        mesh: mesh axis sizes.
        reduce: the operation of an all-reduce, `"sum"` or `"max"`.
        after: arrays that must be computed before a gather starts, if the gather goes round each axis of a torus.
    """
    for number, step in enumerate(chain.steps, chain.first):
        with step_scope(number, _as_sent(step, x, mesh)):
            # XLA:CPU ends the process, or hangs, in a collective of an empty array.
            x = _EMIT[step.kind](step, x, mesh, reduce, after) if x.size else _nothing(step, x, mesh)
    return x


def _nothing(step: Step, x: jax.Array, mesh: Mapping[str, int]) -> jax.Array:
    """Return the result of a step on an empty shard."""
    sizes = zip(x.shape, step.before.axes, step.after.axes)
    shape = [size * prod(mesh[axis] for axis in old) // prod(mesh[axis] for axis in new) for size, old, new in sizes]
    return jnp.zeros(shape, x.dtype)


def _as_sent(step: Step, x: jax.Array, mesh: Mapping[str, int]) -> Step:
    """Return a step as it is sent; a gather that goes round several torus axes is sent as collective-permutes."""
    if step.kind == "all-gather" and len(step.axes) > 1 and in_force.is_tpu():
        from gspmd.lowerings.blocking import tpu

        if tpu.goes_round_each_axis(x, step.axes, _changed_dimension(step), mesh, _whole_bytes(step, x, mesh)):
            return replace(step, kind="collective-permute")
    return step


def _changed_dimension(step: Step) -> int:
    return next(d for d, (old, new) in enumerate(zip(step.before.axes, step.after.axes)) if old != new)


def _whole_bytes(step: Step, x: jax.Array, mesh: Mapping[str, int]) -> int:
    """Return the bytes of the whole tensor, of which `x` is the shard before a step."""
    return x.nbytes * prod(mesh[axis] for axes in step.before.axes for axis in axes)


def _all_gather(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str, after: After) -> jax.Array:
    if in_force.is_tpu():
        from gspmd.lowerings.blocking import tpu

        return tpu.all_gather(x, step.axes, _changed_dimension(step), mesh, _whole_bytes(step, x, mesh), after)
    return lax.all_gather(x, step.axes, axis=_changed_dimension(step), tiled=True)


def _reduce_scatter(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str, after: After) -> jax.Array:
    if in_force.is_tpu():
        from gspmd.lowerings.blocking import tpu

        return tpu.reduce_scatter(x, step.axes, _changed_dimension(step), mesh)
    return lax.psum_scatter(x, step.axes, scatter_dimension=_changed_dimension(step), tiled=True)


def _all_reduce(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str, after: After) -> jax.Array:
    if reduce == "max":  # No result depends on the maximum (it cancels), so it needs no derivative.
        return lax.pmax(lax.stop_gradient(x), step.axes)
    if in_force.is_tpu():
        from gspmd.lowerings.blocking import tpu

        return tpu.all_reduce(x, step.axes, mesh)
    return lax.psum(x, step.axes)


def _slice(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str, after: After) -> jax.Array:
    d = _changed_dimension(step)
    size = x.shape[d] // prod(mesh[axis] for axis in step.axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(step.axes) * size, size, axis=d)


def _all_to_all(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str, after: After) -> jax.Array:
    change = [len(new) - len(old) for old, new in zip(step.before.axes, step.after.axes)]
    split, concat = change.index(max(change)), change.index(min(change))
    if in_force.is_tpu():
        from gspmd.lowerings.blocking import tpu

        return tpu.all_to_all(x, step.axes, split, concat, mesh, step.before.dims)
    return lax.all_to_all(x, step.axes, split_axis=split, concat_axis=concat, tiled=True)


def _unknown(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str, after: After) -> jax.Array:
    from gspmd.lowerings.marks import marked  # imported here, since few programs have such a step

    assert isinstance(step, UnknownStep)
    assert step.what is not None
    return marked(x, step.what)


def _permute(step: Step, x: jax.Array, mesh: Mapping[str, int], reduce: str, after: After) -> jax.Array:
    # All mesh axes are named, not only `step.axes`, because `permutation` numbers the devices of the whole mesh.
    axes = tuple(axis for axis in mesh if mesh[axis] > 1)
    return lax.ppermute(x, axes, permutation(step.before, step.after, {axis: mesh[axis] for axis in axes}))


_EMIT = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "slice": _slice,
    "collective-permute": _permute,
    "unknown": _unknown,
}


def permutation(before: Spec, after: Spec, mesh: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the pairs (source, target) of devices of a permute; each device is a source once and a target once.

    A device that already holds its new shard keeps the shard. Summands of a partial sum stay on their devices. Nothing
    moves along a mesh axis that shards the same dimension with the same stride before and after, or that shards nothing
    before and after.

    Example:
        >>> permutation(Spec.parse("E_xy"), Spec.parse("E_yx"), {"x": 2, "y": 2})
        [(0, 0), (2, 1), (1, 2), (3, 3)]
    """
    devices = [dict(zip(mesh, place)) for place in product(*(range(size) for size in mesh.values()))]
    still = [axis for axis in mesh if _stride(before, axis, mesh) == _stride(after, axis, mesh)]
    holders: dict[tuple, list[int]] = {}
    for number, device in enumerate(devices):
        holders.setdefault(_piece(before, device, mesh, still), []).append(number)
    wanted = [_piece(after, device, mesh, still) for device in devices]
    source: dict[int, int] = {}
    for number, piece in enumerate(wanted):
        if number in holders[piece]:
            holders[piece].remove(number)
            source[number] = number
    for number, piece in enumerate(wanted):
        if number not in source:
            source[number] = holders[piece].pop(0)
    return [(source[number], number) for number in range(len(devices))]


def _stride(spec: Spec, axis: str, mesh: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the dimension that an axis shards, and the distance in shards between neighbors along this axis."""
    return next(
        (
            (dim, prod(mesh[minor] for minor in axes[axes.index(axis) + 1 :]))
            for dim, axes in zip(spec.dims, spec.axes)
            if axis in axes
        ),
        None,
    )


def _piece(spec: Spec, device: Mapping[str, int], mesh: Mapping[str, int], still: Sequence[str]) -> tuple[int, ...]:
    """Return numbers that identify the shard of a device.

    They are the position of the device along the axes `still`, the index of its shard in each dimension, and the index
    of its summand if the tensor is a partial sum.
    """
    index = [device[axis] for axis in still]
    for axes in (*spec.axes, *((axis,) for axis in spec.partial)):
        position = 0
        for axis in axes:
            position = position * mesh[axis] + device[axis]
        index.append(position)
    return tuple(index)
