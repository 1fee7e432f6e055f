"""A command: its flags, what a resume takes over, what a model must fit, and what an interrupt says."""

import json
import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from gspmd.annotate import LayoutError
from gspmd.commands import runner
from gspmd.commands.flags import FlagError, distributed, parse
from gspmd.commands.train import check_model
from gspmd.layouts import Layout
from gspmd.training import arrangement
from gspmd.training.checkpoints import kept_settings
from gspmd.training.config import ShardingConfig, TrainingConfig
from gspmd.training.run.folder import choose_out, released_after
from gspmd.training.toml import ConfigError


@dataclass(frozen=True)
class Settings:
    """The settings of a script."""

    training: tyro.conf.OmitArgPrefixes[TrainingConfig] = field(default_factory=TrainingConfig)
    sharding: tyro.conf.OmitArgPrefixes[ShardingConfig] = field(default_factory=ShardingConfig)


STARTED = Settings(
    TrainingConfig(steps=7),
    ShardingConfig(layout="zero-3", set=("ffn.w_in=EF",), mesh="x=4,y=2", platform="cpu", devices=8),
)


@pytest.fixture
def resumed(tmp_path):
    """A function of flags that gives the settings of a resume with them."""
    (tmp_path / "config.json").write_text(json.dumps(kept_settings(STARTED)))
    return lambda *flags: parse(Settings, ["--resume", "--out", str(tmp_path), *flags])


def test_a_resume_leaves_the_platform_open(resumed):
    found = resumed()
    assert found.training == replace(STARTED.training, resume=True, out=found.training.out)
    assert found.sharding == replace(STARTED.sharding, platform=None)  # on as many devices, or it is not the same run


def test_another_platform_has_as_many_devices(resumed):
    assert resumed("--platform", "gpu").sharding == replace(STARTED.sharding, platform="gpu")


def test_a_resume_may_be_taken_back(resumed):
    assert not resumed("--no-resume").training.resume


@pytest.mark.parametrize("flags", [["--resume", "300"], ["--resume=300"], ["--resume", "--resume-step", "300"]])
def test_a_resume_may_name_its_step(resumed, tmp_path, flags):
    found = parse(Settings, [*flags, "--steps", "9", "--out", str(tmp_path)]).training
    assert (found.resume, found.resume_step, found.steps) == (True, 300, 9)
    assert resumed("--steps", "9").training.resume_step is None


def test_a_step_to_resume_from_needs_a_resume():
    with pytest.raises(ConfigError, match=r"--resume-step needs resume; write --resume 300\."):
        parse(Settings, ["--resume-step", "300"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--resume", "1", "--resume-step", "2"],
        ["--resume", "1", "--resume_step", "2"],
        ["--resume-step=2", "--resume=1"],
        ["--resume", "1", "--resume", "2"],
    ],
)
def test_a_step_to_resume_from_is_said_once(flags):
    with pytest.raises(ConfigError) as error:
        parse(Settings, flags)
    fault = "flags name the step to resume from more than once; write --resume STEP, once."
    assert str(error.value) == f"cannot read the flags:\n  {fault}"


def test_another_mesh_needs_no_devices(resumed):
    assert resumed("--mesh", "x=4").sharding == replace(STARTED.sharding, platform=None, devices=None, mesh="x=4")


def test_other_devices_drop_the_mesh(resumed):
    for flags in (["--devices", "4"], ["--devices=4"]):
        assert resumed(*flags).sharding == replace(STARTED.sharding, platform=None, devices=4, mesh="")


def test_another_layout_drops_changes_to_the_old_one(resumed):
    found = resumed("--layout", "gshard").sharding
    assert (found.layout, found.set, found.mesh) == ("gshard", (), "x=4,y=2")


def test_changes_replace_those_of_the_start(resumed):
    found = resumed("--set", "ffn.w_out=FE", "--set", "output.norm=E").sharding
    assert (found.layout, found.set) == ("zero-3", ("ffn.w_out=FE", "output.norm=E"))


def test_a_resume_keeps_the_changes_of_layout_that_its_flags_do_not_replace(tmp_path):
    training = TrainingConfig(relayout=("20=own.toml", "40=zero-3:x=8"))
    begun = Settings(training, ShardingConfig(distributed="node1:1234,processes=2,process=0"))
    (tmp_path / "config.json").write_text(json.dumps(kept_settings(begun)))

    def resumed(*flags):
        return parse(Settings, ["--resume", "--out", str(tmp_path), *flags])

    own = f"20={Path.cwd()}/own.toml"
    assert resumed().training.relayout == (own, "40=zero-3:x=8")
    assert resumed().sharding.distributed == ""  # of one start only
    assert resumed("--devices", "4").training.relayout == (own, "40=zero-3")
    assert resumed("--layout", "gshard").training.relayout == ()
    assert resumed("--relayout", "30=gshard").training.relayout == ("30=gshard",)


def test_a_resume_finds_its_files_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "begun").mkdir()
    monkeypatch.chdir(tmp_path / "begun")
    begun = Settings(TrainingConfig(data=("text/*.txt",)), ShardingConfig(layout="own.toml"))
    (tmp_path / "config.json").write_text(json.dumps(kept_settings(begun)))
    monkeypatch.chdir("/")
    found = parse(Settings, ["--resume", "--out", str(tmp_path)])
    assert found.training.data == (f"{tmp_path}/begun/text/*.txt",)
    assert found.sharding.layout == f"{tmp_path}/begun/own.toml"


@pytest.mark.parametrize(
    ("flag", "wrong", "near"),
    [("--lowering", "blokcing", "blocking"), ("--platform", "gpuu", "gpu"), ("--axis-types", "explict", "explicit"),
     ("--dtype", "bfloat", "bfloat16")],
)  # fmt: skip
def test_a_choice_that_there_is_none_of_is_told_with_the_nearest(flag, wrong, near):
    with pytest.raises(FlagError) as error:
        parse(Settings, [flag, wrong])
    first, _ = str(error.value).splitlines()
    assert first.startswith(f"{flag} must be one of")
    assert first.endswith(f"but is {wrong!r}. Did you mean {near!r}?")


def test_a_choice_may_be_taken_back():
    assert parse(Settings, ["--lowering", "None"]).sharding.lowering is None
    assert parse(Settings, ["--lowering", "looped:halves"]).sharding.lowering == "looped:halves"


def test_devices_that_do_not_divide_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(arrangement.host, "start", lambda *_: pytest.fail("devices were made"))
    for wrong in (ShardingConfig(devices=100_000), ShardingConfig(mesh="x=3")):
        with pytest.raises(LayoutError, match="do not divide"):
            arrangement.make_mesh(wrong, Layout.load("gshard"), {"B": 8, "X": 8})


def test_a_flag_without_its_value_is_refused(resumed):
    with pytest.raises(FlagError, match="--layout needs a value"):
        resumed("--layout")


@pytest.mark.parametrize(("flags", "said"), [
    ("--btach 4", "Unrecognized options: --btach, 4\n  Did you mean --batch? PROG --help-all lists all flags."),
    ("--training.batch 4", "Unrecognized options: --training.batch, 4\n  Did you mean --batch? PROG --help-all lists "
     "all flags."),
    ("--btach 4 --lenght 5", "Unrecognized options: --btach, 4, --lenght, 5\n  Did you mean --batch or --length? PROG "
     "--help-all lists all flags."),
    ("--frobnicate", "Unrecognized options: --frobnicate\n  PROG --help-all lists all flags."),
    ("7", "Unrecognized options: 7\n  Every value follows its flag, as in --flag value. PROG --help-all lists all "
     "flags."),
    ("--pack full", "Unrecognized options: full\n  --pack takes no value: write it alone, or leave it out. PROG "
     "--help-all lists all flags."),
    ("--batch 4.5", "--batch must be a whole number, but is '4.5'.\n  PROG --help-all describes it."),
    ("--noise-density x", "--noise-density must be a number, but is 'x'.\n  PROG --help-all describes it."),
])  # fmt: skip
def test_flags_that_cannot_be_read_are_told_in_two_lines_with_a_remedy(capsys, flags, said):
    with pytest.raises(FlagError) as error:
        parse(Settings, flags.split(), prog="PROG")
    assert str(error.value) == said
    assert capsys.readouterr() == ("", "")


def test_values_that_settings_refuse_are_told_by_their_flags():
    with pytest.raises(ConfigError) as error:
        parse(Settings, ["--batch", "-1", "--sample-bytes", "-2"])
    assert str(error.value) == (
        "cannot use these flags:\n  --batch must be positive, but is -1.\n"
        "  --sample-bytes must not be negative, but is -2."
    )


def model(vocabulary=256, groups=None, causal=True, int8=False, stacked=True):
    moe = SimpleNamespace(groups=groups, causal=causal, router="oracle")
    return SimpleNamespace(vocabulary=vocabulary, moe=moe, int8=int8, stacked=stacked, encoder_layers=0)


def test_a_model_that_fits():
    training = TrainingConfig(batch=8, length=16)
    check_model(training, model(groups=32))
    check_model(training, SimpleNamespace(vocabulary=256, moe=None, int8=False, stacked=True, encoder_layers=0))
    check_model(replace(training, sample_bytes=0), model(causal=False))


def test_a_model_that_does_not_fit_is_one_message():
    wrong = model(vocabulary=100, groups=24, causal=False, int8=True, stacked=False)
    with pytest.raises(ConfigError) as error:
        check_model(TrainingConfig(batch=8, length=16), wrong)
    assert error.value.faults == (
        "model.vocabulary must be 256, since the data is bytes, but is 100.",
        "model.moe.groups must divide the tokens of a batch, 8 × 16 = 128, but is 24.",
        "model.int8 is for serving: leave it out; sample with 'gspmd generate --weights int8'.",
        "model.stacked is off, which is for serving: leave it out; use 'gspmd generate --unstacked'.",
        "model.moe.router oracle cannot generate text, since its experts read later tokens; "
        "set sample_bytes to 0, or choose a different router.",
    )


def test_groups_divide_the_tokens_of_the_sources_too():
    training = TrainingConfig(batch=8, length=16, source_length=15, objective="prefix", sample_bytes=0)
    experts = SimpleNamespace(groups=32, causal=True)
    with pytest.raises(ConfigError) as error:
        check_model(training, SimpleNamespace(vocabulary=358, moe=experts, int8=False, stacked=True, encoder_layers=2))
    assert error.value.faults == (
        "model.moe.groups must divide the tokens of the sources of a batch, 8 × 15 = 120, but is 32.",
    )


def test_an_objective_has_a_source_where_the_model_has_an_encoder():
    training = TrainingConfig(batch=8, length=16, sample_bytes=0)
    encoding = SimpleNamespace(vocabulary=358, moe=None, int8=False, stacked=True, encoder_layers=2)
    check_model(replace(training, objective="prefix"), encoding)
    with pytest.raises(ConfigError) as error:
        check_model(training, encoding)
    assert error.value.faults == (
        "model.encoder_layers is 2, but the objective next-token has no source; set objective to span-corruption, "
        "prefix or pairs.",
    )
    with pytest.raises(ConfigError) as error:
        check_model(replace(training, objective="pairs"), model())
    assert error.value.faults == (
        "the objective pairs has a source, but the model has no encoder; set model.encoder_layers, or objective to "
        "next-token.",
    )


def test_a_tokenizer_needs_a_vocabulary_at_least_as_large():
    training = TrainingConfig(batch=8, length=16, tokenizer="words/tokenizer.json")
    for vocabulary in (1000, 256_128):
        check_model(training, model(vocabulary), 1000)
    with pytest.raises(ConfigError) as error:
        check_model(training, model(999), 1000)
    assert error.value.faults == (
        "the tokenizer 'words/tokenizer.json' has 1,000 tokens, but model.vocabulary is 999; it must be at least as "
        "large.",
    )
    with pytest.raises(ConfigError, match=r"but is 1000\. Give the file of its tokenizer with --tokenizer\."):
        check_model(replace(training, tokenizer=""), model(1000))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "Interrupted before a step was saved."),
        (["8", "16"], "Interrupted after step 16. To go on: python train.py --resume --out 'my run'"),
    ],
)
def test_an_interrupt_says_what_is_saved(tmp_path, monkeypatch, capsys, steps, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    for step in steps:
        (tmp_path / "my run" / "checkpoints" / step).mkdir(parents=True)

    def run(argv):
        out = choose_out("my run", resume=bool(steps))
        with released_after(out), runner.interrupts(out):
            raise KeyboardInterrupt

    assert runner.guarded(run, []) == 130
    assert capsys.readouterr().err == f"\n{said}\n"


def test_an_interrupt_before_the_run(capsys):
    def run(argv):
        raise KeyboardInterrupt

    assert runner.guarded(run, []) == 130
    assert capsys.readouterr().err == "\nInterrupted before the run began.\n"


def test_a_signal_while_the_newest_checkpoint_is_looked_for_changes_nothing(capsys, monkeypatch, tmp_path):
    def last_step(out):
        os.kill(os.getpid(), signal.SIGINT)
        return 7

    def run(argv):
        with runner.interrupts(tmp_path):
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "last_step", last_step)
    assert runner.guarded(run, []) == 130
    assert capsys.readouterr().err.startswith("\nInterrupted after step 7.")


def test_a_file_of_others_that_fails_is_not_blamed_on_the_runs_folder(capsys, tmp_path):
    def run(argv):
        with runner.interrupts(tmp_path):
            (tmp_path.parent / "absent" / "tokens.npy").read_bytes()

    assert runner.guarded(run, []) == 1
    named = str(tmp_path.parent / "absent" / "tokens.npy")
    assert capsys.readouterr().err == (
        f"The run failed: cannot use {named!r}: No such file or directory; no step is saved.\n"
    )


@pytest.mark.parametrize("damage", [{"training": 3}, {"training": {"relayout": [5]}}, {"sharding": "x"}])
def test_settings_of_a_run_of_wrong_types_are_one_message(tmp_path, damage):
    (tmp_path / "config.json").write_text(json.dumps(damage))
    with pytest.raises(ConfigError, match=f"{next(iter(damage))}.* must be "):
        parse(Settings, ["--resume", "--out", str(tmp_path)])


def test_what_the_system_says_of_a_named_file_is_one_message(capsys, tmp_path):
    def run(argv):
        (tmp_path / ("n" * 5000)).read_bytes()

    assert runner.guarded(run, []) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ConfigError: cannot use '{tmp_path}/nnn")
    assert said.endswith("nnn':\n  File name too long.\n")


@pytest.mark.parametrize(("error", "code", "sure"), [
    (ConfigError("cannot do it:", ["a fault."]), 2, True),
    (FlagError("the flags cannot be read"), 2, True),
    (RuntimeError("nobody expects it"), 1, False),
    (MemoryError("nor that"), 1, False),
    (KeyboardInterrupt(), 130, True),
])  # fmt: skip
def test_any_error_of_one_of_several_processes_reaches_the_others(monkeypatch, capsys, error, code, sure):
    class Over(BaseException):
        """Raised where the process would end."""

    def fail(code, message, *, sure=True):
        told.append((code, str(error) in message, sure))
        raise Over

    told = []
    monkeypatch.setattr(runner.processes, "several", lambda: True)
    monkeypatch.setattr(runner.processes, "fail", fail)

    def failing(_):
        raise error

    with pytest.raises(Over):
        runner.guarded(failing, [])
    assert told == [(code, True, sure)]


def test_a_value_of_a_flag_that_takes_none_is_refused():
    assert distributed(["--help=3", "--no-resume=3", "--distributed", "auto"]) == "auto"
    with pytest.raises(FlagError, match="Unrecognized options: 3"):
        parse(Settings, ["--no-resume=3"])


def test_where_processes_are_joined_is_known_before_the_flags_are_read():
    at = "node1:1234,processes=2,process=1"
    assert distributed(["--distributed", at, "--steps", "many", "--nonsense"]) == at
    assert distributed([f"--distributed={at}"]) == at
    assert distributed(["--distributed", at, "--help"]) == ""
    assert distributed(["--steps", "4"]) == ""


def test_a_flag_that_is_not_utf8_is_refused_before_anything_runs(capsys):
    """Such as a name in another encoding, which Python hands on with half of surrogate pairs."""
    assert runner.guarded(lambda argv: pytest.fail("it ran"), ["--out", "caf\udce9"]) == 2
    assert capsys.readouterr().err == "ConfigError: cannot read the flags:\n  'caf\\udce9' is not UTF-8.\n"
