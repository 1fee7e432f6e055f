"""Rules of [pipeline]: one mesh axis splits the layers, and shards nothing else; others have pipelines side by side."""

from collections.abc import Iterator, Mapping
from typing import Any

from gspmd.annotate import Fault, Spec, parse_via
from gspmd.layouts.keyed import KeyedTable
from gspmd.layouts.rules.keys import KEYS
from gspmd.layouts.rules.line import Line

LAYERS = "pipeline.layers"


def stages_faults(
    section: str, table: Mapping[str, Any], specs: Mapping[str, Spec], base: Mapping[str, Spec]
) -> Iterator[Fault]:
    """Yield a fault for every tensor that lies over the mesh axis of the stages, and one for stages over several axes.

    Args:
        section: the overriding section of the table; empty for the layout's own.
        table: key to text.
        specs: key to spec, of those that could be read.
        base: those of the layout, which may have `pipeline.layers`.
    """
    layers = base.get(LAYERS, Spec(("N",), ((),)))
    axes = layers.axes_of("N")
    if len(axes) > 1 and not section:
        fact = f"stages follow one another along one mesh axis, and dimension N is sharded over {len(axes)}."
        yield Line(LAYERS, table[LAYERS]).at_dim(layers, "N", fact, f"Write 'N_{axes[0]}'.")
    for key, spec in specs.items():
        for dim in spec.dims if key != LAYERS and key in table else ():
            if shared := [axis for axis in spec.axes_of(dim) if axis in axes]:
                kept = spec.with_axes(dim, tuple(axis for axis in spec.axes_of(dim) if axis not in axes))
                fact = f"mesh axis {shared[0]} has the stages of a pipeline, and dimension {dim} lies over it too."
                yield Line(key, table[key], section).at_dim(spec, dim, fact, f"Write '{kept}'.")


def data_axes(layout: KeyedTable) -> tuple[str, ...]:
    """The mesh axes along which pipelines run side by side, each on sequences of its own.

    They split the batch and nothing else, and stand first there in every spec.

    Args:
        layout: a `Layout` without alternatives. Its experts are not looked at.

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
