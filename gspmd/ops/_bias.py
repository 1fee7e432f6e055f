"""The addition of a bias over some dimensions of a tensor, for any spec of the bias and any spec of the tensor."""

from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import Fault, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.planned_op import FLOAT32, Chains, float32, planned_op, read, sizes_of
from gspmd.planner.graph.resharding import move


def add_bias(x: jax.Array, bias: jax.Array, spec: str | Spec, bias_spec: str | Spec) -> jax.Array:
    """Add a bias over some dimensions of a tensor: x + bias, the same at every index of the tensor's other dimensions.

    The forward pass sends nothing if the bias is already sharded like the same dimensions of `x`. The gradient of the
    bias is summed over the mesh axes of the other dimensions and gets the spec of the bias.

    Args:
        x: [B, L, F], [B, L, H, D], or the slots of experts [G, X, C, F].
        bias: [F], [H, D], or [X, F]. The dimensions of the bias are dimensions of `x`, in the order of `x`. If the bias
            is not sharded like these dimensions of `x`, it is resharded to match.
        spec: the spec of `x` and of the result, such as `"B_xLH_yD"`.
        bias_spec: the spec of `bias`, such as `"H_yD"`.

    Returns:
        [B, L, F], the shape of `x`, in x's dtype. The addition is in this dtype too.

    Raises:
        SpecError: a spec does not fit its array or the mesh; or the dimensions of the bias are not dimensions of `x` in
            the order of `x`; or the bias is floating-point and `x` holds integers.
        PlanError: an operand is a partial sum.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     x = gspmd.annotate(jnp.ones((1, 2, 3)), "BLF_x")
        ...     print(add_bias(x, jnp.arange(3.0), "BLF_x", "F")[0, 0])
        [1. 2. 3.]
    """
    ctx = context()
    doing = f"cannot add a bias '{bias_spec}' to '{spec}'"
    x, bias = array(doing, "x", x, "real numbers"), array(doing, "the bias", bias, "real numbers")
    if jnp.issubdtype(bias.dtype, jnp.floating) > jnp.issubdtype(x.dtype, jnp.floating):
        raise SpecError(
            f"{doing}: x is {x.dtype}, but the bias is {bias.dtype}.\n  Cast x: the sum has the dtype of x."
        )
    form = _Bias(read(doing, spec, x, ctx), read(doing, bias_spec, bias, ctx, weight=True))
    over = tuple(dim for dim in form.x.dims if dim in form.bias.dims)
    if not over or form.bias.dims != over or bias.shape != tuple(x.shape[form.x.dims.index(dim)] for dim in over):
        text, letters = str(form.bias), "".join(form.x.dims)
        fact = f"x is {letters} of shape {x.shape}, and the bias {''.join(form.bias.dims)} of shape {bias.shape}."
        remedy = "The dimensions of a bias must be dimensions of x, in the order of x and with the sizes of x."
        raise report(SpecError, doing, [Fault(text, 0, len(text), fact, remedy)]) from None
    if ctx.compiler_chooses and not form.bias.reduced:
        return left_to_compiler(ctx, _adding(form.others), (form.x, form.bias), form.x, x, bias, name=f"bias {form.x}")
    return _bias(form, ctx, x, bias)


@dataclass(frozen=True)
class _Bias:
    x: Spec
    bias: Spec

    @property
    def used(self) -> Spec:
        """The spec of the bias after it is moved to the mesh axes of `x`."""
        return Spec(self.bias.dims, tuple(map(self.x.axes_of, self.bias.dims)))

    @property
    def others(self) -> tuple[int, ...]:
        """The indices of the dimensions of `x` that the bias does not have."""
        return tuple(at for at, dim in enumerate(self.x.dims) if dim not in self.bias.dims)

    @property
    def partial_bias(self) -> Spec:
        """The spec that the bias's gradient has before this gradient is summed over devices."""
        return self.used.with_partial(tuple(axis for at in self.others for axis in self.x.axes[at]))


@lru_cache
def _adding(others: tuple[int, ...]):
    """Return a function (x, bias) -> x + bias, for a bias without the dimensions of `x` at the indices `others`."""
    return lambda x, bias: x + jnp.expand_dims(bias.astype(x.dtype), others)


def _forward(form: _Bias, ctx: Context, x: jax.Array, bias: jax.Array):
    steps, body = _value(form, bias.shape, bias.dtype.itemsize, ctx)
    y = run(ctx, f"bias {form.x}", steps, body, (form.x, form.bias), form.x, x, bias)
    return y, bias


def _backward(form: _Bias, ctx: Context, bias: jax.Array, g: jax.Array):
    steps, body = _gradient(form, bias.shape, bias.dtype, ctx)
    return g, run(ctx, f"gradient of bias {form.x}", steps, body, (form.x,), form.bias.cotangent, g)


_bias = planned_op(_forward, _backward, lambda form: f"bias {form.x}")


@lru_cache(maxsize=1024)
def _value(form: _Bias, shape: tuple[int, ...], width: int, ctx: Context):
    sizes = sizes_of(form.bias, shape)
    chains = Chains(ctx.mesh, bias=move(form.bias, form.used, sizes, ctx.mesh, width, ctx.chip, "bias"))
    add = _adding(form.others)
    return chains.steps, lambda x, bias: add(x, chains.send("bias", bias))


@lru_cache(maxsize=1024)
def _gradient(form: _Bias, shape: tuple[int, ...], dtype: jnp.dtype, ctx: Context):
    sizes = sizes_of(form.bias, shape)
    steps = move(form.partial_bias, form.bias.cotangent, sizes, ctx.mesh, FLOAT32, ctx.chip, "gradient of bias")
    chains = Chains(ctx.mesh, bias=steps)

    def body(g):
        return chains.send("bias", jnp.sum(float32(g), axis=form.others)).astype(dtype)

    return chains.steps, body
