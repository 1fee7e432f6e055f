"""Prices of the steps of a program with unknown lines: a table of seconds for each set of choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import count
from math import prod
from typing import Any

import numpy as np

from gspmd.annotate import PlanError, Spec, SpecError
from gspmd.hardware.chips import Chip
from gspmd.hardware.dtypes import itemsize
from gspmd.hardware.matmul import local_einsum_seconds
from gspmd.lowerings.program import Context
from gspmd.ops._embedding import routed
from gspmd.planner.graph.placements import parts_of, sequences
from gspmd.planner.steps import Environment, Step, picoseconds
from gspmd.planner.unknown import (
    PREFIX,
    Known,
    RequiredMove,
    Unknown,
    UnknownMove,
    UnknownMoves,
    UnknownProduct,
    UnknownReduction,
    UnknownShared,
    UnknownSteps,
    placed,
    unknowns_in,
)
from gspmd.search.lines import LineChoice
from gspmd.search.lookups import LookupPrices
from gspmd.search.moves import HOISTED, MoveCosts, at_every, different
from gspmd.search.program import Chain, Use
from gspmd.search.sums import SumPrices, ends_of
from gspmd.tracing.compilers import compiler_for

LARGEST = 20_000_000
"""The largest number of entries of a table."""

MOST_PLANNED = 200_000
"""The largest number of placements for which one step is planned: a plan takes about a millisecond."""

_MESHES = 3
"""Number of meshes whose tables are kept for further programs, such as programs with a different choice of remat.

The same mesh with different choices counts as a different mesh. The prices of a pipeline count as up to three meshes:
one for the pipeline as a whole, one for the steps inside of slots, and one for the steps outside of slots. The bound of
a training step on a TPU counts as two, because its collectives of tokens are priced in parts.
"""

LARGEST_SHARED = 400_000
"""The largest number of pairs of chains that are compared to find their common steps."""

Table = tuple[tuple[int, ...], np.ndarray]
"""The indices of the choices on which seconds depend, ascending, and an array of the seconds.

The array has an axis for each of these choices.
"""

Planned = tuple[tuple, ...]
"""The successive steps of one tensor, each as (kind, mesh axes, spec before, spec after, reduction, seconds)."""


class Prices:
    """Tables of the seconds of steps on one mesh. A table has an axis for each choice on which its step depends.

    Args:
        choices: the choices of the search.
        mesh: sizes of the mesh axes, all above 1.
        chip: the chip for which seconds are predicted.
    """

    def __init__(self, choices: Sequence[LineChoice], mesh: Mapping[str, int], chip: Chip):
        self.choices, self.mesh, self.chip = tuple(choices), dict(mesh), chip
        self.axes, self.counts = tuple(mesh), tuple(mesh.values())
        self.sequences = sequences(len(self.counts))
        self._at: dict[str, dict[int, np.ndarray]] = {}
        for number, option in enumerate(choices):
            for name in option.unknowns:
                self._at.setdefault(name, {})[number] = option.column(name)
        self._moves: dict[tuple, MoveCosts] = {}
        self._lookups: dict[tuple, LookupPrices] = {}
        self._sums: dict[tuple, SumPrices] = {}
        self._places_of: dict[tuple, tuple] = {}
        options = tuple((each.unknowns, each.rows.tobytes()) for each in choices)
        self._key = _number_of(options, tuple(mesh.items()), chip)

    def on(self, mesh: Mapping[str, int]) -> Prices:
        """Return the prices of the same choices on a mesh with other axes, for steps that are planned on that mesh.

        A tensor counts as unsharded along an axis that the mesh lacks, since no step on the mesh uses that axis.
        """
        numbers, place = sequences(len(mesh)).number, {axis: number for number, axis in enumerate(mesh)}
        named = (tuple(self.axes[axis] for axis in own) for own in self.sequences.axes)
        there = np.array([numbers[tuple(place[axis] for axis in own if axis in place)] for own in named])
        return Prices([replace(each, rows=there[each.rows]) for each in self.choices], mesh, self.chip)

    def known(self, picks: Sequence[int]) -> dict[str, tuple[str, ...]]:
        """Return the mesh axes of every unknown, given the picked option of each choice."""
        return {
            name: self.named(int(number))
            for option, pick in zip(self.choices, picks)
            for name, number in zip(option.unknowns, option.rows[pick])
        }

    def named(self, number: int) -> tuple[str, ...]:
        """Return the names of the mesh axes in a sequence, given the sequence's index."""
        return tuple(self.axes[axis] for axis in self.sequences.axes[number])

    def choices_in(self, what: object) -> tuple[int, ...]:
        """Return the indices of the choices on which a step or an array depends."""
        return self.choices_in_names(_unknowns_in(what))

    def choices_in_names(self, unknowns: Iterable[str]) -> tuple[int, ...]:
        """Return the indices of the choices that decide the given unknowns.

        If several choices contain an unknown, a choice that another unknown already needs is taken. If there is none,
        the choice with the fewest options is taken.
        """
        wanted = sorted((self._at[name] for name in unknowns if name in self._at), key=len)
        found: set[int] = set()
        for choices in wanted:
            if not found & choices.keys():
                found.add(min(choices, key=lambda number: (len(self.choices[number].rows), number)))
        return tuple(sorted(found))

    @property
    def ties(self) -> list[Table]:
        """A table for each pair of choices in which one choice has only some of the unknowns of the other choice.

        The table is infinite where the two choices place a common unknown differently, and 0 elsewhere.
        """
        found: list[Table] = []
        for place, option in enumerate(self.choices):
            for number, other in enumerate(self.choices):
                if place != number and {*option.unknowns} < {*other.unknowns}:
                    of = (min(place, number), max(place, number))
                    apart = np.zeros((1, 1), bool)
                    for name in option.unknowns:
                        one, two = option.column(name), other.column(name)
                        apart = apart | (one[:, None] != two[None, :])
                    table = np.where(apart, np.inf, 0.0)
                    found.append((of, table if place < number else table.T))
        return found

    def tables(self, uses: Iterable[Use]) -> list[Table]:
        """Return tables of the seconds of all uses, one table for each set of choices."""
        counted: dict[Unknown, list[int]] = {}
        for use in uses:
            both = counted.setdefault(use.what, [0, 0])
            both[0] += use.times
            both[1] += use.once
        priced = (self.table(what, *runs) for what, runs in counted.items() if not self._is_left_out(what))
        return list(added_up(priced).items())

    def _is_left_out(self, what: Unknown) -> bool:
        """Return whether a saving is ignored, because the compiler does not make it or its table would be too large."""
        if isinstance(what, UnknownReduction) and not compiler_for(self.chip).reduces_sums:
            return True
        # The common steps of two chains are then priced twice.
        return isinstance(what, UnknownShared | UnknownReduction) and self._is_too_large(self.choices_in(what))

    def table(self, what: Unknown, times: int = 1, once: int | None = None) -> Table:
        """Return a table of the seconds that all runs of one step take together.

        A saving, such as the common steps of two chains, has negative seconds.

        Args:
            what: the step, which may stand for a chain of steps.
            times: the number of its runs.
            once: the number of runs of the chain's first steps, by default `times`. It is lower if these steps are
                hoisted out of a loop, because the loop does not change the tensor.

        Raises:
            PlanError: the step depends on so many choices that its table would be too large.
        """
        of, once = self.choices_in(what), times if once is None else once
        if self._is_too_large(of):
            raise self._too_large(of)
        if isinstance(what, UnknownShared):
            seconds = -self._shared(what, of, times, once)
        elif isinstance(what, UnknownReduction):
            seconds = -times * self._reduction(what, of)
        elif isinstance(what, RequiredMove):
            seconds = np.where(np.isinf(self._known_table("seconds", what.move, of, self._seconds)), np.inf, 0.0)
        else:
            seconds = times * self._known_table("seconds", what, of, self._seconds)
            if once < times:
                seconds = seconds - (times - once) * self._known_table("leaving", what, of, self._leaving)
        return of, np.broadcast_to(seconds, tuple(len(self.choices[each].rows) for each in of))

    def _known_table(self, kind: str, what: Any, of: tuple[int, ...], made: Callable) -> Any:
        """Return a table, or the arrays for making one, from the cache; `made` computes what the cache lacks.

        All programs with these choices can use the same cache, because they differ only in the numbers of runs.
        """
        known, key = _latest(self._key), (kind, what, of)
        if key not in known:
            known[key] = made(what, of)
        return known[key]

    def _seconds(self, what: Unknown, of: tuple[int, ...]) -> np.ndarray:
        """Return a table of the seconds of one run of a step, indexed by the options of the choices in `of`."""
        if isinstance(what, UnknownProduct):
            return self._product(what, of)
        nowhere = np.full((1,) * len(of), np.inf)  # No placement of its tensors is possible.
        if isinstance(what, UnknownMove | UnknownMoves):
            if (ends := self._moved(what, of)) is None:
                return nowhere
            tensor, parts, home = ends
            return at_every(tensor.between, parts[0], home) if _are_equal(parts) else _summed(tensor, parts, home)
        assert isinstance(what, UnknownSteps)
        if what.plan is routed:
            found, at = self._looked_up(what, of)
            return nowhere if found is None else np.where(at[0] >= 0, found.seconds(what.name)[at], np.inf)
        if ends := ends_of(what):
            return self._of_sum(what, ends, of)
        every, kind = self._placements(unknowns_in(what), of)
        if len(every) > MOST_PLANNED:
            raise self._too_large(of)
        planned = [self._planned_steps(what, known) for known in every]
        return np.array([np.inf if steps is None else sum(step.seconds for step in steps) for steps in planned])[kind]

    def _leaving(self, what: Unknown, of: tuple[int, ...]) -> np.ndarray:
        """Return the seconds of a move's first steps that are hoisted out of a loop.

        The loop does not change the tensor of the move.
        """
        nothing = np.zeros((1,) * len(of))
        if isinstance(what, UnknownSteps) and what.plan is routed and what.name == "table":
            found, at = self._looked_up(what, of)
            return np.where(at[0] >= 0, found.leaving[at], 0.0) if found else nothing
        ends = self._moved(what, of) if isinstance(what, UnknownMove | UnknownMoves) else None
        if ends is None or not _are_equal(ends[1]):
            return nothing
        tensor, parts, home = ends
        searched = isinstance(what, UnknownMove) and what.searched
        return at_every(lambda *places: tensor.hoisted(*places, searched=searched), parts[0], home)

    def _is_too_large(self, of: tuple[int, ...]) -> bool:
        return len(of) > 4 or prod(len(self.choices[each].rows) for each in of) > LARGEST

    def _too_large(self, of: tuple[int, ...]) -> PlanError:
        lines = "; ".join(self.choices[each].name for each in of)
        return PlanError(
            f"cannot price a step that depends on so many lines: {lines}.\n"
            "  Give some of them a spec, with fixed= (--fixed)."
        )

    def mask_of(self, unknown: str) -> tuple[int | None, np.ndarray]:
        """Return the index of an unknown's choice, and for each option a bit mask of the unknown's mesh axes.

        The index is None if the unknown shards nothing.
        """
        if unknown not in self._at:
            return None, np.zeros(1, int)
        choice, column = next(iter(self._at[unknown].items()))
        return choice, self.sequences.mask[column]

    def shared(self, unknowns: Iterable[str], amount: float, move: UnknownMove | None = None) -> Table:
        """Return a table of one device's part of an amount that is sharded over unknowns.

        Without unknowns, this is the whole amount. With `move`, it is 0 where the placements before and after this move
        are equal.
        """
        names = tuple(name for name in unknowns if name in self._at)
        of = self.choices_in_names(names) if move is None else self.choices_in(move)
        return of, amount / self._known_table("parts", (names, move), of, self._parts)

    def _parts(self, what: tuple[tuple[str, ...], UnknownMove | None], of: tuple[int, ...]) -> np.ndarray:
        """Return the number of parts into which `shared` divides an amount; infinite where the amount becomes 0."""
        names, move = what
        used = np.zeros((1,) * len(of), int)
        for name in names:
            used = used | self.sequences.mask[self._column(name, of)]
        parts = np.array(parts_of(self.counts))[used]
        if move is None:
            return parts
        tensor = self._tensor(move)
        before, after = (self._nodes(tensor, spec, of) for spec in (*move.before, move.after))
        return np.where(before == after, np.inf, parts)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _moved(
        self, what: UnknownMove | UnknownMoves, of: tuple[int, ...]
    ) -> tuple[MoveCosts, list[np.ndarray], np.ndarray] | None:
        """Return the move costs of a tensor, and its placements before and after the move.

        The placements are arrays with an entry for each combination of options. The result is None if the move is
        impossible under every option.
        """
        if isinstance(what, UnknownMoves):
            return self._moved_as_planned(what, of)
        tensor = self._tensor(what)
        return tensor, [self._nodes(tensor, each, of) for each in what.before], self._nodes(tensor, what.after, of)

    def _moved_as_planned(
        self, what: UnknownMoves, of: tuple[int, ...]
    ) -> tuple[MoveCosts, list[np.ndarray], np.ndarray] | None:
        """Return the result of `_moved` for a move that an operation plans by itself.

        The move is planned once for each placement of the operation's tensors.
        """
        names = unknowns_in(what.arguments)
        own = tuple(each for each in of if any(each in self._at.get(name, ()) for name in names))
        key = what.plan, what.arguments, own
        if key not in self._places_of:
            every, kind = self._placements(names, own)
            self._places_of[key] = [self._planned(what, known) for known in every], kind
        planned, kind = self._places_of[key]
        moves = [each and each[what.name] for each in planned]
        first = next((each for each in moves if each), None)
        if first is None:
            return None
        tensor, numbers = self._tensor(first), dict[Spec, int]()

        def nodes(specs: Sequence[Spec | None]) -> np.ndarray:
            for spec in specs:
                if spec is not None and spec not in numbers:
                    (numbers[spec],) = tensor.numbers([spec])
            return np.array([-1 if spec is None else numbers[spec] for spec in specs])[kind]

        after = nodes([each and each.after for each in moves])
        spread = tuple(slice(None) if each in own else None for each in of)
        if what.before is None:
            came = nodes([each and each.before[0] for each in moves])[spread]
        else:
            came = self._nodes(tensor, what.before, of)
        return tensor, [came], after[spread]

    def _tensor(self, what: UnknownMove) -> MoveCosts:
        dims = what.before[0].dims
        key = dims, what.shape, what.itemsize, what.reduce
        if key not in self._moves:
            environment = Environment.of(tuple(zip(dims, what.shape)), tuple(self.mesh.items()), self.chip)
            self._moves[key] = MoveCosts(environment, dims, what.itemsize, what.reduce)
        return self._moves[key]

    def _nodes(self, tensor: MoveCosts, spec: Spec, of: tuple[int, ...]) -> np.ndarray:
        """Return the node number of a spec's placement for each combination of options; -1 if it is impossible."""
        taken, rows = np.zeros((1,) * len(of), int), []
        wrong = np.zeros((1,) * len(of), bool)
        for dim in tensor.dims:
            row, mask, twice = self._sequence(spec.axes_of(dim), of)
            wrong = wrong | twice | (taken & mask != 0)
            taken = taken | mask
            rows.append(row)
        partial = np.zeros((1,) * len(of), int)
        for name in spec.partial:
            partial = partial | self._sequence((name,), of)[1]
        wrong = wrong | (partial & taken != 0)
        full = np.broadcast_arrays(wrong, partial, *rows)
        nodes = tensor.nodes(full[2:], np.where(full[0], 0, full[1]))
        return np.where(full[0], -1, nodes)

    def _sequence(self, names: Sequence[str], of: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the mesh axes on one dimension, their bit mask, and whether an axis appears twice.

        All three are arrays over the options. The mesh axes are given as indices of sequences of mesh axes.
        """
        number, mask = np.zeros((1,) * len(of), int), np.zeros((1,) * len(of), int)
        twice = np.zeros((1,) * len(of), bool)
        for name in names:
            column = self._column(name, of)
            each = self.sequences.mask[column]
            twice = twice | (mask & each != 0)
            number = column if not mask.any() else self.sequences.joined(*np.broadcast_arrays(number, column))
            mask = mask | each
        return number, mask, twice

    def _column(self, name: str, of: tuple[int, ...]) -> np.ndarray:
        """Return the mesh axes of an unknown for each option, as indices of sequences of mesh axes.

        The array varies along the axis of the unknown's choice. `name` may also be a mesh axis, which is then the only
        one under every option.
        """
        if name in self._at:
            choice, column = next((each, column) for each, column in self._at[name].items() if each in of)
            return column.reshape([-1 if each == choice else 1 for each in of])
        known = () if name.startswith(PREFIX) or name not in self.axes else (self.axes.index(name),)
        return np.full((1,) * len(of), self.sequences.number[known])

    # -- products ------------------------------------------------------------------------------------------------------

    def _product(self, what: UnknownProduct, of: tuple[int, ...]) -> np.ndarray:
        """Return the seconds of a local einsum as the planner counts them, for each combination of options."""
        axes: dict[str, tuple[str, ...]] = {}
        for spec in what.specs:
            axes |= dict(zip(spec.dims, spec.axes))
        parts = np.array(parts_of(self.counts))
        kinds, kind = _different([parts[self._sequence(names, of)[1]] for names in axes.values()])
        sizes, (one, other, made) = dict(what.sizes), what.dtypes
        widest = max((one, other), key=itemsize)
        arrays = [(spec.dims, itemsize(dtype)) for spec, dtype in zip(what.specs, (one, other, made))]
        seconds = []
        for row in kinds.tolist():
            local = {dim: sizes[dim] // cut for dim, cut in zip(axes, row)}
            taken = local_einsum_seconds(local, arrays, widest, self.chip, what.precision)
            seconds.append(picoseconds(taken) * 1e-12)
        return np.array(seconds)[kind]

    # -- what operations plan by themselves ----------------------------------------------------------------------------

    @cached_property
    def _context(self) -> Context:
        return Context(tuple(self.mesh.items()), self.chip, True, "blocking")

    def _placements(self, unknowns: Iterable[str], of: tuple[int, ...]) -> tuple[list[Known], np.ndarray]:
        """Return the distinct placements of some unknowns, and an array of their indices.

        The array has, for each combination of options, the index of the placement under these options.
        """
        names = [name for name in unknowns if name in self._at]
        if not names:
            return [{}], np.zeros((1,) * len(of), int)
        kinds, kind = _different([self._column(name, of) for name in names])
        return [dict(zip(names, map(self.named, row))) for row in kinds.tolist()], kind

    def _looked_up(
        self, what: UnknownSteps, of: tuple[int, ...]
    ) -> tuple[LookupPrices | None, tuple[np.ndarray, np.ndarray]]:
        """Return the prices of a lookup, and for each combination of options the indices of its placements.

        The first array of indices is for the pair of ids and rows, and the second is for the table. An impossible
        placement has index -1.
        """
        given, backward, sizes, widths, _ = what.arguments
        pairs, pair = self._possible((given.ids, given.rows), of)
        tables, table = self._possible((given.table,), of)
        pair, table = np.broadcast_arrays(pair, table)
        nowhere = (pair < 0) | (table < 0)
        some = np.where(nowhere, -1, pair), np.where(nowhere, -1, table)
        key = what.plan, what.arguments, of
        if key not in self._lookups and pairs and tables:
            environment = Environment.of(sizes, tuple(self.mesh.items()), self.chip)
            ids, rows = zip(*pairs)
            own = [each for (each,) in tables]
            self._lookups[key] = LookupPrices(environment, ids, rows, own, widths, backward)
        return self._lookups.get(key), some

    def _of_sum(self, what: UnknownSteps, ends: tuple[Spec, Spec], of: tuple[int, ...]) -> np.ndarray:
        """Return the seconds of the steps of a sum over dimensions, for each combination of options."""
        kept, numbers = zip(*(self._possible((spec,), of) for spec in ends))
        if not all(kept):
            return np.full((1,) * len(of), np.inf)
        key = what.arguments, of
        if key not in self._sums:
            before, after = ([each for (each,) in places] for places in kept)
            self._sums[key] = SumPrices.of(what.arguments, tuple(self.mesh.items()), self.chip, before, after)
        move, rest = self._sums[key].seconds
        seconds = (move if what.name.startswith(("operand", "cotangent")) else rest)[numbers]
        return np.where((numbers[0] < 0) | (numbers[1] < 0), np.inf, seconds)

    def _possible(self, specs: tuple[Spec, ...], of: tuple[int, ...]) -> tuple[list[tuple[Spec, ...]], np.ndarray]:
        """Return the possible placements of some tensors, and an array of their indices.

        The array has, for each combination of options, the index of the placement under these options, or -1 if this
        placement is impossible.
        """
        places, place = self._places(specs, of)
        possible = [each is not None for each in places]
        numbers = np.where(possible, np.cumsum(possible) - 1, -1)
        return [each for each in places if each is not None], numbers[place]

    def _places(self, specs: tuple[Spec, ...], of: tuple[int, ...]) -> tuple[list[tuple[Spec, ...] | None], np.ndarray]:
        """Return the distinct placements of some tensors, and an array of their indices.

        An impossible placement is None. The array has, for each combination of options, the index of the placement
        under these options.
        """
        every, kind = self._placements(unknowns_in(specs), of)
        found: list[tuple[Spec, ...] | None] = []
        for known in every:
            try:
                found.append(placed(specs, known))
            except SpecError:
                found.append(None)
        return found, kind

    def _planned_steps(self, what: UnknownSteps, known: Known) -> tuple[Step, ...] | None:
        steps = self._planned(what, known)
        return None if steps is None else steps[what.name]

    def _planned(self, what: UnknownSteps, known: Known) -> Mapping[str, Any] | None:
        """Return the steps that an operation plans by itself, or None if its tensors cannot have these placements."""
        try:
            arguments = placed(what.arguments, known, {Context: self._context})
        except SpecError:  # A mesh axis would appear twice in one spec.
            return None
        return _planned(what.plan, arguments)

    # -- what chains have in common ------------------------------------------------------------------------------------

    def _shared(self, what: UnknownShared, of: tuple[int, ...], times: int, once: int) -> np.ndarray:
        """Return the seconds of the first steps that a chain shares with another chain.

        Of the other chains, the one that shares the most seconds counts.
        """
        most = np.zeros((1,) * len(of))
        for other in what.others:
            begun = self._known_table("begun", UnknownShared(what.chain, (other,)), of, self._begun)
            if begun is None:
                common = self._planned_in_common(what.chain, other, of, times, once)
            else:
                (seconds, leaving), at, alike = begun
                common = np.where(alike, (times * seconds - (times - once) * leaving)[at], 0.0)
            most = np.maximum(most, common)
        return most

    def _begun(self, what: UnknownShared, of: tuple[int, ...]) -> tuple[tuple, tuple, np.ndarray] | None:
        """Return the seconds of the first steps that two moves of one tensor share.

        Returns:
            Three values, or None if `_ends` is None for one of the moves. The first is a pair of arrays over the
            distinct placements: the seconds of all common steps, and the seconds of those common steps that are
            hoisted. The second has, for each combination of options, the indices of its placements. The third says, for
            each combination of options, whether the two moves begin at the same placement.
        """
        own, theirs = self._ends(what.chain, of), self._ends(what.others[0], of)
        if own is None or theirs is None:
            return None
        (tensor, before, after), (beside, same, end) = own, theirs
        if (tensor.shape, tensor.width, tensor.reduce) != (beside.shape, beside.width, beside.reduce):
            return (np.zeros(1), np.zeros(1)), (np.zeros((1,) * len(of), int),), np.zeros((1,) * len(of), bool)
        # An impossible placement has infinite seconds elsewhere.
        places, at = different(*(np.maximum(each, 0) for each in (before, after, end)))
        one, other = (each if isinstance(each, UnknownMove) else None for each in (what.chain, what.others[0]))
        shared = tensor.shared(
            *places,
            searched=(bool(one and one.searched), bool(other and other.searched)),
            transposed=(bool(one and one.transposes), bool(other and other.transposes)),
        )
        return shared, at, np.maximum(before, 0) == np.maximum(same, 0)

    def _reduction(self, what: UnknownReduction, of: tuple[int, ...]) -> np.ndarray:
        """Return the seconds of a chain's last step where it is a reduction that a compiler may remove; 0 elsewhere."""
        chains, at = self._chains(what.chain, of)
        ends = [_reduction_of(chain) for chain in chains]
        seconds = np.array([_removed_seconds(end, what.adds_up) for end in ends])[at]
        for other in what.others:
            theirs, there = self._chains(other, of)
            if len(chains) * len(theirs) > LARGEST_SHARED:
                return np.zeros((1,) * len(of))  # The reduction is then priced twice.
            same = np.array([[end == _reduction_of(chain) for chain in theirs] for end in ends])
            seconds = np.where(same[at, there], seconds, 0.0)
        return seconds

    def _ends(self, what: Chain, of: tuple[int, ...]) -> tuple[MoveCosts, np.ndarray, np.ndarray] | None:
        """Return a tensor's move costs, and its placements before and after a move.

        The result is None if the move is impossible under every option. It is also None for steps that their operation
        plans by itself, other than `UnknownMoves` and the steps of a lookup.
        """
        if isinstance(what, UnknownMove | UnknownMoves):
            found = self._moved(what, of)
            return found and (found[0], found[1][0], found[2])
        if what.plan is not routed:
            return None
        found, at = self._looked_up(what, of)
        if found is None:
            return None
        tensor, before, after = found.ends(what.name)
        nowhere = at[0] < 0
        return tensor, np.where(nowhere, -1, before[at]), np.where(nowhere, -1, after[at])

    def _planned_in_common(
        self, one: Chain, other: Chain, of: tuple[int, ...], times: int, once: int
    ) -> np.ndarray | float:
        """Return the seconds of the first steps that two chains share, by planning both chains for every placement."""
        if any(isinstance(each, UnknownMove) and each.searched and each.transposes for each in (one, other)):
            return 0.0  # The steps after the transposition are not shared; those before it are then priced twice.
        (own, at), (theirs, there) = self._chains(one, of), self._chains(other, of)
        if len(own) * len(theirs) > LARGEST_SHARED:
            return 0.0  # The common steps are then priced twice.
        table = np.array([[_in_common(one, two, times, once) for two in theirs] for one in own])
        return table[at, there]

    def _chains(self, what: UnknownMove | UnknownSteps, of: tuple[int, ...]) -> tuple[list[Planned], np.ndarray]:
        """Return the distinct chains of steps, and for each combination of options the index of its chain."""
        if isinstance(what, UnknownMove):
            return self._chains_of_move(what, of)
        every, kind = self._placements(unknowns_in(what), of)
        chains, which = _numbered([_chain_of(self._planned_steps(what, known) or ()) for known in every])
        return chains, which[kind]

    def _chains_of_move(self, what: UnknownMove, of: tuple[int, ...]) -> tuple[list[Planned], np.ndarray]:
        tensor = self._tensor(what)
        places = self._nodes(tensor, what.before[0], of), self._nodes(tensor, what.after, of)
        (sources, targets), at = different(*places)
        between = tensor.steps_between(sources, targets, searched=what.searched)
        chains, which = _numbered([_chain_of(steps, what.reduce) for row in between for steps in row])
        return chains, which.reshape(len(sources), len(targets))[at]


_unknowns_in = lru_cache(maxsize=1 << 14)(unknowns_in)  # of steps, which are the same on every mesh


@lru_cache(maxsize=1 << 17)
def _planned(plan: Callable, arguments: tuple) -> Mapping[str, Any] | None:
    """Plan an operation's steps, cached for all searches; return None if its tensors cannot have these placements."""
    try:
        return plan(*arguments)
    except (PlanError, SpecError):
        return None


_tables: dict[int, dict] = {}


@lru_cache(maxsize=1 << 6)
def _number_of(*question: Any) -> int:
    """Return a number that stands for choices, mesh and chip, because these take long to compare."""
    return next(_numbers)


_numbers = count()


def _latest(key: int) -> dict:
    """Return the cache of tables for these choices; only the latest few caches are kept, to save memory."""
    known = _tables[key] = _tables.pop(key, {})
    while len(_tables) > _MESHES:
        del _tables[next(iter(_tables))]
    return known


def forget() -> None:
    """Drop the tables that are cached across searches, which a training run does not need after its search."""
    _tables.clear()


def added_up(tables: Iterable[Table]) -> dict[tuple[int, ...], np.ndarray]:
    """Return the sum of all tables for each set of choices."""
    found: dict[tuple[int, ...], np.ndarray] = {}
    for of, table in tables:
        found[of] = found[of] + table if of in found else table
    return found


def _different(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of the broadcast columns, and the index of the row at each position."""
    full = np.broadcast_arrays(*columns)
    rows, number = np.unique(np.stack([each.ravel() for each in full], axis=1), axis=0, return_inverse=True)
    return rows, number.reshape(full[0].shape)


def _are_equal(parts: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(part, parts[0]) for part in parts[1:])


def _chain_of(steps: Iterable[Step], reduce: str = "sum") -> Planned:
    return tuple((step.kind, step.axes, step.before, step.after, reduce, step.seconds) for step in steps)


def _numbered(chains: Sequence[Planned]) -> tuple[list[Planned], np.ndarray]:
    """Return the distinct chains, and for each given chain its index among them."""
    numbers = {chain: n for n, chain in enumerate(dict.fromkeys(chains))}
    return list(numbers), np.array([numbers[chain] for chain in chains])


def _reduction_of(chain: Planned) -> tuple[tuple, Planned] | None:
    """Return the reduction that ends a chain, and the slices that may follow it; None if no reduction ends it."""
    last = next((number for number, step in reversed([*enumerate(chain)]) if step[0] != "slice"), None)
    if last is None or chain[last][0] not in ("all-reduce", "reduce-scatter") or chain[last][4] != "sum":
        return None
    return chain[last], chain[last + 1 :]


def _removed_seconds(end: tuple[tuple, Planned] | None, adds_up: bool) -> float:
    """Return the seconds of a reduction if a compiler may remove the reduction, and 0 if not.

    Args:
        end: the reduction and the slices after it, as `_reduction_of` returns them.
        adds_up: whether a loop adds up the results of the reduction. Only an all-reduce is then moved out of the loop,
            and only if its result is not sliced.
    """
    if end is None or (adds_up and (end[0][0] != "all-reduce" or end[1])):
        return 0.0
    return end[0][-1]


def _in_common(one: Planned, other: Planned, times: int, once: int) -> float:
    """Return the seconds, over all runs, of the first steps that two chains of one tensor share.

    Steps that are hoisted run `once` times, and all others `times` times.
    """
    seconds, leaves = 0.0, True
    for step, same in zip(one, other):
        if step != same:
            break
        leaves = leaves and step[0] in HOISTED
        seconds += step[-1] * (once if leaves else times)
    return seconds


def _summed(tensor: MoveCosts, parts: Sequence[np.ndarray], home: np.ndarray) -> np.ndarray:
    """Return the seconds of moving summands to the best placement for adding, and of moving their sum to its target."""
    everywhere = np.arange(len(tensor.paths.nodes))
    kinds, kind = _different(parts)
    nodes = [np.unique(column, return_inverse=True) for column in kinds.T]
    brought = sum(tensor.between(each, everywhere, by="sources")[index] for each, index in nodes)  # [kind, place]
    targets, there = np.unique(home, return_inverse=True)
    onward = tensor.between(everywhere, targets, by="targets")  # [place, target]
    least = np.stack([(brought + column).min(axis=1) for column in onward.T], axis=1)  # [kind, target]
    return least[kind, there.reshape(home.shape)]
