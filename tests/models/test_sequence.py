"""Layouts that shard the length: the order of tokens, and what they save."""

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from tests.models.conftest import BATCH, LENGTH


def bytes_per_layer(config, name, mesh, make_mesh):
    """Return the bytes that one more layer of the compiled gradient keeps, if only the residual stream is kept."""
    layout, mesh = Layout.load(name).lowered("blocking"), make_mesh(mesh)

    def temporary(layers):
        model = models.abstract(config(layers=layers, remat=True), layout, mesh)
        slope = jax.grad(lambda values, ids: models.loss(models.with_arrays(model, values), ids)[0])
        ids = models.abstract_batch(layout, mesh, BATCH, LENGTH)
        return jax.jit(slope).lower(models.arrays(model), ids).compile().memory_analysis().temp_size_in_bytes

    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        return (temporary(9) - temporary(5)) / 4


@pytest.mark.slow
def test_sequence_parallelism_divides_the_residuals_memory_by_the_axis(config, make_mesh):
    """Korthikanti et al. 2022, section 4.2.2: between blocks, activations take 1/t of the memory."""
    mesh = {"x": 2, "y": 4, "z": 1}
    whole, divided = (bytes_per_layer(config, name, mesh, make_mesh) for name in ("megatron-1d", "megatron-sequence"))
    assert whole == BATCH // 2 * LENGTH * 32 * 4
    assert divided == whole / 4


@pytest.mark.parametrize(
    "lowering", ["looped", *(pytest.param(n, marks=pytest.mark.slow) for n in ("blocking", "xla"))]
)
def test_a_model_whose_sequences_are_cut_takes_and_gives_the_order_of_positions(
    lowering, config, one_device, placed, tokens, make_mesh
):
    """Also through experts that are full, whose places go to the first tokens."""
    small = config(layers=1, moe=MoEConfig(experts=8, every=1, capacity_factor=0.5), heads=4, kv_heads=2)
    alone, layout = one_device(small), Layout.load("context-parallel")
    mesh, ids = make_mesh({"x": 2, "y": 4, "z": 1}), tokens[:, :LENGTH]
    with jax.set_mesh(make_mesh({"x": 1, "y": 1, "z": 1})):
        want, figures = jax.jit(alone)(ids)
    assert figures["dropped"].min() > 0
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        where = jax.NamedSharding(mesh, layout.spec("embedding.tokens").partition_spec())
        got, _ = jax.jit(placed(alone, layout, mesh))(jax.device_put(ids, where))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_queries_that_are_cut_along_the_sequence_are_turned_without_a_collective(config, make_mesh):
    """One constant of angles served whole keys too, and was gathered for them in every layer."""
    layout = Layout.load("megatron-1d").override({"attention.query": "B_xL_zH_yD", "attention.key": "B_xLK_yD"})
    small, mesh = config(), make_mesh({"x": 1, "y": 2, "z": 2})
    layout.check(small.sizes(BATCH, LENGTH), mesh)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        model = models.abstract(small, layout, mesh)
        slope = jax.grad(lambda values, ids: models.loss(models.with_arrays(model, values), ids)[0])
        arguments = models.arrays(model), models.abstract_batch(layout, mesh, BATCH, LENGTH)
        ledger = gspmd.ledger(jax.jit(slope).lower(*arguments).compile())
        comparison = ledger.compare(gspmd.trace(slope, *arguments))
    assert comparison.agrees, comparison
