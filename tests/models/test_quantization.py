"""int8 weights: plain numpy's, each scale where it belongs, logits of the weights they stand for, bytes as computed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.layouts.initial import nested
from gspmd.moe import MoEConfig
from gspmd_models.config import LatentConfig
from gspmd_models.decoding import decode_step, for_serving, phases, prefill_step, served
from gspmd_models.parameters import parameters

ROWS, LENGTH, READ, ROOM = 8, 8, 6, 12
SWITCH = MoEConfig(experts=8, router="top-k", k=2, shared=1, every=2)
DROPLESS = replace(SWITCH, dispatch="dropless", every=1, shared=0)
LATENT = {"kv_heads": 8, "head_size": 20, "latent": LatentConfig(rank=12, query_rank=8, rotary=8, values=16)}
STRAIGHT = LATENT | {"latent": LatentConfig(rank=12, rotary=8, values=16)}
LED = LATENT | {"layers": 3, "moe": replace(DROPLESS, shared=1, dense_layers=(0,), dense_feed_forward=96)}
BIASES = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "output_bias": True}
TOKENS = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH)).astype(np.int32)


def made(preset, settings, make_mesh, axis_type="explicit", changes=None):
    layout = Layout.load(preset).override(changes or {})
    mesh = make_mesh(layout.mesh_for(8), axis_type)
    return models.build(settings, layout, mesh, jax.random.key(0)), layout, mesh


def scaled_up(quantized):
    """The float32 weights by path that int8 weights and scales stand for, in plain numpy."""
    values = {path: np.asarray(x) for path, x in models.arrays(quantized).items()}
    for path in [path for path, x in values.items() if x.dtype == np.int8]:
        place, _, name = path.rpartition(".")
        scale = f"{place}.{'scale' if name == 'table' else name.replace('w_', 's_')}"
        if scale not in values:  # w_o of a parallel block has that of w_out
            scale = path.replace("attention.w_o", "ffn.s_out")
        over = SUMMED.get(name, values[path].ndim - 2)
        values[path] = values[path] * np.expand_dims(values[scale], over)
    return {path: x for path, x in values.items() if path.rpartition(".")[2] not in (*SCALES, "scale")}


SCALES = (
    "s_q", "s_k", "s_v", "s_o", "s_q_down", "s_q_up", "s_k_down", "s_k_up", "s_v_up", "s_in", "s_gate", "s_out",
)  # fmt: skip

#: The dimensions of stacked matrices over which their products sum, where it is not the last but one.
SUMMED = dict.fromkeys(("w_q", "w_k", "w_v", "w_q_up", "w_k_up", "w_v_up", "table"), (1,)) | {"w_o": (1, 2)}


def on_one_device(settings, values, make_mesh):
    """Logits of a full pass of these weights in a layout without collectives."""
    layout = Layout.load("replicated")
    with jax.set_mesh(make_mesh(layout.mesh_for(1))):
        model = models.Transformer(settings, layout, nested(jax.tree.map(np.asarray, values)), jnp.float32)
        return np.asarray(jax.jit(lambda ids: model(ids)[0])(TOKENS))


def off(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_under_auto_axes_too_weights_and_scales_lie_where_the_layout_says(config, make_mesh):
    """Heads' scales are whole on every device here, and the compiler would leave them where their maxima were taken."""
    model, layout, mesh = made("weight-stationary-2d", config(), make_mesh, "auto")
    quantized = models.quantize(model)
    rows = parameters(quantized.config, layout)
    for path, x in models.arrays(quantized).items():
        placed = jax.NamedSharding(mesh, rows[path].spec.partition_spec())
        assert x.sharding.is_equivalent_to(placed, x.ndim), path


def by_channel(path, w):
    """A weight as [..., channels that have a scale each, numbers of one channel]."""
    name = path.rpartition(".")[2]
    summed = SUMMED.get(name, (w.ndim - 2,))
    kept = [d for d in range(w.ndim) if d not in summed]
    return w.transpose(*kept, *summed).reshape(*(w.shape[d] for d in kept), -1)


def at_scale(weights, scale):
    return [np.clip(np.round(w / scale[..., None]), -127, 127) * scale[..., None] for w in weights]


def squared(ours, weights):
    return sum(np.square(x - w).sum(-1) for x, w in zip(ours, weights, strict=True))


@pytest.mark.turns(1)
@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_weights_are_those_of_plain_numpy(block, config, make_mesh):
    settings = config(block=block, moe=SWITCH, tied=False)
    model, layout, mesh = made("switch-expert-model", settings, make_mesh)
    quantized = models.quantize(model)
    rows, values = parameters(quantized.config, layout), models.arrays(quantized)
    plain, stood_for = models.arrays(model), scaled_up(quantized)
    assert list(values) == list(rows)
    for path, x in values.items():
        assert x.shape == rows[path].shape
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, rows[path].spec.partition_spec()), x.ndim)
    assert list(stood_for) == list(plain)
    matrices = [path for path, x in values.items() if x.dtype == jnp.int8]
    assert matrices == [path for path in plain if path.rpartition(".")[2].startswith(("w_", "table"))]
    together = {"blocks.0.attention.w_o", "blocks.0.ffn.w_out"} if block == "parallel" else set()
    for path in matrices:
        # each weight of a group as [channels that share a scale, numbers], in float64
        group = [path, *(together - {path})] if path in together else [path]
        weights = [by_channel(other, np.asarray(plain[other], np.float64)) for other in group]
        ours = [by_channel(other, np.asarray(stood_for[other], np.float64)) for other in group]
        whole = np.max([np.abs(w).max(-1) for w in weights], axis=0) / 127
        best = np.min([squared(at_scale(weights, whole * (1 + n / 320)), weights) for n in range(-24, 41)], axis=0)
        assert np.all(squared(ours, weights) <= best * 1.0001), path
        assert squared(ours, weights).sum() < 0.95 * squared(at_scale(weights, whole), weights).sum(), path
    assert all(values[path].dtype == jnp.float32 for path in values if path not in matrices)
    with pytest.raises(ValueError, match="are int8 already"):
        models.quantize(quantized)
    with pytest.raises(ValueError, match="Build it with int8 off, and quantize it"):
        models.build(quantized.config, layout, mesh, jax.random.key(0))


SLOW = pytest.mark.slow
CASES = [
    ("weight-stationary-2d", "blocking", {"block": "parallel", "tied": True, "kv_heads": 1}),
    pytest.param("weight-gathered-xyz", "looped", {"block": "serial", "tied": False, **BIASES}, marks=SLOW),
    ("gshard", "blocking", {"block": "serial", "moe": DROPLESS, "ffn_bias": True}),
    pytest.param("gshard", "looped", {"block": "parallel", "moe": SWITCH, "ffn_bias": True}, marks=SLOW),
    pytest.param("switch-expert-model", "blocking", {"block": "parallel", "moe": DROPLESS}, marks=SLOW),
    pytest.param("switch-expert-model", "xla", {"block": "serial", "moe": SWITCH}, marks=SLOW),
    pytest.param("weight-stationary-1d", "xla", {"block": "parallel", **BIASES}, marks=SLOW),
    pytest.param("megatron-1d", "blocking", {"block": "serial", "activation": "gelu"}, marks=SLOW),
    pytest.param("zero-3", "looped", {"block": "parallel"}, marks=SLOW),
    pytest.param("weight-stationary-2d", "looped", {"block": "parallel", "parallel_norms": 2, **BIASES}, marks=SLOW),
    pytest.param("weight-gathered-x", "auto", {"block": "parallel", "tied": False}, marks=SLOW),
    ("weight-stationary-2d", "blocking", LATENT),
    pytest.param("weight-stationary-1d", "xla", STRAIGHT, marks=SLOW),
    pytest.param("megatron-1d", "looped", LATENT, marks=SLOW),
    pytest.param("weight-gathered-xyz", "blocking", STRAIGHT | {"tied": False}, marks=SLOW),
]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("preset", "lowering", "changes"), CASES)
def test_logits_are_those_of_the_weights_they_stand_for(preset, lowering, changes, config, make_mesh):
    settings = config(**changes)
    model, layout, mesh = made(preset, settings, make_mesh, "auto" if lowering == "xla" else "explicit")
    quantized = models.quantize(model)
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        ids = gspmd.annotate(TOKENS, layout.spec("embedding.tokens"))
        logits = np.asarray(jax.jit(lambda ids: quantized(ids)[0])(ids))
    assert off(logits, on_one_device(settings, scaled_up(quantized), make_mesh)) < 1e-5
    if settings.moe is None:  # a token that goes to another expert is another token
        assert off(logits, on_one_device(settings, models.arrays(model), make_mesh)) < 0.02


def test_weights_cross_the_wire_as_int8(config, make_mesh):
    settings = config(layers=1, block="parallel")
    model, layout, mesh = made("weight-gathered-xyz", settings, make_mesh)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        ids, sent = gspmd.annotate(TOKENS, layout.spec("embedding.tokens")), []
        for each in (model, models.quantize(model)):
            program = jax.jit(lambda weights, ids, each=each: models.with_arrays(each, weights).hidden(ids)[0])
            plan = gspmd.trace(program, models.arrays(each), ids)
            found = gspmd.ledger(program.lower(models.arrays(each), ids).compile(), mesh)
            assert found.compare(plan).agrees
            sent.append(sum(size for (kind, _), (_, size) in plan.by_kind_and_axes().items() if kind == "all-gather"))
    weights = models.arrays(model)
    gathered = sum(np.prod(x.shape) for path, x in weights.items() if "w_" in path or path == "embedding.table")
    scales = 4 * len(weights["embedding.table"]) * 3 / 4  # of the table, whose V lies over four devices
    assert sent[0] - sent[1] == 3 * gathered * 7 / 8 - scales  # of every weight one byte in four


READS = [
    ("weight-stationary-2d", "weight-gathered-xyz", {"block": "parallel", "kv_heads": 1}),
    ("weight-stationary-2d", "weight-gathered-xyz", LATENT),
    pytest.param("weight-stationary-2d", "weight-gathered-xyz", LED, marks=SLOW),
    pytest.param("megatron-1d", "megatron-1d", STRAIGHT, marks=SLOW),
    pytest.param("weight-stationary-1d", "weight-gathered-x", LATENT | {"tied": False}, marks=SLOW),
]


@pytest.mark.parametrize("cache", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(("stationary", "gathered", "changes"), READS)
def test_a_prompt_is_read_and_continued_with_int8(stationary, gathered, changes, cache, config, make_mesh):
    settings = for_serving(config(**changes))
    stationary, gathered = Layout.load(stationary), Layout.load(gathered)
    mesh = make_mesh(stationary.mesh_for(8))
    sizes = tuple(settings.sizes(ROWS, length) | {"T": ROOM} for length in (READ, 1))
    reading, writing = phases(stationary, gathered, sizes=sizes, mesh=mesh)
    model = models.quantize(models.build(settings, writing, mesh, jax.random.key(0)))
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        weights, held = (
            models.arrays(model),
            models.empty_cache(settings, writing, mesh, ROWS, ROOM, "float32", int8=cache),
        )
        prompt = jax.device_put(TOKENS[:, :READ], models.abstract_tokens(reading, mesh, ROWS, READ).sharding)
        logits, held = jax.jit(prefill_step(served(model, reading)))(weights, prompt, np.full(ROWS, READ), held)
        found, decode = [logits], jax.jit(decode_step(model))
        for at in range(READ, LENGTH):
            logits, held = decode(weights, TOKENS[:, at], held)
            found.append(logits)
    want = on_one_device(settings, scaled_up(model), make_mesh)[:, READ - 1 :]
    assert off(np.stack(found, axis=1), want) < (0.01 * settings.layers if cache else 1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("embed", [64, 512])
def test_a_channel_that_is_not_finite_has_a_scale_that_is_not(value, embed, config, make_mesh):
    """And no other channel; in wide ones XLA's maximum passes over a NaN."""
    model, _, mesh = made("replicated", config(embed=embed, block="parallel"), make_mesh)
    values = models.arrays(model)
    with jax.set_mesh(mesh):
        values["blocks.0.ffn.w_in"] = values["blocks.0.ffn.w_in"].at[0, 3, 5].set(value)
        values["blocks.0.attention.w_o"] = values["blocks.0.attention.w_o"].at[1, 1, 1, 7].set(value)
        quantized = models.arrays(models.quantize(models.with_arrays(model, values)))
    faulty = {path: np.argwhere(~np.isfinite(x)).tolist() for path, x in quantized.items()}
    # w_o and w_out of a parallel block have their scales in common
    assert {path: at for path, at in faulty.items() if at} == {
        "blocks.0.ffn.s_in": [[0, 5]], "blocks.0.ffn.s_out": [[1, 7]]
    }  # fmt: skip


@pytest.mark.parametrize("place", [np.asarray, lambda x: jax.device_put(x, jax.devices()[0])], ids=["numpy", "device"])
def test_weights_on_no_mesh_are_refused(place, config, make_mesh):
    model, layout, _ = made("replicated", config(), make_mesh)
    values = {path: place(np.asarray(x)) for path, x in models.arrays(model).items()}
    loose = models.Transformer(model.config, layout, nested(values), jnp.float32)
    with pytest.raises(ValueError, match="parameters are not placed on a mesh"):
        models.quantize(loose)
