"""Checkpoints of transformers give its logits in any layout, its greedy text, and come back to it."""

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd_models.checkpoints import load, save
from tests.models.checkpoints.cases import CASES, FIRST, LAYOUTS
from tests.models.checkpoints.conftest import close, logits_of


def logits(model: models.Transformer, mesh: jax.sharding.Mesh, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, L, V] of a placed model."""
    spec = model.layout.spec("embedding.tokens").partition_spec()
    ids = jax.device_put(tokens.astype(np.int32), jax.sharding.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda weights, ids: models.with_arrays(model, weights)(ids)[0])
        return np.asarray(program(models.arrays(model), ids))


@pytest.mark.parametrize(("name", "preset"), FIRST.items())
def test_a_checkpoint_of_each_family_gives_the_logits_of_transformers(name, preset, reference, placing):
    wanted = reference(name)
    layout, mesh = placing(preset)
    model, _ = load(wanted.directory, layout, mesh, "float32")
    close(logits(model, mesh, wanted.tokens), wanted.logits)


@pytest.mark.parametrize("name", FIRST)
def test_an_exported_checkpoint_comes_back_with_the_same_logits(name, reference, placing, from_folder, tmp_path):
    wanted = reference(name)
    layout, mesh = placing(LAYOUTS[0])
    save(load(wanted.directory, layout, mesh, "float32")[0], tmp_path / "out")
    close(logits_of(from_folder(tmp_path / "out"), wanted.tokens), wanted.logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text_are_those_of_transformers_in_any_layout(name, reference, placing):
    wanted = reference(name, 64)
    for preset in ("replicated", *LAYOUTS):
        layout, mesh = placing(preset)
        model, _ = load(wanted.directory, layout, mesh, "float32")
        got = logits(model, mesh, wanted.tokens)
        close(got, wanted.logits)
        np.testing.assert_array_equal(got.argmax(-1)[:, wanted.prompt - 1 : -1], wanted.tokens[:, wanted.prompt :])
