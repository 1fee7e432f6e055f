"""--help and misspelled flags are answered before JAX starts, in lines as wide as the terminal."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass

import pytest

from gspmd.commands import compile_settings, completion, export_settings, generate_settings, main, settings
from gspmd.commands.described import documented
from gspmd.commands.search import settings as search_settings
from gspmd.training.config import ShardingConfig, TrainingConfig
from gspmd_models import ModelConfig
from scripts.document_commands import page_of_commands

TYPED = {
    "train": settings, "generate": generate_settings, "export": export_settings, "search": search_settings,
    "compile": compile_settings,
}  # fmt: skip

_ASKED = """
import contextlib, io, json, sys
from gspmd.commands import main
answers = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main.main(argv)
    except SystemExit as ended:
        code = ended.code
    there = sorted({"jax", "jaxlib", "flax", "optax", "orbax"} & {*sys.modules})
    answers.append((argv, code, there, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""


def test_neither_help_nor_what_is_misspelled_starts_jax():
    """One process asks everything, since what one answer imports would be there for the next."""
    wrong = {
        "explain": ["--mseh", "x=4"], "train": ["--stpes", "3"], "generate": ["--tokens", "many"],
        "export": ["runs/absent", "out"], "search": ["--batch", "-1"], "compile": ["--phase", "trian"],
    }  # fmt: skip
    asked = [[name, flag] for name in wrong for flag in ("--help", "--help-all")]
    asked += [[name, *flags] for name, flags in wrong.items()]
    asked += [["train", "--config", "tinny"], ["train", "--steps", "0"], ["train", "--mesh", "x=0"]]
    asked += [["compile", "--batch", "0"], ["compile", "--topology", "v100:8"], ["search", "--why", "ffn.w_inn=EF"]]
    asked += [["layouts", "check", "zero-3", "--config", "tiny", "--mesh", "x=3"], ["layouts", "shwo"], ["trian"]]
    given = [sys.executable, "-c", _ASKED, json.dumps(asked)]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    for argv, code, there, out, err in json.loads(done.stdout):
        assert there == [], argv
        if argv[-1].startswith("--help"):
            assert (code, err) == (0, ""), argv
            assert out.startswith(f"usage: gspmd {argv[0]} [-h]"), argv
        else:
            assert (code, out) == (2, ""), argv
            assert 1 <= err.count("\n") <= 8, argv


def helped(capsys, monkeypatch, name: str, flag: str, columns: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        main.main([name, flag])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", main.COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_is_as_wide_as_the_terminal(capsys, monkeypatch, name, flag, columns):
    said = helped(capsys, monkeypatch, name, flag, columns)
    assert max(map(len, said.splitlines())) <= columns
    assert "/configs/" not in re.sub("configs/(default|finetune).toml", "", said)  # of this machine


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_is_a_screen_and_tells_of_the_rest(capsys, monkeypatch, name):
    said = helped(capsys, monkeypatch, name, "--help")
    assert len(said.splitlines()) <= 48
    if hasattr(TYPED.get(name), "COMMON"):  # The others have few flags.
        assert f"gspmd {name} --help-all tells more, and lists all flags." in said


def flags_of(said: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", said))


@pytest.mark.parametrize("name", TYPED)
def test_all_flags_are_in_the_whole_help_and_the_common_ones_in_the_short_one(capsys, monkeypatch, name):
    short, whole = (flags_of(helped(capsys, monkeypatch, name, flag, 200)) for flag in ("--help", "--help-all"))
    assert short - {"--help-all"} <= whole
    common = {each.replace("_", "-") for each in getattr(TYPED[name], "COMMON", ())} - {"checkpoint", "model-class"}
    assert {f"--{each}" for each in common} <= short
    if name == "train":
        wanted = {each.name for table in (TrainingConfig, ShardingConfig) for each in fields(table)}
        wanted |= {f"model.{each.name}" for each in fields(ModelConfig) if not is_dataclass(each.type)}
        nested = {"model.moe", "model.lora", "model.latent", "model.rope_scaling"}
        assert {f"--{each.replace('_', '-')}" for each in wanted - nested} <= whole


def test_a_flag_that_is_one_of_a_pair_says_what_it_does(capsys, monkeypatch):
    said = helped(capsys, monkeypatch, "train", "--help-all", 120)
    assert "Whether" not in said
    assert re.search(r"--compile-cache, --no-compile-cache\W+Keep compiled programs on disk", said)


def test_arguments_have_names(capsys, monkeypatch):
    assert helped(capsys, monkeypatch, "export", "--help").startswith("usage: gspmd export [-h] RUN OUT ")


def test_the_texts_of_all_fields_are_read():
    for table in (TrainingConfig, ShardingConfig, ModelConfig, settings.RunSettings):
        texts = documented(table)
        missing = [each.name for each in fields(table) if each.name not in texts and not is_dataclass(each.type)]
        assert set(missing) <= {"model", "training", "lora", "optimizer", "sharding"}


def test_the_page_of_commands_is_renewed_and_has_every_flag(pytestconfig):
    written = (pytestconfig.rootpath / "docs" / "commands.md").read_text()
    assert written == page_of_commands(), "run: python scripts/document_commands.py"
    chapters = {text.split("\n")[0]: text for text in re.split(r"\n## ", written)}
    of_model = chapters.pop("Flags of a model")
    for name, words in completion.known().items():
        text = chapters[f"gspmd {name.split()[0]}"]
        tables = {flag for flag in words.flags if flag in ("--model.latent", "--model.lora")}  # None, or tables
        missing = [flag for flag in {*words.flags} - tables if f"`{flag}`" not in text + of_model]
        missing = [flag for flag in missing if f"`{flag} " not in text + of_model]
        assert {*missing} <= {"--help", "--help-all", "-h"}, name
    # Common flags come first.
    common = chapters["gspmd train"].index("**Common**"), chapters["gspmd train"].index("`--steps`")
    assert common[0] < common[1] < chapters["gspmd train"].index("**Others**")


def test_help_has_the_address_of_the_documentation(capsys, pytestconfig):
    urls = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())["project"]["urls"]
    assert main.main(["--help"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Documentation: {urls['Documentation']}"


def test_no_message_sends_the_user_of_a_wheel_to_a_file_of_the_tree(pytestconfig):
    """Pages are named by their addresses; only docstrings, which developers read, name files."""
    for folder in ("gspmd", "models"):
        for path in (pytestconfig.rootpath / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
                    assert not re.search(r"(?<!main/)\bdocs/\w", node.value), f"{path}:{node.lineno}"
    for name, module in TYPED.items():
        assert not re.search(r"(?<!main/)\bdocs/\w", module.__doc__), name
    assert not re.search(r"(?<!main/)\bdocs/\w", page_of_commands())
