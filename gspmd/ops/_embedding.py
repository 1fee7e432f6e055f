"""Lookups of rows in a sharded table, which move ids, table and rows in the cheapest combination."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import permutations, product
from math import inf, prod
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.annotate.equation import Equation, parse_equation
from gspmd.annotate.errors import Fault, PlanError, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.hardware.chips import Chip
from gspmd.lowerings import in_force
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.planned_op import FLOAT32, Chains, fault, float32, planned_op, read, shard_index, sizes_of
from gspmd.planner.graph.resharding import cost, move
from gspmd.planner.steps import Step
from gspmd.planner.unknown import UnknownStep, UnknownSteps, is_unknown


def embed(
    ids: jax.Array, table: jax.Array, equation: str | Equation, *, scales: jax.Array | None = None, dtype: Any = None
) -> jax.Array:
    """Look up the rows of a table by ids: table[ids], multiplied by the rows' scales if there are any.

    During the lookup, a mesh axis may be unused, or it may shard the tokens, the vocabulary or the elements of a row.
    It can shard only those dimensions that it shards in at least one of the three specs. If a mesh axis shards the
    vocabulary, each device has zeros for the rows of other devices, and the result is a partial sum. The cheapest of
    these choices is used: the one that takes the least time, with ties broken by the fewest bytes and then by the
    fewest steps. The gradient of the table is planned separately, in the same way.

    Args:
        ids: [B, L] integers, or any shape.
        table: [V, E].
        equation: the specs of ids, table and result, such as `"B_xL, V_yE -> B_xLE_y"`.
        scales: [V] float32, a scale for each row of an int8 table, sharded like dimension V of the table. Before a
            device sends the rows that it has looked up, it multiplies each of them by its scale. A lookup with scales
            has no gradient.
        dtype: the dtype of the result of a lookup with scales; `scales` and `dtype` must be given together.

    Returns:
        [B, L, E] in the table's dtype, or in `dtype` for a lookup with scales. An id outside [0, V) gives a row of
        zeros.

    Raises:
        TypeError: `scales` is given without `dtype`, or `dtype` without `scales`.
        SpecError: the equation is not a lookup; or a spec does not fit its array or the mesh; or `scales` does not have
            one value for each row.
        PlanError: an operand or the result is a partial sum, or the sizes cannot be divided evenly over the mesh.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     ids = gspmd.annotate(jnp.array([[2, 0]]), "B_xL")
        ...     table = gspmd.annotate(jnp.arange(6.0).reshape(3, 2), "V_xE")
        ...     print(embed(ids, table, "B_xL, V_xE -> B_xLE"))
        [[[4. 5.]
          [0. 1.]]]

    Source: Shoeybi et al. 2019, *Megatron-LM* (arXiv 1909.08053), section 3, for the table sharded over the vocabulary.
    """
    ctx = context()
    equation = parse_equation(equation)
    doing = f"cannot look up '{equation}'"
    ids, table = array(doing, "ids", ids, "integers"), array(doing, "the table", table)
    lookup = _read(doing, equation, ids, table, ctx)
    if (scales is None) != (dtype is None):
        raise TypeError(
            f"{doing}: scales and dtype belong together. Give both for an int8 table, and neither for any other table."
        )
    form = _Embed(lookup, table.shape, table.dtype, None if dtype is None else jnp.dtype(dtype))
    rest = () if scales is None else (float32(array(doing, "the array of scales", scales, "real numbers")),)
    for x in (x for x in rest if x.shape != table.shape[:1]):
        fact = f"scales must have shape {table.shape[:1]}, one number per row, but the shape is {x.shape}."
        raise report(SpecError, doing, [fault(lookup.table, lookup.table.dims[0], fact)])
    # In a shard_map over some mesh axes, such as a stage of a pipeline, XLA aborts on some gathers that are sharded
    # over the other axes (docs/compiler.md). There, rows are looked up by a plan, even under lowering "xla".
    if ctx.compiler_chooses and not (lookup.table.reduced or ctx.in_shard_map):
        rows = partial(_rows, 0, form.scaled)
        return left_to_compiler(ctx, rows, form.specs, lookup.rows, ids, table, *rest, name=f"embed {lookup}")
    return _embed(form, ctx, ids, table, *rest)


@dataclass(frozen=True)
class Lookup:
    """The specs of ids, table and rows, which are the caller's specs or the specs during the lookup.

    During the lookup, the rows may be a partial sum.
    """

    ids: Spec
    table: Spec
    rows: Spec

    def without_trivial(self, mesh: Mapping[str, int]) -> "Lookup":
        """Return a copy in which no spec has a mesh axis of size 1."""
        return Lookup(*(spec.without_trivial(mesh) for spec in (self.ids, self.table, self.rows)))

    @property
    def scales(self) -> Spec:
        """The spec of the scales, one for each row of the table."""
        return self.table.without(self.table.dims[1])

    @property
    def partial_table(self) -> Spec:
        """The spec of the table's gradient before it is summed over devices.

        The gradient is then a partial sum over the mesh axes of the tokens.
        """
        return self.table.with_partial(tuple(axis for axes in self.ids.axes for axis in axes))

    def __str__(self) -> str:
        return f"{self.ids}, {self.table} -> {self.rows}"


def _read(doing: str, equation: Equation, ids: jax.Array, table: jax.Array, ctx: Context) -> Lookup:
    operands = [spec for operand in equation.operands for spec in operand.specs]
    if len(equation.terms) != 1 or len(operands) != 2 or len(equation.outputs) != 1:
        raise _not_a_lookup(doing, str(equation), "a lookup has two operands, the ids and the table, and one result.")
    lookup = Lookup(operands[0], operands[1], equation.outputs[0])
    if len(lookup.table.dims) != 2 or lookup.rows.dims != (*lookup.ids.dims, lookup.table.dims[1]):
        raise _not_a_lookup(
            doing,
            str(equation),
            "the result needs the dimensions of the ids, and then the second dimension of the table.",
        )
    rows: Any = jax.ShapeDtypeStruct((*ids.shape, *table.shape[1:]), table.dtype)
    for spec, x in ((lookup.ids, ids), (lookup.table, table), (lookup.rows, rows)):
        read(doing, spec, x, ctx, weight=x is table)
    return lookup


def _not_a_lookup(doing: str, text: str, fact: str) -> Exception:
    return report(SpecError, doing, [Fault(text, 0, len(text), fact, "Write it as in 'B_xL, V_yE -> B_xLE_y'.")])


def _rows(
    first: jax.Array | int, dtype: Any, ids: jax.Array, table: jax.Array, scales: jax.Array | None = None
) -> jax.Array:
    """Look up rows in the part of a table that starts at row `first` of the table.

    Ids of rows outside this part give zeros. If there are `scales`, the rows are multiplied by them and have the dtype
    `dtype`.
    """
    if ids.size == 1 and table.dtype.itemsize == 1 and in_force.is_tpu():
        # To look up one int8 row, libtpu 0.0.42 copies the whole table into another order (PaLM 8B: 132 MB, 845 µs on
        # a v4).
        return _rows(first, dtype, jnp.stack([ids, ids]), table, scales)[0]
    here = _wide(ids) - first
    inside, at = (here >= 0) & (here < table.shape[0]), jnp.clip(here, 0, table.shape[0] - 1)
    rows = table[at] if scales is None else (float32(table[at]) * scales[at][..., None]).astype(dtype)
    return jnp.where(inside[..., None], rows, jnp.zeros((), rows.dtype))


def _wide(ids: jax.Array) -> jax.Array:
    """Return the ids in a dtype of at least 32 bits, which can also hold the table's number of rows."""
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


@dataclass(frozen=True)
class Route:
    """The route of a lookup, which consists of the specs during the lookup and the steps to and from these specs.

    The specs are in `lookup`, and the steps of each tensor are in the field with its name. In a gradient, `rows` has
    the steps that move the cotangent to the placement in which its rows are summed, and `table` has the steps that move
    the table's gradient to the spec of the table.
    """

    lookup: Lookup
    ids: tuple[Step, ...]
    table: tuple[Step, ...]
    rows: tuple[Step, ...]
    scales: tuple[Step, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in the order in which a lookup runs them; a gradient runs the steps of the table last."""
        return (*self.ids, *self.table, *self.scales, *self.rows)


@lru_cache(maxsize=1024)
def route(
    given: Lookup, backward: bool, sizes: tuple[tuple[str, int], ...], widths: tuple[int, ...],
    mesh: tuple[tuple[str, int], ...], chip: Chip,
) -> Route:  # fmt: skip
    """Find the cheapest way to divide a lookup, or its gradient, over the mesh axes that the lookup's specs name.

    Args:
        given: the caller's specs of ids, table and rows.
        backward: whether to plan the gradient of the table instead of the lookup.
        sizes: the size of every dimension.
        widths: the number of bytes of one element, for ids, table, rows and, if the lookup has scales, for the scales.
        mesh: the size of every mesh axis.
        chip: the chip for whose links the seconds are computed.

    Raises:
        PlanError: the sizes cannot be divided evenly over the mesh axes.
    """
    bring = partial(move, sizes=dict(sizes), mesh=dict(mesh), chip=chip)
    price = partial(cost, sizes=dict(sizes), mesh=dict(mesh), chip=chip)
    costs: dict[Lookup, tuple[float, float]] = {}
    for division in _divisions(given, dict(sizes), dict(mesh)):
        with suppress(PlanError):  # a tensor has too many placements
            moves = _moves(given, division, backward, widths)
            total = sum(price(src, dst, itemsize=width, by=by) for src, dst, width, by, _ in moves)
            costs[division] = total.real, total.imag
    least = min(costs.values(), default=(inf, 0.0))
    if least[0] == inf:  # no even chain of collectives makes some move
        raise PlanError(f"cannot look up '{given}': the mesh axes cannot divide the sizes evenly.")
    best = min((division for division, total in costs.items() if total == least), key=str)
    moves = _moves(given, best, backward, widths)
    return Route(best, *(bring(src, dst, itemsize=width, operand=name) for src, dst, width, _, name in moves))


def _moves(
    given: Lookup, division: Lookup, backward: bool, widths: Sequence[int]
) -> Iterator[tuple[Spec, Spec, int, str, str]]:
    """Yield the moves of ids, table, rows and, if the lookup has scales, of the scales.

    Each move is a tuple of the source spec, the target spec, the number of bytes of an element, `"source"` or
    `"target"`, and the name of the tensor. The word `"source"` or `"target"` says which of the two is the caller's
    spec.
    """
    id_bytes, table_bytes, row_bytes, *scale = widths
    yield given.ids, division.ids, id_bytes, "source", "ids"
    if backward:
        yield division.partial_table, given.table.cotangent, table_bytes, "target", "gradient of table"
        yield given.rows, division.rows.without_partial(), row_bytes, "source", "cotangent"
    else:
        yield given.table, division.table, table_bytes, "source", "table"
        yield division.rows, given.rows, row_bytes, "target", "result"
        for width in scale:
            yield given.scales, division.scales, width, "source", "scales"


def _divisions(given: Lookup, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> Iterator[Lookup]:
    """Yield the specs of all ways to shard a lookup.

    A mesh axis is unused during the lookup, or it shards a dimension that it also shards in one of the caller's specs.
    """
    specs = (given.ids, given.table, given.rows)
    axes = [axis for axis in mesh if any(axis in spec.used for spec in specs)]
    homes = [sorted({dim for spec in specs for dim in spec.dims if axis in spec.axes_of(dim)}) for axis in axes]
    for choice in product(*([*dims, None] for dims in homes)):
        chosen = {dim: [axis for axis, home in zip(axes, choice) if home == dim] for dim in sizes}
        if all(sizes[dim] % prod(mesh[axis] for axis in held) == 0 for dim, held in chosen.items()):
            # Every order of the mesh axes: with an order that no spec has, two moves may take fewer seconds together.
            for orders in product(*(permutations(held) for held in chosen.values())):
                yield _placed(given, dict(zip(chosen, orders)))


def _placed(given: Lookup, held: Mapping[str, tuple[str, ...]]) -> Lookup:
    specs = (given.ids, given.table, given.rows)
    ids, table, rows = (Spec(spec.dims, tuple(held[dim] for dim in spec.dims)) for spec in specs)
    return Lookup(ids, table, rows.with_partial(table.axes[0]))


@dataclass(frozen=True)
class _Embed:
    given: Lookup
    shape: tuple[int, ...]
    """The shape of the table; apart from this shape and `dtype`, the gradient needs nothing from the table."""
    dtype: jnp.dtype
    scaled: jnp.dtype | None
    """The dtype of the rows if they are multiplied by scales, or None if there are no scales."""

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of the operands."""
        operands = self.given.ids, self.given.table
        return operands if self.scaled is None else (*operands, self.given.scales)

    def route(self, ids: tuple[int, ...], id_bytes: int, ctx: Context, *, backward: bool) -> Route:
        sizes = sizes_of(self.given.ids, ids) | sizes_of(self.given.table, self.shape)
        widths = (id_bytes, self.dtype.itemsize, (self.scaled or self.dtype).itemsize)
        widths += () if self.scaled is None else (FLOAT32,)
        asked = self.given, backward, tuple(sizes.items()), widths
        if not is_unknown(ctx.mesh):
            return route(*asked, tuple(ctx.mesh.items()), ctx.chip)
        beside = self.given.rows.without(self.given.rows.dims[-1])
        # Ids cost almost nothing to move, and another placement of them would add a choice to the search.
        if self.given.ids != beside:
            raise PlanError(
                f"cannot search with ids '{self.given.ids}' that are not sharded like the rows, '{beside}'."
            )
        # The search also chooses the route, so one mark stands for all steps of a tensor.
        chains = {
            name: (UnknownStep.of(UnknownSteps(routed, (*asked, ctx), name), spec, spec),)
            for name, spec in (("ids", self.given.ids), ("table", self.given.table), ("rows", self.given.rows))
        }
        return Route(self.given.without_trivial(ctx.mesh), **chains)


def routed(given: Lookup, backward: bool, sizes: tuple, widths: tuple[int, ...], ctx: Context):
    """Return the steps of a lookup whose specs have no unknowns, keyed by the name of the tensor.

    The steps of the scales come with those of the table.
    """
    found = route(given, backward, sizes, widths, tuple(ctx.mesh.items()), ctx.chip)
    return {"ids": found.ids, "table": (*found.table, *found.scales), "rows": found.rows}


def _forward(form: _Embed, ctx: Context, ids: jax.Array, *tables: jax.Array):
    steps, body = _value(form, ids.shape, ids.dtype.itemsize, ctx)
    return run(ctx, f"embed {form.given}", steps, body, form.specs, form.given.rows, ids, *tables), ids


def _backward(form: _Embed, ctx: Context, ids: jax.Array, g: jax.Array):
    given = form.given
    if form.scaled is not None:
        raise PlanError(f"cannot differentiate the lookup '{given}': rows of an int8 table have no gradient.")
    steps, body = _gradient(form, ids.shape, ids.dtype.itemsize, ctx)
    name, ins = f"gradient of embed {given}", (given.ids, given.rows)
    return None, run(ctx, name, steps, body, ins, given.table.cotangent, ids, g)


_embed = planned_op(_forward, _backward, lambda form: f"embed {form.given}")


@lru_cache(maxsize=1024)
def _value(form: _Embed, shape: tuple[int, ...], id_bytes: int, ctx: Context):
    found = form.route(shape, id_bytes, ctx, backward=False)
    chains = Chains(ctx.mesh, ids=found.ids, table=found.table, scales=found.scales, rows=found.rows)

    def body(ids, table, *scales):
        ids, table = chains.send("ids", ids), chains.send("table", table)
        scales = [chains.send("scales", each) for each in scales]
        first = shard_index(found.lookup.table.axes[0]) * table.shape[0]
        return chains.send("rows", _rows(first, form.scaled, ids, table, *scales))

    return chains.steps, body


@lru_cache(maxsize=1024)
def _gradient(form: _Embed, shape: tuple[int, ...], id_bytes: int, ctx: Context):
    found = form.route(shape, id_bytes, ctx, backward=True)
    chains = Chains(ctx.mesh, ids=found.ids, rows=found.rows, table=found.table)
    part = found.lookup.table.local_shape(form.shape, ctx.mesh)

    def body(ids, g):
        here = _wide(chains.send("ids", ids)) - shard_index(found.lookup.table.axes[0]) * part[0]
        here = jnp.where((here >= 0) & (here < part[0]), here, part[0])  # the scatter drops the index after the last
        # Summed in float32: a token may occur in the text thousands of times.
        rows = float32(chains.send("rows", g))
        total = jnp.zeros(part, jnp.float32).at[here].add(rows, mode="drop")
        return chains.send("table", total.astype(form.dtype))

    return chains.steps, body
