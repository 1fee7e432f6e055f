"""scripts/train_moe.py: bad input is one message and exit code 2; a run leaves its files; Ctrl-C can be resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

import gspmd_models as models
from gspmd.commands import runner, train
from gspmd.training.reporting import metrics

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_moe.py"
TINY = ["--config", str(ROOT / "configs" / "tiny.toml"), "--devices", "8", "--platform", "cpu"]


@pytest.fixture(scope="module")
def script():
    return train


@pytest.fixture
def run(script, capfd, monkeypatch, tmp_path):
    """A function of flags that returns the exit code and what stood on stderr, box drawing and line breaks removed."""

    def call(*flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(models, "build", _must_not_be_reached)
        try:
            code = runner.guarded(script.main, [*TINY, *flags])
        except SystemExit as stop:
            code = stop.code
        return code, " ".join(re.sub("[│╭╮╰╯─]", " ", capfd.readouterr().err).split())

    return call


def _must_not_be_reached(*_, **__):
    raise AssertionError("bad input got as far as building the model")


BAD = {
    "negative steps": (["--steps", "-5"], "steps must be positive, but is -5."),
    "negative learning rate": (["--learning-rate", "-0.1"], "--learning-rate must be positive, but is -0.1."),
    "negative seed": (["--seed", "-1"], "seed must not be negative, but is -1."),
    "negative devices": (["--devices", "-8"], "devices must be positive, but is -8."),
    "negative width": (["--model.embed", "-8"], "embed is -8; it must be at least 1"),
    "empty prompt": (["--prompt", ""], "--prompt is empty; give it a value, or leave it out."),
    "vocabulary": (["--model.vocabulary", "512"], "model.vocabulary must be 256, since the data is bytes, but is 512."),
    "groups of tokens": (["--model.moe.groups", "24"], "must divide the tokens of a batch, 8 × 16 = 128, but is 24."),
    "groups on the mesh": (["--model.moe.groups", "4"], "dimension G has size 4, which mesh axes"),
    "digit of no number": (
        ["--mesh", "x=²"],
        "mesh 'x=²': mesh axis x has size '²', which is not a whole number of",
    ),
    "no GPU": (["--platform", "gpu", "--devices", "8"], "HostError: cannot"),
    "not a number": (["--steps", "many"], "'many'"),
    "unknown flag": (["--stps", "3"], "Unrecognized options: --stps"),
    "experts of a model without": (
        ["--config", "palm-8b", "--model.moe.experts", "8"],
        "cannot read the flags: --model.moe.experts is a field of [model.moe], and this configuration has no experts; "
        "write [model.moe] in a TOML file, and name it with --config.",
    ),
    "latents of a model without": (
        ["--config", "palm-8b", "--model.latent.rank", "8"],
        "--model.latent.rank is a field of [model.latent], and this configuration has no latent attention; "
        "write [model.latent] in a TOML file, and name it with --config.",
    ),
    "adapters of a model without": (
        ["--model.lora.rank", "8"],
        "--model.lora.rank is a field of [model.lora], and this configuration has no adapters; write --lora.rank.",
    ),
    "unknown lowering": (["--lowering", "loop"], "but is 'loop'."),
    "unknown dtype": (["--dtype", "int3"], "--dtype must be one of 'float32', 'bfloat16', but is 'int3'."),
    "unknown preset": (["--layout", "gshrd"], "LayoutError: no layout is called 'gshrd'. Did you mean 'gshard'?"),
    "no layout file": (["--layout", "none/layout.toml"], "LayoutError: "),
    "layout key": (["--set", "ffn.w_n=EF"], "no layout has a key 'ffn.w_n'. Did you mean 'ffn.w_in'?"),
    "no equals sign": (["--set", "ffn.w_in"], "set must read KEY=SPEC, such as ffn.w_in=E_xF_y, but"),
    "spec's axis": (["--set", "ffn.w_in=E_qF"], "ffn.w_in = E_qF"),
    "spec's dimensions": (["--set", "ffn.w_in=EG"], "ffn.w_in must have dimensions E and F, but this has E and"),
    "spec's syntax": (["--set", "ffn.w_in=E_F"], "ffn.w_in = E_F"),
    "mesh syntax": (["--mesh", "x4"], "mesh 'x4': 'x4' is not AXIS=SIZE; write x=4,y=2."),
    "mesh axis": (["--mesh", "q=8"], "the layout has no mesh axis q. It declares x, y and z."),
    "negative mesh": (["--mesh", "x=-8"], "mesh axis x must have a positive size, but has -8."),
    "mesh against devices": (["--mesh", "x=4"], "it has 4 devices, but --devices asks for 8. Leave one"),
    "batch on the mesh": (["--batch", "12"], "dimension B has size 12, which mesh axes x, y and z (size 8·1·1"),
    "missing data": (["--data", "none/*.txt"], "ConfigError: cannot find the data: no file matches 'none/*.txt'."),
    "empty data": (["--data", "empty.txt"], "cannot train on this data: 'empty.txt' holds no text."),
    "little data": (["--data", "small.txt"], "has 95 bytes, but a batch of 8 sequences of 16 needs 129."),
    "unwritable out": (["--out", "empty.txt/run"], "cannot write to 'empty.txt/run': 'empty.txt': it is not a folder."),
    "out is a file": (["--out", "empty.txt"], "ConfigError: cannot write to 'empty.txt': it is not a folder."),
    "out holds a run": (["--out", "done"], "it already holds a run, at step 7. Add --resume to go on,"),
    "out holds the text": (
        ["--out", "begun", "--data", "begun/sample.txt"],
        "the run would read 'begun/sample.txt', and replace it or move it away. Choose another --out.",
    ),
    "nothing to resume": (["--resume", "--out", "absent"], "there is no checkpoint under 'absent'."),
    "no run at all": (["--resume"], "there is no run under 'runs'. Name its folder with --out."),
    "missing config": (["--config", "none.toml"], "cannot read config 'none.toml': there is no such file."),
    "config key": (["--config", "wrong.toml"], "unknown key 'training.stps'; did you mean 'training.steps'?"),
    "config table": (["--config", "wrong.toml"], "unknown key 'trainin'; did you mean 'training'?"),
}


@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_message(run, tmp_path, flags, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "small.txt").write_text("a" * 100)
    (tmp_path / "wrong.toml").write_text("trainin = 1\n[training]\nstps = 3\n")
    (tmp_path / "done" / "checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text('{"training": {}}')
    (tmp_path / "begun" / "sample.txt").write_text("a" * 200)
    code, error = run(*flags)
    assert code == 2
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("flags", "lines", "near"),
    [
        (["--batch", "9", "--devices", "8"], 7, "With 1 device, the mesh divides them."),
        (["--devices", "7"], 8, "With 4 or 8 devices, the mesh divides them."),
        (["--mesh", "x=3"], 7, "  ... and 1 more."),
    ],
)
def test_one_mistake_is_a_few_lines(script, capfd, flags, lines, near):
    assert runner.guarded(script.main, [*TINY[:2], *flags]) == 2
    said = capfd.readouterr().err.rstrip().splitlines()
    assert len(said) == lines
    assert said[-1].endswith(near)


def test_the_run_is_told_before_anything_is_built(script, capfd, monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    told = []

    def build(*_):
        # On a slow machine it is said that layouts are being checked.
        told.append(re.sub(r"(Checking layout .*…( \d+ s)?\n)*", "", capfd.readouterr().out))
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "build", build)
    assert runner.guarded(script.main, [*TINY, "--data", "a.txt", "--out", "run"]) == 130
    lines = told[0].splitlines()
    assert lines[0].startswith("╭─ gspmd ")
    assert len(lines) <= 48
    assert "none, and so no MFU: fake devices share the cores of one host" in told[0]
    assert "│ programs  not kept" in told[0]
    assert max(map(len, lines)) <= 80
    assert "│ blocks.{0,1}.attention.{w_k,w_v} " in told[0]
    assert not re.search(r"…|KiB|MiB", told[0])


def test_without_unicode(script, monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    out = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(models, "build", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # after all that is said before a model is built
        script.main([*TINY, "--data", "a.txt", "--out", "run"])
    out.flush()
    assert re.search(rb"\d x \d+ tokens", out.buffer.getvalue())
    assert b"?" not in out.buffer.getvalue()


def test_help_without_unicode(script, monkeypatch):
    out = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit, match="0"):
        runner.guarded(script.main, ["--help"])
    out.flush()
    assert b"--learning-rate" in out.buffer.getvalue()


def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_is_made(run):
    code, said = run("--model.embed", "80000000")
    assert code == 2
    assert said.startswith("ConfigError: cannot hold this model: it takes ")
    assert " GB of optimizer state on each of 8 devices, which has " in said
    assert said.endswith("Use a smaller model, or a layout that shards more; --explain allocates nothing.")


def test_a_batch_that_the_machine_cannot_hold_is_refused_before_it_is_made(run):
    code, said = run("--batch", str(2**30), "--length", "1024")
    assert code == 2
    assert said.startswith("ConfigError: cannot hold this batch: it takes ")
    assert said.endswith("Use a smaller --batch or --length; --explain allocates nothing.")


def start(*flags, cwd, **more):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command_line = [sys.executable, str(SCRIPT), *TINY, *flags]
    return subprocess.Popen(
        command_line, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


@pytest.fixture
def text(tmp_path):
    """Data small enough that the last validation takes no time."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("".join(f"line {i} of {number}\n" for i in range(200)))
    return f"{tmp_path}/*.txt"


def test_bad_input_in_a_process_of_its_own(tmp_path):
    process = start("--layout", "gshrd", cwd=tmp_path)
    out, error = process.communicate(timeout=600)
    assert (process.returncode, out) == (2, "")
    # On a slow machine it is said that libraries are being imported.
    error = re.sub(r"(Starting JAX … \d+ s\n)*", "", error, count=1)
    assert error.startswith("LayoutError: no layout is called 'gshrd'.\n")
    assert "Traceback" not in error


@pytest.mark.slow
def test_stop_and_resume_onto_another_mesh(tmp_path, text):
    flags = ["--steps", "100000", "--data", text, "--save-every", "0", "--sample-bytes", "8"]
    # The window of the generated text does not make so many groups.
    flags += ["--batch", "24", "--model.moe.groups", "48"]
    process = start(*flags, "--out", "run", cwd=tmp_path)
    deadline = time.monotonic() + 1200
    while len(metrics.read(tmp_path / "run")) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=600)
    assert process.returncode == 130, error
    said = re.search(r"Interrupted after step (\d+)\. To go on: python .+train_moe\.py'? --resume --out run", error)
    step = int(said[1])
    assert "Traceback" not in error
    assert "8 fake host devices sharing" in out
    assert out.index("24 × 16 tokens") < out.index("Text:") < out.index("Activations") < out.index("collectives")

    # --config, --devices and --platform belong to the first start: a resume begins from the run's other settings.
    command_line = ["--resume", "--out", "run", "--steps", str(step + 2), "--mesh", "x=4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    resumed = subprocess.run(
        [sys.executable, str(SCRIPT), *command_line], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr
    assert f"Resumed from step {step}." in resumed.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, step + 3), step + 2]
    assert rows[-1].keys() == {"step", "val_bits_per_byte", "gzip_bits_per_byte"}
    for name in ("loss.png", "experts.png", "sample.txt", "checkpoints", "events"):
        assert (tmp_path / "run" / name).exists()
