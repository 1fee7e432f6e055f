"""Workarounds for partial sums that JAX cannot handle, and errors where there is no workaround.

JAX 0.10.2 cannot stack an unreduced array. So a loop cannot keep such an array as a residual, and `vmap` fails on its
type (docs/compiler.md). If such an array is a constant of a loop, it is summed wrongly, which `hoisting` prevents.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax

from gspmd.annotate.errors import PlanError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Stored:
    """A partial sum that is stored as an ordinary array.

    Attributes:
        lifted: the array, which has a further dimension of summands for each mesh axis of the sum.
        partition: the partition spec of the partial sum.
    """

    lifted: jax.Array
    partition: jax.P = field(metadata={"static": True})


def storable(forward: Callable, backward: Callable) -> tuple[Callable, Callable]:
    """Return the forward and the backward rule of a `jax.custom_vjp`, changed so that a loop can stack the residuals.

    Args:
        forward: the forward rule, arrays -> (results, residuals).
        backward: the backward rule, (residuals, cotangents) -> cotangents.
    """

    def storing(*arrays):
        results, held = forward(*arrays)
        return results, jax.tree.map(_stored, held)

    def restoring(*given):
        *settings, held, cotangents = given
        held = jax.tree.map(_restored, held, is_leaf=lambda leaf: isinstance(leaf, _Stored))
        return backward(*settings, held, cotangents)

    return storing, restoring


def _is_unreduced(x: Any) -> bool:
    return bool(jax.typeof(x).sharding.spec.unreduced)


def _stored(x: jax.Array) -> Any:
    if not _is_unreduced(x):
        return x
    partition = jax.typeof(x).sharding.spec
    lifted = jax.P(*sorted(partition.unreduced), *partition.partitions)
    added = (1,) * len(partition.unreduced)
    body = lambda piece: piece.reshape(added + piece.shape)  # noqa: E731
    return _Stored(jax.shard_map(body, in_specs=partition, out_specs=lifted, check_vma=False)(x), partition)


def _restored(x: Any) -> jax.Array:
    if not isinstance(x, _Stored):
        return x
    count = len(x.partition.unreduced)
    lifted = jax.P(*sorted(x.partition.unreduced), *x.partition.partitions)
    body = lambda piece: piece.reshape(piece.shape[count:])  # noqa: E731
    if jax.sharding.get_abstract_mesh().size > 1:
        return jax.shard_map(body, in_specs=lifted, out_specs=x.partition, check_vma=False)(x.lifted)
    # On one device JAX inlines a shard_map and refuses its partial sums. They are complete sums there, and get their
    # type afterwards.
    whole = jax.P(*x.partition.partitions)
    return jax.reshard(jax.shard_map(body, in_specs=lifted, out_specs=whole, check_vma=False)(x.lifted), x.partition)


def unbatched(f: Callable, ins: Any, outs: Any) -> Callable:
    """Return a shard_map of partial sums that, under `vmap`, raises an error that says what to write instead.

    Args:
        f: the shard_map.
        ins, outs: the partition specs of the operands and of the results of `f`.
    """
    partitions = jax.tree.leaves((ins, outs), is_leaf=_is_partition)
    axes = sorted({axis for partition in partitions for axis in (*partition.unreduced, *partition.reduced)})
    if not axes:
        return f
    over, refusing = ", ".join(axes), jax.custom_batching.custom_vmap(f)

    @refusing.def_vmap
    def refuse(size, batched, *arrays):
        raise PlanError(
            f"cannot vmap an equation with a partial sum over mesh axis {over} as an operand or result: under vmap\n"
            "  JAX loses the summands. Write the mapped dimension into the equation, as in\n"
            "  'ABE_x, E_xF -> ABF partialsum-x', or reduce the partial sum inside the equation."
        )

    def transposed(transpose, cotangents):
        try:
            # JAX's transpose divides the cotangent of a partial sum by the number of devices, and sums the devices'
            # contributions to the cotangent of an operand. Here both are undone.
            cotangents = jax.tree.map(partial(_times, 1), outs, cotangents, is_leaf=_is_partition)
            found = transpose(cotangents)
            each = (ins,) * len(found) if _is_partition(ins) else ins
            return tuple(_times(-1, partition, x) for partition, x in zip(each, found))
        except NotImplementedError:  # JAX has no rule for the type of this cotangent
            raise PlanError(
                f"cannot differentiate twice an equation with a partial sum over mesh axis {over} as an operand or"
                " result.\n"
                "  Use lowering='xla', or reduce the partial sum inside the equation."
            ) from None

    # JAX cannot differentiate a custom_vmap, so the gradient is defined as that of `f`.
    differentiable = jax.custom_vjp(lambda *arrays: refusing(*arrays))
    differentiable.defvjp(lambda *arrays: jax.vjp(f, *arrays), transposed)
    return differentiable


def _times(power: int, partition: jax.P, cotangents: Any) -> Any:
    """Multiply cotangents by the number of summands of a partial sum, or divide by this number if `power` is -1."""
    count = prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in partition.unreduced)
    return cotangents if count == 1 else jax.tree.map(lambda x: x * float(count) ** power, cotangents)


def _is_partition(leaf: Any) -> bool:
    return isinstance(leaf, jax.P)
