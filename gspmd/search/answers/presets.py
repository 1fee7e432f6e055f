"""Layouts written by people, located among the layouts that a search considers, to compare their costs by term."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, permutations
from math import inf

import numpy as np

from gspmd.annotate import LayoutError, Spec
from gspmd.layouts import Layout, presets
from gspmd.layouts.rules.keys import KEYS
from gspmd.search import Answer, NothingFits
from gspmd.search.answers.candidate import Candidate, to_beat
from gspmd.search.answers.microbatches import Range
from gspmd.search.answers.options import Options
from gspmd.search.peak import PeakSearch

Where = tuple[str, str]
"""The section and the key of a line; the section is empty for a line in a part of the model."""


@dataclass(frozen=True)
class Placed:
    """A preset or a layout file as a point of the search on one mesh.

    Attributes:
        name: the name of the layout.
        candidate: the mesh.
        mesh: sizes of the layout's own mesh axes.
        answer: the layout as an answer, with its cost; None if the search does not consider this layout.
        reason: why the search does not consider the layout, or why the mesh cannot use it.
        usable: whether the sizes allow the layout on this mesh.
        traced: seconds of the layout by `gspmd.trace`, if the search does not consider it and it was traced.
    """

    name: str
    candidate: Candidate
    mesh: Mapping[str, int]
    answer: Answer | None = None
    reason: str = ""
    usable: bool = True
    traced: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the layout is known to fit."""
        return self.answer is not None and self.answer.bytes <= self.candidate.limit


def placed_presets(
    candidates: Iterable[Candidate], ranges: Iterable[Range] = (), names: Iterable[str | Layout] | None = None
) -> list[Placed]:
    """Place every preset on its best mesh, with its best order of mesh axes.

    Presets that fit come first, and cheaper ones before others. Two presets that are the same layout both appear.

    Args:
        candidates: the meshes.
        ranges: numbers of microbatches above one. A preset is tried with those numbers with which it fits.
        names: presets, layout files, or layouts; by default all presets.
    """
    # With ranges, a preset is first placed with one microbatch: several count only if they gain enough over one.
    ranges, every = [*ranges], [*candidates]
    first = [each for each in every if each.microbatches == 1] if ranges else every
    spaces = first or every
    layouts = [Layout.load(name) for name in (presets() if names is None else names)]
    phase = spaces[0].phase.phase if spaces else "train"
    layouts = [layout if phase == "train" else layout.phase(phase) for layout in layouts]
    known = _Known()
    found = [min((placed for each in spaces for placed in _placings(each, of, known)), key=_rank) for of in layouts]
    return sorted((_divided(ranges, of, best, known) for of, best in zip(layouts, found)), key=_rank)


def _rank(placed: Placed) -> tuple[bool, bool, bool, float]:
    return not placed.usable, placed.answer is None, not placed.fits, placed.answer.seconds if placed.answer else 0.0


def _divided(ranges: Iterable[Range], layout: Layout, best: Placed, known: _Known) -> Placed:
    """Return the better one of the known placement and the layout's best placement in several microbatches.

    Of the numbers of microbatches in the ranges, those with which the layout fits are tried.
    """
    heap: list[tuple[float, int, Range]] = []
    number = count()

    def push(each: Range) -> None:
        heappush(heap, (_bound(each, layout, _enough(best), known), next(number), each))

    for each in ranges:
        push(each)
    while heap and heap[0][0] < (enough := _enough(best)):
        for part in heappop(heap)[-1].halves:
            if isinstance(part, Range):
                push(part)
            else:
                placed = min(_placings(part, layout, known), key=_rank)
                dearer = placed.answer is not None and placed.answer.seconds > enough
                best = best if dearer else min(best, placed, key=_rank)
    return best


def _enough(best: Placed) -> float:
    """Return the seconds that several microbatches must stay below to beat a placement; infinite if it does not fit."""
    return to_beat(best.answer.seconds, best.candidate.microbatches) if best.answer and best.fits else inf


def _bound(numbers: Range, layout: Layout, enough: float, known: _Known) -> float:
    """Return a lower bound on a layout's cost over a range of numbers of microbatches.

    The bound is infinite if the layout does not fit. `Search.at_least` computes it.
    """
    every = (known.asked(numbers, layout, own, names) for own, names in _orders(numbers, layout))
    return min((numbers.search.at_least(enough, each) for each in every if isinstance(each, dict)), default=inf)


def _orders(of: Candidate | Range, layout: Layout) -> Iterator[tuple[dict[str, int], tuple[str, ...]]]:
    """Yield, for every assignment of a layout's axes to those of the mesh, the sizes and the order of these axes.

    On several nodes, the sizes are in the order of the mesh, because devices fill nodes in this order. The mesh that is
    shown then has the prices of this assignment.
    """
    mesh, chip = of.phase.case.mesh, of.phase.case.chip
    for names in permutations(layout.axes, len(mesh)):
        sizes = dict(zip(names, mesh.values()))
        shown = dict.fromkeys((*names, *layout.axes)) if chip.nodes(mesh) > 1 else layout.axes
        yield {axis: sizes.get(axis, 1) for axis in shown}, names


def _placings(candidate: Candidate, layout: Layout, known: _Known) -> Iterator[Placed]:
    """Yield a `Placed` for every assignment of a layout's mesh axes to those of the candidate's mesh."""
    if len(layout.axes) < len(candidate.phase.case.mesh):
        yield Placed(layout.name, candidate, {}, reason="it has fewer mesh axes.", usable=False)
    for own, names in _orders(candidate, layout):
        without = known.asked(candidate, layout, own, names)
        if isinstance(without, _Refused):
            yield Placed(layout.name, candidate, own, reason=without.reason, usable=without.usable)
            continue
        try:
            yield Placed(layout.name, candidate, own, _best(candidate.unlimited_search, without))
        except LayoutError as error:
            yield Placed(layout.name, candidate, own, reason=_short(error))


@dataclass(frozen=True)
class _Refused:
    """The reason why the search does not consider a layout or, if `usable` is false, why the mesh cannot use it."""

    reason: str
    usable: bool


class _Known:
    """A cache of the layouts read so far, which are the same for all choices of remat."""

    def __init__(self) -> None:
        self._checked: dict[tuple, Layout | _Refused] = {}
        self._asked: dict[tuple, dict[str, np.ndarray] | _Refused] = {}

    def asked(
        self, of: Candidate | Range, layout: Layout, own: Mapping[str, int], names: tuple[str, ...]
    ) -> dict[str, np.ndarray] | _Refused:
        """Return the options that a preset, with its axes in this order, rules out, or why it is not considered."""
        case = of.phase.case
        checked = self._layout(layout, own, of.sizes)
        if isinstance(checked, _Refused):
            return checked
        space = *(tuple(each.items()) for each in (case.mesh, case.sizes)), case.microbatches > 1
        key = layout, checked.chosen, names, *space
        if key not in self._asked:
            try:
                self._asked[key] = _without(of, checked, dict(zip(names, case.mesh)))
            except LayoutError as error:
                self._asked[key] = _Refused(_short(error), usable=True)
        return self._asked[key]

    def _layout(self, layout: Layout, own: Mapping[str, int], sizes: Mapping[str, int]) -> Layout | _Refused:
        """Return the layout on a mesh of its own axes, or the reason why it cannot be used there."""
        key = layout, tuple(own.items()), tuple(sizes.items())
        if key not in self._checked:
            try:
                self._checked[key] = layout.resolved(sizes, own).check(sizes, own)
            except LayoutError as error:
                self._checked[key] = _Refused(_short(error), usable=False)
        return self._checked[key]


_PRICE = "Price it with gspmd.trace."
"""The remedy for a layout outside the space; `_short` removes it if only the reason is to be shown."""


def _short(error: LayoutError) -> str:
    return error.faults[0].fact if error.faults else str(error).splitlines()[0]


def picks_of(
    candidate: Candidate, search: PeakSearch, layout: Layout, renamed: Mapping[str, str] | None = None
) -> Answer:
    """Find the cheapest answer with the lines of a layout; lines that the layout lacks are chosen freely.

    Scales of norms, biases and token ids are not compared: they are small, and sharded like the activations.

    Args:
        candidate: the mesh and its problem.
        search: the search of its problem.
        layout: the layout, resolved for the mesh.
        renamed: mesh axis of the layout -> mesh axis of the candidate; all other axes of the layout have size 1. By
            default, the axes have the same names.

    Raises:
        LayoutError: the search does not consider some line of the layout.
    """
    mesh = candidate.phase.case.mesh
    names = dict(zip(mesh, mesh)) if renamed is None else renamed
    return _best(search, _without(candidate, layout, names))


def _best(search: PeakSearch, without: Mapping[str, np.ndarray]) -> Answer:
    try:
        return search.best(without=without)
    except NothingFits:
        fact = "each of its lines is in the space that is searched, but not all of them together."
        raise LayoutError(f"{fact}\n  {_PRICE}") from None


def _without(of: Candidate | Range, layout: Layout, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return, by choice, the options that disagree with a layout.

    Raises:
        LayoutError: the search does not consider some line of the layout.
    """
    mesh, parts = of.phase.case.mesh, of.phase.case.microbatches
    names = {own: axis for own, axis in names.items() if mesh[axis] > 1}
    stages = layout.get("pipeline.layers")
    if stages and any(axis in names for axis in Spec.parse(stages).used):
        raise LayoutError(f"pipeline.layers = '{stages}' is not in the space that is searched.\n  {_PRICE}")
    # With several microbatches, gradients that [gradients] does not list are partial sums too.
    loss, without = _for_loss(layout, parts), dict[str, np.ndarray]()
    for name, options in of.options.texts.items():
        wanted = dict(_wanted(layout, loss, of.options.lines[name], names))
        if not wanted:
            continue
        fits = frozenset.intersection(*(of.options.having(name, *where, specs) for where, specs in wanted.items()))
        if not fits:
            odd = _odd(layout, of.options, name, wanted)
            raise LayoutError(f"{odd} is not in the space that is searched.\n  {_PRICE}")
        if len(fits) < len(options):
            gone = np.ones(len(options), bool)
            gone[[*fits]] = False
            without[name] = np.flatnonzero(gone)
    return without


_for_loss = lru_cache(maxsize=1 << 8)(Layout.for_loss)


def _odd(layout: Layout, options: Options, name: str, wanted: Mapping[Where, tuple[Spec, ...]]) -> str:
    """Describe the first line whose text no option has or, if every text occurs in some option, all lines together."""
    alone = (where for where, specs in wanted.items() if not options.having(name, *where, specs))
    odd = next(([where] for where in alone), list(wanted))
    return " with ".join(f"{section} {key}".strip() + f" = '{_text(layout, section, key)}'" for section, key in odd)


def _wanted(
    layout: Layout, loss: Layout, lines: Iterable[Where], names: Mapping[str, str]
) -> Iterator[tuple[Where, tuple[Spec, ...]]]:
    """Yield, for each line, its section and key, and the layout's specs for it with the candidate's mesh axes.

    `loss` is the layout from which specs of gradients are read.
    """
    for section, key in sorted(lines, key=lambda line: (line[0] != "", line)):
        text = str(loss.spec(key).cotangent) if section == "gradients" else _text(layout, section, key)
        if text and not _follows(key):
            yield (section, key), _read(text, tuple(names.items()))


def _text(layout: Layout, section: str, key: str) -> str | None:
    if section == "cache":
        return layout.cache(key)
    if section and key in layout.overrides.get(section, {}):
        return str(layout.overrides[section][key])
    text = layout.get(key)
    return None if text is None else str(text)


def _follows(key: str) -> bool:
    return key == "embedding.tokens" or (KEYS[key].kind == "parameter" and len(KEYS[key].dims) == 1)


@lru_cache(maxsize=1 << 12)
def _read(text: str, names: tuple[tuple[str, str], ...]) -> tuple[Spec, ...]:
    """Parse specs, replace the mesh axes of a layout by those of the candidate, and drop axes of size 1."""
    known = dict(names)
    axes = lambda held: tuple(known[axis] for axis in held if axis in known)  # noqa: E731
    specs = map(Spec.parse, text.split(", "))
    return tuple(Spec(spec.dims, tuple(map(axes, spec.axes)), axes(spec.partial)) for spec in specs)
