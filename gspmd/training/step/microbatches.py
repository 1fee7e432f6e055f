"""Microbatches: a batch is computed in several parts, and gradients are added up before they are reduced."""

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
"""A function of parameters, a batch, a random key and optionally a `total`, which returns the loss and further
metrics."""


@dataclass(frozen=True)
class Microbatches:
    """The split of a batch into microbatches.

    Every device splits its own sequences, so nothing is sent: a microbatch has some sequences of every device.

    Attributes:
        count: number of microbatches.
        batch: the spec of a batch, such as `B_xL`.
    """

    count: int
    batch: Spec

    def split(self, batch: Tree) -> Tree:
        """Split each array [B, L] of a batch into [M, B/M, L], like `gspmd.pipeline.microbatches.cut_batch`."""
        return jax.tree.map(lambda tokens: cut_batch(tokens, self.batch, self.count), batch)

    def value_and_gradients(
        self, loss: Loss, specs: Tree, params: Tree, batch: Tree, key: jax.Array
    ) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Tree]:
        """Return the loss, its metrics and its gradients, each averaged over microbatches.

        For a loss that is a mean over sequences or tokens, this equals the result for the whole batch. With experts it
        differs: groups of tokens that span sequences, their capacity, and the auxiliary losses are computed for each
        microbatch, and every microbatch has its own random draws.

        Args:
            loss: a function (params, batch, key) -> (loss, dictionary of metrics).
            specs: the spec in which the loss gets each parameter.
            params: the parameters, in these specs.
            batch: [B, L], or a tree of such arrays.
            key: random key.

        Returns:
            The same as `jax.value_and_grad` with `has_aux`; the gradient of a parameter `EF reduced-x` is a partial sum
            over x.
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
    """Return zeros with the type of a parameter's gradient, possibly a partial sum, in float32 or wider."""
    return mapped(
        lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)),
        spec.partition_spec(),
        spec.cotangent.partition_spec(),
    )(leaf)
