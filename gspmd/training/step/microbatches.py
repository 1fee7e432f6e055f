"""Microbatches: a batch is computed in several parts, and the parts' gradients are added before they are reduced."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import mapped
from gspmd.pipeline.microbatches import cut_batch

Tree = Any
Loss = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""A function of parameters, a batch, a random key and optionally a `total`. It returns the loss and other metrics."""


@dataclass(frozen=True)
class Microbatches:
    """The split of a batch into microbatches.

    Every device splits its own sequences, so a microbatch has some sequences of every device, and nothing is sent.

    Attributes:
        count: number of microbatches.
        batch: the spec of a batch, such as `B_xL`.
    """

    count: int
    batch: Spec

    def split(self, batch: Tree) -> Tree:
        """Split each array [B, L] of a batch into [M, B/M, L], as `gspmd.pipeline.microbatches.cut_batch` does."""
        return jax.tree.map(lambda tokens: cut_batch(tokens, self.batch, self.count), batch)

    def value_and_gradients(
        self, loss: Loss, specs: Tree, params: Tree, batch: Tree, key: jax.Array
    ) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Tree]:
        """Return the loss, the metrics and the gradients, each averaged over microbatches.

        If the loss is a mean over sequences or tokens, the result is the same as for the whole batch. If the model has
        experts, the result differs: groups of tokens that span sequences, the capacity of groups, and auxiliary losses
        are computed for each microbatch, and every microbatch has its own random draws.

        Args:
            loss: a function (params, batch, key) -> (loss, dictionary of metrics).
            specs: the spec with which the loss gets each parameter.
            params: the parameters, sharded by `specs`.
            batch: [B, L], or a tree of such arrays.
            key: random key.

        Returns:
            A result like that of `jax.value_and_grad` with `has_aux`: ((loss, metrics), gradients). The gradient of a
            parameter `EF reduced-x` is a partial sum over x.
        """

        def share(params: Tree, tokens: Tree, key: jax.Array) -> tuple[jax.Array, Any]:
            figures = loss(params, tokens, key)
            return figures[0] / self.count, figures

        def add(total: Tree, part: tuple[Tree, jax.Array]) -> tuple[Tree, Any]:
            tokens, number = part
            drawn = jax.random.fold_in(key, number)
            gradients, figures = jax.grad(share, has_aux=True)(params, tokens, drawn)
            return jax.tree.map(jnp.add, total, gradients), figures

        zeros = jax.tree.map(_zeros, specs, params, is_leaf=lambda leaf: isinstance(leaf, Spec))
        total, figures = jax.lax.scan(add, zeros, (self.split(batch), jnp.arange(self.count)))
        return jax.tree.map(lambda each: jnp.mean(each, axis=0), figures), total


def _zeros(spec: Spec, leaf: jax.Array) -> jax.Array:
    """Return zeros in float32 or wider with the sharding of a parameter's gradient, which may be a partial sum."""
    return mapped(
        lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)),
        spec.partition_spec(),
        spec.cotangent.partition_spec(),
    )(leaf)
