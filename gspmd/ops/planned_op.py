"""What the planned forms between einsums share: reading a spec, settling a statistic, which shard this is.

A planned form (norm, softmax, embedding lookup, cross-entropy, ...) is a function that no single einsum expresses. Each
is one shard_map in its value and one in its gradient, with exactly the collectives that its steps list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import Fault, PlanError, SpecError, report, shown
from gspmd.annotate.spec import Spec
from gspmd.lowerings.blocking.collectives import emit
from gspmd.lowerings.program import Context
from gspmd.planner.resharding import move
from gspmd.planner.steps import Step

FLOAT32 = 4
"""Bytes of a statistic on the wire: norms, softmax and losses are float32 whatever the operands are."""


def read(doing: str, text: str | Spec, x: jax.Array, ctx: Context) -> Spec:
    """The spec of an operand, which has to fit the array, owe no partial sum, and be open only to the compiler.

    Raises:
        SpecError: the text is no spec, or does not fit the array or the mesh.
        PlanError: it owes a partial sum, or leaves a dimension open while the collectives are planned.
    """
    spec = Spec.parse(text)
    spec.check(x.shape, ctx.mesh)
    faults = []
    if spec.partial:
        settled = spec.without_partial()
        fact = "this is not linear in its operand, so a sum still owed cannot pass through it."
        faults.append(
            Fault(
                str(spec),
                str(spec).index("partialsum"),
                len(str(spec)),
                fact,
                f"Settle it before: gspmd.reshard(x, '{spec} -> {settled}').",
            )
        )
    if spec.is_open and ctx.lowering != "xla":
        dim = next(dim for dim, axes in zip(spec.dims, spec.axes) if axes == ("?",))
        faults.append(
            fault(
                spec,
                dim,
                f"dimension {dim} is left open, and a plan needs to know where it lies.",
                "Name its mesh axes, or use lowering 'xla'.",
            )
        )
    if faults:
        raise report(PlanError, doing, faults) from None
    return spec


def fault(spec: Spec, dim: str, fact: str, remedy: str = "") -> Fault:
    """A fault of one dimension of a spec, with the caret under it."""
    at = spec.dims.index(dim)
    before, piece = (str(Spec(spec.dims[part], spec.axes[part])) for part in (slice(at), slice(at, at + 1)))
    return Fault(str(spec), len(before), len(before) + len(piece), fact, remedy)


def dimension(doing: str, spec: Spec, dim: str) -> int:
    """The position of a dimension that a caller names by its letter.

    Raises:
        SpecError: the spec does not have it.
    """
    if not isinstance(dim, str) or dim not in spec.dims:
        fact = f"there is no dimension {dim if isinstance(dim, str) else shown(dim)}."
        whole = Fault(str(spec), 0, len(str(spec)), fact, f"Its dimensions are {', '.join(spec.dims)}.")
        raise report(SpecError, doing, [whole]) from None
    return spec.dims.index(dim)


def sizes_of(spec: Spec, shape: Sequence[int]) -> dict[str, int]:
    """The size of each dimension of the whole array, by letter."""
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
    """The steps after which every device has the whole of a statistic that lies as `spec` and is split over `axes`."""
    return move(replace(spec, partial=tuple(axes)), spec, sizes, ctx.mesh, itemsize, ctx.chip, name, reduce)


class Chains:
    """The steps of one program: a chain for each tensor that moves, in the order in which they run.

    Example:
        >>> chains = Chains({"x": 2}, scale=(), squares=())
        >>> chains.steps
        ()
    """

    def __init__(self, mesh: Mapping[str, int], **chains: tuple[Step, ...]):
        self.mesh, self.chains = mesh, chains
        self.steps = tuple(step for chain in chains.values() for step in chain)

    def send(self, name: str, x: jax.Array, *, reduce: str = "sum") -> jax.Array:
        """Run one chain on a device's piece, inside a shard_map."""
        names = list(self.chains)
        first = sum(len(self.chains[earlier]) for earlier in names[: names.index(name)])
        return emit(self.chains[name], x, self.mesh, reduce=reduce, first=first)


def shard_index(axes: Sequence[str]) -> jax.Array | int:
    """Which shard of a dimension this device holds, when `axes` shard it, major first. For use inside a shard_map."""
    return jax.lax.axis_index(tuple(axes)) if axes else 0


def float32(x: jax.Array) -> jax.Array:
    """The same numbers in float32."""
    return x.astype(jnp.float32)
