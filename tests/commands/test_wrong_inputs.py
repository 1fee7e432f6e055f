"""Wrong inputs of commands: empty texts, files that cannot be written, and faults that are known before the work."""

import argparse
import os
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, get_args, get_origin

import pytest
from tyro.constructors import PrimitiveConstructorSpec

import gspmd
from gspmd.commands import compile as compiling
from gspmd.commands import compile_settings, explain_settings, files, layouts, main, pictures, settings, train
from gspmd.commands import generate_settings as generate
from gspmd.commands.described import Describe
from gspmd.commands.flags import FlagError
from gspmd.commands.search import settings as search_settings
from gspmd.training import ConfigError
from gspmd.training.checkpoints import load_settings
from gspmd.training.run.folder import check_out
from gspmd.writing import replace_file

# -- empty texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parse", "flags"), [
    (settings.parse, ["--out", ""]),
    (settings.parse, ["--config="]),
    (settings.parse, ["--resume", "--out", ""]),  # which would be the newest run
    (settings.parse, ["--config", "tiny", "--data", "a.txt", ""]),
    (settings.parse, ["--config", "tiny", "--set", ""]),
    (search_settings.parse, ["--mesh", ""]),
    (search_settings.parse, ["--config", ""]),
    (compile_settings.parse, ["--layout", ""]),
    (generate.parse, ["--checkpoint", ""]),
    (generate.parse, ["--checkpoint", "none", "--stop", ""]),
])  # fmt: skip
def test_an_empty_text_is_refused(parse, flags):
    named = next(flag for flag in reversed(flags) if flag.startswith("--")).rstrip("=")
    with pytest.raises(FlagError) as caught:
        parse(flags)
    assert str(caught.value).startswith(f"{named} is empty; give it a value, or leave it out.\n  gspmd ")


def test_an_empty_text_clears_what_a_file_has_set(tmp_path):
    """It is refused only where it would change nothing."""
    file = tmp_path / "run.toml"
    file.write_text('[training]\ntokenizer = "tokens.json"\n')
    flags = ["--config", str(file)]
    assert settings.parse(flags).training.tokenizer == str(tmp_path / "tokens.json")
    assert settings.parse([*flags, "--tokenizer", ""]).training.tokenizer == ""
    file.write_text('[sharding]\nmesh = "x=2"\n')
    assert settings.parse([*flags, "--mesh", ""]).sharding.mesh == ""
    with pytest.raises(FlagError, match=r"^--layout is empty"):  # Its default is not empty.
        settings.parse([*flags, "--layout", ""])


def test_a_prompt_to_continue_may_be_empty():
    """A model whose texts begin with a token of their own continues it."""
    assert generate.parse(["--checkpoint", "none", "--prompt", ""]).prompt == ("",)


def test_every_text_of_the_settings_refuses_an_empty_one():
    """Apart from those that say that they may be empty."""
    free = set()
    every = (settings.RunSettings, search_settings.SearchSettings, compile_settings.CompileSettings)
    for cls in (*every, generate.GenerateSettings):
        free |= set(_taking_empty(cls))
    assert free == {"prompt"}


def _taking_empty(cls: type):
    for field in Describe()(SimpleNamespace(type=cls, default=None)).fields:
        if is_dataclass(field.default):
            yield from _taking_empty(type(field.default))
        elif _takes_empty(field.type):
            yield field.name


def _takes_empty(kind) -> bool:
    if get_origin(kind) is Annotated and any(isinstance(mark, PrimitiveConstructorSpec) for mark in get_args(kind)[1:]):
        return False
    if get_origin(kind) in (Annotated, tuple):
        return _takes_empty(get_args(kind)[0])
    return kind is str


@pytest.mark.parametrize(("parser", "words", "said"), [
    (layouts.make_parser(), ["show", ""], "gspmd layouts show: argument layout: it is empty; give it a value.\n"),
    (layouts.make_parser(), ["check", "zero-3", "--config", ""], "--config: it is empty; give it a value, or leave it"),
    (layouts.make_parser(), ["check", "zero-3", "--set", ""], "--set: it is empty; give it a value, or leave it out."),
    (explain_settings.make_parser("gspmd explain"), ["", "--mesh", "x=2", "--sizes", "B=2"], "equation: it is empty"),
    (explain_settings.make_parser("gspmd explain"), ["B", "--via", ""], "argument --via: it is empty"),
])  # fmt: skip
def test_an_empty_argument_is_refused(capsys, parser, words, said):
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(words)
    assert said in capsys.readouterr().err


def test_the_errors_of_a_subcommand_name_its_own_help(capsys):
    for words, said in {
        ("show", "zero-3", "--tom"): "gspmd layouts show: unrecognized arguments: --tom\n  Did you mean '--toml'? "
        "gspmd layouts show --help lists all flags.\n",
        ("check", "zero-3", "--devices", "x"): "gspmd layouts check: argument --devices: 'x' is not a whole number.\n"
        "  gspmd layouts check --help describes it.\n",
        ("diff", "zero-3"): "gspmd layouts diff: the following arguments are required: OTHER\n"
        "  gspmd layouts diff --help describes it.\n",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            layouts.make_parser().parse_args(words)
        assert capsys.readouterr().err == said


def test_a_file_without_an_ending_is_named_with_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").write_text('base = "zero-3"\n')
    assert main.main(["layouts", "show", "own"]) == 2
    assert capsys.readouterr().err.endswith("; or give ./own.\n")
    assert main.main(["layouts", "show", "./own"]) == 0


# -- files -------------------------------------------------------------------------------------------------------------


def fails(path) -> None:
    path.write_text("half")
    raise OSError(28, "No space left on device")


def test_a_file_that_cannot_be_written_is_one_message(tmp_path):
    assert files.unwritten("json", str(tmp_path / "plan.json"), lambda path: files.write_text(path, "é")) == []
    assert (tmp_path / "plan.json").read_bytes() == "é".encode()
    [fault] = files.unwritten("json", "/dev/full", lambda path: files.write_text(path, "new"))
    assert fault == "cannot write --json /dev/full: No space left on device. Name a file elsewhere."


def test_the_errors_of_a_writer_are_told(tmp_path):
    def fails(path):
        raise OSError("the encoder failed")

    [fault] = files.unwritten("gantt", "x.png", lambda path: replace_file(tmp_path / path, fails))
    assert fault == "cannot write --gantt x.png: the encoder failed. Name a file elsewhere."


def test_a_link_is_checked_where_it_leads(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "none" / "file")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert [*files.faults_of("json", str(tmp_path / "link"))] == [
        f"--json {tmp_path / 'link'}: there is no folder '{tmp_path / 'none'}'."
    ]
    [fault] = files.faults_of("json", str(tmp_path / "circle"))
    assert "symbolic links" in fault
    assert [*files.faults_of("gantt", str(tmp_path / "a.PNG"), ".png", "a PNG file")] == []


@pytest.mark.parametrize(
    "given", [["layouts", "show", "zero-3", ""], ["layouts", "list", ""], ["completion", "bash", ""]]
)
def test_an_empty_word_too_many_is_one_message(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(given)
    assert "unrecognized arguments: ''" in capsys.readouterr().err


def test_names_are_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    for given, said in {
        tmp_path / "none" / "x.png": f"there is no folder '{tmp_path / 'none'}'.",
        tmp_path / "file" / "x.png": f"there is no folder '{tmp_path / 'file'}'.",
        tmp_path: "it is a folder; give a file.",
        tmp_path / "x.txt": "--gantt writes a PNG file, whose name ends in .png, not ",
        tmp_path / ("n" * 300 + ".png"): "...: File name too long.",
        tmp_path / "a\0b.png": "a name cannot have null characters.",
    }.items():
        faults = [*files.faults_of("gantt", str(given), ".png", "a PNG file")]
        assert any(said in fault for fault in faults), faults
    assert [*files.faults_of("gantt", "", ".png", "a PNG file")] == []
    assert [*files.faults_of("gantt", str(tmp_path / "new.png"), ".png", "a PNG file")] == []


def test_read_only_folders_are_refused_before_the_work(tmp_path, monkeypatch):
    usual = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and usual(path, mode))
    assert [*files.faults_of("json", str(tmp_path / "new"))] == [f"--json {tmp_path / 'new'}: the folder is read-only."]
    with pytest.raises(ConfigError, match=r"you may not write there\. Choose another --out\."):
        check_out(str(tmp_path / "run"), resume=False)


def test_a_full_disk_of_one_file_of_compile_leaves_the_others(tmp_path):
    report = SimpleNamespace(to_json=lambda: "{}", timeline=object(), hlo="HloModule step")
    names = {"json": "/dev/full", "hlo": str(tmp_path / "hlo"), "trace": "", "gantt": ""}
    [fault] = compiling.save(SimpleNamespace(**names), report, "gspmd compile")
    assert fault == "cannot write --json /dev/full: No space left on device. Name a file elsewhere."
    assert (tmp_path / "hlo").read_text() == "HloModule step"


def test_a_picture_is_whole_or_not_there(tmp_path, monkeypatch):
    figure = gspmd.plan("B_xE -> BE", {"B": 8, "E": 8}, mesh={"x": 4}).figure()
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: fails(path))
    options = argparse.Namespace(svg=tmp_path / "plan.svg", png=None)
    [fault] = pictures.write(figure, options)
    assert fault == f"cannot write --svg {tmp_path / 'plan.svg'}: No space left on device. Name a file elsewhere."
    assert os.listdir(tmp_path) == []


# -- runs --------------------------------------------------------------------------------------------------------------


def test_the_folder_of_a_run_is_checked_without_making_it(tmp_path):
    (tmp_path / "file").write_text("text")
    new, below = tmp_path / "runs" / "new", tmp_path / "file" / "run"
    check_out(str(new), resume=False)
    assert not new.parent.exists()
    for path, said in {
        tmp_path / "file": "it is not a folder. Choose another --out.",
        below: f"'{tmp_path / 'file'}': it is not a folder. Choose another --out.",
        tmp_path / ("n" * 300): "File name too long. Choose another --out.",
    }.items():
        with pytest.raises(ConfigError) as caught:
            check_out(str(path), resume=False)
        assert str(caught.value) == f"cannot write to {str(path)!r}:\n  {said}"
    with pytest.raises(ConfigError, match=r"there is no checkpoint under"):
        check_out(str(tmp_path), resume=True)


@pytest.mark.parametrize(("flags", "said"), [
    (["--data", "none/*.txt"], "no file matches 'none/*.txt'. Name other files, or none for Python's"),
    (["--data", "file", "--out", "file"], "it is not a folder. Choose another --out."),
])  # fmt: skip
def test_names_of_files_are_checked_before_the_devices_start(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")

    def too_late(*_):
        raise AssertionError("the devices have started")

    monkeypatch.setattr(train, "arrange", too_late)
    assert main.main(["train", "--config", "tiny", *flags]) == 2
    assert said in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]


def test_lost_settings_of_a_run_say_how_they_are_written_anew(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"Name another folder\.$"):  # There is nothing to resume.
        load_settings(tmp_path, "cannot use the run:")
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path, "cannot use the run:")
    assert str(caught.value).startswith("cannot use the run:\n  ")
    assert str(caught.value).endswith(f": gspmd train --resume --out {tmp_path} --config ...")


def test_a_flag_with_a_null_byte_is_refused(capsys):
    """No process can be given one, but a program can."""
    assert main.main(["train", "--config", "tiny", "--out", "a\0b"]) == 2
    assert "'a\\x00b' has a null byte, which no name has." in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "said"), [
    (["--devices", "1.5"], "--devices must be a whole number, but is '1.5'.\n"),
    (["--temperature", "warm"], "--temperature must be a number, but is 'warm'.\n"),
])  # fmt: skip
def test_a_number_that_may_be_left_out_is_refused_as_any_other(flags, said):
    with pytest.raises(FlagError) as caught:
        generate.parse(["--checkpoint", "none", *flags])
    assert str(caught.value).startswith(said)


def test_details_are_for_an_explanation(capsys):
    assert main.main(["train", "--config", "tiny", "--details"]) == 2
    assert "--details is for --explain; add --explain, or leave --details out." in capsys.readouterr().err
