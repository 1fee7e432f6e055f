"""Abstract models: what `build` would make, with nothing made; steps that can be lowered for machines not here."""

from dataclasses import replace
from importlib import util

import jax
import jax.numpy as jnp
import pytest

import gspmd
import gspmd_models as models
from gspmd.audit import topology
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training import OptimizerConfig
from gspmd.training.state import abstract
from gspmd_models import step
from tests.models.conftest import load

needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
OPTIMIZER = OptimizerConfig()


def described(tree):
    """Shape, type and placement of every leaf."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding.spec), abstract(tree))


@pytest.mark.turns(1)
@pytest.mark.parametrize("preset", ["gshard", "zero-3"])
def test_an_abstract_model_and_its_state_are_those_that_build_makes(config, make_mesh, preset):
    settings, layout = config(moe=MoEConfig()), Layout.load(preset)
    layout = layout.override({"optimizer.attention.w_q": "EHD_xyz"}) if preset == "gshard" else layout
    mesh = make_mesh(layout.mesh_for(8))
    real = models.build(settings, layout, mesh, jax.random.key(0), "bfloat16")
    shapes = models.abstract(settings, layout, mesh, "bfloat16")
    assert described(models.arrays(shapes)) == described(models.arrays(real))
    assert shapes.dtype == real.dtype
    with jax.set_mesh(mesh):
        begun, planned = step.initial_state(real, OPTIMIZER, 10, mesh), step.abstract_state(shapes, OPTIMIZER, 10, mesh)
        assert described(planned) == described(begun)
        tokens, key = models.abstract_batch(layout, mesh, 8, 16), models.abstract_key(mesh)
        lowered = [
            jax.jit(step.training_step(model, OPTIMIZER, 10)).lower(state, tokens, key).as_text()
            for model, state in ((real, begun), (shapes, planned))
        ]
    assert lowered[0] == lowered[1]


def test_matrices_are_stored_as_asked_and_the_rest_stays_wide(config, make_mesh):
    layout = Layout.load("gshard")
    mesh = make_mesh(layout.mesh_for(8))
    model = models.abstract(config(moe=MoEConfig()), layout, mesh, "bfloat16", stored="bfloat16")
    wide = {path.rpartition(".")[2] for path, leaf in models.arrays(model).items() if leaf.dtype == jnp.float32}
    assert wide == {"norm", "router"}
    assert {leaf.dtype for leaf in models.arrays(model).values()} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}


def test_a_forward_step_gives_the_models_own_logits(config, make_mesh, tokens):
    layout = Layout.load("weight-stationary-2d")
    mesh = make_mesh(layout.mesh_for(8))
    model = models.build(config(block="parallel"), layout, mesh, jax.random.key(0))
    ids = jax.device_put(tokens[:, :-1], models.abstract_tokens(layout, mesh, 8, 16).sharding)
    with jax.set_mesh(mesh):
        logits = jax.jit(step.forward_step(model))(models.arrays(model), ids)
        wanted = jax.jit(lambda ids: model(ids)[0])(ids)
    assert logits.dtype == jnp.float32
    assert (logits == wanted).all()


def forward(settings, layout, mesh, batch, length):
    """The forward step of a model in bfloat16, lowered, and of how many arrays it was made."""
    before = {id(array) for array in jax.live_arrays()}
    with jax.set_mesh(mesh):
        model = models.abstract(settings, layout, mesh, "bfloat16", stored="bfloat16")
        arguments = models.arrays(model), models.abstract_tokens(layout, mesh, batch, length)
        lowered = jax.jit(step.forward_step(model)).lower(*arguments)
    return lowered, [array.shape for array in jax.live_arrays() if id(array) not in before and array.size > 1]


def test_layers_are_free_and_nothing_is_allocated(make_mesh):
    settings, layout = load("palm-540b"), Layout.load("weight-stationary-2d")
    mesh = make_mesh(layout.mesh_for(8))
    texts, made = zip(*(forward(replace(settings, layers=n), layout, mesh, 512, 1) for n in (4, 118)))
    assert texts[0].as_text().count("\n") == texts[1].as_text().count("\n")
    assert made == ([], [])


@needs_libtpu
def test_palm_540b_is_lowered_for_64_chips():
    """Table 2 of Pope et al. 2022: decoding at batch 512 on 4×4×4; the 48 heads divide over y and z, 16."""
    layout, mesh = Layout.load("weight-stationary-2d"), topology("tpu-v4:4x4x4").mesh({"x": 4, "y": 4, "z": 4})
    settings = load("palm-540b")
    layout.check(settings.sizes(512, 1), mesh)
    lowered, made = forward(settings, layout, mesh, 512, 1)
    assert made == []
    assert lowered.out_info.shape == (512, 1, settings.table_rows)


TRAINED = [
    ("palm-8b", "weight-gathered-xyz", "tpu-v4:4x4x4", 64, 2048),
    ("gshard-600b", "gshard", "tpu-v5p:8x8x16", 4096, 1024),
    ("switch-c", "switch-expert-model", "tpu-v5p:8x8x16", 1024, 512),
]


@pytest.mark.turns(1)
@needs_libtpu
@pytest.mark.parametrize(("name", "preset", "slice", "batch", "length"), TRAINED, ids=[row[0] for row in TRAINED])
def test_training_is_lowered_for_slices_that_are_not_here(name, preset, slice, batch, length):
    settings, layout = load(name), Layout.load(preset)
    found = topology(slice)
    mesh = found.mesh(dict(zip("xyz", found.shape)))
    layout.check(settings.sizes(batch, length), mesh)
    model = models.abstract(settings, layout, mesh, "bfloat16")
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        state = step.abstract_state(model, OPTIMIZER, 100, mesh)
        arguments = state, models.abstract_batch(layout, mesh, batch, length), models.abstract_key(mesh)
        lowered = jax.jit(step.training_step(model, OPTIMIZER, 100)).lower(*arguments)
    after, figures = lowered.out_info
    assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(lambda leaf: leaf.shape, state)
    assert {"loss", "cross_entropy", "gradient_norm", "learning_rate"} <= set(figures)
