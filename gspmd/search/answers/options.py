"""The options of every choice as lines of a layout, and a test of equality up to the names of mesh axes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import chain

from gspmd.annotate import Spec
from gspmd.search.phase import PhaseProblem

Texts = Mapping[tuple[str, str], str]
"""The text of each line, by section (empty for a line in a part of the model) and key."""


def written(texts: Texts, section: str, key: str) -> str | None:
    """Return the text of a line under an option, or None if the option has no text for it.

    If the option lacks a line of an overriding section, the text that the line would override applies.
    """
    if (section, key) in texts or not section:
        return texts.get((section, key))
    text = texts.get(("", key))
    return cached(text) if text and section == "cache" else text


def cached(text: str) -> str:
    """Return the spec of the cache of keys, given the spec of the keys.

    >>> cached("B_xLK_yD")
    'B_xTK_yD'
    """
    return str(Spec.parse(text).rename({"L": "T"}))


class Options:
    """The options of a problem as lines of a layout.

    Args:
        phase: the problem.
    """

    def __init__(self, phase: PhaseProblem):
        self.phase = phase
        self._having: dict[tuple[str, str, str], dict[tuple[Spec, ...], frozenset[int]]] = {}

    @cached_property
    def texts(self) -> dict[str, tuple[Texts, ...]]:
        """For each choice, the lines of each of its options."""
        return {name: tuple(self.phase.texts(name)) for name in self.phase.choices}

    @cached_property
    def lines(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """For each choice, the lines that some of its options write."""
        return {name: tuple(dict.fromkeys(chain.from_iterable(options))) for name, options in self.texts.items()}

    @cached_property
    def choices(self) -> dict[tuple[str, str], str]:
        """The choice that decides each line."""
        return {where: name for name, lines in self.lines.items() for where in lines}

    def having(self, name: str, section: str, key: str, specs: tuple[Spec, ...]) -> frozenset[int]:
        """Return the indices of a choice's options that give a line these specs: one spec, or both specs of a via."""
        where = name, section, key
        if where not in self._having:
            found: dict[tuple[Spec, ...], set[int]] = {}
            for number, texts in enumerate(self.texts[name]):
                if (text := written(texts, section, key)) is not None:
                    found.setdefault(tuple(map(Spec.parse, text.split(", "))), set()).add(number)
            self._having[where] = {each: frozenset(numbers) for each, numbers in found.items()}
        return self._having[where].get(specs, frozenset())

    def alike(self, name: str, number: int) -> list[int]:
        """List the options equal to this one, apart from the order of a dimension's axes and swaps of axes of one size.

        Such options differ only in relation to other tensors, so in a list of next best options they would not show a
        different way to shard.
        """
        shapes = self._shapes[name]
        return [other for other, shape in enumerate(shapes) if shape == shapes[number]]

    def kinds(self, name: str) -> list[list[int]]:
        """Group the options of a choice that `alike` treats as equal; return no groups if the choice has no lines."""
        kinds: dict[tuple, list[int]] = {}
        for number, shape in enumerate(self._shapes[name]):
            kinds.setdefault(shape, []).append(number)
        return [*kinds.values()] if any(self.texts[name]) else []

    @cached_property
    def _shapes(self) -> dict[str, list[tuple]]:
        return {
            name: [tuple((where, self._shape(text)) for where, text in texts.items()) for texts in options]
            for name, options in self.texts.items()
        }

    def _shape(self, text: str) -> tuple:
        """Return, for each dimension of the specs in a text, the sorted sizes of its mesh axes."""
        mesh, shape = self.phase.case.mesh, []
        for spec in map(Spec.parse, text.split(", ")):
            shape.append(tuple(tuple(sorted(mesh[axis] for axis in axes)) for axes in (*spec.axes, spec.partial)))
        return tuple(shape)
