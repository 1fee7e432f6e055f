"""The experts as one planned program: slots are sent in chunks, and one chunk is multiplied while others are sent.

Lowering `looped` runs this program instead of two all-to-alls and the experts' equations. Dispatch `dropless` runs this
program under every lowering, because rows are sorted on the device that receives them, and no equation can express such
a sort.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import jax
from jax.ad_checkpoint import checkpoint_name

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.lowerings.blocking.collectives import emit
from gspmd.lowerings.blocking.executor import Executor
from gspmd.lowerings.program import Context, run
from gspmd.moe.dropless.rows import ReceivedRows
from gspmd.moe.experts.activation import ACTIVATIONS
from gspmd.moe.experts.dropout import KEY
from gspmd.moe.experts.exchange import Exchange
from gspmd.moe.experts.stages import ChunkedEquation
from gspmd.moe.experts.work import ExpertWork, Products, bias_gradient, biased, products, scaled
from gspmd.planner.steps import NumberedSteps
from gspmd.planner.unknown import is_unknown


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_experts(
    ctx: Context,
    work: ExpertWork,
    slots: jax.Array,
    weights: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...],
    extras: tuple[jax.Array, ...],
) -> jax.Array:
    """Send slots to their experts, compute, and send the outputs back.

    Each chunk has an all-to-all to the experts, the products, the collectives that reduce the products' partial sums,
    and an all-to-all back. Chunks share only weights and biases, which are gathered once, and whose gradients are
    reduced once. So a compiler's scheduler can send one chunk while it multiplies another. All chunks together send as
    many bytes as a single all-to-all of all slots.

    Args:
        ctx: the context of the call.
        work: the specs, sizes, chunks and dtypes of the experts' work.
        slots: the slots [G, X, C, E]; for dropless, rows [G, shards, C, E].
        weights: the weights, sharded as `work.weights`.
        biases: the float32 biases of the weights' products, sharded as `work.biases`; empty if there are none.
        extras: further arrays, in this order: for dropless, the counts of rows [G, X, chunks] int32; for int8 weights,
            their scales; for dropout, the two words of a random key.

    Returns:
        The outputs, in the shape and sharding of the slots.

    Source: Lepikhin et al., *GShard*, arXiv 2006.16668, §3.2; in chunks, Hwang et al., *Tutel*, arXiv 2206.03382.
    """
    return _forward(ctx, work, slots, weights, biases, extras)[0]


def _forward(ctx: Context, work: ExpertWork, slots, weights, biases, extras):
    found = _program(work, ctx)
    ins = (work.dispatched, *work.weights, *work.biases, *found.extras)
    outs = (work.dispatched, found.kept_specs, found.moved_specs)
    y, kept, moved = run(ctx, found.name, found.steps, found.forward, ins, outs, slots, *weights, *biases, *extras)
    # Moved weights have no name, so that under `jax.checkpoint` they are not kept but moved again: otherwise the moved
    # weights of all layers would be in memory.
    return checkpoint_name(y, "moe.answers"), (checkpoint_name(kept, "moe.hidden"), moved, weights, extras)


def _backward(ctx: Context, work: ExpertWork, saved, cotangent):
    if work.quantized:
        raise PlanError("cannot differentiate experts with int8 weights.\n  Differentiate the model before `quantize`.")
    kept, moved, weights, extras = saved
    found = _program(work, ctx)
    held = found.held(weights, moved)
    flat = [x for chunk in kept for x in chunk]
    ins = (work.dispatched, *(s for chunk in found.kept_specs for s in chunk), *found.held_specs, *found.extras)
    name = f"gradient of {found.name}"
    outs = (work.dispatched, *(spec.cotangent for spec in (*work.weights, *work.biases)))
    steps, count = found.backward_steps, len(work.weights)
    d_slots, *others = run(ctx, name, steps, found.backward, ins, outs, cotangent, *flat, *held, *extras)
    return d_slots, tuple(others[:count]), tuple(others[count:]), tuple(None for _ in extras)


run_experts.defvjp(_forward, _backward)


@lru_cache(maxsize=256)
def _program(work: ExpertWork, ctx: Context) -> "_Program":
    return _Program(work, ctx)


class _Program:
    """The program that computes the experts' outputs, and the program that computes the gradients."""

    def __init__(self, work: ExpertWork, ctx: Context):
        self.work, self.mesh, self.stays = work, ctx.mesh, work.stays(ctx)
        self.into, self.out = products(work, ctx)
        self.name = f"experts {work.dispatched} -> {work.there}"
        program = NumberedSteps()
        self.counted = program.add(work.counted(ctx))
        self.biases = [program.add(steps) for steps in work.biases_moved(ctx)]
        self.exchange = Exchange(work, ctx, program)
        runs = self._executors(ctx)
        self.stages = [self._stage(each.forward, program, run) for each, run in zip((self.into, self.out), runs[:2])]
        self.steps = tuple(program.steps)
        program = NumberedSteps()
        self.exchange_back = Exchange(work, ctx, program)
        self.stages_back = [
            self._stage(each.backward, program, run) for each, run in zip((self.into, self.out), runs[2:])
        ]
        self.biases_back = [program.add(steps) for steps in work.biases_summed(ctx)]
        self.backward_steps = tuple(program.steps)
        if is_unknown(ctx.mesh):  # in a trace for the search, products are marked instead of planned
            self.steps, self.backward_steps = (), ()

    def _stage(self, equation, program: NumberedSteps, executor: type[Executor]) -> ChunkedEquation:
        shares = [size / sum(self.work.chunks) for size in self.work.chunks]
        return ChunkedEquation(equation, dict(self.work.sizes), self.mesh, shares, program, executor)

    def _executors(self, ctx: Context) -> list[type[Executor]]:
        """Return four executor classes: one for each of the two equations, then one for the gradient of each."""
        if not is_unknown(ctx.mesh):
            return [Executor] * 4
        from gspmd.moe.experts.unknown import (
            marking,
            stage_marks,
        )  # imported here: only traces for the search have marks

        work, pairs = self.work, ((self.into, self.work.in_via), (self.out, self.work.out_via))
        marks = [stage_marks(each.plan, work.row_sizes, via, ctx) for each, via in pairs]
        return [marking(each[back]) for back in (0, 1) for each in marks]

    # -- inputs, and tensors kept for the gradient ---------------------------------------------------------------------

    @property
    def extras(self) -> tuple[Spec, ...]:
        """The specs of `extras` in `run_experts`: the counts of rows, the scales and the random key.

        A spec is left out if the program does not have the array.
        """
        counts, key = (self.work.counts[0],) * (self.work.rows is not None), (KEY,) * (self.work.dropout is not None)
        return counts + self.work.scales + key

    @property
    def kept_specs(self) -> tuple[tuple[Spec, ...], ...]:
        """For every chunk, the specs of the tensors that are kept for the gradient.

        First come the slots, as they are after their move to the product with the weights, and then the hidden
        activations before the nonlinearity. If the hidden activations are moved after the nonlinearity, the moved ones
        follow. For dropless, the counts of rows come last.
        """
        slots = [spec for source, spec, _ in self.into.kept if source == 0]
        hidden = [spec for source, spec, moved in self.out.kept if source == 0 and moved]
        counts = [self.work.counts[1].without("N")] if self.work.rows else []
        return ((*slots, *(self.work.hidden for _ in self.work.w_in), *hidden, *counts),) * len(self.work.chunks)

    @property
    def moved_specs(self) -> tuple[Spec, ...]:
        """The specs that the moved weights have after their moves."""
        return tuple(spec for _, _, spec, moved in self._weight_moves() if moved)

    @property
    def held_specs(self) -> tuple[Spec, ...]:
        """The specs of the weights as the gradient uses them, in the order of the moves."""
        return tuple(spec if moved else self.work.weights[n] for _, n, spec, moved in self._weight_moves())

    def held(self, weights: Sequence[jax.Array], moved: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the weights for the gradient: from `moved` if a weight is moved, and otherwise from `weights`."""
        moved = iter(moved)
        return [next(moved) if yes else weights[source] for _, source, _, yes in self._weight_moves()]

    def _weight_moves(self) -> list[tuple[int, int, Spec, bool]]:
        """List the moves of weights in both equations.

        Returns:
            For each move, its index in the equation, the index of the weight, the spec of the weight after the move,
            and whether the move changes the weight.
        """
        found = [(n, source - 1, spec, m) for n, (source, spec, m) in enumerate(self.into.kept) if source]
        last = len(self.work.w_in)
        return found + [(n, last, spec, m) for n, (source, spec, m) in enumerate(self.out.kept) if source]

    # -- the value -----------------------------------------------------------------------------------------------------

    def forward(self, slots: jax.Array, *rest: jax.Array):
        """Compute, on one device, the outputs, each chunk's tensors for the gradient, and the moved weights."""
        count = len(self.work.weights)
        weights, biases, extras = rest[:count], rest[count : count + len(self.biases)], rest[count + len(self.biases) :]
        counts = emit(self.counted, extras[0], self.mesh) if self.work.rows else None
        into, out = self.stages
        moved_in = into.weights(dict(enumerate(weights[:-1], 1)))
        moved_out = out.weights({1: weights[-1]})
        exchange, kept = self.exchange.start(slots), []
        first = int(self.work.rows is not None)
        none = (None,) * len(self.work.weights)
        scales = extras[first : first + len(self.work.scales)] or none
        added = [emit(chain, bias, self.mesh) for chain, bias in zip(self.biases, biases)] or none
        for number in range(len(self.work.chunks)):
            rows = self._rows(counts, number)
            sizes = None if rows is None else rows.sizes
            x = self._sorted(rows, exchange.dispatch(number))
            h, _, arrived = into.chunk(number, {0: x}, moved_in, sizes)
            origin = rows.origin() if rows and (self.work.quantized or self.biases) else None
            expert = origin and origin[1]
            affine = lambda x, n, expert=expert, origin=origin: biased(scaled(x, scales[n], expert), added[n], origin)  # noqa: E731
            hidden = tuple(affine(h[at], n) for n, at in enumerate(sorted(h)))
            h = self._activated(hidden, number, rows, extras)
            y, _, on = out.chunk(number, {0: h}, moved_out, sizes)
            exchange.combine(number, self._unsorted(rows, affine(y[0], -1)))
            behind = _of_slots(self.out, on, always=False)
            kept.append((*_of_slots(self.into, arrived, always=True), *hidden, *behind, *_counts(rows)))
        moved = (*_of_weights(self.into, moved_in), *_of_weights(self.out, moved_out))
        return exchange.result(), tuple(kept), moved

    def _rows(self, counts: jax.Array | None, number: int) -> ReceivedRows | None:
        return None if counts is None else ReceivedRows(counts[..., number], self.work.chunks[number], self.stays)

    def _sorted(self, rows: ReceivedRows | None, x: jax.Array) -> jax.Array:
        return x if rows is None else rows.sort(x)

    def _unsorted(self, rows: ReceivedRows | None, y: jax.Array) -> jax.Array:
        return y if rows is None else rows.unsort(y)

    def _activated(self, hidden: Sequence[jax.Array], number: int, rows: ReceivedRows | None, extras) -> jax.Array:
        h = ACTIVATIONS[self.work.activation](*hidden)
        if self.work.dropout is None:
            return h
        spec, dropout, words = self.work.hidden, self.work.dropout, extras[-1]
        if rows is not None:
            groups, experts = rows.counts.shape
            return dropout.scaled(h, dropout.of_rows(words, spec, h.shape, (groups, experts), rows.origin()[:3]))
        return dropout.scaled(h, dropout.of_slots(words, spec, h.shape, sum(self.work.chunks[:number])))

    # -- the gradient --------------------------------------------------------------------------------------------------

    def backward(self, cotangent: jax.Array, *rest: jax.Array):
        """Compute the cotangents of slots, weights and biases from the outputs' cotangent and the kept tensors."""
        sizes = [len(specs) for specs in self.kept_specs]
        flat, rest = rest[: sum(sizes)], rest[sum(sizes) :]
        held, extras = rest[: len(self.held_specs)], rest[len(self.held_specs) :]
        weights, exchange = self._weights_back(held), self.exchange_back.start(cotangent)
        sums: tuple[dict[int, jax.Array], ...] = ({}, {}, {})
        for number in range(len(self.work.chunks)):
            kept = flat[sum(sizes[:number]) : sum(sizes[: number + 1])]
            x, more = self._chunk_back(number, exchange.dispatch(number), kept, weights, extras)
            exchange.combine(number, x)
            for total, made in zip(sums, more):
                total.update({n: total[n] + value if n in total else value for n, value in made.items()})
        settled = [stage.settle(total) for stage, total in zip(self.stages_back, sums)]
        biases = (emit(chain, sums[-1][n], self.mesh) for n, chain in enumerate(self.biases_back))
        return (exchange.result(), *(each[n] for each in settled for n in sorted(each)), *biases)

    def _weights_back(self, held: Sequence[jax.Array]):
        """Return the weights of both equations, each moved to the placement that the gradients need."""
        count = len(self.work.w_in)
        moves = self._weight_moves()
        split = sum(source < count for _, source, _, _ in moves)
        into = {count + n: x for (n, *_), x in zip(moves[:split], held[:split])}
        out = {1 + n: x for (n, *_), x in zip(moves[split:], held[split:])}
        return tuple(stage.weights(each) for stage, each in zip(self.stages_back, (into, out)))

    def _chunk_back(self, number: int, g: jax.Array, kept: Sequence[jax.Array], weights, extras):
        """Compute the cotangent of a chunk's slots, and the chunk's contributions to the other gradients.

        `g` is the cotangent of the chunk's outputs.

        Returns:
            The cotangent of the slots, and three mappings. The first has products for the weight gradients of the first
            equation, the second has those of the second equation, and the third has the gradients of biases.
        """
        rows = ReceivedRows(kept[-1], self.work.chunks[number], self.stays) if self.work.rows else None
        arrived = [n for n, (source, *_) in enumerate(self.into.kept) if source == 0]
        on = [n for n, (source, *_) in enumerate(self.out.kept) if source == 0]
        slots, hidden = kept[: len(arrived)], kept[len(arrived) : len(arrived) + len(self.work.w_in)]
        moved = iter(kept[len(arrived) + len(hidden) :])
        sizes, (into, out) = None if rows is None else rows.sizes, self.stages_back
        g = self._sorted(rows, g)
        h, pull = jax.vjp(lambda *hidden: self._activated(hidden, number, rows, extras), *hidden)
        held = {1 + n: next(moved) if self.out.kept[n][2] else h for n in on}
        d_hidden, sums_out, _ = out.chunk(number, {0: g, **held}, weights[1], sizes)
        cotangents = dict(enumerate(pull(d_hidden[0])))
        sums_bias = {}
        if self.biases_back:
            sums_bias = {n: bias_gradient(d, sizes) for n, d in enumerate((*cotangents.values(), g))}
        held = {len(hidden) + n: x for n, x in zip(arrived, slots)}
        d_slots, sums_in, _ = into.chunk(number, cotangents | held, weights[0], sizes)
        return self._unsorted(rows, d_slots[0]), (sums_in, sums_out, sums_bias)


def _of_slots(equation: Products, moved: dict[int, jax.Array], *, always: bool) -> list[jax.Array]:
    """Return the slots or hidden activations of an equation after their moves.

    Unless `always` is True, only arrays that a move has changed are returned.
    """
    return [moved[n] for n, (source, _, yes) in enumerate(equation.kept) if source == 0 and (yes or always)]


def _of_weights(equation: Products, moved: dict[int, jax.Array]) -> list[jax.Array]:
    return [moved[n] for n, (source, _, yes) in enumerate(equation.kept) if source and yes]


def _counts(rows: ReceivedRows | None) -> tuple[jax.Array, ...]:
    return () if rows is None else (rows.counts,)
