"""Marks: operations that compute nothing, and stand for steps whose placements are not yet known.

A trace shows how often a mark runs, whether it is recomputed, which marks merge, and whether the mark's result is
needed. All of this then holds for the step for which the mark stands.
"""

from functools import lru_cache
from itertools import count
from typing import Any

import jax
from jax.interpreters import batching

from gspmd.annotate.errors import PlanError
from gspmd.lowerings.transformations.passing import passing
from gspmd.planner.unknown import MARK, Mark, Unknown

_mark = passing(MARK)
_numbers = count()


def _refused(*_: Any, **__: Any) -> Any:
    raise PlanError(
        "cannot search a program that maps planned operations with jax.vmap: what they send grows with the batch.\n"
        "  Write the batch as a dimension in the layout lines of the program."
    )


batching.primitive_batchers[_mark] = _refused


def marked(x: jax.Array, what: Unknown) -> jax.Array:
    """Mark the step that reads or computes an array; the array is returned unchanged.

    Args:
        x: the array.
        what: the step, as far as it is known.
    """
    return _mark.bind(x, mark=_name(what))[0]


@lru_cache(maxsize=1 << 14)
def _name(what: Unknown) -> Mark:
    return Mark.of(what, f"mark {next(_numbers)}")
