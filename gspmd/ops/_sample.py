"""Sampling of a token for every row of logits whose vocabulary is sharded, without gathering the logits."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from gspmd.annotate.errors import PlanError, SpecError, shown
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import Context, context, run
from gspmd.lowerings.xla.constrained import left_to_compiler
from gspmd.ops._argmax import first_maximum
from gspmd.ops._threshold import CANDIDATES, WORDS, mass, ordered, threshold, words
from gspmd.ops.interface.operands import array
from gspmd.ops.interface.planned_op import Chains, dimension, float32, read, settle, shard_index, sizes_of
from gspmd.planner.steps import Step

IMPOSSIBLE = -1e29
"""Tokens with this logit or a lower one, such as those that pad a vocabulary, are never sampled at any temperature."""


def sample(
    logits: jax.Array,
    spec: str | Spec,
    dim: str,
    *,
    seeds: jax.Array,
    positions: jax.Array,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
) -> jax.Array:
    """Draw a token for every row from softmax(logits / temperature), among the tokens that top-k, top-p and min-p keep.

    The token is argmax(logits / temperature + Gumbel noise). The noise depends only on the seed, the position and the
    token. So a sample depends on the seed, position, logits and settings of its row, but not on other rows, the layout,
    the mesh or the lowering.

    Communication: all-reduces over the mesh axes of `dim`. The argmax takes two all-reduces of [B], and the maximum of
    the logits takes one. Top-k takes eleven all-reduces of int32: one of [B, 8], nine of [B, 7], and one of [B, 3].
    Top-p takes eleven all-reduces too, with three times as many elements in each. A filter takes no all-reduces if its
    setting is a number that turns the filter off.

    Args:
        logits: [B, V], or [B, L, V] for several positions of each row.
        spec: the spec of `logits`, such as `"BV_x"`.
        dim: the dimension of the tokens, such as `"V"`.
        seeds: [B] 32-bit integers, replicated.
        positions: [B] integers, replicated: the position of each row's token, or of the row's first token if the logits
            have a dimension L.
        temperature: the number by which the logits are divided. A temperature of 0 chooses the most likely token; if
            several tokens are equally likely, it chooses the one with the lowest id. Each of `temperature`, `top_k`,
            `top_p` and `min_p` is one number for all rows, or a replicated [B] array.
        top_k: the number k of most likely tokens to keep. Tokens as likely as the k-th are kept too. 0 keeps all.
        top_p: the total probability that the kept tokens must reach. The most likely tokens are kept. Tokens of equal
            probability are all kept or all dropped. 1 keeps all.
        min_p: the minimum probability of a kept token, as a fraction of the probability of the most likely token. 0
            keeps all.

    Returns:
        [B] or [B, L] int32 tokens, sharded like the logits: their spec is `spec` with `dim` removed. The token is -1 if
        the row has a NaN, or has no token to sample. Tokens with logits of -1e29 or less are never sampled. A logit of
        infinity counts as the largest float32.

    Raises:
        SpecError: the spec does not fit the array or the mesh, or lacks the dimension; or an argument has the wrong
            shape.
        PlanError: `logits` are a partial sum, or a setting that is not traced is out of range.

    Example:
        >>> import gspmd
        >>> with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        ...     logits = gspmd.annotate(jnp.log(jnp.array([[0.1, 0.6, 0.3]] * 4)), "BV_x")
        ...     rows = jnp.arange(4)
        ...     print(sample(logits, "BV_x", "V", seeds=rows, positions=jnp.zeros(4, int), top_k=2))
        ...     print(sample(logits, "BV_x", "V", seeds=rows, positions=jnp.zeros(4, int), temperature=0))
        [1 1 1 2]
        [1 1 1 1]

    Source: Maddison, Tarlow and Minka 2014 (arXiv 1411.0030), section 2, for the noise; Salmon et al. 2011, *Parallel
        random numbers: as easy as 1, 2, 3*, for its generator, threefry; Fan et al. 2018 (arXiv 1805.04833) for top-k;
        Holtzman et al. 2019 (arXiv 1904.09751) for top-p; Nguyen et al. 2024 (arXiv 2407.01082) for min-p.
    Differs: the filters and their order are as in the library transformers, except that top-p keeps either all or
        none of the tokens with equal logits.
    """
    ctx = context()
    doing = f"cannot sample from '{spec}' over {shown(dim)}"
    logits = array(doing, "logits", logits, "real numbers")
    spec = read(doing, spec, logits, ctx)
    at = dimension(doing, spec, dim)
    if logits.ndim not in (2, 3) or logits.shape[at] == 0:
        raise SpecError(f"{doing}: the logits have shape {logits.shape}.\n  Pass [B, V] or [B, L, V], with V not 0.")
    rows = spec.without(dim)
    count = logits.shape[spec.dims.index(rows.dims[0])]
    seeds, positions = (
        _per_row(doing, name, array(doing, name, x, "integers"), rows, count)
        for name, x in (("seeds", seeds), ("positions", positions))
    )
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    on = {name: _check(doing, name, x, rows, count) for name, x in given.items()}
    form = _Sampling(spec, at, **(on if on["temperature"] else dict.fromkeys(on, False)))
    settings = [jnp.broadcast_to(jnp.asarray(x, _SETTINGS[name].dtype), count) for name, x in given.items()]
    inputs = (jax.lax.stop_gradient(logits), seeds, positions, *settings)
    ins, name = (spec, *[Spec(rows.dims[:1], ((),))] * 6), f"sample {spec}"
    if ctx.compiler_chooses:
        whole = replace(form, spec=Spec(spec.dims, ((),) * len(spec.dims)))
        return left_to_compiler(ctx, _value(whole, logits.shape, ctx)[1], ins, rows, *inputs, name=name)
    return run(ctx, name, *_value(form, logits.shape, ctx), ins, rows, *inputs)


@dataclass(frozen=True)
class _Setting:
    """The allowed values of a setting such as top-k, and the value that turns the setting off."""

    dtype: str
    low: float
    high: float
    off: float
    remedy: str

    def takes(self, x: np.ndarray) -> np.ndarray:
        return (x > 0) & (x <= 1) if self.off == 1 else (x >= self.low) & (x <= self.high)


_SETTINGS = {
    "temperature": _Setting(
        "float32",
        0,
        float(np.finfo("float32").max),
        0,
        "Pass 0, which chooses the likeliest token, or a number above 0.",
    ),
    "top_k": _Setting("int32", 0, np.iinfo("int32").max, 0, "Pass a number of tokens, or 0 to keep all."),
    "top_p": _Setting("float32", 0, 1, 1, "Pass a number above 0 and at most 1, which keeps all tokens."),
    "min_p": _Setting("float32", 0, 1, 0, "Pass a number from 0, which keeps all tokens, to 1."),
}


def _check(doing: str, name: str, given: Any, rows: Spec, count: int) -> bool:
    """Check the setting of a filter, and return whether the filter is part of the program.

    The filter is left out if the setting is a number that turns it off. A setting that is traced, or has a value for
    each row, may turn the filter on, so the filter is then part of the program.

    Raises:
        SpecError: the setting is not a number or an array of numbers, or its shape is wrong.
        PlanError: the setting is not traced and is out of range.
    """
    setting = _SETTINGS[name]
    x = array(doing, name, given, "integers" if setting.dtype == "int32" else "real numbers")
    if x.shape:
        _per_row(doing, name, x, rows, count)
    if isinstance(given, jax.core.Tracer):
        return True
    values = np.ravel(np.asarray(given))
    wrong = values[~setting.takes(values)]
    if wrong.size:
        raise PlanError(f"{doing}: {name} is {wrong[0]}.\n  {setting.remedy}")
    return bool(x.shape) or values[0] != setting.off


def _per_row(doing: str, name: str, x: jax.Array, rows: Spec, count: int) -> jax.Array:
    if x.shape != (count,):
        row = rows.dims[0]
        raise SpecError(
            f"{doing}: {name} has shape {x.shape}.\n  Pass shape ({count},), one value for each row of {row}."
        )
    return x


@dataclass(frozen=True)
class _Sampling:
    """The options of a sampling: the spec of the logits, the index of dimension V, and the filters in the program."""

    spec: Spec
    at: int
    temperature: bool
    top_k: bool
    top_p: bool
    min_p: bool


@lru_cache(maxsize=1024)
def _value(form: _Sampling, shape: tuple[int, ...], ctx: Context):
    spec, at = form.spec, form.at
    rows, axes, vocabulary = spec.without(spec.dims[at]), spec.axes[at], shape[at]
    # Unused letters for the last two dimensions of totals: the candidates, and the words of each candidate's total.
    more = tuple(letter for letter in "SUWZ" if letter not in spec.dims)[:2]
    totals = Spec(rows.dims + more, (*rows.axes, (), ()))

    def reduced(name: str, spec: Spec = rows, *more: int, reduce: str = "max") -> tuple[Step, ...]:
        return settle(spec, axes, sizes_of(totals, (*wholes, *more)), ctx, 4, name, reduce)

    wholes = [size for d, size in enumerate(shape) if d != at]
    planned = {"top": reduced("maximum")} if form.temperature else {}
    for name, on, size in (("count", form.top_k, 1), ("mass", form.top_p, WORDS)):
        rounds = enumerate(CANDIDATES if on else ())
        planned |= {f"{name}{n}": reduced(name, totals, count, size, reduce="sum") for n, count in rounds}
    chains = Chains(ctx.mesh, **planned, biggest=reduced("score"), lowest=reduced("token"))

    def body(logits, seeds, positions, temperature, top_k, top_p, min_p):
        logits = jnp.moveaxis(float32(logits), at, -1)
        faulty = jnp.isnan(logits)
        logits = jnp.where(faulty, -jnp.inf, jnp.minimum(logits, jnp.finfo(logits.dtype).max))
        kept, scores = logits > IMPOSSIBLE, logits

        def mine(x):  # this device's rows, broadcasting to [B, V] or [B, L, V]
            held = logits.shape[0]
            piece = jax.lax.dynamic_slice_in_dim(x, shard_index(rows.axes[0]) * held, held)
            return piece.reshape(held, *(1,) * (logits.ndim - 1))

        def index(d, axes):  # the global index of this device's part of a dimension
            return jax.lax.broadcasted_iota(jnp.int32, logits.shape, d) + shard_index(axes) * logits.shape[d]

        if form.temperature:
            order = ordered(jnp.where(kept, logits, -jnp.inf))
            top = chains.send("top", jnp.max(logits, axis=-1), reduce="max")[..., None]
            greedy = mine(temperature) == 0
            scores = (logits - top) / jnp.where(greedy, 1.0, mine(temperature))
            weights = jnp.where(kept, jnp.exp(scores), 0.0)
            if form.min_p:
                kept &= weights >= mine(min_p)
            if form.top_k:
                k = jnp.where(mine(top_k) > 0, jnp.minimum(mine(top_k), vocabulary), vocabulary)
                enough = lambda counts, _: counts[..., 0] >= k  # noqa: E731
                left = order >= threshold(order, [jnp.ones_like(order)], enough, chains, "count")
                kept, weights = kept & left, jnp.where(left, weights, 0.0)
            if form.top_p:
                bits, p = 31 - vocabulary.bit_length(), mine(top_p)  # a word's sum over the vocabulary must fit
                enough = lambda some, all: mass(some, bits) >= p * mass(all, bits)  # noqa: E731
                left = order >= threshold(order, words(weights, bits), enough, chains, "mass")
                kept &= left | (p >= 1)
            position = mine(positions)
            if logits.ndim == 3:
                position = position + index(1, rows.axes[1])
            noise = _gumbel(mine(seeds), position, index(logits.ndim - 1, axes), logits.shape)
            scores = jnp.where(greedy, logits, scores + noise)
        scores = jnp.where(faulty, jnp.inf, jnp.where(kept, scores, -jnp.inf))
        best, token = first_maximum(scores, logits.ndim - 1, axes, chains)
        return jnp.where(jnp.isfinite(best), token, -1)

    return chains.steps, body


def _gumbel(seed: jax.Array, position: jax.Array, token: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return Gumbel noise of the given shape.

    Each value comes from 64 random bits, which depend only on the value's seed, position and token.
    """
    inputs = (seed, position, jnp.uint32(0), token)
    high, low = threefry2x32_p.bind(*(jnp.broadcast_to(x.astype(jnp.uint32), shape) for x in inputs))
    # The noise is largest where `uniform` is near 0. There float32 has its finest steps, so 64 bits are used: with
    # steps of 2⁻³², several tokens of a large vocabulary would share the largest noise.
    uniform = float32(high) * 2.0**-32 + float32(low) * 2.0**-64
    return -jnp.log(-jnp.log1p(-jnp.clip(uniform, 2.0**-65, 1 - 2.0**-24)))
