"""The common parts of planned operations between einsums: reading a spec, reducing a statistic, numbering a shard.

Planned operations (norm, softmax, embedding lookup, cross-entropy, ...) are functions that no single einsum expresses.
Each has one shard_map in its forward pass and one in its gradient, with exactly the collectives that its steps list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.annotate.arrays import refuse_elsewhere
from gspmd.annotate.errors import Fault, PlanError, SpecError, report, shown
from gspmd.annotate.spec import Spec
from gspmd.lowerings.blocking.collectives import emit
from gspmd.lowerings.partitioner import may_abort, open_in_shard_map, open_where_it_may_abort
from gspmd.lowerings.program import Context
from gspmd.lowerings.transformations.gradient import with_gradient
from gspmd.planner.graph.resharding import move
from gspmd.planner.steps import NumberedSteps, Step
from gspmd.planner.unknown import UnknownMove

FLOAT32 = 4
"""Number of bytes sent for each element of a statistic: statistics are float32, whatever the dtype of the operands."""

STATISTIC = "statistic"
"""The name by which `jax.checkpoint` can save statistics, which are small but need collectives to be recomputed."""


def read(
    doing: str, text: str | Spec, x: jax.Array | jax.ShapeDtypeStruct, ctx: Context, *, weight: bool = False
) -> Spec:
    """Read the spec of an operand.

    The spec must fit the array and must not be a partial sum. Only under lowering `xla` may it be open, which means
    that it leaves a dimension to the compiler (`E_?`).

    Args:
        doing: what is being done, for the beginning of an error message.
        text: the spec.
        x: the operand.
        ctx: the context of the call.
        weight: whether the operand is a weight, whose gradient is summed over rows. The spec of a weight may say that
            the gradient stays a partial sum, as in `E reduced-x`.

    Raises:
        SpecError: `text` is not a spec, or does not fit the array or the mesh; or the array is on another mesh or on
            other devices.
        PlanError: the spec is a partial sum; or it has `reduced`, and the operand is not a weight; or it is open, and
            the lowering is not `xla`, or the call is inside a shard_map, or XLA's partitioner may abort on the mesh.
    """
    spec = Spec.parse(text)
    spec.check(x.shape, ctx.mesh)
    refuse_elsewhere(x, spec, doing)
    faults = []
    if spec.partial:
        settled = spec.without_partial()
        fact = "this operation is not linear in its operand, so a partial sum cannot pass through it."
        faults.append(
            Fault(
                str(spec),
                str(spec).index("partialsum"),
                len(str(spec)),
                fact,
                f"Sum it first: gspmd.reshard(x, '{spec} -> {settled}').",
            )
        )
    if spec.reduced and not weight:
        fact = "only the gradient of a weight can stay a partial sum here."
        at = str(spec).index("reduced")
        faults.append(Fault(str(spec), at, len(str(spec)), fact, f"Write '{spec.without_partial()}'."))
    if spec.is_open and ctx.in_shard_map:
        raise PlanError(open_in_shard_map(spec))
    if spec.is_open and may_abort(ctx.mesh):
        raise PlanError(open_where_it_may_abort(spec, ctx.mesh))
    if spec.is_open and ctx.lowering != "xla":
        dim = next(dim for dim, axes in zip(spec.dims, spec.axes) if axes == ("?",))
        faults.append(
            fault(
                spec,
                dim,
                f"dimension {dim} is left open, but a plan needs its placement.",
                "Name its mesh axes, or use lowering 'xla'.",
            )
        )
    if faults:
        raise report(PlanError, doing, faults) from None
    return spec


def fault(spec: Spec, dim: str, fact: str, remedy: str = "") -> Fault:
    """Return a fault about dimension `dim` of a spec, which an error message marks with a caret."""
    at = spec.dims.index(dim)
    before, piece = (str(Spec(spec.dims[part], spec.axes[part])) for part in (slice(at), slice(at, at + 1)))
    return Fault(str(spec), len(before), len(before) + len(piece), fact, remedy)


def dimension(doing: str, spec: Spec, dim: str) -> int:
    """Return the index of a dimension that a caller names by its letter.

    Raises:
        SpecError: the spec does not have the dimension.
    """
    if not isinstance(dim, str) or dim not in spec.dims:
        fact = f"there is no dimension {dim if isinstance(dim, str) else shown(dim)}."
        whole = Fault(str(spec), 0, len(str(spec)), fact, f"Its dimensions are {', '.join(spec.dims)}.")
        raise report(SpecError, doing, [whole]) from None
    return spec.dims.index(dim)


def sizes_of(spec: Spec, shape: Sequence[int]) -> dict[str, int]:
    """Return the size of each dimension of the unsharded array, keyed by the dimension's letter."""
    return dict(zip(spec.dims, shape))


def settle(
    spec: Spec,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    ctx: Context,
    itemsize: int = FLOAT32,
    name: str = "",
    reduce: str = "sum",
) -> tuple[Step, ...]:
    """Return the steps that all-reduce a statistic over `axes`.

    Before these steps the statistic is a partial sum over `axes`, and after them its spec is `spec`.
    """
    return move(replace(spec, partial=tuple(axes)), spec, sizes, ctx.mesh, itemsize, ctx.chip, name, reduce)


def steps_of(what: UnknownMove, ctx: Context, name: str) -> tuple[Step, ...]:
    """Return the steps of a move whose specs have no unknowns; `name` is the name of the tensor in the plan."""
    (before,) = what.before
    sizes = sizes_of(before, what.shape)
    return move(before, what.after, sizes, ctx.mesh, what.itemsize, ctx.chip, name, what.reduce)


def planned_op(forward: Callable, backward: Callable, title: Callable[[Any], str]) -> Callable:
    """Make an operation whose gradient is planned.

    The backward pass runs in the context of the forward pass. Specs and options, which are everything else that a pass
    needs besides arrays, are in one argument, the form. The form holds nothing traced and is hashable. So each pass can
    cache its steps and its body with the form as the key, and `run` finds the program that is already compiled.

    Args:
        forward: (form, ctx, *arrays) -> (results, residuals).
        backward: (form, ctx, residuals, cotangents) -> a tuple with the cotangent of every array.
        title: a function from a form to its name in errors.

    Returns:
        A function (form, ctx, *arrays) -> results.
    """
    differentiated = with_gradient(
        lambda call, *arrays: forward(*call, *arrays),
        lambda call, residuals, cotangents: backward(*call, residuals, cotangents),
        lambda call: title(call[0]),
    )
    return lambda form, ctx, *arrays: differentiated((form, ctx), *arrays)


class Chains:
    """The planned steps of one program, as a chain of steps for each tensor that moves.

    The chains are given in the order in which they run.

    Example:
        >>> chains = Chains({"x": 2}, scale=(), squares=())
        >>> chains.steps
        ()
    """

    def __init__(self, mesh: Mapping[str, int], **chains: tuple[Step, ...]):
        program = NumberedSteps()
        self.mesh, self.chains = mesh, {name: program.add(steps) for name, steps in chains.items()}
        self.steps = tuple(program.steps)

    def send(self, name: str, x: jax.Array, *, reduce: str = "sum") -> jax.Array:
        """Run one chain on this device's shard, and return the result.

        The call must be inside a shard_map. Each chain must be run once, in the order in which the chains were given.

        Args:
            name: the name of the chain.
            x: the shard, in the dtype for which the chain was planned.
            reduce: the reduction for which the chain was planned.
        """
        return emit(self.chains[name], x, self.mesh, reduce=reduce)


def shard_index(axes: Sequence[str]) -> jax.Array | int:
    """Return the index of this device's shard of a dimension that is sharded over `axes`.

    `axes` lists the mesh axes from major to minor. The call must be inside a shard_map.
    """
    return jax.lax.axis_index(tuple(axes)) if axes else 0


def float32(x: jax.Array) -> jax.Array:
    """Return an array in float32."""
    return x.astype(jnp.float32)
