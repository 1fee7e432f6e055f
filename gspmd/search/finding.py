"""The cheapest layout of a program: `gspmd.search`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from math import inf, prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from gspmd.annotate import LayoutError, PlanError, Spec, SpecError
from gspmd.annotate.errors import article, shown
from gspmd.annotate.parser import NAME
from gspmd.display.units import amount_of_bytes, amount_of_seconds, mesh_text
from gspmd.hardware.chips import Chip
from gspmd.hardware.chips import chip as chip_called
from gspmd.layouts import Layout
from gspmd.lowerings.in_force import lowering, planned_for
from gspmd.planner.graph.resharding import move
from gspmd.planner.unknown import PREFIX, Unknown, UnknownMove, UnknownProduct, UnknownReduction, UnknownShared
from gspmd.search.answer import NothingFits
from gspmd.search.held import Held, HeldArray, Moment, ProgramWork
from gspmd.search.lines import Lines, choices_of
from gspmd.search.peak import PeakSearch, Shares
from gspmd.search.pricing import Prices, Table, added_up
from gspmd.search.problem import Choice, Problem, Term
from gspmd.search.program import Build, TracedProgram, Use, on_mesh, read
from gspmd.search.writing import document
from gspmd.tracing.compilers import GPU, compiler_for
from gspmd.tracing.trace import trace

USABLE = 0.9
"""The fraction of a chip's memory that a layout may use by default."""
HIDES = 0.5
"""The fraction of the seconds of weights' moves beside products that does not count in a training step on GPUs.

Source: benchmarks/overlap.py; docs/accuracy.md has its table.
"""
NORM = "norm of gradients"
MOST = 2
"""On a mesh of more axes than this, the global norm is priced over all axes. With 3 axes, a choice of the norm's axes
would add 8 options.
"""


def search(
    build: Build,
    layout: Layout | str,
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] | jax.sharding.Mesh,
    *,
    chip: Chip | str = "tpu-v4",
    memory: float | None = None,
    fixed: Mapping[str, str] | None = None,
    microbatches: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Found:
    """Search for the cheapest layout of a program over every spec of every line, with a proof.

    The program is traced with every dimension of every line sharded over a placeholder for mesh axes, called an
    *unknown*. It is traced again whenever JAX or an operation needs two of the lines to be sharded alike. The trace
    shows, for each planned step, the lines on which the step depends, how often it runs, and whether it is recomputed
    or merged. The planner's tables give the seconds of each step for every placement, and the cheapest combination of
    placements is found, with a proof. Work outside of plans is added as passes over memory and FLOPs. In a training
    step on GPUs, half of the seconds of weights' moves beside products do not count (`HIDES`). Memory is the size of
    arguments, results and intermediate arrays at the moment at which a layout holds the most. The types of the arrays
    give their sizes.

    Args:
        build: maps a layout and a mesh to a function and its abstract arguments, which are sharded as the layout says.
            An example is a training step with its state and batch.
        layout: a layout of the program, whose lines are searched; only the dimensions of its specs are used.
        mesh: sizes of the mesh axes, or several meshes, of which the best is chosen.
        chip: the chip for which seconds are predicted, and whose memory limits layouts by default.
        memory: bytes that a device may hold; by default nine tenths of the chip's memory.
        fixed: lines that are not searched, with their specs.
        microbatches: the number of parts of the batch that the program computes one after the other.
        stop: a function that is called now and then. If it returns true, the best layout so far is returned, with the
            bound proved for this layout.

    Returns:
        The layout found, with its cost.

    Raises:
        NothingFits: every layout holds more bytes than `memory` or, if its `proved` is false, none was found that does
            not.
        LayoutError, PlanError, SpecError: the program cannot be built or searched, or no mesh is given.

    Example:
        >>> import gspmd
        >>> layout = gspmd.Layout.load("replicated")
        >>> def build(layout, mesh):
        ...     def lies(key, *shape):
        ...         place = jax.NamedSharding(mesh, layout.spec(key).partition_spec())
        ...         return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=place)
        ...     function = lambda x, w: layout.ffn.einsum("residual, w_in -> hidden", x, w)
        ...     return function, lies("ffn.residual", 8, 4, 64), lies("ffn.w_in", 64, 4096)
        >>> found = search(build, layout, {"x": 4}, fixed={"ffn.hidden": "BLF_x"})
        >>> found.layout["ffn.in_via"], found.complete
        ('BLE, EF_x', True)

    Source: Lepikhin et al. 2020, GShard (arXiv 2006.16668), section 3, for annotations of a program's tensors; Zheng et
        al. 2022, Alpa (arXiv 2201.12023), section 4, for searching them; Pope et al. 2022 (arXiv 2211.05102) for the
        notation and the placements of products.
    Differs: the answer is exact, over every placement that the notation can express.
    """
    chip = chip if isinstance(chip, Chip) else chip_called(chip)
    limit = USABLE * chip.hbm_bytes if memory is None else memory
    if not callable(build):
        raise PlanError(
            f"cannot search {article(type(build).__name__)}: it is not a function.\n"
            "  Pass a function of a layout and a mesh, which returns a program and its abstract arguments."
        )
    meshes = _meshes(mesh)
    _check_numbers(limit, microbatches, meshes)
    lines = Lines.of(Layout.load(layout).check(), dict(fixed or {}))
    program = read(build, lines)
    best: Found | None = None
    refused: list[NothingFits | LayoutError | PlanError] = []  # At most one for each mesh.
    bound, left = inf, False
    for each in meshes:
        if left := best is not None and stop():
            break
        try:
            lines.check_on(each)
            real = {axis: size for axis, size in each.items() if size > 1}
            found = MeshProblem(build, program, lines, real, chip, microbatches).answer(limit, stop)
        except NothingFits as error:  # another mesh may have an answer
            refused.append(_no_layout_fits(error, each))
            continue
        except (LayoutError, PlanError) as error:
            refused.append(error)
            continue
        bound = min(bound, found.bound)
        best = found if best is None or found.seconds < best.seconds else best
    if best is None:
        nearest = [error for error in refused if isinstance(error, NothingFits)]
        if nearest:
            raise min(nearest, key=lambda error: error.over or 0.0)
        if refused:
            raise refused[0]
        raise PlanError(f"no mesh to search: {shown(mesh)}.\n  Give sizes of mesh axes, such as {{'x': 4}}.")
    # Other meshes may have an answer.
    unknown = left or any(not isinstance(error, NothingFits) or not error.proved for error in refused)
    bound = 0.0 if unknown else bound
    return replace(best, bound=bound, complete=best.complete and bound >= best.bound)


def _no_layout_fits(error: NothingFits, mesh: Mapping[str, int]) -> NothingFits:
    """Return the solver's error as an error that speaks of layouts and lines."""
    if error.nearest is None or error.limit is None or error.over is None:
        message = (
            f"no layout is possible on mesh {mesh_text(mesh)}: its sizes, or the fixed lines, exclude all.\n"
            "  Give fewer fixed lines, or search other meshes."
        )
    else:
        held, over, limit = map(amount_of_bytes, (error.nearest.bytes, error.over, error.limit))
        fact = "no layout fits" if error.proved else "no layout was found that fits"
        known = "" if error.nearest.complete else "found "
        message = (
            f"{fact} on mesh {mesh_text(mesh)}: the smallest {known}holds {held} on each device, {over} more than the "
            f"{limit} that it may hold.\n  Use more devices, or a chip with more memory."
        )
    return NothingFits(error.nearest, error.limit, message, error.proved)


def _meshes(mesh: Any) -> list[Mapping[str, int]]:
    """Return the meshes to search: one mesh or several, each a mapping or a `jax.sharding.Mesh`.

    Raises:
        PlanError: `mesh` is neither a mesh nor several meshes.
    """
    alone = isinstance(mesh, str | Mapping | jax.sharding.Mesh) or not isinstance(mesh, Iterable)
    found = []
    for given in [mesh] if alone else mesh:
        sizes = given if isinstance(given, Mapping) else getattr(given, "shape", None)
        if not isinstance(sizes, Mapping):
            raise PlanError(
                f"cannot read a mesh from {shown(given)}.\n  Write {{'x': 4, 'y': 2}}, or a list of such meshes."
            )
        found.append(sizes)
    return found


def _check_numbers(limit: float, microbatches: int, meshes: Sequence[Mapping[str, int]]) -> None:
    """Raise an error about invalid numbers before the program is traced.

    Raises:
        PlanError: a number is invalid.
    """
    if not limit > 0:
        raise PlanError(f"memory is {shown(limit)}.\n  Give the bytes that a device may hold, above 0.")
    if type(microbatches) is not int or microbatches < 1:
        raise PlanError(f"microbatches is {shown(microbatches)}.\n  Give a whole number of 1 or more.")
    for mesh in meshes:
        for axis, size in mesh.items():
            if not (isinstance(axis, str) and NAME.fullmatch(axis)):
                raise PlanError(
                    f"a mesh axis is called {shown(axis)}.\n"
                    "  Use a lowercase letter and then letters, digits or _, such as x or data."
                )
            if type(size) is not int or size < 1:
                raise PlanError(f"mesh axis {axis} has size {shown(size)}.\n  Give a whole number of 1 or more.")


@dataclass(frozen=True)
class Found:
    """A layout that was found, with its cost.

    Attributes:
        layout: the layout, with every line sharded over the axes of the mesh.
        mesh: sizes of the mesh axes.
        seconds: predicted seconds of one run: planned steps, passes over memory, and products outside of plans, less
            what runs beside products.
        planned_seconds: seconds of the planned steps, as `gspmd.trace` adds them up for this layout.
        priced_seconds: seconds of the same steps, as the search added them up. They equal `planned_seconds`, except
            that on a mesh of three axes a norm of all gradients is priced over all three. If `priced_seconds` and
            `planned_seconds` differ by more than this, nothing is proved, and `bound` is 0.
        bytes: peak memory of a device, in bytes.
        bound: a lower bound on the seconds of all layouts on all given meshes; 0 if the search was stopped before it
            had reached all meshes.
        complete: whether the layout is proved to be the cheapest on all given meshes.
    """

    layout: Layout
    mesh: Mapping[str, int]
    seconds: float
    planned_seconds: float
    priced_seconds: float
    bytes: float
    bound: float
    complete: bool
    chip: Chip = field(repr=False)
    lines: Mapping[str, str] = field(repr=False)

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        proved = f"none is below {amount_of_seconds(self.bound)}" if self.bound else "there may be cheaper ones"
        proved = "no other is cheaper" if self.complete else proved
        return (
            f"{amount_of_seconds(self.seconds)} a step on {self.chip.name}, {mesh}; {proved}. "
            f"A device holds {amount_of_bytes(self.bytes)}."
        )

    def _repr_html_(self) -> str:
        from gspmd.layouts.figure import found_html

        return found_html(str(self), self.lines, self.layout)

    def toml(self) -> str:
        """Return the layout as the text of a file that `Layout.load` reads."""
        return document(str(self).splitlines(), self.mesh, self.lines, base=self.layout)

    def write(self, path: str | Path) -> None:
        """Write the layout as a file."""
        Path(path).write_text(self.toml())


@dataclass(frozen=True)
class MeshProblem:
    """The problem of the cheapest layout of a program on one mesh.

    Attributes:
        build, program, lines: the builder of the program, its trace, and its lines.
        mesh: sizes of the mesh axes, all above 1.
        chip: the chip for which seconds are predicted.
        microbatches: as in `search`.
        dimensions: sizes by which a layout is checked, as in `gspmd.search.lines.choices_of`.
        like: a program that differs from `program` only in sizes, from which `moment` is read; None for `program`.
        whole: the sizes of all mesh axes, in order, if some axes are not searched (`Lines.around`); None if all axes
            are searched.
    """

    build: Build
    program: TracedProgram
    lines: Lines
    mesh: Mapping[str, int]
    chip: Chip
    microbatches: int = 1
    dimensions: Mapping[str, int] = field(default_factory=dict)
    like: TracedProgram | None = None
    whole: Mapping[str, int] | None = None

    @cached_property
    def prices(self) -> Prices:
        """Prices of steps, by the options of every choice."""
        return Prices(choices_of(self.lines, self.program.sizes, self.mesh, self.dimensions), self.mesh, self.chip)

    @cached_property
    def _prices_on_whole(self) -> Prices:
        """Prices of the steps that are planned on the whole mesh."""
        return self.prices if self.whole is None else self.prices.on(self.whole)

    @cached_property
    def _prices_inside(self) -> Prices:
        """Prices of the steps that are planned without `Lines.around`, the axes that the program itself shards over."""
        if not self.lines.around:
            return self.prices
        return self.prices.on({axis: size for axis, size in self.mesh.items() if axis not in self.lines.around})

    @cached_property
    def _norms(self) -> list[Use]:
        """The steps that sum a scalar over every mesh axis that shards any of many tensors.

        An example is a norm of gradients.
        """
        moves = [(use, use.what) for use in self.program.uses if isinstance(use.what, UnknownMove)]
        scalars = [use for use, what in moves if not what.shape and what.before[0].partial]
        return [use for use in scalars if len(self.prices.choices_in(use.what)) > 2]

    @property
    def uses(self) -> list[Use]:
        """The steps that are priced one by one, which are all steps except `_norms`."""
        norms = {id(use) for use in self._norms}
        return [use for use in self.program.uses if id(use) not in norms]

    @cached_property
    def planned(self) -> list[Table]:
        """Tables of the seconds of planned steps, one for each set of choices on which steps depend."""
        return self.tables(self.uses)

    def tables(self, uses: Iterable[Use]) -> list[Table]:
        """Return tables of the seconds of some steps; each step is planned on the mesh on which it runs."""
        every = [*uses]
        if self.whole is None:
            return self.prices.tables(every)
        inside, outside = ([use for use in every if use.inside is where] for where in (True, False))
        return [*self._prices_inside.tables(inside), *self._prices_on_whole.tables(outside)]

    @cached_property
    def _apart(self) -> list[Table]:
        """Tables that are infinite where a mesh axis would shard two dimensions of one array of the program."""
        found: list[Table] = []
        for pair in sorted(self.program.apart):
            (first, one), (second, other) = sorted(map(self.prices.mask_of, pair), key=lambda held: held[0] or 0)
            if first is None or second is None:
                continue
            if first == second:
                found.append(((first,), np.where(one & other, np.inf, 0.0)))
            else:
                found.append(((first, second), np.where(one[:, None] & other, np.inf, 0.0)))
        return [(of, table) for of, table in found if np.isinf(table).any()]

    @cached_property
    def beside(self) -> list[Table]:
        """Tables of the seconds of work outside of plans: passes over memory, and products inside other operations."""
        return [table for _, table in self.of_work(self.program.work)]

    @cached_property
    def hidden(self) -> list[Table]:
        """Tables of the seconds, as negative numbers, that do not count because moves run beside products."""
        return self.hidden_of(self.uses)

    def hidden_of(self, uses: Iterable[Use]) -> list[Table]:
        """Return tables of the seconds of some steps that do not count, as negative numbers.

        XLA:GPU starts a collective as soon as its operand is there, and goes on with products that do not need the
        result. In a training step the collectives that can do so are the moves of weights and of their gradients; a
        move of an activation lies between the products before and after it. If such a move runs more than once, as in
        a loop over layers, the fraction `HIDES` of its seconds does not count.

        Of each move, no more seconds are hidden than its share of the products takes at the chip's peak, spread over
        all devices. The shares are in proportion to the bytes of the whole tensors. They depend on no choice, so what
        is hidden is a table for each move, as its price is, and the search stays exact. Attention and the products of
        dropless experts are left out of the products, so less may be hidden than they would allow.
        """
        found = []
        for use in uses if self.most_hidden else ():
            if self.is_hidden(use):
                most = self._seconds_beside * _bytes(use)
                found += [(of, -self.most_hidden * np.minimum(table, most)) for of, table in self.tables([use])]
        return found

    @property
    def most_hidden(self) -> float:
        """The largest fraction of a move's seconds that may not count."""
        return HIDES if compiler_for(self.chip) is GPU else 0.0

    def is_hidden(self, use: Use) -> bool:
        """Return whether a step moves a weight, or its gradient, more than once, and so runs beside products.

        A move whose steps may be left out is not hidden: steps that it shares with another move, and reductions that
        the compiler adds up, perhaps behind the loop.
        """
        what = use.what
        is_weight = isinstance(what, UnknownMove) and frozenset(what.before[0].dims) in self._weights
        return is_weight and use.times > 1 and what not in self._removable

    @cached_property
    def _weights(self) -> set[frozenset[str]]:
        """The dimensions of each trained weight."""
        return {frozenset(self.lines.dims[name]) for name in self.lines.trained}

    @cached_property
    def _removable(self) -> set[Unknown]:
        """The moves some of whose steps may be left out."""
        steps = [use.what for use in self.program.uses if use.times]
        shared: set[Unknown] = {what.chain for what in steps if isinstance(what, UnknownShared)}
        removed = [what for what in steps if isinstance(what, UnknownReduction)]
        return shared.union(*((what.chain, *what.others) for what in removed))

    @cached_property
    def _seconds_beside(self) -> float:
        """The seconds of products at the chip's peak, on all devices, for each byte of weights moved beside them."""
        seconds = moved = 0.0
        for use in self.program.uses:
            if isinstance(use.what, UnknownProduct):
                # A step inside of a pipeline's slots runs on the devices of one stage.
                inside = (size for axis, size in self.mesh.items() if axis not in self.lines.around)
                devices = prod(inside if use.inside else (self.whole or self.mesh).values())
                seconds += use.times * use.what.flops / devices / self.chip.flops("bfloat16")
            elif self.is_hidden(use):
                moved += _bytes(use)
        return seconds / moved if moved else 0.0

    def of_work(self, done: ProgramWork) -> Iterator[tuple[HeldArray, Table]]:
        """Yield each array with a table: the seconds of the passes over it, or of the products that compute it."""
        bandwidth, rate = self.chip.stream_bandwidth, self.chip.flops("bfloat16") * self.chip.attention_efficiency
        for array, count in done.passed.items():
            yield array, self.prices.shared(array.unknowns, count * array.size / bandwidth, array.move)
        for array, flops in done.flops.items():
            yield array, self.prices.shared(array.unknowns, flops / rate)

    @cached_property
    def moment(self) -> Moment:
        """The moment at which bytes are counted first.

        It would be the moment of peak memory if every array that a layout can shard were sharded over all devices.
        """
        devices = prod(self.mesh.values())
        like = self.like or self.program
        every = like.moments.arrays
        moment, _ = like.moments.largest([each.size / (devices if each.unknowns else 1) for each in every])
        return moment

    @cached_property
    def _held(self) -> Held:
        return self.program.moments.at(self.moment)

    def spread(self, arrays: Mapping[HeldArray, float]) -> list[Table]:
        """Return tables of the bytes of arrays on one device; `arrays` has the count of each array, as in `stored`."""
        every = arrays.items()
        return [self.prices.shared(array.unknowns, count * array.size, array.move) for array, count in every]

    @property
    def stored(self) -> Mapping[HeldArray, int]:
        """The arrays among the program's arguments: a mapping from each distinct array to how often it occurs."""
        return self._held.arguments

    @property
    def others(self) -> Mapping[HeldArray, int]:
        """The arrays, except arguments, that are held at `moment`, counted as in `stored`."""
        return self._held.others

    def peak(self, picks: Mapping[str, int]) -> tuple[Moment, float]:
        """Return the moment at which a device holds the most bytes in one layout, and these bytes.

        Args:
            picks: the option of each choice.
        """
        at = [picks[option.name] for option in self.prices.choices]
        sizes = [float(table[tuple([at[number] for number in of])]) for of, table in self._sizes]
        return self.program.moments.largest(sizes)

    @cached_property
    def _sizes(self) -> list[Table]:
        """The table of the bytes of each array on one device, in the order of `Moments.arrays`."""
        options = [len(choice.rows) for choice in self.prices.choices]
        shared = (self.prices.shared(each.unknowns, each.size, each.move) for each in self.program.moments.arrays)
        return [(of, np.broadcast_to(table, [options[number] for number in of])) for of, table in shared]

    # -- the problem ---------------------------------------------------------------------------------------------------

    def problem(self, limit: float | None = None) -> Problem:
        """Return the search problem: one choice for each set of tied lines, and one term for each set of choices."""
        choices = [*self.choices]
        held = [*self.spread(self.stored), *self.spread(self.others)]
        terms = self.terms([*self.planned, *self.beside, *self.hidden], held)
        return _without_constants(choices, [*terms, *self._norm_terms(choices)], limit)

    def counted(self, base: Problem, shares: Shares) -> Problem:
        """Return a problem with the choices and the seconds of `base`, and with bytes averaged over moments.

        The bytes of `base` itself are those at `moment`.
        """
        if [*shares] == [self.moment]:
            return base
        names = [choice.name for choice in base.choices]
        terms = [replace(term, bytes=None) for term in base.terms]
        for of, table in added_up(self.spread(self.program.moments.average(shares))).items():
            axes = of or (0,)  # The first choice gets the bytes of arrays that no choice shards.
            zeros = np.zeros([len(base.choices[axis].options) for axis in axes])
            name = f"memory of {' and '.join(names[axis] for axis in of) or 'all layouts'}"
            terms.append(Term(name, tuple(names[axis] for axis in axes), zeros, bytes=table))
        return Problem(base.choices, terms)

    def stated(self, seconds: Sequence[Table], held: Sequence[Table], limit: float | None = None) -> Problem:
        """Return a problem with the same choices, and with the given tables of seconds and bytes as its terms."""
        return _without_constants(self.choices, self.terms(seconds, held), limit)

    @property
    def choices(self) -> list[Choice]:
        """One choice for each set of tied lines; `problem` may add one more choice, for the mesh axes of a norm."""
        return [Choice(option.name, tuple(range(len(option.rows)))) for option in self.prices.choices]

    def terms(self, seconds: Sequence[Table], sizes: Sequence[Table]) -> list[Term]:
        """Return the terms of these tables; tables that depend on the same choices are added up.

        Combinations in which choices place the same unknown differently, or in which a mesh axis would shard two
        dimensions of one array, get infinite seconds.
        """
        names = [option.name for option in self.prices.choices]
        time, size = added_up([*seconds, *self.prices.ties, *self._apart]), added_up(sizes)
        found = []
        for of in dict.fromkeys((*time, *size)):
            shape = tuple(len(self.prices.choices[each].rows) for each in of)
            table = np.ascontiguousarray(np.broadcast_to(time.get(of, 0.0), shape))
            name = " and ".join(names[each] for each in of) or "always"
            found.append(Term(name, tuple(names[each] for each in of), table, bytes=size.get(of)))
        return found

    def _norm_terms(self, choices: list[Choice]) -> list[Term]:
        """Return the terms of the norm of gradients, and add a choice to `choices`: the mesh axes of the norm's sum."""
        if not self._norms:
            return []
        axes = tuple(self.mesh)
        every = tuple(each for count in range(len(axes) + 1) for each in combinations(axes, count))
        options = every if len(axes) <= MOST else (axes,)
        choices.append(Choice(NORM, options))
        cost = np.array([sum(use.times * self._norm(each, use) for use in self._norms) for each in options])
        terms = [Term(NORM, (NORM,), cost)]
        if len(options) == 1:
            return terms
        masks = np.array([sum(1 << axes.index(axis) for axis in each) for each in options])
        for number, used in self._sharding().items():
            option = self.prices.choices[number]
            fits = used[:, None] & ~masks[None, :] == 0
            terms.append(Term(f"{NORM}: {option.name}", (option.name, NORM), np.where(fits, 0.0, np.inf)))
        return terms

    @cached_property
    def overestimate(self) -> float:
        """Seconds by which a layout may be priced above its cost, because norms are priced over all mesh axes."""
        if len(self.mesh) <= MOST:
            return 0.0
        return sum(use.times * self._norm(tuple(self.mesh), use) for use in self._norms)

    def _norm(self, axes: Sequence[str], use: Use) -> float:
        assert isinstance(use.what, UnknownMove)
        around = {name for name in use.what.before[0].partial if not name.startswith(PREFIX)}
        mesh = self.whole or self.mesh
        over = tuple(axis for axis in mesh if axis in around or axis in axes)
        steps = move(Spec((), (), over), Spec((), ()), {}, mesh, use.what.itemsize, self.chip)
        return sum(step.seconds for step in steps)

    def _sharding(self) -> dict[int, np.ndarray]:
        """Return, for each choice and option, a bit mask of the mesh axes that shard the tensors of the norms."""
        found: dict[int, np.ndarray] = {}
        for use in self._norms:
            assert isinstance(use.what, UnknownMove)
            for name in use.what.before[0].partial:
                number, mask = self.prices.mask_of(name)
                if number is not None:
                    found[number] = found.get(number, 0) | mask
        return found

    # -- the answer ----------------------------------------------------------------------------------------------------

    def answer(self, limit: float | None, stop: Callable[[], bool]) -> Found:
        """Return the cheapest layout that holds at most `limit` bytes."""
        problem = self.problem()
        answer = PeakSearch(partial(self.counted, problem), self.peak, self.moment, limit, stop).best()
        picks = [answer.picks[option.name] for option in self.prices.choices]
        known = self.prices.known(picks)
        written = self.lines.written(known, settled=self.microbatches > 1)
        layout = laid(self.lines.layout, written, self.mesh)
        priced = sum(float(table[tuple(picks[n] for n in of)]) for of, table in self.planned)
        if self._norms:
            priced += float(problem.seconds_of(answer.picks)[NORM])
        slack = self.overestimate
        planned = planned_seconds(self.build, layout, self.mesh, self.chip)
        # Prices may exceed the trace: norms over all axes, and common steps whose table would be too large.
        agrees = abs(planned - priced) <= slack + 1e-5 * planned + 1e-8
        bound, complete = (answer.bound - slack, answer.complete and not slack) if agrees else (0.0, False)
        return Found(
            layout, dict(self.mesh), answer.seconds, planned, priced, answer.bytes, bound, complete, self.chip, written
        )


def _bytes(use: Use) -> int:
    """Return the bytes of the whole tensor of a move, for all its runs."""
    assert isinstance(use.what, UnknownMove)
    return use.times * prod(use.what.shape) * use.what.itemsize


def laid(base: Layout, lines: Mapping[str, str], mesh: Mapping[str, int]) -> Layout:
    """Return a layout with these lines and mesh axes, under the lowering that the search prices."""
    plain = replace(base, name="found", overrides={}, lowerings={"default": "blocking"}, padding={}, choices=())
    vias = {key for key in plain.table if key.endswith("via")}
    plain = replace(plain, table={key: text for key, text in plain.table.items() if key not in vias or key in lines})
    return replace(plain.override(lines), axes=tuple(mesh), factor=tuple(mesh))


def planned_seconds(build: Build, layout: Layout, mesh: Mapping[str, int], chip: Chip) -> float:
    """Return the seconds of a program's planned steps under a layout, as `gspmd.trace` adds them up."""
    axes = mesh or {"x": 1}
    abstract = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    with on_mesh(abstract), lowering("blocking"), planned_for(chip):
        function, *arguments = build(layout, abstract)
        try:
            return trace(function, *arguments).seconds
        except SpecError as error:
            # While unknowns are read, the mesh axes have size 1, and an array without a sharding fits every spec.
            if (bare := _unplaced(arguments)) is None:
                raise
            raise PlanError(
                f"build returned an argument without a sharding, {bare}, but the program needs one.\n"
                "  Place each abstract argument by its line: gspmd.annotate(argument, layout.spec('ffn.w_in'))."
            ) from error


def _unplaced(arguments: Sequence[Any]) -> str | None:
    """Return the type of the first argument that has dimensions but no sharding, as in `bfloat16[64,128]`."""
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.shape and leaf.sharding is None:
            return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return None


def _without_constants(choices: Sequence[Choice], terms: Sequence[Term], limit: float | None) -> Problem:
    """Build a problem in which every term depends on a choice; a constant becomes a term of the first choice."""
    choices = [*choices] or [Choice("nothing", (0,))]
    first = choices[0]
    found = []
    for term in terms:
        if term.of:
            found.append(term)
            continue
        shape = (len(first.options),)
        size = None if term.bytes is None else np.broadcast_to(term.bytes, shape)
        found.append(Term(term.name, (first.name,), np.broadcast_to(term.seconds, shape), bytes=size))
    return Problem(choices, found, limit)
