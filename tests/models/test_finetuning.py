"""Adapters, frozen parameters and narrow state: what is trained, where it lies, what it sends, what it merges into."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training import OptimizerConfig
from gspmd.training.step import jit_step
from gspmd.training.toml import ConfigError
from gspmd_models import step
from gspmd_models.config import LatentConfig
from gspmd_models.decoding import decode_step, empty_cache
from gspmd_models.finetuning.config import TARGETS, LoraConfig
from gspmd_models.finetuning.freezing import trained_paths
from gspmd_models.finetuning.merging import merge, with_adapters
from tests.models.conftest import put

OF_FFN = ("ffn.w_in", "ffn.w_gate", "ffn.w_out")
OF_LATENTS = tuple(key for key in TARGETS if key.endswith(("_down", "_up")))
DENSE = tuple(key for key in TARGETS if not key.startswith(("moe", "cross")) and key not in OF_LATENTS)
SHARED = tuple(key for key in TARGETS if not key.startswith(("ffn", "cross")) and key not in OF_LATENTS)
FIRST_DENSE = MoEConfig(
    experts=8, router="top-k", k=2, every=1, dense_layers=(0,), dense_feed_forward=96, dispatch="dropless", shared=1
)
LATENT = {"head_size": 20, "latent": LatentConfig(rank=12, query_rank=8, rotary=8, values=16)}
EQUATIONS = {"w_q": "ner,nrhd->nehd", "w_out": "nfr,nre->nfe"}
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup=0)


def start(settings, preset, make_mesh, devices=8, kind="explicit"):
    layout = Layout.load(preset)
    mesh = make_mesh(layout.mesh_for(devices), kind)
    return models.build(settings, layout, mesh, jax.random.key(0)), mesh


def prepare(model, mesh, tokens, lowering, steps, optimizer=OPTIMIZER, microbatches=1, **options):
    """The compiled step, and its arguments: the first state, a batch and a key."""
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        state = step.initial_state(model, optimizer, steps, mesh, **options)
        batch, key = put(tokens, model.layout, mesh), jax.random.key(1)
        update = jit_step(step.training_step(model, optimizer, steps, microbatches, **options), state)
        return update.lower(state, batch, key).compile(), state, batch, key


def run(program, state, batch, key, steps):
    """Losses of some steps on one batch, and the last state."""
    losses = []
    for _ in range(steps):
        state, figures = program(state, batch, key)
        losses.append(float(figures["loss"]))
    return np.array(losses), state


def train(model, mesh, tokens, lowering, steps, *rest, **options):
    """Losses of some steps on one batch, the last state, and the compiled step."""
    program, *arguments = prepare(model, mesh, tokens, lowering, steps, *rest, **options)
    return *run(program, *arguments, steps), program


def to_neighbours(rng, state):
    """A state whose float32 parameters, or masters, are each the next float above or below, or stay."""

    def moved(x):
        if x.dtype != "float32":
            return x
        value = np.asarray(x)
        neighbours = np.stack([value, np.nextafter(value, -np.inf), np.nextafter(value, np.inf)])
        choice = rng.integers(3, size=(1, *x.shape))
        return jax.device_put(np.take_along_axis(neighbours, choice, 0)[0], x.sharding)

    params = {path: moved(x) for path, x in state.params.items()}
    masters = getattr(state.optimizer, "masters", None)
    if masters is None:
        return replace(state, params=params)
    moved_masters = {path: moved(x) for path, x in masters.items()}
    return replace(state, params=params, optimizer=state.optimizer._replace(masters=moved_masters))


def test_adapters_train_alone_as_on_one_device(config, make_mesh, tokens):
    targets = ("attention.w_q", "ffn.w_out")
    model, state = adapters_train(config, make_mesh, tokens, "weight-stationary-2d", "blocking", 10, targets)
    adapted = models.with_arrays(model, state.params)
    merged = merge(adapted)
    assert merged.config.lora is None
    values, wanted = models.arrays(merged), {path: np.asarray(x) for path, x in models.arrays(adapted).items()}
    for path, value in values.items():
        if f"{path}_a" in wanted:
            added = np.einsum(EQUATIONS[path.split(".")[-1]], wanted[f"{path}_a"], wanted[f"{path}_b"])
            np.testing.assert_allclose(value, wanted[path] + 8 / 4 * added, rtol=1e-5, atol=1e-6)
            assert value.sharding == state.params[path].sharding
        else:
            np.testing.assert_array_equal(value, wanted[path])


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "lowering"), [("zero-3", "looped"), ("megatron-1d", "xla")])
def test_adapters_of_every_weight(config, make_mesh, tokens, preset, lowering):
    adapters_train(config, make_mesh, tokens, preset, lowering, 50, DENSE, tied=False, block="parallel")


@pytest.mark.slow
def test_adapters_add_partial_gradients_over_microbatches(config, make_mesh, tokens):
    """Under zero-2 the loss takes every weight with a partial sum for its gradient, frozen ones too."""
    adapters_train(config, make_mesh, tokens.repeat(2, 0), "zero-2", "blocking", 10, ("attention.w_o",), microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "lowering", "more", "changes"),
    [
        ("megatron-1d", "blocking", ("attention.w_o",), {}),
        ("weight-stationary-2d", "xla", ("attention.w_o",), {}),
        ("zero-3", "looped", ("attention.w_o",), {}),
        ("gshard", "blocking", OF_FFN, {"layers": 3, "moe": FIRST_DENSE}),
    ],
)
def test_adapters_of_latents_train_alone_as_on_one_device(config, make_mesh, tokens, preset, lowering, more, changes):
    """And merge: decoding multiplies queries by the merged w_k_up, and by the adapter's B and A, which is the same.

    A DeepSeek has adapters in its first layer, which alone is dense, and in those with experts.
    """
    targets = (*OF_LATENTS, *more)
    model, state = adapters_train(config, make_mesh, tokens, preset, lowering, 10, targets, **LATENT, **changes)
    adapted = models.with_arrays(model, state.params)
    merged = merge(adapted)
    values, wanted = models.arrays(merged), {path: np.asarray(x) for path, x in models.arrays(adapted).items()}
    equations = {"w_k_up": "nzr,nrhd->nzhd", "w_v_up": "nzr,nrhd->nzhd", "w_q_down": "ner,nru->neu"}
    equations |= dict.fromkeys(("w_in", "w_gate", "w_out"), "nar,nrb->nab")
    for path in [path for path in values if f"{path}_a" in wanted and path.rpartition(".")[2] in equations]:
        equation = equations[path.rpartition(".")[2]]
        added = np.einsum(equation, wanted[f"{path}_a"], wanted[f"{path}_b"])
        assert np.abs(added).max() > 1e-4
        np.testing.assert_allclose(values[path], wanted[path] + 8 / 4 * added, rtol=1e-5, atol=1e-6)
    mesh = models.arrays(merged)["output.norm"].sharding.mesh
    ids = tokens[:, :6].astype(np.int32)
    read = []
    for each in (adapted, merged):
        with jax.set_mesh(mesh), gspmd.lowering(lowering):
            cache, decode = (
                empty_cache(each.config, each.layout, mesh, *ids.shape, "float32"),
                jax.jit(decode_step(each)),
            )
            for at in range(ids.shape[1]):
                logits, cache = decode(models.arrays(each), ids[:, at], cache)
            whole = jax.jit(lambda ids, each=each: each(ids)[0])(put(ids, each.layout, mesh))
            read += [np.asarray(logits), np.asarray(whole)[:, -1]]
    for logits in read[1:]:
        np.testing.assert_allclose(logits, read[0], rtol=1e-4, atol=2e-5)


def adapters_train(config, make_mesh, tokens, preset, lowering, steps, targets, microbatches=1, **changes):
    """Losses equal those of one device, and only adapters change and have moments."""
    settings = config(**{"layers": 1, "remat": "none"} | changes, lora=LoraConfig(4, 8.0, targets))
    (model, mesh), (alone, single) = (
        start(settings, preset, make_mesh),
        start(settings, "replicated", make_mesh, 1),
    )
    before = {path: np.asarray(value) for path, value in models.arrays(model).items()}
    losses, state, _ = train(model, mesh, tokens, lowering, steps, microbatches=microbatches)
    wanted, _, _ = train(alone, single, tokens, "blocking", steps)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert losses[-1] < losses[0] - 0.01
    moved = {path for path, value in before.items() if not np.array_equal(value, state.params[path])}
    assert moved == {path for path in before if path.endswith(("_a", "_b"))}
    keys = {".".join(path.split(".")[-2:]) for path in moved}
    assert keys == {f"{key}_{side}" for key in targets for side in "ab"}
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert len(moments) == 2 * len(moved)
    return model, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "shared", "lowering"),
    [(DENSE, {}, "blocking"), (SHARED, {"moe": MoEConfig(experts=8, every=1, shared=1)}, "xla")],
)
def test_merged_weights_give_the_same_loss(config, make_mesh, tokens, targets, shared, lowering):
    settings = config(layers=1, tied=False, lora=LoraConfig(4, 8.0, targets), **shared)
    (model, mesh), rng = start(settings, "gshard", make_mesh), np.random.default_rng(0)
    values = {
        path: jax.device_put(0.1 * rng.standard_normal(value.shape, np.float32), value.sharding)
        if path.endswith("_b") else value
        for path, value in models.arrays(model).items()
    }  # fmt: skip
    model = models.with_arrays(model, values)
    merged = merge(model)
    assert merged.config.lora is None
    assert all(x.sharding == values[path].sharding for path, x in models.arrays(merged).items())
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        ids = put(tokens, model.layout, mesh)
        found, wanted, base = (
            jax.jit(lambda ids, each=each: models.loss(each, ids, train=False)[0])(ids)
            for each in (merged, model, models.with_arrays(merged, {p: values[p] for p in models.arrays(merged)}))
        )
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert abs(found - base) > 1e-3


@pytest.mark.slow
def test_new_adapters_change_nothing(config, make_mesh):
    model, _ = start(config(), "megatron-1d", make_mesh)
    adapted = with_adapters(model, LoraConfig(4), jax.random.key(0))
    assert adapted.config.lora == LoraConfig(4)
    for path, value in models.arrays(merge(adapted)).items():
        np.testing.assert_array_equal(value, models.arrays(model)[path])


def test_adapters_lie_as_their_weight(config, make_mesh):
    settings = config(lora=LoraConfig(4, targets=("ffn.w_in", "attention.w_o")))
    specs = models.parameter_specs(settings, Layout.load("weight-stationary-2d"))
    weight, a, b = (specs[f"blocks.0.ffn.w_in{side}"] for side in ("", "_a", "_b"))
    assert a[0].axes_of("E") == weight[0].axes_of("E")
    assert b[0].axes_of("F") == weight[0].axes_of("F")
    assert a[0].axes_of("R") == b[0].axes_of("R") == ()
    assert (a[1], b[1]) == ((2, 32, 4), (2, 4, 64))
    assert specs["blocks.0.attention.w_o_a"][1] == (2, 8, 8, 4)


def test_frozen_weights_have_no_gradient_to_reduce(config, make_mesh, tokens):
    """Neither in what is planned nor in what is compiled, nor moments."""
    frozen = ("ffn.*", "embedding.*", "blocks.0.attention.*")
    model, mesh = start(config(), "data-parallel", make_mesh)
    before = {path: np.asarray(value) for path, value in models.arrays(model).items()}
    _, state, program = train(model, mesh, tokens, "blocking", 2, frozen=frozen)
    ledger = gspmd.ledger(program, mesh=mesh)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        update = step.training_step(model, OPTIMIZER, 2, frozen=frozen)
        batch, key = put(tokens, model.layout, mesh), jax.random.key(1)
        plan = gspmd.trace(update, state, batch, key)
    trained = trained_paths(model.config, model.layout, frozen)
    assert trained == ("output.norm",)
    (reduced,) = (entry for entry in ledger.entries if entry.kind == "all-reduce")
    assert reduced.wire_bytes == 2 * 32 * 4 * 7 / 8  # the gradient of one norm
    assert ledger.compare(plan).differing == ()
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim) == 2 * 32
    for path, value in before.items():
        assert np.array_equal(value, state.params[path]) == (path not in trained)


def test_frozen_patterns_are_checked(config):
    settings, layout = config(), Layout.load("replicated")
    with pytest.raises(ConfigError) as error:
        trained_paths(settings, layout, ("embeding.table", "blocks.*"))
    assert error.value.faults == (
        "frozen has 'embeding.table', which matches no parameter. Did you mean 'embedding.table'?",
    )
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        trained_paths(settings, layout, ("*",))


def test_settings_of_adapters_without_a_rank_are_refused():
    """The model would be trained whole, with no word of them."""
    with pytest.raises(ValueError) as error:
        LoraConfig(alpha=3.0, targets=("ffn.w_in",))
    fact = "cannot be set while lora.rank is 0, which means no adapters; give lora.rank"
    assert str(error.value) == f"lora.alpha and lora.targets {fact}"


def test_targets_are_checked(config):
    with pytest.raises(ValueError, match=r"Did you mean 'attention\.w_q'\?"):
        LoraConfig(4, targets=("attention.q",))
    with pytest.raises(ValueError, match=r"lora.targets has ffn.w_gate, but this model has no such weight"):
        config(activation="gelu", lora=LoraConfig(4, targets=("ffn.w_gate",)))


NARROW = {
    "frozen": (OPTIMIZER, {"frozen": ("embedding.*", "attention.w_q")}),
    "bfloat16 parameters": (OPTIMIZER, {"parameter_dtype": "bfloat16"}),
    "int8 moments": (replace(OPTIMIZER, moments="int8", moments_block=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset", "lowering"),
    [
        ("frozen", "weight-stationary-2d", "xla"),
        ("bfloat16 parameters", "weight-stationary-2d", "blocking"),
        ("int8 moments", "zero-3", "blocking"),
    ],
)
def test_fifty_steps_are_those_of_one_device(config, make_mesh, tokens, name, preset, lowering):
    curves(config, make_mesh, tokens, preset, lowering, 50, *NARROW[name])


@pytest.mark.slow
def test_ten_steps_with_masters_are_those_of_one_device(config, make_mesh, tokens):
    given = NARROW["bfloat16 parameters"]
    state = curves(config, make_mesh, tokens, "megatron-1d", "blocking", 10, *given)
    assert state.params["blocks.0.ffn.w_in"].dtype == "bfloat16"
    assert state.optimizer.masters["blocks.0.ffn.w_in"].dtype == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "selective"])
def test_ten_steps_with_activations_on_the_host_are_those_of_one_device(config, make_mesh, tokens, remat):
    changes = {"layers": 2, "remat": remat, "offload": True}
    curves(config, make_mesh, tokens, "zero-3", "blocking", 10, OPTIMIZER, {}, **changes)


def curves(config, make_mesh, tokens, preset, lowering, steps, optimizer, options, **changes):
    """The losses of a layout are those of one device; the state of the former.

    Narrow state amplifies rounding: where a sum in another order moves a moment across a boundary of int8, the moment
    changes by 1/127 of its block's largest. So after ten steps the bound is what one device makes of it: three times
    the most that four runs differ whose parameters begin at a neighbouring float, 0.4 to 2.1e-4 each for int8.
    """
    settings = config(**{"layers": 1, "remat": "none"} | changes)
    losses, state, _ = train(*start(settings, preset, make_mesh), tokens, lowering, steps, optimizer, **options)
    program, first, batch, key = prepare(
        *start(replace(settings, offload=False), "replicated", make_mesh, 1),
        tokens,
        lowering,
        steps,
        optimizer,
        **options,
    )
    beginnings = [first]  # copied for each run, since a step donates its state
    beginnings += [to_neighbours(np.random.default_rng(seed), beginnings[0]) for seed in range(4)]
    wanted, *nearby = (run(program, jax.tree.map(jnp.copy, state), batch, key, steps)[0] for state in beginnings)
    bound = max(3 * max(abs(losses / wanted - 1).max() for losses in nearby), 1e-5)
    np.testing.assert_allclose(losses[:10], wanted[:10], rtol=min(bound, 3e-5))
    np.testing.assert_allclose(losses, wanted, rtol=bound)
    assert losses[-1] < losses[0] - 0.1
    return state
