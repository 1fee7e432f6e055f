import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from tests.models.conftest import put


def continued(model, layout, mesh, **options):
    with jax.set_mesh(mesh):
        return models.generate(model, [3, 4, 5], 6, key=jax.random.key(2), window=8, **options)


def test_greedy_text_takes_the_largest_logit_each_time(config, one_device, make_mesh):
    layout = Layout.load("replicated")
    model, mesh = one_device(config()), make_mesh(layout.mesh_for(1))
    text = [3, 4, 5, *continued(model, layout, mesh, temperature=0)[0]]
    with jax.set_mesh(mesh):
        read = jax.jit(lambda ids: model(ids)[0])
        for at in range(3, 8):
            window = np.zeros((1, 8), np.int32)
            window[0, :at] = text[:at]
            assert int(read(put(window, layout, mesh))[0, at - 1].argmax()) == text[at]


def test_a_row_is_the_same_on_every_mesh(config, one_device, placed, make_mesh):
    model = one_device(config(moe=MoEConfig()))
    rows = []
    for name, devices, count in (("replicated", 1, 1), ("gshard", 8, 8), ("weight-stationary-2d", 8, 8)):
        layout = Layout.load(name)
        mesh = make_mesh(layout.mesh_for(devices))
        found = continued(placed(model, layout, mesh), layout, mesh, temperature=1.0)
        assert found.shape == (count, 6)
        assert found.dtype == np.int32
        rows.append(found[0])
    assert rows[0].tolist() == rows[1].tolist() == rows[2].tolist()


@pytest.mark.parametrize("router", ["switch", "gshard"])
def test_what_fills_the_window_takes_no_slot(config, one_device, make_mesh, router):
    """Two slots for two first and two second choices: any slot that padding took would be missed."""
    layout = Layout.load("replicated")
    moe = MoEConfig(experts=2, router=router, evaluation_capacity_factor=2 * 2 / 8 / (1 + (router == "gshard")))
    assert moe.evaluation().capacity(8) == 2
    model, mesh = one_device(config(moe=moe)), make_mesh(layout.mesh_for(1))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda ids, mask: model.hidden(ids, mask=mask)[0][:, :2])
        mask = np.arange(8)[None] < 2
        rows = [np.array([[7, 9, *[fill] * 6]], np.int32) for fill in (0, 7, 50)]
        found = [run(put(row, layout, mesh), put(mask, layout, mesh)) for row in rows]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_temperature_makes_rows_differ(config, make_mesh):
    layout = Layout.load("data-parallel")
    mesh = make_mesh(layout.mesh_for(2))
    model = models.build(config(), layout, mesh, jax.random.key(0))
    greedy, sampled = (continued(model, layout, mesh, temperature=t) for t in (0, 5.0))
    assert greedy[0].tolist() == greedy[1].tolist()
    assert sampled[0].tolist() != sampled[1].tolist()


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "cannot continue an empty prompt; give at least one token"),
        ([1], {"temperature": -1.0}, "temperature is -1.0; it must not be negative (0 takes the likeliest token)"),
        ([1], {"window": 0}, "window is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_continued_is_said(prompt, options, message):
    with pytest.raises(ValueError) as error:
        models.generate(None, prompt, 1, key=jax.random.key(0), **options)
    assert str(error.value) == message


def test_experts_that_choose_tokens_cannot_generate(config, one_device, make_mesh):
    layout = Layout.load("replicated")
    model = one_device(config(moe=MoEConfig(router="expert-choice")))
    with pytest.raises(ValueError) as error:
        continued(model, layout, make_mesh(layout.mesh_for(1)))
    assert str(error.value) == (
        "router expert-choice cannot generate text: its experts choose among all tokens of a group, so what it learned "
        "depends on tokens that are not there yet. Train with another router to generate."
    )
