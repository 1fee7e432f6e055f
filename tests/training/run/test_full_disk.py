"""A disk that is full: one message at the save that fails, exit code 1, and what was saved before it is intact."""

import dataclasses
import os
import re
import subprocess
import sys
import time
import warnings
from contextlib import suppress

import pytest
from rich.console import Console

from gspmd.commands import runner
from gspmd.training import Checkpoints, fit
from gspmd.training.checkpoints import checksums, newest, saved_steps
from gspmd.training.config import TrainingConfig
from gspmd.training.reporting import metrics

CONFIG = TrainingConfig(steps=40, batch=4, length=16, validation_every=0, final_validation_batches=1, save_every=4)


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own, of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may not mount a disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def filling(program, folder, at):
    """The program, with a disk that is filled in a step, while the batch of the next one is placed."""
    placed = []

    def place(tokens):
        placed.append(program.place(tokens))
        if len(placed) == at + 1:
            while newest(folder) is None:  # the save before is complete
                time.sleep(0.01)
            with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            # Room for a few lines of figures, but not for a checkpoint.
            os.truncate(folder / "filler", (folder / "filler").stat().st_size - 16 * 1024)
        return placed[-1]

    return dataclasses.replace(program, place=place)


@pytest.mark.turns(1)
@pytest.mark.parametrize(("steps", "at"), [(40, 6), (8, 6)], ids=["on the way", "at the end"])
def test_a_save_that_fails_ends_the_run_there(make_program, corpus, small_disk, capfd, steps, at):
    config, program = dataclasses.replace(CONFIG, steps=steps), make_program(steps=steps)[0]

    def run(argv):
        with runner.interrupts(small_disk):
            fit(config, filling(program, small_disk, at), corpus, small_disk, Console(quiet=True))

    assert runner.guarded(run, []) == 1
    said = capfd.readouterr().err
    # On the way a line of figures may be what the disk has no room for, once the save has taken the rest.
    saving = "(?: while saving step 8)" + "?" * (steps > 8)
    failed = f"The run failed: cannot write to '{small_disk}': No space left on device{saving}; step 4 is saved. "
    assert re.match(f"{failed}To go on, once there is room: python ", said)
    assert len(said.splitlines()) == 1
    assert metrics.read(small_disk)[-1]["step"] <= 12  # where the next save is due
    assert saved_steps(small_disk) == [4]
    assert checksums.fault_of(small_disk / "checkpoints" / "4") is None
    (small_disk / "filler").unlink()
    program = make_program(steps=steps)[0]
    fit(dataclasses.replace(config, resume=True), program, corpus, small_disk, Console(quiet=True))
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == sorted([f"{steps - 4}", f"{steps}"])


def test_a_run_whose_disk_is_full_says_what_is_saved_and_can_go_on(make_program, corpus, tmp_path, small_files, capsys):
    config = CONFIG
    program = make_program(steps=40)[0]

    def run(argv):
        # Room for eight steps or so: an object and its line end take about 400 bytes.
        with runner.interrupts(tmp_path), small_files(4096):
            fit(config, program, corpus, tmp_path, Console(quiet=True))

    assert runner.guarded(run, []) == 1
    said = capsys.readouterr().err
    step = newest(tmp_path)
    assert step >= 4
    assert said.startswith(f"The run failed: cannot write to '{tmp_path}': File too large; step {step} is saved.")
    assert "To go on, once files may be larger: python " in said
    assert len(said.splitlines()) == 1
    fit(dataclasses.replace(config, resume=True), make_program(steps=40)[0], corpus, tmp_path, Console(quiet=True))
    assert [row["step"] for row in metrics.read(tmp_path)] == [*range(1, 41), 40]


def test_settings_that_cannot_be_written_are_one_message(make_program, corpus, tmp_path, small_files, capsys):
    def run(argv):
        with runner.interrupts(tmp_path), small_files(100):
            fit(CONFIG, make_program()[0], corpus, tmp_path, Console(quiet=True), {"text": "x" * 1000})

    assert runner.guarded(run, []) == 1
    assert (
        capsys.readouterr().err == f"The run failed: cannot write to '{tmp_path}': File too large; no step is saved.\n"
    )


def failure_of(checkpoints):
    """Return what the check of every step raises once the save in progress has failed."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            checkpoints.check()
        except OSError as error:
            return error.strerror
        time.sleep(0.01)


def test_a_failed_save_is_raised_by_the_check_at_the_next_step(make_program, corpus, tmp_path, small_files):
    state = make_program()[0].state
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
        checkpoints.wait()
        with small_files(1000):
            checkpoints.save(dataclasses.replace(state, step=state.step + 1), {})
            assert failure_of(checkpoints) == "File too large while saving step 1"
        assert saved_steps(tmp_path) == [0]
        checkpoints.save(dataclasses.replace(state, step=state.step + 2), {})
    assert saved_steps(tmp_path) == [0, 2]


def async_serialize_from_host():
    """Leave behind what orbax does, now and then, of a write that had not begun when another one failed."""

    async def write_fragment():
        pass

    return write_fragment()


@pytest.mark.parametrize("filters", ["default", "error"])
def test_writes_that_have_not_begun_are_not_reported(tmp_path, monkeypatch, filters):
    raised = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        monkeypatch.setattr(sys, "unraisablehook", raised.append)
        with Checkpoints(tmp_path):
            pass
        if filters == "error":  # after, as in a test that collects what an earlier one has left
            warnings.simplefilter(filters)
        async_serialize_from_host()
        another_write()
    [reported] = [report.message for report in warned] + [report.exc_value for report in raised]
    assert str(reported) == "coroutine 'another_write' was never awaited"


async def another_write():
    pass
