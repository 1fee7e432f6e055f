"""Rules of [pipeline]: one mesh axis splits the layers, and shards nothing else."""

from collections.abc import Iterator, Mapping
from typing import Any

from gspmd.annotate import Fault, Spec
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
    for key, spec in specs.items() if axes and section == "gradients" else ():
        if spec.partial:
            fact = "a stage settles the gradients of each microbatch, and leaves no partial sum."
            yield Line(key, table[key], section).at_text(fact, f"Write '{spec.without_partial()}'.")
    for key, spec in specs.items():
        for dim in spec.dims if key != LAYERS and key in table else ():
            if shared := [axis for axis in spec.axes_of(dim) if axis in axes]:
                kept = spec.with_axes(dim, tuple(axis for axis in spec.axes_of(dim) if axis not in axes))
                fact = f"mesh axis {shared[0]} has the stages of a pipeline, and dimension {dim} lies over it too."
                yield Line(key, table[key], section).at_dim(spec, dim, fact, f"Write '{kept}'.")
