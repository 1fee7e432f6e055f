"""Exact search for the cheapest layout of a program, and a solver for choices whose costs depend on each other.

`gspmd.search(build, layout, mesh)` finds a layout: see `gspmd.search.finding.search`. The solver inside knows nothing
of layouts; its problems are tables of numbers.

Example:
    >>> import numpy as np
    >>> weight = Choice("weight", ("replicated", "sharded"))
    >>> hidden = Choice("hidden", ("B_x", "F_x"))
    >>> held = Term("held", ("weight",), np.zeros(2), bytes=np.array([8.0, 2.0]))
    >>> product = Term("product", ("weight", "hidden"), np.array([[1.0, 2.0], [5.0, 3.0]]))
    >>> Search(Problem((weight, hidden), (held, product))).best()
    Answer(picks={'weight': 0, 'hidden': 0}, seconds=1.0, bytes=8.0, bound=1.0, complete=True)
    >>> Search(Problem((weight, hidden), (held, product), limit=4.0)).best()
    Answer(picks={'weight': 1, 'hidden': 1}, seconds=3.0, bytes=2.0, bound=3.0, complete=True)
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gspmd.search.answer import Answer, NothingFits
from gspmd.search.problem import Choice, Problem, Term
from gspmd.search.solver import Search

if TYPE_CHECKING:
    from gspmd.search.finding import Found

__all__ = ["Answer", "Choice", "Found", "NothingFits", "Problem", "Search", "Term"]


def __getattr__(name: str) -> Any:
    if name != "Found":  # which imports JAX, as the solver does not
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return import_module(f"{__name__}.finding").Found


class _CallablePackage(ModuleType):
    """A package that can be called: `gspmd.search` is both a package and a function, and neither may hide the other."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Search for the cheapest layout of a program; see `gspmd.search.finding.search`."""
        return import_module(f"{__name__}.finding").search(*args, **options)

    def __reduce__(self) -> tuple:
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallablePackage
