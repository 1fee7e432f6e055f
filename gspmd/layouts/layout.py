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
    """A table with the spec of every tensor of a model: `layout["ffn.w_in"]` is `"E_xF_yz"`.

    Attributes:
      name: the preset's name, or the path of the file.
      axes: the mesh axes that the layout uses.
      factor: the mesh axes to which `mesh_for` distributes the prime factors of a number of devices.
      table: a mapping from key to spec, such as `"ffn.w_in"` to `"E_xF_yz"`. A tuple of specs lists alternatives, from
        which `resolved` chooses one.
      overrides: a mapping from each overriding section (`gradients`, `optimizer`, `encoder`, `cache`, `prefill` or
        `decode`) to a table of the lines in which the section differs from `table`.
      lowerings: a mapping from part of the model to its lowering; `default` is for all other parts.
      dimensions: a mapping from each user-defined dimension, a capital letter, to its meaning.
      own: a mapping from each key of a user-defined section to the dimensions of its spec. If None is given, the
        dimensions are read from `table`.
      padding: a mapping from dimension to a number; the size of the dimension is padded to a multiple of this number.
      choices: the alternatives that `resolved` chose. `chosen` shows them as text, one line for each section.
      serves: the phase of serving that this layout is for (see `phase`); empty for training.
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
        """Load a preset by its name, or a TOML file by its path.

        A name with a slash, or a name that ends in `.toml`, is a path. A file with `base = "megatron-1d"` holds only
        the lines that differ from this base. If the base is a path, it is relative to the folder of the file.

        Raises:
          LayoutError: no preset or file has this name, the file is not TOML, or a line has a value of a wrong type.
            Specs are parsed later, by `check`.

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
        """Draw the layout, with a panel for each section.

        In a panel, activations are drawn from top to bottom, with the weights on the right.

        Returns:
          A figure. Notebooks show it, and `.save("layout.svg")` writes it to a file.

        Example:
          >>> Layout.load("megatron-1d").figure().title
          'Layout megatron-1d'
        """
        from gspmd.layouts.figure import layout_figure

        return layout_figure(self)

    def __getattr__(self, part: str) -> Section:
        """Return a section of the layout: `layout.ffn` is `layout.section("ffn")`."""
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
        """Return the layout for one phase of serving.

        The phase `"prefill"` reads a prompt, and `"decode"` generates tokens. If the layout has no section named after
        the phase, all its specs stay the same.

        >>> Layout.load("zero-3").override({"decode.ffn.hidden": "BLF"}).phase("decode")["ffn.hidden"]
        'BLF'
        """
        if not isinstance(name, str) or name not in PHASES:
            raise unknown("phase", name, PHASES)
        return replace(self, table={**self.table, **self.overrides.get(name, {})}, serves=name)

    def stack(self, name: str) -> "Layout":
        """Return the layout of the encoder. The `name` must be `"encoder"`, the only stack beside the decoder.

        If the layout has no [encoder] section, the encoder has the same lines as the decoder.

        >>> Layout.load("megatron-1d").override({"encoder.ffn.w_in": "EF"}).stack("encoder")["ffn.w_in"]
        'EF'
        """
        if name != ENCODER:
            raise unknown("stack", name, (ENCODER,))
        return replace(self, table={**self.table, **self.overrides.get(ENCODER, {})}, is_encoder=True)

    def _in_all_stacks(self, specs_of: Callable[["Layout"], Mapping[str, Any]]) -> "Layout":
        """Return this layout with the specs that `specs_of` returns for the decoder and for the encoder.

        `specs_of` is called with the layout of the decoder. If the layout has an [encoder] section, `specs_of` is also
        called with the layout of the encoder.
        """
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

        Weights that are stored once, as in `other`, can then be used under both layouts. An equation of the returned
        layout moves a weight when it uses the weight.

        Raises:
          LayoutError: the two layouts have different mesh axes.

        >>> decode = Layout.load("weight-stationary-2d")
        >>> prefill = Layout.load("weight-gathered-xyz").stored_as(decode)
        >>> prefill["ffn.w_in"] == decode["ffn.w_in"], prefill["ffn.hidden"]
        (True, 'B_xyzLF')
        """
        return replace(self.override(stored_specs(self, other)), padding=other.padding)

    def one_position(self) -> "Layout":
        """Return this layout for a single position of every sequence: L has size 1, and no activation shards L.

        >>> Layout.load("megatron-1d").override({"ffn.residual": "B_xL_yzE"}).one_position()["ffn.residual"]
        'B_xLE'
        """
        return self._in_all_stacks(lambda layout: position_specs(layout.table))

    def for_loss(self, microbatches: int = 1) -> "Layout":
        """Return this layout with the specs that parameters have inside the loss function of a training step.

        Inside the loss function a parameter may be `reduced`, such as `EF reduced-x`. Its gradient then stays a partial
        sum while layers, microbatches and several uses of the parameter add to the gradient.

        If [gradients] writes a partial sum for a parameter, the parameter is `reduced` over the same mesh axes. If
        there are several microbatches, every other parameter is `reduced` too, over the mesh axes that meet two
        conditions: the axis shards the batch, the length or the token groups of every tensor with which the parameter
        is used, and the axis does not shard the parameter. There is one exception. A parameter for which [gradients]
        writes the parameter's own spec is not `reduced`, so its gradient is summed in each microbatch. Parameters of
        custom sections are not changed.

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
        """Return this layout with one lowering, `name`, for all parts of the model."""
        return replace(self, lowerings={"default": checked(name)})

    # -- on devices ---------------------------------------------------------------------------------------------------

    def mesh_for(self, devices: int, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the sizes of the mesh axes for a number of devices.

        The mesh has all axes of the layout, in their order. The prime factors of the number of devices, from the
        largest to the smallest, are given to the axes of `factor` in turn. If `sizes` are given and the axes of this
        mesh do not divide the sizes, the result is the most similar mesh whose axes divide the sizes.

        Args:
          devices: number of devices.
          sizes: the sizes of the dimensions, as `check` takes them.

        Raises:
          LayoutError: no mesh of `devices` devices divides the sizes. The message lists the faults of the mesh that
            would be used without `sizes`, and the nearest numbers of devices that would work.

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
        """Return the mesh that divides the sizes and is most similar to the default mesh.

        The default mesh is the one that `mesh_for` returns without sizes. The result is None if no mesh of `devices`
        devices divides the sizes.
        """
        meshes = nearest(factorise(devices, self.axes, self.factor), self.factor)
        return next((mesh for mesh in meshes if not faults_of(self, sizes, mesh)), None)

    def complete_mesh(self, mesh: Any) -> dict[str, int]:
        """Return the axis sizes of a mesh, with size 1 for every axis that the layout declares and the mesh lacks.

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
        """Return this layout with one spec for every key.

        If a key has a list of alternatives, the result has the first alternative whose mesh axes divide the sizes. All
        lists in a section use the same position: if one list takes its second alternative, so do the others. Lists in
        [prefill] and [decode] are kept, because the sizes of these phases are not known yet. A layout without
        alternatives is returned unchanged.

        Args:
          sizes: sizes of the dimensions, as `check` takes them. If a dimension has no size, mesh axes are assumed to
            divide it.
          mesh: mesh axis sizes by name, or a `jax.sharding.Mesh`; None for one device.

        Raises:
          LayoutError: no alternative in some section fits the sizes (the message says why), or the lists of a section
            differ in length.

        Example:
          >>> layout = Layout.load("replicated").override({"attention.query": ("B_xyLHD", "B_yLH_xD", "BLH_xyD")})
          >>> layout.resolved({"B": 2, "H": 8}, {"x": 4, "y": 2}).chosen
          ('[attention] 2 of 3: query B_yLH_xD',)

        Source: Pope et al. 2022 (arXiv 2211.05102), section 3.3, where the batch is sharded over as many mesh axes as
        its size allows.
        """
        single, faults = resolved(self, read_sizes(sizes), mesh)
        if faults:
            raise report(LayoutError, f"cannot use layout '{self.name}'{_circumstances(sizes, mesh)}", faults)
        return single

    def padded(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the padded sizes: each dimension in [padding] is rounded up to a multiple of the number given there.

        >>> Layout.load("replicated").override({"padding.H": 64}).padded({"H": 48, "K": 1, "D": 256})
        {'H': 64, 'K': 1, 'D': 256}
        """
        faults = [*padding_faults(self.padding)]
        if faults:
            raise report(LayoutError, f"cannot pad dimensions as layout '{self.name}' asks", faults)
        return padded(read_sizes(sizes), self.padding)

    # -- changing and checking ----------------------------------------------------------------------------------------

    def override(self, specs: Mapping[str, str | Spec | Sequence[str] | int]) -> "Layout":
        """Return this layout with new specs for some keys.

        Args:
          specs: a mapping from keys such as `"ffn.w_in"` to specs. In place of a spec there may be alternatives: a list
            of specs, or one text with `|` between the specs. A key may name a line of an overriding section, such as
            `"optimizer.ffn.w_in"` or `"decode.ffn.residual"`. The key `"serving.ffn.residual"` applies to both phases
            of serving. The value of `"lowering.ffn"` is the name of a lowering. The value of `"padding.H"` is a number;
            the size of H is padded to a multiple of this number. `check` later checks all lines together.

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
          sizes: a mapping from dimension to size. If a dimension has no size, mesh axes are assumed to divide it. If G,
            the number of token groups, is not given, it is assumed to be B, the number of sequences. The [moe] section
            is required only if X is given. M is the number of microbatches of a training step; the mesh must divide the
            batch of each microbatch.
          mesh: mesh axis sizes by name, or a `jax.sharding.Mesh`; None checks only the table.
          dropless: whether the model's experts have no capacity (`MoEConfig.dispatch`). If so, no line may move the
            rows of tokens that experts receive.
          trained: keys of the parameters that the model has and trains. If such a parameter is a bias, a norm or a
            table, [gradients] may write a partial sum for its gradient only over mesh axes that shard the rows over
            which this gradient is summed.

        Raises:
          LayoutError: the layout has faults. The message lists all of them: unknown or missing keys, unreadable specs,
            wrong dimensions, undeclared mesh axes, sizes that the mesh axes do not divide, tensors that must be sharded
            alike but are not, and vias under which a gradient is not the partial sum that [gradients] writes.

        Example:
          >>> Layout.load("megatron-1d").check({"B": 8, "F": 256}, {"x": 2, "y": 4}).name
          'megatron-1d'
        """
        faults = faults_of(self, read_sizes(sizes), mesh, dropless, trained)
        if faults:
            raise report(LayoutError, f"cannot use layout '{self.name}'{_circumstances(sizes, mesh)}", faults)
        return self


def _circumstances(sizes: Mapping[str, int] | None, mesh: Any) -> str:
    """Return the sizes and the mesh as the end of an error's sentence: " for the sizes B=8 on the mesh x=2"."""
    given = f" for the sizes {', '.join(f'{d}={shown(n)}' for d, n in sizes.items())}" if sizes else ""
    shape = mesh if mesh is None or isinstance(mesh, Mapping) else mesh.shape
    return given + (f" on the mesh {mesh_text(shape)}" if shape else "")


def presets() -> tuple[str, ...]:
    """Return the names of the layouts that come with gspmd."""
    return read.preset_names()
