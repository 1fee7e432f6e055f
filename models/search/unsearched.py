"""Models that a search does not price, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterable

from gspmd.annotate.errors import PlanError


class Unsearched(PlanError):
    """A model has what is not priced. A command says in place of the last line which of its flags help.

    Attributes:
        fact: what was asked, and why there is no answer.
    """

    def __init__(self, asked: str, faults: Iterable[str]):
        self.fact = f"cannot search {asked}: {'; '.join(faults)}."
        super().__init__(f"{self.fact}\n  Give it a layout of your own.")
