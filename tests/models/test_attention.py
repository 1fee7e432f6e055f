from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from gspmd.annotate import Spec
from gspmd.layouts import Layout
from gspmd_models import ModelConfig
from gspmd_models.rotary import rotate


def test_rotation_turns_pairs_by_position():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 6)).astype(np.float32)
    angle = np.arange(5)[:, None] * 100.0 ** (-np.arange(3) / 3)
    z = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angle)[None, :, None]
    turned = rotate(jnp.asarray(x), ModelConfig(head_size=6, rope_base=100.0))
    np.testing.assert_allclose(turned, np.concatenate([z.real, z.imag], -1), rtol=1e-5, atol=1e-5)


def test_rotated_products_depend_on_distance_alone():
    q, k = (np.random.default_rng(seed).normal(size=8).astype(np.float32) for seed in (1, 2))
    settings = ModelConfig(head_size=8)
    turned = [np.asarray(rotate(jnp.broadcast_to(v, (1, 12, 1, 8)), settings))[0, :, 0] for v in (q, k)]
    products = turned[0] @ turned[1].T
    for distance in (0, 3, 7):
        diagonal = np.diagonal(products, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)


def test_rotation_keeps_its_placement(make_mesh, axis_type):
    mesh = make_mesh({"x": 2, "y": 4}, axis_type)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((4, 6, 8, 2)), jax.sharding.NamedSharding(mesh, jax.P("x", None, "y")))
        text = jax.jit(rotate, static_argnums=1).lower(x, ModelConfig(head_size=2)).compile()
        assert text.output_shardings.spec[:3] == ("x", None, "y")
        assert "all-" not in text.as_text()


def test_rotation_is_float32_inside():
    x, settings = jnp.ones((1, 300, 1, 4), jnp.bfloat16), ModelConfig(head_size=4)
    exact = rotate(x.astype(jnp.float32), settings)
    assert rotate(x, settings).dtype == jnp.bfloat16
    np.testing.assert_allclose(rotate(x, settings).astype(jnp.float32), exact, atol=1e-2)


def test_the_parallel_block_pins_its_shared_input_only_where_both_agree():
    layout = Layout.load("weight-stationary-2d")
    both = (
        "residual, (attention.w_q, attention.w_k, attention.w_v, w_in, w_gate)"
        " -> (attention.query, attention.key, attention.key, hidden, hidden)"
    )
    at, ffn = {"attention.in_via": "BLE_x, E_xHD"}, {"ffn.in_via": "BLE_x, E_xF"}
    assert str(layout.override({**at, **ffn}).ffn.via(both)).startswith("BLE_x, (E_xHD, E_xKD")
    assert str(layout.override({**at, **ffn}).ffn.via(both)).endswith(", E_xF, E_xF)")
    assert (
        layout.override({"attention.in_via": "BLE, EHD", "attention.key_via": "BLE, EKD", **ffn}).ffn.via(both) is None
    )
    for absent in (at, ffn):
        table = {key: text for key, text in layout.override(absent).table.items() if "via" not in key or key in absent}
        assert replace(layout, table=table).ffn.via(both) is None


def test_presets_keep_length_and_head_size_whole_in_the_core():
    for name in ("gshard", "megatron-1d", "weight-gathered-xyz"):
        at = Layout.load(name).section("attention")
        assert not Spec.parse(at.query).axes_of("L")
        assert not Spec.parse(at.query).axes_of("D")
