"""The dataflow of a program: its operations in one list, with the makers and the users of every value.

Compilers inline all calls, so calls are replaced by the operations of the called programs. A loop is one operation, and
its body has a separate dataflow.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, Literal

from gspmd.lowerings.program import PlannedProgram, program_of
from gspmd.planner.unknown import MARK
from gspmd.tracing.jaxprs import inner_jaxprs, is_call, runs_once
from gspmd.tracing.steps import step_number
from gspmd.tracing.value_numbering import StepKey

Path = tuple[int, ...]
"""The operations that contain an operation, outermost first, by identity, since a jaxpr may be called several times."""

Value = Hashable
"""A value: the calls around the operation that makes it, and its variable in the innermost call."""


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of a program.

    Attributes:
        equation: the operation as an equation of its jaxpr.
        path: the operations that contain this operation, and last the operation itself.
        operands: the values of the operands, with None for literals.
        results: the values of the results.
        program: the planned program to which the operation belongs, or None outside of planned programs.
        program_path: the path of the operation that calls this program.
    """

    equation: Any
    path: Path
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    program: PlannedProgram | None
    program_path: Path

    @property
    def name(self) -> str:
        """The name of the operation's JAX primitive."""
        return self.equation.primitive.name

    @property
    def step(self) -> int | None:
        """The number of the planned step to which the operation belongs, or None outside of steps."""
        return step_number(self.equation)

    @property
    def step_key(self) -> StepKey:
        """The equation of the planned program and the number of the step, for an operation in a step."""
        assert self.program is not None
        assert self.step is not None
        return self.program.equation, self.step

    @property
    def is_mark(self) -> bool:
        """Whether the operation is a mark, which stands for steps whose placements are unknown."""
        return self.name == MARK


@dataclass(frozen=True)
class Dataflow:
    """The operations of a program, and where each value comes from and goes to.

    Attributes:
        operations: all operations, in order, with calls replaced by what they call.
        arguments: the values of the arguments.
        results: the values of the results, with None for literals.
        makers: for each value, the operation that makes it.
        users: for each value, the operations that use it, once for each use.
    """

    operations: list[Operation] = field(default_factory=list)
    arguments: list[Value] = field(default_factory=list)
    results: list[Value | None] = field(default_factory=list)
    makers: dict[Value, Operation] = field(default_factory=dict)
    users: defaultdict[Value, list[Operation]] = field(default_factory=lambda: defaultdict(list))

    def uses(self, value: Value) -> int:
        """Return the number of uses of a value, including uses as a result of the program."""
        return len(self.users[value]) + self.results.count(value)


def dataflow(jaxpr: Jaxpr, path: Path = ()) -> Dataflow:
    """Return the dataflow of a program.

    Args:
        jaxpr: the program.
        path: the operations that contain the program.
    """
    flow = Dataflow(arguments=[(path, var) for var in jaxpr.invars])
    flow.results.extend(_inlined(flow, jaxpr, path, flow.arguments, None, ()))
    return flow


def _inlined(
    flow: Dataflow,
    jaxpr: Jaxpr,
    path: Path,
    arguments: Sequence[Value | None],
    program: PlannedProgram | None,
    program_path: Path,
) -> list[Value | None]:
    """Append the operations of a program that is called with these arguments; return the values of its results."""
    known = dict(zip(jaxpr.invars, arguments, strict=True))

    def value(var: Any) -> Value | None:
        return None if isinstance(var, Literal) else known.setdefault(var, (path, var))

    for equation in jaxpr.eqns:
        operands, here = tuple(map(value, equation.invars)), (*path, id(equation))
        own = program or program_of(equation)
        own_path = program_path if program else here
        inner = next(inner_jaxprs(equation), None)
        if inner is not None and (is_call(equation, inner) or runs_once(equation)):
            results = _inlined(flow, inner, here, operands, own, own_path)
            known.update(zip(equation.outvars, results, strict=True))
            continue
        made = tuple(map(value, equation.outvars))
        operation = Operation(equation, here, operands, made, own, own_path)
        flow.operations.append(operation)
        flow.makers.update(dict.fromkeys(made, operation))
        for operand in operands:
            if operand is not None:
                flow.users[operand].append(operation)
    return [value(var) for var in jaxpr.outvars]
