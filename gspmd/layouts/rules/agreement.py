"""Rules that concern several lines of a layout.

For example, tensors between which no equation moves data must be sharded alike, and the mesh axis of pipeline stages
must not shard any dimension except the layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from gspmd.annotate import Fault, LayoutError, Spec, SpecError, parse_via
from gspmd.annotate.errors import listed
from gspmd.layouts.rules.faults import Line, over
from gspmd.layouts.rules.keys import ALIKE, look_up
from gspmd.layouts.rules.sizes import GivenSizes
from gspmd.layouts.table import LayoutTable
from gspmd.ops._shared_heads import share

_LAYERS = "pipeline.layers"
_INPUT = "moe.expert_input"

# -- tensors that no equation moves ----------------------------------------------------------------------------------


def disagreements(section: str, table: Mapping[str, Any], specs: Mapping[str, Spec], serves: str) -> Iterator[Fault]:
    """Yield a fault for every pair of tensors that must be sharded alike but are not.

    Args:
      section: the overriding section whose lines are checked; empty for the layout's own table.
      table: a mapping from key to text.
      specs: a mapping from key to spec, without lines that cannot be parsed.
      serves: the phase of serving that the layout is for; empty for training.
    """
    specs = with_cross(table, specs)
    for first, second, dims in ALIKE:
        if first in specs and second in specs and not (serves and second.endswith(".key")):
            yield from _unlike(
                Line(second, str(table.get(second, specs[second])), section), first, specs[first], specs[second], dims
            )
    for part, length in (("attention", "L"), ("cross", "T")):
        query, key = specs.get(f"{part}.query"), specs.get(f"{part}.key")
        if key:
            line = Line(f"{part}.key", str(table.get(f"{part}.key", key)), section)
            yield from _keys_apart(line, query, key, length, serves)
            if query and not serves:  # attention to a cache moves queries and keys to the cache
                yield from _heads_apart(line, query, key)


def with_cross(table: Mapping[str, Any], specs: Mapping[str, Spec]) -> Mapping[str, Spec]:
    """Return the specs; if the layout writes only `cross.query` or only `cross.key`, add the default of the other."""
    names = ("cross.query", "cross.key")
    if not any(name in specs for name in names):
        return specs
    found = dict(specs)
    for name in names:
        if name not in found and name not in table:
            with suppress(LayoutError, SpecError):  # a faulty default is reported elsewhere
                text = look_up(table, name)
                found |= {} if text is None else {name: Spec.parse(text)}
    return found


def _heads_apart(line: Line, query: Spec, key: Spec) -> Iterator[Fault]:
    """Yield a fault if a device lacks the key heads for its query heads.

    Query head h attends with key head h // (H/K). The first (major) mesh axes of a dimension cut the dimension into
    runs of consecutive heads. So a device has the key heads for its query heads if K is sharded over the first mesh
    axes of H.
    """
    heads, held = query.axes_of("H"), key.axes_of("K")
    if held != heads[: len(held)]:
        fact = f"key/value heads are {over(held)}, and query heads ('{query}') are {over(heads)}."
        yield line.at_dim(key, "K", fact, "Shard K over the same mesh axes, or leading ones of them, or not at all.")


def _unlike(line: Line, first: str, model: Spec, spec: Spec, dims: str) -> Iterator[Fault]:
    apart = [dim for dim in dims if model.axes_of(dim) != spec.axes_of(dim)]
    if not apart:
        return
    dim, fitting = apart[0], {d: (model if d in dims else spec).axes_of(d) for d in spec.dims}
    axes = [axis for of_dim in fitting.values() for axis in of_dim]
    fact = (
        f"dimension {dim} of {line.name} is {over(spec.axes_of(dim))}, and that of {first} ('{model}') "
        f"is {over(model.axes_of(dim))}; no equation moves one to the other."
    )
    fits = len(axes) == len(set(axes))
    written = f"Write {line.name} = '{Spec(spec.dims, tuple(fitting.values()))}'" if fits else f"Change {line.name}"
    yield line.at_dim(spec, dim, fact, f"{written}, or change {first}.")


def _keys_apart(line: Line, query: Spec | None, key: Spec, length: str, serves: str) -> Iterator[Fault]:
    """Yield a fault if the lengths of keys and queries are sharded differently, or if serving shards the keys' length.

    Args:
      line: the line of the keys.
      query, key: the specs of the queries and of the keys; `query` is None if there are no queries.
      length: the dimension of the keys' length: L, or T if the keys are computed from the encoder's output.
      serves: the phase of serving that the layout is for; empty for training.
    """
    # Chunks of keys go round a ring of devices, while each device attends with the queries of its own chunk.
    axes, whole = key.axes_of(length), str(key.with_axes(length, ()))
    if axes and serves and length == "L":
        fact = f"dimension L of {line.name} is {over(axes)}, but one position, as in serving, cannot be sharded."
        yield line.at_dim(key, "L", fact, f"Write '{whole}' in [serving]; [cache] may shard the cached length T.")
    elif axes and query and query.axes_of("L") != axes and not serves:
        cut = f"dimension {length} of {line.name} is {over(axes)}"
        fact = f"{cut}, and that of queries ('{query}') is {over(query.axes_of('L'))}."
        yield line.at_dim(key, length, fact, f"Shard both alike, or do not shard the keys: '{whole}'.")


def uneven_chunks(line: Line, key: Spec, given: GivenSizes) -> Iterator[Fault]:
    """Yield a fault for a length that zigzag order cannot cut into two chunks per device of a ring.

    The first tokens attend to few keys, and the last tokens attend to all of them. To give n devices equal work, zigzag
    order cuts the length into 2n chunks, and device i has chunks i and 2n - 1 - i.

    Args:
      line: the line of attention.key.
      key: the spec of attention.key.
      given: the sizes and the mesh.
    """
    devices = prod(given.mesh.get(axis, 1) for axis in key.axes_of("L"))
    length = given.sizes.get("L", 0)
    if devices > 1 and length % devices == 0 and length % (2 * devices):
        fact = f"dimension L has size {length}, but zigzag order cuts it into {2 * devices} chunks, two for a device."
        yield line.at_dim(key, "L", fact, f"Use a multiple of {2 * devices}.")


def parted_groups(line: Line, query: Spec, key: Spec, given: GivenSizes) -> Iterator[Fault]:
    """Yield a fault if a device has parts of two groups of query heads.

    A group is all query heads that share one key head. A device must have whole groups, or a part of one group, because
    it computes attention as one product of equally large groups of query heads with their key heads.

    Args:
      line: the line of the queries.
      query, key: the specs of the queries and of the keys; K is sharded over the first of the mesh axes of H.
      given: the sizes and the mesh. If the size of H or of K is unknown, there is no fault.
    """
    heads, key_heads = given.sizes.get("H", 0), given.sizes.get("K", 0)
    wanted, held = (spec.without_trivial(given.mesh).axes_of(dim) for spec, dim in ((query, "H"), (key, "K")))
    parts, key_parts = (prod(given.mesh.get(axis, 1) for axis in axes) for axes in (wanted, held))
    if (
        not {*wanted, *held} <= given.mesh.keys()
        or not key_heads
        or heads % key_heads
        or heads % parts
        or key_heads % key_parts
        or wanted[: len(held)] != held
    ):
        return  # sizes are missing, or another rule reports the fault
    if share(wanted[len(held) :], key_heads // key_parts, given.mesh) is None:
        keys = f"'{key}' in {line.name.replace('query', 'key')}"
        fact = (
            f"a device has {heads // parts} of {heads} query heads, and {heads // key_heads} share each of the "
            f"{key_heads} key heads ({keys}): some device would need parts of two groups."
        )
        remedy = f"Shard H over mesh axes whose size divides {key_heads}, or is a multiple of it, or do not shard H."
        yield line.at_dim(query, "H", fact, remedy)


# -- one move of the residual for two vias ----------------------------------------------------------------------------


def key_via_faults(table: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault if attention.key_via and attention.in_via bring the residual to different specs.

    The residual is moved only once, for the queries and for the keys.
    """
    key, query = (table.get(f"attention.{name}") for name in ("key_via", "in_via"))
    residual, wanted = _pinned_to(key), _pinned_to(query)
    if isinstance(key, str) and residual and residual != wanted and (wanted or not query):
        where = f"attention.in_via brings it to '{wanted}'" if wanted else "there is no attention.in_via"
        fact = f"attention.key_via brings the residual to '{residual}', and {where}."
        remedy = "The residual is moved once, for queries and keys: write both vias, with the same residual."
        yield Line("attention.key_via", key).at_text(fact, remedy)


def _pinned_to(via: Any) -> Spec | None:
    """Return the activation's spec in a via, or None if the via is absent or unreadable.

    Another rule reports unreadable vias.
    """
    try:
        return parse_via(via).specs[0] if isinstance(via, str) else None
    except SpecError:
        return None


# -- the stages of a pipeline ----------------------------------------------------------------------------------------


def stages_faults(
    section: str, table: Mapping[str, Any], specs: Mapping[str, Spec], base: Mapping[str, Spec]
) -> Iterator[Fault]:
    """Yield a fault for every tensor that is sharded over the mesh axis of the pipeline stages.

    Devices along this axis hold different layers, so they cannot hold shards of a tensor of one layer. It is also a
    fault if the stages are sharded over several mesh axes.

    Args:
        section: the overriding section in which the table is written; empty for the layout's own table.
        table: a mapping from key to text.
        specs: a mapping from key to spec, without lines that cannot be parsed.
        base: the specs of the layout's own table, which may have `pipeline.layers`.
    """
    layers = base.get(_LAYERS, Spec(("N",), ((),)))
    axes = layers.axes_of("N")
    if len(axes) > 1 and not section:
        fact = f"stages follow one another along one mesh axis, but dimension N is sharded over {len(axes)}."
        yield Line(_LAYERS, table[_LAYERS]).at_dim(layers, "N", fact, f"Write 'N_{axes[0]}'.")
    for key, spec in specs.items():
        for dim in spec.dims if key != _LAYERS and key in table else ():
            if shared := [axis for axis in spec.axes_of(dim) if axis in axes]:
                kept = spec.with_axes(dim, tuple(axis for axis in spec.axes_of(dim) if axis not in axes))
                fact = f"mesh axis {shared[0]} has the stages of a pipeline, but shards dimension {dim} too."
                yield Line(key, table[key], section).at_dim(spec, dim, fact, f"Write '{kept}'.")


# -- experts without capacity ----------------------------------------------------------------------------------------


def dropless_faults(layout: LayoutTable, mesh: Mapping[str, int]) -> Iterator[Fault]:
    """Yield a fault for every line of [moe] that would make a product move rows of tokens under dispatch `dropless`.

    Rows are sorted by expert, and the router decides how many rows an expert gets. So no collective of a fixed size can
    move the rows again, and C, the dimension for the rows of an expert, must not be sharded.

    Args:
        layout: a layout without alternatives and without other faults.
        mesh: the sizes of the mesh axes.
    """
    lines = {name: text for name, text in layout.table.items() if isinstance(text, str)}
    if _INPUT not in lines:
        return
    there = Spec.parse(lines[_INPUT])
    wanted = {"G": there.axes_of("G"), "X": there.axes_of("X"), "C": ()}
    for name in (_INPUT, "moe.hidden", "moe.in_via", "moe.out_via"):
        if name in lines:
            specs = parse_via(lines[name]).specs if name.endswith("_via") else (Spec.parse(lines[name]),)
            stay = [_staying(spec, wanted) for spec in specs]
            moved = _moved(specs, stay, mesh)
            if moved:
                fact = f"rows of dispatch 'dropless' must stay where they arrive, but {listed(moved)} would move."
                remedy = f"Write '{', '.join(map(str, stay))}', as in moe.expert_input, or use dispatch 'sort'."
                yield Line(name, lines[name]).at_text(fact, remedy)


def _staying(spec: Spec, wanted: Mapping[str, tuple[str, ...]]) -> Spec:
    """Return a spec with the dimensions in `wanted` sharded over the mesh axes given there.

    These mesh axes are removed from all other dimensions of the spec.
    """
    taken = {axis for dim in spec.dims for axis in wanted.get(dim, ())}
    rest = (tuple(axis for axis in axes if axis not in taken) for axes in spec.axes)
    return Spec(spec.dims, tuple(wanted.get(dim, axes) for dim, axes in zip(spec.dims, rest)))


def _moved(specs: Sequence[Spec], stay: Sequence[Spec], mesh: Mapping[str, int]) -> list[str]:
    """Return those of the dimensions G, X and C that `specs` and `stay` shard differently.

    Mesh axes of size 1 are ignored.
    """
    pairs = [(a.without_trivial(mesh), b.without_trivial(mesh)) for a, b in zip(specs, stay)]
    return [d for d in "GXC" if any(d in a.dims and a.axes_of(d) != b.axes_of(d) for a, b in pairs)]
