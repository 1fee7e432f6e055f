"""One part of a layout by attribute, as text for people and as specs for programs; and the look-up behind both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.equation import parse_via
from gspmd.annotate.errors import shown, suggestion
from gspmd.layouts.rules.keys import KEYS
from gspmd.layouts.rules.table import Text

Table = Mapping[str, Text]


@dataclass(frozen=True)
class Section:
    """One part of a layout by attribute: `ffn.w_in`; an optional key that is absent is None.

    Attributes:
      lowering: the lowering that the layout asks of this part; None leaves it to the caller.
    """

    _part: str
    _specs: Table
    lowering: str | None = None

    def __getattr__(self, key: str) -> str | None:
        if key.startswith("_"):  # looked up while a copy is made
            raise AttributeError(key)
        try:
            return look_up(self._specs, f"{self._part}.{key}")
        except UnresolvedError:
            raise
        except LayoutError as error:
            raise AttributeError(str(error)) from None

    def __repr__(self) -> str:
        count = sum(key.startswith(f"{self._part}.") for key in self._specs)
        return f"<Section {self._part!r} of a layout: {count} specs>"

    def __hash__(self) -> int:
        return hash((self._part, str(sorted(self._specs.items(), key=str))))


@dataclass(frozen=True)
class SectionSpecs:
    """The specs of a section: a `Spec` for every tensor, a `Via` for every key that ends in "via", None where absent.

    The section is one of a layout, or anything with specs as attributes. Each text is parsed once.

    Example:
      >>> from gspmd.layouts import Layout
      >>> ffn = SectionSpecs(Layout.load("megatron-1d").ffn)
      >>> ffn.w_in, ffn.in_via.specs[0] == ffn.residual
      (Spec(dims=('E', 'F'), axes=((), ('y', 'z')), partial=(), reduced=()), True)
    """

    _section: Any

    def __getattr__(self, key: str) -> Any:  # a Spec, or a Via, or None
        if key.startswith("_"):  # looked up while a copy is made
            raise AttributeError(key)
        text = getattr(self._section, key)
        if text is None:
            return None
        return parse_via(text) if key.endswith("via") else Spec.parse(text)  # both remember what they have parsed


class UnresolvedError(LayoutError):
    """A key has alternatives, and none has been chosen yet."""


def one_spec(text: Text, key: str) -> str:
    """The text of a key that has one spec; raises UnresolvedError where it has alternatives."""
    if isinstance(text, tuple):
        raise UnresolvedError(
            f"{key} has {len(text)} alternatives ({', '.join(text)}), and sizes and mesh decide which is taken.\n"
            "  Call layout.resolved(sizes, mesh) first, with the sizes as for layout.check."
        )
    return text


def look_up(table: Table, key: str) -> str | None:
    """The text of a key, or of the key that stands in for it (the key's own dimensions); None if absent and optional.

    Raises:
      LayoutError: no layout has such a key, the table lacks it and nothing stands in for it, or it has alternatives.
    """
    if not isinstance(key, str):
        raise LayoutError(f"no layout has a key {shown(key)}.\n  A key is a string, such as 'ffn.w_in'.")
    if key in table:
        return one_spec(table[key], key)
    known = KEYS.get(key)
    if known is None:
        near = suggestion(key, (*KEYS, *table))
        raise LayoutError(f"no layout has a key {shown(key)}.\n  {near}docs/layouts.md lists every key.")
    if known.default is not None:
        text = look_up(table, known.default)
        more = set(KEYS[known.default].dims).difference(known.dims) if known.kind != "via" else ()
        return str(Spec.parse(text).without(*more)) if more else text
    if not known.optional:
        section, _, short = key.partition(".")
        remedy = f'Write {short} = "{known.dims}" in [{section}], with its mesh axes.'
        raise LayoutError(f"the layout does not write {key}, and nothing stands in for it.\n  {remedy}")
    return None
