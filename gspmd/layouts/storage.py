"""One set of stored weights for two layouts, and a layout of single positions."""

from collections.abc import Iterator, Mapping
from typing import Any

from gspmd.annotate import LayoutError, Spec, parse_via
from gspmd.layouts.rules.keys import KEYS
from gspmd.layouts.vias import whole_length


def stored_specs(layout: Any, other: Any) -> dict[str, str]:
    """Return what a layout has to write to store parameters and cache as another one does: key to spec.

    Args:
      layout, other: a `Layout`.

    Raises:
      LayoutError: they are not of the same mesh axes.
    """
    if set(layout.axes) != set(other.axes):
        of = [f"'{each.name}' has {', '.join(each.axes)}" for each in (layout, other)]
        raise LayoutError(
            f"layout '{layout.name}' cannot use what layout '{other.name}' stores: they are of other mesh axes.\n"
            f"  {of[0]}, and {of[1]}; give both the same, unused ones with size 1."
        )
    return {**dict(_parameters(other)), "cache.attention.key": other.cache()}


def _parameters(layout: Any) -> Iterator[tuple[str, str]]:
    """Every parameter's key with its spec; a section that the layout does not have is left out."""
    written = {name.partition(".")[0] for name in layout.table}
    for key in KEYS.values():
        spec = layout.get(key.name) if key.kind == "parameter" and key.section in written else None
        if spec is not None:
            yield key.name, spec


def position_specs(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the specs of a table in which L is sharded, with L whole: one position cannot be divided.

    >>> position_specs({"ffn.residual": "B_xL_yE", "ffn.hidden": "B_xLF_y", "ffn.in_via": "B_xL_yE, EF"})
    {'ffn.residual': 'B_xLE', 'ffn.in_via': 'B_xLE, EF'}
    """
    changed = {}
    for name, text in table.items():
        kind = KEYS[name].kind if name in KEYS else "parameter"
        if kind == "via":
            via = parse_via(text)
            whole = "L" in via.specs[0].dims and via.specs[0].axes_of("L") and whole_length(via)
            changed |= {name: ", ".join(map(str, whole.specs))} if whole else {}
        elif kind == "activation" and "L" in (spec := Spec.parse(text)).dims and spec.axes_of("L"):
            changed[name] = str(spec.with_axes("L", ()))
    return changed
