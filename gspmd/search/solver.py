"""The solver, which finds the cheapest picks and, for any choice, the cheapest picks with a different option.

For each option, a lower bound on the cost of all picks with this option is computed once (`gspmd.search.buckets`).
Picks are then searched among the few options with low bounds. If the picks found cost no more than the bound of any
option left out, no picks are cheaper.
"""

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from gspmd.search.answer import Answer, NothingFits
from gspmd.search.buckets import Messages, eliminate
from gspmd.search.problem import Problem
from gspmd.search.question import BoundedSearch
from gspmd.search.tables import Tables

FIRST = 64
"""Number of options that a search for next best picks starts with, in addition to the options with low bounds."""
BEYOND = 1.1
"""At first, the bounds of options are computed only up to this multiple of an answer's seconds."""
GROWTH = 4
"""The factor by which the number of options grows if no picks among them fit."""
MARGIN = 1e-9
"""An option is left out only if its bound is above the seconds of an answer by this relative margin."""


class Search:
    """A search for the cheapest picks of a problem, with a proof.

    One search answers several questions about the same problem. Its answers and bounds are kept for later questions.

    Args:
        problem: Choices, terms and limit.
        stop: A function that is called often. Once it returns true, the search ends, and returns the best picks so far
            with the bound proved for them.
        tolerance: The fraction by which the picks returned may be slower than the cheapest ones. A tolerance saves
            time, because picks near the limit of bytes that cost almost the same take long to tell apart.
            `Answer.bound` is a proved bound with any tolerance.

    Attributes:
        so_far: The best picks found so far for the last question, also after an interrupt; None if there are none yet.

    Example:
        >>> import numpy as np
        >>> from gspmd.search import Choice, Problem, Term
        >>> one, two = Choice("one", "abc"), Choice("two", "de")
        >>> term = Term("seconds", ("one", "two"), np.array([[4.0, 7.0], [5.0, 6.0], [9.0, 1.0]]))
        >>> search = Search(Problem([one, two], [term]))
        >>> search.best().picks
        {'one': 2, 'two': 1}
        >>> search.next_best(search.best(), "two")
        Answer(picks={'one': 0, 'two': 0}, seconds=4.0, bytes=0.0, bound=4.0, complete=True)
    """

    def __init__(self, problem: Problem, stop: Callable[[], bool] = lambda: False, tolerance: float = 0.0):
        self.problem = problem
        self.tolerance = tolerance
        self.stop = stop
        self.so_far: Answer | None = None
        self._tables = Tables.whole(problem)
        self._buckets = eliminate(self._tables)
        self._possible = self._tables.possible()
        self._rate = 0.0
        self._answers: dict[bytes, Answer] = {}
        self._least: dict[tuple[bytes, float], float] = {}
        self._bounds: dict[float, list[np.ndarray]] = {}

    def best(
        self, fixed: Mapping[str, int] | None = None, without: Mapping[str, Collection[int]] | None = None
    ) -> Answer:
        """Find the cheapest picks that fit.

        Args:
            fixed: For some choices, the index of the option that they must have.
            without: For some choices, the indices of the options that they must not have.

        Raises:
            NothingFits: No such picks are within the limit, or no such picks are allowed.
            ValueError: `fixed` or `without` names an unknown choice or option.
        """
        allowed = self._allowed(fixed or {}, without or {})
        if not all(mask.any() for mask in allowed):
            raise NothingFits(None, self.problem.limit)
        return self._once(allowed, lambda: self._ask(allowed))

    def at_least(self, enough: float = math.inf, without: Mapping[str, Collection[int]] | None = None) -> float:
        """Return a lower bound on the seconds of picks that fit.

        The bound is proved without enumerating picks, so there may be no picks with exactly these seconds.

        Args:
            enough: A value above which the bound need not be raised.
            without: As in `best`.

        Returns:
            The bound, which is infinite if no picks fit.
        """
        allowed = self._allowed({}, without or {})
        key = _key(allowed), enough
        if key not in self._least:
            tables = self._tables.keep(allowed)
            ask = BoundedSearch(tables, self._buckets, lambda: False, lambda answer: None, tolerance=self.tolerance)
            self._least[key] = ask.at_least(enough)
        return self._least[key]

    def bounds(self) -> dict[str, np.ndarray]:
        """Return, for each option of every choice, a lower bound on the seconds of the fitting picks with this option.

        The bound is infinite for an option that is in no allowed picks.
        """
        return dict(zip((choice.name for choice in self.problem.choices), self._bounds_at(self._rate)))

    def next_best(
        self,
        answer: Answer,
        name: str,
        fixed: Mapping[str, int] | None = None,
        without: Mapping[str, Collection[int]] | None = None,
    ) -> Answer | None:
        """Find the cheapest picks in which one choice has a different option; return None if no such picks fit.

        Args:
            answer: An answer of this search.
            name: The choice that is to differ.
            fixed, without: Restrictions, as in `best`. To search under the same conditions as for `answer`, give the
                restrictions with which it was found.
        """
        excluded = {**(without or {})}
        excluded[name] = {*excluded.get(name, ()), answer.picks[name]}
        allowed = self._allowed(fixed or {}, without or {})
        fewer = self._allowed(fixed or {}, excluded)
        if not all(mask.any() for mask in fewer):
            return None
        try:
            return self._once(fewer, lambda: self._widen(fewer, allowed, BEYOND * answer.seconds))
        except NothingFits:
            return None

    def _allowed(self, fixed: Mapping[str, int], without: Mapping[str, Collection[int]]) -> list[np.ndarray]:
        """Return, for each choice, which options are allowed; options with infinite seconds never are."""
        allowed = {choice.name: mask.copy() for choice, mask in zip(self.problem.choices, self._possible)}

        def indices(name: str, options: Collection[int]) -> np.ndarray:
            # Questions about presets are thousands, and have arrays already.
            found = options if isinstance(options, np.ndarray) else np.array([*options], int)
            if name not in allowed or (len(found) and not 0 <= found.min() <= found.max() < len(allowed[name])):
                raise ValueError(
                    f"cannot restrict {name!r} to or from options {sorted(found.tolist())}: "
                    + (f"it has options 0 to {len(allowed[name]) - 1}." if name in allowed else "it is not a choice.")
                    + f"\n  The choices: {', '.join(allowed)}."
                )
            return found

        kept = {name: indices(name, (option,)) for name, option in fixed.items()}
        for name, gone in {name: indices(name, options) for name, options in without.items()}.items():
            allowed[name][gone] = False
        for name, option in kept.items():
            allowed[name] &= np.arange(len(allowed[name])) == option
        return list(allowed.values())

    def _keep(self, answer: Answer) -> None:
        self.so_far = answer

    def _once(self, allowed: list[np.ndarray], ask: Callable[[], Answer]) -> Answer:
        """Return the stored answer for the allowed options, or call `ask` to search for it if there is none.

        An answer that was searched for is stored if it is complete.
        """
        key = _key(allowed)
        if key not in self._answers:
            self.so_far = None
            answer = ask()
            if not answer.complete:
                return answer
            self._answers[key] = answer
        self.so_far = self._answers[key]
        return self.so_far

    def _ask(self, allowed: list[np.ndarray], outside: float = math.inf) -> Answer:
        question = BoundedSearch(
            self._tables.keep(allowed), self._buckets, self.stop, self._keep, self._rate, outside, self.tolerance
        )
        answer = question.answer()
        self._rate = question.rate or self._rate
        return answer

    def _bounds_at(self, rate: float) -> list[np.ndarray]:
        """Return what `bounds` returns, as a list of arrays; the bounds are computed at the given rate."""
        if rate not in self._bounds:
            self._bounds[rate] = self._bounds_of(self._possible, rate)
        return self._bounds[rate]

    def _bounds_of(self, allowed: list[np.ndarray], rate: float) -> list[np.ndarray]:
        """Return the bounds of `_bounds_at`, but only for picks whose options are all allowed."""
        bounds = [np.full(len(mask), math.inf) for mask in allowed]
        if all(mask.any() for mask in allowed):
            messages = Messages(self._tables.keep(allowed), self._buckets, rate)
            less = rate * self.problem.limit if rate and self.problem.limit is not None else 0.0
            for each, mask, costs in zip(bounds, allowed, messages.by_option()):
                each[mask] = costs - less
        return bounds

    def _widen(self, fewer: list[np.ndarray], allowed: list[np.ndarray], ceiling: float) -> Answer:
        """Search a few promising options, then more, until no option left out can be better; return the best picks.

        Args:
            fewer: For each choice, which options may be picked.
            allowed: For each choice, which options count in the bounds: all options in `fewer`, and maybe more.
            ceiling: Seconds up to which bounds are computed at first. These bounds need only few options: those whose
                bound at rate 0 is low even if everything is allowed.
        """
        rate, most, times = self._rate, -math.inf, 1
        # At a rate, a bound may lie below the one at rate 0 by the price of the whole limit.
        near = self._with_margin(ceiling, rate) + (rate * (self.problem.limit or 0.0) if rate else 0.0)
        bounds = self._bounds_of([mask & (each <= near) for mask, each in zip(allowed, self._bounds_at(0.0))], rate)
        while True:
            kept = [mask & np.isfinite(each) for mask, each in zip(fewer, bounds)]
            each_bound = np.sort(np.concatenate([each[mask] for mask, each in zip(kept, bounds)]))
            # All picks have an option of each choice.
            least = max(float(each[mask].min(initial=math.inf)) for mask, each in zip(kept, bounds))
            count = times * (int(np.searchsorted(each_bound, least, "right")) + FIRST)
            all_kept = count >= len(each_bound)
            reach = math.inf if all_kept else self._with_margin(max(most, least, float(each_bound[count])), self._rate)
            if reach > ceiling:
                bounds, ceiling = self._bounds_of(allowed, rate), math.inf
                continue
            most = reach
            try:
                answer = self._ask([mask & (each <= most) for mask, each in zip(kept, bounds)], most)
            except NothingFits:
                if all_kept:
                    raise
                times *= GROWTH
                continue
            if answer.seconds <= most or not answer.complete:
                return answer
            most = answer.seconds

    def _with_margin(self, seconds: float, rate: float) -> float:
        """Return the seconds plus a margin for rounding; a bound above the result really exceeds the seconds."""
        return seconds + MARGIN * (abs(seconds) + (abs(rate * (self.problem.limit or 0.0)) if rate else 0.0))


def _key(allowed: list[np.ndarray]) -> bytes:
    return b" ".join(mask.tobytes() for mask in allowed)
