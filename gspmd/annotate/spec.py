"""The spec: a tensor's dimensions, the mesh axes that shard each dimension, and the mesh axes of its partial sum."""

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from gspmd.annotate.errors import Fault, SpecError, listed, report, shown
from gspmd.annotate.parser import NAME, OPEN, Parser, axes_suffix, dim_text
from gspmd.annotate.validation import LARGEST, mesh_sizes, whole_sizes

if TYPE_CHECKING:
    from gspmd.display.runs import Run

_CAPITALS = frozenset(string.ascii_uppercase)


@lru_cache(maxsize=4096)
def _is_name(axis: Any) -> bool:
    return isinstance(axis, str) and NAME.fullmatch(axis) is not None


@dataclass(frozen=True, repr=False)
class Spec:
    """The placement of one tensor on a mesh, in the notation of Pope et al. 2022: `B_xLE_yz partialsum-w`.

    Two specs are equal if they mean the same placement. `str` returns the canonical text, which parses to an equal
    spec.

    Attributes:
      dims: one capital letter for each dimension, `("B", "L", "E")`.
      axes: for each of `dims`, the mesh axes that shard the dimension, major first; `()` if the dimension is unsharded,
          and `("?",)` if it is left open.
      partial: the mesh axes over which the devices hold partial sums, sorted.
      reduced: the mesh axes over which the gradient is a partial sum, sorted. The tensor itself is replicated over
          these axes.

    Example:
      >>> spec = Spec.parse("B_x L E_{y,z} (partialsum-w)")
      >>> spec.dims, spec.axes_of("E"), spec.partial
      (('B', 'L', 'E'), ('y', 'z'), ('w',))
      >>> str(spec)
      'B_xLE_yz partialsum-w'

    Source: Pope et al. 2022, Efficiently Scaling Transformer Inference (arXiv 2211.05102), section 3.1.
    Differs: longer axis names are written in braces, `E_{data,model}`, and `E_?` leaves a dimension to the compiler.
    """

    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()

    def __post_init__(self):
        given = self.dims, self.axes, self.partial, self.reduced
        try:
            sums = {"partial": tuple(sorted(self.partial)), "reduced": tuple(sorted(self.reduced))}
            vars(self).update(dims=tuple(self.dims), axes=tuple(map(tuple, self.axes)), **sums)
            fine = self._is_well_formed()
        except (TypeError, ValueError):  # not iterable, sortable or hashable; or an array, which has no truth value
            fine = False
        if not fine:
            dims, axes, partial, reduced = map(shown, given)
            raise SpecError(
                f"cannot make a Spec of dims={dims}, axes={axes}, partial={partial} and reduced={reduced}.\n"
                "  A dimension is a capital letter with a tuple of mesh axes; a mesh axis appears once in a spec."
            )

    def _is_well_formed(self) -> bool:
        axes = [axis for names in (*self.axes, self.partial, self.reduced) if names != (OPEN,) for axis in names]
        return (
            len(self.dims) == len(self.axes)
            and len(set(self.dims)) == len(self.dims)
            and len(set(axes)) == len(axes)
            and _CAPITALS.issuperset(self.dims)
            and all(map(_is_name, axes))
        )

    @classmethod
    def parse(cls, text: "str | Spec") -> "Spec":
        """Read a spec; a `Spec` is returned as it is.

        Raises:
          SpecError: lists every fault of the text, each with a caret under it.

        Example:
          >>> Spec.parse("E_{x,y}") == Spec.parse(" E_xy ")
          True
        """
        if isinstance(text, Spec):
            return text
        return _parse(text) if isinstance(text, str) else _refuse(text)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """Return the mesh axes that shard a dimension, major first."""
        return self.axes[self._index(dim)]

    @cached_property
    def used(self) -> frozenset[str]:
        """Every mesh axis that shards a dimension, without the axes of the partial sum."""
        return frozenset(axis for axes in self.axes for axis in axes) - {OPEN}

    @property
    def is_open(self) -> bool:
        """Whether the sharding of some dimension is left to the compiler."""
        return (OPEN,) in self.axes

    @lru_cache(maxsize=4096)  # noqa: B019 - specs are small, and are printed again and again
    def __str__(self) -> str:
        dims = "".join(dim_text(d, axes) for d, axes in zip(self.dims, self.axes))
        suffixes = (("partialsum", self.partial), ("reduced", self.reduced))
        return " ".join([dims, *(f"{name}-{axes_suffix(axes)}" for name, axes in suffixes if axes)]).strip()

    def __repr__(self) -> str:
        return f"Spec({str(self)!r})"

    def _repr_html_(self) -> str:
        from gspmd.display.html import page  # Imported here, as below, since parsing draws nothing.
        from gspmd.display.runs import runs_html

        return page([f"<p>{runs_html(self.runs())}</p>"])

    def runs(self) -> "list[Run]":
        """Return the notation as runs of text, with mesh axes as subscripts: `B_xLE` becomes B, a subscript x, and LE.

        >>> from gspmd.display.runs import runs_html
        >>> runs_html(Spec.parse("B_xLE_{data,model}").runs())
        'B<sub>x</sub>LE<sub>data,model</sub>'
        """
        from gspmd.display.runs import Run
        from gspmd.display.units import axes_text

        runs: list[Run] = []
        for dim, axes in zip(self.dims, self.axes):
            if runs and not runs[-1].style:
                runs[-1] = Run(runs[-1].text + dim)
            else:
                runs.append(Run(dim))
            runs += [Run(axes_text(axes), "sub")] if axes else []
        for word, axes in (("partialsum", self.partial), ("reduced", self.reduced)):
            if axes:
                runs.append(Run(f"{' ' if runs else ''}({word}-{axes_text(axes)})", "sum"))
        return runs or [Run("scalar", "sum")]

    # -- editing ------------------------------------------------------------------------------------------------------

    def with_axes(self, dim: str, axes: tuple[str, ...]) -> "Spec":
        """Return a copy of this spec in which `dim` is sharded over `axes`, from major to minor, without `reduced`.

        For example, `B_xLE` becomes `B_xLE_yz`.
        """
        at = self._index(dim)
        return Spec(self.dims, (*self.axes[:at], axes, *self.axes[at + 1 :]), self.partial)

    def with_partial(self, axes: tuple[str, ...]) -> "Spec":
        """Return this spec as a partial sum over exactly `axes`, and without `reduced`."""
        return Spec(self.dims, self.axes, axes)

    def without_partial(self) -> "Spec":
        """Return this spec without `partial` and `reduced`."""
        return Spec(self.dims, self.axes)

    @property
    def cotangent(self) -> "Spec":
        """The spec of the gradient: `EF partialsum-x` for `EF reduced-x`, and vice versa."""
        return Spec(self.dims, self.axes, self.reduced, self.partial)

    def without(self, *dims: str) -> "Spec":
        """Return this spec without some dimensions and the mesh axes that shard them: `B_xLV_y` becomes `B_xL`."""
        gone = {self._index(d) for d in dims}
        kept = [i for i in range(len(self.dims)) if i not in gone]
        return replace(self, dims=tuple(self.dims[i] for i in kept), axes=tuple(self.axes[i] for i in kept))

    def without_trivial(self, mesh: Mapping[str, int]) -> "Spec":
        """Return this spec without the mesh axes of size 1, which shard nothing and sum nothing.

        >>> str(Spec.parse("B_xE_yz").without_trivial({"x": 4, "y": 1, "z": 2}))
        'B_xE_z'
        """
        if not isinstance(mesh, Mapping):
            mesh = mesh_sizes(mesh)
        if all(mesh.get(axis) != 1 for names in (*self.axes, self.partial, self.reduced) for axis in names):
            return self
        *axes, partial, reduced = (
            tuple(axis for axis in names if mesh.get(axis) != 1) for names in (*self.axes, self.partial, self.reduced)
        )
        return Spec(self.dims, tuple(axes), partial, reduced)

    def rename(self, dims: Mapping[str, str]) -> "Spec":
        """Return this spec with some dimensions renamed: `B_xLE` becomes `G_xLE` with `{"B": "G"}`."""
        if not isinstance(dims, Mapping):
            raise SpecError(
                f"cannot rename the dimensions of '{self}' by {shown(dims)}.\n  Pass a mapping such as {{'B': 'G'}}."
            )
        return replace(self, dims=tuple(dims.get(d, d) for d in self.dims))

    def _index(self, dim: str) -> int:
        if not isinstance(dim, str) or dim not in self.dims:
            known = f"It has {listed(self.dims)}." if self.dims else "It is the spec of a scalar."
            name = dim if isinstance(dim, str) and len(dim) == 1 else shown(dim)
            raise SpecError(f"dimension {name} does not appear in '{self}'.\n  {known}")
        return self.dims.index(dim)

    # -- on a mesh ----------------------------------------------------------------------------------------------------

    def partition_spec(self) -> Any:
        """Return the partition spec (`jax.P`) of this spec."""
        import jax  # parsing does not import jax

        entries = [jax.P.UNCONSTRAINED if axes == (OPEN,) else axes or None for axes in self.axes]
        sums = {"unreduced": set(self.partial), "reduced": set(self.reduced)}
        return jax.P(*entries, **{name: axes for name, axes in sums.items() if axes})

    def local_shape(self, sizes: Mapping[str, int] | Sequence[int], mesh: Any) -> tuple[int, ...]:
        """Return the shape of one device's shard.

        Args:
          sizes: size of every dimension by letter, or the shape of the whole array.
          mesh: size of every mesh axis by name, or a `jax.sharding.Mesh`.

        Raises:
          SpecError: the spec does not fit the sizes or the mesh (see `check`), or a dimension is left open (`E_?`) and
              therefore has no known local size.

        Example:
          >>> Spec.parse("B_xLE_yz").local_shape((8, 128, 512), {"x": 4, "y": 2, "z": 2})
          (2, 128, 128)
        """
        mesh, sizes = mesh_sizes(mesh), whole_sizes(sizes)
        self.check(sizes, mesh)
        if self.is_open:
            from gspmd.annotate.diagnosis.sizes import no_local_shape  # imported here, as below, since most specs fit

            raise no_local_shape(self)
        whole = [sizes[d] for d in self.dims] if isinstance(sizes, Mapping) else sizes
        return tuple(n // math.prod(mesh[a] for a in axes) for n, axes in zip(whole, self.axes))

    def check(self, sizes: Mapping[str, int] | Sequence[int], mesh: Any) -> None:
        """Raise a SpecError with all faults if this spec does not fit the sizes and the mesh (see `local_shape`)."""
        if faults := self.faults(sizes, mesh):
            from gspmd.annotate.diagnosis.sizes import sizes_text

            raise report(SpecError, f"cannot shard '{self}' for {sizes_text(sizes)}", faults)

    def faults(self, sizes: Mapping[str, int] | Sequence[int], mesh: Any) -> tuple[Fault, ...]:
        """Return every fault that `check` would report, for a caller that collects the faults of many specs."""
        mesh, sizes = mesh_sizes(mesh), whole_sizes(sizes)
        if fits(self, sizes, mesh):
            return ()
        from gspmd.annotate.diagnosis.sizes import faults_of

        return faults_of(self, sizes, mesh)


def fits(spec: Spec, sizes: Mapping[str, int] | Sequence[int], mesh: Mapping[str, int]) -> bool:
    """Return whether a spec fits: the mesh has every axis of the spec, and the axes divide the size of every dimension.

    Args:
      spec: the spec.
      sizes: sizes by dimension, or a shape, from `whole_sizes`.
      mesh: size of every mesh axis, from `mesh_sizes`.
    """
    if not isinstance(sizes, Mapping):
        if len(sizes) != len(spec.dims):
            return False
        sizes = dict(zip(spec.dims, sizes))
    for dim, axes in zip(spec.dims, spec.axes):
        size = sizes.get(dim)
        if type(size) is not int or not 0 <= size < LARGEST or size % math.prod(mesh.get(axis, 1) for axis in axes):
            return False
    return all(axis in mesh for axis in (*spec.used, *spec.partial, *spec.reduced))


@lru_cache(maxsize=4096)
def _parse(text: str) -> Spec:
    try:
        return Spec(*Parser(text).lone_spec())
    except ValueError:
        _refuse(text)


def _refuse(text: object) -> NoReturn:
    from gspmd.annotate.diagnosis.refusals import unreadable

    raise unreadable("spec", text) from None
