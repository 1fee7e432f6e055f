from dataclasses import replace

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.annotate import LayoutError, Spec
from gspmd.layouts import Layout
from gspmd.layouts.distributions import Normal
from gspmd.moe import MoEConfig
from gspmd_models.parameters import initialise, parameters

VARIANTS = [
    {},
    {"tied": False, "activation": "gelu"},
    {"kv_heads": 1, "block": "parallel"},
    {"block": "parallel", "parallel_norms": 2, "norm": "layer", "norm_bias": True},
    {"kv_heads": 2, "moe": MoEConfig(experts=8, every=2)},
    {"moe": MoEConfig(router="noisy-top-k")},
    {"block": "parallel", "activation": "relu", "moe": MoEConfig(experts=8, every=1, router="gshard")},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_table_has_as_many_parameters_as_the_config_counts(config, changes):
    table = parameters(config(**changes), Layout.load("replicated"))
    assert sum(np.prod(row.shape) for row in table.values()) == config(**changes).num_parameters


def test_dense_layers_beside_experts_need_their_lines(config):
    """`Layout.check` is told that there are experts, and not that others have none: the model says so, at once."""
    whole = Layout.load("gshard")
    lines = ("ffn.w_in", "ffn.w_gate", "ffn.hidden", "ffn.w_out", "ffn.in_via", "ffn.out_via")
    table = {key: text for key, text in whole.table.items() if key not in lines}
    overrides = {section: {key: text for key, text in held.items() if key not in lines}
                 for section, held in whole.overrides.items()}  # fmt: skip
    lacking = replace(whole, table=table, overrides=overrides)
    mixed, routed = (config(moe=MoEConfig(experts=8, every=every)) for every in (2, 1))
    for each in (mixed, routed):
        lacking.check(each.sizes(8, 16))
    assert parameters(routed, lacking)
    assert parameters(mixed, whole)
    with pytest.raises(LayoutError) as fault:
        parameters(mixed, lacking)
    assert str(fault.value) == (
        "cannot use layout 'gshard': 1 of the model's 2 layers have no experts, but ffn.w_in, ffn.hidden and ffn.w_out "
        'are not written.\n  Write w_in = "EF", hidden = "BLF" and w_out = "FE" in [ffn], with their mesh axes.'
    )
    with pytest.raises(LayoutError, match="3 of the model's 6 layers have no experts"):
        parameters(replace(mixed, encoder_layers=4), lacking)


def test_layers_are_stacked_by_their_place_in_the_pattern(config):
    table = models.parameter_specs(config(layers=6, moe=MoEConfig(every=3)), Layout.load("weight-stationary-2d"))
    assert table["blocks.0.ffn.w_in"] == (Spec.parse("NE_xF_yz"), (2, 32, 64))
    assert table["blocks.2.moe.router"][1] == (2, 32, 8)
    assert {path.split(".")[1] for path in table if path.startswith("blocks")} == {"0", "1", "2"}
    assert not any(path.startswith("blocks.2.ffn") for path in table)


def test_the_module_holds_what_the_table_says(config, make_mesh):
    settings = config(moe=MoEConfig())
    layout = Layout.load("gshard")
    mesh = make_mesh(layout.mesh_for(8))
    values = models.arrays(models.build(settings, layout, mesh, jax.random.key(0)))
    table = models.parameter_specs(settings, layout)
    assert list(values) == list(table)
    for path, (spec, shape) in table.items():
        assert values[path].shape == shape, path
        assert values[path].sharding.shard_shape(shape) == spec.local_shape(shape, mesh), path


def test_a_key_gives_the_same_model_in_every_layout(config, make_mesh):
    settings = config()
    drawn = []
    for name, devices in (("replicated", 1), ("weight-stationary-2d", 8)):
        layout = Layout.load(name)
        mesh = make_mesh(layout.mesh_for(devices))
        drawn.append(initialise(parameters(settings, layout), mesh, jax.random.key(7)))
    for path, value in drawn[0].items():
        np.testing.assert_allclose(value, np.asarray(drawn[1][path]), rtol=1e-6, err_msg=path)


def test_drawing_never_holds_the_whole(make_mesh, axis_type):
    """A matrix over 8 devices is drawn with a few times its shard in temporary memory, not with the whole of it."""
    from gspmd_models.parameters import _compiled

    mesh = make_mesh({"x": 8}, axis_type)
    with jax.set_mesh(mesh):
        drawer = _compiled(Normal(1.0), (1024, 2048), jax.P("x", None), False)
        memory = drawer.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 1024 * 2048 * 4 // 8
    assert memory.temp_size_in_bytes < 1024 * 2048 * 4 // 2


def test_deviations_follow_what_is_summed(config):
    table = parameters(config(moe=MoEConfig()), Layout.load("replicated"))
    assert table["blocks.0.ffn.w_in"].initialise == Normal(32**-0.5)
    assert table["blocks.0.attention.w_o"].initialise == Normal((64 * 4) ** -0.5)
    assert table["blocks.1.moe.router"].initialise == Normal((0.1 / 32) ** 0.5)
    drawn = table["embedding.table"].initialise(jax.random.key(0), (512, 512))
    assert abs(float(drawn.std()) * 32**0.5 - 1) < 0.01


def test_a_layout_with_other_dimensions_is_refused(config):
    layout = Layout.load("replicated").override({"ffn.w_in": "FE"})
    with pytest.raises(ValueError, match=r"layout key ffn\.w_in is 'FE', but its dimensions are EF"):
        parameters(config(), layout)


def test_what_the_mesh_does_not_divide_is_named(config, make_mesh):
    mesh = make_mesh({"x": 1, "y": 2, "z": 2})
    with pytest.raises(gspmd.SpecError) as error:
        models.build(config(heads=3, kv_heads=1), Layout.load("weight-gathered-xyz"), mesh, jax.random.key(0))
    assert "attention.w_q = NE_xH_yzD" in str(error.value)
    assert "The same in 1 more: attention.w_o" in str(error.value)


def test_optimizer_and_gradients_may_lie_elsewhere(config):
    layout = Layout.load("replicated").override({"optimizer.ffn.w_in": "E_xF", "gradients.ffn.w_out": "FE_x"})
    assert models.optimizer_specs(config(), layout)["blocks.0.ffn.w_in"] == Spec.parse("NE_xF")
    assert models.optimizer_specs(config(), layout)["blocks.0.ffn.w_out"] == Spec.parse("NFE")
    assert models.gradient_specs(config(), layout)["blocks.0.ffn.w_out"] == Spec.parse("NFE_x")
