"""The position of the largest element in a row that is sharded over devices."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import SpecError, report, shown
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.planned_op import Chains, dimension, fault, read, settle, shard_index, sizes_of

_POSITION = jnp.iinfo(jnp.int32)

PADDING = -1e30
"""The logit of a token that pads a vocabulary; it is finite, so that 0 · logit is 0 and not NaN."""


def argmax(logits: jax.Array, spec: str | Spec, dim: str) -> jax.Array:
    """Return the position of the largest element along one dimension; ties go to the lowest position.

    NaN counts as -inf, and so does -1e30, the logit of tokens that pad a vocabulary. Padding is at the end of the
    vocabulary, so the result is never a position of padding, even if all other elements of a row are -inf.

    Communication: two all-reduces of [B, L] over the mesh axes of `dim`, one for the maximum and one for the lowest
    position of the maximum.

    Args:
        logits: [B, L, V], or any shape.
        spec: the spec of `logits`, such as `"BLV_x"`.
        dim: the dimension to search, such as `"V"`.

    Returns:
        [B, L] int32 positions in the unsharded dimension, sharded like `logits`: their spec is `spec` with `dim`
        removed.

    Raises:
        SpecError: the spec does not fit the array or the mesh, or lacks the dimension; or the dimension has size 0.
        PlanError: `logits` are a partial sum.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     print(argmax(gspmd.annotate(jnp.array([[0.0, 2.0, 2.0]]), "BV_x"), "BV_x", "V"))
        [1]

    Differs: `jnp.argmax` returns the position of the first NaN.
    """
    ctx = context()
    doing = f"cannot take the argmax of '{spec}' over {shown(dim)}"
    logits = array(doing, "logits", logits, "real numbers")
    spec = read(doing, spec, logits, ctx)
    at = dimension(doing, spec, dim)
    if not logits.shape[at]:
        raise report(SpecError, doing, [fault(spec, dim, f"{dim} has size 0, so no position has the largest value.")])
    logits = jax.lax.stop_gradient(logits)
    if ctx.compiler_chooses:
        return left_to_compiler(ctx, partial(_plain, at), (spec,), spec.without(dim), logits, name=f"argmax {spec}")
    return _argmax(spec, at, ctx, logits)


def _plain(at: int, logits: jax.Array) -> jax.Array:
    return jnp.argmax(_ranked(logits), axis=at).astype(jnp.int32)


def _ranked(logits: jax.Array) -> jax.Array:
    """Return the logits with -inf in place of NaN and of padding, so that they can be compared."""
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        return logits
    padding = jnp.asarray(PADDING, logits.dtype)  # rounded as in padded logits, to the logits' dtype
    return jnp.where(jnp.isnan(logits) | (logits == padding), -jnp.inf, logits)


def _argmax(spec: Spec, at: int, ctx: Context, logits: jax.Array) -> jax.Array:
    steps, body = _value(spec, at, logits.shape, logits.dtype.itemsize, ctx)
    return run(ctx, f"argmax {spec}", steps, body, (spec,), spec.without(spec.dims[at]), logits)


@lru_cache(maxsize=1024)
def _value(spec: Spec, at: int, shape: tuple[int, ...], width: int, ctx: Context):
    rows, axes, sizes = spec.without(spec.dims[at]), spec.axes[at], sizes_of(spec, shape)
    chains = Chains(
        ctx.mesh,
        biggest=settle(rows, axes, sizes, ctx, width, "maximum", "max"),
        lowest=settle(rows, axes, sizes, ctx, _POSITION.dtype.itemsize, "position", "max"),
    )

    def body(logits):
        return first_maximum(_ranked(logits), at, axes, chains)[1]

    return chains.steps, body


def first_maximum(x: jax.Array, at: int, axes: tuple[str, ...], chains: Chains) -> tuple[jax.Array, jax.Array]:
    """Return the largest value along dimension `at`, and the lowest position that has this value.

    The call must be inside a shard_map. The dimension is sharded over the mesh axes `axes`. `chains` must have two
    all-reduces over these axes: `biggest` for the value and `lowest` for the int32 position.
    """
    position = jnp.argmax(x, axis=at).astype(_POSITION.dtype) + shard_index(axes) * x.shape[at]
    mine = jnp.max(x, axis=at)
    best = chains.send("biggest", mine, reduce="max")
    candidate = jnp.where(mine == best, position, _POSITION.max)
    # The plans' all-reduces have a maximum and no minimum; the lowest position is the largest negated one.
    return best, -chains.send("lowest", -candidate, reduce="max")
