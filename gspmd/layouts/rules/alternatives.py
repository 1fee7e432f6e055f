"""Keys with alternative specs, from which one that fits the sizes and the mesh is chosen.

For example, a batch may be sharded over as many mesh axes as its size allows.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gspmd.annotate import Fault
from gspmd.annotate.errors import listed
from gspmd.layouts.rules.faults import Line
from gspmd.layouts.rules.keys import ALIKE, PHASES
from gspmd.layouts.table import ChosenAlternatives, LayoutTable, OfTable

Lists = Mapping[str, tuple[str, ...]]


def resolve(layout: OfTable, faults_of: Callable[[str, str, str], list[Fault]]) -> tuple[OfTable, list[Fault]]:
    """Return the layout with one spec for every key, and the faults in its lists of alternatives.

    All lists of a section must have the same length, and the alternative at the same position is chosen in all of them.
    This is the first position at which the mesh divides all sizes. In an overriding section, a position is chosen
    separately for the keys of each part of the model. Lists in [prefill] and [decode] are kept. These lists are
    resolved in the layout of the phase, for which the sizes are known.

    Args:
      layout: a layout, with or without lists of alternatives.
      faults_of: a function that takes the overriding section (empty for the layout's own table), the key and the spec
        of a line, and returns the faults of the line. A fault with a `cause` is a size that mesh axes do not divide.
        Any other fault is one of the notation, which is reported whatever alternative is chosen.

    Returns:
      The layout and the faults. If no alternative fits, the layout has the first spec of each list. The property
      `chosen` of the layout shows the choices.
    """
    faults, choices, single = [], [], {section: dict(table) for section, table in _tables(layout).items()}
    for section, table in _tables(layout).items():
        if section in PHASES:
            continue  # the sizes of a phase are not known yet
        for part, lists in _sections(table):
            at, wrong = _choose(section, f"[{section or part}]", lists, faults_of)
            faults += wrong
            taken = {key: texts[at] for key, texts in lists.items()}
            single[section] |= taken
            choices.append(ChosenAlternatives(section, section or part, at, max(map(len, lists.values())), taken))
    if not choices:
        return layout, faults
    return replace(layout, table=single.pop(""), overrides=single, choices=tuple(choices)), faults


def singles(layout: OfTable) -> Iterator[OfTable]:
    """Yield a variant of a layout for every section with lists of alternatives and every position in these lists.

    In a variant, each list of the section is replaced by its alternative at this position. The lists of all other
    sections are removed from the layout's own table, because sizes decide which alternatives of two sections occur
    together. Overriding sections keep their lists of all other sections.
    """
    tables = _tables(layout)
    parts = dict.fromkeys(part for table in tables.values() for part, _ in _sections(table))
    for part in parts:
        lists = [lists for table in tables.values() for name, lists in _sections(table) if name == part]
        for at in range(max(len(texts) for each in lists for texts in each.values())):
            pick = {
                name: {key: _at(key, text, part, at) for key, text in table.items()} for name, table in tables.items()
            }
            base = {key: text for key, text in pick.pop("").items() if not isinstance(text, tuple)}
            yield replace(layout, table=base, overrides=pick)


def without_partner(layout: LayoutTable, faults_of: Callable[[Mapping[str, str]], list[Fault]]) -> Iterator[Fault]:
    """Yield faults for every alternative that disagrees with all alternatives of a line in another section.

    Only pairs of lines that must be sharded alike, according to `ALIKE`, are compared.

    Args:
      layout: a layout, with or without lists of alternatives.
      faults_of: a function that takes a mapping from two keys to their specs, and returns the faults of this pair.
    """
    for first, second, _ in ALIKE:
        ours, theirs = layout.table.get(first), layout.table.get(second)
        if isinstance(ours, tuple) and isinstance(theirs, tuple) and first.split(".")[0] != second.split(".")[0]:
            met = [[faults_of({first: one, second: other}) for other in theirs] for one in ours]
            yield from (fault for line in (*met, *zip(*met)) if all(line) for fault in line[0])


def _at(key: str, text: Any, part: str, at: int) -> Any:
    chosen = isinstance(text, tuple) and key.partition(".")[0] == part
    return text[min(at, len(text) - 1)] if chosen else text


def _tables(layout: LayoutTable) -> dict[str, Mapping[str, Any]]:
    return {"": layout.table, **layout.overrides}


def _sections(table: Mapping[str, Any]) -> Iterator[tuple[str, Lists]]:
    lists = {key: text for key, text in table.items() if isinstance(text, tuple)}
    for part in dict.fromkeys(key.partition(".")[0] for key in lists):
        yield part, {key: texts for key, texts in lists.items() if key.partition(".")[0] == part}


def _choose(section: str, name: str, lists: Lists, faults_of: Callable) -> tuple[int, list[Fault]]:
    """Return the first position at which the specs of all lists fit the sizes, and the faults of the lists.

    If no position fits, the position is 0. The faults are faults of the notation, or one fault about lists of different
    lengths. If there are no such faults and no position fits, a single fault says why no position fits.
    """
    first, *others = lists
    unequal = [key for key in others if len(lists[key]) != len(lists[first])]
    if unequal:
        key = unequal[0]
        fact = (
            f"{key} has {len(lists[key])} alternatives, and {first} has {len(lists[first])}; they are chosen together."
        )
        line = Line(key, " | ".join(lists[key]), section)
        return 0, [line.at_text(fact, "Give all lists of a section the same length; a spec may be repeated.")]
    places = range(len(lists[first]))
    faults = [[fault for key in lists for fault in faults_of(section, key, lists[key][at])] for at in places]
    wrong = [fault for of_place in faults for fault in of_place if not fault.cause]
    fitting = next((at for at in places if not faults[at]), None)
    if wrong or fitting is not None:
        return fitting or 0, wrong
    line = Line(first, " | ".join(lists[first]), section)
    causes = [of_place[0].cause for of_place in faults]
    why = "; ".join(f"{at + 1}. {dim} is {size}, over {parts} shards" for at, (dim, size, parts) in enumerate(causes))
    dims = listed(sorted({str(dim) for dim, *_ in causes}))
    fact = f"none of the {len(faults)} alternatives of {name} fits: {why}."
    return 0, [line.at_text(fact, f"Add one with {dims} unsharded, or over fewer mesh axes.")]
