"""A checkpoint of any layout on any number of devices is restored onto any other, bit for bit."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd.layouts import Layout, presets
from gspmd.moe import MoEConfig
from gspmd.training import Checkpoints, ConfigError, OptimizerConfig
from gspmd.training.checkpoints import restore, saved_steps
from gspmd_models import step
from tests.references.models import TINY

CONFIG = replace(TINY, layers=4, moe=MoEConfig(experts=8))
NAMES = presets()


@pytest.fixture
def place(make_mesh):
    """A function (preset, devices) -> the shapes of a training state, placed by a preset."""

    def make(name, devices):
        layout = Layout.load(name)
        mesh = make_mesh(layout.mesh_for(devices, CONFIG.sizes(8, 16)))
        with jax.set_mesh(mesh):
            return step.abstract_state(models.abstract(CONFIG, layout, mesh), OptimizerConfig(), 10, mesh)

    return make


def numbers(at, leaf):
    """Numbers for one leaf of a state, a parameter or a moment."""
    return np.random.default_rng(at).normal(size=leaf.shape).astype(leaf.dtype)


def save(folder, like):
    """A checkpoint of random numbers, placed as a state is."""
    leaves, tree = jax.tree.flatten(like)
    wanted = [numbers(at, leaf) for at, leaf in enumerate(leaves)]
    placed = [jax.device_put(each, leaf.sharding) for each, leaf in zip(wanted, leaves, strict=True)]
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(jax.tree.unflatten(tree, placed), {})


def check(folder, like):
    """Restore onto the layout of another state; every number and every placement is as it should be."""
    with Checkpoints(folder) as checkpoints:
        found, _ = checkpoints.restore(like, tell=pytest.fail)
    assert jax.tree.structure(found) == jax.tree.structure(like)
    for at, (leaf, wanted) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True)):
        assert leaf.sharding == wanted.sharding
        np.testing.assert_array_equal(leaf, numbers(at, wanted))


def test_other_layouts_and_fewer_devices(place, tmp_path):
    save(tmp_path, place("gshard", 8))
    for other, devices in (("zero-3", 8), ("weight-stationary-2d", 4), ("replicated", 1)):
        check(tmp_path, place(other, devices))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_layout_to_each_other_on_8_devices_4_or_1(place, tmp_path, name):
    save(tmp_path, place(name, 8))
    for number, other in enumerate(NAMES, NAMES.index(name)):  # each layout from 8 devices to 8, 4 and 1 several times
        check(tmp_path, place(other, (8, 4, 1)[number % 3]))


@pytest.mark.parametrize("name", ["²", "٣", "007", "1_0", "5x", "-1", "+1", " 1"])
def test_a_folder_whose_name_is_no_step_is_no_checkpoint(name, tmp_path):
    """`int` reads some of them, and str.isdigit is true of others."""
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert saved_steps(tmp_path) == []
    (tmp_path / "checkpoints" / "10").mkdir()
    assert saved_steps(tmp_path) == [10]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[1]", '{"shapes": 1, "data": {}}', ""])
def test_damaged_metadata_of_a_checkpoint_is_one_message(text, tmp_path):
    folder = tmp_path / "checkpoints" / "5" / "run"
    folder.mkdir(parents=True)
    (folder / "metadata").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot read the checkpoint:\n  .*metadata': "):
        restore.read_state(tmp_path, 5, None)
