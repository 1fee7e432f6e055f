"""The parts that public families differ in: biases, norms, rotations and activations, against plain code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.layouts.rules.alternatives import singles
from gspmd.moe import MoEConfig
from gspmd_models.config import LatentConfig, RopeScaling
from gspmd_models.rotary import angles_at, rotate
from tests.models import plain
from tests.models.conftest import put

FAMILIES = {
    "gpt-j": {
        "block": "parallel", "norm": "layer", "norm_bias": True, "activation": "gelu", "ffn_bias": True,
        "output_bias": True, "rotary_size": 4, "rotary_pairs": "neighbours", "tied": False, "scale_embedding": False,
    },
    "phi": {
        "block": "parallel", "norm": "layer", "norm_bias": True, "activation": "gelu", "ffn_bias": True,
        "qkv_bias": True, "out_bias": True, "output_bias": True, "rotary_size": 6, "tied": False, "kv_heads": 2,
    },
    "gpt-neox": {
        "block": "parallel", "parallel_norms": 2, "norm": "layer", "norm_bias": True, "activation": "gelu_exact",
        "ffn_bias": True, "qkv_bias": True, "out_bias": True, "rotary_size": 4, "tied": False,
    },
    "gate and two norms": {"block": "parallel", "parallel_norms": 2, "kv_heads": 1},
    "qwen2": {"qkv_bias": True, "kv_heads": 2, "scale_embedding": False},
    "qwen3": {"qk_norm": True, "kv_heads": 4, "head_size": 6, "tied": False},
    "every bias": {
        "qkv_bias": True, "out_bias": True, "ffn_bias": True, "activation": "geglu", "norm": "layer",
        "output_bias": True, "qk_norm": True,
    },
    "olmo2": {"norms": "after", "qk_norm": "all", "kv_heads": 4, "tied": False, "scale_embedding": False},
    "gemma3": {
        "norms": "both", "qk_norm": "head", "layers": 2, "layer_kinds": ("sliding", "full"), "sliding_window": 5,
        "local_rope_base": 100.0, "rope_base": 5000.0, "score_softcap": 1.5, "logit_softcap": 2.0, "kv_heads": 2,
    },
    "unrotated": {
        "layers": 2, "layer_kinds": ("unrotated", "full"), "sinks": True, "attention_scale": 0.4, "norms": "after",
    },
    "llama4": {
        "layers": 4, "layer_kinds": ("chunked", "chunked", "unrotated", "chunked"), "attention_chunk": 5, "kv_heads": 2,
        "qk_norm": "rotated", "rotary_pairs": "neighbours", "query_growth": 0.6, "growth_interval": 3, "tied": False,
        "moe": MoEConfig(
            experts=8, router="top-k", k=1, scores="sigmoid", renormalize=False, gate_inputs=True, every=2, shared=1,
            dense_feed_forward=96, dispatch="dropless", aux_weight=0.0,
        ),
    },
    "latent": {"head_size": 10, "latent": LatentConfig(rank=6, query_rank=5, rotary=4, values=7), "tied": False},
    "latent of keys": {"head_size": 8, "latent": LatentConfig(rank=12, rotary=2, values=9), "attention_scale": 0.5},
    "gpt2": {
        "positions": "learned", "context_length": 40, "norm": "layer", "norm_bias": True, "activation": "gelu",
        "ffn_bias": True, "qkv_bias": True, "out_bias": True, "scale_embedding": False,
    },
    "bloom": {
        "positions": "alibi", "norm": "layer", "norm_bias": True, "activation": "gelu", "embedding_norm": True,
        "ffn_bias": True, "qkv_bias": True, "out_bias": True, "scale_embedding": False,
    },
    "mpt": {
        "positions": "alibi", "alibi_max": 5.0, "norm": "layer", "activation": "gelu_exact", "qkv_clip": 0.2,
        "scale_embedding": False,
    },
    "falcon": {
        "positions": "alibi", "alibi_scaled": True, "block": "parallel", "norm": "layer", "kv_heads": 4,
        "activation": "gelu_exact", "attention_scale": 0.3, "embedding_norm": True,
    },
    "clamped": {"activation": "swiglu_clamped", "ffn_bias": True, "qkv_bias": True, "out_bias": True},
    "plain silu": {"activation": "silu"},
    "exact": {"activation": "gelu_exact", "norm": "layer", "rotary_pairs": "neighbours", "block": "parallel"},
}  # fmt: skip
CASES = [
    ("gpt-j", "weight-stationary-2d", "blocking", "explicit"),
    ("every bias", "megatron-1d", "blocking", "auto"),
    ("llama4", "context-parallel", "looped", "explicit"),
    ("bloom", "context-parallel", "blocking", "explicit"),
]
MORE = [
    ("gpt-neox", "weight-stationary-2d", "blocking", "explicit"),
    ("gpt-neox", "megatron-1d", "xla", "auto"),
    ("gate and two norms", "weight-gathered-xyz", "looped", "explicit"),
    ("gate and two norms", "zero-3", "blocking", "auto"),
    ("phi", "weight-gathered-x", "looped", "auto"),
    ("qwen3", "zero-3", "xla", "explicit"),
    ("qwen2", "weight-stationary-1d", "blocking", "auto"),
    ("every bias", "megatron-1d", "xla", "explicit"),
    ("exact", "weight-gathered-xyz", "xla", "auto"),
    ("latent", "weight-stationary-2d", "blocking", "explicit"),
    ("latent", "context-parallel", "xla", "auto"),
    ("latent of keys", "megatron-sequence", "looped", "explicit"),
    ("latent of keys", "weight-gathered-xyz", "xla", "explicit"),
    ("olmo2", "megatron-1d", "blocking", "explicit"),
    ("gpt2", "weight-stationary-2d", "blocking", "explicit"),
    ("gpt2", "context-parallel", "xla", "auto"),
    ("olmo2", "weight-gathered-xy", "xla", "auto"),
    ("bloom", "megatron-sequence", "looped", "explicit"),
    ("bloom", "zero-3", "xla", "auto"),
    ("mpt", "weight-stationary-2d", "blocking", "explicit"),
    ("mpt", "context-parallel", "looped", "auto"),
    ("falcon", "weight-gathered-xyz", "xla", "explicit"),
    ("falcon", "megatron-1d", "blocking", "auto"),
    ("gemma3", "weight-stationary-2d", "blocking", "explicit"),
    ("gemma3", "context-parallel", "looped", "explicit"),
    ("unrotated", "zero-3", "blocking", "auto"),
    ("llama4", "weight-stationary-2d", "blocking", "explicit"),
    ("llama4", "context-parallel", "xla", "auto"),
    ("llama4", "zero-3", "xla", "explicit"),
    ("clamped", "megatron-1d", "looped", "explicit"),
    ("plain silu", "weight-stationary-2d", "blocking", "explicit"),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.turns(1)
@pytest.mark.parametrize(("family", "preset", "lowering", "kind"), CASES)
def test_loss_and_gradients_are_those_of_plain_code(config, make_mesh, tokens, family, preset, lowering, kind):
    settings, layout = config(**({"layers": 1} | FAMILIES[family])), Layout.load(preset)
    mesh = make_mesh(layout.mesh_for(8, settings.sizes(8, 16)), kind)
    model = models.build(settings, layout, mesh, jax.random.key(0))
    values = models.arrays(model)
    assert sum(value.size for value in values.values()) == settings.num_parameters
    # biases begin at zero and scales at one, where much is equal by chance
    seeds = dict(zip(values, jax.random.split(jax.random.key(1), len(values))))
    wide = {path: np.asarray(v) + 0.2 * jax.random.normal(seeds[path], v.shape) for path, v in values.items()}
    host = {path: jnp.asarray(np.asarray(value)) for path, value in wide.items()}
    by_hand = jax.jit(jax.value_and_grad(lambda values: plain.loss(settings, values, jnp.asarray(tokens))))
    wanted, wanted_gradients = by_hand(host)
    placed = {path: jax.device_put(np.asarray(wide[path]), v.sharding) for path, v in values.items()}
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        run = jax.jit(jax.value_and_grad(lambda values, ids: models.loss(models.with_arrays(model, values), ids)[0]))
        found, gradients = run(placed, put(tokens, layout, mesh))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(np.asarray(gradient), wanted_gradients[path], rtol=2e-3, atol=5e-5, err_msg=path)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rotation_at_far_positions_is_that_of_exact_angles(pairs):
    """At positions where a float32 angle has lost its digits, and the same as without positions at the first ones."""
    settings = models.ModelConfig(head_size=10, rotary_size=6, rotary_pairs=pairs)
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 10)).astype(np.float32)
    at = np.array([[0, 1, 2], [999_983, 131_071, 77_777]], np.int32)
    angles = at[..., None, None] * 10000.0 ** (-np.arange(3) / 3)
    first, second = (slice(0, 3), slice(3, 6)) if pairs == "halves" else (slice(0, 6, 2), slice(1, 6, 2))
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    wanted = x.copy()
    wanted[..., first], wanted[..., second] = z.real, z.imag
    np.testing.assert_allclose(
        rotate(jnp.asarray(x), settings, angles_at(jnp.asarray(at), settings)), wanted, atol=3e-6
    )
    np.testing.assert_allclose(rotate(jnp.asarray(x), settings)[0], wanted[0], atol=3e-6)


def test_llama_3_stretches_long_wavelengths_alone():
    """Against the loop of its reference code, over all pairs of a head."""
    scaling = RopeScaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_length=8192)
    settings = models.ModelConfig(head_size=128, rope_base=500_000.0, rope_scaling=scaling)
    frequencies = []
    for frequency in 500_000.0 ** (-np.arange(0, 128, 2) / 128):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            frequencies.append(frequency)
        elif wavelength > 8192 / 1.0:
            frequencies.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequencies.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    x = jnp.concatenate([jnp.ones((1, 2000, 1, 64)), jnp.zeros((1, 2000, 1, 64))], axis=-1)
    angles = 1999 * np.array(frequencies)
    wanted = np.concatenate([np.cos(angles), np.sin(angles)])
    np.testing.assert_allclose(rotate(x, settings)[0, -1, 0], wanted, atol=1e-6)


def test_what_does_not_fit_a_family_is_refused():
    with pytest.raises(ValueError) as error:
        models.ModelConfig(rotary_size=18, norm="batch")
    assert str(error.value).splitlines()[1:] == [
        "  norm is 'batch'; it must be one of rms, layer",
        "  rotary_size is 18; it must be at most head_size (16), or 0 for all",
    ]
    with pytest.raises(ValueError, match="parallel_norms is 2, but block is serial, which has two norms anyway"):
        models.ModelConfig(parallel_norms=2)
    with pytest.raises(ValueError, match="parallel_norms is 3; it must be 1 or 2"):
        models.ModelConfig(parallel_norms=3, block="parallel")
    with pytest.raises(ValueError, match="norm_bias is set, but an RMS norm has no bias"):
        models.ModelConfig(norm_bias=True)
    with pytest.raises(ValueError, match=r"cannot scale .*low_frequency is 4.0, and high_frequency is 1.0"):
        RopeScaling(low_frequency=4.0, high_frequency=1.0)


def test_biases_and_masks_of_padding_send_nothing(config, make_mesh):
    """The parallel block with every bias, and 6 heads of 8, has the same planned steps as without."""
    biases = {"qkv_bias": True, "out_bias": True, "ffn_bias": True, "norm_bias": True}
    sizes = {"block": "parallel", "norm": "layer", "kv_heads": 1, "layers": 1}
    layout, found = Layout.load("weight-stationary-2d"), []
    for changes, padding in (({"heads": 8}, {}), ({"heads": 6, "feed_forward": 60, **biases}, {"H": 8, "F": 8})):
        settings = config(**sizes, **changes)
        padded = layout.override({f"padding.{dim}": multiple for dim, multiple in padding.items()})
        mesh = make_mesh(padded.mesh_for(8, settings.sizes(8, 16)))
        with jax.set_mesh(mesh), gspmd.lowering("blocking"):
            model = models.abstract(settings, padded, mesh)
            ids = models.abstract_tokens(padded, mesh, 8, 16)
            forward = lambda values, ids, m=model: models.with_arrays(m, values)(ids)[0]  # noqa: E731
            plan = gspmd.trace(forward, models.arrays(model), ids)
        found.append([(step.kind, step.axes, step.wire_bytes) for step in plan.steps if step.wire_bytes])
    assert found[0] == found[1]
    around = [(kind, axes) for kind, axes, _ in found[0]]
    assert around.count(("all-gather", ("y", "z"))) == around.count(("reduce-scatter", ("y", "z"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weight-stationary-1d", "weight-stationary-2d", "weight-gathered-x", "megatron-1d"])
def test_every_alternative_of_serving_gives_the_same_loss(config, make_mesh, tokens, name):
    settings, found = config(layers=1, kv_heads=8, block="parallel"), []
    layouts = list(singles(Layout.load(name).phase("decode")))
    for layout in [Layout.load("replicated"), *layouts]:
        mesh = make_mesh(layout.mesh_for(8 if layout in layouts else 1))
        with jax.set_mesh(mesh), gspmd.lowering("blocking"):
            model = models.build(settings, layout, mesh, jax.random.key(0))
            found.append(float(jax.jit(lambda ids, m=model: models.loss(m, ids)[0])(put(tokens, layout, mesh))))
    np.testing.assert_allclose(found, found[0], rtol=1e-5)
