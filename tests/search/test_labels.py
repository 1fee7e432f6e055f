"""Labels of results, followed back to the operands on which a rule says that they depend."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gspmd.search.labels import labels_of_operands, passes_on


def all_operands(equation, results):
    """Every operand of an operation has the labels of all of its results."""
    return None if passes_on(equation) else [set().union(*results)] * len(equation.invars)


def rotated(a, b, c, d):
    """Three rounds of a loop bring `c` to the first result; what the loop stacks depends on `d` as well."""
    return lax.scan(lambda carry, _: ((carry[1], carry[2], carry[0]), carry[0] + d), (a, b, c), None, length=5)


def counted(a, b, c):
    """The condition of a loop reads `a`, and its body `b`; neither is a constant of the other."""
    return lax.while_loop(lambda carry: carry[0] < a, lambda carry: (carry[0] + b, carry[1]), (0.0, c))


def chosen(a, b, c):
    return lax.cond(c > 0, lambda a, b: (a, 2.0), lambda a, b: (a + b, 3.0), a, b)


def called(a, b):
    return jax.jit(lambda a, b: (jax.checkpoint(jnp.sin)(b), a))(a, b)


@pytest.mark.parametrize(
    ("function", "operands", "wanted"),
    [
        (rotated, 4, [{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}, {3}]),
        (counted, 3, [set(), {0}, {1}]),
        (chosen, 3, [{0}, {0}, set()]),
        (called, 2, [{1}, {0}]),
    ],
)
def test_results_are_followed_through_calls_loops_and_conditionals(function, operands, wanted):
    jaxpr = jax.make_jaxpr(function)(*[1.0] * operands).jaxpr
    numbers = [{number} for number in range(len(jaxpr.outvars))]
    assert labels_of_operands(jaxpr, numbers, all_operands) == wanted


def test_a_rule_ends_labels():
    """An equation without a rule, and operands for which the rule gives none, have no labels."""
    jaxpr = jax.make_jaxpr(lambda a, b: (jnp.sin(a), a * b))(1.0, 1.0).jaxpr
    first = lambda equation, results: [{7}] if equation.primitive.name == "mul" else None  # noqa: E731
    assert labels_of_operands(jaxpr, [{0}, {1}], first) == [{7}, set()]
