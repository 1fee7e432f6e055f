"""The products of a model with every placement of their operands, results and gradients, priced at once.

    left, (weight 1, weight 2, ...) -> (result 1, result 2, ...)

A *via* is a joint placement in which the operands are multiplied. Given the via, what is left is moving: each operand
to it, each result from it, and in the backward pass, which mirrors the via, each cotangent to it and each gradient from
it. So the seconds of a product are a sum of one table for each tensor,

    seconds(left, via) + Σ seconds(weight, via) + Σ seconds(via, result)

and the tables are look-ups in the planner's shortest paths. They equal what `gspmd.plan` says of the equation with that
via, forward and backward, to the picosecond.

Source: Pope et al. 2022 (arXiv 2211.05102), section 3.2, for a layout as specs and the placement of its products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from gspmd.annotate.equation import Via
from gspmd.annotate.spec import Spec
from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.links import einsum_seconds
from gspmd.planner.graph.placements import numbered, parts_of, placements, sequences
from gspmd.planner.steps import Environment, picoseconds
from gspmd.search.moves import Moves, allowed


@dataclass(frozen=True)
class Operand:
    """A tensor of a product.

    Attributes:
        dims: its dimensions.
        dtype: what it is held in.
        options: where it may lie.
        gradients: where its gradient is wanted, for each option; None for the same places.
        invariant: of a weight, whether its product runs in a loop in which it stays the same, so that the first steps
            of its move run once: `Product.seconds_of_weight` is without them, and `Product.seconds_once` has them.
    """

    dims: tuple[str, ...]
    dtype: str
    options: tuple[Spec, ...]
    gradients: tuple[Spec, ...] | None = None
    invariant: bool = False


@dataclass(frozen=True)
class Member:
    """One weight of a product and its result.

    Attributes:
        weight, result: the two tensors.
        copies: how many are alike, as the two weights of a gated layer.
        whole: dimensions that no via of it shards.
    """

    weight: Operand
    result: Operand
    copies: int = 1
    whole: str = ""


@dataclass(frozen=True)
class Passes:
    """How often what runs in a training step, for each time that the product's layer does.

    Attributes:
        moves: of operands to the via: 1 forward, 1 more where the backward pass computes them again.
        results: of local products and of results from the via.
        backward: of everything in the gradient; 0 where nothing is trained.
    """

    moves: int = 1
    results: int = 1
    backward: int = 0


class Product:
    """All placements of a product.

    Args:
        environment: mesh, chip and the sizes of all dimensions.
        left: the common operand.
        members: weights and results.
        passes: how often each part runs.
        travels: of the left operand and the results where they move, if they are of another shape there; None for the
            same.

    Attributes:
        vias: for each via, the number of a joint placement of every member.
    """

    def __init__(
        self,
        environment: Environment,
        left: Operand,
        members: Sequence[Member],
        passes: Passes = Passes(),
        travels: Environment | None = None,
    ):
        self.environment, self.left, self.passes = environment, left, passes
        self.members = tuple(_Joint(environment, left, member, travels or environment) for member in members)
        self.vias = _together([joint.left_nodes for joint in self.members])
        self._written: dict[int, list[Via]] = {}

    def forward(self) -> "Product":
        """The same product, run once and forward alone."""
        return Product(self.environment, self.left, [joint.member for joint in self.members])

    def via(self, number: int) -> list[Via]:
        """The via of every member, as a layout writes it."""
        if number not in self._written:
            self._written[number] = [joint.via(int(row)) for joint, row in zip(self.members, self.vias[number])]
        return self._written[number]

    def number(self, vias: Sequence[Via]) -> int:
        """The number of a via, given as `via` returns it; -1 of one that is none."""
        rows = [joint.row(via) for joint, via in zip(self.members, vias)]
        return next(iter(np.flatnonzero((self.vias == rows).all(axis=1)).tolist()), -1)

    @cached_property
    def seconds_of_left(self) -> np.ndarray:
        """[left, via] seconds: to the via, and the left operand's gradient from it."""
        first = self.members[0]
        own, nodes = first.left, first.left_nodes[self.vias[:, 0]]
        options = own.numbers(self.left.options)
        table = self.passes.moves * own.between(options, nodes, by="sources")
        if self.passes.backward:
            table = table + self.passes.backward * self._summed_gradient(options)
        return table

    def _summed_gradient(self, options: np.ndarray) -> np.ndarray:
        """[left, via] seconds to add up the parts of the left operand's gradient and to bring the sum home."""
        gradients = self.members[0].left
        made = np.stack([joint.gradient_nodes[rows] for joint, rows in zip(self.members, self.vias.T)])
        copies = [joint.member.copies for joint in self.members]
        if sum(copies) == 1 or (made == made[0]).all():
            return gradients.between(made[0], options, by="targets").T
        home = gradients.between(np.arange(len(gradients.paths.nodes)), options, by="targets")  # [common, left]
        kinds, kind = np.unique(made, axis=1, return_inverse=True)
        each = [gradients.between(of_member, np.arange(len(home)), by="sources") for of_member in kinds]
        brought = sum(count * table for count, table in zip(copies, each))  # [kind, common]
        least = np.stack([(brought + to_option).min(axis=1) for to_option in home.T])
        return least[:, kind.ravel()]

    def seconds_of_weight(self, member: int) -> np.ndarray:
        """[weight, via] seconds of one member: to the via, and the weight's gradient from it."""
        of = self.members[member].member
        table = self.passes.moves * self.weight_moves(member)
        if self.passes.backward:
            table = table + self.passes.backward * self.gradient_moves(member)
        return of.copies * table - (self.seconds_once(member) if of.weight.invariant else 0.0)

    def seconds_once(self, member: int) -> np.ndarray:
        """[weight, via] seconds of the first steps of one member's weight to the via, which a loop takes once."""
        return self.members[member].member.copies * self.passes.moves * self.hoisted_moves(member)

    def seconds_of_result(self, member: int) -> np.ndarray:
        """[result, via] seconds of one member: the local products, the result from the via, its cotangent to it."""
        joint, passes = self.members[member], self.passes
        table = passes.results * self.result_moves(member)
        if passes.backward:
            table = table + passes.backward * self.cotangent_moves(member)
        local = passes.results * joint.forward + passes.backward * joint.backward
        return joint.member.copies * (table + local[self.vias[:, member]])

    def bytes_of_weight(self, member: int) -> np.ndarray:
        """[weight, via] bytes of one member that a device holds at the via, beyond what it holds of the weight."""
        joint, rows = self.members[member], self.vias[:, member]
        weight, whole = joint.member.weight, joint.weight.shape
        parts = np.array(parts_of(joint.counts))
        held = np.prod(whole, dtype=float) / np.prod(parts[joint.masks_of(weight.dims)[rows]], axis=1)
        mesh = dict(self.environment.mesh)
        stored = np.array(
            [np.prod(whole, dtype=float) / prod(mesh[a] for a in spec.used if a in mesh) for spec in weight.options]
        )
        extra = np.maximum(held[None, :] - stored[:, None], 0.0)
        return joint.member.copies * itemsize(weight.dtype) * extra

    # -- single moves -------------------------------------------------------------------------------------------------

    def weight_moves(self, member: int = 0) -> np.ndarray:
        """[weight, via] seconds of one member's weight to the via."""
        joint, rows = self.members[member], self.vias[:, member]
        options = joint.weight.numbers(joint.member.weight.options)
        return joint.weight.between(options, joint.weight_nodes[rows], by="sources")

    def hoisted_moves(self, member: int = 0) -> np.ndarray:
        """[weight, via] seconds of the first steps of these moves, which do not enlarge the weight."""
        joint, rows = self.members[member], self.vias[:, member]
        return joint.weight.hoisted(joint.weight.numbers(joint.member.weight.options), joint.weight_nodes[rows])

    def gradient_moves(self, member: int = 0) -> np.ndarray:
        """[weight, via] seconds of one member's weight gradient from the via."""
        joint, rows = self.members[member], self.vias[:, member]
        weight = joint.member.weight
        targets = joint.weight.numbers(weight.gradients or weight.options)
        return joint.weight.between(joint.weight_gradient_nodes[rows], targets, by="targets").T

    def result_moves(self, member: int = 0) -> np.ndarray:
        """[result, via] seconds of one member's result from the via."""
        joint, rows = self.members[member], self.vias[:, member]
        options = joint.result.numbers(joint.member.result.options)
        return joint.result.between(joint.result_nodes[rows], options, by="targets").T

    def cotangent_moves(self, member: int = 0) -> np.ndarray:
        """[result, via] seconds of one member's cotangent to the via."""
        joint, rows = self.members[member], self.vias[:, member]
        options = joint.result.numbers(joint.member.result.options)
        return joint.result.between(options, joint.mirror_nodes[rows], by="sources")

    def elsewhere(self, specs: Sequence[Spec]) -> np.ndarray:
        """[spec, via] the mesh axes, as masks, that a via has on a dimension where the spec does not have them."""
        joint, axes = self.members[0], [axis for axis, _ in self.environment.mesh]
        masks, found = joint.masks[self.vias[:, 0]], []
        for spec in specs:
            held = {dim: sum(1 << axes.index(a) for a in spec.axes_of(dim) if a in axes) for dim in spec.dims}
            found.append(sum(masks[:, n] & ~held.get(dim, 0) for n, dim in enumerate(joint.dims)))
        return np.stack(found)


def least_apart(
    left: np.ndarray, right: np.ndarray, elsewhere: np.ndarray, other: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[i, j] least over vias of left[i] + right[j], each mesh axis where one of the two has it; and the vias."""
    vias = np.empty((len(left), len(right)), int)
    seconds = np.empty(vias.shape)
    for number, (row, refused) in enumerate(zip(left, elsewhere)):
        sums = np.where(refused & other, np.inf, row + right)
        vias[number], seconds[number] = sums.argmin(axis=1), sums.min(axis=1)
    return seconds, vias


class _Joint:
    """The joint placements of the left operand and one weight: a row for each."""

    def __init__(self, environment: Environment, left: Operand, member: Member, travels: Environment):
        self.environment, self.member, sizes = environment, member, dict(environment.sizes)
        weight, result = member.weight, member.result
        self.dims = tuple(dict.fromkeys((*left.dims, *weight.dims)))
        self._axes, counts = zip(*environment.mesh) if environment.mesh else ((), ())
        self.counts = counts
        self.rows, _, _ = placements(len(counts), allowed(self.dims, sizes, counts, member.whole), [])
        self.masks = sequences(len(counts)).mask[self.rows]
        self.left, self.result = (Moves(travels, each.dims, each.dtype) for each in (left, result))
        self.weight = Moves(environment, weight.dims, weight.dtype)
        self._local_sizes = [sizes[dim] for dim in self.dims]
        self._tensors = {"left": left, "weight": weight, "result": result}
        self.left_nodes, self.weight_nodes = self._nodes(self.left, ()), self._nodes(self.weight, ())
        self.result_nodes = self._nodes(self.result, self._without(result))
        self.mirror_nodes = self._nodes(self.result, ())
        self.gradient_nodes = self._nodes(self.left, self._without(left))
        self.weight_gradient_nodes = self._nodes(self.weight, self._without(weight))

    def _without(self, operand: Operand) -> list[int]:
        """The dimensions that are summed over where this tensor is made."""
        return [n for n, dim in enumerate(self.dims) if dim not in operand.dims]

    def _nodes(self, tensor: Moves, summed: Sequence[int]) -> np.ndarray:
        partial = np.bitwise_or.reduce(self.masks[:, list(summed)], axis=1) if summed else 0
        return tensor.nodes([self.rows[:, self.dims.index(dim)] for dim in tensor.dims], partial)

    def masks_of(self, dims: Sequence[str]) -> np.ndarray:
        """[row, dimension] the mesh axes on these dimensions, as masks."""
        return self.masks[:, [self.dims.index(dim) for dim in dims]]

    def via(self, row: int) -> Via:
        return Via.of(*(self._spec(row, self._tensors[name].dims) for name in ("left", "weight")))

    def row(self, via: Via) -> int:
        left, weight = (spec.without_trivial(dict(self.environment.mesh)) for spec in via.specs)
        order, axes = sequences(len(self.counts)).number, {}
        for spec in (left, weight):
            axes |= {dim: order[tuple(map(self._axes.index, spec.axes_of(dim)))] for dim in spec.dims}
        wanted = [axes[dim] for dim in self.dims]
        return next(iter(np.flatnonzero((self.rows == wanted).all(axis=1)).tolist()), -1)

    def _spec(self, row: int, dims: tuple[str, ...]) -> Spec:
        order = sequences(len(self.counts)).axes
        on = {dim: tuple(self._axes[a] for a in order[n]) for dim, n in zip(self.dims, self.rows[row].tolist())}
        return Spec(dims, tuple(on[dim] for dim in dims))

    @cached_property
    def forward(self) -> np.ndarray:
        """Seconds of the local product, by row."""
        return self._seconds("left", "weight", "result")

    @cached_property
    def backward(self) -> np.ndarray:
        """Seconds of the two local products of the gradient, by row; the residuals are as they were multiplied."""
        return self._seconds("result", "weight", "left") + self._seconds("result", "left", "weight")

    def _seconds(self, first: str, second: str, made: str) -> np.ndarray:
        chip, kept = self.environment.chip, [self._tensors[name] for name in (first, second, made)]
        parts = np.array(parts_of(self.counts))
        kinds = numbered([np.zeros(len(self.masks), int), *parts[self.masks].T])
        _, some, kind = np.unique(kinds, return_index=True, return_inverse=True)
        dtype = max((operand.dtype for operand in kept[:2]), key=itemsize)
        seconds = []
        for row in (np.array(self._local_sizes) // parts[self.masks[some]]).tolist():
            local = dict(zip(self.dims, row))
            flops = 2 * int(np.prod(row, dtype=object))
            touched = sum(itemsize(each.dtype) * int(np.prod([local[d] for d in each.dims])) for each in kept)
            seconds.append(picoseconds(einsum_seconds(flops, touched, dtype, chip)) * 1e-12)
        return np.array(seconds)[kind]


def _together(nodes: Sequence[np.ndarray]) -> np.ndarray:
    """[via, member] numbers of joint placements that have the left operand at one place."""
    vias = np.arange(len(nodes[0]))[:, None]
    for held in nodes[1:]:
        here = nodes[0][vias[:, 0]]
        pairs = np.argwhere(here[:, None] == held[None, :])
        vias = np.hstack([vias[pairs[:, 0]], pairs[:, 1:]])
    return vias
