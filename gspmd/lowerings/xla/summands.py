"""A partial sum as a dimension: how lowering `xla` takes and leaves what no annotation can ask for.

A partial sum over mesh axis x becomes an array with one more dimension, of one summand per device along x: a
relabelling without communication on either side of ordinary einsums. Gradients are ordinary einsums too, of whole
cotangents.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from string import ascii_uppercase

import jax
import jax.numpy as jnp

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.lowerings.local_einsum import local_einsum
from gspmd.lowerings.program import mapped
from gspmd.lowerings.xla.places import Lift, Places, pairs


def summand_letters(specs: Sequence[Spec]) -> dict[str, str]:
    """A letter that the equation does not use for every mesh axis of a partial sum."""
    free = iter(sorted(set(ascii_uppercase) - {dim for spec in specs for dim in spec.dims}))
    return {axis: next(free) for axis in sorted({axis for spec in specs for axis in spec.partial})}


def lifted(spec: Spec, letters: Mapping[str, str]) -> Spec:
    """The spec with its partial sums as leading dimensions.

    >>> str(lifted(Spec.parse("BF_y partialsum-x"), {"x": "A"}))
    'A_xBF_y'
    """
    return Spec(
        tuple(letters[axis] for axis in spec.partial) + spec.dims, tuple((axis,) for axis in spec.partial) + spec.axes
    )


def to_dimensions(spec: Spec, new: Spec, x: jax.Array) -> jax.Array:
    """A partial sum, as an array with a dimension of summands for each of its mesh axes."""
    return _relabel(spec.partition_spec(), new.partition_spec(), len(spec.partial))(x) if spec.partial else x


def to_partial(new: Spec, spec: Spec, x: jax.Array) -> jax.Array:
    """An array with a dimension of summands for each of its mesh axes, as a partial sum: undo `to_dimensions`."""
    return _relabel(new.partition_spec(), spec.partition_spec(), -len(spec.partial))(x) if spec.partial else x


def _relabel(here: jax.P, there: jax.P, added: int) -> Callable:
    """Every device keeps its piece, which gains or loses leading dimensions of size 1; no communication either way."""
    body = lambda piece: piece.reshape((1,) * added + piece.shape[max(0, -added) :])  # noqa: E731
    return lambda x: mapped(body, here, there)(x)  # mapped when called: on the mesh in force then


def as_settled(spec: Spec, cotangent: jax.Array) -> jax.Array:
    """The cotangent of a partial sum in the type of an array that is none; every device holds it whole."""
    plain = spec.without_partial().partition_spec()
    return _retyped(spec.partition_spec(dual=True), plain)(cotangent) if spec.partial else cotangent


def as_cotangent(spec: Spec, x: jax.Array) -> jax.Array:
    """A cotangent that every device holds whole, in the type of one of a partial sum: undo `as_settled`."""
    plain = spec.without_partial().partition_spec()
    return _retyped(plain, spec.partition_spec(dual=True))(x) if spec.partial else x


@lru_cache(maxsize=1024)
def _retyped(here: jax.P, there: jax.P) -> Callable:
    return lambda x: mapped(lambda piece: piece, here, there)(x)  # mapped when called: on the mesh in force then


def gradients(
    equation: Equation,
    ins: Sequence[Spec],
    places: Sequence[Places],
    lift: Lift,
    arrays: Sequence,
    cotangents: Sequence,
) -> tuple[jax.Array, ...]:
    """The cotangents of an equation's operands, [operand's shape] each, from those of its results.

    Args:
        equation: whose gradient it is.
        ins: the operands' specs, their sums lifted.
        places: where the products have their operands and results.
        lift: the letters of the sums.
        arrays: the operands, lifted.
        cotangents: of the results, whole: the cotangent of a partial sum is the same for every summand.

    Returns:
        In the operands' order, all outside of a shard_map: the compiler inserts the collectives.
    """
    specs = [spec for operand in equation.operands for spec in operand.specs]
    sizes = {dim: size for spec, x in zip(ins, arrays) for dim, size in zip(spec.dims, x.shape)}
    parts: list[list[jax.Array]] = [[] for _ in specs]
    known = iter(places)
    for members in pairs(equation):
        for pair, result, cotangent in zip(members, equation.outputs, cotangents):
            place = next(known)
            met = lift.constrain(result.dims, cotangent, place.result)
            for own in pair:
                others = [lift.bring(ins[n], arrays[n], place.operands[n]) for n in pair if n != own]
                part = _toward(specs[own], [met, *others], sizes)
                parts[own].append(lift.constrain(specs[own].dims, part, place.operands[own])[1])
    return tuple(sum(each[1:], each[0]).astype(x.dtype) for each, x in zip(parts, arrays))


def _toward(spec: Spec, held: Sequence[tuple[Spec, jax.Array]], sizes: Mapping[str, int]) -> jax.Array:
    """The product of what is held, summed to the dimensions of `spec`; those that nothing has are broadcast."""
    known = {dim for other, _ in held for dim in other.dims}
    letters = ",".join("".join(other.dims) for other, _ in held) + "->" + "".join(d for d in spec.dims if d in known)
    x = local_einsum(letters, *(x for _, x in held))
    x = jnp.expand_dims(x, [at for at, dim in enumerate(spec.dims) if dim not in known])
    return jnp.broadcast_to(x, tuple(sizes[dim] for dim in spec.dims))
