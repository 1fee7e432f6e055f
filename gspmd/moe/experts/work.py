"""The work of a layer's experts on slots of tokens: specs, sizes, chunks and plans."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import jax
import jax.numpy as jnp

from gspmd.annotate.equation import Equation, Via
from gspmd.annotate.errors import Fault, LayoutError, report
from gspmd.annotate.spec import Spec
from gspmd.hardware.dtypes import itemsize
from gspmd.lowerings.call import make_plan
from gspmd.lowerings.program import Context
from gspmd.moe.dropless.grouped import grouped_outer
from gspmd.moe.dropless.rows import RowSizes
from gspmd.moe.experts.dropout import Dropout
from gspmd.moe.experts.stages import StageEquation
from gspmd.planner.graph.resharding import move
from gspmd.planner.plan import Plan
from gspmd.planner.steps import Routine, Step, Tensor
from gspmd.planner.unknown import UnknownStep, UnknownSteps, is_unknown


@dataclass(frozen=True)
class Buffers:
    """Buffers of rows sorted by expert, in which an expert may have any number of rows.

    Attributes:
        shards: the number of buffers that a group sends: one for each shard of the experts.
        choices: the number of experts to which each token is sent, k.
    """

    shards: int
    choices: int


@dataclass(frozen=True)
class ExpertWork:
    """The work of a layer's experts: everything on which their program depends.

    Attributes:
        dispatched: the spec of slots before they are sent to the experts.
        there: the spec of slots after they have been sent to their experts.
        hidden: the spec of the hidden activations.
        w_in, w_out: the specs of the weights before and after the activation. For a gated activation, the first spec of
            `w_in` is that of the gate's weights.
        in_via, out_via: the lines `in_via` and `out_via` of the layout, or None.
        activation: a name of `ACTIVATIONS` in `gspmd.moe.experts.activation`, such as "swiglu" or "gelu".
        sizes: the sizes of G, X, C, E and F, where C is the capacity, or the number of rows in a buffer.
        dtype: the dtype of slots.
        weight_dtype: the dtype of the weights, which is the dtype of slots or int8.
        chunks: the sizes of the chunks into which C is cut.
        rows: the buffers of rows if dispatch is dropless, and otherwise None.
        dropout: the expert dropout of training, or None.
        biases: the specs of the biases of all weights' products, in the order of the weights; empty if there are none.
    """

    dispatched: Spec
    there: Spec
    hidden: Spec
    w_in: tuple[Spec, ...]
    w_out: Spec
    in_via: Via | None
    out_via: Via | None
    activation: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    weight_dtype: str
    chunks: tuple[int, ...] = ()
    rows: Buffers | None = None
    dropout: Dropout | None = None
    biases: tuple[Spec, ...] = ()

    @property
    def capacity(self) -> int:
        """C: the number of slots of an expert, or of rows in a buffer."""
        return dict(self.sizes)["C"]

    @property
    def weights(self) -> tuple[Spec, ...]:
        """The specs of all weights; the last is `w_out`."""
        return (*self.w_in, self.w_out)

    @property
    def quantized(self) -> bool:
        """Whether the weights are int8, so that their products are multiplied by scales."""
        return self.weight_dtype == "int8"

    @property
    def scales(self) -> tuple[Spec, ...]:
        """The specs that scales have when they multiply the products of int8 weights, in the order of the weights.

        There are none if the weights are not int8.
        """
        return self.vector_specs if self.quantized else ()

    @property
    def product_specs(self) -> tuple[Spec, ...]:
        """The specs of all weights' products, in the order of the weights."""
        return (*(self.hidden for _ in self.w_in), self.there)

    @property
    def vector_specs(self) -> tuple[Spec, ...]:
        """The specs that biases and scales have when they are applied to products, in the order of the weights."""
        return tuple(product.without("G", "C") for product in self.product_specs)

    @property
    def equation_in(self) -> Equation:
        """The equation of the slots and the weights `w_in`, which is a group if `w_in` has several weights."""
        if len(self.w_in) == 1:
            return Equation.product(self.there, self.w_in[0], self.hidden)
        return Equation.product(self.there, self.w_in, (self.hidden,) * len(self.w_in))

    @property
    def counts(self) -> tuple[Spec, Spec]:
        """The specs of the counts of rows [G, X, chunks] before and after they are sent."""
        before, after = (spec.without("C").without("E") for spec in (self.dispatched, self.there))
        return Spec((*before.dims, "N"), (*before.axes, ())), Spec((*after.dims, "N"), (*after.axes, ()))

    def slots(self, capacity: int) -> dict[str, int]:
        """Return the sizes of slots with this capacity; for dropless rows, X is the number of buffers."""
        return dict(self.sizes) | {"C": capacity} | ({"X": self.rows.shards} if self.rows else {})

    def there_and_back(self, ctx: Context, capacity: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Return the steps that send `capacity` slots to their experts, and the steps that send the outputs back."""
        if self.rows and is_unknown(ctx.mesh):
            return self._unknown("slots", ctx), self._unknown("answers", ctx)
        sizes, width = self.slots(capacity), itemsize(self.dtype)
        there = move(self.dispatched, self.there, sizes, ctx.mesh, width, ctx.chip, "slots")
        return there, move(self.there, self.dispatched, sizes, ctx.mesh, width, ctx.chip, "answers")

    def counted(self, ctx: Context) -> tuple[Step, ...]:
        """Return the steps that send the counts of rows; there are none for slots."""
        if self.rows and is_unknown(ctx.mesh):
            return self._unknown("counts", ctx)
        sizes = dict(self.sizes) | {"N": len(self.chunks)}
        return move(*self.counts, sizes, ctx.mesh, itemsize("int32"), ctx.chip, "counts") if self.rows else ()

    def biases_moved(self, ctx: Context) -> list[tuple[Step, ...]]:
        """Return the steps that move each bias to the product to which it is added."""
        return [self._bias_steps(ctx, held, used) for held, used in zip(self.biases, self.vector_specs)]

    def biases_summed(self, ctx: Context) -> list[tuple[Step, ...]]:
        """Return, for each bias, the steps that sum its gradient and move the sum to its spec.

        The gradient is summed over the mesh axes of G and C, which shard the rows to which the bias is added.
        """
        summed = [
            used.with_partial((*product.axes_of("G"), *product.axes_of("C")))
            for product, used in zip(self.product_specs, self.vector_specs)
        ]
        return [self._bias_steps(ctx, part, held.cotangent) for part, held in zip(summed, self.biases)]

    def _bias_steps(self, ctx: Context, before: Spec, after: Spec) -> tuple[Step, ...]:
        return move(before, after, dict(self.sizes), ctx.mesh, itemsize("float32"), ctx.chip, "bias")

    def _unknown(self, name: str, ctx: Context) -> tuple[Step, ...]:
        from gspmd.moe.experts.unknown import rows_sent  # imported here: only the search needs it

        asked = self.dispatched, self.there, self.row_sizes, self.dtype, ctx
        return (UnknownStep.of(UnknownSteps(rows_sent, asked, name), self.dispatched, self.there, name),)

    @property
    def row_sizes(self) -> RowSizes:
        """The `RowSizes` of this work, which give the sizes of buffers of rows for any sharding of the experts.

        They are correct only if this work's experts are not sharded, because C must be the size of a buffer without
        sharding.
        """
        assert self.rows is not None
        return RowSizes(self.sizes, self.rows.choices)

    def stays(self, ctx: Context) -> bool:
        """Return whether each device has all experts for its groups, so that rows are sorted without being sent."""
        before, after = (spec.without_trivial(ctx.mesh) for spec in (self.dispatched, self.there))
        return not after.axes_of("X") and before.axes_of("G") == after.axes_of("G")

    def crosses(self, ctx: Context) -> bool:
        """Return whether slots leave their device."""
        return any(step.is_collective for step in self.there_and_back(ctx, self.capacity)[0])


def scaled(x: jax.Array, scale: jax.Array | None, expert: jax.Array | None = None) -> jax.Array:
    """Multiply products with int8 weights, [G, X, C, F], by their scales [X, F] in float32.

    Args:
        x: the products [G, X, C, F].
        scale: the scales [X, F]. If None, x is returned unchanged.
        expert: the expert of each row if x holds rows [G, 1, C, F] sorted by expert, and otherwise None.
    """
    if scale is None:
        return x
    factor = scale[None, :, None] if expert is None else scale[expert].reshape(x.shape)
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def biased(x: jax.Array, bias: jax.Array | None, origin: Sequence[jax.Array] | None = None) -> jax.Array:
    """Add biases [X, F] to products [G, X, C, F], in the dtype of the products.

    Args:
        x: the products.
        bias: the biases [X, F]. If None, x is returned unchanged.
        origin: the result of `ReceivedRows.origin` if x holds rows [G, 1, C, F] sorted by expert, and otherwise None.
            Unused rows stay 0.
    """
    if bias is None:
        return x
    if origin is None:
        return x + bias[None, :, None].astype(x.dtype)
    _, expert, _, real = origin
    return x + jnp.where(real[:, None], bias[expert], 0).astype(x.dtype).reshape(x.shape)


def bias_gradient(g: jax.Array, sizes: jax.Array | None = None) -> jax.Array:
    """Sum the cotangents of products [G, X, C, F] over the rows of each expert, in float32: [X, F].

    Args:
        g: the cotangents.
        sizes: [X] int32, the number of rows of each expert if g holds rows [G, 1, C, F] sorted by expert, and otherwise
            None.
    """
    if sizes is None:
        return jnp.sum(g.astype(jnp.float32), axis=(0, 2))
    rows = g.reshape(-1, g.shape[-1])
    return grouped_outer(jnp.ones((len(rows), 1), g.dtype), rows, sizes)[:, 0]


@dataclass(frozen=True)
class Products:
    """An equation of the experts, and its gradient. Operand 0 is the slots, and all other operands are weights.

    Attributes:
        plan: the plan of the equation.
        buffers: the sizes of buffers if rows are moved instead of slots; empty for slots.
    """

    plan: Plan
    buffers: tuple[tuple[str, int], ...] = ()

    @property
    def kept(self) -> tuple[tuple[int, Spec, bool], ...]:
        """For every move, the index of its input, the spec after the move, and whether the move changes the input."""
        moves = is_unknown(self.plan.mesh)  # while placements are unknown, any operand may be moved
        return tuple(
            (m.source, spec, moves or bool(m.steps)) for m, spec in zip(self.plan.routine.moves, self.plan.kept)
        )

    @cached_property
    def forward(self) -> StageEquation:
        """The equation as a stage of the program."""
        inputs, outputs = self._tensors
        routine = self._moving(self.plan.routine, inputs, outputs)
        return StageEquation(routine, inputs, outputs, frozenset(range(1, len(inputs))))

    @cached_property
    def backward(self) -> StageEquation:
        """The gradient as a stage of the program.

        Its inputs are the cotangents, followed by the moved operands in the order of their moves.
        """
        inputs, outputs = self._tensors
        moves, first = self.plan.routine.moves, len(outputs)
        weights = frozenset(first + n for n, found in enumerate(moves) if found.source)
        held = (*outputs, *(inputs[found.source] for found in moves))
        routine = self._moving(self.plan.backward, held, inputs)
        return StageEquation(routine, held, inputs, weights, frozenset(range(1, len(inputs))))

    def _moving(self, routine: Routine, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Routine:
        """Return the routine with moves planned for buffers of rows.

        The moves are planned anew, because X in rows is the number of buffers, but X in weights is the number of
        experts.
        """
        if not self.buffers:
            return routine
        sizes, plan = dict(self.buffers), self.plan
        chain = lambda before, after, of: move(before, after, sizes, plan.mesh, of.itemsize, plan.chip, of.name)  # noqa: E731
        moves, products, sums = list(routine.moves), list(routine.products), list(routine.outputs)
        for n, found in enumerate(moves):
            if found.steps and "C" in found.spec.dims:
                moves[n] = replace(found, steps=chain(found.steps[0].before, found.spec, inputs[found.source]))
        for n, output in enumerate(sums):
            if "C" not in output.spec.dims:
                continue
            made = {products[p].einsum.after for p in output.products}
            # The parts of a sum are added before they are moved if they have the same spec, and otherwise afterwards.
            there = made.pop() if len(made) == 1 else output.spec
            for p in output.products:
                steps = chain(products[p].einsum.after, there, outputs[n])
                products[p] = replace(products[p], steps=steps, spec=there)
            sums[n] = replace(output, steps=chain(there, output.spec, outputs[n]))
        return replace(routine, moves=tuple(moves), products=tuple(products), outputs=tuple(sums))

    @property
    def _tensors(self):
        plan = self.plan
        return plan.inputs, plan.outputs


@lru_cache(maxsize=256)
def products(work: ExpertWork, ctx: Context) -> tuple[Products, Products]:
    """Plan the two equations of the experts, `slots, w_in -> hidden` and `hidden, w_out -> outputs`.

    Raises:
        LayoutError: an equation would exchange rows between devices.
    """
    return (
        _planned(work, ctx, work.equation_in, work.in_via, "moe.in_via"),
        _planned(work, ctx, Equation.product(work.hidden, work.w_out, work.there), work.out_via, "moe.out_via"),
    )


def _planned(work: ExpertWork, ctx: Context, equation: Equation, via: Via | None, line: str) -> Products:
    sizes = dict(work.sizes)
    if work.rows:  # planned as if all experts had equally many rows, rounded up
        sizes["C"] = -(-work.capacity * work.rows.shards // sizes["X"])
    dtypes = (work.dtype, *[work.weight_dtype] * (sum(len(operand.specs) for operand in equation.operands) - 1))
    planned = lambda via: make_plan(  # noqa: E731
        equation, tuple(sizes.items()), ctx.axes, dtypes, ctx.chip, "blocking", via
    )
    plan = planned(via)
    if not work.rows:
        return Products(plan)
    _refuse_exchange(work, plan, line)
    pinned = plan if via else planned(_pins(plan))  # pinned, since otherwise the gradient's plan might move rows
    return Products(pinned, tuple(work.slots(work.capacity).items()))


def _pins(plan: Plan) -> Via:
    """Return the specs to which a plan moves its operands, as a via."""
    specs = {found.source: found.spec for found in plan.routine.moves}
    first, *others = (specs[n] for n in sorted(specs))
    return Via.of(first, others if len(others) > 1 else others[0])


def _refuse_exchange(work: ExpertWork, plan: Plan, line: str) -> None:
    """Raise an error if a plan moves rows to other devices after their arrival, or shards the rows of one expert."""
    wanted = {dim: work.there.without_trivial(plan.mesh).axes_of(dim) for dim in "GXC"} | {"C": ()}
    einsums = [product.einsum for product in plan.routine.products]
    operands = [spec for einsum in einsums for spec in (einsum.before, einsum.other) if spec is not None]
    for spec in (spec.without_trivial(plan.mesh) for spec in (*operands, work.there, work.hidden)):
        wrong = [dim for dim in "GXC" if dim in spec.dims and spec.axes_of(dim) != wanted[dim]]
        if wrong:
            place = replace(work.there, axes=tuple(wanted.get(d, a) for d, a in zip(work.there.dims, work.there.axes)))
            raise report(
                LayoutError, f"cannot run '{plan.equation}' with dispatch 'dropless'", [_stay(spec, place, line)]
            )


def _stay(spec: Spec, place: Spec, line: str) -> Fault:
    fact = f"rows, sorted by expert, stay where they arrive: G, X and C must be sharded as in '{place}'."
    remedy = f"Change this spec, or fix it with {line} in the layout, or use dispatch 'sort'."
    return Fault(str(spec), 0, len(str(spec)), fact, remedy)
