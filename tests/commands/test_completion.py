"""`gspmd completion`: the scripts complete commands, flags and values."""

import re
import shutil
import subprocess

import pytest

from gspmd.commands import completion, main
from gspmd.layouts import presets

CASES = {
    "gspmd co": ["compile", "completion"],
    "gspmd layouts ch": ["check"],
    "gspmd layouts show zero": ["zero-1", "zero-2", "zero-3"],
    "gspmd layouts check x --dev": ["--devices"],
    "gspmd train --model.he": ["--model.heads", "--model.head-size"],
    "gspmd train --dtype b": ["bfloat16"],
    "gspmd train --layout zero-": ["zero-1", "zero-2", "zero-3"],
    "gspmd generate --weights i": ["int8"],
    "gspmd explain x --chip tpu-v5": ["tpu-v5e", "tpu-v5p"],
    "gspmd completion z": ["zsh"],
    "gspmd compile --no-sm": ["--no-smallest"],
}


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash here")
def test_bash_completes(capsys, tmp_path):
    assert main.main(["completion", "bash"]) == 0
    script = [capsys.readouterr().out]
    for line in CASES:
        words = " ".join(f"'{word}'" for word in line.split())
        script += [f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); _gspmd"]
        script += ['printf "%s " "${COMPREPLY[@]}"; echo']
    given = ["bash", "--norc", "-c", "\n".join(script)]
    done = subprocess.run(given, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    found = dict(zip(CASES, map(str.split, done.stdout.splitlines()), strict=True))
    assert found == CASES


def test_its_flags_are_those_of_the_help(capsys, monkeypatch):
    """The flags of --help-all, which tyro lists."""
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("train", "generate", "export", "search", "compile"):
        with pytest.raises(SystemExit):
            main.main([name, "--help-all"])
        # At the beginning of a line, or of a line of a box; others are in texts.
        lines = [line for part in capsys.readouterr().out.splitlines() for line in re.split("[│|]", part)]
        listed = {
            flag for line in lines if re.match(r" {1,2}-", line) for flag in re.findall(r"--[a-z][\w.-]*", line[:70])
        }
        optional = ("--model.moe", "--model.rope-scaling", "--model.latent", "--model.lora")  # tables
        known = {flag for flag in completion.known()[name].flags if not flag.startswith(optional)}
        assert {flag for flag in listed if not flag.startswith(optional)} - {"--help"} <= known
        assert known - {"--help", "--help-all"} <= listed


def test_the_other_shells_know_the_same_commands(capsys):
    for shell in ("zsh", "fish"):
        assert main.main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert all(name in script for name in (*main.COMMANDS, *presets()))
    assert (
        "complete -c gspmd -n '__fish_seen_subcommand_from layouts; and __fish_seen_subcommand_from check' -l mesh"
        in (script)
    )
    with pytest.raises(SystemExit, match="2"):
        main.main(["completion", "ksh"])
    assert capsys.readouterr().err == "gspmd completion: 'ksh' is not one of bash, zsh, fish. Did you mean 'zsh'?\n"
