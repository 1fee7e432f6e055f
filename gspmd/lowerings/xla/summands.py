"""Partial sums as dimensions of summands, because the annotations of lowering `xla` cannot express partial sums.

A partial sum over mesh axis x becomes an array with a further dimension, which has one summand per device along x. This
conversion sends nothing. Ordinary einsums run between this conversion and the reverse one. Gradients are ordinary
einsums too, of cotangents without partial sums.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from string import ascii_uppercase

import jax
import jax.numpy as jnp

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.lowerings.local_einsum import local_einsum
from gspmd.lowerings.program import mapped
from gspmd.lowerings.xla.places import Lift, ProductPlaces, pairs

Located = list[tuple[Spec, jax.Array]]
"""The operands of a product, each with its spec."""


def summand_letters(specs: Sequence[Spec]) -> dict[str, str]:
    """Return an unused letter for every mesh axis over which an array or its gradient is a partial sum.

    Args:
        specs: the specs of all arrays; letters of their dimensions are not used.
    """
    free = iter(sorted(set(ascii_uppercase) - {dim for spec in specs for dim in spec.dims}))
    return {axis: next(free) for axis in sorted({axis for spec in specs for axis in (*spec.partial, *spec.reduced)})}


def lifted(spec: Spec, letters: Mapping[str, str]) -> Spec:
    """Return a spec in which partial sums are leading dimensions of summands, and `reduced` is dropped.

    >>> str(lifted(Spec.parse("BF_y partialsum-x"), {"x": "A"}))
    'A_xBF_y'
    """
    return Spec(
        tuple(letters[axis] for axis in spec.partial) + spec.dims, tuple((axis,) for axis in spec.partial) + spec.axes
    )


def to_dimensions(spec: Spec, new: Spec, x: jax.Array) -> jax.Array:
    """Turn a partial sum into an array with a dimension of summands for each mesh axis of the sum."""
    typed = spec.partial or spec.reduced
    return _relabel(spec.partition_spec(), new.partition_spec(), len(spec.partial))(x) if typed else x


def to_partial(new: Spec, spec: Spec, x: jax.Array) -> jax.Array:
    """Turn an array with a dimension of summands for each mesh axis into a partial sum, and so undo `to_dimensions`."""
    typed = spec.partial or spec.reduced
    return _relabel(new.partition_spec(), spec.partition_spec(), -len(spec.partial))(x) if typed else x


def _relabel(here: jax.P, there: jax.P, added: int) -> Callable:
    """Return a function that adds or drops leading dimensions of size 1 in every device's shard.

    Nothing is sent. `added` is the number of dimensions that are added; if it is negative, dimensions are dropped.
    """
    body = lambda piece: piece.reshape((1,) * added + piece.shape[max(0, -added) :])  # noqa: E731
    return lambda x: mapped(body, here, there)(x)  # made at each call, for the mesh in force


def gradients(
    equation: Equation,
    ins: Sequence[Spec],
    places: Sequence[ProductPlaces],
    lift: Lift,
    outs: Sequence[Spec],
    arrays: Sequence,
    cotangents: Located,
) -> tuple[jax.Array, ...]:
    """Return the cotangents of an equation's operands, from the cotangents of its results.

    All arrays and specs here are *lifted*, which means that they have dimensions of summands instead of partial sums.

    Args:
        equation: the equation to differentiate.
        ins: the specs of the operands.
        places: the placements of the products' operands and results.
        lift: the letters of the dimensions of summands.
        outs: the specs of the operands' cotangents.
        arrays: the operands.
        cotangents: the cotangents of the results. The cotangent of a partial sum is the same for each summand.

    Returns:
        The cotangents in the order of the operands. They are computed outside of a shard_map, so the compiler inserts
        the collectives.
    """
    sizes = {dim: size for spec, x in zip(ins, arrays) for dim, size in zip(spec.dims, x.shape)} | {
        letter: lift.mesh[axis] for axis, letter in lift.letters.items()
    }
    parts: list[list[jax.Array]] = [[] for _ in outs]
    known = iter(places)
    for members in pairs(equation):
        for pair, (given, cotangent) in zip(members, cotangents):
            place = next(known)
            # The cotangent takes the route of the result in reverse.
            way = reversed((*place.result, *place.output))
            met = lift.placed(given.dims, place.result[0]), lift.along(given.dims, cotangent, way)
            for own in pair:
                others = [lift.bring(ins[n], arrays[n], place.operands[n]) for n in pair if n != own]
                part = _toward(outs[own], with_summands([met, *others], outs[own], lift), sizes)
                parts[own].append(lift.along(outs[own].dims, part, reversed(place.operands[own])))
    return tuple(sum(each[1:], each[0]).astype(x.dtype) for each, x in zip(parts, arrays))


def _toward(spec: Spec, held: Sequence[tuple[Spec, jax.Array]], sizes: Mapping[str, int]) -> jax.Array:
    """Multiply the operands `held`, and sum all dimensions that `spec` lacks.

    The result is broadcast along dimensions of `spec` that no operand has.
    """
    known = {dim for other, _ in held for dim in other.dims}
    letters = ",".join("".join(other.dims) for other, _ in held) + "->" + "".join(d for d in spec.dims if d in known)
    x = local_einsum(letters, *(x for _, x in held))
    x = jnp.expand_dims(x, [at for at, dim in enumerate(spec.dims) if dim not in known])
    return jnp.broadcast_to(x, tuple(sizes[dim] for dim in spec.dims))


def with_summands(pair: Located, output: Spec, lift: Lift) -> Located:
    """Add dimensions of summands to the operands, if `output` has such dimensions and no operand has them."""
    for axis, letter in lift.letters.items():
        if letter in output.dims and not any(letter in spec.dims for spec, _ in pair):
            summed = _summed_over(axis, pair, output)
            pair = _cut(pair, summed, letter, axis, lift) if summed else _widened(pair, letter)
    return pair


def _widened(pair, dim: str) -> Located:
    """Add a first dimension of size 1 to the first operand, for the only summand over a mesh axis of size 1."""
    spec, x = pair[0]
    return [(Spec((dim, *spec.dims), ((), *spec.axes)), x[None]), *pair[1:]]


def _summed_over(axis: str, pair, output: Spec) -> str | None:
    """Return the summed dimension that a mesh axis shards in the plan, or any summed dimension for an axis of size 1.

    The result is None if no dimension is summed.
    """
    summed = [(dim, axes) for spec, _ in pair for dim, axes in zip(spec.dims, spec.axes) if dim not in output.dims]
    return next((dim for dim, axes in summed if axis in axes), summed[0][0] if summed else None)


def _cut(pair, dim: str, new: str, axis: str, lift: Lift) -> Located:
    """Cut a summed dimension of both operands along one of its mesh axes, into one part per device.

    For example, E_yx, whose minor axis is x, is cut into [y, x, rest]. The part x then becomes a dimension of its own,
    in front of the dimension [y, rest] that remains. Nothing is sent.
    """
    cut = []
    for spec, x in pair:
        if dim in spec.dims:
            at, axes = spec.dims.index(dim), spec.axes_of(dim)
            major = axes[: axes.index(axis)] if axis in axes else ()
            left = tuple(name for name in axes if name != axis)
            before, after = x.shape[:at], x.shape[at + 1 :]
            outer, size = prod(lift.mesh[name] for name in major), lift.mesh[axis]
            x = jnp.moveaxis(x.reshape((*before, outer, size, x.shape[at] // (outer * size), *after)), at + 1, at)
            x = x.reshape((*before, size, -1, *after))
            spec = Spec((*spec.dims[:at], new, *spec.dims[at:]), (*spec.axes[:at], (axis,), left, *spec.axes[at + 1 :]))
            x = jax.lax.with_sharding_constraint(x, spec.partition_spec())
        cut.append((spec, x))
    return cut
