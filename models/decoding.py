"""Text generation: one token at a time, recomputing the whole window for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import gspmd
from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.ops._argmax import argmax

from .objective import batch_spec
from .transformer import Transformer, arrays, stream, with_arrays


def generate(
    model: Transformer, prompt: Sequence[int], count: int, *, key: jax.Array, temperature: float = 0.8, window: int = 64
) -> np.ndarray:
    """Continue a prompt, in as many independent rows as the layout needs to fill its mesh.

    The program is compiled once, for a window of fixed length; earlier tokens are dropped.

    Args:
        model: a placed model; call under `jax.set_mesh`.
        prompt: token ids, at least one.
        count: tokens to add.
        key: random key; the first row of the result is the same on every mesh.
        temperature: divides the logits before sampling; 0 takes the most likely token.
        window: length of the model's context.

    Returns:
        [rows, count] int32.

    Raises:
        ValueError: for an empty prompt, a negative temperature, a window under 1, or a router that reads later tokens.

    Differs: there is no key/value cache yet. Padding after the text takes no slot of an expert, but the experts'
        capacity is that of the whole window, not of the text.
    """
    _check(prompt, temperature, window)
    if model.config.moe and not model.config.moe.causal:
        raise ValueError(
            f"router {model.config.moe.router} cannot generate text: its experts choose among all tokens of a group, "
            "so what it learned depends on tokens that are not there yet. Train with another router to generate."
        )
    rows, mesh = _rows(model), jax.sharding.get_mesh()
    sharding = jax.sharding.NamedSharding(mesh, batch_spec(model.layout).partition_spec())
    step, weights = _step(model, temperature), arrays(model)
    text = np.tile(np.asarray(prompt, np.int32), (rows, 1))
    for at in range(count):
        seen = text[:, -window:]
        padded = np.pad(seen, ((0, 0), (0, window - seen.shape[1])))
        token = step(weights, jax.device_put(padded, sharding), seen.shape[1] - 1, jax.random.fold_in(key, at))
        text = np.concatenate([text, np.asarray(token)], axis=1)
    return text[:, len(prompt) :]


def _step(model: Transformer, temperature: float):
    """Compile (weights, tokens [rows, window], position, key) -> the next token of every row, [rows, 1]."""
    layout = model.layout
    whole, tokens = batch_spec(layout), layout.spec("embedding.tokens")
    residual, logits = stream(model.config, layout), layout.spec("output.logits")
    # A single position cannot be sharded, so the length is whole from here on.
    short, narrow = residual.with_axes("L", ()), logits.with_axes("L", ())

    @jax.jit
    def step(weights, ids, position, key):
        placed = with_arrays(model, weights)
        real = jnp.broadcast_to(jnp.arange(ids.shape[1]) <= position, ids.shape)
        x, _ = placed.hidden(_moved(ids, whole, tokens), mask=_moved(real, _whole(tokens), tokens))
        x = jax.lax.dynamic_slice_in_dim(_moved(x, residual, short), position, 1, axis=1)
        scores = placed.logits(x, short=True)
        if temperature:
            scores = scores / temperature + _moved(_noise(key, scores.shape), _whole(narrow), narrow)
        rows = narrow.without("V")
        return _moved(argmax(scores, narrow, "V"), rows, _whole(rows))

    return step


def _moved(x: jax.Array, before: Spec, after: Spec) -> jax.Array:
    return gspmd.reshard(x, Equation.move(before, after))


def _whole(spec: Spec) -> Spec:
    """The spec of the same dimensions, all unsharded."""
    return Spec(spec.dims, ((),) * len(spec.dims))


def _noise(key: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    """Gumbel noise, with which the argmax is a sample; a row's noise does not depend on the number of rows."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(shape[0]))
    return jax.vmap(lambda key: jax.random.gumbel(key, shape[1:], jnp.float32))(keys)


def _rows(model: Transformer) -> int:
    """The smallest batch that the mesh axes of B divide in every activation."""
    mesh, layout = jax.sharding.get_mesh().shape, model.layout
    keys = [
        "embedding.tokens",
        "attention.residual",
        "attention.query",
        "attention.key",
        "ffn.residual",
        "ffn.hidden",
        "output.logits",
    ]
    batch = [layout.spec(key).axes_of("B") for key in keys]
    if model.config.moe:
        batch.append(layout.spec("moe.groups").axes_of("G"))
    return math.lcm(*(math.prod(mesh.get(axis, 1) for axis in axes) for axes in batch))


def _check(prompt: Sequence[int], temperature: float, window: int) -> None:
    if not len(prompt):
        raise ValueError("cannot continue an empty prompt; give at least one token")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must not be negative (0 takes the likeliest token)")
    if window < 1:
        raise ValueError(f"window is {window}; it must be at least 1")
