"""A custom model on the command line: found, trained, resumed, and refused in one line."""

import json
import sys

import jax
import pytest

import gspmd
from gspmd import host
from gspmd.commands import compile as compiling
from gspmd.commands import configs, generate, train
from gspmd.commands.flags import parse
from gspmd.commands.settings import RunSettings
from gspmd.commands.source import Source
from gspmd.training import ConfigError
from gspmd.training.checkpoints import kept_settings
from gspmd.training.model import finding
from tests.house import ROOT
from tests.training.model.test_own import LAYOUT

MODEL = (ROOT / "tests" / "training" / "model" / "test_own.py").read_text()
SMALL = ["--steps", "4", "--batch", "8", "--length", "16", "--final-validation-batches", "2", "--no-compile-cache"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with tiny.py and tiny.toml in it, and some text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        host, "start", lambda count, platform="", host_devices=8: jax.devices()[: count or host_devices]
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"tiny{abs(hash(str(tmp_path)))}"  # modules of one name are one module in a process
    (tmp_path / f"{name}.py").write_text(MODEL)
    sys.path_importer_cache.clear()  # folders are listed once, and files are new here
    (tmp_path / "tiny.toml").write_text(LAYOUT)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return tmp_path, name


def flags(name, *more):
    return ["--model", f"{name}:Tiny", "--layout", "tiny.toml", "--data", "text.txt", *SMALL, *more]


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_resumed_with_the_class_that_it_began_with(folder, capsys, monkeypatch):
    here, name = folder
    assert train.run(flags(name, "--out", "runs/a", "--model.embed", "8", "--mesh", "x=4,y=2")) == 0
    said = capsys.readouterr().out
    assert f"{name}:Tiny" in said
    assert "mixer.hidden" in said
    assert "generate" not in said
    kept = json.loads((here / "runs/a/config.json").read_text())
    assert kept["model"] == {"class": f"{here}/{name}:Tiny", "embed": 8, "layers": 2}
    assert kept["training"]["sample_bytes"] == 0
    assert "model_class" not in kept
    assert not (here / "runs/a/sample.txt").exists()
    assert (
        train.run(flags(name, "--out", "runs/b", "--model.embed", "8", "--mesh", "x=8,y=1", "--microbatches", "1")) == 0
    )
    first, second = ([row["loss"] for row in rows(here / out) if "loss" in row] for out in ("runs/a", "runs/b"))
    assert first == pytest.approx(second, rel=1e-4)
    assert train.run(flags(name, "--out", "runs/a", "--model.embed", "8", "--mesh", "x=4,y=2", "--resume")) == 0
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")  # the class is found from anywhere, and only that class resumes the run
    assert train.run(["--resume", "--out", "../runs/a", "--steps", "6", "--no-compile-cache"]) == 0
    assert rows(here / "runs/a")[-1]["step"] == 6
    capsys.readouterr()
    assert train.run(["--resume", "--out", "../runs/a", "--model", "other:Tiny"]) == 2
    assert (
        f"the run has the model '{here}/{name}:Tiny', not 'other:Tiny'; leave --model out." in capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match=r"its model '.*:Tiny' is a custom model. Only 'gspmd train', 'gspmd s"):
        Source.at(here / "runs/a")
    assert generate.run(["--checkpoint", "../runs/a", "--prompt", "the"]) == 2
    assert "Tiny, a custom model, lacks the methods kept and step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_writes_on(folder, capsys):
    here, name = folder
    (here / f"{name}.py").write_text((ROOT / "examples" / "recurrence.py").read_text())
    (here / "tiny.toml").write_text((ROOT / "examples" / "recurrence.toml").read_text())
    sizes = ["--model.embed", "16", "--model.channels", "32", "--model.layers", "1"]
    asked = ["--model", f"{name}:Recurrence", "--layout", "tiny.toml", "--data", "text.txt", *SMALL, *sizes]
    assert train.run([*asked, "--out", "runs/a", "--mesh", "x=4,y=2"]) == 0
    capsys.readouterr()
    texts = []
    flags = [
        "--checkpoint",
        "runs/a",
        "--prompt",
        "the quick",
        "--prompt",
        "fox",
        "--tokens",
        "8",
        "--no-compile-cache",
    ]
    for more in ([], ["--mesh", "x=2,y=2"], ["--devices", "8", "--set", "recurrence.state=BF_xy"]):
        assert generate.run([*flags, "--samples", "2", "--temperature", "0.7", *more]) == 0
        text, said = capsys.readouterr()
        texts.append(text)
        assert "Loaded: step 4 of the run." in said
    assert texts[0].startswith("=== text 1 of 4 ===\nthe quick")
    assert texts[0] == texts[1] == texts[2]
    assert generate.run([*flags, "--explain", "--mesh", "x=2,y=2"]) == 0
    assert "step: 2 × 1 token" in capsys.readouterr().out
    wrong = ["--weights", "int8", "--cache", "int8", "--unstacked", "--prefill-layout", "tiny.toml", "--layout", "auto"]
    assert generate.run([*flags, *wrong]) == 2
    said = capsys.readouterr().err
    assert all(
        word in said for word in ("--weights int8", "--cache int8", "--unstacked", "--prefill-layout", "is searched")
    )
    assert generate.run([*flags, "--set", "recurrence.state=B_xF_z"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_settings_file_names_a_class_beside_it(folder, monkeypatch):
    here, name = folder
    (here / "run.toml").write_text(f'[model]\nclass = "{name}:Tiny"\nembed = 4\n[sharding]\nlayout = "tiny.toml"\n')
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    found = parse(RunSettings, ["--config", "../run.toml", "--model.layers", "3"])
    assert (found.model.embed, found.model.layers, found.training.sample_bytes) == (4, 3, 0)
    kept = kept_settings(found)
    assert kept["model"]["class"] == f"{here}/elsewhere/../{name}:Tiny"
    (here / "runs").mkdir()
    (here / "runs/config.json").write_text(json.dumps(kept))
    again = parse(RunSettings, ["--resume", "--out", "../runs"])
    assert (again.model, type(again.model)) == (found.model, type(found.model))
    asked = compiling.parse(["--config", "../run.toml", "--topology", "tpu-v4:2x2x1"])
    assert (asked.phase, asked.model.embed) == ("train", 4)


def test_our_own_models_are_read_as_before():
    found = parse(RunSettings, [], default="default", find=configs.find)
    assert type(found) is RunSettings
    assert "model_class" not in kept_settings(found)


@pytest.mark.slow
def test_its_layout_is_searched_for_the_devices_and_stays_with_the_run(folder, capsys):
    here, name = folder
    searched = ["--layout", "auto:tiny.toml", "--devices", "4"]
    assert train.run([*flags(name, "--out", "runs/found"), *searched]) == 0
    assert "Predicted: " in capsys.readouterr().out
    found = gspmd.Layout.load(here / "runs/found/layout.toml")
    given = gspmd.Layout.load("tiny.toml")
    assert found.table.keys() >= given.table.keys()
    assert train.run([*flags(name, "--out", "runs/one"), "--mesh", "x=1,y=1"]) == 0
    first, second = ([row["loss"] for row in rows(here / out) if "loss" in row] for out in ("runs/found", "runs/one"))
    assert first == pytest.approx(second, rel=1e-4)
    assert train.run(["--resume", "--out", "runs/found", "--steps", "6", "--no-compile-cache"]) == 0
    assert "Layout: the run's own, runs/found/layout.toml." in capsys.readouterr().out
    assert rows(here / "runs/found")[-1]["step"] == 6


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "mixer", "a model is named MODULE:NAME, such as mixer:Mixer for the class Mixer of mixer.py."),
        ("", "no_such:Mixer", "there is no module 'no_such' in {here!r}, nor where Python looks for modules."),
        ("", "{name}s:Mixer", "nor where Python looks for modules. Did you mean '{name}'?"),
        ("import no_such_library", "{name}:Mixer", "its module imports 'no_such_library', which is not installed."),
        ("class Mixer: pass", "{name}:Mixr", "{here}/{name}.py has no 'Mixr'. Did you mean 'Mixer'?"),
        ("class Mixer: pass", "{name}:Mixer", "it is not a dataclass; write @dataclass(frozen=True) above the class"),
        ("@dataclass(frozen=True)\nclass Mixer:\n    def sizes(self): pass", "{name}:Mixer",
         "it is not a model: it lacks parameters and loss of the protocol gspmd.training.model.Model."),
        # Only a class that decodes has both step and kept; any other may have a helper by one of these names.
        ("@dataclass(frozen=True)\nclass Mixer:\n    def sizes(self, *sizes): pass\n    parameters = sizes\n"
         "    def loss(self, params, tokens): pass\n    def step(self, x): pass", "{name}:Mixer",
         "Mixer':\n  its loss must be loss(self, layout, params, tokens, key, train), "
         "but is loss(self, params, tokens)."),
        ("@dataclass(frozen=True)\nclass Mixer:\n    def sizes(self, *sizes): pass\n"
         "    parameters = loss = step = sizes\n    @staticmethod\n    def kept(layout): pass", "{name}:Mixer",
         "Mixer':\n  its kept must be kept(), but is kept(layout)."),
        ("@dataclass\nclass Mixer:\n    width: int\n    def sizes(*a): pass\n    parameters = loss = sizes",
         "{name}:Mixer", "its settings could change; write @dataclass(frozen=True).\n  field 'width' has no default"),
        ("", "json:Mixer", "has no 'Mixer'"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_named(folder, text, name, message):
    here, module = folder
    module = f"{module}_no_model"
    (here / f"{module}.py").write_text(f"from dataclasses import dataclass\n{text}\n")
    sys.path_importer_cache.clear()
    with pytest.raises(ConfigError) as error:
        finding.find(name.format(name=module))
    said = str(error.value)
    assert said.startswith(f"cannot use the model {name.format(name=module)!r}:\n  ")
    assert message.format(here=str(here), name=module) in said
    assert "its step" not in said
    sys.modules.pop(module, None)


def test_a_module_of_another_folder_is_not_taken_for_it(folder):
    here, _ = folder
    (here / "json.py").write_text("")
    with pytest.raises(ConfigError, match=r"Python already has another module 'json', .*; give the file another name."):
        finding.find("json:Mixer")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--from", "DIR"], "no public checkpoint has its weights; leave --from out."),
        (["--lora.rank", "4"], "adapters are for the models that come with gspmd; leave [lora] out"),
        (["--sample-bytes", "8"], "training does not sample text from it; leave --sample-bytes out."),
        (["--layout", "auto"], "its lines are in a layout file; search for a layout with --layout auto:FILE."),
        (["--layout", "auto:none.toml"], "none.toml"),
        (["--data-prompt", "q"], "its loss would predict the prompts of --data-prompt; leave that flag out."),
        (["--objective", "prefix"], "it takes rows of next-token prediction; leave --objective prefix out."),
        (["--pack"], "its loss would treat the documents of a packed row as one text; leave --pack out."),
        (["--relayout", "2=auto"], "no layout is searched in the middle of a run; use gspmd search --model"),
        (["--rounds", "2"], "rounds is 2, but no layout here has stages; set rounds to 1."),
        (["--layout", "megatron-1d"], "Tiny needs a layout file: the preset 'megatron-1d' has no lines mixer."),
        (["--set", "mixer.w_in=FE"], "mixer.w_in must have dimensions E and F, in this order"),
        (["--frozen", "blocks.w_ins"], "frozen has 'blocks.w_ins', which matches no parameter. Did you mean"),
        (["--resume", "--out", "runs/none"], "holds no run"),
    ],
)
def test_what_a_custom_model_does_not_support_is_refused(folder, capsys, more, message):
    _, name = folder
    assert train.run(flags(name, *more)) == 2
    assert message in capsys.readouterr().err


def test_without_a_layout_the_message_asks_for_one(folder, capsys):
    _, name = folder
    assert train.run(["--model", f"{name}:Tiny", "--data", "text.txt", *SMALL]) == 2
    said = capsys.readouterr().err
    assert said.startswith("LayoutError: Tiny needs a layout file: ")
    assert said.endswith("\n  Write its lines in a TOML file, and name it with --layout FILE.\n")


def test_a_field_that_the_model_does_not_have(folder, capsys):
    here, name = folder
    (here / "run.toml").write_text(f'[model]\nclass = "{name}:Tiny"\nembd = 4\n')
    assert train.run(["--config", "run.toml"]) == 2
    assert "unknown key 'model.embd'; did you mean 'model.embed'?" in capsys.readouterr().err
    assert train.run(flags(name, "--model.embd", "4")) == 2
    assert "Did you mean --model.embed?" in capsys.readouterr().err


def test_a_phase_that_it_does_not_have(folder, capsys):
    _, name = folder
    assert compiling.run(["--model", f"{name}:Tiny", "--layout", "tiny.toml", "--phase", "decode"]) == 2
    assert "a custom model has only a training step; leave --phase decode out." in capsys.readouterr().err


def test_the_help_has_the_flag_and_the_fields(folder, capsys):
    _, name = folder
    with pytest.raises(SystemExit):
        train.run(["--help"])
    assert "--model MODULE:NAME" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train.run(["--model", f"{name}:Tiny", "--help"])
    said = capsys.readouterr().out
    assert "--model.layers INT" in said
    assert "--model.heads" not in said


@pytest.mark.slow
def test_a_step_is_compiled_for_64_chips_that_are_not_there(folder, capfd):
    pytest.importorskip("libtpu")
    here, name = folder
    asked = [
        "--model",
        f"{name}:Tiny",
        "--layout",
        "tiny.toml",
        "--batch",
        "64",
        "--length",
        "64",
        "--json",
        "figures.json",
    ]
    assert compiling.run([*asked, "--topology", "tpu-v5e:8x8"]) == 0
    assert "64 tpu-v5e devices, mesh x=8 y=8" in capfd.readouterr().out
    figures = json.loads((here / "figures.json").read_text())
    assert figures["fits"]


def test_an_error_of_the_model_names_its_line(folder, capsys):
    """Not a traceback through JAX and this package; the innermost line of the model comes before the error."""
    here, name = folder
    assert train.run(flags(name, "--explain", "--mesh", "x=4,y=2")) == 0
    faulty = "def loss(self, *given, **more):\n        return {}['spatialx']\n\n    def unused("
    (here / f"{name}f.py").write_text(MODEL.replace("def loss(", faulty, 1))
    sys.path_importer_cache.clear()
    capsys.readouterr()
    assert train.run(flags(f"{name}f", "--explain", "--mesh", "x=4,y=2")) == 2
    said = capsys.readouterr().err
    assert "ConfigError: the model failed:\n" in said
    assert f"{here}/{name}f.py:" in said
    assert "in loss: return {}['spatialx']\n  KeyError: 'spatialx'\n" in said
    assert len(said[said.index("ConfigError") :].splitlines()) <= 8
    assert "Traceback" not in said


def test_a_model_that_python_cannot_read_is_one_message(folder, capsys):
    here, name = folder
    (here / f"{name}s.py").write_text("import jax\nclass Tiny(:\n")
    (here / f"{name}e.py").write_text("import jax\nSIZE = 1 // 0\n")
    sys.path_importer_cache.clear()
    assert train.run(flags(f"{name}s")) == 2
    assert f"{here}/{name}s.py:2: invalid syntax: class Tiny(:\n" in capsys.readouterr().err
    assert train.run(flags(f"{name}e")) == 2
    said = capsys.readouterr().err
    assert f"{here}/{name}e.py:2, in <module>: SIZE = 1 // 0\n  ZeroDivisionError: " in said


def test_a_fault_of_gspmd_keeps_its_traceback(folder, monkeypatch):
    here, name = folder
    (here / f"{name}g.py").write_text(MODEL)
    sys.path_importer_cache.clear()

    def broken(*given, **more):
        raise KeyError("a fault of gspmd")

    broken.__code__ = broken.__code__.replace(co_filename=gspmd.__file__)
    monkeypatch.setattr(gspmd.ops, "cross_entropy", broken)
    with pytest.raises(KeyError, match="a fault of gspmd"):
        train.run(flags(f"{name}g", "--explain", "--mesh", "x=4,y=2"))
