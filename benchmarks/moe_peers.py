"""Mixture-of-experts layers of other libraries, and straightforward ones in plain JAX, for benchmarks/moe_layer.py.

Each function takes a case and returns a layer, which takes weights and tokens [T, E] and returns outputs [T, E]. All
layers route by a softmax. Its k largest entries are the gates, which are divided by their sum if k > 1. Libraries are
imported only when their layer is built, so that a missing library is reported and skipped.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

Layer = Callable[[dict[str, jax.Array], jax.Array], jax.Array]


def gates(case: Any, weights: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the k largest probabilities of each token, and the experts with these probabilities, both [..., k]."""
    gate, expert = jax.lax.top_k(jax.nn.softmax(x.astype(jnp.float32) @ weights["router"]), case.k)
    return (gate / gate.sum(-1, keepdims=True) if case.k > 1 else gate), expert


def activated(case: Any, product: Callable, x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Apply the feed-forward layer of every expert, given a product of rows and weights."""
    up = product(x, weights["w_in"])
    h = jax.nn.silu(product(x, weights["w_gate"])) * up if case.activation == "swiglu" else jax.nn.gelu(up)
    return product(h, weights["w_out"])


def plain_onehot(case: Any) -> Layer:
    """Build a layer of the papers' einsums over masks [G, L, X, C], in groups of tokens, differentiated by JAX."""
    groups, capacity = case.groups, case.config("onehot", case.groups).capacity(case.tokens // case.groups)

    def layer(weights, x):
        x = x.reshape(groups, -1, x.shape[-1])
        gate, expert = gates(case, weights, x)
        chosen = jax.nn.one_hot(expert, case.experts)  # [G, L, k, X]
        order = chosen.swapaxes(1, 2).reshape(groups, -1, case.experts)  # first choices before second ones
        place = (jnp.cumsum(order, axis=1) * order - 1).reshape(groups, case.k, -1, case.experts).swapaxes(1, 2)
        taken = jax.nn.one_hot(place.astype(jnp.int32), capacity)  # [G, L, k, X, C]; none where there is no room
        mask = jnp.einsum("glk,glkxc->glxc", gate, taken).astype(x.dtype)
        slots = jnp.einsum("glxc,gle->gxce", (mask > 0).astype(x.dtype), x)
        y = activated(case, lambda x, w: jnp.einsum("gxce,xef->gxcf", x, w), slots, weights)
        return jnp.einsum("glxc,gxce->gle", mask, y).reshape(-1, x.shape[-1])

    return layer


def plain_ragged_dot(case: Any) -> Layer:
    """Build a layer that sorts rows by expert and uses `lax.ragged_dot`, differentiated by JAX; no token is dropped."""

    def layer(weights, x):
        gate, expert = gates(case, weights, x)
        order = jnp.argsort(expert.reshape(-1))
        sizes = jnp.bincount(expert.reshape(-1), length=case.experts).astype(jnp.int32)
        y = activated(case, lambda x, w: jax.lax.ragged_dot(x, w, sizes), x[order // case.k], weights)
        y = y[jnp.argsort(order)].reshape(-1, case.k, x.shape[-1])
        return jnp.einsum("tk,tke->te", gate.astype(y.dtype), y)

    return layer


def haliax(case: Any) -> Layer:
    """Build a layer with Haliax's MoELinear between plain sorts; no token is dropped."""
    import haliax as hax

    def layer(weights, x):
        gate, expert = gates(case, weights, x)
        order = jnp.argsort(expert.reshape(-1))
        sizes = hax.named(jnp.bincount(expert.reshape(-1), length=case.experts), "experts")
        product = lambda x, linear: linear(hax.named(x, ("rows", linear.In.name)), sizes).array  # noqa: E731
        y = activated(case, product, x[order // case.k], _linears(case, weights))
        y = y[jnp.argsort(order)].reshape(-1, case.k, x.shape[-1])
        return jnp.einsum("tk,tke->te", gate.astype(y.dtype), y)

    return layer


def levanter(case: Any) -> Layer:
    """Build Levanter's Mixtral block, which has three matrices for each expert; no token is dropped."""
    import haliax as hax
    from levanter.models.mixtral import MixtralConfig, MixtralMoEMlp, MixtralSparseMoeBlock

    if case.activation != "swiglu":
        raise ImportError("its block only supports swiglu")
    config = MixtralConfig(
        seq_len=case.tokens, hidden_dim=case.embed, intermediate_dim=case.hidden, num_experts_per_tok=case.k,
        n_routed_experts=case.experts, lbl_coef=None, rzl_coef=None,
    )  # fmt: skip

    def layer(weights, x):
        linear = _linears(case, weights)
        experts = MixtralMoEMlp(
            linear["w_gate"], linear["w_out"], linear["w_in"], config.Embed, config.Mlp, hax.nn.silu
        )
        router = hax.named(weights["router"].astype(x.dtype), (config.Embed, config.Experts))
        gate = hax.nn.Linear(router, None, config.Embed, config.Experts)
        y, _ = MixtralSparseMoeBlock(config, gate, experts)(hax.named(x, (config.Pos, config.Embed)))
        return y.array

    return layer


def _linears(case: Any, weights: dict[str, jax.Array]) -> dict[str, Any]:
    import haliax as hax

    experts, embed, mlp = hax.Axis("experts", case.experts), hax.Axis("embed", case.embed), hax.Axis("mlp", case.hidden)
    ways = {"w_in": (embed, mlp), "w_gate": (embed, mlp), "w_out": (mlp, embed)}
    return {
        name: hax.nn.MoELinear(hax.named(weights[name], (experts, *way)), None, experts, *way, use_gmm=False)
        for name, way in ways.items()
        if name in weights
    }


PEERS = {"plain one-hot": plain_onehot, "plain ragged_dot": plain_ragged_dot, "haliax": haliax, "levanter": levanter}


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries."""
    found = {}
    for name in ("jax", "haliax", "levanter"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found
