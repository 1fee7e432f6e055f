"""The two ways to send tokens through the experts: in capacity slots or, dropless, in rows sorted by expert."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import jax
from jax.ad_checkpoint import checkpoint_name

from gspmd.annotate.equation import Equation
from gspmd.annotate.spec import Spec
from gspmd.layouts.section import SectionSpecs
from gspmd.lowerings.in_force import lowering
from gspmd.lowerings.program import Context, context
from gspmd.moe.config import MoEConfig
from gspmd.moe.dropless.rows import holders, most_rows, place_rows, place_rows_here
from gspmd.moe.experts.activation import ACTIVATIONS, GATED
from gspmd.moe.experts.chunks import chunks_of
from gspmd.moe.experts.dropout import Dropout, drop, key_words
from gspmd.moe.experts.program import run_experts
from gspmd.moe.experts.work import Buffers, ExpertWork, scaled
from gspmd.moe.local import run_local
from gspmd.moe.places import GroupedSpecs
from gspmd.moe.routers.routing import Routing
from gspmd.moe.slots import collect, from_slots, spread, to_slots
from gspmd.ops._bias import add_bias
from gspmd.ops._einsum import einsum, reshard


@dataclass(frozen=True)
class LayerExperts:
    """The experts of a layer: weights, specs and settings.

    Attributes:
        weights: "w_in", "w_out" and, for a gated activation, "w_gate". They have the tokens' dtype, or are int8 and
            come with their scales. If the products have biases, these are included.
        specs: the specs of the moe section of the layout.
        config: the configuration of the layer.
        activation: a name of `ACTIVATIONS` in `gspmd.moe.experts.activation`, such as "swiglu" or "gelu".
        key: the random key of expert dropout; None for no dropout.
    """

    weights: Mapping[str, jax.Array]
    specs: SectionSpecs
    config: MoEConfig
    activation: str
    key: jax.Array | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights that are used before the activation; the gate's weights come first."""
        return ("w_gate", "w_in") if self.activation in GATED else ("w_in",)

    @property
    def flat(self) -> tuple[jax.Array, ...]:
        """The weights of all products, in the order of `names`, with `w_out` last."""
        return (*(self.weights[name] for name in self.names), self.weights["w_out"])

    def work(self, x: jax.Array, capacity: int, places: GroupedSpecs) -> ExpertWork:
        """Return the work of the experts for tokens x [G, L, E], in groups with `capacity` slots per expert."""
        specs, (groups, tokens, size) = self.specs, x.shape
        experts, _, features = self.weights["w_in"].shape
        dropout = None if self.key is None else Dropout(self.config.dropout, tokens, features)
        sizes = {"G": groups, "X": experts, "C": capacity, "E": size, "F": features}
        return ExpertWork(
            places.dispatched,
            specs.expert_input,
            specs.hidden,
            tuple(getattr(specs, name) for name in self.names),
            specs.w_out,
            getattr(specs, "in_via", None),
            getattr(specs, "out_via", None),
            self.activation,
            tuple(sizes.items()),
            str(x.dtype),
            str(self.weights["w_in"].dtype),
            dropout=dropout,
            biases=tuple(spec for _, spec in self._beside("b")) if "b_out" in self.weights else (),
        )

    def _beside(self, kind: str) -> list[tuple[jax.Array, Spec]]:
        """Return the biases (kind "b") or the scales (kind "s") of all weights in order, each with its spec."""
        held = [(f"{kind}_{name.removeprefix('w_')}", self.specs.b_in) for name in self.names]
        return [(self.weights[name], spec) for name, spec in (*held, (f"{kind}_out", self.specs.b_out))]

    @property
    def biases(self) -> tuple[jax.Array, ...]:
        """The biases in the order of the weights, sharded as in the layout; empty if there are no biases."""
        return tuple(bias for bias, _ in self._beside("b")) if "b_out" in self.weights else ()

    def scales(self, work: ExpertWork) -> tuple[jax.Array, ...]:
        """Return the scales of int8 weights, sharded like the weights' products; empty if the weights are not int8."""
        if not work.quantized:
            return ()
        return tuple(
            reshard(scale, Equation.move(spec, used))
            for (scale, spec), used in zip(self._beside("s"), work.vector_specs)
        )

    @property
    def words(self) -> tuple[jax.Array, ...]:
        """One array with the two words of the random key of dropout; empty if there is no dropout."""
        return () if self.key is None else (key_words(self.key),)

    def run(self, work: ExpertWork, slots: jax.Array, *counts: jax.Array) -> jax.Array:
        """Send slots to the experts, compute, and send the outputs back, in one planned program.

        With dispatch "dropless", `slots` holds rows, and `counts` is one array with the number of rows of each expert.
        """
        extras = (*counts, *self.scales(work), *self.words)
        return run_experts(context(), work, slots, self.flat, self.biases, extras)


def by_slots(x: jax.Array, routing: Routing, experts: LayerExperts, places: GroupedSpecs) -> jax.Array:
    """Compute the layer for tokens [G, L, E] with capacity slots [G, X, C, E]; a choice without a slot adds 0."""
    capacity, config = experts.config.capacity(x.shape[1]), experts.config
    slots = _dispatch(x, routing, config, places)
    ctx, work = context(), experts.work(x, capacity, places)
    if ctx.lowering in ("xla", "blocking") or len(chunks := chunks_of(work, ctx)) == 1:
        answers = _by_equations(ctx, slots, experts, work)
    else:
        answers = experts.run(replace(work, chunks=chunks), slots)
    return _combine(answers, routing, config, places)


def _dispatch(x: jax.Array, routing: Routing, config: MoEConfig, places: GroupedSpecs) -> jax.Array:
    choices = places.per_group("LK")
    body = _dispatch_body(config.experts, config.capacity(x.shape[1]), config.dispatch, _whole())
    name, ins = f"dispatch {places.groups} -> {places.dispatched}", (places.groups, choices, choices, choices)
    (slots,) = run_local(name, body, ins, (places.dispatched,), x, routing.expert, routing.slot, routing.kept)
    return slots


def _whole() -> bool:
    """Return whether the body of `run_local` gets only the groups of one device.

    Under lowering `xla`, the body gets all groups, sharded over the devices.
    """
    return context().lowering != "xla"


@lru_cache
def _dispatch_body(experts: int, capacity: int, form: str, together: bool):
    def body(x, expert, slot, kept):
        routing = Routing(expert, slot, None, kept, {}, experts, capacity)
        return (to_slots(x, routing, experts, capacity, form, together),)

    return body


def _by_equations(ctx: Context, slots: jax.Array, experts: LayerExperts, work: ExpertWork) -> jax.Array:
    """Run the all-to-all to the experts, their feed-forward layer, and the all-to-all back as separate equations."""
    there, hidden = work.there, work.hidden
    slots = checkpoint_name(reshard(slots, Equation.move(work.dispatched, there)), "moe.slots")
    (*w_in, w_out), activated = experts.flat, ACTIVATIONS[work.activation]
    h = einsum(work.equation_in, slots, tuple(w_in) if len(w_in) > 1 else w_in[0], via=work.in_via)
    *s_in, s_out = experts.scales(work) or (None,) * (len(w_in) + 1)
    h = checkpoint_name(h if len(w_in) > 1 else (h,), "moe.hidden")
    *b_in, b_out = zip(experts.biases, work.biases) if work.biases else (None,) * (len(w_in) + 1)
    add = lambda x, bias, spec: x if bias is None else add_bias(x, bias[0], spec, bias[1])  # noqa: E731
    h = activated(*(add(scaled(x, scale), bias, hidden) for x, scale, bias in zip(h, s_in, b_in)))
    if work.dropout is not None:
        (words,) = experts.words
        h = drop(ctx, h, hidden, words, work.dropout)
    h = checkpoint_name(h, "moe.active")
    y = scaled(einsum(Equation.product(hidden, work.w_out, there), h, w_out, via=work.out_via), s_out)
    # The bias is also added to empty slots, which no token reads, and whose cotangents are 0.
    return checkpoint_name(reshard(add(y, b_out, there), Equation.move(there, work.dispatched)), "moe.answers")


def _combine(answers: jax.Array, routing: Routing, config: MoEConfig, places: GroupedSpecs) -> jax.Array:
    choices = places.per_group("LK")
    name, ins = f"combine {places.dispatched} -> {places.groups}", (places.dispatched, *(4 * (choices,)))
    arrays = answers, routing.expert, routing.slot, routing.gate, routing.kept
    body = _combine_body(config.experts, answers.shape[2], config.dispatch, _whole())
    (y,) = run_local(name, body, ins, (places.groups,), *arrays)
    return y


@lru_cache
def _combine_body(experts: int, capacity: int, form: str, together: bool):
    def body(answers, expert, slot, gate, kept):
        return (from_slots(answers, Routing(expert, slot, gate, kept, {}, experts, capacity), form, together),)

    return body


def by_rows(x: jax.Array, routing: Routing, experts: LayerExperts, places: GroupedSpecs) -> jax.Array:
    """Compute the layer for tokens [G, L, E] with one row per choice, sorted by expert; no token is dropped or padded.

    If experts are sharded, each group sends one buffer to each shard of the experts. The size of a buffer is static, so
    the buffer has room for the worst case, L · min(k, X / shards) rows. All buffers together have min(shards, X / k) /
    factor times the bytes of capacity slots, where factor is the capacity factor of the slots. A ragged all-to-all
    would send only the k · L rows of each group, but XLA has no such operation on CPUs. If every device holds all
    experts, nothing is sent.

    Lowering `xla` runs the same program, with planned collectives, because annotations of global arrays cannot express
    that each device sorts its own rows.

    Raises:
        LayoutError: the layout moves rows to other devices after they have arrived at their experts.
    """
    if context().lowering == "xla":
        with lowering("blocking"):
            return by_rows(x, routing, experts, places)
    ctx, (buffers, capacity) = context(), _buffers(x, routing, experts)
    work = replace(experts.work(x, capacity, places), rows=buffers)
    work = replace(work, chunks=chunks_of(work, ctx))
    form = _Sent(experts.config.experts, buffers.shards, work.chunks, work.stays(ctx), buffers.choices)
    choices, counts, spot = places.per_group("LK"), places.per_group("XN"), places.per_group("XC")
    name, ins = f"rows {places.groups} -> {places.dispatched}", (places.groups, choices, choices, choices)
    outs = (places.dispatched, counts, choices, spot)
    rows, count, place, holder = run_local(
        name, _sent_body(form), ins, outs, x, routing.expert, routing.slot, routing.kept
    )
    answers = experts.run(work, rows, count)
    name, ins = f"combine {places.dispatched} -> {places.groups}", (places.dispatched, choices, spot, choices)
    (y,) = run_local(name, _returned_body(form), ins, (places.groups,), answers, routing.gate, holder, place)
    return y


def _buffers(x: jax.Array, routing: Routing, experts: LayerExperts) -> tuple[Buffers, int]:
    mesh, spec = context().mesh, experts.specs.expert_input
    shards, count = prod(mesh[axis] for axis in spec.axes_of("X")), experts.config.experts
    spec.check((x.shape[0], count, *x.shape[1:]), mesh)
    choices = routing.expert.shape[-1]
    return Buffers(shards, choices), most_rows(x.shape[1], choices, count, shards)


@dataclass(frozen=True)
class _Sent:
    """The rules by which rows are placed in send buffers.

    Attributes:
        experts: the number of experts, X.
        shards: the number of devices over which X is sharded.
        chunks: the number of rows of a buffer that are in each chunk.
        stays: whether every device has all experts for its groups, so that nothing is sent.
        choices: the number of experts to which each token is sent, k.
    """

    experts: int
    shards: int
    chunks: tuple[int, ...]
    stays: bool
    choices: int

    def place(self, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Return each choice's row in the send buffers, and the number of rows of each expert, as `place_rows` does.

        If nothing is sent, the rows of all groups are sorted together, as `place_rows_here` does.
        """
        if self.stays:
            return place_rows_here(routing, self.experts)
        each = most_rows(1, self.choices, self.experts, self.shards)
        return place_rows(routing, self.experts, self.shards, tuple(size // each for size in self.chunks))


@lru_cache
def _sent_body(form: _Sent):
    def body(x, expert, slot, kept):
        place, counts = form.place(Routing(expert, slot, None, kept, {}))
        sent = x.reshape(len(place), -1, x.shape[-1])
        size = form.shards * sum(form.chunks) * len(x) // len(place)
        holder = holders(place, size)
        rows = spread(sent, holder, place)
        shape = (len(x), form.shards, sum(form.chunks))
        return rows.reshape(*shape, -1), counts, place.reshape(expert.shape), holder.reshape(shape)

    return body


@lru_cache
def _returned_body(form: _Sent):
    def body(answers, gate, holder, place):
        groups = 1 if form.stays else len(answers)
        whole = lambda array, width: array.reshape(groups, -1, *width)  # noqa: E731
        tokens = whole(gate, gate.shape[2:]), whole(holder, ()), whole(place, place.shape[2:])
        y = collect(whole(answers, answers.shape[3:]), *tokens)
        return (y.reshape(*gate.shape[:2], -1),)

    return body
