"""Logsumexp and softmax over a dimension that may be sharded; only statistics are sent, and nothing is gathered."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import SpecError, shown
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.planned_op import Chains, dimension, float32, planned_op, read, settle, sizes_of
from gspmd.planner.steps import Step


def logsumexp(x: jax.Array, spec: str | Spec, dim: str) -> jax.Array:
    """Compute the logarithm of the sum of exponentials over one dimension: log Σ exp(x).

    Communication: two all-reduces of [B, L] float32 over the mesh axes of `dim`, first for the maximum and then for the
    sum. The gradient sends nothing.

    Args:
        x: [B, L, V], or any shape.
        spec: the spec of `x`, such as `"BLV_x"`.
        dim: the dimension to sum over, such as `"V"`.

    Returns:
        [B, L] float32, sharded like `x`: its spec is `spec` with `dim` removed.

    Raises:
        SpecError: the spec does not fit the array or the mesh, or lacks the dimension.
        PlanError: `x` is a partial sum.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     x = gspmd.annotate(jnp.log(jnp.array([[1.0, 2.0, 5.0]])), "BV_x")
        ...     print(logsumexp(x, "BV_x", "V").round(4))
        [2.0794]

    Source: Blanchard, Higham and Higham 2021, *Accurately computing the log-sum-exp and softmax functions*, section 3.
    """
    form, x, ctx = _read(f"cannot take the logsumexp of '{spec}' over {shown(dim)}", x, spec, dim)
    if ctx.compiler_chooses:
        plain = partial(_plain_logsumexp, form.at)
        return left_to_compiler(ctx, plain, (form.x,), form.statistic, x, name=f"logsumexp {form.x}")
    return _logsumexp(form, ctx, x)


def softmax(x: jax.Array, spec: str | Spec, dim: str) -> jax.Array:
    """Compute the softmax over one dimension: exp(x) / Σ exp(x).

    Communication: all-reduces of [B, L] float32 over the mesh axes of `dim`, two in the forward pass and one in the
    gradient.

    Args:
        x: [B, L, V], or any shape.
        spec: the spec of `x` and of the result, such as `"BLV_x"`.
        dim: the dimension over which the result sums to one, such as `"V"`.

    Returns:
        [B, L, V] in x's dtype; the arithmetic is float32.

    Raises:
        SpecError: the spec does not fit the array or the mesh, or lacks the dimension; or `x` holds integers.
        PlanError: `x` is a partial sum.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     x = gspmd.annotate(jnp.log(jnp.array([[1.0, 2.0, 5.0]])), "BV_x")
        ...     print(softmax(x, "BV_x", "V").round(4))
        [[0.125 0.25  0.625]]

    Source: Blanchard, Higham and Higham 2021, *Accurately computing the log-sum-exp and softmax functions*, section 3.
    """
    doing = f"cannot take the softmax of '{spec}' over {shown(dim)}"
    form, x, ctx = _read(doing, x, spec, dim)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise SpecError(f"{doing}: x is {x.dtype}.\n  Cast x to a floating dtype: the result has the dtype of x.")
    if ctx.compiler_chooses:
        return left_to_compiler(ctx, partial(_plain_softmax, form.at), (form.x,), form.x, x, name=f"softmax {form.x}")
    return _softmax(form, ctx, x)


@dataclass(frozen=True)
class Normaliser:
    """The specs of a computation of log Σ exp over the dimension `dim` of `x`."""

    x: Spec
    dim: str

    @property
    def at(self) -> int:
        """The index of dimension `dim` in `x`."""
        return self.x.dims.index(self.dim)

    @property
    def statistic(self) -> Spec:
        """The spec of a statistic such as the maximum, which has one value per row."""
        return self.x.without(self.dim)

    def over(self, sizes: Mapping[str, int], ctx: Context, name: str, reduce: str = "sum") -> tuple[Step, ...]:
        """Return the steps that reduce one statistic over the mesh axes of `dim`; `name` is its name in the plan."""
        return settle(self.statistic, self.x.axes_of(self.dim), sizes, ctx, name=name, reduce=reduce)

    def chains(self, shape: tuple[int, ...], ctx: Context, **more: str) -> Chains:
        """Return the chains that reduce the maximum, the sum and further sums over the mesh axes of `dim`.

        `more` has the further sums: the key of each is the name of its chain, and the value is its name in the plan.
        """
        sizes = sizes_of(self.x, shape)
        sums = {key: self.over(sizes, ctx, name) for key, name in {"total": "sum", **more}.items()}
        return Chains(ctx.mesh, biggest=self.over(sizes, ctx, "maximum", "max"), **sums)

    def local(self, x: jax.Array, chains: Chains) -> tuple[jax.Array, jax.Array]:
        """Return the maximum m along `dim` and Σ exp(x - m), reduced over devices, from this device's float32 shard.

        The call must be inside a shard_map. The results are separate because m + log Σ, if m is large, has no digits
        left for the sum.
        """
        top = chains.send("biggest", jnp.max(x, axis=self.at, initial=-jnp.inf), reduce="max")
        top = jnp.where(jnp.isfinite(top), top, 0.0)  # a row of -inf has the logsumexp -inf, not a NaN
        return top, chains.send("total", jnp.sum(jnp.exp(x - self.along(top)), axis=self.at))

    def along(self, statistic: jax.Array) -> jax.Array:
        """Return a statistic with the reduced dimension added back, with size 1."""
        return jnp.expand_dims(statistic, self.at)


def _read(doing: str, x: jax.Array, spec: str | Spec, dim: str) -> tuple[Normaliser, jax.Array, Context]:
    ctx = context()
    x = array(doing, "x", x, "real numbers")
    spec = read(doing, spec, x, ctx)
    dimension(doing, spec, dim)
    return Normaliser(spec, dim), x, ctx


def _plain_logsumexp(at: int, x: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(float32(x), axis=at)


def _plain_softmax(at: int, x: jax.Array) -> jax.Array:
    return jax.nn.softmax(float32(x), axis=at).astype(x.dtype)


def _logsumexp_forward(form: Normaliser, ctx: Context, x: jax.Array):
    steps, body = _logsumexp_value(form, x.shape, ctx)
    y, *parts = run(ctx, f"logsumexp {form.x}", steps, body, (form.x,), (form.statistic,) * 3, x)
    return y, (x, *parts)


def _logsumexp_backward(form: Normaliser, ctx: Context, kept, g: jax.Array):
    ins = (form.x, *(form.statistic,) * 3)
    return (run(ctx, f"gradient of logsumexp {form.x}", (), _logsumexp_gradient(form), ins, form.x, *kept, g),)


_logsumexp = planned_op(_logsumexp_forward, _logsumexp_backward, lambda form: f"logsumexp {form.x}")


@lru_cache(maxsize=1024)
def _logsumexp_value(form: Normaliser, shape: tuple[int, ...], ctx: Context):
    chains = form.chains(shape, ctx)

    def body(x):
        top, total = form.local(float32(x), chains)
        return top + jnp.log(total), top, total

    return chains.steps, body


@lru_cache(maxsize=1024)
def _logsumexp_gradient(form: Normaliser):
    # dx = g · exp(x − m) / Σ, with m and Σ kept from the forward pass, so nothing is sent.
    def body(x, top, total, g):
        return (form.along(g / total) * jnp.exp(float32(x) - form.along(top))).astype(x.dtype)

    return body


def _softmax_forward(form: Normaliser, ctx: Context, x: jax.Array):
    steps, body = _softmax_value(form, x.shape, ctx)
    y = run(ctx, f"softmax {form.x}", steps, body, (form.x,), form.x, x)
    return y, y


def _softmax_backward(form: Normaliser, ctx: Context, y: jax.Array, g: jax.Array):
    steps, body = _softmax_gradient(form, y.shape, ctx)
    return (run(ctx, f"gradient of softmax {form.x}", steps, body, (form.x, form.x), form.x, y, g),)


_softmax = planned_op(_softmax_forward, _softmax_backward, lambda form: f"softmax {form.x}")


@lru_cache(maxsize=1024)
def _softmax_value(form: Normaliser, shape: tuple[int, ...], ctx: Context):
    chains = form.chains(shape, ctx)

    def body(x):
        wide = float32(x)
        top, total = map(form.along, form.local(wide, chains))
        return (jnp.exp(wide - top) / total).astype(x.dtype)

    return chains.steps, body


@lru_cache(maxsize=1024)
def _softmax_gradient(form: Normaliser, shape: tuple[int, ...], ctx: Context):
    chains = Chains(ctx.mesh, along=form.over(sizes_of(form.x, shape), ctx, "projection"))

    # dx = y · g − y · Σ y · g, so the gradient sends one sum.
    def body(y, g):
        share = float32(y) * float32(g)
        mean = chains.send("along", jnp.sum(share, axis=form.at))
        return (share - float32(y) * form.along(mean)).astype(y.dtype)

    return chains.steps, body
