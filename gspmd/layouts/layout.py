"""The layout: a table of specs for a whole model, with variants, checks, and a mesh for a number of devices."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from gspmd.annotate import LayoutError, Spec, report
from gspmd.annotate.errors import shown
from gspmd.display.plain import printable
from gspmd.display.units import mesh_text
from gspmd.layouts import printed, read
from gspmd.layouts.mesh import complete, factorise, nearest, read_sizes
from gspmd.layouts.rules.check import faults_of, has_wrong_types, mesh_faults, resolved
from gspmd.layouts.rules.gradients import loss_specs
from gspmd.layouts.rules.keys import ENCODER, PHASES, keys_of_override
from gspmd.layouts.rules.sizes import padded, padding_faults
from gspmd.layouts.section import Section
from gspmd.layouts.table import LayoutTable, unknown
from gspmd.layouts.variants import inner_specs, overridden, position_specs, stored_specs
from gspmd.lowerings.names import checked

if TYPE_CHECKING:
    from gspmd.figures.figure import Figure

# An error proposes the nearest numbers of devices for which some mesh divides the sizes, if they differ from the
# requested number by less than this.
_NEAR = 33


@dataclass(frozen=True)
class Layout(LayoutTable):
    """The spec of every tensor of a model, by key: `layout["ffn.w_in"]` is `"E_xF_yz"`.

    Attributes:
      name: the preset's name, or the path of the file.
      axes: the mesh axes that the layout uses.
      factor: the mesh axes over which devices are factored (see `mesh_for`).
      table: a mapping from key to spec, `"ffn.w_in"` to `"E_xF_yz"`, or to alternatives, a tuple of specs.
      overrides: a mapping from section (`gradients`, `optimizer`, `cache`, `prefill`, `decode`) to a table of the lines
        that differ.
      lowerings: a mapping from part of the model, or `default`, to its lowering.
      dimensions: a mapping from user-defined letter to its meaning.
      own: a mapping from keys of user-defined sections to the dimensions of their specs; None derives it from `table`.
      padding: a mapping from dimension to the multiple that it is padded to.
      choices: the alternatives that `resolved` chose; `chosen` has them as text, one line for each section.
      serves: the phase of this layout (see `phase`); empty for training.
      is_encoder: whether this is the layout of an encoder (see `stack`), whose attention is not causal.

    Example:
      >>> layout = Layout.load("weight-stationary-2d").override({"ffn.w_in": "E_xF_y"})
      >>> layout["ffn.w_in"], layout.ffn.hidden
      ('E_xF_y', 'BLF_yzx')
      >>> layout
      <Layout 'weight-stationary-2d': 35 specs over x, y and z, 4 overridden>

    Source: the layouts of Pope et al. 2022 (arXiv 2211.05102), sections 3.2 and 3.3, are tables of this kind.
    """

    @classmethod
    def load(cls, name: "str | PathLike | Layout") -> "Layout":
        """Load a preset by its name, or a TOML file by its path (a name with a slash, or one that ends in `.toml`).

        A file with `base = "megatron-1d"` holds only the lines that differ; a base that is a path is relative to the
        file.

        Raises:
          LayoutError: no preset or file has this name, the file is not TOML, or a line has a value of a wrong type.
            Specs are read later, by `check`.

        Example:
          >>> Layout.load("megatron-1d")["ffn.hidden"]
          'B_xLF_yz'
        """
        if isinstance(name, Layout):
            return name
        layout = cls(name=str(name), **read.fields(name))
        # Whatever prints, draws or compares lines needs text; `check` names each of these values, and all other faults.
        return layout.check() if has_wrong_types(layout) else layout

    def __hash__(self) -> int:
        return hash((self.name, self.axes, str(sorted(self.table.items(), key=str))))

    def __repr__(self) -> str:
        return printable(printed.short(self))

    def __str__(self) -> str:
        return printable(printed.plain(self))

    def _repr_html_(self) -> str:
        from gspmd.layouts.figure import as_html

        return as_html(self)

    def figure(self) -> "Figure":
        """Draw the layout: a panel for each section, with activations from top to bottom and weights on the right.

        Returns:
          A figure, which notebooks show, and `.save("layout.svg")` writes.

        Example:
          >>> Layout.load("megatron-1d").figure().title
          'Layout megatron-1d'
        """
        from gspmd.layouts.figure import layout_figure

        return layout_figure(self)

    def __getattr__(self, part: str) -> Section:
        """Return `layout.section("ffn")` for `layout.ffn`."""
        if part.startswith("_") or "own" not in self.__dict__:  # copy and pickle look up attributes before they are set
            raise AttributeError(part)
        try:
            return self.section(part)
        except LayoutError as error:
            raise AttributeError(f"a layout has no attribute {part!r}: {error}", name=part, obj=self) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._parts]

    # -- phases, and other lowerings -----------------------------------------------------------------------------------

    def phase(self, name: str) -> "Layout":
        """Return the layout of a phase: reading a prompt (`"prefill"`) or generating tokens (`"decode"`).

        If the layout has no section of that name, it is returned unchanged.

        >>> Layout.load("zero-3").override({"decode.ffn.hidden": "BLF"}).phase("decode")["ffn.hidden"]
        'BLF'
        """
        if not isinstance(name, str) or name not in PHASES:
            raise unknown("phase", name, PHASES)
        return replace(self, table={**self.table, **self.overrides.get(name, {})}, serves=name)

    def stack(self, name: str) -> "Layout":
        """Return the layout of a stack of blocks other than the decoder, which can only be `"encoder"`.

        If the layout has no section of that name, both stacks have the same lines.

        >>> Layout.load("megatron-1d").override({"encoder.ffn.w_in": "EF"}).stack("encoder")["ffn.w_in"]
        'EF'
        """
        if name != ENCODER:
            raise unknown("stack", name, (ENCODER,))
        return replace(self, table={**self.table, **self.overrides.get(ENCODER, {})}, is_encoder=True)

    def _in_all_stacks(self, specs_of: Callable[["Layout"], Mapping[str, Any]]) -> "Layout":
        """Return this layout with the specs that `specs_of` returns for each stack of blocks."""
        specs = specs_of(self)
        changed = self.override(specs)
        if ENCODER not in self.overrides:
            return changed
        inner = specs_of(self.stack(ENCODER))
        written, own = self.overrides[ENCODER], keys_of_override(ENCODER)
        apart = {key: spec for key, spec in inner.items() if key in own and (key in written or spec != specs.get(key))}
        return changed.override({f"{ENCODER}.{key}": spec for key, spec in apart.items()})

    def stored_as(self, other: "Layout") -> "Layout":
        """Return this layout with parameters and cache sharded and padded as in `other`.

        The stored weights then serve both layouts: equations of this layout move the weights when they use them.

        Raises:
          LayoutError: the two layouts have different mesh axes.

        >>> decode = Layout.load("weight-stationary-2d")
        >>> prefill = Layout.load("weight-gathered-xyz").stored_as(decode)
        >>> prefill["ffn.w_in"] == decode["ffn.w_in"], prefill["ffn.hidden"]
        (True, 'B_xyzLF')
        """
        return replace(self.override(stored_specs(self, other)), padding=other.padding)

    def one_position(self) -> "Layout":
        """Return this layout for a single position of every sequence: L has size 1, and no activation shards it.

        >>> Layout.load("megatron-1d").override({"ffn.residual": "B_xL_yzE"}).one_position()["ffn.residual"]
        'B_xLE'
        """
        return self._in_all_stacks(lambda layout: position_specs(layout.table))

    def for_loss(self, microbatches: int = 1) -> "Layout":
        """Return this layout with the specs of parameters in the loss of a training step, such as `EF reduced-x`.

        The gradient of a `reduced` parameter stays a partial sum while layers, microbatches and several uses add to it.
        If [gradients] writes a partial sum for a parameter, the parameter is `reduced` over the same mesh axes. With
        several microbatches, every other parameter is `reduced` over the mesh axes that shard the batch, the length or
        the token groups of all tensors with which it is used, and that do not shard the parameter itself. The exception
        is a parameter whose own spec is written in [gradients]: its gradient is summed in each microbatch. Parameters
        of custom sections are not changed.

        >>> Layout.load("zero-2").for_loss()["ffn.w_in"], Layout.load("megatron-1d").for_loss(2)["ffn.w_in"]
        ('EF reduced-xyz', 'EF_yz reduced-x')
        """
        return self._in_all_stacks(lambda layout: loss_specs(layout, microbatches))

    def inside(self, axes: Sequence[str]) -> "Layout":
        """Return this layout without some of its mesh axes, for code inside a shard_map over these axes.

        >>> inner = Layout.load("pipeline").inside(["x"])
        >>> inner["ffn.residual"], inner["ffn.w_in"], inner.axes
        ('BLE', 'EF_yz', ('p', 'y', 'z'))
        """
        rest, factor = (tuple(axis for axis in names if axis not in axes) for names in (self.axes, self.factor))
        inner = self._in_all_stacks(lambda layout: inner_specs(layout.table, axes))
        return replace(inner, axes=rest, factor=factor)

    def lowered(self, name: str) -> "Layout":
        """Return this layout with the same lowering for all parts of the model."""
        return replace(self, lowerings={"default": checked(name)})

    # -- on devices ---------------------------------------------------------------------------------------------------

    def mesh_for(self, devices: int, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the mesh for a number of devices, with every declared axis in order.

        The prime factors of the number, largest first, go to the axes of `factor` in turn. If `sizes` are given and
        this mesh does not divide them, the result is the most similar mesh that does.

        Args:
          devices: number of devices.
          sizes: the sizes of the dimensions, see `check`.

        Raises:
          LayoutError: no mesh of `devices` devices divides the sizes. The message lists the faults of the first mesh,
            and the nearest numbers of devices that would work.

        Example:
          >>> Layout.load("weight-stationary-2d").mesh_for(12)
          {'x': 3, 'y': 2, 'z': 2}
        """
        first = factorise(devices, self.axes, self.factor)
        if sizes is None:
            return first
        sizes = read_sizes(sizes)
        mesh = self._dividing_mesh(devices, sizes)
        if mesh is not None:
            return mesh
        faults = faults_of(self, sizes, first)
        error = report(LayoutError, f"cannot use layout '{self.name}'{_circumstances(sizes, first)}", faults)
        below, above = range(devices - 1, max(0, devices - _NEAR), -1), range(devices + 1, devices + _NEAR)
        closest = (next((n for n in side if self._dividing_mesh(n, sizes)), 0) for side in (below, above))
        numbers = [str(n) for n in closest if n]
        counts = f"{' or '.join(numbers)} device{'s' * (numbers != ['1'])}"
        others = f"\n  With {counts}, the mesh divides them." if numbers else ""
        raise LayoutError(f"{error}{others}", error.faults)

    def _dividing_mesh(self, devices: int, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """Return the mesh most similar to the default mesh among those that divide the sizes, or None."""
        meshes = nearest(factorise(devices, self.axes, self.factor), self.factor)
        return next((mesh for mesh in meshes if not faults_of(self, sizes, mesh)), None)

    def complete_mesh(self, mesh: Any) -> dict[str, int]:
        """Return the sizes of a mesh, with size 1 for every declared axis that it lacks.

        Args:
          mesh: mesh axis sizes by name, or a `jax.sharding.Mesh`.

        Raises:
          LayoutError: the mesh has an axis that the layout does not declare.

        Example:
          >>> Layout.load("megatron-1d").complete_mesh({"x": 4, "y": 2})
          {'x': 4, 'y': 2, 'z': 1}
        """
        faults = mesh_faults(mesh, self.axes)
        if faults:
            raise report(LayoutError, f"cannot use layout '{self.name}' on this mesh", faults)
        return complete(mesh, self.axes)

    def resolved(self, sizes: Mapping[str, int] | None = None, mesh: Any = None) -> "Layout":
        """Return this layout with one spec per key: among alternatives, the first whose mesh axes divide the sizes.

        The alternatives of all lists in a section are chosen together. A layout without alternatives is returned
        unchanged.

        Args:
          sizes: sizes of the dimensions, as `check` gets them; mesh axes are assumed to divide dimensions without a
              size.
          mesh: mesh axis sizes by name, or a `jax.sharding.Mesh`; None for one device.

        Raises:
          LayoutError: no alternative of some section fits the sizes (the message says why), or the lists of a section
              differ in length.

        Example:
          >>> layout = Layout.load("replicated").override({"attention.query": ("B_xyLHD", "B_yLH_xD", "BLH_xyD")})
          >>> layout.resolved({"B": 2, "H": 8}, {"x": 4, "y": 2}).chosen
          ('[attention] 2 of 3: query B_yLH_xD',)

        Source: Pope et al. 2022 (arXiv 2211.05102), section 3.3: the batch is sharded over as many axes as it fills.
        """
        single, faults = resolved(self, read_sizes(sizes), mesh)
        if faults:
            raise report(LayoutError, f"cannot use layout '{self.name}'{_circumstances(sizes, mesh)}", faults)
        return single

    def padded(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of tensors: dimensions named in [padding] are rounded up to their multiples.

        >>> Layout.load("replicated").override({"padding.H": 64}).padded({"H": 48, "K": 1, "D": 256})
        {'H': 64, 'K': 1, 'D': 256}
        """
        faults = [*padding_faults(self.padding)]
        if faults:
            raise report(LayoutError, f"cannot pad dimensions as layout '{self.name}' asks", faults)
        return padded(read_sizes(sizes), self.padding)

    # -- changing and checking ----------------------------------------------------------------------------------------

    def override(self, specs: Mapping[str, str | Spec | Sequence[str] | int]) -> "Layout":
        """Return this layout with other specs for some keys.

        Args:
          specs: a mapping from keys such as `"ffn.w_in"` to a spec, or to alternatives: a list of specs, or one text
            with `|` between them. Keys may also be `"optimizer.ffn.w_in"`, `"decode.ffn.residual"`,
            `"serving.ffn.residual"` for both phases, `"lowering.ffn"` with a lowering, and `"padding.H"` with a
            multiple. `check` checks all of them together.

        Raises:
          LayoutError: `specs` is not a mapping, a value is of the wrong type, or a spec cannot be read.
        """
        return overridden(self, specs)

    def check(
        self,
        sizes: Mapping[str, int] | None = None,
        mesh: Any = None,
        *,
        dropless: bool = False,
        trained: Collection[str] = (),
    ) -> "Layout":
        """Check the whole table for these sizes on this mesh, and return the layout.

        Args:
          sizes: size of each dimension by letter; mesh axes are assumed to divide dimensions without a size. The number
              of token groups G is the number of sequences B unless given. The [moe] section is required only if X is
              given. M is the number of microbatches of a training step; the mesh must divide the batch of each
              microbatch.
          mesh: mesh axis sizes by name, or a `jax.sharding.Mesh`; None checks only the table.
          dropless: whether the model's experts have no capacity (`MoEConfig.dispatch`): no line may move their rows.
          trained: keys of the parameters that the model has and trains. For biases, norms and tables among them,
            [gradients] may have partial sums only over mesh axes that shard the rows over which the gradient is summed.

        Raises:
          LayoutError: the layout has faults, and the message lists all of them: unknown or missing keys, unreadable
            specs, wrong dimensions, undeclared mesh axes, sizes that the mesh axes do not divide, tensors that are not
            sharded alike though they must be, and vias that prevent a partial sum of [gradients].

        Example:
          >>> Layout.load("megatron-1d").check({"B": 8, "F": 256}, {"x": 2, "y": 4}).name
          'megatron-1d'
        """
        faults = faults_of(self, read_sizes(sizes), mesh, dropless, trained)
        if faults:
            raise report(LayoutError, f"cannot use layout '{self.name}'{_circumstances(sizes, mesh)}", faults)
        return self


def _circumstances(sizes: Mapping[str, int] | None, mesh: Any) -> str:
    """Return sizes and mesh for the sentence of an error, such as " for the sizes B=8 on the mesh x=2"."""
    given = f" for the sizes {', '.join(f'{d}={shown(n)}' for d, n in sizes.items())}" if sizes else ""
    shape = mesh if mesh is None or isinstance(mesh, Mapping) else mesh.shape
    return given + (f" on the mesh {mesh_text(shape)}" if shape else "")


def presets() -> tuple[str, ...]:
    """Return the names of the layouts that come with gspmd."""
    return read.preset_names()
