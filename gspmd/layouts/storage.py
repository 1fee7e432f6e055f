"""A layout for another purpose: stored as another one, for single positions, in a shard_map, for a loss."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gspmd.annotate import LayoutError, Spec, parse_via
from gspmd.annotate.equation import Via
from gspmd.layouts.keyed import KeyedTable
from gspmd.layouts.rules.keys import KEYS
from gspmd.layouts.rules.table import Text


def stored_specs(layout: KeyedTable, other: Any) -> dict[str, str]:
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


def _parameters(layout: KeyedTable) -> Iterator[tuple[str, str]]:
    """Every parameter's key with its spec; a section or a key that the layout does not have is left out."""
    sections = {name.partition(".")[0] for name in layout.table}

    def is_written(name: str | None) -> bool:
        return name is not None and (name in layout.table or is_written(KEYS[name].default))

    for key in KEYS.values():
        if key.kind == "parameter" and key.section in sections and is_written(key.name):
            yield key.name, layout[key.name]


def position_specs(table: Mapping[str, Text]) -> dict[str, Text]:
    """Return the specs of a table in which L is sharded, with L whole: one position cannot be divided.

    >>> position_specs({"ffn.residual": "B_xL_yE", "ffn.hidden": "B_xLF_y", "ffn.in_via": "B_xL_yE, EF"})
    {'ffn.residual': 'B_xLE', 'ffn.in_via': 'B_xLE, EF'}
    >>> position_specs({"ffn.residual": ("B_xL_yE", "B_xyLE")})
    {'ffn.residual': ('B_xLE', 'B_xyLE')}
    """
    return _changed(table, ("via", "activation"), _one_position)


def inner_specs(table: Mapping[str, Text], axes: Sequence[str]) -> dict[str, Text]:
    """Return the specs of a table that have some mesh axes, without them.

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


def _changed(table: Mapping[str, Text], kinds: Sequence[str], change: Callable[[str, str], str]) -> dict[str, Text]:
    """The specs of some kinds of keys, each alternative changed by (text, kind) -> text; those that stay left out."""
    changed: dict[str, Text] = {}
    for name, kind in ((name, KEYS[name].kind) for name in table if name in KEYS):
        if kind in kinds:
            text = table[name]
            found = tuple(change(each, kind) for each in (text if isinstance(text, tuple) else (text,)))
            changed[name] = found if isinstance(text, tuple) else found[0]
    return {name: text for name, text in changed.items() if text != table[name]}


def _one_position(text: str, kind: str) -> str:
    """A spec or a via with L whole; the text as it stands where L is whole already."""
    if kind == "via":
        activation, weight = parse_via(text).specs
        sharded = "L" in activation.dims and activation.axes_of("L")
        return str(Via.of(activation.with_axes("L", ()), weight)) if sharded else text
    spec = Spec.parse(text)
    return str(spec.with_axes("L", ())) if "L" in spec.dims and spec.axes_of("L") else text


def loss_specs(layout: KeyedTable, microbatches: int) -> dict[str, Spec]:
    """Return the placement in which the loss of a training step takes each parameter; see `Layout.for_loss`."""
    specs = {}
    for key, text in _parameters(layout):
        own, gradient = Spec.parse(text), Spec.parse(layout.gradient(key))
        at_once = key in layout.overrides.get("gradients", {}) and gradient == own
        summed = _axes_of_rows(layout, key) - own.used if microbatches > 1 and not at_once else ()
        specs[key] = (gradient if gradient.partial else own.with_partial(tuple(summed))).cotangent
    return specs


def _axes_of_rows(layout: KeyedTable, key: str) -> set[str]:
    """The mesh axes that shard the rows, tokens or slots, over which a parameter's gradient is summed."""
    beside = next((name for name, keys in _BESIDE.items() if key in keys), None)
    if beside and not key.partition(".")[2].startswith(("w_", "shared_")):  # a vector, and heads are rows too
        spec = layout.spec(beside)
        return {axis for dim in spec.dims if dim not in KEYS[key].dims for axis in spec.axes_of(dim)}
    of_section = {
        "embedding": ["embedding.tokens", "output.logits"],  # of a tied table, both
        "output": ["output.logits"],
        "moe": ["moe.groups"] if key.startswith("moe.router") else ["moe.expert_input"],
    }
    of_blocks = ["attention.residual", "ffn.residual", *filter(None, [beside])]
    # the last norm is over the residual stream, wherever the logits lie
    in_blocks = beside or key.startswith("output.norm")
    names = of_blocks if in_blocks else of_section.get(key.partition(".")[0], of_blocks)
    specs = [layout.spec(name) for name in names]
    axes = [{axis for dim in spec.dims if dim in "BLG" for axis in spec.axes_of(dim)} for spec in specs]
    return set.intersection(*axes)


_BESIDE = {
    "attention.query": ("attention.w_q", "attention.b_q", "attention.q_norm", "attention.w_o"),
    "attention.key": (
        "attention.w_k", "attention.w_v", "attention.b_k", "attention.b_v", "attention.k_norm",
    ),
    "ffn.hidden": ("ffn.w_in", "ffn.w_gate", "ffn.b_in", "ffn.b_gate", "ffn.w_out"),
    "moe.shared_hidden": ("moe.shared_in", "moe.shared_gate", "moe.shared_out"),
}  # fmt: skip
"""The tensor beside the residual stream that a parameter makes, takes, or is added to."""
