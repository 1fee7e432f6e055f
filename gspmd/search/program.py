"""A traced program with unknown placements: its steps, how often each runs, and the arrays that a device holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple, TypeGuard

import jax
from jax.extend.core import Jaxpr, Literal
from jax.sharding import AbstractMesh, AxisType

from gspmd.annotate import LayoutError, PlanError, Spec, SpecError
from gspmd.annotate.errors import shown
from gspmd.jax_internals import ShardingTypeError, has_no_rule_for_partial_sums
from gspmd.lowerings import in_force
from gspmd.lowerings.program import program_of
from gspmd.lowerings.unknown import made_alike, planned_steps
from gspmd.planner.unknown import (
    MARK,
    PREFIX,
    Unknown,
    UnknownMove,
    UnknownProduct,
    UnknownReduction,
    UnknownShared,
    UnknownSteps,
    unknowns_in,
)
from gspmd.search.held import HeldArray, Moments, ProgramWork, unknowns_by_dimension, work
from gspmd.search.lines import Lines, unknown_layout
from gspmd.tracing.compilers import OTHER
from gspmd.tracing.dataflow import Path
from gspmd.tracing.jaxprs import inner_jaxprs, without_dead_code
from gspmd.tracing.regions import Region
from gspmd.tracing.sums import Change, Changes, changed_reductions
from gspmd.tracing.value_numbering import Numbering

Build = Callable[[Any, Any], tuple]
"""A function that maps a layout and a mesh to a function and its abstract arguments."""

_REFUSALS = (ShardingTypeError, TypeError, ValueError)
"""Errors that JAX and operations raise if a dimension must not be sharded, or must be sharded differently."""

MOST_HELD = 3
"""The maximum number of unknowns that are made to shard nothing because of one error. An operation needs few dimensions
unsharded, and the program is traced for every set of unknowns that is tried."""

ROUNDS = 200
"""The maximum number of times that a program is traced until its unknowns are tied as it needs them."""


@dataclass(frozen=True)
class Use:
    """A step of a program, with the number of its runs.

    Attributes:
        what: the step, with unknowns. It may stand for a chain of steps.
        times: how often the step runs.
        once: how often the chain's first steps run, if they are hoisted out of a loop in which the tensor does not
            change; otherwise `times`.
        inside: whether the step runs in a shard_map of the program itself; it is then planned without the mesh axes of
            that shard_map.
    """

    what: Unknown
    times: int
    once: int
    inside: bool = False


@dataclass(frozen=True)
class TracedProgram:
    """A traced program, with its steps.

    Attributes:
        uses: its steps; equal steps are counted together.
        jaxpr: its jaxpr, without dead code.
        arguments: its arguments that are arrays.
        sizes: for each unknown, the sizes of the dimensions sharded over it, all of which its mesh axes must divide.
        apart: pairs of unknowns that shard different dimensions of one array, and so cannot have a common mesh axis.
    """

    uses: tuple[Use, ...]
    jaxpr: Jaxpr
    arguments: tuple[HeldArray, ...]
    sizes: Mapping[str, frozenset[int]]
    apart: frozenset[tuple[str, str]]

    @property
    def owed(self) -> set[str]:
        """The unknowns of all partial sums that some step reduces or returns."""
        found: set[str] = set()
        for use in self.uses:
            if isinstance(use.what, UnknownMove):
                found.update(name for spec in (*use.what.before, use.what.after) for name in spec.partial)
        return found

    @property
    def times(self) -> dict[Unknown, int]:
        """Number of times each step runs."""
        found: dict[Unknown, int] = {}
        for use in self.uses:
            found[use.what] = found.get(use.what, 0) + use.times
        return found

    @cached_property
    def work(self) -> ProgramWork:
        """Passes over memory and FLOPs outside the steps; they are the same for all placements of tensors."""
        return work(self.jaxpr)

    @cached_property
    def moments(self) -> Moments:
        """The arrays that a device holds at every moment."""
        return Moments.of(self.jaxpr)

    @property
    def unknowns(self) -> set[str]:
        """Every unknown on which some step or argument depends."""
        of_steps = {name for use in self.uses for name in unknowns_in(use.what)}
        return of_steps.union(*(array.unknowns for array in self.arguments))


def read(build: Build, lines: Lines) -> TracedProgram:
    """Trace a program with unknown lines, and tie those unknowns that must be equal for the program to work.

    If JAX, or an operation, raises an error because two unknowns differ, they are tied. If the error occurs because a
    dimension is sharded at all, that dimension stays unsharded. If JAX cannot differentiate an operation on a parameter
    whose gradient is a partial sum, that gradient is reduced where it is computed.

    Args:
        build: a function from a layout and a mesh to a function and its abstract arguments.
        lines: the lines of the layout, which are tied in place.

    Raises:
        LayoutError, PlanError, SpecError: the program raises an error for a different reason.
    """
    for _ in range(ROUNDS):
        try:
            found = _traced(build, lines)
        except (NotImplementedError, *_REFUSALS) as error:
            if _needs_whole_gradient(error) and _reduced_at_once(build, lines):
                continue
            if isinstance(error, NotImplementedError):
                raise
            text = _less_meshes(str(error))
            # JAX's own errors show types, `f32[8@unknown1]`, or `P('unknown1')`; all other errors of a program are
            # raised unchanged.
            about_lines = isinstance(error, (ShardingTypeError, SpecError, PlanError, LayoutError))
            if not (about_lines or f"@{PREFIX}" in text or f"'{PREFIX}" in text):
                raise
            if _resolved(text, lines) or _resolved_by_trial(build, lines, text):
                continue
            if not _NAME.search(text):
                raise
            _check_unsharded(build, lines)
            text = _NAME.sub(lambda found: lines.described(found.group()), text.partition("\n-----")[0])
            raise PlanError(
                f"cannot search this program, which does not allow every dimension to be sharded: {text.strip()}\n"
                "  Give the lines of this error fixed specs, as in fixed={'mixer.stream': 'BLE'}."
            ) from None
        if not _adjust(found, lines):
            lines.keep(found.unknowns, found.owed)
            return found
    raise PlanError(
        f"cannot search this program: after {ROUNDS} traces some of its lines still have to be made equal.\n"
        "  Write one line for tensors with the same spec, or give some lines a spec with fixed= (--fixed)."
    )


def _adjust(program: TracedProgram, lines: Lines) -> bool:
    """Add a via line for each product of a weight, and tie the products of one sum; return whether anything changed.

    The products of a sum are tied because the gradient of the sum needs all of them sharded alike.
    """
    before, tied = len(lines.vias), False
    products: list[tuple[Spec, Sequence[Spec]]] = []
    for use in program.uses:
        if isinstance(use.what, UnknownSteps) and use.what.plan is made_alike:
            _, one, other = use.what.arguments
            for first, second in zip(one.axes, other.axes):
                if first != second:
                    lines.tie(*first, *second) if first and second else lines.hold(*first, *second)
                    tied = True
        if not (isinstance(use.what, UnknownSteps) and use.what.plan is planned_steps):
            continue
        equation = use.what.arguments[0]
        for term in equation.terms:
            if len(term.operands) == 2 and len(term.operands[0].specs) == 1:
                products.append((term.operands[0].specs[0], term.operands[1].specs))
    lines.add_vias(products)
    if len(lines.vias) == before:  # All products that can have a via have one.
        for use in program.uses:
            tied = _tie_operands(use.what, lines) or tied
    return tied or len(lines.vias) > before


def _tie_operands(what: Unknown, lines: Lines) -> bool:
    """Tie the operands and the result of a product of two activations; return whether anything changed.

    Such a product has no via. An example is the product that gives the logits of attention: its operands share a batch
    dimension with the result. Without ties the planner would plan every combination of three placements, and tensors of
    four dimensions have millions of such combinations.
    """
    if not (isinstance(what, UnknownSteps) and what.plan is planned_steps):
        return False
    equation = what.arguments[0]
    if len(equation.terms) > 1 or len(equation.outputs) > 1:
        return False
    specs = [spec for operand in equation.terms[0].operands for spec in operand.specs]
    if len(specs) != 2 or not {*specs[0].dims} & {*specs[1].dims} & {*equation.outputs[0].dims}:
        return False
    tied = False
    specs.append(equation.outputs[0])
    for dim in dict.fromkeys((*specs[0].dims, *specs[1].dims)):
        first, *others = [spec.axes_of(dim) for spec in specs if dim in spec.dims]
        for other in others:
            if first != other:
                lines.tie(*first, *other) if first and other else lines.hold(*first, *other)
                tied = True
    return tied


@contextmanager
def on_mesh(mesh: AbstractMesh) -> Iterator[None]:
    """Trace on this abstract mesh inside the context, even within `jax.set_mesh` of another mesh."""
    # JAX replaces a mesh only by one of the same size; from the empty mesh it goes to any.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.sharding.use_abstract_mesh(mesh):
        yield


def _traced(build: Build, lines: Lines) -> TracedProgram:
    axes = lines.mesh()
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    with on_mesh(mesh), in_force.lowering("blocking"):
        built = build(unknown_layout(lines), mesh)
        if not (isinstance(built, tuple) and built and callable(built[0])):
            remedy = "Return a function and its abstract arguments: return function, x, w."
            raise PlanError(f"build returned {shown(built)}.\n  {remedy}")
        function, *arguments = built
        closed = jax.make_jaxpr(function)(*arguments)
        jaxpr = without_dead_code(closed.jaxpr)
        region = Region(Numbering(OTHER))
        region.bind_constants(zip(jaxpr.constvars, closed.consts, strict=True))
        found: Counter = Counter()
        found.update(_marks(jaxpr, region, {}, changed_reductions(jaxpr)))
    uses = tuple(Use(what, count * times, count * once, inside) for (what, times, once, inside), count in found.items())
    arguments = (HeldArray.of(var.aval) for var in jaxpr.invars)
    arrays = tuple(array for array in arguments if array is not None)
    return TracedProgram(uses, jaxpr, arrays, *_sizes(closed.jaxpr, uses))


_CUTS = ("slice", "dynamic_slice", "split")


def _cuts_one(equation: Any, result: Any) -> bool:
    """Return whether an operation selects one element along a longer dimension."""
    return any(before > after == 1 for before, after in zip(equation.invars[0].aval.shape, result.aval.shape))


def _sizes(jaxpr: Jaxpr, uses: Iterable[Use]) -> tuple[dict[str, frozenset[int]], frozenset[tuple[str, str]]]:
    """Collect, for each unknown, the sizes of the dimensions that it shards in the program's types and steps.

    Returns:
        The sizes, and the pairs of unknowns that shard different dimensions of one type.
    """
    found: dict[str, set[int]] = {}
    together: set[tuple[str, ...]] = set()  # the unknowns of each type

    def note(names: Iterable[str], size: int) -> None:
        for name in names:
            found.setdefault(name, set()).add(size)

    def note_type(aval: Any, least: int) -> None:
        if HeldArray.of(aval) is not None:
            together.add(tuple(name for names in unknowns_by_dimension(aval) for name in names))
            for names, size in zip(unknowns_by_dimension(aval), getattr(aval, "shape", ())):
                note(names if size >= least else (), size)

    def visit(inner: Jaxpr) -> None:
        for equation in inner.eqns:
            for var in equation.outvars:
                # Ignore dimensions of size 1, except after an operation that takes one element of a dimension. They may
                # be the parts of a stored partial sum: one on this mesh of size 1, later one for each device. A
                # tensor's own dimension of size 1 is found in its steps below.
                note_type(var.aval, 1 if equation.primitive.name in _CUTS and _cuts_one(equation, var) else 2)
            if program_of(equation) is None:
                for each in inner_jaxprs(equation):
                    visit(each)

    for var in jaxpr.invars:
        note_type(var.aval, 1)
    visit(jaxpr)
    for use in uses:
        if isinstance(use.what, UnknownMove):
            sizes = dict(zip(use.what.before[0].dims, use.what.shape))
            specs = (*use.what.before, use.what.after)
        elif isinstance(use.what, UnknownProduct):
            sizes, specs = dict(use.what.sizes), use.what.specs
        else:
            continue  # Others are planned with their sizes, and refused if these are not divided.
        for spec in specs:
            for dim, names in zip(spec.dims, spec.axes):
                note(names, sizes[dim])
    apart = frozenset(pair for names in together for pair in combinations(sorted(names), 2))
    return {name: frozenset(sizes) for name, sizes in found.items()}, apart


Chain = UnknownMove | UnknownSteps


class Run(NamedTuple):
    """A step at its position in the program, to find steps that are repeated.

    Attributes:
        what: the step, with unknowns.
        region: the region that contains it.
        number: the value number of its tensor in the region. If a loop has one outer tensor twice as an operand, the
            tensor has two value numbers inside.
    """

    what: Unknown
    region: Region
    number: int


Chains = dict[tuple[Region, int], list[Run]]
"""The steps found so far for each tensor.

A key consists of the region in which the steps begin to run, and of the tensor's value number in that region.
"""
Marked = tuple[Unknown, int, int, bool]
"""A step, and the fields of its `Use`: how often it runs, how often its hoisted steps run, and `inside`."""


def _marks(
    jaxpr: Jaxpr, region: Region, chains: Chains, changes: Mapping[Path, Changes], path: Path = (), inside: bool = False
) -> Iterator[Marked]:
    """Yield every mark of a program, except marks whose steps have all been yielded for the same tensor.

    Only one branch of a conditional may have marks.

    Raises:
        PlanError: several branches of a conditional have marks.
    """
    for equation in jaxpr.eqns:
        here = (*path, id(equation))
        region.visit(equation)
        if program_of(equation) is not None:
            for marked in _marks_of_program(equation, region, chains, changes, here):
                yield *marked, inside
        elif equation.primitive.name == "cond":
            branches = [marks for marks in _called(equation, region, chains, changes, here, inside) if marks]
            if len(branches) > 1:
                raise PlanError(
                    "cannot search a program whose conditional has planned steps in several branches.\n"
                    "  Search each branch as a program of its own."
                )
            for marks in branches:
                yield from marks
        elif equation.params.get("length") != 0:
            within = inside or equation.primitive.name == "shard_map"
            for marks in _called(equation, region, chains, changes, here, within):
                yield from marks


def _called(
    equation: Any, region: Region, chains: Chains, changes: Mapping[Path, Changes], path: Path, inside: bool
) -> Iterator[list[Marked]]:
    for inner in inner_jaxprs(equation):
        yield list(_marks(inner, region.enter(equation, inner), chains, changes, path, inside))
        region.leave(equation, inner)


def _marks_of_program(
    call: Any, region: Region, chains: Chains, changes: Mapping[Path, Changes], path: Path
) -> Iterator[tuple[Unknown, int, int]]:
    for program in inner_jaxprs(call):
        inside = region.enter(call, program)
        for each in program.eqns:
            here = (*path, id(each))
            if each.primitive.name != MARK:
                inside.visit(each)
                yield from _marks_of_program(each, inside, chains, changes, here)
                continue
            tensor, what = each.invars[0], each.params["mark"].what
            placement = inside.visit(each, (each.params["mark"], 0))
            if isinstance(tensor, Literal):
                continue
            number = inside.number_of(tensor, placement.region)
            others = chains.setdefault((placement.region, number), [])
            own = Run(what, inside, inside.number_of(tensor, inside))
            if placement.first is None:
                yield from _marked(own, placement.region.trips, others)
                if here in changes and placement.region.trips == inside.trips:
                    yield from _saved(what, changes[here][0], inside.trips, each)
            elif own not in others:
                # The same step in a different loop: the part that leaves both loops has run, and the rest, such as a
                # gather, runs here too.
                yield from _marked(own, 0, others)
        region.leave(call, program)


def _marked(own: Run, once: int, others: list[Run]) -> Iterator[tuple[Unknown, int, int]]:
    """Yield a step, and the steps that its chain shares with earlier chains of the same tensor.

    If an earlier chain is in a different loop, only the steps that are hoisted out of both loops are shared with it.
    """
    yield own.what, own.region.trips, once
    chains = [(each, each.what) for each in others if _is_chain(each.what)]
    beside = [what for each, what in chains if each[1:] == own[1:]]
    apart = [what for each, what in chains if each[1:] != own[1:]]
    others.append(own)
    if _is_chain(own.what):
        if beside:
            yield UnknownShared(own.what, tuple(beside)), own.region.trips, once
        elif apart and once:
            yield UnknownShared(own.what, tuple(apart)), 0, once


def _saved(what: Unknown, change: Change, trips: int, mark: Any) -> Iterator[tuple[Unknown, int, int]]:
    """Yield the reductions that a compiler removes, as described in `gspmd.tracing.sums`.

    The arrays at the mark are the parts of a sum. If the sum has a wider dtype than its parts, its reduction takes
    longer by the ratio of the widths.
    """
    merged = change.merged if change.first is None else [change.first]
    steps = [each.equation.params["mark"].what for each in merged]
    others = tuple(each for each in steps if _is_chain(each))
    if not _is_chain(what) or len(others) < len(steps):
        return
    if change.first is not None:
        yield UnknownReduction(what, others), trips, trips
        return
    wider = 1 if change.dtype is None else change.dtype.itemsize // mark.invars[0].aval.dtype.itemsize
    if wider > 1:
        yield UnknownReduction(what, others), -(wider - 1) * trips, -(wider - 1) * trips
    if change.trips > 1:
        behind = UnknownReduction(what, others, adds_up=True)
        removed = wider * (trips - trips // change.trips)
        yield behind, removed, removed


def _is_chain(what: Unknown) -> TypeGuard[Chain]:
    """Return whether a step is a chain of moves of a single tensor."""
    if isinstance(what, UnknownMove):
        return len(what.before) == 1 and not _stays(what.before[0], what.after)
    return isinstance(what, UnknownSteps)


def _stays(before: Spec, after: Spec) -> bool:
    """Return whether going from `before` to `after` moves no data.

    Axes that are `reduced` are ignored, because changing them moves no data.
    """
    return before.partial == after.partial and dict(zip(before.dims, before.axes)) == dict(zip(after.dims, after.axes))


# -- what a program refuses --------------------------------------------------------------------------------------------

_NAME = re.compile(rf"{PREFIX}\d+")
_MESH = re.compile(r"AbstractMesh\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_WANTED = re.compile(
    rf"is (?:sharded over ({PREFIX}\d+)|unsharded), "
    rf"and (?:has to be over ({PREFIX}\d+)|has to be unsharded|every device needs)"
)  # The message of operations for a dimension that is not sharded as they need it.
_TYPE = re.compile(r"\w+\[([^\]]*)\]")
_TUPLE = re.compile(r"\(([^()]*)\)")
_SPEC = re.compile(r"'([^']*)'")
_LETTER = re.compile(r"[A-Z](?=_\{|[A-Z]|$)")


def _resolved(message: str, lines: Lines) -> bool:
    """Tie the unknowns that an error names, or let them shard nothing; return whether the error names any."""
    message = message.split("For simplicity")[0]
    if wanted := _WANTED.findall(message):
        for has, needs in wanted:
            lines.tie(has, needs) if has and needs else lines.hold(has or needs)
        return True
    pairs = [*_pairs(message)]
    # Operands that broadcast may differ where one of them has size 1, and have to be alike where both are sharded.
    pairs = [pair for pair in pairs if all(pair)] if "for broadcasting" in message else pairs[:1]
    for one, other in pairs:
        lines.tie(one, other) if one and other else lines.hold(one or other)
    if pairs:
        return True
    names = list(dict.fromkeys(_NAME.findall(message)))
    if len(names) == 1:
        lines.hold(names[0])
        return True
    return False


def _resolved_by_trial(build: Build, lines: Lines, message: str) -> bool:
    """Choose as few as possible of an error's unknowns to shard nothing, so that the error changes or disappears.

    The result says whether there are such unknowns.

    They are found by trial for operations that need a dimension unsharded, such as a sort, a cumulative sum or an
    index. JAX's errors for these show the types of all operands, and name the dimension in many different ways.
    """
    names = {*_NAME.findall(message)}
    for count in range(1, MOST_HELD + 1):
        for some in combinations(sorted(names), count):
            trial = lines.copy()
            for name in some:
                trial.hold(name)
            try:
                _traced(build, trial)
            except _REFUSALS as error:
                other = _less_meshes(str(error))
                # The same text except for unknowns, with the same tensors, is the same refusal at the same place.
                if _plain(other) == _plain(message) and {*_NAME.findall(other)} >= names - {*some}:
                    continue
            for name in some:
                lines.hold(name)
            return True
    return False


def _needs_whole_gradient(error: BaseException) -> bool:
    """Return whether JAX cannot differentiate an operation because a gradient is a partial sum there.

    A training step raises an error of its own, whose cause is JAX's error.
    """
    return has_no_rule_for_partial_sums(error) or has_no_rule_for_partial_sums(error.__cause__)


def _reduced_at_once(build: Build, lines: Lines) -> bool:
    """Let as few gradients as possible be reduced where they are computed, so that JAX can differentiate the program.

    JAX has no rules for partial sums in many operations, such as the negation in `-jnp.exp(w)`, and its error does not
    name the parameter. So the parameters are tried in halves.

    Returns:
        Whether any gradient that could be a partial sum before can no longer be one.
    """
    owed = [lines.owed(name) for name in lines.trained if lines.may_owe(name)]

    def works(partial: Sequence[str]) -> bool:
        trial = lines.copy()
        for name in {*owed} - {*partial}:
            trial.hold(name)
        try:
            _traced(build, trial)
        except (NotImplementedError, *_REFUSALS) as error:
            return not _needs_whole_gradient(error)  # `read` handles all other errors.
        return True

    def refused(some: Sequence[str]) -> list[str]:  # `some` is known not to work.
        if len(some) == 1:
            return [*some]
        first, second = some[: len(some) // 2], some[len(some) // 2 :]
        found = [] if works(first) else refused(first)
        # If the first half works, the second does not, which needs no trace.
        return found + ([] if found and works(second) else refused(second))

    found = refused(owed) if owed and works([]) else []
    for name in found:
        lines.hold(name)
    return bool(found)


def _check_unsharded(build: Build, lines: Lines) -> None:
    """Raise any error that a program raises even if nothing is sharded, such as one about sizes that do not agree."""
    whole = lines.copy()
    for name in lines.mesh():
        whole.hold(name)
    _traced(build, whole)


def _plain(message: str) -> str:
    """Return an error's text without unknowns: `f32[8@unknown1]` as `f32[8]`, `P('unknown1')` as `P(None)`."""
    for pattern, plain in ((rf"@{PREFIX}\d+", ""), (rf"'{PREFIX}\d+'", "None"), (rf"_\{{?{PREFIX}\d+\}}?", "")):
        message = re.sub(pattern, plain, message)
    return message


def _less_meshes(message: str) -> str:
    """Return an error's text without the axes of meshes, because these list every unknown."""
    return _MESH.sub("mesh", message)


def _pairs(message: str) -> Iterator[tuple[str, str]]:
    """Yield, for each dimension, the two unknowns that differ between the types or specs that an error compares."""
    written = [_named_dims(text) for text in _TUPLE.findall(message) if _NAME.search(text)]
    types = [_named_dims(text) for text in _TYPE.findall(message) if _NAME.search(text)]
    specs: dict[str, list[list[str]]] = {}  # by letters: a query is not compared with a cache
    for text in filter(_NAME.search, _SPEC.findall(message)):
        specs.setdefault("".join(_LETTER.findall(text)), []).append(_spec_dims(text))
    for found in (types, *specs.values(), written):
        for first, *rest in [found] if found else []:
            for second in rest:
                if len(first) == len(second):
                    yield from ((one, other) for one, other in zip(first, second) if one != other)


def _named_dims(text: str) -> list[str]:
    return [name.group() if (name := _NAME.search(part)) else "" for part in text.split(",")]


def _spec_dims(text: str) -> list[str]:
    return [name.group() if (name := _NAME.search(part)) else "" for part in re.findall(r"[A-Z](?:_\{[^}]*\})?", text)]
