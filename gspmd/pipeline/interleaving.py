"""Send stacked layers to the stages that compute them; with several rounds, a stage computes several runs of layers.

Of N layers and S stages, stage q stores N/S consecutive layers, from layer q·N/S on. R rounds divide the layers into
R·S chunks, and stage s computes chunk r·S + s in round r. So each stage stores R chunks and computes R chunks. The
storing and the computing stages are the two sides of a bipartite graph, with one edge for each chunk to send. If no
vertex has more than D edges, the graph splits into D matchings (Kőnig), and each matching is one permute. So the number
of permutes is the largest number of chunks that any stage has to send.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gspmd.annotate.errors import PlanError, shown
from gspmd.annotate.spec import Spec
from gspmd.annotate.validation import whole
from gspmd.hardware.links import collective_seconds, wire_bytes
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.scopes import step_scope
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops.interface.planned_op import planned_op, read, shard_index
from gspmd.planner.steps import Step


class StageChunk(NamedTuple):
    """A chunk of layers: its position in the stage that stores it, and its round in the stage that computes it.

    Attributes:
        source: the stage that stores the chunk.
        place: the index of the chunk among the chunks that stage `source` stores.
        target: the stage that computes the chunk.
        round: the round in which the chunk is computed.
    """

    source: int
    place: int
    target: int
    round: int


def in_rounds(x: jax.Array, spec: str | Spec, rounds: int) -> jax.Array:
    """Send layers [N, ...] from the stages that store them to the stages that compute them in R rounds.

    The result has the form that `pipelined` expects for its argument `weights`.

    A chunk that the same stage stores and computes is not sent. The other chunks are sent by the smallest possible
    number of permutes of one chunk each, at most R - ⌊R/S⌋. The gradient returns in the same number of permutes.

    Args:
        x: [N, ...]; each of the S stages stores N/S consecutive layers.
        spec: the spec of x, such as `"N_pEF_x"`; its first dimension is sharded over the mesh axis of the stages.
        rounds: R, the number of chunks that a stage computes.

    Returns:
        [R, N/R, ...], the same layers in the same order; in each round a stage has N/(R·S) consecutive layers.

    Raises:
        SpecError: the spec does not fit the array or the mesh.
        PlanError: R·S does not divide N, or R is not a positive integer.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1, 1), ("p", "x"))):
        ...     print(in_rounds(gspmd.annotate(jnp.arange(6.0), "N_p"), "N_p", rounds=2))
        [[0. 1. 2.]
         [3. 4. 5.]]

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2, for the chunks; Kőnig 1916 for the matchings.
    Differs: in the paper a stage stores the chunks that it computes. Here layers are stored in order for any number of
        rounds, as in layouts without stages; the permutes are the cost of this order.
    """
    ctx = context()
    if (whole(rounds) or 0) < 1:
        raise PlanError(f"cannot bring layers '{spec}' into {shown(rounds)} rounds.\n  Give 1 or more.")
    spec = read(f"cannot bring layers '{spec}' into {rounds} rounds", spec, x, ctx, weight=True)
    stages = prod(ctx.mesh[axis] for axis in spec.axes[0])
    if x.shape[0] % (rounds * stages):
        raise PlanError(
            f"{x.shape[0]} stacked layers do not make {rounds} rounds of {stages} stages.\n"
            f"  Their number must be a multiple of {rounds * stages}."
        )
    form = _Interleaved(spec, rounds)
    if ctx.compiler_chooses and not spec.reduced:
        return left_to_compiler(ctx, form.split, (spec,), form.after, x, name=str(form))
    return _routed(form, ctx, x)


@dataclass(frozen=True)
class _Interleaved:
    spec: Spec
    rounds: int

    @property
    def after(self) -> Spec:
        letter = next(letter for letter in "RSABCDEFGHIJKLMNOPQTUVWXYZ" if letter not in self.spec.dims)
        return Spec((letter, *self.spec.dims), ((), *self.spec.axes), reduced=self.spec.reduced)

    def split(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.rounds, -1, *x.shape[1:])

    def __str__(self) -> str:
        return f"{self.spec} in {self.rounds} rounds"


def _send(form: _Interleaved, ctx: Context, x: jax.Array, *, back: bool) -> jax.Array:
    """Send layers [N, ...] to the stages that compute them, as [R, N/R, ...]; with `back`, send [R, N/R, ...] back."""
    before, after = (form.after.cotangent, form.spec.cotangent) if back else (form.spec, form.after)
    axes = tuple(axis for axis in form.spec.axes[0] if ctx.mesh[axis] > 1)
    stages = prod(ctx.mesh[axis] for axis in axes)
    chunk = prod(before.local_shape(x.shape, ctx.mesh)) // form.rounds * x.dtype.itemsize
    kind, sent = "collective-permute", wire_bytes("collective-permute", stages, chunk)
    step = Step(kind, axes, sent, collective_seconds(kind, axes, ctx.mesh, chunk, ctx.chip), before, after, "layers")
    steps = (step,) * (len(routes(stages, form.rounds)) - 1)
    name = f"{form}, back" if back else str(form)
    return run(ctx, name, steps, _body(axes, stages, form.rounds, step, back), (before,), after, x)


_routed = planned_op(
    lambda form, ctx, x: (_send(form, ctx, x, back=False), None),
    lambda form, ctx, _, cotangent: (_send(form, ctx, cotangent, back=True),),
    str,
)


@lru_cache(maxsize=1024)
def _body(axes: tuple[str, ...], stages: int, rounds: int, step: Step, back: bool) -> Callable[[jax.Array], jax.Array]:
    """Return a function that runs the permutes on one device.

    Functions are cached, so that equal permutes share one compiled program.
    """
    stay, *permutes = routes(stages, rounds)
    if back:
        stay, *permutes = (tuple(StageChunk(*each[2:], *each[:2]) for each in chunks) for chunks in (stay, *permutes))

    def body(piece: jax.Array) -> jax.Array:
        rest, here = piece.shape[1 + back :], shard_index(axes)
        stored = piece.reshape(rounds, -1, *rest)
        places = np.tile(np.arange(rounds), (stages, 1))
        for chunk in stay:
            places[chunk.target, chunk.round] = chunk.place
        made = jnp.stack([_at(stored, _of(places[:, number], here)) for number in range(rounds)])
        for number, chunks in enumerate(permutes):
            place, turn, receives = np.zeros((3, stages), np.int32)
            for chunk in chunks:
                place[chunk.source], turn[chunk.target], receives[chunk.target] = chunk.place, chunk.round, 1
            with step_scope(number, step):
                pairs = [(chunk.source, chunk.target) for chunk in chunks]
                sent = lax.ppermute(_at(stored, _of(place, here)), axes, pairs)
            at = _of(turn, here)
            received = jnp.where(_of(receives, here) == 1, sent, _at(made, at))
            made = lax.dynamic_update_index_in_dim(made, received, at, 0)
        return made.reshape(-1, *rest) if back else made

    return body


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _of(table: np.ndarray, stage: jax.Array | int) -> jax.Array:
    """Return the entry of one stage in a table of all stages."""
    return jnp.asarray(table, jnp.int32)[stage]


@lru_cache(maxsize=256)
def routes(stages: int, rounds: int) -> tuple[tuple[StageChunk, ...], ...]:
    """Return the chunks that are not sent, followed by the chunks of each permute.

    In a permute, a stage sends at most one chunk and receives at most one chunk.

    >>> stay, permute = routes(stages=2, rounds=2)
    >>> [(chunk.source, chunk.target) for chunk in permute]
    [(0, 1), (1, 0)]
    """
    chunks = [
        StageChunk(number // rounds, number % rounds, number % stages, number // stages)
        for number in range(rounds * stages)
    ]
    sent = [chunk for chunk in chunks if chunk.source != chunk.target]
    stay = tuple(chunk for chunk in chunks if chunk.source == chunk.target)
    found = matchings([(chunk.source, chunk.target) for chunk in sent])
    return stay, *(tuple(sent[number] for number in each) for each in found)


def matchings(edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Split the edges of a bipartite multigraph into as many matchings as the largest degree of its vertices.

    Args:
        edges: pairs (source, target); sources and targets are numbered separately.

    Returns:
        For each matching, the positions of its edges in `edges`.

    Example:
        >>> matchings([(0, 1), (0, 2), (1, 2)])
        [[0, 2], [1]]

    Source: Kőnig 1916. If the two ends of an edge are free in different matchings, swapping these matchings along a
        path makes one of the two matchings free at both ends of the edge.
    """
    ends = [((0, source), (1, target)) for source, target in edges]
    taken: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # for each vertex, its edge in each matching
    for number, (source, target) in enumerate(ends):
        one, other = (next(each for each in count() if each not in taken[end]) for end in (source, target))
        path, vertex, matching = [], target, one  # it never reaches the source, which has no edge in `one`
        while one != other and matching in taken[vertex]:
            edge = taken[vertex][matching]
            path.append((edge, matching))
            vertex = ends[edge][ends[edge][0] == vertex]
            matching = one + other - matching
        for edge, matching in path:
            for end in ends[edge]:
                del taken[end][matching]
        for edge, matching in path:
            for end in ends[edge]:
                taken[end][one + other - matching] = edge
        taken[source][one] = taken[target][one] = number
    most = max((max(each, default=-1) for each in taken.values()), default=-1) + 1
    return [sorted({each[matching] for each in taken.values() if matching in each}) for matching in range(most)]
