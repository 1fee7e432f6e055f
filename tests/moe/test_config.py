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
        ("st-moe", 8, 1.0, 64, 16),
        ("top-k", 8, 1.0, 64, 16),  # k is 2 where nobody says
        ("expert-choice", 8, 2.0, 64, 16),  # the factor is the experts per token
        ("switch", 8, 0.0, 64, 0),
    ],
)
def test_capacity(router, experts, factor, tokens, capacity):
    assert MoEConfig(experts=experts, router=router, capacity_factor=factor).capacity(tokens) == capacity


def test_no_token_is_lost_without_capacity():
    assert MoEConfig(dispatch="dropless", capacity_factor=0.1).capacity(64) == 64


def test_what_a_router_leaves_open():
    assert (MoEConfig(router="top-k", k=3).choices, MoEConfig(router="noisy-top-k").choices) == (3, 2)
    chosen = MoEConfig(router="expert-choice", capacity_factor=2.0)
    assert (chosen.choices, chosen.used, chosen.causal) == (8, 2.0, False)
    assert (MoEConfig(router="gshard").used, MoEConfig(router="gshard").causal) == (2, True)
    assert (MoEConfig(router="st-moe").z_coefficient, MoEConfig(router="st-moe", z_weight=0.0).z_coefficient) == (
        1e-3,
        0,
    )


def test_evaluation_has_its_own_capacity_and_no_jitter():
    config = MoEConfig(capacity_factor=1.0, evaluation_capacity_factor=3.0, dropout=0.4)
    assert (config.jitter_width, MoEConfig(router="gshard").jitter_width) == (1e-2, 0)
    assert (config.evaluation().capacity_factor, config.evaluation().jitter_width) == (3.0, 0)
    assert config.evaluation().dropout == 0


def test_every_fault_in_one_error():
    with pytest.raises(ValueError) as error:
        MoEConfig(experts=0, every=0, groups=-1, capacity_factor=-1.0, jitter=2.0, aux_weight=-1.0, router="hash",
                  dispatch="scan")  # fmt: skip
    assert str(error.value) == (
        "a mixture of experts cannot be built from these settings\n"
        "  experts is 0; it must be a whole number, at least 1.\n"
        "  every is 0; it must be a whole number, at least 1.\n"
        "  groups is -1; it must be a whole number, at least 1.\n"
        "  capacity_factor is -1.0; it must be a number that is not negative.\n"
        "  aux_weight is -1.0; it must be a number that is not negative.\n"
        "  jitter is 2.0; it must be in [0, 1).\n"
        "  dispatch is 'scan'. Choose from sort, onehot, dropless.\n"
        "  router is 'hash'. Choose from noisy-top-k, gshard, switch, st-moe, top-k, expert-choice."
    )


def test_settings_of_shared_experts_need_some():
    with pytest.raises(ValueError) as error:
        MoEConfig(shared_width=64, shared_mix=True)
    assert str(error.value) == (
        "a mixture of experts cannot be built from these settings\n"
        "  shared_width is 64, but there are no shared experts; set shared.\n"
        "  shared_mix is True, but there are no shared experts; set shared."
    )


def test_two_choices_need_two_experts():
    with pytest.raises(ValueError, match="router gshard sends a token to 2 experts, but experts is 1"):
        MoEConfig(experts=1, router="gshard")


def test_settings_that_would_do_nothing_are_refused():
    with pytest.raises(ValueError) as error:
        MoEConfig(router="expert-choice", k=2, renormalize=False, priority=True, dispatch="dropless", dropout=1.0)
    assert str(error.value) == (
        "a mixture of experts cannot be built from these settings\n"
        "  dropout is 1.0; it must be in [0, 1).\n"
        "  k is 2, but router expert-choice lets the experts choose; leave k out, or use router top-k.\n"
        "  renormalize is false, but that is a setting of router top-k, not of expert-choice; leave it out, or "
        "use top-k.\n"
        "  priority orders tokens that wait for slots, but in router expert-choice no token waits; leave out "
        "priority.\n"
        "  router expert-choice fills the slots of every expert, but dropless has no slots; use dispatch sort."
    )
    with pytest.raises(ValueError, match="k is 2, but router switch sends a token to 1; leave k out"):
        MoEConfig(k=2)
    with pytest.raises(ValueError) as error:
        MoEConfig(scores="sigmoid", kept_groups=1, choice_bias=True, bias_rate=0.1, gate_inputs=True)
    assert str(error.value) == (
        "a mixture of experts cannot be built from these settings\n"
        "  scores is 'sigmoid', but that is a setting of router top-k, not of switch; leave it out, or use top-k.\n"
        "  kept_groups is 1, but that is a setting of router top-k, not of switch; leave it out, or use top-k.\n"
        "  choice_bias is True, but that is a setting of router top-k, not of switch; leave it out, or use top-k.\n"
        "  bias_rate is 0.1, but that is a setting of router top-k, not of switch; leave it out, or use top-k.\n"
        "  gate_inputs is True, but that is a setting of router top-k, not of switch; leave it out, or use top-k.\n"
        "  with router top-k, gate_inputs multiplies an input by one gate, but a token has 2 choices; set k to 1.\n"
        "  with router top-k, gate_inputs multiplies by one gate, which divided by itself is always 1; set renormalize "
        "to false."
    )
    MoEConfig(scores="sigmoid", kept_groups=1, choice_bias=True, bias_rate=0.1, gate_inputs=True, router="top-k", k=1,
              renormalize=False)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"scores": "tanh"}, "scores is 'tanh'. Choose from softmax, sigmoid."),
        ({"expert_groups": 3}, "expert_groups is 3, which does not divide experts, 8."),
        ({"expert_groups": 2, "kept_groups": 3}, "kept_groups is 3, but expert_groups is 2."),
        ({"expert_groups": 8, "kept_groups": 4}, "group_best is 2, but a group has 1 of the 8 experts."),
        (
            {"expert_groups": 4, "kept_groups": 1, "k": 3},
            "1 groups of 2 experts have fewer than the 3 that a token is sent to.",
        ),
        ({"bias_rate": 0.1}, "bias_rate is 0.1, but there is no bias to change; set choice_bias."),
        (
            {"gate_inputs": True},
            "gate_inputs multiplies an input by one gate, but a token has 2 choices; set k to 1.\n"
            "  gate_inputs multiplies by one gate, which divided by itself is always 1; set renormalize to false.",
        ),
    ],
)
def test_settings_of_scores_that_do_not_fit(settings, fault):
    with pytest.raises(ValueError) as error:
        MoEConfig(router="top-k", **settings)
    assert str(error.value) == f"a mixture of experts cannot be built from these settings\n  {fault}"
