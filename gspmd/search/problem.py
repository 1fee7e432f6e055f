"""Problems for the solver: choices to make, and the terms of their cost, which are tables of seconds and bytes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Choice:
    """A choice between options. If two options cost the same, the earlier one is preferred."""

    name: str
    options: tuple


@dataclass(frozen=True, eq=False)
class Term:
    """A summand of the cost: the seconds and bytes that depend on one to four choices.

    Attributes:
        name: The name of the term, which no other term has.
        of: The names of the choices on which the term depends.
        seconds: The seconds of each combination of options, an array with an axis for each choice in `of`; `inf` for
            combinations that are not allowed.
        bytes: The bytes of each combination, an array that broadcasts to the shape of `seconds`; None if the term holds
            no bytes.
    """

    name: str
    of: tuple[str, ...]
    seconds: np.ndarray = field(repr=False)
    bytes: np.ndarray | None = field(default=None, repr=False)

    @cached_property
    def seconds_are_valid(self) -> bool:
        """Whether every entry of `seconds` is a number or `inf`.

        The result is kept, because a term is part of many problems and its tables may be large.
        """
        return not (np.isnan(self.seconds).any() or (np.asarray(self.seconds) == -math.inf).any())

    @cached_property
    def bytes_are_finite(self) -> bool:
        """Whether every entry of `bytes` is finite; true if the term holds no bytes."""
        return self.bytes is None or bool(np.isfinite(self.bytes).all())


class Problem:
    """Choices to make such that the terms take the fewest seconds in sum and hold at most `limit` bytes.

    *Picks* map the name of each choice to the index of the option that is picked.

    Args:
        choices: The choices to make.
        terms: The summands of the cost, in any order.
        limit: The bytes that all terms together may hold; None for no limit.

    Raises:
        ValueError: A choice has no options, two choices or terms have the same name, or a term's tables do not fit its
            choices.
    """

    def __init__(self, choices: Iterable[Choice], terms: Iterable[Term], limit: float | None = None):
        self.choices = tuple(choices)
        self.terms = tuple(terms)
        self.limit = limit
        _check_names("choices", [choice.name for choice in self.choices])
        _check_names("terms", [term.name for term in self.terms])
        for choice in self.choices:
            if not choice.options:
                raise ValueError(f"choice {choice.name!r} has no options.\n  Give it at least one.")
        sizes = {choice.name: len(choice.options) for choice in self.choices}
        for term in self.terms:
            _check_term(term, sizes)
        if limit is not None and math.isnan(limit):
            raise ValueError("the limit is not a number.\n  Give bytes, or None for no limit.")

    def seconds_of(self, picks: Mapping[str, int]) -> dict[str, float]:
        """Return the seconds of each term with these picks, by the name of the term."""
        at = dict(zip((choice.name for choice in self.choices), self.numbers(picks)))
        return {term.name: float(term.seconds[tuple([at[name] for name in term.of])]) for term in self.terms}

    def cost(self, picks: Mapping[str, int]) -> float:
        """Return the total seconds of these picks."""
        return math.fsum(self.seconds_of(picks).values())

    def bytes_of(self, picks: Mapping[str, int]) -> float:
        """Return the bytes that these picks hold."""
        at = dict(zip((choice.name for choice in self.choices), self.numbers(picks)))
        held = [(term.bytes, term) for term in self.terms if term.bytes is not None]
        tables = [(np.broadcast_to(table, np.shape(term.seconds)), term.of) for table, term in held]
        return math.fsum(float(table[tuple([at[name] for name in of])]) for table, of in tables)

    def numbers(self, picks: Mapping[str, int]) -> list[int]:
        """Return `picks` as a list of option indices, in the order of the choices.

        Raises:
            ValueError: A choice is missing from `picks`, or has no option with the index that `picks` gives.
        """
        for choice in self.choices:
            if not 0 <= picks.get(choice.name, -1) < len(choice.options):
                raise ValueError(
                    f"choice {choice.name!r} cannot be {picks.get(choice.name)}: it has options 0 to "
                    f"{len(choice.options) - 1}.\n  Pick one of them."
                )
        return [int(picks[choice.name]) for choice in self.choices]


def _check_names(what: str, names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several {what} are called {', '.join(map(repr, twice))}.\n  Give each a different name.")


def _check_term(term: Term, sizes: dict[str, int]) -> None:
    if unknown := [name for name in term.of if name not in sizes]:
        raise ValueError(
            f"term {term.name!r} depends on {unknown[0]!r}, which is not a choice.\n  The choices: {', '.join(sizes)}."
        )
    if not 1 <= len(set(term.of)) == len(term.of) <= 4:
        raise ValueError(
            f"term {term.name!r} depends on {term.of}.\n  A term depends on one to four choices, each named once."
        )
    shape = tuple(sizes[name] for name in term.of)
    if np.shape(term.seconds) != shape:
        raise ValueError(
            f"term {term.name!r} has a table of shape {np.shape(term.seconds)}, and its choices {', '.join(term.of)} "
            f"have {shape} options.\n  Give the table an axis for each choice, in that order."
        )
    if not term.seconds_are_valid:
        raise ValueError(
            f"term {term.name!r} has seconds that are nan or -inf.\n  Give inf for a combination that is not allowed."
        )
    if term.bytes is None:
        return
    try:
        np.broadcast_to(term.bytes, shape)
    except ValueError:
        raise ValueError(
            f"term {term.name!r} has bytes of shape {np.shape(term.bytes)}, which do not broadcast to {shape}.\n"
            "  Give them the shape of its seconds."
        ) from None
    if not term.bytes_are_finite:
        raise ValueError(
            f"term {term.name!r} holds bytes that are not finite.\n"
            "  Give a combination that is not allowed infinite seconds instead."
        )
