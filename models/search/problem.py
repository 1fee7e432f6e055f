"""A phase of a model as one search problem: the choices, terms and lines of all its parts together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from gspmd.search import Choice, Problem, Term
from gspmd.search.products import Product

from .costs import Costs, Line
from .parts.part import Part


class PhaseProblem(ABC):
    """The search problem of one phase on one mesh.

    Attributes:
        costs: of the mesh: model, sizes, chip.
        phase: "train", "prefill" or "decode".
    """

    phase = ""

    def __init__(self, costs: Costs):
        self.costs = costs

    @abstractmethod
    def _parts(self) -> list[Part]:
        """Make the parts of the model, in the order of the forward pass."""

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the model, in the order of the forward pass."""
        return self._parts()

    @cached_property
    def choices(self) -> dict[str, Sequence[Any]]:
        """Every choice and its options; of a product its vias by number."""
        return self.choices_of_parts

    @cached_property
    def choices_of_parts(self) -> dict[str, Sequence[Any]]:
        """Those of the parts."""
        named: dict[str, Sequence[Any]] = {}
        for part in self.parts:
            named |= part.choices
        return named | {name: range(len(product.vias)) for name, product in self.vias.items()}

    @property
    def vias(self) -> dict[str, Product]:
        """Every product by the name of its via."""
        return {name: product for part in self.parts for name, product in part.vias.items()}

    @cached_property
    def terms(self) -> list[Term]:
        """Every table."""
        return self.tables

    @cached_property
    def tables(self) -> list[Term]:
        """Those of the parts."""
        found, count = [term for part in self.parts for term in part.once()], self.costs.microbatches
        for part in self.parts:
            each = (*part.terms(), *part.accumulated())
            found += [replace(term, seconds=count * term.seconds) for term in each]
            found += part.of_products(count)
        return found

    @property
    def too_dear(self) -> float:
        """Seconds by which a layout may be priced above what it costs."""
        return 0.0

    def problem(self, limit: float | None = None) -> Problem:
        """Choices and terms; `limit` is the bytes that a device may hold."""
        return Problem([Choice(name, tuple(options)) for name, options in self.choices.items()], self.terms, limit)

    def lines(self, picks: Mapping[str, int]) -> list[Line]:
        """The lines of the layout that these picks stand for."""
        chosen = {name: options[picks[name]] for name, options in self.choices.items()}
        return [line for part in self.parts for line in (*part.lines(chosen), *part.via_lines(picks))]
