"""Damage of any kind, to any file of a checkpoint, is named in one line, and the checkpoint before it is used."""

import dataclasses
import json
import shutil
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.commands import runner
from gspmd.training import Checkpoints, ConfigError
from gspmd.training.checkpoints import checksums, newest_intact, restore, saved_steps
from gspmd.training.checkpoints.saved import ANEW
from gspmd.training.run.folder import choose_out


@pytest.fixture
def saved(make_program, tmp_path):
    """Checkpoints of steps 3 and 7, each with other parameters."""
    state = make_program()[0].state
    with Checkpoints(tmp_path) as checkpoints:
        for step in (3, 7):
            params = jax.tree.map(lambda leaf: leaf + step, state.params)  # noqa: B023
            checkpoints.save(dataclasses.replace(state, step=jnp.int32(step), params=params), {"at": step})
    return tmp_path


@contextmanager
def restored_bytes(path):
    before = path.read_bytes()
    yield before
    path.write_bytes(before)


def test_every_fault_of_every_file_is_named(saved):
    folder, rng = saved / "checkpoints" / "7", np.random.default_rng(0)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) > 10
    assert checksums.fault_of(folder) is None
    for path in files:
        name = str(path.relative_to(folder))
        with restored_bytes(path) as content:
            for at in {0, len(content) - 1, *rng.integers(len(content), size=6)}:
                flipped = bytearray(content)
                flipped[at] ^= 1 << int(rng.integers(8))
                path.write_bytes(flipped)
                assert name in checksums.fault_of(folder)
            path.write_bytes(content[:-1])
            assert name in checksums.fault_of(folder)
            path.write_bytes(content + b"\n")
            assert name in checksums.fault_of(folder)
            path.unlink()
            assert f"{name} is missing" in checksums.fault_of(folder)
    assert checksums.fault_of(folder) is None


@pytest.mark.parametrize("gone", ["state", "run", "state/ocdbt.process_0/d"])
def test_a_folder_that_is_missing_is_named(saved, gone):
    folder = saved / "checkpoints" / "7"
    shutil.rmtree(folder / gone)
    assert checksums.fault_of(folder) == f"the folder {gone} is missing"


def flip_64_bytes(folder):
    """Change the file that holds the arrays, which still loads."""
    path = max((path for path in (folder / "state").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(byte ^ 0xFF for byte in content[middle : middle + 64])
    path.write_bytes(content)


def test_the_checkpoint_before_a_damaged_one_is_used(saved, make_program):
    flip_64_bytes(saved / "checkpoints" / "7")
    like, said = make_program({"x": 4})[0].state, []
    with Checkpoints(saved) as checkpoints:
        found, run = checkpoints.restore(like, tell=said.append)
    assert (int(found.step), run["at"]) == (3, 3)
    np.testing.assert_array_equal(found.params["table"], np.full((8, 8), 3.0))
    assert len(said) == 1
    assert said[0].startswith(f"'{saved}/checkpoints/7' is damaged: state/")
    assert said[0].endswith(" differs from the bytes that were saved; the checkpoint of step 3 is used instead.")


def test_none_that_is_intact_is_bad_input(saved, make_program, capsys):
    flip_64_bytes(saved / "checkpoints" / "7")
    (saved / "checkpoints" / "3" / "checksums").unlink()

    def resume(argv):
        with Checkpoints(saved) as checkpoints:
            checkpoints.restore(make_program()[0].state)

    assert runner.guarded(resume, []) == 2
    first, second, third, last = capsys.readouterr().err.splitlines()
    assert first == "ConfigError: cannot resume:"
    assert "/7' is damaged: state/" in second
    assert third.endswith("/3' is damaged: its file checksums is missing.")
    assert last == f"  No checkpoint is intact: use another run, or {ANEW}."


def test_a_process_agrees_on_damage_outside_of_its_share(saved, monkeypatch):
    """Each of two reads half of the files, and the one that has not read a damaged one must not fail on it."""
    folder = saved / "checkpoints" / "7"
    metadata = folder / "run" / "metadata"
    metadata.write_bytes(b"!" + metadata.read_bytes()[1:])
    files = [line.split(" ", 2)[2] for line in (folder / checksums.FILE).read_text().splitlines()[1:]]
    said, damage = [], "is damaged: run/metadata has other contents than were saved"
    monkeypatch.setattr(restore.processes, "count", lambda: 2)
    monkeypatch.setattr(restore.processes, "index", lambda: 1 - files.index("run/metadata") % 2)
    monkeypatch.setattr(restore.processes, "gathered", lambda text: said.append(text) or [])
    monkeypatch.setattr(restore.processes, "told", lambda make: damage)
    assert restore._fault_of(folder) == damage
    assert said == [""]


def test_what_a_killed_write_of_checksums_leaves_is_no_file_of_the_folder(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(100))
    (tmp_path / f"{checksums.FILE}.tmp").write_text("half of it")
    checksums.write(tmp_path)
    assert checksums.fault_of(tmp_path) is None


def test_a_checkpoint_knows_its_step(saved, make_program):
    """A folder that is renamed, or swapped with another, is not believed by its name."""
    folder, like, said = saved / "checkpoints", make_program()[0].state, []
    (folder / "7").rename(folder / "9")
    misnamed = f"'{folder}/9' is the checkpoint of step 7, but its name is not 7: rename the folder"
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.restore(like, tell=said.append)[1]["at"] == 3
        assert said == [f"{misnamed}; the checkpoint of step 3 is used instead."]
        with pytest.raises(ConfigError, match=f"from step 9:\n  {misnamed}. Name another step: 3.$"):
            checkpoints.restore(like, 9)
    (folder / "3").rename(folder / "7")
    (folder / "9").rename(folder / "3")
    with Checkpoints(saved) as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.restore(like)
    assert error.value.faults[:2] == (
        f"'{folder}/7' is the checkpoint of step 3, but its name is not 3: rename the folder.",
        f"'{folder}/3' is the checkpoint of step 7, but its name is not 7: rename the folder.",
    )


def test_an_older_checkpoint_has_its_step_in_the_state(saved, make_program):
    folder = saved / "checkpoints" / "7"
    told = json.loads((folder / "run" / "metadata").read_text())
    del told["step"]
    (folder / "run" / "metadata").write_text(json.dumps(told))
    checksums.write(folder)
    like = make_program()[0].state
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.restore(like, 7)[1]["at"] == 7
    folder.rename(folder.with_name("8"))
    with Checkpoints(saved) as checkpoints, pytest.raises(ConfigError, match="8' is the checkpoint of step 7, but"):
        checkpoints.restore(like, 8)


def test_a_step_may_be_chosen(saved, make_program):
    like = make_program()[0].state
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.restore(like, 3)[1]["at"] == 3
        with pytest.raises(ConfigError, match=r"from step 5:\n.* Name a step that has one: 3, 7\.$"):
            checkpoints.restore(like, 5)
        flip_64_bytes(saved / "checkpoints" / "7")
        with pytest.raises(ConfigError, match=r"/7' is damaged: .* Name another step: 3\.$"):
            checkpoints.restore(like, 7)
    with pytest.raises(ConfigError, match="cannot resume from step 5"):
        choose_out(str(saved), resume=True, step=5)


def test_checkpoints_newer_than_the_resumed_one_do_not_come_back(saved, make_program):
    state = make_program()[0].state
    with Checkpoints(saved) as checkpoints:
        checkpoints.continue_from(3)
        assert saved_steps(saved) == [3]
        assert newest_intact(saved, pytest.fail) == 3
    with Checkpoints(saved) as checkpoints:
        checkpoints.save(dataclasses.replace(state, step=jnp.int32(5)), {"at": 5})
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == ["3", "5"]


def test_what_a_killed_save_leaves_is_no_checkpoint_and_goes(saved):
    partial = saved / "checkpoints" / "9.partial.orbax-checkpoint-tmp"
    shutil.copytree(saved / "checkpoints" / "7", partial)
    assert saved_steps(saved) == [3, 7]
    with Checkpoints(saved):
        assert not partial.exists()
