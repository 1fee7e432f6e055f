"""Steps whose placements are not known yet: what a program does with a tensor, wherever it will lie.

A search traces a program once, on an abstract mesh whose axes have size 1 and stand for what is not known: every
dimension of every line of a layout lies over an axis of its own, an *unknown*. Then everything divides and nothing is
sent, and each planned step says between which unknown placements it moves a tensor, or in which it multiplies. What it
costs follows when mesh axes are put in place of the unknowns (`gspmd.search`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from gspmd.annotate.spec import Spec
from gspmd.planner.steps import Step

PREFIX = "unknown"
"""The prefix of the names of such mesh axes."""

MARK = "gspmd_mark"
"""The primitive that stands in a program for such a step."""

Known = Mapping[str, tuple[str, ...]]
"""The mesh axes in place of each unknown, major first."""


def is_unknown(mesh: Iterable[str]) -> bool:
    """Return whether the axes of a mesh, by name, stand for placements that are not known."""
    return next(iter(mesh), "").startswith(PREFIX)


@dataclass(frozen=True)
class UnknownMove:
    """Bring a tensor from one placement to another: from `before`, or from each of several, which are added up.

    Attributes:
        before: specs of what arrives; more than one for the parts of a gradient, which may meet where that is cheapest.
        after: the spec it has to have, in any order of dimensions.
        shape: of the whole tensor, in the order of `before`.
        itemsize: bytes of an element on the wire.
        reduce: what a partial sum stands for.
    """

    before: tuple[Spec, ...]
    after: Spec
    shape: tuple[int, ...]
    itemsize: int
    reduce: str = "sum"


@dataclass(frozen=True)
class UnknownProduct:
    """Multiply two tensors where they lie.

    Attributes:
        specs: of both, and of the result, which may be a partial sum.
        dtypes: of the three, as their elements are read and written.
        sizes: of all dimensions.
    """

    specs: tuple[Spec, Spec, Spec]
    dtypes: tuple[str, str, str]
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class UnknownSteps:
    """The steps that an operation plans by itself: a function from where its tensors lie to the steps, by name.

    Attributes:
        plan: from `arguments` to a mapping from names to steps; specs and the context among them are unknown.
        arguments: all hashable.
        name: of these steps in the mapping.
        is_product: whether they are a local product, whose seconds have the reading of its operands.
    """

    plan: Callable[..., Mapping[str, Any]]
    arguments: tuple
    name: str
    is_product: bool = False


@dataclass(frozen=True)
class UnknownMoves(UnknownSteps):
    """A move that an operation plans by itself: a function from where its tensors lie to all its moves, by name.

    Attributes:
        before: where the tensor comes from, if no move of the operation depends on it: the function is then asked once
            for all these places, and its own answer to where the tensor comes from is not read. None if one depends.
    """

    before: Spec | None = None


@dataclass(frozen=True)
class UnknownShared:
    """First steps that one chain has in common with others of the same tensor, so that a program has them once.

    Attributes:
        chain: whose steps they are.
        others: that have run before.
    """

    chain: "UnknownMove | UnknownSteps"
    others: "tuple[UnknownMove | UnknownSteps, ...]"


@dataclass(frozen=True)
class UnknownWay:
    """A move that has to be possible and is not made: of a gradient that is planned with others, whoever needs it."""

    move: UnknownMove


Unknown = UnknownMove | UnknownProduct | UnknownSteps | UnknownShared | UnknownWay


@dataclass(frozen=True, repr=False)
class UnknownStep(Step):
    """A step of a chain that cannot be planned yet; it stands for the whole chain."""

    what: Unknown | None = None

    @classmethod
    def of(cls, what: Unknown, before: Spec, after: Spec, operand: str = "") -> "UnknownStep":
        """Return the step that does this to a tensor."""
        return cls("unknown", (), 0, 0.0, before, after, operand, what=what)


class Mark(str):
    """The parameter of a marked operation: short, and its own, so that equal marks are equal operations."""

    what: Unknown

    @classmethod
    def of(cls, what: Unknown, name: str) -> "Mark":
        """Return the mark of what is done, called `name`."""
        mark = cls(name)
        mark.what = what
        return mark


def placed(value: Any, known: Known, others: Mapping[type, Any] = {}) -> Any:
    """Put mesh axes in place of the unknowns, in every spec of a nested tuple or frozen dataclass; known ones stay.

    Args:
        value: what has specs in it.
        known: the mesh axes of each unknown; one that is missing shards nothing.
        others: what to put in place of values of other types, as a `Context`.

    >>> str(placed(Spec.parse("B_{unknown1}E_{unknown2}"), {"unknown1": ("x", "y")}))
    'B_xyE'
    """
    if isinstance(value, Spec):
        here = lambda name: known.get(name, () if name.startswith(PREFIX) else (name,))  # noqa: E731
        at = lambda axes: tuple(axis for name in axes for axis in here(name))  # noqa: E731
        # a sum over several unknowns is over every axis that one of them lies over
        sums = (tuple(dict.fromkeys(at(names))) for names in (value.partial, value.reduced))
        return Spec(value.dims, tuple(map(at, value.axes)), *sums)
    if type(value) in others:
        return others[type(value)]
    if isinstance(value, tuple):
        return tuple(placed(each, known, others) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: placed(getattr(value, each.name), known, others) for each in fields(value)}
        return replace(value, **changed)
    return value


def unknowns_in(value: Any) -> tuple[str, ...]:
    """Return the unknowns in the specs of a nested tuple or frozen dataclass, in the order in which they stand."""
    if isinstance(value, Spec):
        named = [axis for axes in (*value.axes, value.partial, value.reduced) for axis in axes]
        return tuple(dict.fromkeys(axis for axis in named if axis.startswith(PREFIX)))
    if is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, each.name) for each in fields(value))
    if isinstance(value, tuple):
        return tuple(dict.fromkeys(name for each in value for name in unknowns_in(each)))
    return ()


def dims_in(value: Any) -> set[str]:
    """Return the dimensions in the specs of a nested tuple or frozen dataclass."""
    if isinstance(value, Spec):
        return {*value.dims}
    if is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, each.name) for each in fields(value))
    return set().union(*map(dims_in, value)) if isinstance(value, tuple) else set()
