"""The fields of a layout, which its rules check and its printer shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gspmd.layouts.rules.own import Dims, declared

Text = str | tuple[str, ...]
"""A spec, or alternatives of which sizes and mesh choose one."""


@dataclass(frozen=True)
class ChosenAlternatives:
    """The alternatives that were taken in one section.

    Attributes:
      section: the overriding section, or empty.
      name: as it is printed: the section, or the part of the model.
      place, count: which of how many.
      specs: key to what was taken.
    """

    section: str
    name: str
    place: int
    count: int
    specs: Mapping[str, str]


@dataclass(frozen=True)
class LayoutTable:
    """The fields of a layout; `gspmd.layouts.Layout` describes them."""

    name: str
    axes: tuple[str, ...] = ()
    factor: tuple[str, ...] = ()
    table: Mapping[str, Text] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Text]] = field(default_factory=dict)
    lowerings: Mapping[str, str] = field(default_factory=dict)
    dimensions: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Dims] | None = None
    padding: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[ChosenAlternatives, ...] = ()
    serves: str = ""

    def __post_init__(self) -> None:
        if self.own is None:
            object.__setattr__(self, "own", declared(self.table))

    @property
    def chosen(self) -> tuple[str, ...]:
        """Alternatives that `resolved` took, a line for each section that has some; none that were overridden since."""
        lines = []
        for choice in self.choices:
            table = self.overrides.get(choice.section, {}) if choice.section else self.table
            kept = {key: text for key, text in choice.specs.items() if table.get(key) == text}
            texts = ", ".join(f"{key if choice.section else key.partition('.')[2]} {kept[key]}" for key in kept)
            lines += [f"[{choice.name}] {choice.place + 1} of {choice.count}: {texts}"] if kept else []
        return tuple(lines)
