"""Whether a spec fits the sizes of an array and of a mesh: known axes, a size per dimension, and even parts."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from gspmd.annotate.diagnosis.nodes import OPEN, dim_text
from gspmd.annotate.errors import Fault, SpecError, listed, shown, suggestion

if TYPE_CHECKING:
    from gspmd.annotate.spec import Spec

LARGEST = 2**40
"""No dimension is as long as this; what is counted from sizes then stays within 64 bits."""


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """The size of every mesh axis by name, of a mapping or of a `jax.sharding.Mesh`, as Python's own integers.

    Raises:
      SpecError: it is no mesh, a name is no text, or a size is no whole number of 1 or more.

    >>> mesh_sizes({"x": 4, "y": 2})
    {'x': 4, 'y': 2}
    """
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(sizes, Mapping) or not all(isinstance(axis, str) for axis in sizes):
        raise SpecError(f"cannot read a mesh from {shown(mesh)}.\n"
                        "  Write {'x': 4, 'y': 2}, or pass a jax.sharding.Mesh.")
    for axis, size in sizes.items():
        if whole(size) is None or size < 1:
            raise SpecError(f"mesh axis {axis} has size {shown(size)}.\n"
                            "  The size of a mesh axis is a whole number, 1 or more.")
    return {axis: int(size) for axis, size in sizes.items()}


@overload
def whole_sizes(sizes: Mapping[str, int]) -> dict[str, int]: ...
@overload
def whole_sizes(sizes: Sequence[int]) -> tuple[int, ...]: ...
def whole_sizes(sizes: Mapping[str, int] | Sequence[int]) -> dict[str, int] | tuple[int, ...]:
    """Sizes by dimension, or a shape, in Python's own integers: those of numpy overflow when bytes are counted.

    What is no whole number stays as it is, for `faults_of` to name.

    Raises:
      SpecError: it is neither a mapping nor a sequence.
    """
    if isinstance(sizes, Mapping):
        return {dim: size if (known := whole(size)) is None else known for dim, size in sizes.items()}
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise SpecError(f"cannot read sizes from {shown(sizes)}.\n"
                        "  Write the size of every dimension of the whole tensors, {'B': 8, 'E': 16}, or a shape.")
    return tuple(size if (known := whole(size)) is None else known for size in sizes)


def faults_of(spec: "Spec", sizes: Mapping[str, int] | Sequence[int], mesh: Mapping[str, int]) -> tuple[Fault, ...]:
    """Every fault of a spec on this mesh for these sizes, which are given by dimension or as a shape."""
    sizes = whole_sizes(sizes)
    unknown = [fault for at in range(len(spec.dims) + 1) for fault in _unknown_axes(spec, at, mesh)]
    if not isinstance(sizes, Mapping):
        if len(sizes) != len(spec.dims):
            return (*unknown, _rank_fault(spec, tuple(sizes)))
        sizes = dict(zip(spec.dims, sizes))
    uneven = [_size_fault(spec, at, sizes, mesh) for at in range(len(spec.dims))]
    return (*unknown, *(fault for fault in uneven if fault))


def fault_at(spec: "Spec", at: int, fact: str, remedy: str = "") -> Fault:
    """A fault with the caret under dimension number `at` of the canonical text; past the last, the partial sum."""
    pieces = [dim_text(dim, axes) for dim, axes in zip(spec.dims, spec.axes)]
    text = str(spec)
    if at == len(pieces):
        return Fault(text, text.index("partialsum-"), len(text), fact, remedy)
    start = len("".join(pieces[:at]))
    return Fault(text, start, start + len(pieces[at]), fact, remedy)


def sizes_text(sizes: Mapping[str, int] | Sequence[int]) -> str:
    """The sizes in a sentence: 'the sizes B=8, E=6', or 'an array of shape (8, 6)'."""
    if isinstance(sizes, Mapping):
        return "the sizes " + ", ".join(f"{d}={n}" for d, n in sizes.items()) if sizes else "no sizes"
    return f"an array of shape {tuple(sizes)}"


def _unknown_axes(spec: "Spec", at: int, mesh: Mapping[str, int]) -> list[Fault]:
    axes, before = (spec.axes[at], f"{spec.dims[at]}_") if at < len(spec.dims) else (spec.partial, "partialsum-")
    missing = [a for a in axes if a != OPEN and a not in mesh]
    whole = _spelled(spec, axes, mesh)
    if missing and whole:
        fact = f"'{before}{''.join(axes)}' names the mesh axes {listed(axes)}, one letter each."
        return [fault_at(spec, at, fact, f"The name of one mesh axis stands in braces: '{before}{{{whole}}}'.")]
    known = f"The mesh has {listed(mesh)}." if mesh else "The mesh has no axes."
    return [fault_at(spec, at, f"the mesh has no axis {a}.", suggestion(a, mesh) + known) for a in missing]


def _spelled(spec: "Spec", axes: Sequence[str], mesh: Mapping[str, int]) -> str:
    """The mesh axis whose name the letters of a suffix spell, if they do (those of a partial sum stand sorted)."""
    if len(axes) < 2 or any(len(a) > 1 for a in axes):
        return ""
    letters = sorted(axes) if axes is spec.partial else list(axes)
    return next((n for n in mesh if (sorted(n) if axes is spec.partial else list(n)) == letters), "")


def _rank_fault(spec: "Spec", shape: tuple[int, ...]) -> Fault:
    count = "1 dimension" if len(spec.dims) == 1 else f"{len(spec.dims)} dimensions"
    fact = f"the spec has {count}, and the array {len(shape)}: {shape}."
    return Fault(str(spec), 0, len(str(spec)), fact, "Write one capital letter for each dimension of the array.")


def _size_fault(spec: "Spec", at: int, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> Fault | None:
    dim, axes = spec.dims[at], [a for a in spec.axes[at] if a in mesh]
    if dim not in sizes:
        known = f"Sizes are given for {listed(map(str, sizes))}." if sizes else "No sizes are given."
        return fault_at(spec, at, f"dimension {dim} has no size.", known)
    size, parts = sizes[dim], math.prod(mesh[a] for a in axes)
    if whole(size) is None or size < 0:
        fact = f"dimension {dim} has size {shown(size)}."
        return fault_at(spec, at, fact, "A size is a whole number, and not negative.")
    if size >= LARGEST:
        return fault_at(spec, at, f"dimension {dim} has size {size}.", "No array has a dimension of 2^40 or more.")
    if size % parts == 0:
        return None
    below = size // parts * parts
    near = f"{below} or {below + parts}" if below else f"{parts}"
    bare = str(spec.with_axes(dim, ()))
    uneven = fault_at(spec, at, f"dimension {dim} has size {size}, which {_over(axes, mesh)}.",
                      f"Use a size that is a multiple of {parts} ({near}), or leave {dim} unsharded: '{bare}'.")
    return replace(uneven, cause=(dim, size, parts))


def _over(axes: Sequence[str], mesh: Mapping[str, int]) -> str:
    if len(axes) == 1:
        return f"mesh axis {axes[0]} (size {mesh[axes[0]]}) does not divide"
    factors = "·".join(str(mesh[a]) for a in axes)
    return f"mesh axes {listed(axes)} (size {factors} = {math.prod(mesh[a] for a in axes)}) do not divide"


def whole(size: Any) -> int | None:
    """A whole number as Python's own, whoever's it is; None for what is none. True and False are none."""
    if type(size).__name__ in ("bool", "bool_"):  # numpy's too, which parsing does not know
        return None
    try:
        return operator.index(size)
    except TypeError:
        return None
