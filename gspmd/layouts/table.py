"""The fields of a layout, with lookup of the spec of a tensor and of the section of a part of the model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.errors import shown, suggestion
from gspmd.layouts.rules.keys import KEYS, PARTS, Text, look_up, one_spec
from gspmd.layouts.rules.own import Dims, declared, sections
from gspmd.layouts.section import Section


@dataclass(frozen=True)
class ChosenAlternatives:
    """The alternatives that were chosen together in one section.

    Attributes:
      section: the overriding section; empty for the layout's own table.
      name: the name to print. This is the overriding section, or the part of the model if there is no overriding
        section.
      place: the position of the chosen alternative, counted from 0.
      count: the number of alternatives.
      specs: a mapping from key to the spec that was chosen.
    """

    section: str
    name: str
    place: int
    count: int
    specs: Mapping[str, str]


@dataclass(frozen=True)
class LayoutTable:
    """The fields of a layout, with lookup of a spec, `layout["ffn.w_in"]`, and of a section, `layout.section("ffn")`.

    The docstring of `gspmd.layouts.Layout` describes the fields.
    """

    name: str
    axes: tuple[str, ...] = ()
    factor: tuple[str, ...] = ()
    table: Mapping[str, Text] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Text]] = field(default_factory=dict)
    lowerings: Mapping[str, str] = field(default_factory=dict)
    dimensions: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Dims] = None  # type: ignore[assignment]  # None is replaced by what the table declares
    padding: Mapping[str, int] = field(default_factory=dict)
    choices: tuple[ChosenAlternatives, ...] = ()
    serves: str = ""
    is_encoder: bool = False

    def __post_init__(self) -> None:
        if self.own is None:
            object.__setattr__(self, "own", declared(self.table))

    def __getitem__(self, key: str) -> str:
        """Return the spec of a tensor.

        Raises:
          LayoutError: the key is unknown, has alternatives (see `resolved`), or is optional and absent.
        """
        spec = look_up(self.table, key)
        if spec is None:
            raise LayoutError(
                f"layout '{self.name}' does not write {key}, which is optional.\n  Ask with get({key!r})."
            )
        return spec

    def get(self, key: str, default: str | None = None) -> str | None:
        """Return the spec of a tensor, or `default` if its key is optional and absent."""
        spec = look_up(self.table, key)
        return default if spec is None else spec

    def spec(self, key: str) -> Spec:
        """Return the parsed spec of a tensor.

        Raises:
          LayoutError: for the same reasons as in `layout[key]`.
        """
        return Spec.parse(self[key])

    def section(self, part: str) -> Section:
        """Return a section of the layout, whose keys are attributes of the result.

        `part` is the name of a part of the model, such as `"ffn"`, or of a custom section. `layout.ffn` is short for
        `layout.section("ffn")`.
        """
        if not isinstance(part, str) or part not in self._parts:
            raise unknown("part", part, self._parts)
        return Section(part, self.table, self.lowering_of(part))

    @property
    def _parts(self) -> tuple[str, ...]:
        return (*PARTS, *sections(self.own))

    def gradient(self, key: str) -> str:
        """Return the spec of a parameter's gradient, which is the parameter's spec unless [gradients] overrides it."""
        return self._overridden("gradients", key) or self[key]

    def optimizer(self, key: str) -> str:
        """Return the spec of a parameter's optimizer state.

        This is the spec of the parameter, unless [optimizer] overrides it.

        >>> from gspmd.layouts import Layout
        >>> Layout.load("data-parallel").override({"optimizer.ffn.w_in": "E_xyzF"}).optimizer("ffn.w_in")
        'E_xyzF'
        """
        return self._overridden("optimizer", key) or self[key]

    def cache(self, key: str = "attention.key") -> str:
        """Return the spec of a key/value cache, in which the length is dimension T.

        The cache is sharded like the line `key`, unless [cache] overrides this line. If the layout has no line
        `cross.key`, neither in its table nor in [cache], the cache of cross-attention (`"cross.key"`) is sharded like
        the cache of self-attention (`"attention.key"`).

        >>> from gspmd.layouts import Layout
        >>> Layout.load("weight-stationary-2d").cache()
        'B_xyzTKD'
        """
        if (
            isinstance(key, str)
            and key == "cross.key"
            and key not in self.table
            and key not in self.overrides.get("cache", {})
        ):
            key = "attention.key"
        return self._overridden("cache", key) or str(Spec.parse(self[key]).rename({"L": "T"}))

    def _overridden(self, section: str, key: str) -> str | None:
        text = self.overrides.get(section, {}).get(key) if isinstance(key, str) else None
        return None if text is None else one_spec(text, f"[{section}] {key}")

    @property
    def lowering(self) -> str | None:
        """The default lowering, which is `default` in [lowering], or None if the layout sets no default."""
        return self.lowerings.get("default")

    def lowering_of(self, part: str) -> str | None:
        """Return the lowering of a part of the model, which is the layout's `default` if [lowering] lacks the part."""
        if not isinstance(part, str):
            raise unknown("part", part, self._parts)
        return self.lowerings.get(part, self.lowering)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The alternatives that `resolved` chose, as text with one line for each section.

        Alternatives that were overridden later are left out.
        """
        lines = []
        for choice in self.choices:
            table = self.overrides.get(choice.section, {}) if choice.section else self.table
            kept = {key: text for key, text in choice.specs.items() if table.get(key) == text}
            texts = ", ".join(f"{key if choice.section else key.partition('.')[2]} {kept[key]}" for key in kept)
            lines += [f"[{choice.name}] {choice.place + 1} of {choice.count}: {texts}"] if kept else []
        return tuple(lines)


OfTable = TypeVar("OfTable", bound=LayoutTable)


def parameters_of(layout: LayoutTable) -> Iterator[tuple[str, str]]:
    """Yield the key and the spec of every parameter for which the layout writes a line or a default."""
    written = set(sections(layout.table))

    def is_written(name: str | None) -> bool:
        return name is not None and (name in layout.table or is_written(KEYS[name].default))

    for key in KEYS.values():
        if key.kind == "parameter" and key.section in written and is_written(key.name):
            yield key.name, layout[key.name]


def unknown(what: str, name: Any, known: tuple[str, ...]) -> LayoutError:
    """Return the error for a name that is not known; `what` is `"part"`, `"phase"` or `"stack"`."""
    near = suggestion(name, known) if isinstance(name, str) else ""
    known = f"{what.capitalize()}s: {', '.join(known)}."
    return LayoutError(f"no {what} of a layout is called {shown(name)}.\n  {near}{known}")
