"""The spec: one tensor's dimensions, the mesh axes that shard each, and the partial sums it still owes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from gspmd.annotate import validation
from gspmd.annotate.diagnosis.nodes import ARROW, CAPITALS, NAME, OPEN, SpecNode, axes_text, dim_text
from gspmd.annotate.diagnosis.reader import Reader
from gspmd.annotate.errors import Fault, SpecError, listed, report, shown
from gspmd.annotate.validation import mesh_sizes


@dataclass(frozen=True)
class Spec:
    """How one tensor lies on a mesh, in the notation of the papers: `B_xLE_yz partialsum-w`.

    Two specs are equal when they mean the same; `str` gives the canonical text, which parses back.

    Attributes:
      dims: one capital letter for each dimension, `("B", "L", "E")`.
      axes: parallel to `dims`, the mesh axes that shard each, major first; `()` unsharded, `("?",)` left open.
      partial: the mesh axes over which a sum is still owed, sorted.

    Example:
      >>> spec = Spec.parse("B_x L E_{y,z} (partialsum-w)")
      >>> spec.dims, spec.axes_of("E"), spec.partial
      (('B', 'L', 'E'), ('y', 'z'), ('w',))
      >>> str(spec)
      'B_xLE_yz partialsum-w'

    Source: Pope et al. 2022, Efficiently Scaling Transformer Inference (arXiv 2211.05102), section 3.1.
    Differs: longer axis names stand in braces, `E_{data,model}`, and `E_?` leaves a dimension to the compiler.
    """

    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __post_init__(self):
        given = self.dims, self.axes, self.partial
        try:
            object.__setattr__(self, "dims", tuple(self.dims))
            object.__setattr__(self, "axes", tuple(tuple(a) for a in self.axes))
            object.__setattr__(self, "partial", tuple(sorted(self.partial)))
            fine = _is_well_formed(self)
        except (TypeError, ValueError):  # what cannot be walked through, sorted, or looked up; arrays are not true
            fine = False
        if not fine:
            raise _ill_formed(*given)

    @classmethod
    def parse(cls, text: "str | Spec") -> "Spec":
        """Reads a spec; one that is read already is returned as it is.

        Raises:
          SpecError: lists every fault of the text, each with a caret under it.

        Example:
          >>> Spec.parse("E_{x,y}") == Spec.parse(" E_xy ")
          True
        """
        if isinstance(text, Spec):
            return text
        if not isinstance(text, str):
            raise SpecError(f"cannot read a spec from {shown(text)}: it is no text ({type(text).__name__}).\n"
                            "  Write a string such as 'B_xLE_yz'.")
        return _parse(text)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """The mesh axes that shard a dimension, major first."""
        return self.axes[self._index(dim)]

    @cached_property
    def used(self) -> frozenset[str]:
        """Every mesh axis that shards a dimension; those of the partial sum are not among them."""
        return frozenset(axis for axes in self.axes for axis in axes) - {OPEN}

    @property
    def is_open(self) -> bool:
        """Whether some dimension is left to the compiler."""
        return (OPEN,) in self.axes

    def __str__(self) -> str:
        dims = "".join(dim_text(d, axes) for d, axes in zip(self.dims, self.axes))
        partial = f"partialsum-{axes_text(self.partial)}" if self.partial else ""
        return f"{dims} {partial}".strip()

    # -- editing ------------------------------------------------------------------------------------------------------

    def with_axes(self, dim: str, axes: tuple[str, ...]) -> "Spec":
        """This spec with a dimension sharded over `axes`, major first.

        >>> str(Spec.parse("B_xLE").with_axes("E", ("y", "z")))
        'B_xLE_yz'
        """
        at = self._index(dim)
        return Spec(self.dims, (*self.axes[:at], axes, *self.axes[at + 1 :]), self.partial)

    def with_partial(self, axes: tuple[str, ...]) -> "Spec":
        """This spec, owing a sum over `axes` and no other."""
        return replace(self, partial=axes)

    def without_partial(self) -> "Spec":
        """This spec with every partial sum settled."""
        return replace(self, partial=())

    def without(self, *dims: str) -> "Spec":
        """This spec less some dimensions, with the mesh axes that shard them.

        >>> str(Spec.parse("B_xLV_y").without("V"))
        'B_xL'
        """
        gone = {self._index(d) for d in dims}
        kept = [i for i in range(len(self.dims)) if i not in gone]
        return replace(self, dims=tuple(self.dims[i] for i in kept), axes=tuple(self.axes[i] for i in kept))

    def without_trivial(self, mesh: Mapping[str, int]) -> "Spec":
        """This spec less the mesh axes of size 1, over which nothing is cut and nothing is owed.

        >>> str(Spec.parse("B_xE_yz").without_trivial({"x": 4, "y": 1, "z": 2}))
        'B_xE_z'
        """
        if not isinstance(mesh, Mapping):
            mesh = mesh_sizes(mesh)
        if all(mesh.get(axis) != 1 for names in (self.partial, *self.axes) for axis in names):
            return self
        axes = tuple(tuple(axis for axis in names if mesh.get(axis) != 1) for names in self.axes)
        return Spec(self.dims, axes, tuple(axis for axis in self.partial if mesh.get(axis) != 1))

    def rename(self, dims: Mapping[str, str]) -> "Spec":
        """This spec with other letters for some dimensions.

        >>> str(Spec.parse("B_xLE").rename({"B": "G"}))
        'G_xLE'
        """
        if not isinstance(dims, Mapping):
            raise SpecError(f"cannot rename the dimensions of '{self}' by {shown(dims)}.\n  Write {{'B': 'G'}}.")
        return replace(self, dims=tuple(dims.get(d, d) for d in self.dims))

    def _index(self, dim: str) -> int:
        if not isinstance(dim, str) or dim not in self.dims:
            known = f"It has {listed(self.dims)}." if self.dims else "It is that of a scalar."
            said = dim if isinstance(dim, str) and len(dim) == 1 else shown(dim)
            raise SpecError(f"dimension {said} does not stand in '{self}'.\n  {known}")
        return self.dims.index(dim)

    # -- on a mesh ----------------------------------------------------------------------------------------------------

    def partition_spec(self, *, dual: bool = False) -> Any:
        """The `jax.P` of this spec; `dual=True` writes its partial sums as they stand in a cotangent's type."""
        import jax  # parsing knows no jax

        entries = [_entry(axes, jax.P.UNCONSTRAINED) for axes in self.axes]
        partial = {"reduced" if dual else "unreduced": set(self.partial)} if self.partial else {}
        return jax.P(*entries, **partial)

    def local_shape(self, sizes: Mapping[str, int] | Sequence[int], mesh: Any) -> tuple[int, ...]:
        """The shape that one device holds.

        Args:
          sizes: size of every dimension by letter, or the shape of the whole array.
          mesh: size of every mesh axis by name, or a `jax.sharding.Mesh`.

        Raises:
          SpecError: as `check`; also for a dimension left open, whose local size nobody knows yet.

        Example:
          >>> Spec.parse("B_xLE_yz").local_shape((8, 128, 512), {"x": 4, "y": 2, "z": 2})
          (2, 128, 128)
        """
        mesh, sizes = mesh_sizes(mesh), validation.whole_sizes(sizes)
        self.check(sizes, mesh)
        if self.is_open:
            at = self.axes.index((OPEN,))
            fact = f"dimension {self.dims[at]} is left open, so its local size is not known."
            fault = validation.fault_at(self, at, fact)
            raise report(SpecError, f"cannot tell the local shape of '{self}'", [fault])
        whole = [sizes[d] for d in self.dims] if isinstance(sizes, Mapping) else sizes
        return tuple(n // math.prod(mesh[a] for a in axes) for n, axes in zip(whole, self.axes))

    def check(self, sizes: Mapping[str, int] | Sequence[int], mesh: Any) -> None:
        """Raises SpecError, with every fault, unless this spec fits these sizes and this mesh (see `local_shape`)."""
        faults = self.faults(sizes, mesh)
        if faults:
            raise report(SpecError, f"cannot shard '{self}' for {validation.sizes_text(sizes)}", faults)

    def faults(self, sizes: Mapping[str, int] | Sequence[int], mesh: Any) -> tuple[Fault, ...]:
        """Every fault that `check` would raise, for whoever collects the faults of many specs."""
        return validation.faults_of(self, sizes, mesh_sizes(mesh))


def spec_from(written: SpecNode) -> Spec:
    """The spec of what was read without a fault."""
    partial = tuple(a.name for a in written.partial.axes) if written.partial else ()
    return Spec(tuple(written.names), tuple(tuple(a.name for a in d.axes) for d in written.dims), partial)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Spec:
    reader = Reader(text)
    written = reader.spec()
    for number in range(len(text)):  # what follows is read for its faults
        start = reader.at
        if start == len(text):
            break
        found = reader.match(ARROW) or reader.peek()
        reader.at = start + len(found)
        if number == 0:
            reader.fault(start, f"{found!r} belongs to an equation, and a spec is one tensor.",
                         "Write one spec, as in 'B_xLE_yz'.")
        reader.spec()
    if reader.faults:
        raise report(SpecError, f"cannot read the spec {text!r}", reader.faults)
    return spec_from(written)


def _is_well_formed(spec: Spec) -> bool:
    axes = [a for group in spec.axes if group != (OPEN,) for a in group] + list(spec.partial)
    return (len(spec.dims) == len(spec.axes) and len(set(spec.dims)) == len(spec.dims) and len(set(axes)) == len(axes)
            and all(d in CAPITALS for d in spec.dims) and all(isinstance(a, str) and NAME.fullmatch(a) for a in axes))


def _ill_formed(dims: Any, axes: Any, partial: Any) -> SpecError:
    return SpecError(f"no spec has dims={shown(dims)}, axes={shown(axes)} and partial={shown(partial)}.\n"
                     "  A dimension is a capital letter, with its own mesh axes; a mesh axis stands once in a spec.")


def _entry(axes: tuple[str, ...], unconstrained: Any) -> Any:
    return unconstrained if axes == (OPEN,) else None if not axes else axes[0] if len(axes) == 1 else axes
