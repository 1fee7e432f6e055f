"""Products of rows that are sorted by expert with their expert's weights: no row is multiplied by another's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gspmd.annotate.errors import SpecError
from gspmd.moe import inputs
from gspmd.moe.dropless.blocks import rows_times_rows, rows_times_weights
from gspmd.moe.dropless.platform import current_platform

FORMS = ("ragged", "blocks")
# The gradient of ragged_dot's weights: [R, E], [R, F] -> [X, E, F], R being the ragged dimension.
_RAGGED_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
_RAGGED_BACK = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, form: str | None = None) -> jax.Array:
    """Multiply every row by the weights of its own expert; the rows of an expert stand together, in experts' order.

        y[r] = rows[r] · weights[x]      for sizes[0] + … + sizes[x - 1] <= r < sizes[0] + … + sizes[x]

    "ragged" is `lax.ragged_dot`, a grouped kernel on GPUs and TPUs; XLA:CPU multiplies every row by every expert's
    weights instead. "blocks" is a loop over blocks of rows of one expert, whose time grows with the rows alone.

    Args:
        rows: [R, E], sorted by expert.
        weights: [X, E, F].
        sizes: [X] int32, the rows of each expert, at most R together. Rows beyond them answer 0 and have gradient 0.
        form: "ragged" or "blocks"; None is "blocks" on CPUs, and "ragged" elsewhere.

    Returns:
        [R, F], of the rows' dtype, accumulated in float32.

    Raises:
        SpecError: arrays that do not fit, or sizes that are more than the rows.
        PlanError: a form that there is not.

    Example:
        >>> rows, weights = jnp.ones((3, 1)), jnp.array([[[2.0]], [[3.0]], [[5.0]]])
        >>> grouped_matmul(rows, weights, jnp.array([1, 0, 1]))[:, 0].tolist()
        [2.0, 5.0, 0.0]

    Source: Gale et al., *MegaBlocks*, arXiv 2211.15841, §5 (blocks of rows in place of capacity).

    Differs: no row is padded in memory; the last block of an expert reads beyond it, and writes only its own rows.
    """
    doing = "multiply rows by their experts' weights"
    form = _picked(form)
    inputs.choice(doing, "form", form, FORMS)
    rows = inputs.array(doing, "rows", rows, "RE", real=True)
    weights = inputs.array(doing, "weights", weights, "XEF", real=True)
    sizes = inputs.array(doing, "sizes", sizes, "X", whole=True)
    fact = _fact(rows.shape, weights.shape, sizes)
    if fact:
        raise SpecError(f"cannot {doing}: {fact}\n  Give rows [R, E], weights [X, E, F], and sizes [X] of R together.")
    return _grouped(form, rows, weights, sizes.astype(jnp.int32))


def grouped_back(cotangent: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """The gradient of `grouped_matmul`'s rows: cotangents [R, F] by the transposed weights [X, E, F], [R, E]."""
    return _times(_picked(None), cotangent, weights, sizes.astype(jnp.int32), back=True)


def grouped_outer(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    """The gradient of `grouped_matmul`'s weights, of rows [R, E] and cotangents [R, F]: [X, E, F] in float32."""
    return _outer(_picked(None), rows, cotangent, sizes.astype(jnp.int32))


def _picked(form: str | None) -> str:
    return form if form is not None else ("blocks" if current_platform() == "cpu" else "ragged")


def _fact(rows: tuple, weights: tuple, sizes: jax.Array) -> str:
    if sizes.shape != weights[:1] or rows[1] != weights[1]:
        return f"the shapes do not agree; found {rows}, {weights}, {sizes.shape}."
    if not weights[0]:
        return f"weights {weights} are those of no experts."
    known = np.asarray(sizes) if inputs.is_known(sizes) else np.zeros(0, int)
    if np.any(known < 0) or np.sum(known) > rows[0]:
        return f"sizes are {known.tolist()}, of {rows[0]} rows; none is below 0, nor all together above."
    return ""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(form: str, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _times(form, rows, weights, sizes, back=False)


def _forward(form, rows, weights, sizes):
    return _grouped(form, rows, weights, sizes), (rows, weights, sizes)


def _backward(form, saved, cotangent):
    rows, weights, sizes = saved
    gradient = _outer(form, rows, cotangent, sizes).astype(weights.dtype)
    return _times(form, cotangent, weights, sizes, back=True), gradient, None


_grouped.defvjp(_forward, _backward)


def _times(form: str, rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, back: bool) -> jax.Array:
    """Rows by their expert's weights [X, E, F]: [R, E] to [R, F], or back, [R, F] to [R, E]."""
    if form == "blocks":
        return rows_times_weights(rows, weights, sizes, transposed=back)
    found = (_ragged_back if back else _ragged)(rows, weights, sizes)
    owned = jnp.arange(len(rows)) < jnp.sum(sizes)
    return jnp.where(owned[:, None], found, 0).astype(rows.dtype)


def _outer(form: str, rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    """Σ over each expert's rows of row ⊗ cotangent: [R, E], [R, F] to [X, E, F] float32."""
    if form == "blocks":
        return rows_times_rows(rows, cotangent, sizes)
    # A kernel may read rows that no expert owns, and 0 times what stands there has to be 0.
    owned = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    kept, answer = jnp.where(owned, rows, 0), jnp.where(owned, cotangent, 0)
    return _ragged_rows(kept, answer, sizes)


# Under vmap one after the other: JAX batches a grouped product over its rows, weights and sizes together or not at all.
@jax.custom_batching.sequential_vmap
def _ragged(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(rows, weights, sizes, preferred_element_type=jnp.float32)


@jax.custom_batching.sequential_vmap
def _ragged_back(cotangent: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(cotangent, weights, sizes, _RAGGED_BACK, preferred_element_type=jnp.float32)


@jax.custom_batching.sequential_vmap
def _ragged_rows(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(rows, cotangent, sizes, _RAGGED_ROWS, preferred_element_type=jnp.float32)
