"""Where a trained weight may lie: itself, its gradient until the step ends, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import prod

import numpy as np

from gspmd.annotate import Spec
from gspmd.search import Term
from gspmd.search.moves import Moves
from gspmd.search.products import Operand

from .costs import Costs, Line

PARAMETER, STATE, COPY = 4, 8, 2
"""Bytes of a parameter in float32, of Adam's two moments, and of its copy in bfloat16."""


@dataclass(frozen=True)
class Placed:
    """A weight's three places in a training step.

    Attributes:
        spec: of the weight.
        reduced: mesh axes over which its gradient stays a partial sum until the step ends.
        optimizer: of the optimizer's state.
    """

    spec: Spec
    reduced: tuple[str, ...]
    optimizer: Spec

    @property
    def gradient(self) -> Spec:
        """Where the backward pass leaves the gradient."""
        return self.spec.with_partial(self.reduced)

    def __str__(self) -> str:
        state = "" if self.optimizer == self.spec else f", optimizer {self.optimizer}"
        return f"{self.gradient}{state}"


def places(
    specs: Sequence[Spec],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    microbatches: int = 1,
    side: tuple[str, ...] | None = None,
) -> tuple[Placed, ...]:
    """Every way to keep a weight: as ZeRO-3 keeps all three together, or with state and gradient sharded further.

    Args:
        specs: where the weight may lie.
        sizes: of its dimensions.
        mesh: sizes of the mesh axes.
        microbatches: with several, gradients stay partial sums over some of the axes that the weight leaves, or are
            settled in each.
        side: in the stages of a pipeline, over these axes and no others.

    Returns:
        For each spec: all three there; then, with the mesh axes that it leaves appended to one dimension, the state
        there, and the gradient settled at once (ZeRO-1) or when the step ends (ZeRO-2).

    Example:
        >>> for each in places([Spec.parse("E_xF")], {"E": 8, "F": 8}, {"x": 2, "y": 2}):
        ...     print(each)
        E_xF
        E_xF, optimizer E_xyF
        E_xF partialsum-y, optimizer E_xyF
        E_xF, optimizer E_xF_y
        E_xF partialsum-y, optimizer E_xF_y

    Source: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), section 5.
    """
    return tuple(placed for spec in specs for placed in _of(spec, sizes, mesh, microbatches, side))


def _of(
    spec: Spec,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    microbatches: int,
    side: tuple[str, ...] | None,
) -> Iterator[Placed]:
    left = tuple(axis for axis, size in mesh.items() if size > 1 and axis not in spec.used)
    if not left:
        yield Placed(spec, (), spec)
        return
    kinds = dict.fromkeys((left, side)) if side else (left,)
    further = [spec.with_axes(dim, (*spec.axes_of(dim), *axes)) for axes in kinds for dim in spec.dims]
    states = [each for each in further if not each.faults({dim: sizes[dim] for dim in spec.dims}, mesh)]
    if side is not None:
        yield from (Placed(spec, side, state) for state in (spec, *states))
        return
    if microbatches == 1:
        yield Placed(spec, (), spec)
        yield from (Placed(spec, reduced, state) for state in states for reduced in ((), left))
        return
    for count in range(len(left), -1, -1):
        for reduced in combinations(left, count):
            yield from (Placed(spec, reduced, state) for state in (spec, *states))


@dataclass(frozen=True)
class Weight:
    """A kind of weight, of all layers.

    Attributes:
        key: of the layout, and the name of its choice.
        dims: its dimensions.
        whole: dimensions that are not sharded.
        stacked: layers that are stacked in a leading N; 0 where it stands alone.
        copies: how many such stacks there are.
        keys: the keys of the layout that it stands for.
        wide: whether it is float32 wherever it is used, in a step as served.
    """

    key: str
    dims: str
    whole: str = ""
    stacked: int = 0
    copies: int = 1
    keys: tuple[str, ...] = ()
    wide: bool = False

    def places(self, costs: Costs) -> tuple[Placed, ...]:
        """Where it may lie, the most shards first: of what costs the same, the one that holds less is taken."""
        specs = sorted(costs.place(self.dims, self.whole), key=costs.shards, reverse=True)
        if not costs.trains:
            return tuple(Placed(spec, (), spec) for spec in specs)
        return places(specs, costs.sizes, costs.mesh, costs.microbatches, costs.side)

    def operand(self, costs: Costs, options: Sequence[Placed]) -> Operand:
        """The weight as a product takes it."""
        specs, gradients = (tuple(getattr(each, name) for each in options) for name in ("spec", "gradient"))
        return Operand(tuple(self.dims), costs.dtype, specs, gradients, costs.invariant(self.stacked))

    def stored(self, costs: Costs, options: Sequence[Placed]) -> Term:
        """Its bytes, and in training the seconds of its update: moves, and passes over memory."""
        count = self.copies * max(self.stacked, 1) * prod(costs.sizes[dim] for dim in self.dims)
        shares = np.array([costs.shards(each.spec) for each in options])
        name = f"stored: {self.key}"
        if not costs.trains:
            width = PARAMETER if self.wide else costs.width
            return Term(name, (self.key,), np.zeros(len(options)), bytes=width * (count / shares))
        states = np.array([costs.shards(each.optimizer) for each in options])
        sent = sum(self._moved(costs, ends) for ends in zip(*map(self._ends, options)))
        copy = COPY if costs.width < PARAMETER else 0
        size = held(costs, count, shares, states, copy)
        return Term(name, (self.key,), self.copies * sent + update(costs, count, states), bytes=size)

    def accumulated(self, costs: Costs, options: Sequence[Placed]) -> Term:
        """Seconds to add a microbatch's gradient, in the dtype that it is made in, to those before, in float32."""
        count = self.copies * max(self.stacked, 1) * prod(costs.sizes[dim] for dim in self.dims)
        shares = np.array([costs.shards(each.spec) for each in options])
        made = PARAMETER if self.wide else costs.width
        seconds = costs.in_memory(1, count, made + 2 * PARAMETER) / shares
        return Term(f"accumulated: {self.key}", (self.key,), seconds)

    def _ends(self, placed: Placed) -> tuple[tuple[Spec, Spec], ...]:
        """The gradient to the optimizer, the weight to it, and back."""
        spec, state = placed.spec, placed.optimizer
        return (placed.gradient, state), (spec, state), (state, spec)

    def _moved(self, costs: Costs, ends: Sequence[tuple[Spec, Spec]]) -> np.ndarray:
        """Seconds of the move between each pair, all layers of a stack at once."""
        stack = ("N",) if self.stacked else ()
        tensor = Moves(costs.environment, (*stack, *self.dims), "float32")
        whole = ((),) * len(stack)
        of = {each: Spec((*stack, *each.dims), whole + each.axes, each.partial) for each in {*chain(*ends)}}
        numbers = dict(zip(of, tensor.numbers(of.values()).tolist()))
        before, after = (np.array([numbers[each[n]] for each in ends]) for n in (0, 1))
        kinds, kind = np.unique(after, return_inverse=True)
        table = tensor.between(np.unique(before), kinds, by="targets")
        found = table[np.searchsorted(np.unique(before), before), kind]
        return np.where(before == after, 0.0, found)

    def lines(self, costs: Costs, placed: Placed) -> Iterator[Line]:
        """Its lines in a layout."""
        # With several microbatches a gradient that is settled in each has to say so.
        said = costs.microbatches > 1 and costs.side is None and {*costs.axes} - {*placed.spec.used}
        for key in self.keys or (self.key,):
            yield Line(key, str(placed.spec), self.key)
            if placed.optimizer != placed.spec:
                yield Line(key, str(placed.optimizer), self.key, "optimizer")
            if placed.reduced or said:
                yield Line(key, str(placed.gradient), self.key, "gradients")


def held(costs: Costs, count: int, shares: np.ndarray, states: np.ndarray, copy: int) -> np.ndarray:
    """Bytes of so many parameters in float32, of a copy, of their gradients, and of the optimizer's state.

    A gradient is as large as the weight until it comes to the optimizer.
    """
    return count * ((PARAMETER + copy + PARAMETER) / shares + STATE / states)


def update(costs: Costs, count: int, states: np.ndarray) -> np.ndarray:
    """Seconds of the passes over memory in which the optimizer updates so many parameters."""
    return costs.in_memory(1, count, 2 * PARAMETER + 2 * STATE + PARAMETER) / states


def operand(dims: str, dtype: str, options: Sequence[Spec]) -> Operand:
    """An activation as a product takes it."""
    return Operand(tuple(dims), dtype, tuple(options))
