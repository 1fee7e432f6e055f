"""The compiled training step: what a device holds in it, by ZeRO's formulas, and the scopes that a profile shows."""

import re

import jax
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training import OptimizerConfig, jit_step
from gspmd.training.reporting import memory
from gspmd_models import step

OPTIMIZER = OptimizerConfig()


@pytest.fixture
def compiled(make_mesh, config):
    """A function (layout, changes) -> (config, state, gradients, compiled step) on eight devices."""

    def make(name, **changes):
        model_config, layout = config(**changes), Layout.load(name)
        mesh = make_mesh(layout.mesh_for(8, model_config.sizes(8, 16)))
        layout = layout.resolved(model_config.sizes(8, 16), mesh)
        with jax.set_mesh(mesh), gspmd.lowering(layout.lowering or "auto"):
            model = models.abstract(model_config, layout, mesh)
            state = step.abstract_state(model, OPTIMIZER, 10, mesh)
            update = jit_step(step.training_step(model, OPTIMIZER, 10), state)
            args = state, models.abstract_batch(layout, mesh, 8, 16), models.abstract_key(mesh)
            gradients = step.abstract_gradients(model, state.params, mesh)
            return model_config, state, gradients, update.lower(*args).compile()

    return make


def rows_of(sheet):
    return {cells[0]: cells[1:] for cells, _ in sheet.rows}


# Shares of parameters, gradients and optimizer state over d = 8 devices.
ZERO = {"data-parallel": (1, 1, 1), "zero-1": (1, 1, 8), "zero-2": (1, 8, 8), "zero-3": (8, 8, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_a_device_holds_what_zeros_formulas_say(compiled, name):
    config, state, gradients, program = compiled(name)
    count, shares = config.num_parameters, ZERO[name]
    parts = state.params, gradients, state.optimizer
    for part, each, share in zip(parts, (4, 4, 8), shares):
        assert memory.device_bytes(part) == pytest.approx(each * count / share, rel=0.02)
    stats = program.memory_analysis()
    assert stats.argument_size_in_bytes == pytest.approx((4 / shares[0] + 8 / shares[2]) * count, rel=0.02)
    assert stats.temp_size_in_bytes > memory.device_bytes(gradients)
    rows = rows_of(memory.table(state, gradients, program))
    wanted = [f"{each / share:.3g} B" for each, share in zip((4, 4, 8), shares)]
    assert [rows[part][2] for part in ("parameters", "gradients", "optimizer state")] == wanted
    assert "all, as compiled" in rows
    assert "all but activations" in rows_of(memory.table(state, gradients, None))


@pytest.mark.slow
def test_instructions_stand_in_scopes_named_after_the_models_parts(compiled):
    moe = MoEConfig(experts=8, every=2)
    for changes in ({"moe": moe}, {"block": "parallel", "layers": 1}):
        *_, program = compiled("gshard" if "moe" in changes else "data-parallel", **changes)
        names = re.findall(r'op_name="([^"]*)"', program.as_text())
        parts = ["embedding", "attention", "ffn", "output", "optimizer", *(["moe"] if "moe" in changes else [])]
        inside = {part: [name for name in names if re.search(rf"(?<![a-z]){part}[)/]", name)] for part in parts}
        assert all(inside.values()), {part: len(found) for part, found in inside.items()}
        for part in set(parts) - {"optimizer"}:  # the backward pass too
            assert any("transpose(" in name for name in inside[part]), part
        assert not any("transpose(" in name for name in inside["optimizer"])
        assert sum(map(len, inside.values())) > 0.8 * len(names)
