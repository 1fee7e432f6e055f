"""Labels that follow the variables of a jaxpr, from its results back to its operands.

`gspmd.search.held` uses them to find what an operand or a result is to a planned operation. Shapes would not tell: a
microbatch may have as many tokens as a weight has rows, and a weight may be square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from jax.extend.core import Jaxpr, Literal

from gspmd.jax_internals import scan_operands
from gspmd.lowerings.transformations.gradient import ENTERING, TOGETHER
from gspmd.lowerings.transformations.hoisting import NEVER_HOISTED
from gspmd.planner.unknown import MARK
from gspmd.tracing.jaxprs import inner_jaxprs

PASSING = ("optimization_barrier", "name", MARK, ENTERING, TOGETHER, NEVER_HOISTED)
"""Operations whose results are their operands."""
RETYPED = ("reshard", "mesh_cast")
"""Operations that change only the sharding in the type of an array, such as partial sums made on one device."""
_THROUGH = (*PASSING, *RETYPED)

Rule = Callable[[Any, Sequence[Set[int]]], Sequence[Set[int]] | None]
"""A function from an equation and the labels of its results to the labels of its first operands.

The other operands get no labels. None means that nothing is special about the equation: labels are then followed
through calls, loops and conditionals, and through `PASSING` and `RETYPED`; any other equation ends them.
"""


def labels_of_operands(jaxpr: Jaxpr, results: Sequence[Set[int]], rule: Rule) -> list[set[int]]:
    """Return the labels of a program's operands, found from those of its results; the program is read from its end."""
    labels: dict[Any, set[int]] = {}

    def note(variables: Sequence[Any], each: Sequence[Set[int]]) -> None:
        for var, some in zip(variables, each):
            if not isinstance(var, Literal):
                labels.setdefault(var, set()).update(some)

    note(jaxpr.outvars, results)
    for equation in reversed(jaxpr.eqns):
        of_results = [labels.get(var, set()) for var in equation.outvars]
        of_operands = rule(equation, of_results)
        note(equation.invars, _passed_on(equation, of_results, rule) if of_operands is None else of_operands)
    return [labels.get(var, set()) for var in jaxpr.invars]


def passes_on(equation: Any) -> bool:
    """Return whether labels are followed through an equation: it calls a program, or passes its operands on."""
    return equation.primitive.name in _THROUGH or bool(_called(equation))


def carried(equation: Any) -> tuple[int, int]:
    """Return the place of the first operand that a loop carries, and the number of operands that it carries.

    These operands become the first results of the loop. An equation that is not a loop carries none.
    """
    if equation.primitive.name == "scan":
        return scan_operands(equation)
    if equation.primitive.name == "while":
        return equation.params["cond_nconsts"] + equation.params["body_nconsts"], len(equation.outvars)
    return 0, 0


def _passed_on(equation: Any, results: Sequence[Set[int]], rule: Rule) -> Sequence[Set[int]]:
    """Return the labels of the operands of an equation about which nothing is special."""
    if equation.primitive.name in _THROUGH:
        return results
    first, count = carried(equation)
    while True:
        found: list[set[int]] = [set() for _ in equation.invars]
        for inner, start in _called(equation):
            for labels, more in zip(found[start:], labels_of_operands(inner, results, rule), strict=True):
                labels |= more
        # An iteration of a loop gets what the previous one has made, until no label is new.
        before = [*found[first : first + count], *results[count:]]
        again = [labels | more for labels, more in zip(results, before, strict=True)]
        if all(labels == more for labels, more in zip(results, again)):
            return found
        results = again


def _called(equation: Any) -> list[tuple[Jaxpr, int]]:
    """Return the programs that compute the results of a call, each with the place of its first operand.

    A program with other numbers of operands or results than its equation is left out, so labels end there.
    """
    name, params = equation.primitive.name, equation.params
    programs = [params["body_jaxpr"].jaxpr] if name == "while" else inner_jaxprs(equation)
    first = params["cond_nconsts"] if name == "while" else 1 if name == "cond" else 0
    sizes = len(equation.invars) - first, len(equation.outvars)
    return [(inner, first) for inner in programs if (len(inner.invars), len(inner.outvars)) == sizes]
