"""Encoder–decoders and packed rows: one loss in all layouts, and packed texts are as each alone."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe.config import MoEConfig
from gspmd.tracing.jaxprs import all_equations
from gspmd.training import OptimizerConfig, jit_step
from gspmd.training.step import Update, building
from gspmd_models import step
from gspmd_models.finetuning.config import LoraConfig
from gspmd_models.finetuning.merging import merge
from gspmd_models.transformer import sinusoids
from tests.conftest import AXIS_TYPES

BATCH, LENGTH, SOURCE = 16, 8, 16
UPDATES = 10
SMALL = {
    "vocabulary": 64, "embed": 16, "layers": 2, "encoder_layers": 4, "heads": 8, "kv_heads": 8, "head_size": 8,
    "feed_forward": 32, "remat": False,
}  # fmt: skip
# Buckets that are reached and exceeded, and experts that drop nothing, since a microbatch has other groups.
T5 = models.ModelConfig(**SMALL, positions="relative", relative_buckets=8, relative_distance=6, attention_scale=1.0)
SWITCH = models.ModelConfig(
    **{**SMALL, "layers": 4}, positions="relative", activation="relu",
    moe=MoEConfig(experts=8, every=2, capacity_factor=8.0, evaluation_capacity_factor=8.0, jitter=0.01),
)  # fmt: skip
TRANSLATOR = models.ModelConfig(
    **SMALL, positions="sinusoidal", position_offset=2, norm="layer", norm_bias=True, qkv_bias=True, out_bias=True,
    ffn_bias=True, activation="relu",
)  # fmt: skip
DECODER = models.ModelConfig(**{**SMALL, "encoder_layers": 0})
RELATIVE = replace(T5, layers=4, encoder_layers=0)
CONFIGS = {
    "t5": T5, "switch": SWITCH, "translator": TRANSLATOR, "decoder": DECODER, "relative": RELATIVE,
    "translator of 4 layers": replace(TRANSLATOR, layers=4),
    "switch without losses": replace(SWITCH, moe=replace(SWITCH.moe, aux_weight=0.0, jitter=0.0)),
}  # fmt: skip

#: Megatron's, with an encoder over more sequences at once than the decoder, whose tokens lie elsewhere too.
ACTIVATIONS = {
    "embedding.tokens": "B_xyL", "attention.residual": "B_xyLE", "attention.query": "B_xyLH_zD",
    "attention.key": "B_xyLK_zD", "ffn.residual": "B_xyLE", "ffn.hidden": "B_xyLF_z",
    "attention.in_via": "B_xyLE, EH_zD", "attention.out_via": "B_xyLH_zD, H_zDE", "ffn.in_via": "B_xyLE, EF_z",
    "ffn.out_via": "B_xyLF_z, F_zE",
}  # fmt: skip
IN_STAGES = {"pipeline.layers": "N_p"}
OWN = {f"encoder.{key}": spec for key, spec in ACTIVATIONS.items()}
LAYOUTS = {
    "an encoder of its own": Layout.load("megatron-1d").override(OWN),
    "an encoder of its own in stages": Layout.load("pipeline").override(OWN),
    "context-parallel in stages": replace(
        Layout.load("context-parallel").override(IN_STAGES), axes=("p", *Layout.load("context-parallel").axes)
    ),
    "experts in stages": replace(Layout.load("gshard").override(IN_STAGES), axes=("p", *Layout.load("gshard").axes)),
}
MESHES = {
    "pipeline": {"p": 2, "x": 2, "y": 2, "z": 1},
    "an encoder of its own in stages": {"p": 2, "x": 1, "y": 2, "z": 2},
    "context-parallel in stages": {"p": 2, "x": 2, "y": 2, "z": 1},
    "experts in stages": {"p": 2, "x": 4, "y": 1, "z": 1},
}


def segments(width, seed):
    """Two texts and padding, of other lengths in each row; one row is nothing but padding."""
    borders = np.sort(np.random.default_rng(seed).integers(2, width + 1, (BATCH, 2)), axis=1)
    borders[3] = 0
    at = np.arange(width)[None]
    return np.where(at < borders[:, :1], 1, np.where(at < borders[:, 1:], 2, 0)).astype(np.int32)


def batch(config):
    rng = np.random.default_rng(0)
    found = {"tokens": rng.integers(0, 64, (BATCH, LENGTH + 1)), "segments": segments(LENGTH + 1, 1)}
    if config.encoder_layers:
        found |= {"source": rng.integers(0, 64, (BATCH, SOURCE)), "source_segments": segments(SOURCE, 2)}
    return {name: x.astype(np.int32) for name, x in found.items()}


@cache
def update(model, name, microbatches=1, kind="explicit", lowering="blocking", schedule="1f1b", rounds=1):
    """The figures of every update, the gradients of the first, the plan, and the ledger of the compiled program."""
    config, layout = CONFIGS[model], LAYOUTS[name] if name in LAYOUTS else Layout.load(name)
    sizes = MESHES[name] if name in MESHES else layout.mesh_for(1 if name == "replicated" else 8)
    devices, types = jax.devices()[: np.prod([*sizes.values()])], (AXIS_TYPES[kind],) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    subject = step.Language(
        config, schedule=schedule, rounds=rounds, packed=True, source_length=SOURCE if config.encoder_layers else 0
    )
    how = Update(OptimizerConfig(learning_rate=1e-2, clip=0.0), 10, microbatches=microbatches)
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        subject.check(layout, mesh, BATCH, LENGTH, microbatches)
        built = models.build(config, layout, mesh, jax.random.key(0))
        state = building.initial_state(subject, layout, models.arrays(built), how, mesh)
        placed = jax.device_put(batch(config), jax.NamedSharding(mesh, subject.batch_spec(layout).partition_spec()))
        arguments = state, placed, jax.random.key(1)
        made = jit_step(building.training_step(subject, layout, how), state)
        plan, compiled = gspmd.trace(made, *arguments), made.lower(*arguments).compile()
        ledger = gspmd.ledger(compiled, mesh)
        curve, gradients = [], None
        for _ in range(UPDATES):
            state, found = compiled(state, *arguments[1:])
            curve.append({name: float(found[name]) for name in ("loss", "gradient_norm", "predicted")})
            if gradients is None:  # Adam's first moments after the first step are the gradients times 1 - β₁.
                first = optax.tree.get(state.optimizer, "mu")
                gradients = jax.tree.map(lambda x: np.asarray(x) / (1 - how.optimizer.beta1), first)
    return curve, gradients, plan, ledger


def assert_alike(gradients, expected):
    """To 1e-4 by the norm of each parameter's; that of a bias of keys is 0 but for rounding."""
    nothing = 1e-6 * np.sqrt(sum(np.sum(gradient**2) for gradient in expected.values()))
    assert gradients.keys() == expected.keys()
    for path, gradient in expected.items():
        assert np.linalg.norm(gradients[path] - gradient) <= 1e-4 * np.linalg.norm(gradient) + nothing, path


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "microbatches", "kind", "lowering"),
    [
        ("t5", "context-parallel", 1, "explicit", "looped"),
        ("relative", "pipeline", 2, "explicit", "blocking"),
        slow("t5", "megatron-sequence", 1, "explicit", "blocking"),
        slow("switch", "switch-expert-model", 1, "explicit", "blocking"),
        slow("translator", "weight-stationary-2d", 1, "auto", "blocking"),
        slow("decoder", "context-parallel", 1, "explicit", "blocking"),
        slow("t5", "an encoder of its own", 1, "explicit", "blocking"),
        slow("t5", "data-parallel", 2, "explicit", "blocking"),
        slow("t5", "zero-2", 2, "explicit", "blocking"),
        slow("t5", "zero-3", 1, "auto", "xla"),
        slow("t5", "megatron-1d", 2, "auto", "looped"),
        slow("t5", "weight-stationary-1d", 1, "explicit", "looped"),
        slow("t5", "weight-gathered-xyz", 1, "explicit", "blocking"),
        slow("t5", "context-parallel", 1, "auto", "xla"),
        slow("t5", "weight-stationary-2d", 1, "explicit", "blocking"),
        slow("switch", "gshard", 1, "explicit", "looped"),
        slow("switch", "context-parallel", 1, "explicit", "blocking"),
        slow("switch", "data-parallel", 1, "explicit", "blocking"),
        slow("switch", "zero-2", 1, "auto", "blocking"),
        slow("switch", "zero-3", 1, "auto", "xla"),
        slow("switch", "megatron-1d", 1, "explicit", "looped"),
        slow("switch", "megatron-sequence", 1, "explicit", "blocking"),
        slow("switch", "weight-stationary-2d", 1, "auto", "looped"),
        slow("switch", "weight-gathered-xyz", 1, "explicit", "blocking"),
        slow("translator", "context-parallel", 1, "auto", "blocking"),
        slow("decoder", "zero-3", 2, "explicit", "blocking"),
        slow("decoder", "pipeline", 4, "auto", "blocking"),
        slow("decoder", "pipeline", 2, "explicit", "blocking"),
        slow("relative", "pipeline", 4, "auto", "looped"),
    ],
)
def test_every_layout_has_the_curve_of_one_device(model, name, microbatches, kind, lowering):
    wanted, expected, *_ = update(model, "replicated")
    found, gradients, plan, ledger = update(model, name, microbatches, kind, lowering)
    assert found[0]["predicted"] == wanted[0]["predicted"]
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-5)
    assert found[0]["gradient_norm"] == pytest.approx(wanted[0]["gradient_norm"], rel=1e-4)
    assert_alike(gradients, expected)
    losses = [[each["loss"] for each in curve] for curve in (found, wanted)]
    assert losses[1][-1] < 0.9 * losses[1][0], "it learns, so that updates can differ"
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    if lowering != "xla":
        assert ledger.wire_bytes == plan.wire_bytes


@pytest.mark.parametrize(
    ("model", "name", "microbatches", "schedule", "rounds", "kind", "lowering"),
    [
        slow("t5", "pipeline", 2, "gpipe", 1, "explicit", "blocking"),
        slow("t5", "pipeline", 4, "1f1b", 1, "auto", "looped"),
        slow("t5", "pipeline", 2, "zero-bubble", 1, "explicit", "blocking"),
        slow("t5", "an encoder of its own in stages", 4, "1f1b", 1, "explicit", "blocking"),
        slow("t5", "context-parallel in stages", 2, "1f1b", 1, "explicit", "blocking"),
        slow("switch", "pipeline", 1, "1f1b", 1, "explicit", "blocking"),
        slow("switch", "experts in stages", 1, "1f1b", 1, "explicit", "blocking"),
        # draws and the experts' own loss are those of a microbatch
        slow("switch without losses", "pipeline", 2, "gpipe", 1, "explicit", "blocking"),
        slow("switch without losses", "pipeline", 4, "zero-bubble", 1, "auto", "blocking"),
        slow("translator", "pipeline", 4, "1f1b", 1, "explicit", "blocking"),
        slow("translator", "pipeline", 2, "gpipe", 1, "auto", "xla"),
        slow("translator of 4 layers", "pipeline", 4, "1f1b", 2, "explicit", "blocking"),
    ],
)
def test_both_stacks_in_stages_have_the_gradients_of_one_device(
    model, name, microbatches, schedule, rounds, kind, lowering
):
    (wanted, *_), expected, *_ = update(model, "replicated")
    (found, *_), gradients, plan, ledger = update(model, name, microbatches, kind, lowering, schedule, rounds)
    assert found["predicted"] == wanted["predicted"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert_alike(gradients, expected)
    if lowering != "xla":
        comparison = ledger.compare(plan)
        assert comparison.agrees, str(comparison)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_evaluation_in_stages_is_that_of_one_device(kind):
    found = []
    for name, microbatches in (("replicated", 1), ("pipeline", 4)):
        layout = Layout.load(name)
        sizes = MESHES.get(name) or {"x": 1, "y": 1, "z": 1}
        types, devices = (AXIS_TYPES[kind],) * len(sizes), jax.devices()[: np.prod([*sizes.values()])]
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
        subject = step.Language(SWITCH, packed=True, source_length=SOURCE)
        with jax.set_mesh(mesh), gspmd.lowering("blocking"):
            built = models.build(SWITCH, layout, mesh, jax.random.key(0))
            placed = jax.device_put(batch(SWITCH), jax.NamedSharding(mesh, subject.batch_spec(layout).partition_spec()))
            evaluate = jax.jit(building.evaluation_step(subject, layout, microbatches))
            found.append(float(evaluate(models.arrays(built), placed)))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
def test_microbatches_have_the_mean_of_the_whole_batch():
    """The public step takes the mean of the whole batch, though its parts have other numbers of predicted tokens."""
    layout, found = Layout.load("replicated"), []
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        model, optimizer = models.build(DECODER, layout, mesh, jax.random.key(0)), OptimizerConfig(clip=0.0)
        for parts in (1, 4):
            state = step.initial_state(model, optimizer, 10, mesh)
            update = jax.jit(step.training_step(model, optimizer, 10, microbatches=parts))
            found.append(update(state, batch(DECODER), jax.random.key(1))[1])
    for name in ("loss", "gradient_norm", "predicted"):
        assert float(found[1][name]) == pytest.approx(float(found[0][name]), rel=1e-5), name


@pytest.mark.slow
def test_adapters_and_int8_reach_cross_attention():
    layout = Layout.load("megatron-1d")
    sizes = layout.mesh_for(8)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    lora = LoraConfig(rank=2, targets=("cross.w_q", "cross.w_k", "cross.w_o"))
    rows = batch(T5)

    def logits(model):
        cut = {name: x if name.startswith("source") else x[:, :LENGTH] for name, x in rows.items()}
        given = {name: gspmd.annotate(x, "B_xL") for name, x in cut.items()}
        tokens = given.pop("tokens")
        forward = jax.jit(lambda values: models.with_arrays(model, values)(tokens, **given)[0])
        return np.asarray(forward(models.arrays(model)))

    with jax.set_mesh(mesh):
        model = models.build(replace(T5, lora=lora), layout, mesh, jax.random.key(0))
        values = {path: x + 0.1 * path.endswith("_b") for path, x in models.arrays(model).items()}
        adapted = models.with_arrays(model, values)
        merged = merge(adapted)
        np.testing.assert_allclose(logits(adapted), logits(merged), atol=1e-5)
        assert np.abs(logits(merged) - logits(models.quantize(merged))).mean() < 0.02
        plain = merge(models.with_arrays(model, {**values, **{k: 0 * x for k, x in values.items() if k[-2:] == "_b"}}))
        assert np.abs(logits(merged) - logits(plain)).max() > 1e-3


def apart(rows):
    """Every text of packed rows in a row of its own."""
    alone = {name: [] for name in rows}
    for row in range(BATCH):
        for number in (1, 2):
            pairs = [("tokens", "segments"), ("source", "source_segments")]
            for name, of in (pair for pair in pairs if pair[0] in rows):
                mine = rows[of][row] == number
                width = rows[name].shape[1]
                text = rows[name][row][mine]
                alone[name].append(np.pad(text, (0, width - len(text))))
                alone[of].append((np.arange(width) < len(text)).astype(np.int32))
    return {name: np.stack(found).astype(np.int32) for name, found in alone.items()}


@pytest.mark.turns(1)
@pytest.mark.parametrize("model", ["t5", "translator", "decoder"])
def test_packed_texts_are_as_each_alone(model):
    config, layout = CONFIGS[model], Layout.load("replicated")
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        built = models.build(config, layout, mesh, jax.random.key(0))

        @jax.jit
        def value(params, tokens, **beside):
            return models.loss(models.with_arrays(built, params), tokens, **beside)[0]

        both = [jax.value_and_grad(value)(models.arrays(built), rows.pop("tokens"), **rows)
                for rows in (batch(config), apart(batch(config)))]  # fmt: skip
    assert float(both[0][0]) == pytest.approx(float(both[1][0]), rel=1e-5)
    for path, gradient in both[0][1].items():
        np.testing.assert_allclose(gradient, both[1][1][path], atol=1e-5, err_msg=path)


def test_rotary_angles_of_packed_rows_are_computed_once_and_not_in_every_layer():
    layout = Layout.load("replicated")
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    rows = batch(DECODER)
    with jax.set_mesh(mesh):
        built = models.build(replace(DECODER, remat="full"), layout, mesh, jax.random.key(0))

        def value(params):
            return models.loss(models.with_arrays(built, params), rows["tokens"], segments=rows["segments"])[0]

        program = jax.make_jaxpr(jax.grad(value))(models.arrays(built)).jaxpr
    loops = [each for each in all_equations(program) if each.primitive.name == "scan"]
    inside = [each for loop in loops for each in all_equations(loop.params["jaxpr"].jaxpr)]
    assert len(loops) >= 2, "layers, forward and backward"
    cosines = lambda equations: sum(each.primitive.name == "cos" for each in equations)  # noqa: E731
    assert (cosines(all_equations(program)), cosines(inside)) == (1, 0)


@pytest.mark.parametrize("model", ["t5", "switch", "decoder"])
def test_tokens_of_padding_change_no_bit(model):
    config, layout = CONFIGS[model], Layout.load("replicated")
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    rows = batch(config)
    other = dict(rows)
    for name, of in (("tokens", "segments"), ("source", "source_segments")):
        if name in rows:
            other[name] = np.where(rows[of] == 0, 63 - rows[name], rows[name])
    with jax.set_mesh(mesh):
        built = models.build(config, layout, mesh, jax.random.key(0))
        loss = jax.jit(lambda tokens, **beside: models.loss(built, tokens, **beside)[0])
        first, second = (float(loss(x.pop("tokens"), **x)) for x in (dict(rows), dict(other)))
    assert first == second


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("t5", {}, "this model has an encoder, but there is no source for it."),
        ("decoder", {"source": (2, 4)}, "this model is decoder-only and reads no source."),
        ("t5", {"source": (2, 4), "segments": (2, 8)}, "targets have segments, but the source has none."),
        ("t5", {"source": (2, 4), "source_segments": (2, 5)}, "source_segments have shape (2, 5), but their tokens"),
        ("t5", {"source": (1, 4)}, "the source has shape (1, 4), and tokens have shape (2, 8)."),
        ("decoder", {"segments": (2, 7)}, "segments have shape (2, 7), but their tokens (2, 8)"),
    ],
)
def test_refuses_inputs_that_do_not_belong_together(model, given, message):
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    arrays = {name: jnp.ones(shape, jnp.int32) for name, shape in given.items()}
    with jax.set_mesh(mesh):
        built = models.abstract(CONFIGS[model], Layout.load("replicated"), mesh)
        with pytest.raises(ValueError) as error:
            built(jnp.ones((2, 8), jnp.int32), **arrays)
    assert message in str(error.value)


@pytest.mark.parametrize("wrong", [[2, 1, 1, 0], [1, 0, 2, 2], [1, 1, -1, 0]])
def test_refuses_segments_out_of_order(wrong):
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        built = models.abstract(DECODER, Layout.load("replicated"), mesh)
        with pytest.raises(ValueError, match="segments of row 1 are not in order"):
            built(jnp.ones((2, 4), jnp.int32), segments=jnp.array([[1, 1, 2, 0], wrong]))


def test_refuses_sources_for_targets_without_segments():
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        built = models.abstract(T5, Layout.load("replicated"), mesh)
        with pytest.raises(ValueError, match="a row has several sources, but its targets have no segments"):
            built(
                jnp.ones((1, 4), jnp.int32),
                source=jnp.ones((1, 4), jnp.int32),
                source_segments=jnp.array([[1, 1, 2, 0]]),
            )
        with pytest.raises(ValueError, match="this model is decoder-only, and encodes nothing"):
            models.abstract(DECODER, Layout.load("replicated"), mesh).encode(jnp.ones((1, 4), jnp.int32))


def test_one_position_of_one_row_is_where_the_stream_lies():
    """On a mesh whose axes have one device each, where no size tells a row from a constant."""
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        at = gspmd.annotate(np.array([[3]], np.int32), "B_xL")
        found = sinusoids(TRANSLATOR, at, gspmd.Spec.parse("B_xL"), gspmd.Spec.parse("B_xLE"))
    waves = 10000.0 ** (-np.arange(8) / 7) * (3 + 2)
    np.testing.assert_allclose(found[0, 0], np.concatenate([np.sin(waves), np.cos(waves)]), atol=1e-6)


def test_activations_of_both_stacks():
    found = models.activation_specs(T5, Layout.load("megatron-1d"), 8, 16, 32)
    assert found["encoder.attention.query"][1] == (8, 32, 8, 8)
    assert (found["cross.memory"][1], found["cross.key"][1], found["cross.query"][1]) == (
        (8, 32, 16), (8, 32, 8, 8), (8, 16, 8, 8),
    )  # fmt: skip
    assert str(found["cross.memory"][0]) == "B_xTE"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {"positions": "relativ"},
            "it must be one of rotary, relative, alibi, sinusoidal, learned, none. Did you mean 'relative'?",
        ),
        ({"relative_buckets": 8}, 'relative_buckets is 8, but positions are rotary; set positions = "relative"'),
        ({"encoder_layers": 2, "block": "parallel"}, "block is parallel, but cross-attention has a norm of its own"),
        ({"encoder_layers": 2, "qk_norm": True}, "qk_norm is set, but cross-attention has no norms of heads"),
        ({"encoder_layers": 2, "start_token": 64}, "start_token is 64, which is not a token of 64"),
        ({"start_token": 1}, "start_token is 1, but a decoder-only model begins with text"),
        ({"encoder_layers": 3, "moe": MoEConfig()}, "encoder_layers is 3, which moe.every (2) does not divide"),
        ({"attention_scale": 0.0}, "attention_scale is 0.0; it must be positive, or be left out"),
    ],
)
def test_refuses_settings(settings, fault):
    with pytest.raises(ValueError) as error:
        models.ModelConfig(**{**SMALL, "encoder_layers": 0, **settings})
    assert fault in str(error.value)
