"""Variants of a layout: with other specs, with the storage of another layout, for single positions, in a shard_map."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspmd.annotate import Fault, LayoutError, Spec, SpecError, parse_via, report
from gspmd.annotate.equation import Via
from gspmd.annotate.errors import shown
from gspmd.annotate.validation import whole
from gspmd.layouts.rules.faults import Line
from gspmd.layouts.rules.keys import CACHE, ENCODER, KEYS, OVERRIDES, PHASES, SERVING, Text, keys_of_override
from gspmd.layouts.rules.own import is_own_encoder, sections
from gspmd.layouts.table import LayoutTable, OfTable, parameters_of
from gspmd.reading import WHOLE, whole_number


def overridden(layout: OfTable, specs: Any) -> OfTable:
    """Return a layout with the specs, lowerings and paddings in `specs`, which are parsed but not checked.

    Raises:
      LayoutError: `specs` is not a mapping, a value is of the wrong type, or a spec cannot be read.
    """
    if not isinstance(specs, Mapping):
        remedy = 'Pass a mapping from keys to specs, such as {"ffn.w_in": "E_xF_y"}.'
        raise LayoutError(f"cannot override with {shown(specs)}.\n  {remedy}")
    # As in a file, lines for both phases of serving are applied first, so that lines for one phase override them.
    for key, value in sorted(specs.items(), key=lambda entry: not str(entry[0]).startswith(f"{SERVING}.")):
        section, _, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        text, multiple = _text(value), whole_number(value) if isinstance(value, str) else whole(value)
        if section == "padding" and multiple is not None:
            layout = replace(layout, padding={**layout.padding, rest: multiple})
        elif not isinstance(key, str) or text is None or section == "padding":
            remedy = f"The multiple of a padding is {WHOLE}." * (section == "padding")
            doing = f"cannot override {shown(key)} with {shown(value)}"
            raise LayoutError(f"{doing}.\n  {remedy or 'A key and its spec are strings.'}")
        elif section == "lowering":
            layout = replace(layout, lowerings={**layout.lowerings, rest: str(value)})
        else:
            if "." in key:  # Of a key that no layout has, `check` says so, whatever its text.
                _refuse_unreadable(key, text)
            layout = _with_line(layout, key, text)
    return layout


def _with_line(layout: OfTable, key: str, text: Text) -> OfTable:
    """Return a layout with another spec for one key, in the layout's own table or in an overriding section."""
    section, _, rest = key.partition(".")
    if not (section in OVERRIDES or section == SERVING) or is_own_encoder(section, rest, sections(layout.table)):
        return replace(layout, table={**layout.table, key: text})
    named = PHASES if section == SERVING else (section,)
    tables = {each: {**layout.overrides.get(each, {}), rest: text} for each in named}
    return replace(layout, overrides={**layout.overrides, **tables})


def _refuse_unreadable(key: str, text: Text) -> None:
    """Raise an error if a spec cannot be parsed, before the layout is checked.

    Raises:
      LayoutError: the spec or one of the alternatives cannot be parsed. The message lists every fault.
    """
    faults: list[Fault] = []
    for each in (text,) if isinstance(text, str) else text:
        line = Line(key, each, "")
        try:
            parse_via(each) if key.endswith("_via") else Spec.parse(each)
        except SpecError as error:
            faults += map(line.moved, error.faults)
    if faults:
        raise report(LayoutError, f"cannot override {shown(key)}", faults) from None


def _text(value: Any) -> Text | None:
    """Return a spec or a list of alternatives as text; return None for any other value."""
    if isinstance(value, str) and "|" in value:
        return tuple(each.strip() for each in value.split("|"))
    if isinstance(value, str | Spec):
        return str(value)
    alternatives = isinstance(value, list | tuple) and value and all(isinstance(each, str | Spec) for each in value)
    return tuple(map(str, value)) if alternatives else None


def stored_specs(layout: LayoutTable, other: LayoutTable) -> dict[str, str]:
    """Return the overrides that make a layout store its parameters and cache in the same way as another layout.

    Args:
      layout: the layout to override.
      other: the layout whose storage is used.

    Returns:
      A mapping from key to spec.

    Raises:
      LayoutError: the layouts have different mesh axes.
    """
    if set(layout.axes) != set(other.axes):
        of = [f"'{each.name}' has {', '.join(each.axes)}" for each in (layout, other)]
        raise LayoutError(
            f"layout '{layout.name}' cannot store parameters as layout '{other.name}': their mesh axes differ.\n"
            f"  {of[0]}, and {of[1]}; declare the same axes in both, and give unused ones size 1."
        )
    caches = {f"cache.{key}": other.cache(key) for key in CACHE}
    stored = dict(parameters_of(other))
    if "attention.w_q" in stored:  # parameters of cross-attention are by default like those of self-attention
        cross = [key.name for key in KEYS.values() if key.section == "cross" and key.kind == "parameter"]
        stored |= {name: other[name] for name in cross}
    if ENCODER in layout.overrides or ENCODER in other.overrides:
        inner = replace(other, table={**other.table, **other.overrides.get(ENCODER, {})})
        own = keys_of_override(ENCODER)
        stored |= {f"{ENCODER}.{key}": spec for key, spec in parameters_of(inner) if key in own}
    return {**stored, **caches}


def position_specs(table: Mapping[str, Text]) -> dict[str, Text]:
    """Return the specs of a table that shard L, changed so that L is not sharded.

    A single position cannot be sharded.

    >>> position_specs({"ffn.residual": "B_xL_yE", "ffn.hidden": "B_xLF_y", "ffn.in_via": "B_xL_yE, EF"})
    {'ffn.residual': 'B_xLE', 'ffn.in_via': 'B_xLE, EF'}
    >>> position_specs({"ffn.residual": ("B_xL_yE", "B_xyLE")})
    {'ffn.residual': ('B_xLE', 'B_xyLE')}
    """
    return _changed(table, ("via", "activation"), _one_position)


def inner_specs(table: Mapping[str, Text], axes: Sequence[str]) -> dict[str, Text]:
    """Return the specs of a table that use any of the given mesh axes, with these axes removed.

    >>> inner_specs({"ffn.residual": "B_xLE", "ffn.w_in": "EF_y reduced-x", "ffn.in_via": "B_xLE, EF_y"}, ["x"])
    {'ffn.residual': 'BLE', 'ffn.w_in': 'EF_y', 'ffn.in_via': 'BLE, EF_y'}
    """

    def rest(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in names if axis not in axes)

    def inner(text: str, kind: str) -> str:
        specs = parse_via(text).specs if kind == "via" else (Spec.parse(text),)
        return ", ".join(
            str(Spec(spec.dims, tuple(map(rest, spec.axes)), rest(spec.partial), rest(spec.reduced))) for spec in specs
        )

    return _changed(table, ("via", "activation", "parameter"), inner)


def data_axes(layout: LayoutTable) -> tuple[str, ...]:
    """Return the mesh axes along which pipelines run side by side, each on its own sequences.

    These axes shard only the batch, and are the first axes of B in every spec. So each pipeline has a run of
    consecutive sequences. The later axes of B divide this run further.

    Args:
        layout: a `Layout` without alternatives. Its [moe] section is ignored.

    Example:
        >>> from gspmd.layouts import Layout
        >>> [data_axes(Layout.load(name)) for name in ("pipeline", "context-parallel", "zero-1", "zero-3")]
        [('x',), ('x',), ('x', 'y', 'z'), ()]
    """
    specs: list[Spec] = []
    for key in (KEYS[name] for name in layout.table if name in KEYS):
        if key.kind in ("parameter", "activation", "via") and key.section != "moe":
            text = layout[key.name]
            specs += parse_via(text).specs if key.kind == "via" else [Spec.parse(text)]
    batches = [spec.axes_of("B") if "B" in spec.dims else () for spec in specs]
    elsewhere = {axis for spec, batch in zip(specs, batches) for axis in spec.used if axis not in batch}
    first: tuple[str, ...] = ()
    for axis in layout.spec("embedding.tokens").axes_of("B"):
        wanted = (*first, axis)
        alike = all(batch[: len(wanted)] == wanted for spec, batch in zip(specs, batches) if "B" in spec.dims)
        if axis in elsewhere or not alike:
            break
        first = wanted
    return first


def _changed(table: Mapping[str, Text], kinds: Sequence[str], change: Callable[[str, str], str]) -> dict[str, Text]:
    """Apply a function to the specs in a table, and return the lines that it changes.

    Args:
        table: a mapping from key to text.
        kinds: the kinds of keys to whose specs the function is applied.
        change: a function that takes a spec or a via as text, and the kind of its key, and returns a text.
    """
    changed: dict[str, Text] = {}
    for name, kind in ((name, KEYS[name].kind) for name in table if name in KEYS):
        if kind in kinds:
            text = table[name]
            found = tuple(change(each, kind) for each in (text if isinstance(text, tuple) else (text,)))
            changed[name] = found if isinstance(text, tuple) else found[0]
    return {name: text for name, text in changed.items() if text != table[name]}


def _one_position(text: str, kind: str) -> str:
    """Return a spec or a via in which L is not sharded; a text that does not shard L is returned unchanged."""
    if kind == "via":
        activation, weight = parse_via(text).specs
        sharded = "L" in activation.dims and activation.axes_of("L")
        return str(Via.of(activation.with_axes("L", ()), weight)) if sharded else text
    spec = Spec.parse(text)
    return str(spec.with_axes("L", ())) if "L" in spec.dims and spec.axes_of("L") else text
