"""Adam with 8-bit moments: each block of values has a scale, and the codes are densest near zero."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any

_DECADES = 7
"""Number of decades that codes span, from 10^-7 times the largest value of a block to the largest value."""


class Int8AdamState(NamedTuple):
    """The state of Adam: first moments and roots of second moments as 8-bit codes, with a float32 scale per block."""

    count: jax.Array  # type: ignore[assignment]  # A tuple's method; optax finds the count of a state by this name.
    mean: Tree
    mean_scale: Tree
    root: Tree
    root_scale: Tree


def scale_by_int8_adam(
    beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8, *, block: int = 64, seed: int = 0
) -> optax.GradientTransformation:
    """Build Adam with moments of 8 bits, rounded stochastically: 2 + 8/block bytes per parameter instead of 8.

        m = β1·decode(mean) + (1-β1)·g,    v = β2·decode(root)² + (1-β2)·g²,    update = m̂ / (√v̂ + ε)

    Updates and moments are computed in float32. m is rounded up or down to 0 or one of 127 codes of each sign, and √v
    to 0 or one of 254 codes. The probabilities of rounding up and down make the expectation exact, with one exception:
    a √v that is not 0 is never rounded to 0, because the next update could be as large as 1/ε.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: the number that is added to the root of the second moment, as in Adam.
        block: number of values along the last dimension that share a scale. It is reduced to gcd(block, size of the
            last dimension). Each device must hold whole blocks; `block_faults` checks this.
        seed: the seed of stochastic rounding. The random numbers depend only on the seed, the number of the update and
            the parameter. They do not depend on the layout, or on how often the run was resumed.

    Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), sections 2.1 and 2.2.
    Differs: values are rounded stochastically, not to the nearest code. The root of the second moment is stored instead
        of the second moment, because it spans half as many decades. A block has 64 values of one row, not 2,048 values
        regardless of the shape.
    """

    def init(params: Tree) -> Int8AdamState:
        def zeros(dtype: Any, divided: bool = False) -> Tree:
            return jax.tree.map(lambda p: jnp.zeros(_scales(p.shape, block) if divided else p.shape, dtype), params)

        scales = zeros(jnp.float32, True)
        return Int8AdamState(jnp.int32(0), zeros(jnp.int8), scales, zeros(jnp.uint8), zeros(jnp.float32, True))

    def update(gradients: Tree, state: Int8AdamState, params: Tree | None = None) -> tuple[Tree, Int8AdamState]:
        count = optax.safe_increment(state.count)
        key = jax.random.fold_in(jax.random.key(seed), count)

        def one(number: int, g: jax.Array, *moments: jax.Array) -> tuple[jax.Array, ...]:
            step = _elementwise(partial(_step, betas=(beta1, beta2), epsilon=epsilon), g, *moments)
            return step(jax.random.fold_in(key, number), count, g, *moments)

        leaves, tree = jax.tree.flatten(gradients)
        moments = zip(*(jax.tree.leaves(each) for each in state[1:]), strict=True)
        found = [one(number, g, *each) for number, (g, each) in enumerate(zip(leaves, moments))]
        updates, *rest = (jax.tree.unflatten(tree, each) for each in zip(*found))
        return updates, Int8AdamState(count, *rest)

    return optax.GradientTransformation(init, update)


def block_faults(shapes: Tree, local: Tree, block: int) -> list[str]:
    """Return a fault for each parameter whose blocks are cut by the layout.

    Args:
        shapes: the shape of each parameter, by name.
        local: the shape of each parameter's moments on one device, by name.
        block: the block size, as in `scale_by_int8_adam`.

    Example:
        >>> block_faults({"w": (8, 64)}, {"w": (8, 16)}, block=64)
        ["moments in int8 have blocks of 64 values, but a device has 16 of w's 64; set moments_block to 16."]
    """
    faults = []
    for name, shape in shapes.items():
        size, here = math.gcd(block, shape[-1]), local[name][-1]
        if here % size:
            fact = f"moments in int8 have blocks of {size} values, but a device has {here} of {name}'s {shape[-1]}"
            faults.append(f"{fact}; set moments_block to {math.gcd(size, here)}.")
    return faults


def encode(x: jax.Array, block_of: jax.Array, draws: jax.Array, extra: int) -> jax.Array:
    """Round x / block_of, in [0, 1], at random to one of the two nearest codes, so that `decode` gives x on average.

    Code 0 is 0. The decade k, from 10^(k-7) to 10^(k-6), is divided into 2^(k+extra) equal parts, with a code in the
    middle of each.

    Args:
        x: values that are not negative.
        block_of: for each value, the largest value of its block.
        draws: uniform random numbers from 0 to 1.
        extra: 0 for 127 codes, 1 for 254 codes.

    Returns:
        The codes, int32, in the shape of `x`.
    """
    share = jnp.where(block_of > 0, x / jnp.where(block_of > 0, block_of, 1), 0) * _top(extra)
    decade = jnp.clip(jnp.floor(jnp.log10(jnp.maximum(share, 1e-30))) + _DECADES, 0, _DECADES - 1)
    parts = jnp.exp2(decade + extra)
    place = (share * jnp.exp2((_DECADES - 1 - decade) * math.log2(10)) - 0.1) / 0.9 * parts - 0.5
    below = (parts - 2**extra + 1 + jnp.clip(jnp.floor(place), -1, parts - 1)).astype(jnp.int32)
    below = jnp.clip(below, 0, 127 * 2**extra - 1)
    low, high = _code(below, extra), _code(below + 1, extra)
    return below + (draws < (share - low) / (high - low))


def decode(code: jax.Array, block_of: jax.Array, extra: int) -> jax.Array:
    """Return the value that a code represents, scaled by the largest value of its block."""
    return _code(code.astype(jnp.int32), extra) / _top(extra) * block_of


def _code(code: jax.Array, extra: int) -> jax.Array:
    """Return the unscaled value that a code represents, from 0 to `_top`."""
    first = 2**extra
    decade = jnp.floor(jnp.log2((jnp.maximum(code, 1) + first - 1) / first + 1e-6))
    parts = jnp.exp2(decade) * first
    inside = code - (parts - first + 1)
    number = jnp.exp2((decade - _DECADES + 1) * math.log2(10)) * (0.1 + 0.9 * (inside + 0.5) / parts)
    return jnp.where(code > 0, number, 0.0)


def _top(extra: int) -> float:
    """Return the unscaled value that the last code represents."""
    return 0.1 + 0.9 * (1 - 0.5 / 2 ** (_DECADES - 1 + extra))


def _step(key, count, g, mean, mean_scale, root, root_scale, *, betas, epsilon):
    """Compute one update of one parameter, and the new moments as codes and scales."""
    g, (beta1, beta2) = g.astype(jnp.float32), betas
    spread = partial(_spread, size=g.shape[-1])
    signed = jnp.sign(mean) * decode(jnp.abs(mean.astype(jnp.int32)), spread(mean_scale), 0)
    m = beta1 * signed + (1 - beta1) * g
    v = beta2 * decode(root, spread(root_scale), 1) ** 2 + (1 - beta2) * g * g
    width, of_mean, of_root = jnp.sqrt(v), jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
    scales = tuple(_largest(x, mean_scale.shape[-1]) for x in (jnp.abs(m), width))
    code = encode(jnp.abs(m), spread(scales[0]), jax.random.uniform(of_mean, g.shape), 0)
    wide = encode(width, spread(scales[1]), jax.random.uniform(of_root, g.shape), 1)
    wide = jnp.where(width > 0, jnp.maximum(wide, 1), 0)
    unbiased = m / (1 - beta1**count), jnp.sqrt(v / (1 - beta2**count))
    signs = jnp.sign(m).astype(jnp.int32)
    update = unbiased[0] / (unbiased[1] + epsilon)
    return update, (signs * code).astype(jnp.int8), scales[0], wide.astype(jnp.uint8), scales[1]


def _scales(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // math.gcd(block, shape[-1]))


def _largest(x: jax.Array, blocks: int) -> jax.Array:
    return jnp.max(x.reshape(*x.shape[:-1], blocks, -1), axis=-1)


def _spread(scale: jax.Array, size: int) -> jax.Array:
    """Repeat the scale of each block for every value of the block."""
    return jnp.repeat(scale, size // scale.shape[-1], axis=-1)


def _elementwise(step: Callable, *arrays: jax.Array) -> Callable:
    """Return a step, wrapped to run under Auto axes if all mesh axes are Explicit.

    Under Explicit axes, reshaping arrays into blocks would need sharded types.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.are_all_axes_explicit:
        return step
    return jax.sharding.auto_axes(step, out_sharding=tuple(jax.typeof(x).sharding.spec for x in arrays))
