"""Settings, their faults, and the capacity formula."""

import pytest

from gspmd.moe import MoEConfig


@pytest.mark.parametrize(
    ("router", "experts", "factor", "tokens", "capacity"),
    [
        ("switch", 8, 1.0, 64, 8),
        ("switch", 8, 1.25, 64, 10),
        ("gshard", 8, 1.0, 64, 16),
        ("switch", 3, 1.0, 64, 22),  # rounded up
        ("switch", 1, 1.1, 10, 10),  # never more than the tokens
        ("switch", 10, 1.1, 100, 11),  # 1.1 * 100 / 10 in binary is above 11
        ("switch", 64, 0.01, 8, 1),  # at least one
        ("gshard", 4, 100.0, 7, 7),
    ],
)
def test_capacity(router, experts, factor, tokens, capacity):
    assert MoEConfig(experts=experts, router=router, capacity_factor=factor).capacity(tokens) == capacity


def test_evaluation_has_its_own_capacity_and_no_jitter():
    config = MoEConfig(capacity_factor=1.0, evaluation_capacity_factor=3.0)
    assert (config.jitter_width, MoEConfig(router="gshard").jitter_width) == (1e-2, 0)
    assert (config.evaluation().capacity_factor, config.evaluation().jitter_width) == (3.0, 0)


def test_every_fault_in_one_error():
    with pytest.raises(ValueError) as error:
        MoEConfig(experts=0, every=0, groups=-1, capacity_factor=-1.0, jitter=2.0, aux_weight=-1.0, router="hash",
                  dispatch="scan")  # fmt: skip
    assert str(error.value) == (
        "a mixture of experts cannot be built from these settings\n"
        "  experts is 0; it must be at least 1.\n"
        "  every is 0; it must be at least 1.\n"
        "  groups is -1; it must be at least 1.\n"
        "  capacity_factor is -1.0; it must be positive.\n"
        "  aux_weight is -1.0; it must not be negative.\n"
        "  jitter is 2.0; it must lie in [0, 1).\n"
        "  dispatch is 'scan'; choose from sort, onehot.\n"
        "  router is 'hash'; choose from switch, gshard."
    )


def test_two_choices_need_two_experts():
    with pytest.raises(ValueError, match="router gshard sends a token to 2 experts; experts is 1"):
        MoEConfig(experts=1, router="gshard")
