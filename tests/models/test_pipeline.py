"""A model in a pipeline under Auto axes: fifty steps of training, and evaluation, are those of one device.

Under Explicit axes tests/models/test_combinations.py trains in stages.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gspmd
import gspmd_models as models
from gspmd.annotate import LayoutError, PlanError, SpecError
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training import OptimizerConfig
from gspmd_models import step
from gspmd_models.stages import check_lowering_of_stages, check_splits, for_stages
from tests.models.conftest import put

STEPS = 50


def losses(config, name, mesh, tokens, microbatches=1, rounds=1):
    """The losses of fifty steps and of an evaluation after them, and ledger and plan of one step."""
    layout, optimizer = Layout.load(name), OptimizerConfig()
    layout.check(config.sizes(*tokens.shape[1:]), mesh)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        model = models.build(config, layout, mesh, jax.random.key(0))
        state = step.initial_state(model, optimizer, STEPS, mesh)
        update = jax.jit(step.training_step(model, optimizer, STEPS, microbatches, rounds=rounds))
        arguments = put(tokens[0], layout, mesh), jax.random.key(1)
        program, found = update.lower(state, *arguments).compile(), []
        for batch in tokens:
            state, metrics = program(state, put(batch, layout, mesh), arguments[1])
            found.append(float(metrics["loss"]))
        found.append(float(jax.jit(step.evaluation_step(model, microbatches, rounds))(state.params, arguments[0])))
        return found, gspmd.ledger(program), gspmd.trace(update, state, *arguments)


@pytest.mark.slow
def test_fifty_steps_in_two_rounds_have_the_losses_of_one_device(config, make_mesh):
    settings = config(layers=4, tied=False, block="parallel")
    steps = np.random.default_rng(0).choice([1, 5], size=(STEPS, 8, 17))
    tokens = (np.cumsum(steps, axis=2) % 64).astype(np.int32)
    wanted, *_ = losses(settings, "replicated", make_mesh({"x": 1, "y": 1, "z": 1}), tokens)
    mesh = make_mesh({"p": 2, "x": 2, "y": 2, "z": 1}, "auto")
    found, ledger, plan = losses(settings, "pipeline", mesh, tokens, microbatches=2, rounds=2)
    comparison, weights = ledger.compare(plan), len(models.parameter_specs(settings, Layout.load("pipeline")))
    assert wanted[-1] < wanted[0] - 0.5, "nothing was learnt"
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert comparison.agrees
    for counted in (ledger, plan):  # each weight's gradient is reduced once, and nothing else along x alone
        assert {key: count for key, (count, _) in counted.by_kind_and_axes().items() if key[1] == ("x",)} == {
            ("all-reduce", ("x",)): weights
        }
    # Lookups of the embedding that the compiler shares are the only steps that are not as planned.
    assert {row.how for row in comparison.differing} <= {"with step 0"}, str(comparison)


def test_layers_before_those_that_repeat_run_on_the_first_stage(config, make_mesh):
    settings = config(layers=3, layer_kinds=("full", "sliding", "sliding"), sliding_window=4)
    tokens = np.random.default_rng(0).integers(0, 64, (3, 8, 17)).astype(np.int32)
    wanted, *_ = losses(settings, "replicated", make_mesh({"x": 1, "y": 1, "z": 1}), tokens)
    mesh = make_mesh({"p": 2, "x": 2, "y": 1, "z": 1})
    found, ledger, plan = losses(settings, "pipeline", mesh, tokens, 2)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert ledger.compare(plan).agrees
    specs = models.parameter_specs(settings, Layout.load("pipeline"))
    axes = {path: spec.axes_of("N") for path, (spec, _) in specs.items() if path.startswith("blocks.")}
    assert {axes[path] for path in axes if path.startswith("blocks.0.")} == {()}
    assert {axes[path] for path in axes if path.startswith("blocks.1.")} == {("p",)}
    # The first layer sends nothing from stage to stage: as much goes there as without it.
    _, without, _ = losses(config(layers=2, sliding_window=4), "pipeline", mesh, tokens[:1], 2)
    sent, of_two = (each.by_kind_and_axes()["collective-permute", ("p",)] for each in (ledger, without))
    assert sent == of_two


def test_what_does_not_go_through_stages(config, make_mesh, tokens):
    layout, mesh = Layout.load("pipeline"), make_mesh({"p": 2, "x": 2, "y": 1, "z": 1})

    def refused(settings, **options):
        with jax.set_mesh(mesh):
            model = models.abstract(settings, layout, mesh)
            run = lambda values, ids: models.loss(models.with_arrays(model, values), ids, **options)  # noqa: E731
            with pytest.raises((PlanError, SpecError)) as error:
                jax.eval_shape(run, models.arrays(model), put(tokens, layout, mesh))
        return str(error.value)

    assert refused(config(), microbatches=8) == (
        "cannot split a batch of 8 sequences over 2 devices ('B_xL') into 8 microbatches.\n"
        "  Each device splits its own sequences into microbatches, so use a batch that is a multiple of 16."
    )
    grouped = config(moe=MoEConfig(experts=8, every=1, groups=4))
    assert "cannot cut a batch with 4 groups of tokens into 2 microbatches." in refused(grouped, microbatches=2)
    assert refused(config(), microbatches=2, rounds=2) == (
        "2 stacked layers do not make 2 rounds of 2 stages.\n"
        "  Their number must be a multiple of 4: change layers, rounds or mesh."
    )
    assert refused(config(offload=True), microbatches=2) == (
        "cannot keep the activations of stages in host memory: offload is set, and schedules of stages do not move "
        "what they keep.\n  Leave offload out, or train in a layout without stages."
    )
    with pytest.raises(PlanError) as error:
        check_splits(config(layers=4, encoder_layers=6, moe=MoEConfig(experts=8, every=2)), stages=2)
    assert str(error.value) == (
        "3 stacked layers of the encoder and 2 of the decoder do not make 1 round of 2 stages.\n"
        "  Their numbers must be multiples of 2: change layers, rounds or mesh."
    )
    for build in (
        step.evaluation_step,
        lambda model, **options: step.training_step(model, OptimizerConfig(), 1, **options),
    ):
        with pytest.raises(PlanError, match="rounds is 2, but no layout here has stages; set rounds to 1"):
            build(models.abstract(config(), Layout.load("zero-2"), make_mesh({"x": 2, "y": 1, "z": 1})), rounds=2)
    with pytest.raises(LayoutError, match=r"dimension N has size 2, which mesh axis p \(size 4\) does not divide"):
        layout.check(config().sizes(8, 16), {"p": 4, "x": 2})


def test_partial_sums_that_stages_cannot_leave_are_named_together():
    layout = Layout.load("zero-2").override({"pipeline.layers": "N_p"})
    over = {key: layout.gradient(key).partition("-")[2] for key in ("ffn.w_in", "ffn.norm")}
    assert over == {"ffn.w_in": "xyz", "ffn.norm": "xyz"}
    assert for_stages(models.ModelConfig(moe=None), layout)["ffn.w_in"] == "EF reduced-xyz"
    with pytest.raises(PlanError) as error:
        for_stages(models.ModelConfig(moe=MoEConfig(experts=8)), layout)
    head, *lines = str(error.value).split("\n")
    assert head.startswith("stages settle gradients for each microbatch, except over an axis that splits the batch and")
    named = [line.partition(" over ")[0].removeprefix("  the gradient of ") for line in lines[:-2]]
    assert len({*named}) == len(named) == 6
    assert lines[0].endswith(" over x, y, z: write 'VE' in [gradients], not 'VE partialsum-xyz'.")
    assert lines[-2] == "  ... and 9 more."
    assert lines[-1].startswith("  A model with experts has no such axis:")


@pytest.mark.slow
def test_stages_are_gathered_outside_of_the_loss(config, make_mesh, one_device, placed, tokens):
    """A forward pass to logits runs on all layers everywhere, as generation does."""
    layout, mesh, fresh = Layout.load("pipeline"), make_mesh({"p": 2, "x": 2, "y": 1, "z": 1}), one_device(config())
    model = placed(fresh, layout, mesh)
    with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"))):
        wanted = np.asarray(jax.jit(lambda ids: fresh(ids)[0])(jnp.asarray(tokens[:, :-1])))
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        ids = put(tokens[:, :-1], layout, mesh)
        run = jax.jit(lambda values, ids: models.with_arrays(model, values)(ids)[0])
        plan = gspmd.trace(run, models.arrays(model), ids)
        np.testing.assert_allclose(np.asarray(run(models.arrays(model), ids)), wanted, atol=2e-5)
    assert {(step.kind, step.axes) for step in plan.steps if "p" in step.axes} == {("all-gather", ("p",))}


def test_a_model_whose_stages_are_gathered_keeps_its_weights_in_stages(config, make_mesh, axis_type):
    layout, mesh = Layout.load("pipeline"), make_mesh({"p": 2, "x": 1, "y": 1, "z": 1}, axis_type)
    with jax.set_mesh(mesh):
        model = models.build(config(layers=2, moe=None), layout, mesh, jax.random.key(0))
        before = {path: (id(x), x.sharding) for path, x in models.arrays(model).items()}
        model.stacked()
        jax.make_jaxpr(lambda: [leaf.get_value() for _, leaf in nnx.to_flat_state(model.stacked().weights)])()
        assert {path: (id(x), x.sharding) for path, x in models.arrays(model).items()} == before


@pytest.mark.parametrize("elsewhere", [None, "device", "mesh"])
def test_ids_that_lie_elsewhere_are_refused_with_where_they_belong(config, make_mesh, elsewhere):
    layout, mesh = Layout.load("pipeline"), make_mesh({"p": 1, "x": 2, "y": 1, "z": 1})
    with jax.set_mesh(mesh):
        model, ids = models.build(config(moe=None), layout, mesh, jax.random.key(0)), np.zeros((2, 4), np.int32)
        if elsewhere:
            other = jax.sharding.Mesh(jax.devices()[2:4], "x", axis_types=(jax.sharding.AxisType.Explicit,))
            ids = jax.device_put(
                ids, jax.devices()[3] if elsewhere == "device" else jax.NamedSharding(other, jax.P("x"))
            )
        with pytest.raises(SpecError, match="B_xL") as error:
            model(ids)
    remedy = "gspmd.annotate(x, 'B_xL')" if elsewhere else "gspmd.reshard(operand_1, 'BL -> B_xL')"
    assert f"with {remedy}" in str(error.value) or f": {remedy}" in str(error.value)


def test_the_only_layer_of_a_stage_gathers_its_weights_once_and_that_is_planned(config, make_mesh):
    """The gather was planned for every tick, and compiled before the loop over them."""
    layout = Layout.load("pipeline").override({"ffn.w_in": "E_xF_y", "ffn.in_via": "B_xLE, EF_y"})
    mesh, optimizer = make_mesh({"p": 2, "x": 2, "y": 1, "z": 1}), OptimizerConfig()
    small = config(layers=2)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        model = models.abstract(small, layout, mesh)
        state = step.abstract_state(model, optimizer, STEPS, mesh)
        update = jax.jit(step.training_step(model, optimizer, STEPS, 2))
        arguments = state, models.abstract_batch(layout, mesh, 8, 16), models.abstract_key(mesh)
        comparison = gspmd.ledger(update.lower(*arguments).compile()).compare(gspmd.trace(update, *arguments))
    assert comparison.agrees, comparison


@pytest.mark.parametrize(
    ("axis_type", "schedule", "lowerings"),
    [
        ("explicit", "1f1b", {"default": "xla"}),
        ("auto", "gpipe", {"default": "xla"}),  # gradients are partial sums, which Explicit axes have
        ("explicit", "zero-bubble", {"embedding": "xla", "moe": "xla"}),
    ],
)
def test_lowering_xla_is_not_refused_where_stages_have_it(axis_type, schedule, lowerings, make_mesh):
    layout = Layout.load("pipeline").override({f"lowering.{part}": name for part, name in lowerings.items()})
    check_lowering_of_stages(
        models.ModelConfig(moe=None), layout, make_mesh({"p": 2, "x": 2, "y": 2}, axis_type), schedule
    )
