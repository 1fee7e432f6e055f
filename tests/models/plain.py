"""The dense transformer in plain jax.numpy, on one device: what every placement is held against."""

import jax
import jax.numpy as jnp


def logits(config, values, tokens):
    """Logits [B, L, V] from the parameters by path."""
    return forward(config, values, tokens)[0]


def forward(config, values, tokens):
    """Logits [B, L, V], and the rotated keys and the values of all layers, [N, B, L, K, D] each."""
    x = values["embedding.table"][tokens] * (config.embed**0.5 if config.scale_embedding else 1.0)
    heads = []
    for layer in range(config.layers):
        weights = {k.removeprefix("blocks.0."): v[layer] for k, v in values.items() if k.startswith("blocks.0.")}
        x = _block(config, weights, x, heads)
    keys, held = map(jnp.stack, zip(*heads))
    table = values["embedding.table" if config.tied else "output.table"]
    return _norm(config, x, values, "output.norm") @ table.T + _bias(values, "output.bias"), keys, held


def loss(config, values, tokens):
    """Mean next-token cross-entropy in nats."""
    chosen = jax.nn.log_softmax(logits(config, values, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(chosen, tokens[:, 1:, None], axis=-1))


def _block(config, w, x, heads):
    if config.block == "parallel":
        y = _norm(config, x, w, "norm")
        z = y if config.parallel_norms == 1 else _norm(config, x, w, "ffn.norm")
        return x + _attention(config, w, y, heads) + _feed_forward(config, w, z)
    x = x + _attention(config, w, _norm(config, x, w, "attention.norm"), heads)
    return x + _feed_forward(config, w, _norm(config, x, w, "ffn.norm"))


def _bias(w, name):
    return jnp.expand_dims(w[name], (0, 1)) if name in w else 0.0


def _norm(config, x, w, name):
    if config.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return _unit(config, x) * _bias(w, name) + _bias(w, f"{name}_bias")


def _unit(config, x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon)


def _attention(config, w, y, heads):
    q, k, v = (
        jnp.einsum("BLE,EHD->BLHD", y, w[f"attention.w_{name}"]) + _bias(w, f"attention.b_{name}") for name in "qkv"
    )
    if config.qk_norm:
        q, k = (_unit(config, t) * w[f"attention.{name}_norm"][None, None, None] for t, name in ((q, "q"), (k, "k")))
    q, k = _rotate(config, q), _rotate(config, k)
    heads.append((k, v))
    k, v = (jnp.repeat(t, config.heads // config.kv_heads, axis=2) for t in (k, v))
    scores = jnp.einsum("BLHD,BTHD->BHLT", q, k) / config.head_size**0.5
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    out = jnp.einsum("BHLT,BTHD,HDE->BLE", jax.nn.softmax(scores), v, w["attention.w_o"])
    return out + _bias(w, "attention.b_o")


def _rotate(config, x):
    half = (config.rotary_size or config.head_size) // 2
    angle = jnp.arange(x.shape[1])[:, None] / config.rope_base ** (jnp.arange(half)[None] / half)
    turn = jnp.exp(1j * angle)[None, :, None]
    whole, rest = x[..., : 2 * half], x[..., 2 * half :]
    if config.rotary_pairs == "neighbours":
        pairs = whole.reshape(*whole.shape[:-1], half, 2)
        z = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        turned = jnp.stack([z.real, z.imag], axis=-1).reshape(whole.shape)
    else:
        z = (whole[..., :half] + 1j * whole[..., half:]) * turn
        turned = jnp.concatenate([z.real, z.imag], axis=-1)
    return jnp.concatenate([turned, rest], axis=-1)


def _feed_forward(config, w, y):
    h = y @ w["ffn.w_in"] + _bias(w, "ffn.b_in")
    functions = {
        "swiglu": jax.nn.silu,
        "geglu": jax.nn.gelu,
        "gelu": jax.nn.gelu,
        "gelu_exact": lambda h: h * jax.scipy.stats.norm.cdf(h),
        "relu": jax.nn.relu,
    }
    function = functions[config.activation]
    h = h * function(y @ w["ffn.w_gate"] + _bias(w, "ffn.b_gate")) if config.gated else function(h)
    return h @ w["ffn.w_out"] + _bias(w, "ffn.b_out")
