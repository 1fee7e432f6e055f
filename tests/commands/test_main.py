"""`gspmd`: the list of commands, one message for a command that there is not, and configurations by name."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gspmd
from gspmd import interruption
from gspmd.commands import configs, main, runner
from gspmd.training import ConfigError, Interrupted, TrainingConfig
from gspmd.training.config import load_toml

ROOT = Path(__file__).parents[2]
EXPLAIN = ["BLE_xyz, E_xF_yz -> BLF_yzx", "--mesh", "x=4,y=4,z=4", "--sizes", "B=512,L=1,E=18432,F=73728"]


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Restore what a script changes in its process: it ends there, but the process of the tests goes on."""
    monkeypatch.setattr(interruption, "_in_command", False)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    usual = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize("flags", [[], ["--help"], ["-h"]], ids=["nothing", "--help", "-h"])
def test_the_commands_are_listed(capsys, flags):
    assert main.main(flags) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert (
        lines[0] == f"gspmd {gspmd.__version__}: write the sharding as the papers write it; see what it costs; run it."
    )
    assert [line.split()[1] for line in lines[2 : 2 + len(main.COMMANDS)]] == list(main.COMMANDS)
    assert max(map(len, lines)) <= 100
    assert err == ""


def test_a_process_without_output_runs_too(monkeypatch):
    """Python has None for a standard stream that is closed."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main.main([]) == 0


def test_the_version(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gspmd {gspmd.__version__}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("trian", " Did you mean 'train'?"), ("frobnicate", ""), ("--verison", " Did you mean '--version'?")],
)
def test_an_unknown_command_is_one_message(capsys, name, hint):
    assert main.main([name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"gspmd: there is no command {name!r}.{hint} Commands: {', '.join(main.COMMANDS)}.\n"


def test_a_command_and_its_script_print_the_same(capsys, monkeypatch):
    assert main.main(["explain", *EXPLAIN]) == 0
    monkeypatch.setattr(sys, "argv", ["scripts/explain.py", *EXPLAIN])
    by_name = capsys.readouterr().out
    assert main.script("explain", "explain.py") == 0
    assert by_name == capsys.readouterr().out != ""


def test_a_command_is_named_in_its_messages(capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(["explain"])
    assert capsys.readouterr().err.startswith("gspmd explain: the following arguments are required: ")


@pytest.mark.parametrize("name", ["train", "generate", "compile"])
def test_the_help_is_the_commands_or_the_scripts(capsys, monkeypatch, name):
    file = {"train": "train_moe.py", "generate": "generate.py", "compile": "compile_offline.py"}[name]
    monkeypatch.setattr(sys, "argv", [f"scripts/{file}", "--help"])
    for call in (lambda: main.main([name, "--help"]), lambda: main.script(name, file)):
        with pytest.raises(SystemExit, match="0"):
            call()
    out = capsys.readouterr().out
    by_command, by_script = out[: out.rindex("usage: ")], out[out.rindex("usage: ") :]
    assert by_command.startswith(f"usage: gspmd {name} [-h]")
    assert by_script.startswith(f"usage: scripts/{file} [-h]")
    assert f"    gspmd {name} --" in by_command
    assert f"    python scripts/{file} --" in by_script
    assert f"python scripts/{file}" not in by_command
    assert f"gspmd {name}" not in by_script


def test_what_resumes_a_run_is_the_command_that_began_it(capsys, tmp_path):
    def stopped(_):
        raise Interrupted(3, tmp_path)

    assert runner.guarded(stopped, [], called="gspmd train") == 130
    assert f"To go on: gspmd train --resume --out {tmp_path}" in capsys.readouterr().err


def test_explain_starts_without_the_libraries_of_training():
    program = (
        "import sys; from gspmd.commands.main import main; "
        f"main(['explain', *{EXPLAIN!r}, '--json']); "
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'flax', 'optax', 'orbax', 'grain', 'tyro', 'tensorboardX', 'matplotlib', 'models', 'gspmd_models'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_a_config_is_found_by_name_and_a_file_before_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Path(configs.find("tiny")) == ROOT / "configs" / "tiny.toml"
    for own in ("own.toml", "some/tiny", "tiny"):
        Path(own).parent.mkdir(exist_ok=True)
        Path(own).touch()
        assert configs.find(own) == own
    with pytest.raises(ConfigError) as caught:
        configs.find("plam-8b")
    shipped = ", ".join(sorted(file.stem for file in (ROOT / "configs").glob("*.toml")))
    assert str(caught.value) == (
        "cannot read config 'plam-8b':\n  there is no such file, and no config of this name comes with gspmd.\n"
        f"  Did you mean 'palm-8b'? Give one of {shipped}, or the path of a TOML file."
    )


@pytest.mark.parametrize(("name", "remedy"), [
    ("configs/llama-3.1-8b.toml", "Did you mean 'llama-3.1-8b', which comes with gspmd?"),
    ("llama2-70b.toml", "Did you mean 'llama-2-70b', which comes with gspmd?"),
    ("some/Plam-8B", "Did you mean 'palm-8b', which comes with gspmd?"),
    ("mime.toml", "Did you mean 'mine.toml'?"),
    ("some/where.toml", "Give a TOML file."),
])  # fmt: skip
def test_a_path_of_no_file_is_one_message_that_names_a_shipped_config(monkeypatch, tmp_path, name, remedy):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").touch()
    with pytest.raises(ConfigError) as caught:
        load_toml(TrainingConfig, configs.find(name))
    assert str(caught.value) == f"cannot read config {name!r}:\n  there is no such file. {remedy}"


def test_the_models_not_installed_are_one_message(capsys, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'gspmd_models'", name="gspmd_models")

    monkeypatch.setattr(main, "import_module", missing)
    assert main.main(["train"]) == 2
    assert capsys.readouterr().err == (
        "No module named 'gspmd_models'. Install gspmd first; in a checkout: pip install -e .\n"
    )


# These are for those who change gspmd, and are no commands.
@pytest.mark.parametrize(
    "path",
    sorted({*(ROOT / "scripts").glob("*.py")} - {*(ROOT / "scripts").glob("d*.py")}),
    ids=lambda path: path.name,
)
def test_a_script_is_thin_and_says_what_to_install(path, tmp_path):
    assert len(path.read_text().splitlines()) < 20
    done = subprocess.run([sys.executable, "-I", "-S", str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "No module named 'gspmd'. Install gspmd first: pip install -e . in the folder of the checkout.\n"
    )
