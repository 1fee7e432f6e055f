"""`gspmd layouts`: the presets, their lines, their checks and their differences, without JAX."""

import subprocess
import sys

import pytest

from gspmd.commands import main
from gspmd.layouts import Layout, presets
from gspmd.layouts.read import text_of
from gspmd.layouts.rules.keys import KEYS


def run(capsys, *argv):
    try:
        code = main.main(["layouts", *argv])
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def test_every_preset_is_listed_with_its_axes_and_what_it_shards(capsys):
    code, out, _ = run(capsys, "list")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert code == 0
    assert [name for name, *_ in rows if name] == [*presets()]
    for name, axes, text in rows:
        assert not name or (axes == ", ".join(Layout.load(name).axes) and text)


def test_a_layout_is_shown_as_it_prints_or_as_its_file(capsys, tmp_path):
    assert run(capsys, "show", "zero-3") == (0, f"{Layout.load('zero-3')}\n", "")
    _, text, _ = run(capsys, "show", "zero-3", "--toml")
    assert text.strip() == text_of("zero-3").strip()
    (tmp_path / "own.toml").write_text(text)
    assert run(capsys, "diff", "zero-3", str(tmp_path / "own.toml"))[0] == 0


@pytest.mark.parametrize("line", [
    "[ffn]\nw_in = 3", "[ffn]\nw_in = []", '[ffn]\nw_in = ["E_xF", 3]', "[decode]\n'ffn.hidden' = true",
    "[mixer]\nw = 2.5", "[lowering]\nffn = 1", "[dimensions]\nS = 3", "[padding]\nH = '4'",
])  # fmt: skip
def test_a_value_of_a_wrong_type_is_refused_as_check_refuses_it(capsys, tmp_path, line):
    path = tmp_path / "own.toml"
    path.write_text(f'base = "megatron-1d"\n{line}\n')
    refused = run(capsys, "check", str(path))
    assert refused[:2] == (2, "")
    assert f"cannot use layout '{path}'" in refused[2]
    picture = tmp_path / "own.svg"
    commands = (["show", str(path)], ["show", str(path), "--svg", str(picture)], ["diff", "zero-3", str(path)])
    for argv in (*commands, ["diff", str(path), "zero-3"]):
        assert run(capsys, *argv) == refused
    assert not picture.exists()


@pytest.mark.parametrize(("axes", "said"), [
    ('["x", "x"]', "names mesh axis x twice in axes of [mesh].\n  Name each mesh axis once."),
    ('["x", "Y"]', "has 'Y' in axes of [mesh], which is not the name of a mesh axis.\n  A name is a lower-case letter"),
])  # fmt: skip
def test_the_names_of_mesh_axes_are_checked_before_a_mesh_is_made(capsys, tmp_path, axes, said):
    path = tmp_path / "own.toml"
    path.write_text(f'base = "megatron-1d"\n[mesh]\naxes = {axes}\n')
    code, out, err = run(capsys, "check", str(path), "--devices", "8")
    assert (code, out) == (2, "")
    assert err.startswith(f"LayoutError: the layout '{path}' {said}")


def test_the_keys_of_a_section_or_of_all(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    one, whole = (run(capsys, "keys", *flags)[1] for flags in (["ffn"], []))
    assert "ffn.w_in" in one
    assert "attention.w_q" not in one
    assert all(f" {key} " in whole for key in KEYS)
    code, _, error = run(capsys, "keys", "fnn")
    assert (code, error.splitlines()[0]) == (2, "LayoutError: no section is called 'fnn'.")


def test_a_layout_is_checked_for_sizes_and_a_mesh(capsys):
    sizes = ["--sizes", "B=8,H=8,K=8"]
    code, out, _ = run(capsys, "check", "megatron-1d", *sizes, "--mesh", "x=2,y=4")
    assert (code, out.split(" for ")[0]) == (0, "megatron-1d: 34 lines, no fault on x=2,y=4")
    code, _, error = run(capsys, "check", "megatron-1d", *sizes, "--mesh", "x=3,y=5")
    assert code == 2
    assert len(error.splitlines()) <= 8
    assert "dimension B has size 8, which mesh axis x (size 3) does not divide." in error
    assert error.endswith("  ... and 2 more.\n")
    _, _, whole = run(capsys, "check", "megatron-1d", *sizes, "--mesh", "x=3,y=5", "--all")
    assert "dimension K has size 8" in whole


def test_the_sizes_of_a_configuration_and_a_number_of_devices_are_checked(capsys):
    code, out, _ = run(capsys, "check", "megatron-1d", "--config", "llama-2-70b", "--devices", "64", "--batch", "16")
    assert code == 0
    assert "no fault on x=8,y=8,z=1 for B=16, " in out
    assert "E=8192" in out
    code, _, error = run(capsys, "check", "megatron-1d", "--config", "llama-2-70b", "--set", "ffn.w_in=EF_q")
    assert code == 2
    assert "the mesh has no axis q." in error


@pytest.mark.parametrize(("argv", "said"), [
    (["check", "zero-3", "--set", "ffn.w_in"], "--set reads KEY=SPEC, such as ffn.w_in=E_xF_y, not 'ffn.w_in'."),
    (["check", "zero-3", "--set", "foo=bar"], "no section of a layout is called 'foo'."),
    (["check", "zero-3", "--mesh", "x=2", "--devices", "2"],
     "--mesh already gives the number of devices; leave --devices out."),
    (["check", "zero-3", "--batch", "2"], "--batch and --length are for --config; write --sizes B=8,L=128."),
    (["check", "zero-3", "--szes", "B=2"], "Did you mean '--sizes'? gspmd layouts check --help lists all flags."),
    (["check", "zero-3", "--sizes", "B"], "'B' is not a name and a size, such as x=4."),
    (["check", "absent.toml"], "cannot read the layout file 'absent.toml': there is no such file."),
    (["show", "megatron"], "no layout is called 'megatron'.\n  Did you mean 'megatron-1d'?"),
    (["shwo"], "'shwo' is not one of list, show, keys, check, diff. Did you mean 'show'?"),
    ([], "the following arguments are required: SUBCOMMAND"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_message(capsys, argv, said):
    code, out, error = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert said in error
    assert len(error.splitlines()) <= 8


def test_the_lines_in_which_two_layouts_differ(capsys):
    code, out, _ = run(capsys, "diff", "megatron-1d", "megatron-sequence")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert code == 1
    assert rows[0] == ["attention.residual", "B_xLE", "B_xL_yzE"]
    assert ["decode.ffn.residual", "–", "B_xLE"] in rows
    assert run(capsys, "diff", "zero-1", "zero-1") == (0, "zero-1 and zero-1 have the same lines.\n", "")


def test_it_needs_no_jax():
    program = (
        "import sys; from gspmd.commands.main import main; "
        "main(['layouts', 'check', 'megatron-1d', '--config', 'tiny', '--mesh', 'x=8', '--batch', '8']); "
        "main(['layouts', 'list']); print({'jax', 'flax'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
