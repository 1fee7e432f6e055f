"""Models whose first layers have no experts, or whose dense layers have another width, on any layout."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd_models.parameters import parameters
from gspmd_models.stages import check_splits
from tests.models.conftest import put

FIRST = MoEConfig(experts=8, router="top-k", every=1, first_dense=1, dense_feed_forward=96, dispatch="dropless")


def losses(model, mesh, tokens):
    """Loss, figures and gradients of a model."""
    with jax.set_mesh(mesh):
        ids = put(tokens, model.layout, mesh)
        run = lambda values: models.loss(models.with_arrays(model, values), ids, key=jax.random.key(3))  # noqa: E731
        (value, figures), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(models.arrays(model))
    return value, figures, jax.tree.map(np.asarray, gradients)


def test_sizes_and_parameters_are_those_of_each_layer(config):
    sizes = config(layers=4, moe=FIRST)
    rows = parameters(sizes, Layout.load("gshard"))
    assert (sizes.period, sizes.expert_layers) == (4, 3)
    assert rows["blocks.0.ffn.w_in"].shape == (1, sizes.embed, 96)
    assert rows["blocks.1.moe.w_in"].shape == (1, 8, sizes.embed, sizes.feed_forward)
    assert sizes.num_parameters == sum(np.prod(row.shape, dtype=int) for row in rows.values())
    every = config(layers=4, moe=replace(FIRST, every=2, first_dense=0))
    assert parameters(every, Layout.load("gshard"))["blocks.0.ffn.w_out"].shape == (2, 96, every.embed)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_first_layers_without_experts_are_those_of_a_pattern(config, one_device, make_mesh, tokens, remat):
    """Layers 1 and 3 of 4 have experts, in both models; one of them stacks pairs of layers."""
    moe = replace(FIRST, every=2, dense_feed_forward=0)
    apart, paired = (one_device(config(layers=4, remat=remat, moe=each)) for each in (moe, replace(moe, first_dense=0)))
    values, stacks = {}, models.arrays(paired)
    for path, value in models.arrays(apart).items():
        block, _, name = path.removeprefix("blocks.").partition(".")
        at = int(block) if path.startswith("blocks.") else 0
        stacked = path.startswith("blocks.")
        values[path] = stacks[f"blocks.{at % 2}.{name}"][at // 2 : at // 2 + 1] if stacked else stacks[path]
        assert values[path].shape == value.shape
    mesh = make_mesh({"x": 1, "y": 1, "z": 1})
    value, figures, gradients = losses(models.with_arrays(apart, values), mesh, tokens)
    wanted, wanted_figures, wanted_gradients = losses(paired, mesh, tokens)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for name, figure in wanted_figures.items():
        np.testing.assert_allclose(figures[name], figure, rtol=1e-5, atol=1e-7, err_msg=name)
    for path, gradient in gradients.items():
        block, _, name = path.removeprefix("blocks.").partition(".")
        stacked = path.startswith("blocks.")
        of_pair = wanted_gradients[f"blocks.{int(block) % 2}.{name}" if stacked else path]
        of_pair = of_pair[int(block) // 2][None] if stacked else of_pair
        np.testing.assert_allclose(gradient, of_pair, rtol=1e-4, atol=1e-6, err_msg=path)


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
    with pytest.raises(ValueError, match=r"moe\.first_dense is 2, and of 2 layers none has experts; lower it"):
        config(layers=2, moe=replace(FIRST, first_dense=2))
    with pytest.raises(ValueError, match=r"moe\.dense_feed_forward is 96, and every layer has experts; leave it out"):
        config(layers=2, moe=replace(FIRST, first_dense=0))
    with pytest.raises(ValueError, match="both stacks of an encoder–decoder have one pattern"):
        config(layers=2, encoder_layers=2, moe=FIRST)
    with pytest.raises(ValueError) as error:
        check_splits(config(layers=4, moe=FIRST), 2)
    assert str(error.value) == (
        "cannot split 4 layers, of which the first 1 have no experts, into stages: stages have layers of one pattern.\n"
        "  Leave moe.first_dense out, or the stages."
    )
