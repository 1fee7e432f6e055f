"""Steps with unknown placements, which describe the work of a program for any specs of its tensors.

A search traces a program once, on an abstract mesh. The axes of this mesh have size 1 and are placeholders: every
dimension of every line of a layout is sharded over an axis of its own, an *unknown*. So the axes divide all sizes, and
nothing is sent. Each planned step says between which unknown placements it moves a tensor, or in which unknown
placements it multiplies tensors. The cost of the step is known once mesh axes replace the unknowns (`gspmd.search`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any

from gspmd.annotate.spec import Spec
from gspmd.planner.steps import Step

PREFIX = "unknown"
"""The prefix of the names of unknowns."""

MARK = "gspmd_mark"
"""The name of the primitive that stands in a program for a step with unknown placements."""

Known = Mapping[str, tuple[str, ...]]
"""The mesh axes that replace each unknown, from major to minor."""


def is_unknown(mesh: Iterable[str]) -> bool:
    """Return whether the axes of a mesh are unknowns, which a search replaces by real mesh axes."""
    return next(iter(mesh), "").startswith(PREFIX)


@dataclass(frozen=True)
class UnknownMove:
    """A move of a tensor to another placement, or a move of several tensors that are added on the way.

    Attributes:
        before: the source spec. There are several for the parts of a gradient, which are added in the cheapest
            placement.
        after: the target spec, with dimensions in any order.
        shape: the shape of the unsharded tensor, with dimensions in the order of `before`.
        itemsize: bytes of an element on the wire.
        reduce: the operation by which a partial sum is reduced, `"sum"` or `"max"`.
        searched: whether the planner searches for a placement on the way, as it does for the gradient of a move. This
            costs as much as the direct move, but where several paths cost the same, another one may be taken.
    """

    before: tuple[Spec, ...]
    after: Spec
    shape: tuple[int, ...]
    itemsize: int
    reduce: str = "sum"
    searched: bool = False

    @property
    def transposes(self) -> bool:
        """Whether the target spec has the dimensions in a different order."""
        return self.before[0].dims != self.after.dims


@dataclass(frozen=True)
class UnknownProduct:
    """A local product of two tensors, which are not moved for the product.

    Attributes:
        specs: the specs of the two operands and of the result. The result may be a partial sum.
        dtypes: the dtypes in which the two operands are read and the result is written.
        sizes: the sizes of all dimensions.
        precision: the precision of a float32 product, which `Chip.arithmetic` explains.
    """

    specs: tuple[Spec, Spec, Spec]
    dtypes: tuple[str, str, str]
    sizes: tuple[tuple[str, int], ...]
    precision: str = "default"

    @property
    def flops(self) -> int:
        """FLOPs of the product, over all devices."""
        sizes = dict(self.sizes)
        return 2 * prod(sizes[dim] for dim in {dim for spec in self.specs for dim in spec.dims})


@dataclass(frozen=True)
class UnknownSteps:
    """Steps that an operation plans by itself, once the specs of its tensors are known.

    Attributes:
        plan: a function that takes `arguments` and returns a mapping from names to steps.
        arguments: the arguments of `plan`, all hashable. Specs and a context among the arguments have unknowns.
        name: the name of these steps in the mapping that `plan` returns.
        is_product: whether these steps are a local product. Its seconds include reading its operands.
    """

    plan: Callable[..., Mapping[str, Any]]
    arguments: tuple
    name: str
    is_product: bool = False


@dataclass(frozen=True)
class UnknownMoves(UnknownSteps):
    """A move that an operation plans by itself, together with its other moves, once the specs are known.

    Attributes:
        before: the source spec of the tensor, or None if other moves of the operation depend on this spec. If it is
            given, `plan` is called only once for all source specs, and the source spec in the result of `plan` is
            ignored.
    """

    before: Spec | None = None


@dataclass(frozen=True)
class UnknownShared:
    """The first steps of a chain, as far as earlier chains of the same tensor begin with the same steps.

    A program runs these steps only once.

    Attributes:
        chain: the chain.
        others: the chains that have run before `chain`.
    """

    chain: "UnknownMove | UnknownSteps"
    others: "tuple[UnknownMove | UnknownSteps, ...]"


@dataclass(frozen=True)
class UnknownReduction:
    """The last step of a chain, if this step is a reduction that a compiler may remove; otherwise no step.

    Attributes:
        chain: the chain that ends in the reduction.
        others: other chains, whose results are only added to the result of `chain`. All chains must end in the same
            reduction.
        adds_up: whether a loop adds up the results, so that one all-reduce after the loop is enough.
    """

    chain: "UnknownMove | UnknownSteps"
    others: "tuple[UnknownMove | UnknownSteps, ...]"
    adds_up: bool = False


@dataclass(frozen=True)
class RequiredMove:
    """A move that must be possible even if it never runs, because all gradients of an equation are planned together."""

    move: UnknownMove


Unknown = UnknownMove | UnknownProduct | UnknownSteps | UnknownShared | UnknownReduction | RequiredMove


@dataclass(frozen=True, repr=False)
class UnknownStep(Step):
    """A step that stands for a whole chain of steps, which cannot be planned before the specs are known."""

    what: Unknown | None = None

    @classmethod
    def of(cls, what: Unknown, before: Spec, after: Spec, operand: str = "") -> "UnknownStep":
        """Return the step that stands for the unknown steps `what` of a tensor."""
        return cls("unknown", (), 0, 0.0, before, after, operand, what=what)


class Mark(str):
    """The parameter of the primitive that marks an unknown step; it is a short text, and equal for equal steps.

    Attributes:
        what: the unknown step.
    """

    what: Unknown

    @classmethod
    def of(cls, what: Unknown, name: str) -> "Mark":
        """Return the mark of an unknown step, with `name` as its text; different steps must have different names."""
        mark = cls(name)
        mark.what = what
        return mark


def placed(value: Any, known: Known, others: Mapping[type, Any] = {}) -> Any:
    """Replace unknowns by mesh axes in every spec inside a nested tuple or frozen dataclass.

    Args:
        value: a nested tuple or frozen dataclass that contains specs.
        known: the mesh axes that replace each unknown. Unknowns that are missing here shard nothing. Axes that are not
            unknowns stay.
        others: a mapping from other types, such as `Context`, to the values that replace values of these types.

    >>> str(placed(Spec.parse("B_{unknown1}E_{unknown2}"), {"unknown1": ("x", "y")}))
    'B_xyE'
    """
    if isinstance(value, Spec):
        here = lambda name: known.get(name, () if name.startswith(PREFIX) else (name,))  # noqa: E731
        at = lambda axes: tuple(axis for name in axes for axis in here(name))  # noqa: E731
        # A partial sum over several unknowns is one over all of their axes, each once.
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
    """Return the unknowns in the specs of a nested tuple or frozen dataclass, in the order in which they appear."""
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
