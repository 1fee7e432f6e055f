"""The transformer in plain jax.numpy, on one device: the reference for every layout."""

import dataclasses

import jax
import jax.numpy as jnp


def logits(config, values, tokens):
    """Return logits [B, L, V] from the parameters by path."""
    return forward(config, values, tokens)[0]


def forward(config, values, tokens):
    """Return logits [B, L, V], and the rotated keys and the values of all layers, [N, B, L, K, D] each."""
    x = values["embedding.table"][tokens] * (config.embed**0.5 if config.scale_embedding else 1.0)
    if config.positions == "learned":
        x = x + values["embedding.positions"][None, : tokens.shape[1]]
    if config.embedding_norm:
        x = _norm(config, x, values, "embedding.norm")
    heads = []
    places = {number: (place, at) for place, each in enumerate(config.stacks()) for at, number in enumerate(each)}
    for layer in range(config.layers):
        number, at = places[layer]
        place = f"blocks.{number}."
        weights = {k.removeprefix(place): v[at] for k, v in values.items() if k.startswith(place)}
        x = _block(config, weights, x, heads, config.layer_kind(layer))
    keys, held = map(jnp.stack, zip(*heads))
    table = values["embedding.table" if config.tied else "output.table"]
    found = _norm(config, x, values, "output.norm") @ table.T + _bias(values, "output.bias")
    return _capped(found, config.logit_softcap), keys, held


def loss(config, values, tokens):
    """Return the mean next-token cross-entropy in nats."""
    chosen = jax.nn.log_softmax(logits(config, values, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(chosen, tokens[:, 1:, None], axis=-1))


def _block(config, w, x, heads, kind):
    if config.block == "parallel":
        y = _norm(config, x, w, "norm")
        z = y if config.parallel_norms == 1 else _norm(config, x, w, "ffn.norm")
        return x + _attention(config, w, y, heads, kind) + _feed_forward(config, w, z)
    y = _norm(config, x, w, "attention.norm") if config.norms != "after" else x
    y = _attention(config, w, y, heads, kind)
    x = x + (_norm(config, y, w, "attention.norm_after") if config.norms != "before" else y)
    part, layer = ("moe", _experts) if "moe.router" in w else ("ffn", _feed_forward)
    y = _norm(config, x, w, f"{part}.norm") if config.norms != "after" else x
    y = layer(config, w, y)
    return x + (_norm(config, y, w, "ffn.norm_after") if config.norms != "before" else y)


def _capped(x, bound):
    return x if bound is None else bound * jnp.tanh(x / bound)


def _bias(w, name):
    return jnp.expand_dims(w[name], (0, 1)) if name in w else 0.0


def _norm(config, x, w, name):
    if config.norm == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return _unit(config, x) * _bias(w, name) + _bias(w, f"{name}_bias")


def _unit(config, x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon)


def _latent_attention(config, w, y, heads):
    rank = config.latent.rank
    rotary = dataclasses.replace(config.rotary_of("full"), norm_epsilon=config.latent.norm_epsilon)
    if config.latent.query_rank:
        down = _unit(rotary, y @ w["attention.w_q_down"]) * _bias(w, "attention.q_latent_norm")
        q = jnp.einsum("BLU,UHD->BLHD", down, w["attention.w_q_up"])
    else:
        q = jnp.einsum("BLE,EHD->BLHD", y, w["attention.w_q"])
    both = y @ w["attention.w_k_down"]
    latent = _unit(rotary, both[..., :rank]) * _bias(w, "attention.latent_norm")
    shared = _rotate(rotary, both[..., None, rank:], "full")
    heads.append((jnp.concatenate([latent[:, :, None], shared], axis=-1),) * 2)
    first = config.head_size - config.latent.rotary
    q = jnp.concatenate([q[..., :first], _rotate(rotary, q[..., first:], "full")], axis=-1)
    k = jnp.einsum("BLZ,ZHD->BLHD", latent, w["attention.w_k_up"])
    k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:3], shared.shape[3]))], axis=-1)
    v = jnp.einsum("BLZ,ZHD->BLHD", latent, w["attention.w_v_up"])
    scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
    scores = jnp.einsum("BLHD,BTHD->BHLT", q, k) * scale
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool)[None, None], scores, -jnp.inf)
    return jnp.einsum("BHLT,BTHD,HDE->BLE", jax.nn.softmax(scores), v, w["attention.w_o"])


def _attention(config, w, y, heads, kind):
    if config.latent is not None:
        return _latent_attention(config, w, y, heads)
    q, k, v = (
        jnp.einsum("BLE,EHD->BLHD", y, w[f"attention.w_{name}"]) + _bias(w, f"attention.b_{name}") for name in "qkv"
    )
    if config.qkv_clip is not None:
        q, k, v = (jnp.minimum(jnp.maximum(t, -config.qkv_clip), config.qkv_clip) for t in (q, k, v))
    if config.qk_norm == "head":
        q, k = (_unit(config, t) * w[f"attention.{name}_norm"][None, None, None] for t, name in ((q, "q"), (k, "k")))
    if config.qk_norm == "all":
        over = [
            (t, t.reshape(*t.shape[:2], -1), w[f"attention.{name}_norm"].reshape(-1))
            for t, name in ((q, "q"), (k, "k"))
        ]
        q, k = ((_unit(config, wide) * scale[None, None]).reshape(t.shape) for t, wide, scale in over)
    if config.positions == "rotary" and kind != "unrotated":
        q, k = _rotate(config, q, kind), _rotate(config, k, kind)
        if config.qk_norm == "rotated":
            q, k = _unit(config, q), _unit(config, k)
    if kind == "unrotated":
        steps = jnp.floor((jnp.arange(q.shape[1]) + 1) / config.growth_interval)
        q = q * (1 + config.query_growth * jnp.log(1 + steps))[None, :, None, None]
    heads.append((k, v))
    k, v = (jnp.repeat(t, config.heads // config.kv_heads, axis=2) for t in (k, v))
    scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
    scores = _capped(jnp.einsum("BLHD,BTHD->BHLT", q, k) * scale, config.score_softcap)
    if config.positions == "alibi":
        at = jnp.arange(q.shape[1])
        slopes = jnp.array(alibi_slopes(config.heads, config.alibi_max)) * (scale if config.alibi_scaled else 1.0)
        scores = scores - slopes[None, :, None, None] * (at[:, None] - at[None])[None, None]
    seen = jnp.tri(q.shape[1], dtype=bool)
    if kind == "sliding":
        seen &= ~jnp.tri(q.shape[1], k=-config.sliding_window, dtype=bool)
    if kind == "chunked":
        of_chunk = jnp.arange(q.shape[1]) // config.attention_chunk
        seen &= of_chunk[:, None] == of_chunk[None]
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    if config.sinks:
        sinks = jnp.broadcast_to(w["attention.sinks"][None, :, None, None], (*scores.shape[:3], 1))
        shares = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1))[..., :-1]
    else:
        shares = jax.nn.softmax(scores)
    out = jnp.einsum("BHLT,BTHD,HDE->BLE", shares, v, w["attention.w_o"])
    return out + _bias(w, "attention.b_o")


def alibi_slopes(heads, most):
    """Return the slopes of ALiBi as its paper defines them.

    For a number of heads that is no power of two, those of the next lower one, and then every second of its double.
    """
    if heads & (heads - 1) == 0:
        return [2.0 ** (-most * (head + 1) / heads) for head in range(heads)]
    lower = 2 ** (len(bin(heads)) - 3)
    return alibi_slopes(lower, most) + alibi_slopes(2 * lower, most)[::2][: heads - lower]


def _rotate(config, x, kind):
    half = (config.rotary_size or config.head_size) // 2
    base = config.rope_base if kind != "sliding" or config.local_rope_base is None else config.local_rope_base
    angle = jnp.arange(x.shape[1])[:, None] / base ** (jnp.arange(half)[None] / half)
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


def _experts(config, w, y):
    """Llama 4's: the likeliest expert, whose input the gate multiplies, beside one that every token uses."""
    scores = y @ w["moe.router"]
    chosen = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1])
    given = y * jnp.sum(jax.nn.sigmoid(scores) * chosen, axis=-1, keepdims=True)
    h = jnp.einsum("BLE,XEF->BLXF", given, w["moe.w_in"])
    h = h * jax.nn.silu(jnp.einsum("BLE,XEF->BLXF", given, w["moe.w_gate"]))
    shared = (y @ w["moe.shared.w_in"] * jax.nn.silu(y @ w["moe.shared.w_gate"])) @ w["moe.shared.w_out"]
    return jnp.einsum("BLXF,XFE,BLX->BLE", h, w["moe.w_out"], chosen) + shared


def _feed_forward(config, w, y):
    h = y @ w["ffn.w_in"] + _bias(w, "ffn.b_in")
    functions = {
        "swiglu": jax.nn.silu,
        "swiglu_clamped": lambda h: jnp.minimum(h, 7) * jax.nn.sigmoid(1.702 * jnp.minimum(h, 7)),
        "geglu": jax.nn.gelu,
        "gelu": jax.nn.gelu,
        "gelu_exact": lambda h: h * jax.scipy.stats.norm.cdf(h),
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
    }
    function = functions[config.activation]
    h = jnp.clip(h, -7, 7) + 1 if config.activation == "swiglu_clamped" else h
    h = h * function(y @ w["ffn.w_gate"] + _bias(w, "ffn.b_gate")) if config.gated else function(h)
    return h @ w["ffn.w_out"] + _bias(w, "ffn.b_out")
