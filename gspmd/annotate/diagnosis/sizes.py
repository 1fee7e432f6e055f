"""Faults in the sizes or shapes of arrays for a spec or an equation on a mesh.

Functions here take a spec as any object with the fields of a `Spec`. The reason is that the module of `Spec` imports
this module, so this module cannot import `Spec`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspmd.annotate.errors import Fault, SpecError, listed, report, shown, suggestion
from gspmd.annotate.parser import OPEN, dim_text
from gspmd.annotate.validation import LARGEST, whole, whole_sizes

# -- one spec ----------------------------------------------------------------------------------------------------------


def faults_of(spec: Any, sizes: Mapping[str, int] | Sequence[int], mesh: Mapping[str, int]) -> tuple[Fault, ...]:
    """Return every fault of a spec: axes that the mesh lacks, a wrong rank, and sizes that mesh axes do not divide.

    Args:
      spec: a `Spec`.
      sizes: sizes by dimension, or a shape, from `whole_sizes`.
      mesh: size of every mesh axis, from `mesh_sizes`.
    """
    faults = [fault for at in range(len(spec.dims) + 1) for fault in _unknown_axes(spec, at, mesh)]
    if not isinstance(sizes, Mapping) and len(sizes) != len(spec.dims):
        faults.append(_rank_fault(spec, sizes))
    else:
        named = sizes if isinstance(sizes, Mapping) else dict(zip(spec.dims, sizes))
        uneven = [_size_fault(spec, at, named, mesh) for at in range(len(spec.dims))]
        faults += [fault for fault in uneven if fault]
    if not faults:
        raise AssertionError(f"'{spec}' is refused for {sizes} on the mesh {mesh}, and no fault is found")
    return tuple(faults)


def fault_at(spec: Any, at: int, fact: str, remedy: str = "") -> Fault:
    """Return a fault of the dimension with index `at`, with the caret under this dimension in the canonical text.

    The index after the last dimension stands for the partial sum.
    """
    pieces = [dim_text(dim, axes) for dim, axes in zip(spec.dims, spec.axes)]
    text = str(spec)
    if at == len(pieces):
        return Fault(text, text.index("reduced-" if spec.reduced else "partialsum-"), len(text), fact, remedy)
    start = len("".join(pieces[:at]))
    return Fault(text, start, start + len(pieces[at]), fact, remedy)


def no_local_shape(spec: Any) -> SpecError:
    """Return the error for a spec with an open dimension, because the local size of such a dimension is not known."""
    at = spec.axes.index((OPEN,))
    fault = fault_at(spec, at, f"dimension {spec.dims[at]} is left open, so its local size is not known.")
    return report(SpecError, f"cannot tell the local shape of '{spec}'", [fault])


def sizes_text(sizes: Mapping[str, int] | Sequence[int]) -> str:
    """Return the sizes as part of a sentence: 'the sizes B=8, E=6', or 'an array of shape (8, 6)'."""
    if isinstance(sizes, Mapping):
        return "the sizes " + ", ".join(f"{d}={shown(n)}" for d, n in sizes.items()) if sizes else "no sizes"
    shape = ", ".join(map(shown, sizes))
    return f"an array of shape ({shape}{',' * (len(sizes) == 1)})"


def _unknown_axes(spec: Any, at: int, mesh: Mapping[str, int]) -> list[Fault]:
    sums = (spec.reduced, "reduced-") if spec.reduced else (spec.partial, "partialsum-")
    axes, before = (spec.axes[at], f"{spec.dims[at]}_") if at < len(spec.dims) else sums
    missing = [a for a in axes if a != OPEN and a not in mesh]
    name = _spelled(spec, axes, mesh)
    if missing and name:
        fact = f"'{before}{''.join(axes)}' names the mesh axes {listed(axes)}, one letter each."
        return [fault_at(spec, at, fact, f"The name of one mesh axis is written in braces: '{before}{{{name}}}'.")]
    known = f"The mesh has {listed(mesh)}." if mesh else "The mesh has no axes."
    return [fault_at(spec, at, f"the mesh has no axis {a}.", suggestion(a, mesh) + known) for a in missing]


def _spelled(spec: Any, axes: Sequence[str], mesh: Mapping[str, int]) -> str:
    """Return the mesh axis whose name consists of the letters in `axes`, or "" if there is none.

    The letters must be in the order of the name, unless `axes` are the axes of a partial sum.
    """
    if len(axes) < 2 or any(len(a) > 1 for a in axes):
        return ""
    arrange = sorted if axes is spec.partial or axes is spec.reduced else list
    return next((n for n in mesh if arrange(n) == arrange(axes)), "")


def _rank_fault(spec: Any, shape: Sequence[int]) -> Fault:
    count = "1 dimension" if len(spec.dims) == 1 else f"{len(spec.dims)} dimensions"
    fact = f"the spec has {count}, and the array {len(shape)}: {shape}."
    return Fault(str(spec), 0, len(str(spec)), fact, "Write one capital letter for each dimension of the array.")


def _size_fault(spec: Any, at: int, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> Fault | None:
    dim, axes = spec.dims[at], [a for a in spec.axes[at] if a in mesh]
    if dim not in sizes:
        known = f"Sizes are given for {listed(map(str, sizes))}." if sizes else "No sizes are given."
        return fault_at(spec, at, f"dimension {dim} has no size.", known)
    size, parts = sizes[dim], math.prod(mesh[a] for a in axes)
    if whole(size) is None or size < 0:
        fact = f"dimension {dim} has size {shown(size)}."
        return fault_at(spec, at, fact, "A size is a whole number of at least 0.")
    if size >= LARGEST:
        return fault_at(
            spec, at, f"dimension {dim} has size {shown(size)}.", "No array has a dimension of 2^40 or more."
        )
    if size % parts == 0:
        return None
    below = size // parts * parts
    near = f"{below} or {below + parts}" if below else f"{parts}"
    bare = str(spec.with_axes(dim, ()))
    uneven = fault_at(
        spec,
        at,
        f"dimension {dim} has size {size}, which {_over(axes, mesh)}.",
        f"Use a size that is a multiple of {parts} ({near}), or leave {dim} unsharded: '{bare}'.",
    )
    return replace(uneven, cause=(dim, size, parts))


def _over(axes: Sequence[str], mesh: Mapping[str, int]) -> str:
    if len(axes) == 1:
        return f"mesh axis {axes[0]} (size {mesh[axes[0]]}) does not divide"
    factors = "·".join(str(mesh[a]) for a in axes)
    return f"mesh axes {listed(axes)} (size {factors} = {math.prod(mesh[a] for a in axes)}) do not divide"


# -- the specs of an equation ------------------------------------------------------------------------------------------


def unfit_sizes(equation: Any, sizes: Any, faults: Iterable[Sequence[Fault]]) -> SpecError:
    """Return the error for an equation that does not fit its sizes; `faults` has the faults of each spec."""
    if not isinstance(sizes, Mapping):
        return SpecError(
            f"cannot shard {equation.text or str(equation)!r} for the sizes {shown(sizes)}.\n"
            "  Write the size of every dimension of the whole tensors, such as {'B': 8, 'E': 16}."
        )
    spans = equation.spans
    placed = [_placed(fault, equation, spans, at) for at, found in enumerate(faults) for fault in found]
    return report(SpecError, f"cannot shard {equation.text!r} for {sizes_text(sizes)}", _one_for_each_cause(placed))


def unfit_shapes(equation: Any, shapes: Any) -> SpecError:
    """Return the error for shapes that do not match the operands, or that give one dimension two sizes."""
    if not _are_sequences([shapes]) or not _are_sequences(shapes):
        return _no_shapes(equation, shapes)
    counts = [len(shape) if operand.group else 1 for operand, shape in zip(equation.operands, shapes)]
    if len(shapes) != len(equation.operands) or counts != [len(o.specs) for o in equation.operands]:
        wanted = [f"a tuple of {len(o.specs)} arrays" if o.group else "an array" for o in equation.operands]
        given = "1 operand" if len(shapes) == 1 else f"{len(shapes)} operands"
        return SpecError(f"cannot apply {equation.text!r} to {given}\n  Pass {listed(wanted)}.")
    flat = [s for o, shape in zip(equation.operands, shapes) for s in (shape if o.group else [shape])]
    if not _are_sequences(flat):
        return _no_shapes(equation, shapes)
    spans = equation.spans
    sizes: dict[str, int] = {}
    faults = []
    for at, (spec, shape) in enumerate(zip(equation.specs, flat)):
        if len(spec.dims) != len(shape):
            faults.append(_placed(_rank_fault(spec, whole_sizes(shape)), equation, spans, at))
            continue
        for dim, size in zip(spec.dims, shape):
            if sizes.setdefault(dim, size) != size:
                fact = f"dimension {dim} has size {size} here, and size {sizes[dim]} before."
                remedy = "Arrays that share a dimension must agree on its size."
                faults.append(_placed(Fault(str(spec), 0, len(str(spec)), fact, remedy), equation, spans, at))
    given = ", ".join(str(tuple(s) if isinstance(s, Sequence) else s) for s in shapes)
    return report(SpecError, f"cannot apply {equation.text!r} to arrays of shapes {given}", faults)


def _no_shapes(equation: Any, shapes: Any) -> SpecError:
    return SpecError(
        f"cannot apply {equation.text!r} to the shapes {shown(shapes)}.\n"
        "  Write a tuple for each operand, and a tuple of tuples for a group."
    )


def _are_sequences(values: Sequence) -> bool:
    return all(isinstance(value, Sequence) and not isinstance(value, str) for value in values)


def _placed(fault: Fault, equation: Any, spans: Sequence[tuple[int, int]], at: int) -> Fault:
    """Return a fault of spec number `at` with its position in the equation instead of in the canonical spec."""
    if not spans:  # an equation that was not read from text, such as a gradient's
        return Fault(str(equation), 0, len(str(equation)), fault.fact, fault.remedy)
    start, end = spans[at]
    if equation.text[start:end] == fault.text:
        start, end = start + fault.start, start + fault.end
    return replace(fault, text=equation.text, start=start, end=end)


def _one_for_each_cause(faults: Sequence[Fault]) -> list[Fault]:
    """Return the first fault of every cause.

    One wrong size is the cause of a fault in every spec that has the dimension.
    """
    found: dict[tuple, list[Fault]] = {}
    for fault in faults:
        found.setdefault(fault.cause or (fault.fact,), []).append(fault)
    return [_with_the_rest(first, more) for first, *more in found.values()]


def _with_the_rest(first: Fault, more: Sequence[Fault]) -> Fault:
    if not more:
        return first
    places = listed(dict.fromkeys(f"'{fault.text[fault.start : fault.end]}'" for fault in more))
    said = f"The same in {len(more)} more place{'s' * (len(more) > 1)}: {places}."
    return replace(first, remedy=f"{first.remedy}\n  {said}")
