"""Exact search: the cheapest options of a few choices whose costs hang together, proved by a lower bound.

Numbers in, numbers out: nothing here knows what the choices mean.

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

from gspmd.search.answer import Answer, NothingFits
from gspmd.search.problem import Choice, Problem, Term
from gspmd.search.solver import Search

__all__ = ["Answer", "Choice", "NothingFits", "Problem", "Search", "Term"]
