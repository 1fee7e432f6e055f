from dataclasses import dataclass
from pathlib import Path

import pytest

from gspmd.moe import MoEConfig
from gspmd.training.toml import from_mapping, load_toml
from models import ModelConfig

CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class File:
    """The part of a configuration file that describes the model."""

    model: ModelConfig


def test_every_fault_of_a_model_stands_in_one_error():
    with pytest.raises(ValueError) as error:
        ModelConfig(embed=0, heads=8, kv_heads=3, head_size=7, activation="tanh", block="sideways", norm_epsilon=0.0)
    assert str(error.value) == (
        "this model cannot be built:\n"
        "  embed is 0; it must be at least 1\n"
        "  activation is 'tanh'; it must be one of swiglu, gelu, relu\n"
        "  block is 'sideways'; it must be one of serial, parallel\n"
        "  norm_epsilon is 0.0; it must be positive\n"
        "  head_size is 7; rotary position embedding turns pairs, so it must be even\n"
        "  heads is 8, which kv_heads (3) does not divide"
    )


def test_experts_have_to_come_round_evenly():
    with pytest.raises(ValueError, match=r"layers is 4, which moe.every \(3\) does not divide"):
        ModelConfig(layers=4, moe=MoEConfig(every=3))


@pytest.mark.parametrize(("name", "billions"), [("palm-8b", 8.63), ("palm-62b", 62.50), ("palm-540b", 540.35)])
def test_palm_has_its_published_number_of_parameters(name, billions):
    """Chowdhery et al. 2022 (arXiv 2204.02311), table 1, in billions; our vocabulary is padded by 128 rows."""
    assert abs(load_toml(File, CONFIGS / f"{name}.toml").model.num_parameters / 1e9 - billions) < 0.01


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


def test_a_table_without_experts_is_a_dense_model():
    assert from_mapping(ModelConfig, {"embed": 64}).moe is None
    assert from_mapping(ModelConfig, {"moe": {"experts": 4}}).moe == MoEConfig(experts=4)
