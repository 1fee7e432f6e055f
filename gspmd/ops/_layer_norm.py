"""Layer normalization over the last dimension, which may be sharded."""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops._norm import along_rows, check_row
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.options import number
from gspmd.ops.interface.planned_op import FLOAT32, STATISTIC, Chains, float32, planned_op, read, settle, sizes_of
from gspmd.planner.graph.resharding import move


def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    spec: str | Spec,
    scale_spec: str | Spec,
    bias_spec: str | Spec | None = None,
    *,
    epsilon: float = 1e-5,
) -> jax.Array:
    """Standardize, scale and shift over the last dimension: (x - mean) / sqrt(variance + ε) · scale + bias.

    Communication: two all-reduces of [B, L] float32 over the mesh axes of E, first for the mean and then for the
    variance. The gradient of `x` takes one all-reduce of [2, B, L] over the mesh axes of E. The gradients of `scale`
    and `bias` are summed over the mesh axes of B and L.

    Args:
        x: [B, L, E]; there may be any number of leading dimensions.
        scale: [E]. If the scale is not sharded like x's last dimension, it is resharded to match.
        bias: [E], resharded in the same way as the scale; None for no bias.
        spec: the spec of `x` and of the result, such as `"BLE_x"`.
        scale_spec: the spec of `scale`, such as `"E_x"`.
        bias_spec: the spec of `bias`; None if it is the same as `scale_spec`.
        epsilon: the number added to the variance.

    Returns:
        [B, L, E] in x's dtype; the arithmetic is float32.

    Raises:
        SpecError: a spec does not fit its array or the mesh; or `scale` or `bias` does not have x's last dimension as
            its only dimension; or `x` holds integers.
        PlanError: an operand is a partial sum.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     x = gspmd.annotate(jnp.array([[[1.0, 3.0, 1.0, 3.0]]]), "BLE_x")
        ...     print(layer_norm(x, jnp.ones(4), jnp.ones(4), "BLE_x", "E")[0, 0].round(3))
        [0. 2. 0. 2.]

    Source: Ba et al. 2016, *Layer Normalization* (arXiv 1607.06450), equation 4.
    """
    ctx = context()
    doing = f"cannot normalize '{spec}' with a scale '{scale_spec}'"
    x, scale = array(doing, "x", x, "real numbers"), array(doing, "the scale", scale, "real numbers")
    bias = None if bias is None else array(doing, "the bias", bias, "real numbers")
    rows = read(doing, spec, x, ctx)
    of_scale = read(doing, scale_spec, scale, ctx, weight=True)
    row_spec = scale_spec if bias_spec is None else bias_spec
    of_bias = None if bias is None else read(doing, row_spec, bias, ctx, weight=True)
    form = _LayerNorm(rows, of_scale, of_bias, number(doing, "epsilon", epsilon))
    check_row(doing, rows, of_scale, x, scale, "scale")
    if bias is not None and of_bias is not None:
        check_row(doing, rows, of_bias, x, bias, "bias")
    more = () if bias is None else (bias,)
    if ctx.compiler_chooses and not any(row.reduced for row in form.ins):
        name = f"layer_norm {form.x}"
        return left_to_compiler(ctx, partial(_plain, form.epsilon), form.ins, form.x, x, scale, *more, name=name)
    return _layer_norm(form, ctx, x, scale, *more)


@dataclass(frozen=True)
class _LayerNorm:
    x: Spec
    scale: Spec
    bias: Spec | None
    epsilon: float

    @property
    def ins(self) -> tuple[Spec, ...]:
        return (self.x, self.scale) if self.bias is None else (self.x, self.scale, self.bias)

    @property
    def statistic(self) -> Spec:
        """The spec of a statistic such as the mean, which has one value per row."""
        return self.x.without(self.x.dims[-1])

    @property
    def pair(self) -> Spec:
        """The spec of two statistics that are stacked along a new first dimension, with a letter that `x` lacks."""
        rows = self.statistic
        letter = next(letter for letter in "SPQRUWAB" if letter not in self.x.dims)
        return Spec((letter, *rows.dims), ((), *rows.axes))

    @property
    def used(self) -> Spec:
        """The spec of scale and bias after they are moved to the mesh axes of x's last dimension."""
        return Spec(self.x.dims[-1:], self.x.axes[-1:])

    @property
    def partial_row(self) -> Spec:
        """The spec that the gradient of scale or bias has before this gradient is summed over devices."""
        return self.used.with_partial(tuple(axis for axes in self.x.axes[:-1] for axis in axes))


def _plain(epsilon: float, x: jax.Array, scale: jax.Array, *bias: jax.Array) -> jax.Array:
    wide = float32(x)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return _scaled(unit, scale, bias).astype(x.dtype)


def _scaled(unit: jax.Array, scale: jax.Array, bias: tuple[jax.Array, ...]) -> jax.Array:
    scaled = unit * along_rows(float32(scale), unit.ndim)
    return scaled + along_rows(float32(bias[0]), unit.ndim) if bias else scaled


def _forward(form: _LayerNorm, ctx: Context, x: jax.Array, scale: jax.Array, *bias: jax.Array):
    steps, body = _value(form, x.shape, tuple(row.dtype.itemsize for row in (scale, *bias)), ctx)
    outs = (form.x, form.statistic, form.statistic, form.used)
    y, mean, inverse, used = run(ctx, f"layer_norm {form.x}", steps, body, form.ins, outs, x, scale, *bias)
    mean, inverse = checkpoint_name((mean, inverse), STATISTIC)
    return y, (x, mean, inverse, used, bias)


def _backward(form: _LayerNorm, ctx: Context, kept, g: jax.Array):
    *arrays, bias = kept
    steps, body = _gradient(form, g.shape, tuple(row.dtype for row in bias), ctx)
    ins = (form.x, form.statistic, form.statistic, form.used, form.x)
    outs = tuple(spec.cotangent for spec in form.ins)
    return run(ctx, f"gradient of layer_norm {form.x}", steps, body, ins, outs, *arrays, g)


_layer_norm = planned_op(_forward, _backward, lambda form: f"layer_norm {form.x}")


@lru_cache(maxsize=1024)
def _value(form: _LayerNorm, shape: tuple[int, ...], widths: tuple[int, ...], ctx: Context):
    sizes = sizes_of(form.x, shape)
    rows = dict(zip(("scale", "bias"), zip(form.ins[1:], widths)))
    moves = {n: move(src, form.used, sizes, ctx.mesh, width, ctx.chip, n) for n, (src, width) in rows.items()}
    # A single all-reduce of the sum and the sum of squares would send the same bytes. But the variance, as the
    # difference of the two, has no correct digits if the mean is some thousand standard deviations from zero. Gathering
    # the mean and variance of each device's part sends more bytes on three or more devices.
    mean, squares = (settle(form.statistic, form.x.axes[-1], sizes, ctx, name=name) for name in ("mean", "variance"))
    chains = Chains(ctx.mesh, **moves, mean=mean, variance=squares)

    def body(x, *given):
        wide, (scale, *bias) = float32(x), (chains.send(name, row) for name, row in zip(rows, given))
        mean = chains.send("mean", jnp.sum(wide, axis=-1)) / shape[-1]
        wide = wide - mean[..., None]
        variance = chains.send("variance", jnp.sum(wide * wide, axis=-1)) / shape[-1]
        inverse = jax.lax.rsqrt(variance + form.epsilon)
        return _scaled(wide * inverse[..., None], scale, tuple(bias)).astype(x.dtype), mean, inverse, scale

    return chains.steps, body


@lru_cache(maxsize=1024)
def _gradient(form: _LayerNorm, shape: tuple[int, ...], dtypes: tuple, ctx: Context):
    sizes = sizes_of(form.x, shape)
    rows = dict(zip(("scale", "bias"), form.ins[1:]))
    home = {
        name: move(form.partial_row, row.cotangent, sizes, ctx.mesh, FLOAT32, ctx.chip, f"gradient of {name}")
        for name, row in rows.items()
    }
    sizes = sizes_of(form.pair, (2, *shape[:-1]))
    along = settle(form.pair, form.x.axes[-1], sizes, ctx, name="mean and projection")
    chains = Chains(ctx.mesh, along=along, **home)

    def body(x, mean, inverse, scale, g):
        unit, g = (float32(x) - mean[..., None]) * inverse[..., None], float32(g)
        leading = range(x.ndim - 1)
        of_rows = (jnp.sum(g * unit, axis=leading), jnp.sum(g, axis=leading))
        g = g * along_rows(float32(scale), x.ndim)
        # Mean and variance depend on the row, so the gradient's mean and its projection on the row are subtracted.
        sums = jnp.stack([jnp.sum(g, axis=-1), jnp.sum(g * unit, axis=-1)])
        level, slope = chains.send("along", sums)[..., None] / shape[-1]
        d_x = ((g - level - unit * slope) * inverse[..., None]).astype(x.dtype)
        of_rows = (chains.send(name, d) for name, d in zip(rows, of_rows))
        return (d_x, *(d.astype(dtype) for d, dtype in zip(of_rows, (scale.dtype, *dtypes))))

    return chains.steps, body
