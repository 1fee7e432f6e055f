"""A layout with other specs for some keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.errors import shown
from gspmd.annotate.validation import whole
from gspmd.layouts.rules.keys import OVERRIDES, PHASES, SERVING
from gspmd.layouts.rules.table import LayoutTable, Text
from gspmd.reading import WHOLE, whole_number

OfTable = TypeVar("OfTable", bound=LayoutTable)


def overridden(layout: OfTable, specs: Any) -> OfTable:
    """Return a layout with the specs, lowerings and multiples of padding of `specs`, which are not checked here.

    Raises:
      LayoutError: it is no mapping, or a value is of the wrong type.
    """
    if not isinstance(specs, Mapping):
        raise LayoutError(f'cannot override with {shown(specs)}.\n  Write {{"ffn.w_in": "E_xF_y"}}, keys to specs.')
    # as in a file: what is said of both phases of serving comes before what is said of one
    for key, value in sorted(specs.items(), key=lambda entry: not str(entry[0]).startswith(f"{SERVING}.")):
        section, _, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        text, multiple = _text(value), whole_number(value) if isinstance(value, str) else whole(value)
        if section == "padding" and multiple is not None:
            layout = replace(layout, padding={**layout.padding, rest: multiple})
        elif not isinstance(key, str) or text is None or (section == "padding"):
            remedy = f"The multiple of a padding is {WHOLE}." * (section == "padding")
            doing = f"cannot override {shown(key)} with {shown(value)}"
            raise LayoutError(f"{doing}.\n  {remedy or 'A key and its spec are strings.'}")
        elif section == "lowering":
            layout = replace(layout, lowerings={**layout.lowerings, rest: str(value)})
        elif section in OVERRIDES or section == SERVING:
            named = PHASES if section == SERVING else (section,)
            tables = {each: {**layout.overrides.get(each, {}), rest: text} for each in named}
            layout = replace(layout, overrides={**layout.overrides, **tables})
        else:
            layout = replace(layout, table={**layout.table, key: text})
    return layout


def _text(value: Any) -> Text | None:
    """A spec, or alternatives, as text; None for anything else."""
    if isinstance(value, str) and "|" in value:
        return tuple(each.strip() for each in value.split("|"))
    if isinstance(value, str | Spec):
        return str(value)
    alternatives = isinstance(value, list | tuple) and value and all(isinstance(each, str | Spec) for each in value)
    return tuple(map(str, value)) if alternatives else None
