"""Models some of whose layers have no experts, at the beginning or anywhere, and perhaps another width."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.annotate.errors import PlanError
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd_models.parameters import parameters
from gspmd_models.stages import check_splits
from tests.models.conftest import put

FIRST = MoEConfig(experts=8, router="top-k", every=1, dense_layers=(0,), dense_feed_forward=96, dispatch="dropless")


def losses(model, mesh, tokens):
    """Return the loss, figures and gradients of a model."""
    with jax.set_mesh(mesh):
        ids = put(tokens, model.layout, mesh)
        run = lambda values: models.loss(models.with_arrays(model, values), ids, key=jax.random.key(3))  # noqa: E731
        (value, figures), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(models.arrays(model))
    return value, figures, jax.tree.map(np.asarray, gradients)


def test_sizes_and_parameters_are_those_of_each_layer(config):
    sizes = config(layers=4, moe=FIRST)
    rows = parameters(sizes, Layout.load("gshard"))
    assert (sizes.lead, sizes.pattern, sizes.repeats, sizes.expert_layers) == (1, 1, 3, 3)
    assert rows["blocks.0.ffn.w_in"].shape == (1, sizes.embed, 96)
    assert rows["blocks.1.moe.w_in"].shape == (3, 8, sizes.embed, sizes.feed_forward)
    assert sizes.num_parameters == sum(np.prod(row.shape, dtype=int) for row in rows.values())
    every = config(layers=4, moe=replace(FIRST, every=2, dense_layers=()))
    assert parameters(every, Layout.load("gshard"))["blocks.0.ffn.w_out"].shape == (2, 96, every.embed)


@pytest.mark.parametrize(
    ("layers", "every", "dense", "kinds", "stacks"),
    [
        (61, 1, (0, 1, 2), (), [[0], [1], [2], range(3, 61)]),
        (6, 1, (0, 2, 4), (), [range(0, 6, 2), range(1, 6, 2)]),
        (8, 2, (3, 7), (), [range(0, 8, 4), range(1, 8, 4), range(2, 8, 4), range(3, 8, 4)]),
        (4, 1, (3,), (), [[0], [1], [2], [3]]),
        (7, 1, (0,), ("sliding", "sliding", "full", "sliding", "full", "sliding", "full"),
         [[0], range(1, 7, 2), range(2, 7, 2)]),
    ],
)  # fmt: skip
def test_layers_that_repeat_are_in_one_stack(config, layers, every, dense, kinds, stacks):
    moe, window = replace(FIRST, every=every, dense_layers=dense), 4 if kinds else None
    found = config(layers=layers, moe=moe, layer_kinds=kinds, sliding_window=window).stacks()
    assert [[*each] for each in found] == [[*each] for each in stacks]


@pytest.mark.turns(1)
@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize("dense", [(0,), (1,), (0, 2)])
def test_stacked_layers_have_the_gradients_of_layers_by_themselves(config, one_device, make_mesh, tokens, dense, remat):
    model = one_device(config(layers=4, remat=remat, moe=replace(FIRST, dense_layers=dense)))
    apart, mesh = models.unstack(model), make_mesh({"x": 1, "y": 1, "z": 1})
    value, figures, gradients = losses(model, mesh, tokens)
    wanted, wanted_figures, wanted_gradients = losses(apart, mesh, tokens)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for name, figure in wanted_figures.items():
        np.testing.assert_allclose(figures[name], figure, rtol=1e-5, atol=1e-7, err_msg=name)
    assert figures["load"].shape == (4 - len(dense), 8)
    compared = 0
    for path, gradient in gradients.items():
        place, _, name = path.removeprefix("blocks.").partition(".")
        if not path.startswith("blocks."):
            np.testing.assert_allclose(gradient, wanted_gradients[path], rtol=1e-4, atol=1e-6, err_msg=path)
            continue
        for row, number in enumerate(model.config.stacks()[int(place)]):
            of_layer = wanted_gradients[f"blocks.{number}.{name}"][0]
            np.testing.assert_allclose(gradient[row], of_layer, rtol=1e-4, atol=1e-6, err_msg=f"{path} {row}")
            compared += 1
    assert compared == sum(path.startswith("blocks.") for path in wanted_gradients)


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("name", "lowering"), [("gshard", "blocking"), ("switch-expert-model", "looped"), ("weight-stationary-2d", "xla")]
)
def test_a_layout_never_changes_a_loss(config, one_device, placed, make_mesh, tokens, name, lowering):
    moe = replace(FIRST, shared=1, dispatch="sort", router="switch", dropout=0.2)
    alone, layout = one_device(config(layers=3, moe=moe)), Layout.load(name)
    mesh = make_mesh(layout.mesh_for(8))
    wanted = losses(alone, make_mesh(layout.mesh_for(1)), tokens)
    with gspmd.lowering(lowering):
        found = losses(placed(alone, layout, mesh), mesh, tokens)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for path, gradient in wanted[2].items():
        np.testing.assert_allclose(found[2][path], gradient, rtol=2e-3, atol=2e-5, err_msg=path)


def test_greedy_text_is_that_of_whole_prompts(config, one_device, make_mesh):
    model, mesh = (
        one_device(config(layers=3, moe=replace(FIRST, k=1, renormalize=False))),
        make_mesh({"x": 1, "y": 1, "z": 1}),
    )
    with jax.set_mesh(mesh):
        texts = models.Generator(model)([[1, 2, 3]], 6, sampling=models.Sampling(temperature=0)).texts
        whole = np.array([[1, 2, 3, *texts[0]]], np.int32)
        logits = np.asarray(jax.jit(model)(whole)[0])
    assert logits[0, 2:-1].argmax(-1).tolist() == texts[0]


def test_faults_are_named(config):
    for dense, fault in {
        (0, 1): "moe.dense_layers are 0, 1, so none of the 2 layers has experts; leave some out",
        (2,): "moe.dense_layers has 2, but the last layer is 1",
    }.items():
        with pytest.raises(ValueError, match=re.escape(fault)):
            config(layers=2, moe=replace(FIRST, dense_layers=dense))
    already = "moe.dense_layers has 0, 2, dense already with moe.every = 2; leave them out"
    with pytest.raises(ValueError, match=re.escape(already)):
        config(layers=4, moe=replace(FIRST, every=2, dense_layers=(0, 2, 3)))
    with pytest.raises(ValueError, match=r"moe\.dense_feed_forward is 96, but every layer has experts; leave it out"):
        config(layers=2, moe=replace(FIRST, dense_layers=()))
    with pytest.raises(ValueError, match="both stacks of an encoder–decoder have one pattern"):
        config(layers=2, encoder_layers=2, moe=FIRST)
    for dense in ([0], (1, 0), (0, 0), (-1,), (True,), 1):
        with pytest.raises(PlanError, match="it must be a tuple of numbers of layers from 0, each once, in order"):
            MoEConfig(dense_layers=dense)
    with pytest.raises(PlanError) as error:
        check_splits(config(layers=6, moe=replace(FIRST, dense_layers=(1,))), 2)
    assert str(error.value) == (
        "cannot split 6 layers into stages: layers 2 to 5 repeat, and those before them, which the first stage runs, "
        "have experts (layer 0).\n"
        "  Choose moe.every, moe.dense_layers and layer_kinds so that all layers with experts repeat."
    )
    with pytest.raises(PlanError, match="3 stacked layers after the first 1 do not make 1 round of 2 stages"):
        check_splits(config(layers=4, moe=FIRST), 2)
