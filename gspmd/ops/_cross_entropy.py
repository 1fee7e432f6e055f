"""Cross-entropy of logits whose vocabulary is sharded, without gathering the logits."""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from gspmd.annotate.errors import Fault, SpecError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops._softmax import Normaliser
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.options import number
from gspmd.ops.interface.planned_op import float32, planned_op, read, shard_index


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    spec: str | Spec,
    *,
    mask: jax.Array | None = None,
    z_loss: float = 0.0,
) -> jax.Array:
    """Compute the loss of every token: log Σ exp(logits) − logits[label] + z_loss · (log Σ exp(logits))².

    Communication: three all-reduces of [B, L] float32 over the mesh axes of V, for the maximum, the sum and the label's
    logit. The gradient, softmax(logits) − onehot(label), is computed shard by shard and sends nothing.

    Args:
        logits: [B, L, V]; the vocabulary is the last dimension.
        labels: [B, L] integers, sharded like the logits: their spec is `spec` with V removed. A label outside [0, V) is
            treated as if its logit were 0, so mask such tokens.
        spec: the spec of `logits`, such as `"BLV_x"`.
        mask: [B, L], sharded like the labels. The loss of each token is multiplied by the token's mask. Where the mask
            is 0, the loss and its gradient are 0, whatever the logits are. The mask has no gradient.
        z_loss: the weight of the squared log-normalizer, (log Σ exp(logits))².

    Returns:
        [B, L] float32 losses in nats, sharded like the labels. The caller takes their sum or mean.

    Raises:
        SpecError: the spec does not fit the array or the mesh, or `labels` or `mask` has the wrong shape.
        PlanError: `logits` are a partial sum.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     logits = gspmd.annotate(jnp.log(jnp.array([[[1.0, 2.0, 5.0]]])), "BLV_x")
        ...     print(cross_entropy(logits, jnp.array([[1]]), "BLV_x").round(4))
        [[1.3863]]

    Source: Shoeybi et al. 2019, *Megatron-LM* (arXiv 1909.08053), section 3, the vocabulary-parallel loss; the z-loss
        is Chowdhery et al. 2022, *PaLM* (arXiv 2204.02311), section 5.
    """
    ctx = context()
    doing = f"cannot take the cross-entropy of '{spec}'"
    logits, labels = array(doing, "logits", logits, "real numbers"), array(doing, "labels", labels, "integers")
    mask = None if mask is None else array(doing, "mask", mask, "real numbers")
    z_loss = number(doing, "z_loss", z_loss)
    spec = read(doing, spec, logits, ctx)
    if not spec.dims:
        raise SpecError(f"{doing}: the logits are a scalar, which has no vocabulary.\n  Pass logits such as 'BLV_x'.")
    form = _Loss(Normaliser(spec, spec.dims[-1]), z_loss)
    _check_shapes(doing, spec, logits, labels, mask)
    if labels.dtype.itemsize > 4:  # clipped first, so that the cast to 32 bits makes no invalid label valid
        labels = jnp.clip(labels, -1 if jnp.issubdtype(labels.dtype, jnp.signedinteger) else 0, logits.shape[-1])
    labels = labels.astype(jnp.int32)
    weights = None if mask is None else jax.lax.stop_gradient(float32(mask))
    if ctx.compiler_chooses:
        rows = form.rows
        arrays = (logits, labels) if weights is None else (logits, labels, weights)
        ins, name = (spec, rows, rows)[: len(arrays)], f"cross_entropy {spec}"
        return left_to_compiler(ctx, partial(_plain, z_loss), ins, rows, *arrays, name=name)
    return _loss(form, ctx, logits, labels, weights)


@dataclass(frozen=True)
class _Loss:
    normaliser: Normaliser
    z_loss: float

    @property
    def logits(self) -> Spec:
        return self.normaliser.x

    @property
    def rows(self) -> Spec:
        return self.normaliser.statistic

    def hits(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Return this device's part of the labels' one-hot rows, as booleans.

        The row of a label is all False if the label is not in this device's part of the vocabulary.
        """
        here = labels - shard_index(self.logits.axes[-1]) * logits.shape[-1]
        return here[..., None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def _check_shapes(doing: str, spec: Spec, logits: jax.Array, labels: jax.Array, mask: jax.Array | None) -> None:
    rows = spec.without(spec.dims[-1])
    for name, x in (("labels", labels), ("mask", mask)):
        if x is not None and x.shape != logits.shape[:-1]:
            fact = f"the {name} must have the spec '{rows}' and shape {logits.shape[:-1]}, but the shape is {x.shape}."
            raise report(SpecError, doing, [Fault(str(spec), 0, len(str(rows)) or 1, fact)]) from None


def _plain(z_loss: float, logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    wide = _counted(logits, weights)
    top = jax.lax.stop_gradient(jnp.max(wide, axis=-1, initial=-jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.sum(jnp.exp(wide - top[..., None]), axis=-1)
    hits = labels[..., None] == jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    return _weighted(z_loss, top, total, jnp.sum(jnp.where(hits, wide, 0.0), axis=-1), weights)


def _counted(logits: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Return the logits in float32, with zeros in the rows whose mask is 0.

    Without the zeros, an infinity or a NaN in such a row would make the loss NaN, even after it is multiplied by 0.
    """
    return float32(logits) if weights is None else jnp.where(weights[..., None] == 0, 0.0, float32(logits))


def _weighted(z_loss: float, top, total, picked, weights: jax.Array | None) -> jax.Array:
    loss = (top - picked) + jnp.log(total)
    if z_loss:  # a z_loss of 0 must not multiply the square, which may be infinite
        loss += z_loss * (top + jnp.log(total)) ** 2
    return loss if weights is None else loss * weights


def _forward(form: _Loss, ctx: Context, logits: jax.Array, labels: jax.Array, weights: jax.Array | None):
    steps, body = _value(form, logits.shape, ctx)
    arrays = (logits, labels) if weights is None else (logits, labels, weights)
    ins = (form.logits, form.rows, form.rows)[: len(arrays)]
    loss, *parts = run(ctx, f"cross_entropy {form.logits}", steps, body, ins, (form.rows,) * 3, *arrays)
    return loss, (logits, labels, weights, *parts)


def _backward(form: _Loss, ctx: Context, kept, g: jax.Array):
    logits, labels, weights, *parts = kept
    arrays = (logits, labels, *parts, g) if weights is None else (logits, labels, *parts, g, weights)
    ins = (form.logits, *(form.rows,) * (len(arrays) - 1))
    name = f"gradient of cross_entropy {form.logits}"
    return run(ctx, name, (), _gradient(form), ins, form.logits, *arrays), None, None


_loss = planned_op(_forward, _backward, lambda form: f"cross_entropy {form.logits}")


@lru_cache(maxsize=1024)
def _value(form: _Loss, shape: tuple[int, ...], ctx: Context):
    chains = form.normaliser.chains(shape, ctx, picked="label's logit")

    def body(logits, labels, weights=None):
        wide = _counted(logits, weights)
        top, total = form.normaliser.local(wide, chains)
        mine = jnp.sum(jnp.where(form.hits(logits, labels), wide, 0.0), axis=-1)
        return _weighted(form.z_loss, top, total, chains.send("picked", mine), weights), top, total

    return chains.steps, body


@lru_cache(maxsize=1024)
def _gradient(form: _Loss):
    # d loss / d logits = softmax · (1 + 2 z log Z) − hits, from the statistics that the forward pass kept for each row,
    # so nothing is sent.
    def body(logits, labels, top, total, g, weights=None):
        g = g if weights is None else g * weights
        share = jnp.exp(_counted(logits, weights) - top[..., None]) / total[..., None]
        if form.z_loss:
            share *= (1.0 + 2.0 * form.z_loss * (top + jnp.log(total)))[..., None]
        return ((share - form.hits(logits, labels)) * g[..., None]).astype(logits.dtype)

    return body
