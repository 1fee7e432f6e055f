"""A run whose folder, or a file in it, is deleted, or replaced: one message, and exit code 1."""

import dataclasses
import errno
import os
import shutil

import pytest
from rich.console import Console

from gspmd.commands import runner
from gspmd.training import fit
from gspmd.training.config import TrainingConfig
from gspmd.training.reporting import plots

CONFIG = TrainingConfig(steps=40, batch=4, length=16, validation_every=0, final_validation_batches=1, save_every=4)


def disturbed(program, at, disturb):
    """The program, with something that happens in a step, while the batch of the next one is placed."""
    placed = []

    def place(tokens):
        placed.append(program.place(tokens))
        if len(placed) == at + 1:
            disturb()
        return placed[-1]

    return dataclasses.replace(program, place=place)


def deleted(out):
    shutil.rmtree(out, ignore_errors=True)


def replaced_by_a_file(out):
    deleted(out)
    out.touch()


def without_checkpoints(out):
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def made_again(out):
    deleted(out)
    (out / "checkpoints").mkdir(parents=True)


def without_figures(out):
    """As `rm -r` leaves a folder in which a save writes meanwhile."""
    for path in (out / "metrics.jsonl", out / "config.json"):
        path.unlink()


def with_other_figures(out):
    (out / "other").write_text("")
    (out / "other").replace(out / "metrics.jsonl")


@pytest.mark.parametrize("save_every", [4, 0], ids=["saving on the way", "saving at the end"])
@pytest.mark.parametrize(
    "what",
    [
        deleted,
        replaced_by_a_file,
        without_checkpoints,
        made_again,
        without_figures,
        with_other_figures,
    ],
)
def test_a_folder_that_is_gone_ends_the_run_with_one_message(make_program, corpus, tmp_path, capfd, what, save_every):
    out = tmp_path / "out"
    out.mkdir()
    config = dataclasses.replace(CONFIG, save_every=save_every, steps=12)

    def run(argv):
        with runner.interrupts(out):
            program = disturbed(make_program(steps=12)[0], 6, lambda: what(out))
            fit(config, program, corpus, out, Console(quiet=True))

    code = runner.guarded(run, [])
    said = capfd.readouterr().err
    assert code == 1, said
    assert said.startswith(f"The run failed: cannot write to '{out}': "), said
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.jsonl.tmp", "config.json", "config.json.tmp", "loss.png"])
def test_a_folder_in_the_place_of_a_file_is_to_be_moved_away(make_program, corpus, tmp_path, capfd, name):
    config = dataclasses.replace(CONFIG, steps=2)
    fit(config, make_program(steps=4)[0], corpus, tmp_path, Console(quiet=True))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()

    def draw(state, metrics):
        plots.loss_curve([{"step": 1, "bits_per_byte": 3.0}], tmp_path / "loss.png")

    def run(argv):
        with runner.interrupts(tmp_path):
            program = make_program(steps=4)[0]
            fit(dataclasses.replace(config, resume=True), program, corpus, tmp_path, Console(quiet=True), {}, draw)

    code = runner.guarded(run, [], "gspmd train")
    said = capfd.readouterr().err
    fault = f"The run failed: cannot write to '{tmp_path}': {name}: Is a directory; step 2 is saved."
    assert said == f"{fault} To go on, once that is moved away: gspmd train --resume --out {tmp_path}\n"
    assert code == 1


@pytest.mark.parametrize(
    ("number", "when"),
    [
        (errno.ENOSPC, "To go on, once there is room"),
        (errno.EDQUOT, "To go on, once there is room"),
        (errno.EFBIG, "To go on, once files may be larger"),
        (errno.EACCES, "To go on, once it may be written"),
        (errno.EROFS, "To go on, once it may be written"),
        (errno.EEXIST, "To go on, once that is moved away"),
        (errno.EIO, "To go on, once it can be written"),
        (errno.ENOENT, "To go on"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_the_remedy_is_that_of_the_fault(tmp_path, capsys, number, when):
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)

    def run(argv):
        with runner.interrupts(tmp_path):
            raise OSError(number, os.strerror(number), str(tmp_path / "sample.txt"))

    assert runner.guarded(run, [], "gspmd train") == 1
    fault = f"The run failed: cannot write to '{tmp_path}': sample.txt: {os.strerror(number)}; step 2 is saved."
    assert capsys.readouterr().err == f"{fault} {when}: gspmd train --resume --out {tmp_path}\n"
