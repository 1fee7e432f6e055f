"""Root mean square normalization over the last dimensions, which may be sharded."""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd.annotate.errors import Fault, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.options import number
from gspmd.ops.interface.planned_op import (
    FLOAT32,
    STATISTIC,
    Chains,
    fault,
    float32,
    planned_op,
    read,
    settle,
    sizes_of,
)
from gspmd.planner.graph.resharding import move


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    spec: str | Spec,
    scale_spec: str | Spec,
    *,
    epsilon: float = 1e-6,
    count: int | None = None,
) -> jax.Array:
    """Divide by the root mean square over the last dimensions, and scale: x / sqrt(mean(x²) + ε) · scale.

    Communication: all-reduces of [B, L] float32 over the mesh axes of E, one in the forward pass and one in the
    gradient of `x`. The gradient of `scale` is summed over the mesh axes of B and L and gets the spec of the scale.

    Args:
        x: [B, L, E]; there may be any number of leading dimensions.
        scale: [E], or an array with several last dimensions of x, such as [H, D] if x is [B, L, H, D]. The mean is over
            all dimensions of the scale. If the scale is not sharded like these dimensions of x, it is resharded to
            match.
        spec: the spec of `x` and of the result, such as `"BLE_x"`.
        scale_spec: the spec of `scale`, such as `"E_x"`.
        epsilon: the number added to the mean square.
        count: the number of elements over which the mean is taken, if the other elements of a row are zeros that pad
            the row; None to count all elements.

    Returns:
        [B, L, E] in x's dtype; the arithmetic is float32.

    Raises:
        SpecError: a spec does not fit its array or the mesh; or the dimensions of `scale` are not x's last dimensions;
            or `x` holds integers; or `count` is not a number from 1 to the number of elements of `scale`.
        PlanError: an operand is a partial sum.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     x = gspmd.annotate(jnp.full((1, 2, 4), 3.0), "BLE_x")
        ...     print(rms_norm(x, jnp.ones(4), "BLE_x", "E")[0, 0].round(3))
        [1. 1. 1. 1.]

    Source: Zhang and Sennrich 2019, *Root Mean Square Layer Normalization* (arXiv 1910.07467), equation 4.
    Differs: epsilon is added under the root, as in common language models; the paper has no epsilon.
    """
    ctx = context()
    doing = f"cannot normalize '{spec}' with a scale '{scale_spec}'"
    x, scale = array(doing, "x", x, "real numbers"), array(doing, "the scale", scale, "real numbers")
    epsilon = number(doing, "epsilon", epsilon)
    of_x, of_scale = read(doing, spec, x, ctx), read(doing, scale_spec, scale, ctx, weight=True)
    check_row(doing, of_x, of_scale, x, scale, "scale", several=True)
    if count is not None and not (isinstance(count, int) and 1 <= count <= scale.size):
        raise SpecError(f"{doing}: count is {count}.\n  Pass a number of elements, from 1 to {scale.size}.")
    form = _Norm(of_x, of_scale, epsilon, scale.size if count is None else count)
    if ctx.compiler_chooses and not form.scale.reduced:  # annotations cannot ask a compiler for a partial sum
        ins, name = (form.x, form.scale), f"rms_norm {form.x}"
        return left_to_compiler(ctx, partial(_plain, form), ins, form.x, x, scale, name=name)
    return _norm(form, ctx, x, scale)


def check_row(
    doing: str, spec: Spec, row_spec: Spec, x: jax.Array, row: jax.Array, name: str, *, several: bool = False
) -> None:
    """Check that `x` is floating-point and that the only dimension of `row` is x's last dimension.

    If `several` is true, `row` may have several of x's last dimensions. `name` is the name of `row` in error messages.

    Raises:
        SpecError: one of these conditions does not hold, or `x` is a scalar.
    """
    if not spec.dims:
        raise SpecError(
            f"{doing}: x is a scalar, which has no dimension to take the mean over.\n  Pass an array such as 'BLE_x'."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise SpecError(f"{doing}: x is {x.dtype}.\n  Cast x to a floating dtype: the result has the dtype of x.")
    count = len(row_spec.dims) if several and 1 < len(row_spec.dims) <= len(spec.dims) else 1
    last, shape = spec.dims[-count:], x.shape[-count:]
    if row_spec.dims == last and row.shape == shape:
        return
    if count > 1:
        dims = "".join(last)
        fact = f"the {name} must have the last dimensions {dims} of x, of sizes {shape}, but its shape is {row.shape}."
    else:
        fact = f"the {name} must have the one dimension {last[0]}, of size {shape[0]}, but its shape is {row.shape}."
    remedy = f"Write it '{''.join(last)}'."
    whole = Fault(str(row_spec), 0, len(str(row_spec)), fact, remedy)
    at_dim = [fault(row_spec, row_spec.dims[0], fact, remedy)] if row_spec.dims else [whole]
    raise report(SpecError, doing, at_dim) from None


@dataclass(frozen=True)
class _Norm:
    x: Spec
    scale: Spec
    epsilon: float
    count: int
    """Number of elements over which the mean is taken."""

    @property
    def _first(self) -> int:
        """The index of the first dimension over which the mean is taken."""
        return len(self.x.dims) - len(self.scale.dims)

    @property
    def row(self) -> tuple[int, ...]:
        """The indices of the dimensions over which the mean is taken, counted from the end, so that -1 is the last."""
        return tuple(range(-len(self.scale.dims), 0))

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the dimensions over which the mean is taken."""
        return tuple(axis for axes in self.x.axes[self._first :] for axis in axes)

    @property
    def statistic(self) -> Spec:
        """The spec of the mean square, which has one value per row."""
        return Spec(self.x.dims[: self._first], self.x.axes[: self._first])

    @property
    def used(self) -> Spec:
        """The spec of the scale after it is moved to the mesh axes of the dimensions over which the mean is taken."""
        return Spec(self.x.dims[self._first :], self.x.axes[self._first :])

    @property
    def partial_scale(self) -> Spec:
        """The spec that the scale's gradient has before this gradient is summed over devices."""
        return self.used.with_partial(tuple(axis for axes in self.x.axes[: self._first] for axis in axes))


def _plain(form: _Norm, x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = float32(x)
    inverse = jax.lax.rsqrt(jnp.sum(wide * wide, axis=form.row, keepdims=True) / form.count + form.epsilon)
    return (wide * inverse * along_rows(float32(scale), x.ndim)).astype(x.dtype)


def _forward(form: _Norm, ctx: Context, x: jax.Array, scale: jax.Array):
    steps, body = _value(form, x.shape, scale.dtype.itemsize, ctx)
    outs = (form.x, form.statistic, form.used)
    y, inverse, used = run(ctx, f"rms_norm {form.x}", steps, body, (form.x, form.scale), outs, x, scale)
    return y, (x, checkpoint_name(inverse, STATISTIC), used)


def _backward(form: _Norm, ctx: Context, kept, g: jax.Array):
    steps, body = _gradient(form, g.shape, ctx)
    ins = (form.x, form.statistic, form.used, form.x)
    return run(ctx, f"gradient of rms_norm {form.x}", steps, body, ins, (form.x, form.scale.cotangent), *kept, g)


_norm = planned_op(_forward, _backward, lambda form: f"rms_norm {form.x}")


@lru_cache(maxsize=1024)
def _value(form: _Norm, shape: tuple[int, ...], scale_bytes: int, ctx: Context):
    sizes = sizes_of(form.x, shape)
    chains = Chains(
        ctx.mesh,
        scale=move(form.scale, form.used, sizes, ctx.mesh, scale_bytes, ctx.chip, "scale"),
        squares=settle(form.statistic, form.row_axes, sizes, ctx, name="mean square"),
    )

    def body(x, scale):
        wide, scale = float32(x), chains.send("scale", scale)
        mean = chains.send("squares", jnp.sum(wide * wide, axis=form.row)) / form.count
        inverse = jax.lax.rsqrt(mean + form.epsilon)
        return (
            (wide * jnp.expand_dims(inverse, form.row) * along_rows(float32(scale), x.ndim)).astype(x.dtype),
            inverse,
            scale,
        )

    return chains.steps, body


@lru_cache(maxsize=1024)
def _gradient(form: _Norm, shape: tuple[int, ...], ctx: Context):
    sizes = sizes_of(form.x, shape)
    chains = Chains(
        ctx.mesh,
        along=settle(form.statistic, form.row_axes, sizes, ctx, name="projection"),
        scale=move(form.partial_scale, form.scale.cotangent, sizes, ctx.mesh, FLOAT32, ctx.chip, "gradient of scale"),
    )

    def body(x, inverse, scale, g):
        inverse = jnp.expand_dims(inverse, form.row)
        unit, g = float32(x) * inverse, float32(g)
        d_scale = jnp.sum(g * unit, axis=range(x.ndim - len(form.row)))
        g = g * along_rows(float32(scale), x.ndim)
        # The statistic depends on every element of its row, so the gradient's projection on the row is subtracted:
        # dx = inverse · (g·scale − unit · mean(g·scale·unit)).
        mean = chains.send("along", jnp.sum(g * unit, axis=form.row)) / form.count
        d_x = (g - unit * jnp.expand_dims(mean, form.row)) * inverse
        return d_x.astype(x.dtype), chains.send("scale", d_scale).astype(scale.dtype)

    return chains.steps, body


def along_rows(scale: jax.Array, rank: int) -> jax.Array:
    """Return `scale` with leading dimensions of size 1, so that it has rank `rank` and applies to every row."""
    return jnp.expand_dims(scale, tuple(range(rank - scale.ndim)))
