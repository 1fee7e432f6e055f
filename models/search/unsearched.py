"""The error for models that the search cannot price."""

from __future__ import annotations

from collections.abc import Iterable

from gspmd.annotate.errors import PlanError


class Unsearched(PlanError):
    """A model has a part that the search cannot price. Commands replace the message's last line by their own flags.

    Attributes:
        fact: the question, and the reasons why it cannot be answered.
    """

    def __init__(self, asked: str, faults: Iterable[str]):
        self.fact = f"cannot search {asked}: {'; '.join(faults)}."
        super().__init__(f"{self.fact}\n  Give it a layout of your own.")
