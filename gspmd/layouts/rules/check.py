"""The check of a layout, which finds every fault of its declarations, of single lines, and of lines that disagree."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gspmd.annotate import Fault, Spec, SpecError, mesh_sizes, parse_via
from gspmd.annotate.errors import listed, shown, suggestion
from gspmd.annotate.parser import OPEN
from gspmd.layouts.rules import own
from gspmd.layouts.rules.agreement import (
    disagreements,
    dropless_faults,
    key_via_faults,
    parted_groups,
    stages_faults,
    uneven_chunks,
    with_cross,
)
from gspmd.layouts.rules.alternatives import resolve, singles, without_partner
from gspmd.layouts.rules.faults import Line, one_for_each_cause, over
from gspmd.layouts.rules.gradients import partial_faults, row_faults
from gspmd.layouts.rules.keys import DENSE, KEYS, PARTS, PHASES, PIPELINE, Key, keys_of_override, unknown_key
from gspmd.layouts.rules.sizes import GivenSizes, given_sizes, microbatch_faults, padding_faults
from gspmd.layouts.table import LayoutTable, OfTable
from gspmd.lowerings.names import LOWERINGS

Specs = Mapping[str, Spec]


def faults_of(
    layout: LayoutTable, sizes: Mapping[str, int], mesh: Any, dropless: bool = False, trained: Collection[str] = ()
) -> list[Fault]:
    """Return the faults of a layout for these sizes on this mesh: one fault for every cause.

    Without a mesh all axes have size 1.

    `Layout.check` describes `dropless` and `trained`.
    """
    faults = [*_declaration_faults(layout), *(mesh_faults(mesh, layout.axes) if mesh is not None else ())]
    single, of_lists = resolved(layout, sizes, mesh)
    given = given_sizes(layout, {} if of_lists else sizes, mesh)
    faults += [*padding_faults(layout.padding), *microbatch_faults(layout, sizes), *of_lists]
    faults += [*_faults(single, given), *_faults_of_alternatives(layout)]
    # Rules for gradients are about the equations of the models that come with gspmd, and serving has no gradients.
    if not (faults or layout.serves or layout.own):
        faults += partial_faults(single, given.mesh, given.microbatches)
        faults += row_faults(single, given.mesh, given.microbatches, trained)
        faults += dropless_faults(single, given.mesh) if dropless else ()
    return one_for_each_cause(dict.fromkeys(faults))


@lru_cache(maxsize=256)
def _faults_of_alternatives(layout: LayoutTable) -> tuple[Fault, ...]:
    """Return the faults that alternatives have whatever the sizes are.

    These are texts that cannot be parsed, and alternatives that agree with no alternative of another line.
    """
    anything = GivenSizes({}, dict.fromkeys(layout.axes, 1))
    faults = [fault for single in singles(layout) for fault in _faults_of_table(single, anything)]

    def of_pair(pair: Mapping[str, str]) -> list[Fault]:
        return [*disagreements("", pair, _read("", pair, KEYS, anything)[0], layout.serves)]

    return (*faults, *without_partner(layout, of_pair))


def resolved(layout: OfTable, sizes: Mapping[str, int], mesh: Any) -> tuple[OfTable, list[Fault]]:
    """Return the layout with the alternatives that fit these sizes on this mesh, and the faults of its lists."""
    given, more = given_sizes(layout, sizes, mesh), own.keys(layout.own)

    def of_line(section: str, key: str, text: str) -> list[Fault]:
        return _read(section, {key: text}, (keys_of_override(section) if section else KEYS) | more, given)[1]

    return resolve(layout, of_line)


def _faults(layout: LayoutTable, given: GivenSizes) -> Iterator[Fault]:
    """Yield the faults of a layout whose alternatives have been chosen; lists in [prefill] and [decode] may remain."""
    yield from (*_faults_of_table(layout, given), *_missing(layout, given.sizes))
    yield from own.naming_faults(layout.own, layout.dimensions, given.sizes)
    yield from _lowering_faults(layout.lowerings, own.sections(layout.own))


def _faults_of_table(layout: LayoutTable, given: GivenSizes) -> Iterator[Fault]:
    """Yield the faults of single lines, and of lines that disagree."""
    more = own.keys(layout.own)
    specs, wrong = _read("", layout.table, KEYS | more, given)
    yield from (*wrong, *disagreements("", layout.table, specs, layout.serves), *key_via_faults(layout.table))
    if (key := specs.get("attention.key")) and not layout.is_encoder:  # only causal attention uses zigzag order
        yield from uneven_chunks(Line("attention.key", str(layout.table["attention.key"])), key, given)
    everywhere = with_cross(layout.table, specs)
    for part in ("attention", "cross"):
        query, key = everywhere.get(f"{part}.query"), everywhere.get(f"{part}.key")
        if query and key and not layout.serves:  # serving moves both to the cache
            line = Line(f"{part}.query", str(layout.table.get(f"{part}.query", query)))
            yield from parted_groups(line, query, key, given)
    yield from stages_faults("", layout.table, specs, specs)
    for section, lines in layout.overrides.items():
        # The layout of one phase already has the lines of its section in its table. The section of the other phase
        # cannot be checked for sizes, since batch and length of that phase are not known.
        known = GivenSizes({}, dict.fromkeys(layout.axes, 1)) if layout.serves and section in PHASES else given
        table = {key: text for key, text in lines.items() if not isinstance(text, tuple)}  # `phase` resolves the lists
        base = {key: spec for key, spec in specs.items() if key in table or key not in lines}
        yield from _override_faults(section, {**layout.table, **table}, table, base, known, more)


def has_wrong_types(layout: LayoutTable) -> bool:
    """Return whether a value in a layout's file has the wrong type; `faults_of` returns a fault for such a value."""
    specs = (text for table in (layout.table, *layout.overrides.values()) for text in table.values())
    texts = (*layout.lowerings.values(), *layout.dimensions.values())
    return (
        not all(isinstance(text, str | tuple) for text in specs)
        or not all(isinstance(text, str) for text in texts)
        or not all(type(multiple) is int for multiple in layout.padding.values())
    )


def mesh_faults(mesh: Any, axes: Sequence[str]) -> list[Fault]:
    """Return a fault for every axis of a mesh that is not one of the declared `axes`."""
    pieces = {axis: f"{axis}={size}" for axis, size in mesh_sizes(mesh).items()}
    text = ",".join(pieces.values())
    faults = []
    for axis, piece in pieces.items():
        if axis not in axes:
            at = f",{text}".index(f",{piece}")
            remedy = f"{suggestion(axis, axes)}It declares {listed(axes)}."
            faults.append(Fault(text, at, at + len(piece), f"the layout has no mesh axis {axis}.", remedy))
    return faults


# -- line by line -----------------------------------------------------------------------------------------------------


def _read(
    section: str, table: Mapping[str, Any], keys: Mapping[str, Key], sizes: GivenSizes
) -> tuple[Specs, list[Fault]]:
    """Return the specs of a table and the faults of all its lines.

    A spec is left out if it cannot be parsed, or does not have the dimensions of its key.
    """
    specs: dict[str, Spec] = {}
    faults: list[Fault] = []
    for name, text in table.items():
        line = Line(name, str(text), section)
        if name not in keys:
            faults.append(_unknown_key(line, keys))
        elif not isinstance(text, str):
            kind = "a string or a list of strings" if isinstance(text, list) else "a string"
            dims = "" if keys[name].kind == "via" else "".join(keys[name].dims)
            remedy = f'Write a spec in quotes: "{dims}", with its mesh axes.' if dims else "Write it in quotes."
            faults.append(line.at_text(f"{name} must be {kind}, but it is {shown(text)}.", remedy))
        elif keys[name].kind == "via":
            faults += _via_faults(line, keys[name], sizes)
        else:
            spec, wrong = _read_spec(line, keys[name], sizes)
            specs |= {name: spec} if spec else {}
            faults += wrong
    return specs, faults


def _read_spec(line: Line, key: Key, sizes: GivenSizes) -> tuple[Spec | None, list[Fault]]:
    try:
        spec = Spec.parse(line.text)
    except SpecError as error:
        return None, [line.moved(fault) for fault in error.faults]
    if key.dims and spec.dims != tuple(key.dims):
        return None, [_wrong_dimensions(line, spec, key)]
    return spec, [*map(line.moved, sizes.faults(spec)), *_whole_faults(line, spec, key)]


def _wrong_dimensions(line: Line, spec: Spec, key: Key) -> Fault:
    found = "in this order, but here the order is" if sorted(spec.dims) == sorted(key.dims) else "but this has"
    return line.at_text(
        f"{key.name} must have dimensions {listed(key.dims)}, {found} {listed(spec.dims)}.",
        f"Write '{key.dims}' with the mesh axes that shard each dimension.",
    )


def _whole_faults(line: Line, spec: Spec, key: Key) -> Iterator[Fault]:
    whole = spec.without_partial() if spec.partial or spec.reduced else spec
    # Only [gradients] may have a partial sum: a training step adds gradients before it reduces them.
    if spec.partial and line.section != "gradients":
        yield line.at_text(f"{key.name} is a partial sum, which only [gradients] may have.", f"Write '{whole}'.")
    if spec.reduced:
        fact = f"{key.name} is reduced, which is said in [gradients], by a gradient that is a partial sum."
        yield line.at_text(fact, f"Write '{whole}' here, and '{spec.cotangent}' in [gradients].")
    # Arrays that outlive a step are placed when they are made, before anything is compiled.
    if key.kind == "parameter" or line.section in ("gradients", "optimizer", "cache"):
        for dim in (dim for dim in spec.dims if OPEN in spec.axes_of(dim)):
            fact = f"dimension {dim} of {key.name} is left to the compiler, which places activations only."
            yield line.at_dim(
                spec, dim, fact, f"Name its mesh axes, or leave it unsharded: '{spec.with_axes(dim, ())}'."
            )
    # Plain JAX code between einsums needs these whole: a head's scores and rotation take all of D, and a router all
    # tokens of a group.
    for dim in key.local:
        if spec.axes_of(dim):
            fact = f"dimension {dim} of {key.name} must not be sharded, but it is {over(spec.axes_of(dim))}."
            yield line.at_dim(spec, dim, fact, f"Write '{spec.with_axes(dim, ())}', or shard another dimension.")


def _unknown_key(line: Line, keys: Mapping[str, Key]) -> Fault:
    section, dot, _ = line.name.partition(".")
    if line.section and not dot:
        meant = [f'"{name}"' for name in keys if name.endswith(f".{line.name}")]
        begins = "begins with the section of the line that it overrides"
        fact = f"a key of [{line.section}] {begins}; {line.name!r} does not."
        return line.at_key(fact, f"Write {listed(meant, 'or')}." if meant else 'Write a key such as "attention.w_q".')
    if line.name in KEYS:
        kind = KEYS[line.name].kind
        fact = f"{line.name} is {'an' if kind == 'activation' else 'a'} {kind}, which this section cannot override."
        return line.at_key(fact, f"It holds {', '.join(keys)}.")
    known = (*dict.fromkeys([*own.KNOWN, *own.sections(keys)]),)
    if line.name in known:  # a value for the section itself, such as `lowering = "xla"` before all tables of a file
        fact = f"{section!r} is the name of a section, but here it has a value."
        return line.at_key(fact, f"Write [{section}], and lines below it.")
    if section not in (*PARTS, PIPELINE, *known[len(own.KNOWN) :]):
        remedy = f"{suggestion(section, known)}Sections: {', '.join(known)}, and those that a file adds."
        return line.at_key(f"no section of a layout is called {section!r}.", remedy)
    return line.at_key(*unknown_key(line.name, keys))


def _via_faults(line: Line, key: Key, sizes: GivenSizes) -> Iterator[Fault]:
    """Yield the faults of a via.

    A via must consist of two specs that have the dimensions of the product's operands. With these specs, it must be
    possible to multiply the operands locally.
    """
    try:
        via = parse_via(line.text)
    except SpecError as error:
        yield from map(line.moved, error.faults)
        return
    specs = list(via.specs)
    wanted = [str(KEYS[name].dims) if name in KEYS else name for name in key.dims]
    if len(via) != 1 or [spec.dims for spec in specs] != [tuple(dims) for dims in wanted]:
        yield line.at_text(
            f"{key.name} must be two specs, with the dimensions of {listed(key.dims)}.",
            f"Write '{', '.join(wanted)}' with the mesh axes that shard each dimension.",
        )
        return
    for fault in (fault for spec in specs for fault in sizes.faults(spec)):
        yield replace(line.at_text(fault.fact, fault.remedy), cause=fault.cause)
    yield from _product_faults(line, *specs)


def _product_faults(line: Line, left: Spec, right: Spec) -> Iterator[Fault]:
    """Yield a fault for every reason why two tensors cannot be multiplied locally.

    If both specs have a dimension, they must shard it over the same mesh axes. A mesh axis must not shard one dimension
    in one spec and a different dimension in the other spec.
    """
    for dim in left.dims:
        mine = left.axes_of(dim)
        if dim in right.dims and mine != right.axes_of(dim):
            fact = f"dimension {dim} is {over(mine)} in '{left}', and {over(right.axes_of(dim))} in '{right}'."
            yield line.at_text(fact, "Tensors that are multiplied must shard shared dimensions in the same way.")
        for other in right.dims if dim not in right.dims else ():
            for axis in (axis for axis in mine if axis in right.axes_of(other)):
                fact = f"mesh axis {axis} shards dimension {dim} in '{left}' and dimension {other} in '{right}'."
                yield line.at_text(fact, "No device would hold their whole product: gather one of them.")


# -- the table as a whole ---------------------------------------------------------------------------------------------


def _missing(layout: LayoutTable, sizes: Mapping[str, int]) -> Iterator[Fault]:
    if layout.own:  # a custom model reports a missing line when it looks it up
        return
    written = {part for name in layout.table for part in (name, name.partition(".")[0])}
    for key in KEYS.values():
        needed = key.section in written or key.section != "moe" or "X" in sizes
        if key.name in DENSE and written.isdisjoint(DENSE):  # all layers of a model may have experts
            needed = "moe" not in written or bool(sizes and "X" not in sizes)
        if needed and key.name not in layout.table and key.default is None and not key.optional:
            short = key.name.partition(".")[2]
            fault = Line(key.name).at_key(
                f"{key.name} is missing: {key.meaning}",
                f'Write {short} = "{key.dims}" in [{key.section}], with its mesh axes.',
            )
            yield replace(fault, cause=("missing", key.section))


def _override_faults(
    section: str, whole: Mapping, table: Mapping, base: Specs, sizes: GivenSizes, more: Mapping[str, Key]
) -> list[Fault]:
    # Only the model knows which tensors of custom sections are parameters, so any overriding section may have them.
    specs, faults = _read(section, table, {**keys_of_override(section), **more}, sizes)
    faults += stages_faults(section, table, specs, base)
    if section in PHASES:
        before = {fault.fact for fault in disagreements("", whole, base, section)}
        faults += [f for f in disagreements(section, whole, {**base, **specs}, section) if f.fact not in before]
    return faults


def _lowering_faults(lowerings: Mapping[str, Any], more: Sequence[str]) -> Iterator[Fault]:
    known = ("default", *PARTS, *more)
    for part, name in lowerings.items():
        line = Line(part, str(name), "lowering")
        if part not in known:
            remedy = f"{suggestion(part, known)}Write default, or a part: {', '.join(known[1:])}."
            yield line.at_key(f"no part of a layout is called {part!r}.", remedy)
        if name not in LOWERINGS:
            remedy = f"{suggestion(str(name), LOWERINGS)}Lowerings: {', '.join(LOWERINGS)}."
            yield line.at_text(f"no lowering is called {shown(name)}.", remedy)


def _declaration_faults(layout: LayoutTable) -> Iterator[Fault]:
    if not layout.axes:
        remedy = 'Write axes = ["x", "y", "z"] in [mesh].'
        yield Line("axes", "", "mesh").at_key("the layout declares no mesh axes.", remedy)
    for axis in (axis for axis in layout.factor if axis not in layout.axes):
        remedy = f"{suggestion(axis, layout.axes)}It declares {listed(layout.axes)}."
        yield Line("factor", axis, "mesh").at_text(f"the layout declares no mesh axis {axis}.", remedy)
