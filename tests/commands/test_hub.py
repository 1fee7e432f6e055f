"""Checkpoints by name: the copy that huggingface_hub has downloaded, or the command that downloads it."""

from pathlib import Path

import pytest

from gspmd.commands import hub
from gspmd.commands.generate import run
from gspmd.training.toml import ConfigError


@pytest.fixture
def downloaded(monkeypatch, tmp_path):
    """A cache with one model, in the form that huggingface_hub writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / "models--org--model-1.5B"
    snapshot = kept / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123abc")
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_name_is_its_newest_copy(downloaded, tmp_path):
    assert hub.found("org/model-1.5B") == str(downloaded)
    (tmp_path / "org" / "model-1.5B").mkdir(parents=True)
    assert hub.found("org/model-1.5B") == "org/model-1.5B"  # a folder takes precedence


def test_the_cache_is_that_of_huggingface_hub(downloaded, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    library = pytest.importorskip("huggingface_hub")
    found = library.try_to_load_from_cache("org/model-1.5B", "config.json", cache_dir=hub.cache())
    assert Path(found).parent == downloaded
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert str(hub.cache()) == str(Path(constants.default_cache_path))


def test_a_name_without_a_copy_is_answered_with_the_command_that_downloads_it(downloaded, capsys):
    assert run(["--checkpoint", "org/other", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: cannot read the checkpoint 'org/other':\n"
        f"  there is no folder 'org/other', and no model of that name in {str(hub.cache())!r}.\n"
        "  Name another folder; or download the model: hf download org/other\n"
    )
    with pytest.raises(ConfigError, match="hf download org/other"):
        hub.found("org/other")


@pytest.mark.parametrize("path", ["/absolute/path", "nowhere", "./org/model", "a/b/c", "org/"])
def test_a_path_is_left_to_its_reader(downloaded, path):
    assert hub.found(path) == path
