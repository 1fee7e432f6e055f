"""The dense transformer in plain jax.numpy, on one device: what every placement is held against."""

import jax
import jax.numpy as jnp


def logits(config, values, tokens):
    """Logits [B, L, V] from the parameters by path."""
    x = values["embedding.table"][tokens] * config.embed**0.5
    for layer in range(config.layers):
        x = _block(
            config, {k.removeprefix("blocks.0."): v[layer] for k, v in values.items() if k.startswith("blocks.0.")}, x
        )
    table = values["embedding.table" if config.tied else "output.table"]
    return _norm(config, x, values["output.norm"]) @ table.T


def loss(config, values, tokens):
    """Mean next-token cross-entropy in nats."""
    chosen = jax.nn.log_softmax(logits(config, values, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(chosen, tokens[:, 1:, None], axis=-1))


def _block(config, w, x):
    if config.block == "parallel":
        y = _norm(config, x, w["norm"])
        return x + _attention(config, w, y) + _feed_forward(config, w, y)
    x = x + _attention(config, w, _norm(config, x, w["attention.norm"]))
    return x + _feed_forward(config, w, _norm(config, x, w["ffn.norm"]))


def _norm(config, x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon) * scale[None, None]


def _attention(config, w, y):
    q, k, v = (jnp.einsum("BLE,EHD->BLHD", y, w[f"attention.{name}"]) for name in ("w_q", "w_k", "w_v"))
    q, k = _rotate(config, q), _rotate(config, k)
    k, v = (jnp.repeat(t, config.heads // config.kv_heads, axis=2) for t in (k, v))
    scores = jnp.einsum("BLHD,BTHD->BHLT", q, k) / config.head_size**0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("BHLT,BTHD,HDE->BLE", jax.nn.softmax(scores), v, w["attention.w_o"])


def _rotate(config, x):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / config.rope_base ** (jnp.arange(half)[None] / half)
    turn = jnp.exp(1j * angle)[None, :, None]
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([z.real, z.imag], axis=-1)


def _feed_forward(config, w, y):
    h = y @ w["ffn.w_in"]
    if config.activation == "swiglu":
        h = h * jax.nn.silu(y @ w["ffn.w_gate"])
    else:
        h = {"gelu": jax.nn.gelu, "relu": jax.nn.relu}[config.activation](h)
    return h @ w["ffn.w_out"]
