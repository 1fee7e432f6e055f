"""The dataflow of a program: one list of its operations, with the operations that make and use each value.

Compilers inline all calls. So the list has, in place of a call, the operations of the called program. A loop is one
operation, and the body of the loop has a separate dataflow.
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
"""The position of an operation in nested calls: the `id`s of all equations that contain the operation, outermost first,
followed by the `id` of the operation's own equation. This last `id` alone is not unique, because a jaxpr may be called
several times."""

Value = Hashable
"""A value of a program, as a pair. The first element is the path of the calls around the operation that makes the
value. The second element is the value's variable in the innermost of these calls."""


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of a program.

    Attributes:
        equation: the equation of the jaxpr that describes this operation.
        path: the path of this operation.
        operands: the values of the operands; None stands for a literal.
        results: the values of the results.
        program: the planned program to which the operation belongs, or None if the operation belongs to no planned
            program.
        program_path: the path of the operation that calls the planned program.
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
        """The number of the planned step to which the operation belongs, or None if it belongs to no step."""
        return step_number(self.equation)

    @property
    def step_key(self) -> StepKey:
        """The equation of the planned program and the number of the step; only for an operation in a step."""
        assert self.program is not None
        assert self.step is not None
        return self.program.equation, self.step

    @property
    def is_mark(self) -> bool:
        """Whether the operation is a mark, which stands for a planned step whose specs a search has not yet chosen."""
        return self.name == MARK


@dataclass(frozen=True)
class Dataflow:
    """The operations of a program, and the operations that make and use each value.

    Attributes:
        operations: all operations, in order. A call is replaced by the operations of the called program.
        arguments: the values of the program's arguments.
        results: the values of the program's results; None stands for a literal.
        makers: a mapping from a value to the operation that makes the value.
        users: a mapping from a value to the operations that use the value. An operation is listed once for each use.
    """

    operations: list[Operation] = field(default_factory=list)
    arguments: list[Value] = field(default_factory=list)
    results: list[Value | None] = field(default_factory=list)
    makers: dict[Value, Operation] = field(default_factory=dict)
    users: defaultdict[Value, list[Operation]] = field(default_factory=lambda: defaultdict(list))

    def uses(self, value: Value) -> int:
        """Return the number of uses of a value; a use as a result of the program is counted too."""
        return len(self.users[value]) + self.results.count(value)


def dataflow(jaxpr: Jaxpr, path: Path = ()) -> Dataflow:
    """Return the dataflow of a program.

    Args:
        jaxpr: the program.
        path: the path of the operation that contains the program; empty for a whole program.
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
    """Append the operations of a called program to a dataflow, and return the values of the program's results.

    Args:
        flow: the dataflow.
        jaxpr: the called program.
        path: the path of the call.
        arguments: the values of the arguments; None stands for a literal.
        program: the planned program to which the operations belong, or None.
        program_path: the path of the operation that calls the planned program.
    """
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
