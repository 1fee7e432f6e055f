"""The layouts worth compiling: the best few that are really different, and the best presets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isclose

from gspmd.commands.search.compiling import Listed, with_loops
from gspmd.commands.search.settings import SearchSettings
from gspmd.search import Answer, NothingFits
from gspmd.search.answers import Candidate, SearchResult, nearby
from gspmd.search.answers.document import PRICED, LineCost, changed
from gspmd.search.answers.presets import Placed, placed_presets
from gspmd.search.phase import name_of

APART = 0.01
"""Layouts count as different if they differ by at least this fraction of a step.

Compiling two such layouts tells more than compiling one of them.
"""
SAME = 1e-6
"""Layouts that differ by less than this fraction of a step count as the same."""

MORE = 0.15
"""The fraction by which the plan of a layout for serving may be slower than the cheapest plan, for the layout to be
traced. The layout may still be faster than the cheapest one, because its loops may hide more."""


def trained(finding: SearchResult, said: Mapping[str, LineCost], presets: Sequence[Placed], count: int) -> list[Listed]:
    """Return the answer, the cheapest layouts that differ from it, and the cheapest preset.

    Each layout that differs from the answer is the best layout with another option of one choice, or the best layout
    with another mesh, choice of remat or number of microbatches.
    """
    others = sorted(_others(finding, said), key=lambda each: each.answer.seconds) if count > 1 else []
    return [*different([found(finding), *others], count), *_of_presets(presets)[:1]]


def served(settings: SearchSettings, finding: SearchResult, presets: Sequence[Placed], count: int) -> list[Listed]:
    """Return the answer, the layouts that are fastest once loops under `auto` hide communication, and the best presets.

    On each mesh, the following layouts are traced: the cheapest one, the cheapest one for each way to shard a tensor
    (`nearby`), and all presets. Layouts that cost more than the answer by a fraction above `MORE` are not traced. Of
    the presets, at most two are returned. The first is the preset with the cheapest plan. The second is the fastest
    traced preset, unless this is the same preset on the same mesh.
    """
    most, listed = (1 + MORE) * finding.answer.seconds, [found(finding)]
    if count > 1:
        answer, *near = with_loops(settings, [*listed, *_near(finding, most)])
        listed = different([answer, *sorted(near, key=lambda each: each.expected)], count)
    every = [placed for each in finding.promising for placed in placed_presets([each])]
    looped = with_loops(settings, (each for each in _of_presets(every) if each.answer.seconds <= most))
    best = min(looped, key=lambda each: each.expected, default=None)
    planned = _of_presets(presets)[:1]
    return [*listed, *planned, *([best] if best and (best.name, best.mesh) not in _names(planned) else [])]


def improved(settings: SearchSettings, preset: Listed, count: int) -> list[Listed]:
    """Return at most `count` layouts that change one choice of a preset: the ones with the largest planned gains."""
    before = preset.answer
    found = []
    for name, answer in nearby.improved(preset.candidate, before.picks)[:count]:
        if answer.picks[name] != before.picks[name]:  # A search that was given up may have found no other option.
            lines = changed(preset.candidate, name, before, answer)
            where, text = min(lines, key=lambda line: nearby.in_ends(line[0][1]))
            found.append(_instead(preset, answer, f"{name_of(*where)} {text}"))
    return _hiding(settings, found)


def together(settings: SearchSettings, preset: Listed, faster: Sequence[Listed]) -> list[Listed]:
    """Return the preset with the changes of all `faster` layouts.

    The list is empty if there are fewer than two such layouts, or if the preset with all changes does not fit.
    """
    before = preset.answer.picks
    others = {name: pick for each in faster for name, pick in each.answer.picks.items() if pick != before[name]}
    if len(faster) > 1:
        with suppress(NothingFits):
            answer = nearby.with_picks(preset.candidate, {**before, **others})
            return _hiding(settings, [_instead(preset, answer, "all that is faster")])
    return []


def _instead(preset: Listed, answer: Answer, name: str) -> Listed:
    """Return a variant of a preset, to be compiled under the lowering of the preset."""
    mesh = preset.candidate.phase.case.mesh
    return Listed(f"{preset.name}, with {name}", preset.candidate, answer, mesh, lowering=preset.lowering)


def _hiding(settings: SearchSettings, listed: Sequence[Listed]) -> list[Listed]:
    """Return the layouts with the seconds that their loops hide; in a phase without loops, return them unchanged."""
    looped = settings.phase != "train" and any(each.lowering != PRICED for each in listed)
    return [*with_loops(settings, listed)] if looped else [*listed]


def found(finding: SearchResult) -> Listed:
    """Return the answer of a search as a layout of the shortlist."""
    return Listed("found", finding.best, finding.answer, finding.best.phase.case.mesh)


def different(listed: Sequence[Listed], count: int) -> list[Listed]:
    """Return at most `count` layouts: the first, and each that differs by `APART` of a step from all chosen before it.

    If this gives fewer than `count` layouts, the first of the remaining layouts follow. Layouts with the same cost as a
    chosen layout are left out.
    """
    taken = [*listed[:1]]
    for apart in (APART, SAME):
        for each in listed:
            if len(taken) < count and all(_apart(each, other) >= apart for other in taken):
                taken.append(each)
    return taken


def _others(finding: SearchResult, said: Mapping[str, LineCost]) -> Iterator[Listed]:
    for name, remark in said.items():
        if remark.other is not None:
            yield Listed(f"another {name}", finding.best, remark.other, finding.best.phase.case.mesh)
    for each in finding.candidates:
        if each != finding.best:
            name = " ".join(filter(None, (f"mesh {each.named}", each.remat, each.in_microbatches)))
            with suppress(NothingFits):
                yield Listed(name, each, each.solve(), each.phase.case.mesh)


def _near(finding: SearchResult, most: float) -> Iterator[Listed]:
    for each in finding.promising:
        mesh = each.phase.case.mesh
        with suppress(NothingFits):
            if each != finding.best and each.solve().seconds <= most:
                yield Listed(f"mesh {each.named}", each, each.solve(), mesh)
            for name, answer in nearby.nearby(each, most):
                yield Listed(f"with {_line(each, name, answer)}", each, answer, mesh)


def _line(candidate: Candidate, name: str, answer: Answer) -> str:
    """Return the first line of the option that an answer picks for a choice; only lines inside the layers count."""
    texts = candidate.options.texts[name][answer.picks[name]].items()
    return next(f"{key} {text}" for (_, key), text in texts if not nearby.in_ends(key))


def _apart(one: Listed, other: Listed) -> float:
    """Return the difference of two layouts, as a fraction of the seconds of a step.

    The difference is half of the sum of the differences of all parts of the cost, or the difference of the hidden
    seconds if this is larger. The result is 0 if only axes are renamed. The result is also 0 if the two layouts cost
    the same seconds and bytes, and hide the same seconds. In such layouts, mesh axes of equal sizes are swapped in a
    part of the model, and the compiler has made the same program of the two layouts.
    """
    figures = zip(*((each.answer.seconds, each.answer.bytes, each.hidden) for each in (one, other)))
    if all(isclose(*each, rel_tol=1e-9) for each in figures):
        return 0.0
    ours, theirs = (each.candidate.unlimited.seconds_of(each.answer.picks) for each in (one, other))
    moved = sum(abs(ours.get(name, 0.0) - theirs.get(name, 0.0)) for name in {**ours, **theirs})
    return max(moved / 2, abs(one.hidden - other.hidden)) / other.answer.seconds


def _of_presets(presets: Sequence[Placed]) -> list[Listed]:
    """Return the presets that fit, in their order; if several are the same layout, only the first is returned."""
    found: dict[tuple, Listed] = {}
    for each in presets:
        if each.answer and each.fits:
            listed = Listed(each.name, each.candidate, each.answer, each.mesh, preset=True)
            found.setdefault((each.candidate.named, *each.answer.picks.items()), listed)
    return [*found.values()]


def beside(layouts: Iterable[Placed]) -> list[Listed]:
    """Return the layouts of --beside that the search considers; the compiler decides later whether they fit."""
    return [Listed(each.name, each.candidate, each.answer, each.mesh, own=True) for each in layouts if each.answer]


def _names(listed: Sequence[Listed]) -> list[tuple[str, Mapping[str, int]]]:
    return [(each.name, each.mesh) for each in listed]
