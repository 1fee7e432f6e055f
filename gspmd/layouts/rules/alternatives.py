"""Keys with alternative specs, one of which fits the sizes and the mesh: a batch over the axes that it fills, say."""

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

    All lists of a section have the same length, and the first position at which the mesh divides all sizes is chosen.
    In an overriding section, this is done separately for the keys of each part of the model. Lists in [prefill] and
    [decode] are kept: they are resolved in the layout of the phase, for which the sizes are known.

    Args:
      layout: a layout, with lists or without.
      faults_of: a function from overriding section (empty for none), key and spec to the faults of that line. Faults
            with a `cause` are sizes that mesh axes do not divide; all others are faults of the notation, which no
            choice can avoid.

    Returns:
      The layout, with the first spec of each list if no alternative fits, and the faults. `chosen` of the layout names
      the choices.
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
    """Yield, for every section, the layout with the first alternative of each of its lists, the second, and so on.

    Lists of all other sections are left out, because sizes decide which alternatives of two sections occur together. In
    an overriding section, other lists are left unchanged.
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
    """Yield the faults of alternatives that agree with no alternative of a line in another section, although they must.

    Args:
      layout: a layout, with lists or without.
      faults_of: a function from the specs of two keys to their faults.
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
    """Return the first position at which all lists fit, and faults of notation, or of sizes if no position fits."""
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
