"""Grouped products: rows are sorted by expert, and each row is multiplied only by the weights of its own expert."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gspmd.annotate.errors import SpecError
from gspmd.moe import inputs
from gspmd.moe.dropless.blocks import rows_times_rows, rows_times_weights
from gspmd.moe.platform import grouped_form

FORMS = ("ragged", "blocks")
# The gradient of ragged_dot for its weights: [R, E], [R, F] -> [X, E, F], where R is the ragged dimension.
_RAGGED_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
_RAGGED_BACK = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, form: str | None = None) -> jax.Array:
    """Multiply every row by the weights of its own expert; rows are sorted by expert.

        y[r] = rows[r] · weights[x]      for sizes[0] + … + sizes[x - 1] <= r < sizes[0] + … + sizes[x]

    Form "ragged" is `lax.ragged_dot`. On TPUs it is a grouped kernel, but on CPUs and GPUs it multiplies every row by
    every expert's weights (docs/gpus.md). Form "blocks" is a loop over blocks of rows of one expert; its time grows
    only with the number of rows.

    Args:
        rows: [R, E], sorted by expert.
        weights: [X, E, F].
        sizes: [X] int32, the number of rows of each expert, at most R in total. Rows after the last expert's rows give
            0 and have gradient 0.
        form: "ragged" or "blocks"; None means "ragged" on TPUs, and "blocks" elsewhere.

    Returns:
        [R, F], in the rows' dtype, accumulated in float32.

    Raises:
        SpecError: the shapes do not agree, or the sizes add up to more than R.
        PlanError: `form` is unknown.

    Example:
        >>> rows, weights = jnp.ones((3, 1)), jnp.array([[[2.0]], [[3.0]], [[5.0]]])
        >>> grouped_matmul(rows, weights, jnp.array([1, 0, 1]))[:, 0].tolist()
        [2.0, 5.0, 0.0]

    Source: Gale et al., *MegaBlocks*, arXiv 2211.15841, §5 (blocks of rows instead of a capacity).

    Differs: rows are not padded in memory. The last block of an expert may read rows of later experts, but writes only
    rows of its own expert.
    """
    doing = "multiply rows by their experts' weights"
    form = grouped_form() if form is None else form
    inputs.choice(doing, "form", form, FORMS)
    rows = inputs.array(doing, "rows", rows, "RE", real=True)
    weights = inputs.array(doing, "weights", weights, "XEF", real=True)
    sizes = inputs.array(doing, "sizes", sizes, "X", whole=True)
    fact = _fact(rows.shape, weights.shape, sizes)
    if fact:
        raise SpecError(f"cannot {doing}: {fact}\n  Give rows [R, E], weights [X, E, F], and sizes [X] with sum R.")
    return _grouped(form, rows, weights, sizes.astype(jnp.int32))


def grouped_back(cotangent: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the gradient [R, E] of `grouped_matmul` for its rows: the cotangents [R, F] times transposed weights."""
    return _times(grouped_form(), cotangent, weights, sizes.astype(jnp.int32), back=True)


def grouped_outer(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the float32 gradient [X, E, F] of `grouped_matmul` for its weights, from rows and cotangents [R, F]."""
    return _outer(grouped_form(), rows, cotangent, sizes.astype(jnp.int32))


def _fact(rows: tuple, weights: tuple, sizes: jax.Array | np.ndarray) -> str:
    if sizes.shape != weights[:1] or rows[1] != weights[1]:
        return f"the shapes do not agree: rows {rows}, weights {weights}, sizes {sizes.shape}."
    if not weights[0]:
        return f"weights {weights} have no experts."
    known = np.asarray(sizes) if inputs.is_known(sizes) else np.zeros(0, int)
    if np.any(known < 0) or np.sum(known) > rows[0]:
        return f"sizes are {known.tolist()}; they must not be negative, nor add up to more than the {rows[0]} rows."
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
    """Multiply each row by the weights [X, E, F] of its expert: rows [R, E] become [R, F].

    With `back`, multiply by the transposed weights: rows [R, F] become [R, E].
    """
    if form == "blocks":
        return rows_times_weights(rows, weights, sizes, transposed=back)
    product = (_ragged_back if back else _ragged)(rows, weights, sizes)
    owned = jnp.arange(len(rows)) < jnp.sum(sizes)
    return jnp.where(owned[:, None], product, 0).astype(rows.dtype)


def _outer(form: str, rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sum the outer products row ⊗ cotangent over each expert's rows: [R, E], [R, F] to [X, E, F] float32."""
    if form == "blocks":
        return rows_times_rows(rows, cotangent, sizes)
    # A kernel may read rows that belong to no expert; these may be NaN, and 0 · NaN is not 0.
    owned = (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]
    kept, answer = jnp.where(owned, rows, 0), jnp.where(owned, cotangent, 0)
    return _ragged_rows(kept, answer, sizes)


# Sequential under vmap: JAX can batch a grouped product only if rows, weights and sizes all have the batch dimension.
@jax.custom_batching.sequential_vmap
def _ragged(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(rows, weights, sizes, preferred_element_type=jnp.float32)


@jax.custom_batching.sequential_vmap
def _ragged_back(cotangent: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(cotangent, weights, sizes, _RAGGED_BACK, preferred_element_type=jnp.float32)


@jax.custom_batching.sequential_vmap
def _ragged_rows(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(rows, cotangent, sizes, _RAGGED_ROWS, preferred_element_type=jnp.float32)
