"""The fields of a layout, which its rules check and its printer shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gspmd.layouts.rules.own import Dims, declared

Text = str | tuple[str, ...]
"""A spec, or alternatives of which sizes and mesh choose one."""


@dataclass(frozen=True)
class LayoutTable:
    """What a layout says; `gspmd.layouts.Layout` describes its fields."""

    name: str
    axes: tuple[str, ...] = ()
    factor: tuple[str, ...] = ()
    table: Mapping[str, Text] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Text]] = field(default_factory=dict)
    lowerings: Mapping[str, str] = field(default_factory=dict)
    dimensions: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Dims] | None = None
    padding: Mapping[str, int] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    serves: str = ""

    def __post_init__(self) -> None:
        if self.own is None:
            object.__setattr__(self, "own", declared(self.table))
