"""What JAX and XLA cannot do with an array that owes a sum: done in another way, or refused.

Under JAX 0.10.2 such an array cannot be stacked, so that a loop cannot keep it for its gradient; `vmap` cannot look at
its type; and as a constant of a loop it is settled by XLA when it enters, and then counted as every device's summand
(docs/compiler.md).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from gspmd.annotate.errors import PlanError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Stored:
    """An array that owes sums, as one that has a dimension for each: no device sends anything for that."""

    lifted: jax.Array
    partition: jax.P = field(metadata={"static": True})


def storable(name: str, forward: Callable, backward: Callable) -> tuple[Callable, Callable]:
    """The two rules of a `jax.custom_vjp`, with residuals that a loop can stack; refuses what a loop would count twice.

    Args:
        name: the equation.
        forward: from arrays to (results, residuals).
        backward: from (residuals, cotangents) to cotangents.
    """

    def storing(*arrays):
        results, held = forward(*arrays)
        if any(_owes(x) for x in jax.tree.leaves(results)):
            _refuse_constant_of_a_loop(name)
        return results, jax.tree.map(_stored, held)

    def restoring(*given):
        *settings, held, cotangents = given
        held = jax.tree.map(_restored, held, is_leaf=lambda leaf: isinstance(leaf, _Stored))
        return backward(*settings, held, cotangents)

    return storing, restoring


def _owes(x: Any) -> bool:
    return bool(jax.typeof(x).sharding.spec.unreduced)


def _stored(x: jax.Array) -> Any:
    if not _owes(x):
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
    # On one device JAX inlines a shard_map and refuses its partial sums; they are whole there, and typed after.
    whole = jax.P(*x.partition.partitions)
    return jax.reshard(jax.shard_map(body, in_specs=lifted, out_specs=whole, check_vma=False)(x.lifted), x.partition)


def unbatched(f: Callable, partitions: Sequence[jax.P]) -> Callable:
    """A function of arrays that, where sums are owed, refuses `vmap` and says what to write instead."""
    axes = sorted({axis for partition in partitions for axis in (*partition.unreduced, *partition.reduced)})
    if not axes:
        return f
    over, refusing = ", ".join(axes), jax.custom_batching.custom_vmap(f)

    @refusing.def_vmap
    def refuse(size, batched, *arrays):
        raise PlanError(
            f"cannot vmap an equation that takes or leaves a partial sum over mesh axis {over}: under vmap\n"
            "  JAX loses what is owed. Write the mapped dimension into the equation, as in\n"
            "  'ABE_x, E_xF -> ABF partialsum-x', or settle the sum inside the equation."
        )

    def transposed(transpose, cotangents):
        try:
            return transpose(cotangents)
        except NotImplementedError:  # JAX divides among devices what is owed
            raise PlanError(
                f"cannot differentiate twice an equation that takes or leaves a partial sum over mesh axis {over}.\n"
                "  Use lowering='xla', or settle the sum inside the equation."
            ) from None

    # JAX cannot differentiate what refuses, so a second derivative goes past it.
    differentiable = jax.custom_vjp(lambda *arrays: refusing(*arrays))
    differentiable.defvjp(lambda *arrays: jax.vjp(f, *arrays), transposed)
    return differentiable


_LOOP_RULES = ("_scan_jvp", "_scan_linearize")


def _refuse_constant_of_a_loop(name: str) -> None:
    """Refuse an equation that owes a sum, differentiated in a loop that adds the same sum at every step.

    JAX takes what does not depend on the loop's steps out of it, so that it comes back in as a constant, but only once
    the equation is traced, and tells nobody. What it will take out shows in the body, which its own rule for loops,
    further up the stack, is at work on.
    """
    frame = sys._getframe()
    while frame is not None:
        at_a_loop = frame.f_code.co_name in _LOOP_RULES
        if at_a_loop and _counted_twice(frame.f_locals["jaxpr"], frame.f_locals["num_consts"]):
            raise PlanError(
                f"cannot differentiate '{name}' in a loop that adds the same partial sum at every step: JAX computes\n"
                "  it before the loop, and XLA settles a partial sum that enters a loop so, and then sums it again.\n"
                "  Settle it in the equation itself, or compute it before the loop and settle it there."
            )
        frame = frame.f_back


def _counted_twice(jaxpr: Any, num_consts: int) -> bool:
    """Whether what changes in a loop's body meets a partial sum that does not."""
    inner = jaxpr.jaxpr
    met, varies = _meets(inner, [n >= num_consts for n in range(len(inner.invars))])
    return met or any(_owed(x) and not each for x, each in zip(inner.outvars, varies))


def _meets(jaxpr: Any, varies: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Whether some operation takes both what varies and a partial sum that does not; and which results vary."""
    varying = {var for var, each in zip(jaxpr.invars, varies) if each}
    for equation in jaxpr.eqns:
        depends = [_is_variable(x) and x in varying for x in equation.invars]
        if not any(depends):
            continue
        changed = [True] * len(equation.outvars)
        inners = [inner for inner in _inner(equation) if len(inner.invars) == len(depends)]
        for inner in inners:
            met, out = _meets(inner, depends)
            if met:
                return True, []
            if len(out) == len(changed) and equation.primitive.name not in ("scan", "while"):
                changed = out
        # A shard_map says how its operands lie, inside a loop too.
        alone = not inners and equation.primitive.name != "shard_map"
        if alone and any(_owed(x) and not each for x, each in zip(equation.invars, depends)):
            return True, []
        varying.update(var for var, each in zip(equation.outvars, changed) if each)
    return False, [_is_variable(x) and x in varying for x in jaxpr.outvars]


def _is_variable(x: Any) -> bool:
    return not hasattr(x, "val")  # a literal has a value


def _owed(x: Any) -> bool:
    return bool(getattr(getattr(x.aval, "sharding", None), "spec", jax.P()).unreduced)


def _inner(equation: Any) -> list[Any]:
    """The jaxprs that an operation calls; not a shard_map's, whose arrays are pieces."""
    held = [each for value in equation.params.values() for each in (value if isinstance(value, tuple) else (value,))]
    calls = [getattr(each, "jaxpr", each) for each in held if hasattr(each, "jaxpr") or hasattr(each, "eqns")]
    return [] if equation.primitive.name == "shard_map" else calls
