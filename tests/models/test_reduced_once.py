"""With embedding and output tied, a pipeline reduces each weight's gradient once a step, as planned and as compiled."""

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.training import OptimizerConfig
from gspmd_models import step
from tests.models.conftest import put

BATCH, LENGTH = 16, 8


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("name", "sizes", "microbatches", "rounds", "kind"),
    [
        ("pipeline", {"x": 2, "y": 2, "z": 1}, 4, 1, "all-reduce"),
        pytest.param("pipeline", {"x": 2, "y": 1, "z": 2}, 2, 2, "all-reduce", marks=pytest.mark.slow),
        # all of whose axes split the batch: none is left inside
        pytest.param("data-parallel", {"x": 2, "y": 1, "z": 2}, 4, 1, "all-reduce", marks=pytest.mark.slow),
        ("zero-2", {"x": 1, "y": 2, "z": 2}, 4, 1, "reduce-scatter"),
    ],
)
def test_the_gradient_of_every_weight_is_reduced_once(config, make_mesh, name, sizes, microbatches, rounds, kind):
    settings, layout = config(layers=4, tied=True), Layout.load(name).override({"pipeline.layers": "N_p"})
    mesh, optimizer = make_mesh({"p": 2, **sizes}), OptimizerConfig()
    tokens = np.random.default_rng(0).integers(0, 64, (BATCH, LENGTH + 1), np.int32)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        model = models.build(settings, layout, mesh, jax.random.key(0))
        state = step.initial_state(model, optimizer, 1, mesh)
        update = jax.jit(step.training_step(model, optimizer, 1, microbatches, rounds=rounds))
        arguments = state, put(tokens, layout, mesh), jax.random.key(1)
        ledger, plan = gspmd.ledger(update.lower(*arguments).compile()), gspmd.trace(update, *arguments)
    comparison, weights = ledger.compare(plan), models.parameter_specs(settings, layout)
    assert comparison.agrees, str(comparison)
    assert "output.table" not in weights
    data = tuple(axis for axis in ("x", "y", "z") if sizes[axis] > 1 and axis in layout.spec("embedding.tokens").used)
    for counted in (ledger, plan):
        sums = {key: count for key, (count, _) in counted.by_kind_and_axes().items() if "reduce" in key[0]}
        over_data = {key: count for key, count in sums.items() if {*key[1]} & {*data} and "p" not in key[1]}
        assert over_data == {(kind, data): len(weights)}, str(counted)
