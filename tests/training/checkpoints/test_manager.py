"""Checkpoints: whole or absent, and restored onto another mesh and layout."""

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.annotate import Spec
from gspmd.training import TrainState
from gspmd.training.checkpoints import (
    Checkpoints,
    checksums,
    last_step,
    load_settings,
    newest,
    save_settings,
    saved_steps,
)
from gspmd.training.checkpoints.saved import ANEW
from gspmd.training.toml import ConfigError


def trained(make_program, corpus, steps=3, **more):
    program, _ = make_program(**more)
    state = program.state
    for _ in range(steps):
        tokens = program.place(np.arange(36).reshape(4, 9) % 8)
        state, _ = program.step(state, tokens, program.key)
    return program, state


def test_restores_onto_another_mesh_and_layout(make_program, corpus, tmp_path):
    _, state = trained(make_program, corpus)
    wanted = jax.device_get(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {"next_index": 7})
    other = {"table": Spec.parse("V_yE_x"), "bias": Spec.parse("E_x")}
    like = make_program({"x": 2, "y": 4}, specs=other)[0].state
    with Checkpoints(tmp_path) as checkpoints:
        found, position = checkpoints.restore(like)
    assert position == {"next_index": 7}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), wanted)
    assert found.params["table"].sharding == like.params["table"].sharding
    assert found.optimizer[0].mu["table"].sharding.shard_shape((8, 8)) == (2, 4)


def test_saved_values_survive_the_next_donating_step(make_program, corpus, tmp_path):
    program, state = trained(make_program, corpus)
    wanted = jax.device_get(state.params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
        for _ in range(3):
            state, _ = program.step(state, program.place(np.zeros((4, 9))), program.key)
    with Checkpoints(tmp_path) as checkpoints:
        found, _ = checkpoints.restore(make_program()[0].state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.params), wanted)


def test_keeps_the_newest(make_program, corpus, tmp_path):
    program, state = trained(make_program, corpus, steps=0)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for _ in range(4):
            state, _ = program.step(state, program.place(np.zeros((4, 9))), program.key)
            checkpoints.save(state, {})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]
    assert newest(tmp_path) == 4


def test_the_checkpoint_that_a_last_message_names_is_kept(make_program, corpus, tmp_path, monkeypatch):
    """A process may end while a save is about to remove the checkpoint that its message names."""
    program, state = trained(make_program, corpus, steps=1)
    reached, goes_on, write = threading.Event(), threading.Event(), checksums.write

    def waiting(folder):
        write(folder)
        reached.set()
        assert goes_on.wait(60)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state, {})
        checkpoints.wait()
        monkeypatch.setattr(checksums, "write", waiting)
        state, _ = program.step(state, program.place(np.zeros((4, 9))), program.key)
        checkpoints.save(state, {})
        assert reached.wait(60)
        assert last_step(tmp_path) == 1
        goes_on.set()
    assert saved_steps(tmp_path) == [1]
    with Checkpoints(tmp_path, keep=1) as checkpoints:  # the same process may go on with the run
        checkpoints.save(state, {})
    assert os.listdir(tmp_path / "checkpoints") == ["2"]


def test_nothing_to_resume_from(make_program, tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ConfigError, match="there is no checkpoint under"):
        checkpoints.restore(make_program()[0].state)
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


def test_another_model_is_one_message(make_program, corpus, tmp_path):
    program, state = trained(make_program, corpus)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
        wrong = program.state
        renamed = {"table": jnp.zeros((9, 8)), "bia": wrong.params["bias"]}
        with pytest.raises(ConfigError) as error:
            checkpoints.restore(dataclasses.replace(wrong, params=renamed))
    assert str(error.value).splitlines() == [
        "cannot resume from step 3: the checkpoint is from a different model.",
        "  bias is in the checkpoint, but not in the model.",
        "  bia is in the model, but not in the checkpoint.",
        "  table is (8, 8) in the checkpoint, but (9, 8) in the model.",
        f"  Resume with the [model] of the run, or {ANEW}.",
    ]


def test_another_optimizer_is_one_message(make_program, corpus, tmp_path):
    _, state = trained(make_program, corpus)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
        without = {f"mean{number}": jnp.zeros(3) for number in range(9)}
        with pytest.raises(ConfigError) as error:
            checkpoints.restore(dataclasses.replace(state, optimizer=without))
    said = str(error.value).splitlines()
    assert said[0] == "cannot resume from step 3: its optimizer state has a different form."
    assert said[1].endswith(" is in the checkpoint, but not in the optimizer.")
    assert len(said) == 6
    assert "more." in said[4]
    assert said[5] == f"  Resume with the [optimizer], lora, frozen and parameter_dtype of the run, or {ANEW}."


def test_a_new_folder_in_the_place_of_the_old_one_is_noticed(tmp_path):
    """Some file systems give it the number of the old one, if that is free."""
    with Checkpoints(tmp_path) as checkpoints:
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").mkdir()
        with pytest.raises(OSError, match="its folder checkpoints was deleted or replaced while the run went on"):
            checkpoints.check()


@pytest.mark.parametrize("error", [
    ValueError("No ArrayMetadata found for process_index=0 in the checkpoint directory: /a/b. But input PyTree ..."),
    ValueError("Checkpoint directory does not exist: /a/b."),
    FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/a/b"),
])  # fmt: skip
def test_files_that_are_deleted_while_they_are_saved_are_one_message(
    make_program, corpus, tmp_path, monkeypatch, error
):
    def missing():
        raise error

    _, state = trained(make_program, corpus)
    with Checkpoints(tmp_path) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(checkpoints._writer, "wait_until_finished", missing)
        with pytest.raises(OSError, match=r"its files were deleted while saving step 3$"):
            checkpoints.save(state, {})


def test_a_save_that_is_killed_loses_nothing(tmp_path):
    """Saves in another process, over and over, until it is killed; the newest checkpoint can then be read."""
    code = f"""
        import jax, jax.numpy as jnp
        from gspmd.training import Checkpoints, TrainState
        checkpoints = Checkpoints({str(tmp_path)!r})
        for step in range(1, 1000):
            leaf = jnp.full((256, 1024), step, jnp.float32)
            checkpoints.save(TrainState(jnp.int32(step), {{"w": leaf}}, {{"m": leaf}}), {{"next_index": step}})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=os.environ | {"JAX_PLATFORMS": "cpu"})
    deadline = time.monotonic() + 600
    while (newest(tmp_path) or 0) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = newest(tmp_path)
    assert last is not None
    assert last >= 3
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.device_put(np.zeros((256, 1024), np.float32), whole)
    like = TrainState(jax.device_put(np.int32(0), whole), {"w": leaf}, {"m": leaf})
    with Checkpoints(tmp_path) as checkpoints:
        found, position = checkpoints.restore(like)
    assert int(found.step) == position["next_index"] == last
    assert (np.asarray(found.params["w"]) == last).all()
    assert (np.asarray(found.optimizer["m"]) == last).all()


def test_settings(tmp_path):
    save_settings(tmp_path, {"training": {"steps": 3}})
    assert load_settings(tmp_path) == {"training": {"steps": 3}}
    with pytest.raises(ConfigError, match=r"holds no run: there is no '.*config.json'"):
        load_settings(tmp_path / "absent")


def test_no_flipped_bit_of_the_settings_is_believed(tmp_path):
    settings = {"training": {"steps": 31, "prompt": "def "}, "optimizer": {"learning_rate": 0.005, "clip": 1.0}}
    save_settings(tmp_path, settings)
    path = tmp_path / "config.json"
    content, believed = path.read_bytes(), 0
    for at in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            try:
                found = load_settings(tmp_path)
            except ConfigError:
                continue
            # A blank between two words may become another one; and a name that is none is refused by who reads it.
            believed += found == settings
            assert found == settings or not {*found} <= {*settings}
    assert believed < len(content) // 4


def test_settings_of_an_earlier_version_have_no_checksum(tmp_path):
    (tmp_path / "config.json").write_text('{"training": {"steps": 3}}')
    assert load_settings(tmp_path) == {"training": {"steps": 3}}


@pytest.mark.parametrize(("text", "said"), [
    ("{\"training\": {", "config.json' cannot be read: it is not JSON: Expecting"),
    ("[3]", "config.json' holds no settings."),
    ("\udcff", "config.json' cannot be read: it is not UTF-8"),
])  # fmt: skip
def test_settings_that_are_damaged(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as error:
        load_settings(tmp_path)
    assert said in str(error.value)
