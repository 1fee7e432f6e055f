"""The bias of the choice of experts: after every step it follows the loads, and nothing else changes it."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training import ConfigError, OptimizerConfig, jit_step
from gspmd.training.checkpoints import Checkpoints
from gspmd.training.state import abstract
from gspmd_models import step
from gspmd_models.finetuning.config import LoraConfig
from gspmd_models.finetuning.freezing import balanced_paths, trained_paths
from gspmd_models.parameters import parameters
from tests.conftest import AXIS_TYPES

RATE, STEPS, BATCH, LENGTH = 0.01, 4, 16, 8
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.5, clip=0.1)
V3 = MoEConfig(experts=8, router="top-k", k=3, scores="sigmoid", expert_groups=4, kept_groups=3, choice_bias=True,
               bias_rate=RATE, dispatch="dropless", shared=1, router_scale=4.0)  # fmt: skip
CONFIG = models.ModelConfig(
    vocabulary=64, embed=16, layers=4, heads=8, kv_heads=8, head_size=2, feed_forward=32, moe=V3, remat="none"
)
PATH = "blocks.1.moe.choice_bias"


@cache
def updating(config, layout, placing, optimizer, microbatches, schedule, rounds):
    """The first state and the compiled step, which tests of one model share."""
    with jax.set_mesh(placing):
        model = models.build(config, layout, placing, jax.random.key(0))
        state = step.initial_state(model, optimizer, STEPS, placing)
        stages = {"schedule": schedule, "rounds": rounds} if schedule else {}
        return state, jit_step(step.training_step(model, optimizer, STEPS, microbatches, **stages), state)


def run(
    config,
    name,
    kind="explicit",
    microbatches=1,
    spoiled=False,
    moved=None,
    optimizer=OPTIMIZER,
    seeds=tuple(range(STEPS)),
    folder=None,
    mesh=None,
    schedule=None,
    rounds=1,
):
    """Biases [steps, layers with experts, X], and figures of every step.

    With a folder, each step is saved and resumed from.
    """
    layout = Layout.load(name).override(moved or {})
    sizes = mesh or layout.mesh_for(1 if name == "replicated" else 8)
    devices, types = jax.devices()[: np.prod([*sizes.values()])], (AXIS_TYPES[kind],) * len(sizes)
    placing = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    placed = jax.NamedSharding(placing, models.batch_spec(layout).partition_spec())
    biases, found = [], []
    first, update = updating(config, layout, placing, optimizer, microbatches, schedule, rounds)
    with jax.set_mesh(placing):
        state = jax.tree.map(lambda leaf: leaf.copy(), first)  # a step donates its state
        if spoiled:
            table = state.params["embedding.table"]
            state = replace(state, params={**state.params, "embedding.table": table * jnp.nan})
        for number in seeds:
            ids = np.random.default_rng(number).integers(0, 64, (BATCH, LENGTH + 1)).astype(np.int32)
            state, figures = update(state, jax.device_put(ids, placed), jax.random.key(1))
            rows = [np.asarray(x) for path, x in state.params.items() if path.endswith("moe.choice_bias")]
            biases.append(np.stack(rows, axis=1).reshape(-1, rows[0].shape[-1]))  # in the order of layers
            found.append(jax.tree.map(np.asarray, figures))
            if folder is not None:
                with Checkpoints(folder) as checkpoints:
                    checkpoints.save(state, {})
                    state, _ = checkpoints.restore(abstract(state))
    assert not any(
        "choice_bias" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.optimizer)
    )
    return np.array(biases), found


@cache
def alone():
    return run(CONFIG, "replicated")


def test_the_bias_rises_for_experts_below_the_mean_load_and_falls_for_those_above():
    biases, figures = alone()
    wanted = np.zeros((2, 8), np.float32)
    for found, each in zip(biases, figures):
        # Loads are shares here, and the counts whole numbers, which the shares give back.
        counts = np.round(each["load"] * 3 * BATCH * LENGTH)
        wanted = wanted + np.float32(RATE) * np.sign(counts.mean(axis=-1, keepdims=True) - counts).astype(np.float32)
        np.testing.assert_array_equal(found, wanted)
    assert "sent" not in figures[0]
    assert len(np.unique(wanted)) > 3  # the experts were not balanced


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("name", "kind", "microbatches", "moved"),
    [
        ("gshard", "explicit", 1, {}),
        ("zero-2", "explicit", 2, {}),
        ("switch-expert-model", "auto", 1, {"moe.choice_bias": "X_x"}),
        ("replicated", "explicit", 4, {}),
    ],
)
def test_the_bias_is_the_same_on_every_mesh(name, kind, microbatches, moved):
    biases, figures = run(CONFIG, name, kind, microbatches, moved=moved)
    wanted, of_one = alone()
    np.testing.assert_allclose([each["loss"] for each in figures], [each["loss"] for each in of_one], rtol=1e-4)
    np.testing.assert_array_equal(biases, wanted)


def test_a_resumed_run_has_the_bias_of_one_that_goes_on(tmp_path):
    biases, figures = run(CONFIG, "replicated", folder=tmp_path)
    wanted, of_one = alone()
    np.testing.assert_array_equal(biases, wanted)
    assert [float(each["loss"]) for each in figures] == [float(each["loss"]) for each in of_one]


@pytest.mark.slow
def test_the_bias_alone_balances_the_experts():
    """The other parameters hardly move, and there is no loss of balance that would move them."""
    config = replace(CONFIG, moe=replace(V3, bias_rate=0.01, aux_weight=0.0))
    _, figures = run(config, "replicated", optimizer=OptimizerConfig(learning_rate=1e-9), seeds=(0,) * 30)
    first, last = (np.ptp(each["load"], axis=-1).max() for each in (figures[0], figures[-1]))
    assert last < first / 2


def test_a_step_that_is_skipped_leaves_the_bias():
    biases, figures = run(CONFIG, "replicated", spoiled=True)
    assert figures[0]["non_finite"] == 1
    assert not biases.any()


def test_no_optimizer_trains_the_bias():
    layout = Layout.load("replicated")
    assert balanced_paths(CONFIG, layout) == (PATH,)
    assert PATH not in trained_paths(CONFIG, layout)
    assert balanced_paths(CONFIG, layout, ("moe.choice_bias",)) == ()
    assert balanced_paths(replace(CONFIG, moe=replace(V3, bias_rate=0.0)), layout) == ()
    lora = LoraConfig(rank=2, targets=("attention.w_q",))
    assert balanced_paths(replace(CONFIG, lora=lora), layout) == ()


@pytest.mark.parametrize(
    ("schedule", "microbatches", "rounds", "kind", "dense", "kinds"),
    [
        ("1f1b", 2, 1, "explicit", 0, ()),  # the only case whose model is that of the other tests
        pytest.param("1f1b", 2, 1, "explicit", 1, (), marks=pytest.mark.slow),
        pytest.param("gpipe", 4, 1, "auto", 1, (), marks=pytest.mark.slow),
        pytest.param("zero-bubble", 2, 1, "explicit", 1, (), marks=pytest.mark.slow),
        pytest.param("1f1b", 4, 2, "explicit", 0, (), marks=pytest.mark.slow),
        pytest.param("1f1b", 4, 2, "explicit", 2, (), marks=pytest.mark.slow),
        pytest.param("1f1b", 2, 1, "explicit", 2, ("sliding", "full"), marks=pytest.mark.slow),
    ],
)
def test_in_stages_the_bias_and_the_losses_are_those_of_one_device(schedule, microbatches, rounds, kind, dense, kinds):
    """Stages add up the loads of all microbatches, and change the bias once a step.

    Dense layers run on the first stage, and the four after them, all with experts, in stages. With two kinds of
    attention these four repeat a pattern of two.
    """
    config = replace(CONFIG, layers=4 * rounds)  # one pair of layers for each chunk
    if dense:
        moe = replace(V3, every=1, dense_layers=(*range(dense),), dense_feed_forward=24)
        config = replace(CONFIG, layers=dense + 4, moe=moe, layer_kinds=kinds, sliding_window=3 if kinds else None)
        assert (config.lead, config.pattern) == (dense, len(kinds) or 1)
    how = {"moved": {"pipeline.layers": "N_p"}, "mesh": {"p": 2, "x": 2, "y": 1, "z": 1}, "rounds": rounds}
    with gspmd.lowering("blocking"):
        biases, figures = run(config, "gshard", kind, microbatches, schedule=schedule, **how)
    wanted, of_one = alone() if config == CONFIG else run(config, "replicated")
    np.testing.assert_allclose([each["loss"] for each in figures], [each["loss"] for each in of_one], rtol=1e-4)
    np.testing.assert_array_equal(biases, wanted)
    assert len(np.unique(biases)) > 3
    assert "sent" not in figures[0]


def test_stages_train_all_but_the_bias():
    layout = Layout.load("gshard").override({"pipeline.layers": "N_p"})
    assert {*parameters(CONFIG, layout)} - {*trained_paths(CONFIG, layout)} == {PATH}
    assert balanced_paths(CONFIG, layout, ("moe.choice_bias",)) == ()
    with pytest.raises(ConfigError, match="the stages of a pipeline train all parameters; leave"):
        trained_paths(CONFIG, layout, ("moe.w_in",))
