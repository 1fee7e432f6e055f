"""The key/value cache: its arrays, their specs, and a function that makes an empty cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd.annotate import Spec
from gspmd.layouts import Layout
from gspmd.lowerings.in_force import is_gpu

from ..config import ModelConfig
from ..vectors import wide_sizes

SELF, CROSS = "attention.key", "cross.key"
"""The layout's lines for the cache of a text and for the cache of an encoded source, as arguments of `Layout.cache`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens that a model has read, for all layers: a pytree that is donated from step to step.

    There is one array for each stack of layers (`cache_stacks`), whose leading dimension N counts the layers. B rows
    have room for T tokens each. Heads come before tokens. In the opposite order, if a device has several heads, the TPU
    compiler copies every layer before it multiplies.

    A sliding layer keeps only one window of tokens, and a chunked layer keeps one chunk. T is then the length of a
    ring, in which the token at position p is in slot p mod T.

    Attributes:
        keys: rotated keys, one array [N, B, K, T, D] for each stack of layers.
        values: values, with the same shapes as the keys. None for latent attention, in which `keys` holds [N, B, 1, T,
            Z], the latents and the rotated keys of all heads.
        key_scales: scales of the keys in an int8 cache, one float32 array [N, B, K, T] for each stack of layers; None
            if the cache is not int8.
        value_scales: scales of the values, with the same shapes as `key_scales`. In latent attention, `key_scales` are
            the scales of the latents, and `value_scales` the scales of the rotated keys.
        lengths: [B] int32, the number of each row's tokens that are in the cache.
        source: a cache of the keys and values of each row's encoded source, which cross-attention reads in each block
            of the decoder; None for a decoder-only model.
        totals: [B] int32, the number of tokens of each row's complete text that the model reads, including tokens still
            to come. It is needed if the rotary embedding depends on this number (`RopeScaling.by_length`), and None
            otherwise. The caller sets it before the first token is read.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...] | None
    key_scales: tuple[jax.Array, ...] | None
    value_scales: tuple[jax.Array, ...] | None
    lengths: jax.Array
    source: Cache | None = None
    totals: jax.Array | None = None

    @property
    def layers(self) -> tuple[Any, Any, Any, Any]:
        """The arrays with a leading dimension N for layers: keys, values and their scales."""
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def room(self) -> int:
        """The largest T of all layers. If some layers keep all tokens, it is the T of these layers."""
        return max(keys.shape[3] for keys in self.keys)


def cache_spec(layout: Layout, line: str = SELF, *, latent: bool = False) -> Spec:
    """Return the spec [B, K, T, D] of one layer's keys or values; `Layout.cache` has this spec in the order BTKD.

    Args:
        layout: the layout that has the spec of the cache.
        line: the line of the cache: `SELF` for a text's own tokens, or `CROSS` for an encoded source.
        latent: whether the cache holds latents. All heads share the latents, so K is then 1 and unsharded.
    """
    held, dims = Spec.parse(layout.cache(line)), ("B", "K", "T", "D")
    spec = Spec(dims, tuple(map(held.axes_of, dims)))
    return spec.with_axes("K", ()) if latent else spec


def stacked(spec: Spec) -> Spec:
    """Return the spec for all layers together: `spec` with a leading, unsharded dimension N."""
    return Spec(("N", *spec.dims), ((), *spec.axes))


def cache_stacks(config: ModelConfig, mesh: jax.sharding.Mesh) -> tuple[range, ...]:
    """Return, for each array of keys in the cache, the layers whose keys are in the array.

    There is one array for each of `ModelConfig.stacks`, even if the weights are not stacked, so that a step writes to
    few arrays. On GPUs each layer of a model whose weights are not stacked has arrays of its own: cuBLAS multiplies
    whole arrays, so XLA would copy the keys and values of each layer out of their stack in every step. For Llama 3.1
    8B with 64 rows and 2048 tokens on an H200, these copies would take 9 ms of a step of 21 ms (simulated, jax 0.10.2).

    Args:
        config: the configuration of the model.
        mesh: the mesh of the cache.

    Example:
        >>> cache_stacks(ModelConfig(layers=3, stacked=False), jax.make_mesh((1,), ("x",)))  # a CPU
        (range(0, 3),)
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return config.weight_stacks() if is_gpu() else config.stacks()


def is_by_layer(cache: Cache, config: ModelConfig) -> bool:
    """Return whether every layer has arrays of its own in the cache, as `cache_stacks` gives them on GPUs."""
    return len(cache.keys) == config.layers


def abstract_cache(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    batch: int,
    length: int,
    dtype: Any,
    *,
    int8: bool = False,
    source_length: int = 0,
) -> Cache:
    """Return the shapes, dtypes and shardings of an `empty_cache`; nothing is allocated.

    Args:
        config: the configuration of the model.
        layout: the layout. Its method `cache` returns the specs of keys and values.
        mesh: a mesh with the mesh axes of the layout.
        batch: number of rows, B.
        length: T, the number of tokens of a text that the cache can hold.
        dtype: the dtype of keys and values.
        int8: whether to store keys and values as int8 instead, with a float32 scale for each token and head.
        source_length: number of tokens of a source that the cache can hold; 0 if the model has no encoder.

    Raises:
        SpecError: the size of dimension B, T or K is not divisible by the number of shards along the mesh axes that
            shard it.
        ValueError: the model has an encoder and `source_length` is 0; or it has no encoder and `source_length` is not
            0.

    Example:
        >>> from gspmd.layouts import Layout
        >>> mesh, layout = jax.make_mesh((1, 1, 1), ("x", "y", "z")), Layout.load("weight-stationary-2d")
        >>> cache = abstract_cache(ModelConfig(layers=2), layout, mesh, batch=4, length=32, dtype="bfloat16")
        >>> cache.keys[0].shape, cache.keys[0].sharding.spec[1]
        ((2, 4, 8, 32, 16), ('x', 'y', 'z'))
    """
    if bool(config.encoder_layers) != (source_length > 0):
        fact = "this model has an encoder" if config.encoder_layers else "this model is decoder-only"
        remedy = "at least 1" if config.encoder_layers else "0"
        raise ValueError(f"{fact}, but source_length is {source_length}; it must be {remedy}")

    def of(line: str, length: int) -> Cache:
        spec = cache_spec(layout, line, latent=config.latent is not None)
        sizes = wide_sizes(config, layout, batch, length)
        if config.latent is not None:
            sizes |= {"K": 1, "D": sizes["Z"]}
        parts = math.prod(mesh.shape[axis] for axis in spec.axes_of("T"))
        shapes = []
        for layers in cache_stacks(config, mesh):
            reach = config.reach_of(config.layer_kind(layers[0])) if line == SELF else None
            kept = length if reach is None else min(length, -(-reach // parts) * parts)
            shape = tuple((sizes | {"T": kept})[dim] for dim in spec.dims)
            spec.check(shape, dict(mesh.shape))
            shapes.append((len(layers), *shape))

        def tensors(spec: Spec, dtype: Any) -> tuple[Any, ...]:
            where = NamedSharding(mesh, stacked(spec).partition_spec())
            each = (shape[: 1 + len(spec.dims)] for shape in shapes)
            return tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape in each)

        held = tensors(spec, jnp.int8 if int8 else jnp.dtype(dtype))
        scaled = tensors(spec.without("D"), jnp.float32) if int8 else None
        lengths: Any = abstract_whole(mesh, (batch,), jnp.int32)
        if config.latent is not None:
            return Cache(held, None, scaled, scaled, lengths)
        return Cache(held, held, scaled, scaled, lengths)

    totals: Any = abstract_whole(mesh, (batch,), jnp.int32) if config.by_length else None
    return replace(of(SELF, length), source=of(CROSS, source_length) if source_length else None, totals=totals)


def empty_cache(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    batch: int,
    length: int,
    dtype: Any,
    *,
    int8: bool = False,
    source_length: int = 0,
    totals: Sequence[int] | np.ndarray | None = None,
) -> Cache:
    """Return a sharded cache without any tokens.

    Args:
        config, layout, mesh, batch, length, dtype, int8, source_length: see `abstract_cache`.
        totals: [B], the `Cache.totals`, if the rotary embedding depends on these numbers.

    Raises:
        SpecError, ValueError: for the same reasons as in `abstract_cache`; or totals are missing; or totals are given
            although nothing depends on them.
    """
    shapes = abstract_cache(config, layout, mesh, batch, length, dtype, int8=int8, source_length=source_length)
    if (shapes.totals is None) != (totals is None):
        need = "depends on the lengths of texts" if totals is None else "does not depend on the lengths of texts"
        remedy = (
            "Pass totals=, the number of tokens in each row's complete text." if totals is None else "Leave totals out."
        )
        raise ValueError(f"the rotary embedding of this model {need}.\n  {remedy}")
    with jax.set_mesh(mesh):
        cache = zeros(shapes)
        if totals is None:
            return cache
        return replace(cache, totals=jax.device_put(np.asarray(totals, np.int32), cache.lengths.sharding))


def zeros(shapes: Any) -> Any:
    """Return arrays of zeros with the shapes, dtypes and shardings of a tree of abstract arrays."""
    return jax.tree.map(lambda leaf: jax.lax.full(leaf.shape, 0, leaf.dtype, sharding=leaf.sharding), shapes)


def abstract_whole(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return an abstract array that is replicated over a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P()))
