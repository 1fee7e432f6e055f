"""What a training step costs and holds at least in several microbatches, from the tables of the whole batch.

A step in M microbatches moves its weights M times; what it does with its activations, M parts of the batch one after
the other, takes no less time than the batch at once, and holds an M-th of the bytes. So a layout in M microbatches

    seconds ≥ once + M · weights + activations of the batch,    bytes ≥ once + activations of the batch / M

and the right sides rise and fall with M: seconds of the fewest microbatches with the bytes of the most bound all
numbers between them. One microbatch is not among them: its gradients are settled in each layer, those of several once
in a step, which may cost less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from gspmd.search import Choice, Problem, Term

from .training import TrainingProblem
from .workload import Workload


class Relaxed(TrainingProblem):
    """The search problem that bounds those of a training step in 2 microbatches or more on one mesh.

    Its choices have all options that theirs have. The global norm of the gradients, which costs no less than nothing,
    is left out.

    Args:
        workload: the step, in whichever number of microbatches.
        mesh: sizes of the mesh axes.
    """

    def __init__(self, workload: Workload, mesh: Mapping[str, int]):
        super().__init__(replace(workload, microbatches=1), mesh)
        self.costs = replace(self.costs, microbatches=2)  # of several, gradients are partial sums until the step ends

    @cached_property
    def _summed_over(self) -> tuple[tuple[str, ...], ...]:
        return ()

    def between(self, fewest: int, most: int, limit: float | None = None) -> Problem:
        """The problem whose answer is no worse than that of any number of microbatches from the fewest to the most."""
        once, weights, activations = self._kinds
        terms = [*once]
        terms += [replace(term, seconds=fewest * term.seconds) for term in weights]
        terms += [term if term.bytes is None else replace(term, bytes=term.bytes / most) for term in activations]
        return Problem([Choice(name, tuple(options)) for name, options in self.choices.items()], terms, limit)

    @cached_property
    def _kinds(self) -> tuple[list[Term], list[Term], list[Term]]:
        """The tables of what happens once, of weights, and of activations, in one batch."""
        once = [term for part in self.parts for term in part.once()]
        weights: list[Term] = []
        activations: list[Term] = []
        for part in self.parts:
            activations += part.at_least()
            weights += part.accumulated()
            for term in part.of_products():
                # of a product's tensors, its weights alone are held: gathered
                (activations if term.bytes is None else weights).append(term)
        return once, weights, activations
