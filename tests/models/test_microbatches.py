"""Microbatches give the whole batch's update, and each weight's gradient is reduced once; what ZeRO keeps where."""

from functools import cache

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training import OptimizerConfig, jit_step, plan_moves
from gspmd_models import step
from gspmd_models.parameters import gradient_specs, optimizer_specs, parameter_specs
from tests.conftest import AXIS_TYPES

STEPS, BATCH, LENGTH, OPTIMIZER = 50, 16, 8, OptimizerConfig(learning_rate=1e-2)
SIZES = {"vocabulary": 64, "embed": 16, "layers": 2, "heads": 8, "kv_heads": 8, "head_size": 2, "feed_forward": 32}
DENSE = models.ModelConfig(**SIZES)
BIASED = models.ModelConfig(
    **SIZES, qkv_bias=True, ffn_bias=True, activation="gelu", qk_norm=True, norm="layer", norm_bias=True, tied=False
)
# Without jitter, and in groups of one sequence, experts do the same in every microbatch.
EXPERTS = models.ModelConfig(**SIZES, remat=False, ffn_bias=True, moe=MoEConfig(experts=8, router="top-k", every=1))


class Program:
    """A training step on eight host devices, or of the replicated layout on one: compiled, and what it plans."""

    def __init__(self, config, name, kind, lowering, microbatches, at_once):
        self.layout = Layout.load(name)
        self.layout = self.layout.override({f"gradients.{key}": self.layout[key] for key in at_once})
        sizes = self.layout.mesh_for(1 if name == "replicated" else 8)
        devices, types = jax.devices()[: np.prod([*sizes.values()])], (AXIS_TYPES[kind],) * len(sizes)
        self.mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
        with jax.set_mesh(self.mesh), gspmd.lowering(lowering):
            self.model = models.build(config, self.layout, self.mesh, jax.random.key(0))
            self.state = step.initial_state(self.model, OPTIMIZER, STEPS, self.mesh)
            update = jit_step(step.training_step(self.model, OPTIMIZER, STEPS, microbatches), self.state)
            arguments = self.state, self.batch(0), jax.random.key(1)
            self.plan = gspmd.trace(update, *arguments)
            self.compiled = update.lower(*arguments).compile()

    def batch(self, number):
        """[B, L+1] tokens, each its predecessor plus 1 or 5."""
        steps = np.random.default_rng(number).choice([1, 5], size=(BATCH, LENGTH + 1))
        placed = jax.NamedSharding(self.mesh, models.batch_spec(self.layout).partition_spec())
        return jax.device_put((np.cumsum(steps, axis=1) % 64).astype(np.int32), placed)

    def curve(self):
        """Losses and norms of gradients, [steps, 2]."""
        figures = []
        state = jax.tree.map(lambda x: x.copy(), self.state)  # the step overwrites it
        with jax.set_mesh(self.mesh):
            for number in range(STEPS):
                state, found = self.compiled(state, self.batch(number), jax.random.key(1))
                figures.append([float(found["loss"]), float(found["gradient_norm"])])
        return np.array(figures)


@cache
def program(config, name, kind="explicit", lowering="blocking", microbatches=2, at_once=()):
    return Program(config, name, kind, lowering, microbatches, at_once)


@cache
def whole_batches_alone(config):
    return program(config, "replicated", microbatches=1).curve()


def check(config, name, kind, lowering):
    curve, wanted = program(config, name, kind, lowering).curve(), whole_batches_alone(config)
    assert wanted[-1, 0] < wanted[0, 0] - 0.3, "there is nothing to compare in a curve that does not fall"
    np.testing.assert_allclose(curve[:, 0], wanted[:, 0], rtol=1e-4)
    np.testing.assert_allclose(curve[:, 1], wanted[:, 1], rtol=1e-3)


@pytest.mark.slow
def test_two_microbatches_train_as_one_device_does_with_whole_batches():
    check(DENSE, "zero-2", "auto", "blocking")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name", "kind", "lowering"),
    [
        (DENSE, "zero-1", "explicit", "xla"),
        (EXPERTS, "zero-2", "auto", "looped"),
        (EXPERTS, "switch-expert-model", "explicit", "blocking"),
        (BIASED, "zero-2", "explicit", "xla"),
        (BIASED, "megatron-1d", "auto", "blocking"),
    ],
)
def test_every_kind_of_parameter_keeps_the_curve(config, name, kind, lowering):
    check(config, name, kind, lowering)


def test_each_weight_is_reduced_once_however_many_layers_and_microbatches():
    """And by reduce-scatter: of two layers, two microbatches and both uses of the tied table, an eighth each."""
    built = program(DENSE, "zero-2", "auto")
    ledger = gspmd.ledger(built.compiled)
    count, sent = ledger.by_kind_and_axes()["reduce-scatter", ("x",)]
    arrays = models.arrays(built.model).values()
    assert count == len(arrays)
    assert sent == sum(4 * x.size * 7 // 8 for x in arrays)
    assert built.plan.by_kind_and_axes()["reduce-scatter", ("x",)] == (count, sent)
    assert ledger.compare(built.plan).agrees
    of_weights = [entry for entry in ledger.entries if entry.kind == "all-reduce" and entry.wire_bytes > 64]
    assert of_weights == []


@pytest.mark.slow
def test_a_gradient_that_the_layout_has_where_its_parameter_is_is_settled_in_each_microbatch():
    once, each = (program(DENSE, "zero-1", at_once=at_once) for at_once in ((), ("ffn.w_in",)))
    sent = [made.plan.by_kind_and_axes()["all-reduce", ("x",)][1] for made in (once, each)]
    [whole] = [x for path, x in models.arrays(each.model).items() if path.endswith("ffn.w_in")]
    # zero-1 brings the partial sum to the optimizer by a reduce-scatter; two microbatches all-reduce all layers of it.
    assert sent[1] - sent[0] == 2 * (2 * 4 * whole.size * 7 // 8)
    assert gspmd.ledger(each.compiled).compare(each.plan).agrees
    np.testing.assert_allclose(each.curve()[:, 0], whole_batches_alone(DENSE)[:, 0], rtol=1e-4)


@pytest.mark.slow
def test_without_partial_gradients_each_layer_is_reduced_by_itself():
    """The same update of a layout that settles gradients where they arise, by which the test above could fail."""
    reduced = program(DENSE, "zero-1", microbatches=1).plan.by_kind_and_axes()
    arrays = models.arrays(program(DENSE, "zero-1", microbatches=1).model).values()
    assert ("reduce-scatter", ("x",)) not in reduced
    assert reduced["all-reduce", ("x",)][1] >= sum(2 * 4 * x.size * 7 // 8 for x in arrays)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "state"), [("zero-1", 4 + 8 / 8), ("zero-2", 4 + 8 / 8), ("zero-3", 12 / 8)])
def test_state_and_gradients_take_what_zero_says(name, state):
    """Bytes of float32 parameters, gradients and moments on each of d = 8 devices: 8 + 8/d, 4 + 12/d and 16/d."""
    built = program(DENSE, name, microbatches=1)
    count, batch = sum(x.size for x in models.arrays(built.model).values()), 4 * BATCH * (LENGTH + 1) // 8
    held = built.compiled.memory_analysis().argument_size_in_bytes - batch
    assert held == pytest.approx(state * count, rel=0.02)
    each = {"zero-1": 4, "zero-2": 4 / 8, "zero-3": 4 / 8}[name]
    pointers = 8 * len(models.arrays(built.model))
    assert settled(built).output_size_in_bytes - pointers == pytest.approx(each * count, rel=0.02)


def settled(built):
    """Memory of a program that gives the gradients, where the layout settles them."""
    config, layout = built.model.config, built.layout
    own, taken = ({p: s for p, (s, _) in parameter_specs(config, each).items()} for each in (layout, layout.for_loss()))
    moves = plan_moves(own, optimizer_specs(config, layout), gspmd.reshard, gradient_specs(config, layout), taken)

    def gradients(params, tokens):
        loss = lambda params: models.loss(models.with_arrays(model, params), tokens)[0]  # noqa: E731
        found = jax.grad(loss)(moves.to_loss(params))
        return moves.gradients_to_optimizer(found) if moves.partial else found

    explicit = jax.make_mesh((8, 1, 1), ("x", "y", "z"))
    with jax.set_mesh(explicit), gspmd.lowering("blocking"):
        model = models.abstract(config, layout.for_loss(), explicit)
        params = models.arrays(models.abstract(config, layout, explicit))
        tokens = models.abstract_batch(layout, explicit, BATCH, LENGTH)
        return jax.jit(gradients).lower(params, tokens).compile().memory_analysis()
