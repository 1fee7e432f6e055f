from dataclasses import replace

import pytest

from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training.toml import from_mapping
from gspmd_models import ModelConfig
from gspmd_models.finetuning.config import LoraConfig
from tests.models.conftest import load


def test_every_fault_of_a_model_stands_in_one_error():
    with pytest.raises(ValueError) as error:
        ModelConfig(embed=0, heads=8, kv_heads=3, head_size=7, activation="tanh", block="sideways", norm_epsilon=0.0)
    assert str(error.value) == (
        "this model cannot be built:\n"
        "  embed is 0; it must be at least 1\n"
        "  activation is 'tanh'; it must be one of swiglu, swiglu_clamped, geglu, gelu, gelu_exact, relu, silu\n"
        "  block is 'sideways'; it must be one of serial, parallel\n"
        "  norm_epsilon is 0.0; it must be positive\n"
        "  head_size is 7; rotary position embedding turns pairs, so it must be even\n"
        "  heads is 8, which kv_heads (3) does not divide; it may be 1, 2, 4, 8"
    )


def test_experts_have_to_come_round_evenly():
    with pytest.raises(ValueError, match=r"layers is 4, which moe.every \(3\) does not divide"):
        ModelConfig(layers=4, moe=MoEConfig(every=3))


PUBLISHED = [
    # Chowdhery et al. 2022 (arXiv 2204.02311), table 1, to two decimals; our vocabulary is padded by 128 rows.
    ("palm-8b", 8.63, 0.01),
    ("palm-62b", 62.50, 0.01),
    ("palm-540b", 540.35, 0.01),
    # Fedus et al. 2021 (arXiv 2101.03961), table 9, to the billion.
    ("switch-c", 1571, 0.5),
    # The same table, for an encoder–decoder: its 26 billion are those of the experts, 26.6.
    ("switch-large", 26.6, 0.6),
    # Lepikhin et al. 2020 (arXiv 2006.16668), table 1, rounded to one digit ("beyond 600 billion" in the abstract): the
    # published sizes make 618.5 in the experts alone.
    ("gshard-600b", 600, 20),
    # Black et al. 2022 (arXiv 2204.06745), section 2, to the billion; the published weights have 20.55.
    ("gpt-neox-20b", 20.55, 0.01),
    # NLLB Team 2022 (arXiv 2207.04672), section 8.
    ("nllb-moe-54b", 54.5, 0.05),
]


@pytest.mark.parametrize(("name", "billions", "within"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_models_have_their_published_numbers_of_parameters(name, billions, within):
    assert abs(load(name).num_parameters / 1e9 - billions) < within


def test_a_t5_and_its_switch_have_the_parameters_of_the_published_weights():
    """t5-base of Raffel et al. 2020 has 222,903,552; Switch adds seven experts to every second layer, and routers."""
    switch = load("switch-base-8")
    assert replace(switch, moe=None).num_parameters == 222_903_552
    assert switch.num_parameters == 222_903_552 + 12 * (7 * 2 * 768 * 3072 + 768 * 8)


def test_nllb_by_hand():
    """Biases of experts among them; without experts it is the dense model of 3.3 billion."""
    nllb = load("nllb-moe-54b")
    feed_forward = 2 * 2048 * 8192 + 8192 + 2048
    experts, routers = 12 * 127 * feed_forward, 12 * 2048 * 128
    dense = replace(nllb, moe=None)
    assert nllb.num_parameters == dense.num_parameters + experts + routers
    assert dense.num_parameters / 1e9 == pytest.approx(3.3, abs=0.05)
    assert nllb.num_active_parameters == dense.num_parameters + 12 * feed_forward + routers


def test_tables_of_encoder_decoders_in_billions():
    """Switch's table 9, and GShard's table 1, whose numbers are those of 600 billion, divided."""
    large, gshard = load("switch-large"), load("gshard-m4")
    base = replace(large, embed=768, feed_forward=2048, heads=12, kv_heads=12, layers=12, encoder_layers=12)
    largest = replace(large, embed=4096, feed_forward=10240, heads=64, kv_heads=64)
    assert base.num_parameters / 1e9 == pytest.approx(7, abs=0.5)
    assert largest.num_parameters / 1e9 == pytest.approx(395, abs=0.5)
    for experts, billions in ((128, 37.5), (512, 150), (2048, 600)):
        of = replace(gshard, moe=replace(gshard.moe, experts=experts))
        assert of.num_parameters / 1e9 == pytest.approx(billions, rel=0.06)


def test_experts_of_the_large_models_by_hand():
    """Experts per layer, layers of them, and two matrices each: the same table and section as above."""
    gshard, switch = load("gshard-600b"), load("switch-c")
    assert (gshard.expert_layers, switch.expert_layers) == (18, 30)
    experts = 2048 * 18 * 2 * 1024 * 8192
    dense = 18 * 2 * 1024 * 8192 + 36 * 4 * 1024 * 16 * 128
    routers, norms, table = 18 * 1024 * 2048, (2 * 36 + 1) * 1024, 64_000 * 1024
    assert gshard.num_parameters == experts + dense + routers + norms + table
    experts, attention = 2048 * 30 * 2 * 2080 * 6144, 30 * 4 * 2080 * 32 * 64
    routers, norms, table = 30 * 2080 * 2048, (2 * 30 + 1) * 2080, 32_128 * 2080
    assert switch.num_parameters == experts + attention + routers + norms + table


@pytest.mark.parametrize("preset", ["gshard", "switch-expert-model"])
@pytest.mark.parametrize(("name", "batch", "length"), [("gshard-600b", 4096, 1024), ("switch-c", 1024, 512)])
def test_expert_models_fit_1024_devices(name, batch, length, preset):
    settings, layout = load(name), Layout.load(preset)
    for mesh in (layout.mesh_for(1024), {"x": 8, "y": 8, "z": 16}):
        layout.check(settings.sizes(batch, length), mesh)
    assert settings.moe.capacity(length) == 1


def test_flops_of_a_dense_model_by_hand():
    config = ModelConfig(
        vocabulary=10, embed=4, layers=3, heads=2, kv_heads=1, head_size=2, feed_forward=8, activation="relu"
    )
    per_layer = 4 * 2 * 2 * 2 + 2 * 4 * 1 * 2 + 2 * 4 * 8
    assert config.flops_per_token(length=16) == 6 * (3 * per_layer + 10 * 4) + 12 * 3 * 2 * 2 * 16


@pytest.mark.parametrize(("router", "choices"), [("switch", 1), ("gshard", 2)])
def test_only_the_chosen_experts_count_as_active(router, choices):
    sparse = ModelConfig(moe=MoEConfig(experts=8, every=2, router=router))
    dense = ModelConfig()
    expert, routers = 3 * 128 * 256, 2 * 128 * 8
    assert sparse.expert_layers == 2
    assert sparse.num_parameters == dense.num_parameters + 2 * 7 * expert + routers
    assert sparse.num_active_parameters == dense.num_parameters + 2 * (choices - 1) * expert + routers


def test_experts_that_choose_are_used_by_a_token_as_often_as_they_have_room():
    model = ModelConfig(moe=MoEConfig(router="expert-choice", capacity_factor=1.5))
    dense, expert, routers = ModelConfig(), 3 * 128 * 256, 2 * 128 * 8
    assert model.num_active_parameters == dense.num_parameters + 2 * expert // 2 + routers


def test_a_table_without_experts_is_a_dense_model():
    assert from_mapping(ModelConfig, {"embed": 64}).moe is None
    assert from_mapping(ModelConfig, {"moe": {"experts": 4}}).moe == MoEConfig(experts=4)


def test_a_choice_misspelt_is_told_with_the_nearest():
    with pytest.raises(ValueError, match=r"activation is 'swigl'; it must be one of .*\. Did you mean 'swiglu'\?"):
        ModelConfig(activation="swigl")
    with pytest.raises(ValueError, match=r"block is 'zzz'; it must be one of serial, parallel$"):
        ModelConfig(block="zzz")


def test_adapters_of_rank_0_are_none():
    assert ModelConfig(lora=LoraConfig()).lora is None
