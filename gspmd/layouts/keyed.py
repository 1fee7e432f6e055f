"""A layout's answers for one tensor, by key, and for one part of the model."""

from typing import Any

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.errors import shown, suggestion
from gspmd.layouts.rules import own
from gspmd.layouts.rules.keys import PARTS
from gspmd.layouts.rules.table import LayoutTable
from gspmd.layouts.section import Section, look_up, one_spec


class KeyedTable(LayoutTable):
    """A layout's table, asked by key: `layout["ffn.w_in"]`, and by part: `layout.ffn.w_in`."""

    def __getitem__(self, key: str) -> str:
        """Return the spec of a tensor.

        Raises:
          LayoutError: an unknown key, an optional one that is absent, or one with alternatives (see `resolved`).
        """
        spec = look_up(self.table, key)
        if spec is None:
            raise LayoutError(
                f"layout '{self.name}' does not write {key}, which is optional.\n  Ask with get({key!r})."
            )
        return spec

    def get(self, key: str, default: str | None = None) -> str | None:
        """Return the spec of a tensor, or `default` if an optional key is absent."""
        spec = look_up(self.table, key)
        return default if spec is None else spec

    def spec(self, key: str) -> Spec:
        """Return the spec of a tensor, parsed. Raises as `layout[key]` does."""
        return Spec.parse(self[key])

    def section(self, part: str) -> Section:
        """Return a part of the model (embedding, attention, ffn, moe, output, or user-defined), its keys as attributes.

        `layout.ffn` is short for `layout.section("ffn")`.
        """
        if not isinstance(part, str) or part not in self._parts:
            raise unknown("part", part, self._parts)
        return Section(part, self.table, self.lowering_of(part))

    @property
    def _parts(self) -> tuple[str, ...]:
        return (*PARTS, *own.sections(self.own))

    def gradient(self, key: str) -> str:
        """Return the spec of a parameter's gradient: the parameter's own unless [gradients] overrides it."""
        return self._overridden("gradients", key) or self[key]

    def optimizer(self, key: str) -> str:
        """Return the spec of a parameter's optimizer state: the parameter's own unless [optimizer] overrides it.

        >>> from gspmd.layouts import Layout
        >>> Layout.load("data-parallel").override({"optimizer.ffn.w_in": "E_xyzF"}).optimizer("ffn.w_in")
        'E_xyzF'
        """
        return self._overridden("optimizer", key) or self[key]

    def cache(self, key: str = "attention.key") -> str:
        """Return the spec of the key/value cache, with length T: as attention.key unless [cache] overrides it.

        >>> from gspmd.layouts import Layout
        >>> Layout.load("weight-stationary-2d").cache()
        'B_xyzTKD'
        """
        return self._overridden("cache", key) or str(Spec.parse(self[key]).rename({"L": "T"}))

    def _overridden(self, section: str, key: str) -> str | None:
        text = self.overrides.get(section, {}).get(key) if isinstance(key, str) else None
        return None if text is None else one_spec(text, f"[{section}] {key}")

    @property
    def lowering(self) -> str | None:
        """The default of [lowering]; None leaves it to the caller."""
        return self.lowerings.get("default")

    def lowering_of(self, part: str) -> str | None:
        """Return the lowering of a part of the model, by default that of the layout."""
        if not isinstance(part, str):
            raise unknown("part", part, self._parts)
        return self.lowerings.get(part, self.lowering)


def unknown(what: str, name: Any, known: tuple[str, ...]) -> LayoutError:
    """The error for a part or a phase that no layout has."""
    near = suggestion(name, known) if isinstance(name, str) else ""
    known = f"{what.capitalize()}s: {', '.join(known)}."
    return LayoutError(f"no {what} of a layout is called {shown(name)}.\n  {near}{known}")
