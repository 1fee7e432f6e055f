"""The options of every choice as a layout writes them, and which of them are the same but for the names of axes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from gspmd.annotate import Spec
from gspmd.search import Problem

from ..problem import PhaseProblem

Texts = Mapping[tuple[str, str], str]
"""Section (empty for a part of the model) and key, to the text there."""


def written(texts: Texts, section: str, key: str) -> str | None:
    """What an option has in a line: as the part of the model has it, where an overriding section says nothing."""
    if (section, key) in texts or not section:
        return texts.get((section, key))
    text = texts.get(("", key))
    return cached(text) if text and section == "cache" else text


def cached(text: str) -> str:
    """Where the cache of keys lies that lie so.

    >>> cached("B_xLK_yD")
    'B_xTK_yD'
    """
    return str(Spec.parse(text).rename({"L": "T"}))


class Options:
    """What each option of a problem puts into a layout.

    Args:
        phase: writes the lines.
        problem: has the choices.
    """

    def __init__(self, phase: PhaseProblem, problem: Problem):
        self.phase = phase
        self.sizes = {choice.name: len(choice.options) for choice in problem.choices}

    @cached_property
    def texts(self) -> dict[str, tuple[Texts, ...]]:
        """For each choice, the lines of each of its options."""
        first = dict.fromkeys(self.sizes, 0)
        return {
            name: tuple(self._of(name, {**first, name: number}) for number in range(count))
            for name, count in self.sizes.items()
        }

    def _of(self, name: str, picks: Mapping[str, int]) -> Texts:
        return {(line.section, line.key): line.text for line in self.phase.lines(picks) if line.choice == name}

    @cached_property
    def choices(self) -> dict[tuple[str, str], str]:
        """The choice that each line comes from."""
        return {where: name for name, options in self.texts.items() for texts in options for where in texts}

    def alike(self, name: str, number: int) -> list[int]:
        """The options that are this one but for the order of mesh axes on a dimension, and axes of one size swapped.

        What tells them apart is what else they stand beside, so the next best of them is no other way to shard.
        """
        shapes = self._shapes[name]
        return [other for other, shape in enumerate(shapes) if shape == shapes[number]]

    @cached_property
    def _shapes(self) -> dict[str, list[tuple]]:
        return {
            name: [tuple((where, self._shape(text)) for where, text in texts.items()) for texts in options]
            for name, options in self.texts.items()
        }

    def _shape(self, text: str) -> tuple:
        """For each dimension, the sizes of its mesh axes in order."""
        mesh, shape = self.phase.costs.mesh, []
        for spec in map(Spec.parse, text.split(", ")):
            shape.append(tuple(tuple(sorted(mesh[axis] for axis in axes)) for axes in (*spec.axes, spec.partial)))
        return tuple(shape)
