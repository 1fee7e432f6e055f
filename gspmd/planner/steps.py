"""Steps and routines: the work of an equation on one device, as data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from gspmd.annotate.spec import Spec
from gspmd.hardware.chips import Chip
from gspmd.hardware.dtypes import itemsize

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "slice", "einsum")


@dataclass(frozen=True, repr=False)
class Step:
    """A step of one device, which is a collective, a slice, or a local einsum; costs are per execution.

    Attributes:
        kind: one of `KINDS`.
        axes: the mesh axes over which the step runs, from major to minor; empty for an einsum.
        wire_bytes: bytes that one device sends.
        seconds: the time that the step takes, by the chip's figures for links and matrix unit.
        before: the tensor's spec before the step.
        after: the tensor's spec after the step.
        operand: the name of the tensor that moves, such as `"operand 1"` or `"result"`.
        flops: floating-point operations of a local einsum; 0 for other steps.
        other: the spec of a local einsum's second operand; None for other steps.
    """

    kind: str
    axes: tuple[str, ...]
    wire_bytes: int
    seconds: float
    before: Spec
    after: Spec
    operand: str = ""
    flops: int = 0
    other: Spec | None = None

    @property
    def is_collective(self) -> bool:
        """Whether devices communicate in the step."""
        return self.kind not in ("slice", "einsum")

    @property
    def name(self) -> str:
        """The kind and the mesh axes as text, such as `all-gather yz`."""
        from gspmd.display.units import axes_text

        return f"{self.kind} {axes_text(self.axes)}".rstrip()

    @property
    def sources(self) -> tuple[Spec, ...]:
        """The spec before the step, or the specs of both operands of a product."""
        return (self.before,) if self.other is None else (self.before, self.other)

    @property
    def source(self) -> str:
        """The specs in `sources` as text, such as `BE_x · E_xF`."""
        return " · ".join(map(str, self.sources))

    @property
    def amount(self) -> str:
        """The bytes sent, or the FLOPs of an einsum, as text."""
        from gspmd.display.units import amount_of_bytes, amount_of_flops

        return amount_of_flops(self.flops) if self.kind == "einsum" else amount_of_bytes(self.wire_bytes)

    def __repr__(self) -> str:
        from gspmd.display.console import printable
        from gspmd.display.units import amount_of_seconds

        figures = f"{self.amount}, {amount_of_seconds(self.seconds)}"
        return printable(f"<Step {self.name}: {self.source} -> {self.after}, {figures}>")


@dataclass(frozen=True)
class Move:
    """A move, in which `steps` bring input number `source` to the spec `spec`."""

    source: int
    spec: Spec
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Product:
    """The local einsum of one or two moved tensors, and the steps that follow it.

    If there is a single tensor with nothing to sum, it is passed on unchanged, and the einsum is not counted as a step.

    Attributes:
        left: the index of the move of the first operand.
        right: the index of the move of the second operand, or None if there is none.
        einsum: the local einsum. `einsum.after` is the spec of its result, which may be a partial sum.
        steps: the steps that bring the result of the einsum to `spec`.
        spec: the spec in which the product is added to other products, or leaves the routine.
    """

    left: int
    right: int | None
    einsum: Step
    steps: tuple[Step, ...]
    spec: Spec

    @property
    def operands(self) -> tuple[int, ...]:
        """The indices of the moves of the operands, of which there are one or two."""
        return (self.left,) if self.right is None else (self.left, self.right)

    @property
    def passes_through(self) -> bool:
        """Whether the einsum has nothing to compute, because it has one operand and no dimension to sum."""
        return self.right is None and set(self.einsum.before.dims) == set(self.einsum.after.dims)

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """The local einsum, if there is one, and the steps after the einsum."""
        return self.steps if self.passes_through else (self.einsum, *self.steps)


@dataclass(frozen=True)
class RoutineOutput:
    """An output of a routine, which is a sum of products.

    Attributes:
        products: the indices of the products, which are added.
        spec: the spec of the output. The sum is broadcast along dimensions that it lacks.
        steps: the steps after the sum.
    """

    products: tuple[int, ...]
    spec: Spec
    steps: tuple[Step, ...]


@dataclass(frozen=True, repr=False)
class Routine:
    """Everything that runs inside one shard_map, in this order: the moves, the local products, and the outputs.

    Attributes:
        inputs: the specs of the tensors that are moved.
        moves: the moves of the inputs.
        products: the local einsums of moved tensors.
        outputs: the sums of products.
    """

    inputs: tuple[Spec, ...]
    moves: tuple[Move, ...]
    products: tuple[Product, ...]
    outputs: tuple[RoutineOutput, ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every step in the order of execution."""
        program = NumberedSteps()
        program.add_routine(self)
        return tuple(program.steps)

    def __repr__(self) -> str:
        return f"<Routine {', '.join(step.name for step in self.steps) or 'without steps'}>"


def total_cost(steps: tuple[Step, ...]) -> tuple[int, int, int]:
    """Return the total picoseconds and bytes of steps, and the number of steps that are not einsums.

    All three are whole numbers, so that ties are exact.
    """
    return (
        sum(picoseconds(step.seconds) for step in steps),
        sum(step.wire_bytes for step in steps),
        sum(step.kind != "einsum" for step in steps),
    )


def picoseconds(seconds: float) -> int:
    """Return seconds as whole picoseconds, rounded up, so that splitting a step in two never seems cheaper."""
    return ceil(seconds * 1e12 - 1e-6)  # minus the rounding error of a float that represents a whole number


@dataclass(frozen=True)
class Environment:
    """Everything on which costs depend: the sizes, the mesh without axes of size 1, the chip, and the precision."""

    sizes: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    chip: Chip
    precision: str = "default"

    @classmethod
    def of(
        cls,
        sizes: tuple[tuple[str, int], ...],
        mesh: tuple[tuple[str, int], ...],
        chip: Chip,
        precision: str = "default",
    ) -> "Environment":
        """Return the environment of a mesh, without the mesh axes of size 1.

        Sharding over an axis of size 1 costs nothing, and each such axis would multiply the number of placements to
        search.
        """
        return cls(sizes, tuple((axis, size) for axis, size in mesh if size > 1), chip, precision)


@dataclass(frozen=True)
class Tensor:
    """An operand or a result of an equation.

    Attributes:
        spec: the spec of the tensor.
        dtype: the dtype of the tensor.
        wire: the dtype in which the tensor is sent.
        name: the name of the tensor in plans and messages.
        reduced: the mesh axes over which the tensor's gradient is a partial sum; `spec` does not list them.
    """

    spec: Spec
    dtype: str
    wire: str
    name: str = ""
    reduced: tuple[str, ...] = ()

    @cached_property
    def itemsize(self) -> int:
        """Bytes per element on the wire."""
        return itemsize(self.wire)


@dataclass(frozen=True)
class Contraction:
    """A product of the left operand with a right operand, or a sum of the left operand alone.

    Attributes:
        right: the right operand, or None.
        target: the result, with its target spec.
        pinned: the spec to which the right operand is brought, or None to search for this spec.
    """

    right: Tensor | None
    target: Tensor
    pinned: Spec | None = None


@dataclass(frozen=True)
class Chain:
    """Steps that run one after another; `first` is the number that the first of these steps has in its program."""

    steps: tuple[Step, ...] = ()
    first: int = 0


@dataclass(frozen=True)
class RoutineChains:
    """The steps of a routine as chains, with the numbers that the steps have in a program.

    Attributes:
        moves: the chain of each move.
        einsums: the step numbers of the products' local einsums.
        products: the chain after each local einsum.
        outputs: the chain after each sum.
    """

    moves: Mapping[int, Chain]
    einsums: Mapping[int, int]
    products: Mapping[int, Chain]
    outputs: Mapping[int, Chain]


class NumberedSteps:
    """The steps of a program, numbered in the order in which they are added.

    The named scope of a step, the trace and the ledger use the number of the step.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, steps: Iterable[Step], share: float = 1.0) -> Chain:
        """Append steps, and return them as a chain.

        `share` is the fraction of the data on which the steps run; the costs of the steps are scaled by this fraction.
        """
        chain = Chain(tuple(steps) if share == 1 else tuple(scaled(step, share) for step in steps), len(self.steps))
        self.steps += chain.steps
        return chain

    def add_routine(self, routine: Routine) -> RoutineChains:
        """Append the steps of a routine in the order of its moves, products and outputs, and return their chains."""
        moves = {n: self.add(move.steps) for n, move in enumerate(routine.moves)}
        einsums, products = {}, {}
        for n, product in enumerate(routine.products):
            einsums[n] = self.add(() if product.passes_through else (product.einsum,)).first
            products[n] = self.add(product.steps)
        return RoutineChains(moves, einsums, products, {n: self.add(o.steps) for n, o in enumerate(routine.outputs)})


def scaled(step: Step, share: float) -> Step:
    """Return a step that runs on a fraction of its tensor; its seconds, bytes and FLOPs are scaled by this fraction."""
    sent, flops = round(step.wire_bytes * share), round(step.flops * share)
    return replace(step, seconds=step.seconds * share, wire_bytes=sent, flops=flops)
