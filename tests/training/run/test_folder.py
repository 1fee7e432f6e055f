"""The folder of a run is one run's at a time, whatever becomes of that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspmd.training.checkpoints import load_settings, save_settings
from gspmd.training.reporting.metrics import Metrics, read
from gspmd.training.run import folder
from gspmd.training.run.folder import check_out, choose_out, released_after
from gspmd.training.toml import ConfigError

HOLD = """
import sys
from gspmd.training.run.folder import choose_out
choose_out(sys.argv[1], resume=False)
print("held", flush=True)
sys.stdin.read()
"""


def test_another_run_is_refused_until_the_first_is_gone(tmp_path):
    """It ends without a word, as by SIGKILL: nothing of it stays in the way."""
    out = str(tmp_path / "run")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, out], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for resume in (False, True):
            (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True, exist_ok=True) if resume else None
            with pytest.raises(ConfigError, match="another run writes there now") as error:
                choose_out(out, resume=resume)
            assert "Wait for its end, or choose another --out." in str(error.value)
        other.kill()
    with released_after(choose_out(out, resume=True)):
        pass


def test_a_process_may_go_on_with_its_own_run(tmp_path):
    for _ in range(2):
        with released_after(choose_out(str(tmp_path), resume=False)):
            assert not list(tmp_path.iterdir()), "it leaves no file behind"


def test_a_run_without_a_checkpoint_is_begun_again_and_its_files_are_kept(tmp_path):
    """A scheduler starts a killed job again with the same command."""
    said = []
    for start in (1, 2):
        save_settings(tmp_path, {"training": {"seed": start}})
        with Metrics(tmp_path) as metrics:
            metrics.write(1, {"loss": float(start)})
        with released_after(choose_out(str(tmp_path), resume=False, tell=said.append)):
            assert sorted(os.listdir(tmp_path)) == [f"earlier-{number}" for number in range(1, start + 1)]
    for start, line in enumerate(said, 1):
        kept = tmp_path / f"earlier-{start}"
        assert line == (
            f"'{tmp_path}' holds a run without a checkpoint; moved to '{kept}': config.json, metrics.jsonl, events."
        )
        assert load_settings(kept) == {"training": {"seed": start}}
        assert [row["loss"] for row in read(kept)] == [start]


@pytest.mark.parametrize("text", ['{"architectures": ["LlamaForCausalLM"]}', "[]", "{", '{"training": 3}'])
def test_the_config_of_something_else_is_not_replaced(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    for choose in (choose_out, check_out):
        with pytest.raises(ConfigError, match=r"its config\.json is not that of a run.*Choose another --out\."):
            choose(str(tmp_path), resume=False)
    assert os.listdir(tmp_path) == ["config.json"]


def test_files_of_something_else_are_neither_moved_nor_replaced(tmp_path):
    for name in ("sample.txt", "loss.png"):
        (tmp_path / name).write_text("mine")
    for choose in (choose_out, check_out):
        fault = r"its loss\.png, sample\.txt are not those of a run, which would replace them\. Choose another --out\."
        with pytest.raises(ConfigError, match=fault):
            choose(str(tmp_path), resume=False)
    assert sorted(os.listdir(tmp_path)) == ["loss.png", "sample.txt"]


def test_files_of_something_else_that_a_run_leaves_alone_stay(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    said = []
    with released_after(choose_out(str(tmp_path), resume=False, tell=said.append)):
        assert (sorted(os.listdir(tmp_path)), said) == (["events", "notes.txt"], [])


def test_the_figures_of_a_run_whose_settings_are_gone_are_kept(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.0})
    with released_after(choose_out(str(tmp_path), resume=False)):
        assert sorted(os.listdir(tmp_path / "earlier-1")) == ["events", "metrics.jsonl"]


def test_a_text_that_the_run_would_move_away_is_refused(tmp_path):
    """As with --data OUT/sample.txt in the folder of a run that ended before it saved a step."""
    save_settings(tmp_path, {"training": {}})
    (tmp_path / "link").symlink_to(tmp_path)
    other = tmp_path / "sample.txt.old"
    for name in ("sample.txt", "events/some.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
        with pytest.raises(ConfigError, match=rf"read '.*{name}', and replace it or move it away\. Choose another"):
            check_out(str(tmp_path), resume=False, reads=[other, tmp_path / "link" / name])
    check_out(str(tmp_path), resume=False, reads=[other])


def test_a_text_that_a_resumed_run_would_replace_is_refused(tmp_path):
    """As with --resume --data OUT/sample.txt; the run writes its sample at its end."""
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "sample.txt").write_text("mine")
    (tmp_path / "other.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"read '.*/sample\.txt', and replace it\. Give --data without it\."):
        check_out(str(tmp_path), resume=True, reads=[tmp_path / "other.txt", tmp_path / "sample.txt"])
    check_out(str(tmp_path), resume=True, reads=[tmp_path / "other.txt"])


def test_a_run_that_saves_before_the_folder_is_locked_is_not_set_aside(tmp_path, monkeypatch):
    save_settings(tmp_path, {"training": {}})
    held = folder._hold

    def hold(path):
        (tmp_path / "checkpoints" / "3").mkdir(parents=True)
        held(path)

    monkeypatch.setattr(folder, "_hold", hold)
    with pytest.raises(ConfigError, match="it already holds a run, at step 3"):
        choose_out(str(tmp_path), resume=False)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.json"]
    assert tmp_path.resolve() not in folder._held


def test_files_that_cannot_be_kept_are_left(tmp_path, monkeypatch):
    save_settings(tmp_path, {"training": {}})
    monkeypatch.setattr(Path, "mkdir", lambda path, **_: None)  # as on a full disk
    with pytest.raises(ConfigError, match=r"cannot move the files of an earlier run in .*\n.*Choose another --out\."):
        choose_out(str(tmp_path), resume=False)
    assert os.listdir(tmp_path) == ["config.json"]
