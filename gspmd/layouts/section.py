"""One section of a layout: its specs as attributes, and equations written with the names of its lines."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gspmd.annotate import LayoutError, Spec
from gspmd.annotate.equation import Equation, Via, parse_via
from gspmd.annotate.errors import shown
from gspmd.layouts import naming
from gspmd.layouts.rules.keys import Text, UnresolvedError, look_up


@dataclass(frozen=True)
class Section:
    """A section of a layout, whose specs are attributes (`ffn.w_in`) and can be named in equations.

    An attribute is the text of a spec, or None for an optional key that is absent. A key in the section cannot have the
    same name as a method of this class.

    Attributes:
      lowering: the lowering that the layout sets for this section; None leaves the choice to the caller.

    Example:
      >>> from gspmd.layouts import Layout
      >>> ffn = Layout.load("weight-stationary-2d").ffn
      >>> ffn.w_in, ffn.equation("residual, (w_in, w_gate) -> (hidden, hidden)")
      ('E_xF_yz', <Equation 'BLE_xyz, (E_xF_yz, E_xF_yz) -> (BLF_yzx, BLF_yzx)'>)
    """

    _part: str
    _specs: Mapping[str, Text]
    lowering: str | None = None
    _names: Mapping[str, str] = field(default_factory=dict)

    def __getattr__(self, key: str) -> str | None:
        if key.startswith("_"):  # copy and pickle look up such names
            raise AttributeError(key)
        try:
            return look_up(self._specs, self.key_of(key))
        except UnresolvedError:
            raise
        except LayoutError as error:
            raise AttributeError(str(error)) from None

    def __repr__(self) -> str:
        count = sum(key.startswith(f"{self._part}.") for key in self._specs)
        return f"<Section {self._part!r} of a layout: {count} specs>"

    def __hash__(self) -> int:
        return hash((self._part, str(sorted(self._specs.items(), key=str))))

    def renamed(self, names: Mapping[str, str]) -> "Section":
        """Return this section with some names mapped to other keys of the layout.

        This is useful for a second layer of the same kind.

        >>> from gspmd.layouts import Layout
        >>> shared = Layout.load("gshard").ffn.renamed({"w_in": "moe.shared_in", "hidden": "moe.shared_hidden"})
        >>> shared.key_of("w_in"), shared.key_of("residual")
        ('moe.shared_in', 'ffn.residual')
        """
        return replace(self, _names={**self._names, **names})

    def key_of(self, name: str) -> str:
        """Return the key of the line with this name: in [ffn], the key of `w_in` is `ffn.w_in`.

        A name that includes a section, such as `cross.query`, is already a key.
        """
        if not isinstance(name, str):
            raise LayoutError(f"no line of a layout is called {shown(name)}.\n  A name is a string, such as 'w_in'.")
        if name in self._names:
            return self._names[name]
        return name if "." in name else f"{self._part}.{name}"

    def spec(self, name: str) -> Spec:
        """Return the spec of a tensor, by the name of its line.

        Raises:
          LayoutError: the line is unknown or absent, is a via, or has alternatives (see `Layout.resolved`).
        """
        key = self.key_of(name)
        text = self._look_up(key)
        if key.endswith("via"):
            raise LayoutError(f"{key} is a via of two specs, not a spec.\n  Read it as layout[{key!r}].")
        if text is None:
            raise LayoutError(f"the layout does not write {key}, which is optional.")
        return Spec.parse(text)

    def _look_up(self, key: str) -> str | None:
        return look_up(self._specs, key)

    # -- computing ----------------------------------------------------------------------------------------------------

    def equation(self, text: str) -> Equation:
        """Parse an equation, replacing each name of a line in the layout by that line's spec.

        Args:
          text: the equation, such as `"residual, w_in -> hidden"`. A line of another section is written with the name
            of that section, such as `"attention.query"`.

        Raises:
          LayoutError: a name in `text` is not a tensor of this layout.
          SpecError: `text` is not an equation, or the specs of its lines do not make a valid equation.
        """
        return naming.named_equation(text, self.key_of, self._look_up)[0]

    def via(self, text: str) -> Via | None:
        """Return the via of an equation, from the vias that the layout writes for the equation's weights.

        A via has the specs to which the operands are moved before they are multiplied. The result is None if the layout
        writes no vias for these weights.

        >>> from gspmd.layouts import Layout
        >>> Layout.load("weight-stationary-2d").attention.via("residual, (w_q, w_k, w_v) -> (query, key, key)")
        <Via 'BLE_x, (E_xH_yzD, E_xKD_yz, E_xKD_yz)'>
        """
        return naming.pinned(*naming.named_equation(text, self.key_of, self._look_up), self._look_up)

    def einsum(self, text: str, *operands: Any, via: str | None = None, **options: Any) -> Any:
        """Compute an equation that is written with names of lines, with the via that the layout has for it.

        Args:
          text: the equation, as `equation` reads it.
          operands: the operands of `gspmd.einsum`.
          via: the name of the line that has the via. By default, the vias that belong to the equation's weights are
            used, such as `in_via` for `w_in`.
          options: further arguments of `gspmd.einsum`.

        Returns:
          The result, sharded as its line says, or a tuple of the results.

        Raises:
          LayoutError: for the same reasons as in `equation`.
          PlanError: for the same reasons as in `gspmd.einsum`.
          SpecError: for the same reasons as in `equation` and in `gspmd.einsum`.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from gspmd.layouts import Layout
          >>> ffn = Layout.load("megatron-1d").ffn
          >>> x, w_in, w_gate = jnp.ones((2, 3, 4)), jnp.ones((4, 8)), jnp.ones((4, 8))
          >>> with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"))):
          ...     h, gate = ffn.einsum("residual, (w_in, w_gate) -> (hidden, hidden)", x, (w_in, w_gate))
          >>> h.shape  # [B, L, F]
          (2, 3, 8)
        """
        from gspmd.ops._einsum import einsum

        equation, keys = naming.named_equation(text, self.key_of, self._look_up)
        if via is None:
            met = naming.pinned(equation, keys, self._look_up)
        else:
            line = self._look_up(self.key_of(via))
            met = None if line is None else parse_via(line)
        return einsum(equation, *operands, via=met, **options)

    def move(self, text: str, x: Any, **options: Any) -> Any:
        """Move an array from the spec of one line to the spec of another line.

        If the two specs are equal, the array is returned unchanged.

        Args:
          text: the two lines, such as `"residual -> attention.residual"`.
          x: an array sharded as the first line says.
          options: further arguments of `gspmd.reshard`.

        Returns:
          The array, sharded as the second line says.

        Raises:
          LayoutError: for the same reasons as in `equation`, or because `text` is not a move.
          SpecError: for the same reasons as in `equation`.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from gspmd.layouts import Layout
          >>> ffn = Layout.load("replicated").ffn
          >>> with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"))):
          ...     ffn.move("residual -> attention.residual", jnp.ones((2, 3, 4))).shape
          (2, 3, 4)
        """
        from gspmd.ops._einsum import reshard

        equation = self.equation(text)
        if not equation.is_move:
            raise LayoutError(f"cannot move an array by {text!r}.\n  Write it as 'residual -> ffn.residual'.")
        before, after = equation.specs
        return x if before == after else reshard(x, equation, **options)

    def rms_norm(self, text: str, x: Any, scale: Any, **options: Any) -> Any:
        """Normalize x [B, L, E] over E with `gspmd.ops.rms_norm`, whose docstring has the formula.

        Args:
          text: the names of the lines of x and of the scale, such as `"residual, norm"`.
          x: [B, L, E]; the result is sharded like `x`.
          scale: [E].
          options: further arguments of `gspmd.ops.rms_norm`.

        Raises:
          LayoutError: a name is not a line of the layout, or there are not two names.
        """
        from gspmd.ops._norm import rms_norm

        return rms_norm(x, scale, *self._lines(text, 2), **options)

    def layer_norm(self, text: str, x: Any, scale: Any, bias: Any = None, **options: Any) -> Any:
        """Standardize x [B, L, E] over E with `gspmd.ops.layer_norm`, whose docstring has the formula.

        Args:
          text: the names of the lines of x, of the scale and of the bias, such as `"residual, norm, norm_bias"`.
          x: [B, L, E]; the result is sharded like `x`.
          scale, bias: [E]; `bias` is None if there is no bias.
          options: further arguments of `gspmd.ops.layer_norm`.

        Raises:
          LayoutError: a name is not a line of the layout, or there are not three names.
        """
        from gspmd.ops._layer_norm import layer_norm

        return layer_norm(x, scale, bias, *self._lines(text, 3), **options)

    def add_bias(self, text: str, x: Any, bias: Any) -> Any:
        """Add a bias to x with `gspmd.ops.add_bias`: [F] to [B, L, F], or [X, F] to [G, X, C, F].

        Args:
          text: the names of the lines of x and of the bias, such as `"hidden, b_in"`.
          x: [B, L, F], or with other dimensions; the result is sharded like `x`.
          bias: [F], or other dimensions of x in the same order as in x.

        Raises:
          LayoutError: a name is not a line of the layout, or there are not two names.
        """
        from gspmd.ops._bias import add_bias

        return add_bias(x, bias, *self._lines(text, 2))

    def _lines(self, text: str, count: int) -> list[Spec]:
        """Return the specs of `count` lines whose names are in a text such as `"residual, norm"`."""
        names = [name.strip() for name in text.split(",")] if isinstance(text, str) else []
        if len(names) != count:
            raise LayoutError(f"cannot read {shown(text)}.\n  Name {count} lines, as in 'residual, norm'.")
        return [self.spec(name) for name in names]


@dataclass(frozen=True)
class SectionSpecs:
    """The parsed specs of a section, as attributes.

    An attribute is a `Spec`, or a `Via` if its name ends in "via", or None if the line is absent. The section may come
    from a layout, or be any object with specs as attributes. Each text is parsed once.

    Example:
      >>> from gspmd.layouts import Layout
      >>> ffn = SectionSpecs(Layout.load("megatron-1d").ffn)
      >>> ffn.w_in, ffn.in_via.specs[0] == ffn.residual
      (Spec('EF_yz'), True)
    """

    _section: Any

    def __getattr__(self, key: str) -> Any:  # a Spec, or a Via, or None
        if key.startswith("_"):  # copy and pickle look up such names
            raise AttributeError(key)
        text = getattr(self._section, key)
        if text is None:
            return None
        return parse_via(text) if key.endswith("via") else Spec.parse(text)  # both functions cache results
