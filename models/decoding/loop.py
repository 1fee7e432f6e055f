"""The decode loop on the devices, which reads a token of every row and samples the next, until all rows have ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from gspmd import ops
from gspmd.annotate import Spec

from ..blocks import part
from ..placement import moved
from ..transformer import Transformer
from .cache import Cache
from .serving import GenerationError
from .steps import decode_step

NOTHING = -1
"""The value that the loop returns in place of a token for a row that has ended."""

UNDEFINED = -2
"""The value that the loop returns in place of a token if logits are NaN or allow no token. The row then ends."""

# Lower temperatures make the logits of a correct model overflow float32, which would be reported as NaN.
_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampling:
    """The settings with which the next token is drawn from the logits.

    The settings apply in the order temperature, top-k, top-p (among the tokens kept by top-k), min-p, as in
    `transformers`.

    Example:
        >>> Sampling(temperature=0.7, top_p=0.9).greedy
        False

    Raises:
        GenerationError: settings are out of their ranges. The message lists all of these settings.
    """

    temperature: float = 1.0
    """Divisor of the logits; with 0 the likeliest token is chosen."""
    top_k: int = 0
    """Draw among the k likeliest tokens; 0 for all tokens."""
    top_p: float = 1.0
    """Draw among the likeliest tokens whose probabilities add up to p."""
    min_p: float = 0.0
    """Draw among tokens at least min_p times as likely as the likeliest."""

    def __post_init__(self) -> None:
        faults = []
        if not 0 <= self.temperature < math.inf:
            faults.append(
                f"temperature is {self.temperature}; it must be a finite number that is not negative (0 takes the "
                "likeliest token)"
            )
        elif 0 < self.temperature < _LEAST_TEMPERATURE:
            faults.append(
                f"temperature is {self.temperature}; logits divided by it may be more than float32 holds (0 takes the "
                "likeliest token)"
            )
        if self.top_k < 0:
            faults.append(f"top_k is {self.top_k}; it must not be negative (0 keeps all tokens)")
        if not 0 < self.top_p <= 1:
            faults.append(f"top_p is {self.top_p}; it must be greater than 0, and at most 1 (1 keeps all tokens)")
        if not 0 <= self.min_p <= 1:
            faults.append(f"min_p is {self.min_p}; it must be between 0 (all tokens) and 1")
        if faults:
            raise GenerationError("cannot sample:\n" + "\n".join(f"  {fault}" for fault in faults))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen, so that nothing is drawn at random."""
        return self.temperature == 0


PLAIN = Sampling()
"""Sampling from the model's probabilities, without filters."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WrittenTexts:
    """The texts that are being written, one in each row. This is the carry of the loop; its buffers are donated.

    Attributes:
        cache: the cache of the tokens that have been read.
        tokens: [B] int32, each row's last token, which has not been read yet.
        left: [B] int32, the number of tokens that a row may still add; 0 for a row that has ended.
    """

    cache: Cache
    tokens: jax.Array
    left: jax.Array


Loop = Callable[
    [Mapping[str, jax.Array], WrittenTexts, jax.Array, jax.Array, jax.Array], tuple[WrittenTexts, jax.Array]
]


def decode_loop(model: Transformer, sampling: Sampling, stop: Sequence[int], steps: int) -> Loop:
    """Build the decode loop, a function (weights, rows, seeds, alive, limit) -> (rows, tokens).

    The random numbers of a row depend only on the row's seed and on the position in its text. So a text does not depend
    on the other rows, on the layout, or on where a burst of steps ends.

    Args:
        model: the model, as for `decode_step`.
        sampling: the settings by which tokens are drawn.
        stop: tokens that end a row. They are not part of the row's text.
        steps: the largest number of steps in one call, which is a burst. The tokens of a burst are copied to the host
            together.

    Returns:
        A pure function, to be compiled with the rows donated. Its arguments are the weights, the rows, seeds [B]
        uint32, alive [B] bool (False ends a row), and limit, an int32 scalar, which is the number of steps to run. It
        returns the rows and tokens [B, steps] int32. A token is `UNDEFINED` where logits give no token, and `NOTHING`
        after a row's end. All arrays except weights and cache are replicated.
    """
    decode = decode_step(model)
    spec = model.layout.one_position().spec("output.logits").without("L")
    rows_spec, whole = spec.without("V"), Spec(("B",), ((),))

    def drawn(logits: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
        with part(model.layout, "output"), jax.named_scope("sample"):
            options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
            found = ops.sample(logits, spec, "V", seeds=seeds, positions=positions, top_k=sampling.top_k, **options)
            return moved(found, rows_spec, whole)

    def loop(weights, rows: WrittenTexts, seeds, alive, limit) -> tuple[WrittenTexts, jax.Array]:
        def unfinished(carry) -> jax.Array:
            step, rows, _ = carry
            return (step < limit) & jnp.any(rows.left > 0)

        def one_step(carry):
            step, rows, written = carry
            logits, cache = decode(weights, rows.tokens, rows.cache)
            active, tokens = rows.left > 0, drawn(logits, seeds, cache.lengths)
            ends = jnp.isin(tokens, jnp.asarray(stop, jnp.int32)) if stop else jnp.zeros_like(active)
            undefined = tokens < 0
            shown = jnp.where(active & ~ends, jnp.where(undefined, UNDEFINED, tokens), NOTHING)
            written = jax.lax.dynamic_update_slice_in_dim(written, shown[:, None], step, axis=1)
            cache = replace(cache, lengths=jnp.where(active, cache.lengths, rows.cache.lengths))
            left = jnp.where(active & ~ends & ~undefined, rows.left - 1, 0)
            return step + 1, WrittenTexts(cache, jnp.where(active & ~undefined, tokens, rows.tokens), left), written

        rows = replace(rows, left=jnp.where(alive, rows.left, 0))
        nothing = jnp.full((rows.tokens.shape[0], steps), NOTHING, jnp.int32)
        _, rows, written = jax.lax.while_loop(unfinished, one_step, (jnp.int32(0), rows, nothing))
        return rows, written

    return loop
