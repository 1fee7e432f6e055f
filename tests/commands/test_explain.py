"""scripts/explain.py: the figure, the plain data, and one clear message for bad input."""

import json
import sys
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import pytest

import gspmd
from gspmd.commands import explain as command

SCRIPT = Path(__file__).parents[2] / "scripts" / "explain.py"
EQUATION = "BLE_xyz, E_xF_yz -> BLF_yzx"
MESH = ["--mesh", "x=4,y=4,z=4"]
SIZES = ["--sizes", "B=512,L=1,E=18432,F=73728"]


@pytest.fixture(scope="module")
def explain():
    return SimpleNamespace(main=partial(command.run, script=SCRIPT.name))


@pytest.fixture
def run(explain, capsys):
    """A function (*arguments) -> (exit code, stdout, stderr)."""

    def call(*arguments: str):
        try:
            code = explain.main(list(arguments))
        except SystemExit as exit:
            code = exit.code
        return (code, *capsys.readouterr())

    return call


def test_the_figure_with_its_gradients(run):
    code, out, err = run(EQUATION, *MESH, *SIZES)
    assert (code, err) == (0, "")
    assert out.startswith(f"{EQUATION}\nB=512 L=1 E=18432 F=73728   mesh x=4 y=4 z=4   bfloat16   tpu-v4   blocking\n")
    assert "BLE_xyz              ── all-gather yz ────▶  BLE_x                   4.42 MB  53.2 µs" in out
    assert "gradient of operand 1: BLF_yzx, E_xF_yz -> BLE_xyz" in out
    assert "gradient of operand 2: BLF_yzx, BLE_x -> E_xF_yz" in out
    assert "\x1b[" not in out  # no color where nobody sees it


def test_the_figure_alone(run):
    code, out, _ = run(EQUATION, *MESH, *SIZES, "--no-gradients")
    assert code == 0
    assert "gradient" not in out


def test_plain_data(run):
    code, out, _ = run(EQUATION, *MESH, *SIZES, "--json")
    plan = json.loads(out)
    assert code == 0
    assert [(step["kind"], step["axes"]) for step in plan["steps"]] == [
        ("all-gather", ["y", "z"]),
        ("einsum", []),
        ("reduce-scatter", ["x"]),
    ]
    assert plan["wire_bytes"] == sum(step["wire_bytes"] for step in plan["steps"]) == 7962624
    assert [gradient["equation"] for gradient in plan["gradients"]] == [
        "BLF_yzx, E_xF_yz -> BLE_xyz",
        "BLF_yzx, BLE_x -> E_xF_yz",
    ]
    assert plan["mesh"] == {"x": 4, "y": 4, "z": 4}


def test_the_data_is_the_plans_own(run):
    sizes, mesh = {"B": 512, "L": 1, "E": 18432, "F": 73728}, {"x": 4, "y": 4, "z": 4}
    assert run(EQUATION, *MESH, *SIZES, "--json")[1].rstrip() == gspmd.plan(EQUATION, sizes, mesh).to_json()


def test_eighty_columns_show_every_figure(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(EQUATION, *MESH, *SIZES)
    assert max(map(len, out.splitlines())) <= 80
    assert "    ── reduce-scatter x ─▶  BLF_yzx                 3.54 MB  41.3 µs\n" in out


def test_options_reach_the_plan(run):
    options = ["--via", "BLE, EF_yz", "--chip", "h100", "--dtype", "float32", "--lowering", "xla", "--json"]
    plan = json.loads(run(EQUATION, *MESH, *SIZES, *options)[1])
    assert (plan["chip"], plan["lowering"], plan["dtypes"]) == ("h100", "xla", ["float32", "float32"])
    assert [step["after"] for step in plan["steps"] if step["operand"] == "operand 2"] == ["EF_yz"]


BAD = [
    (
        [EQUATION, *MESH, *SIZES, "--via", "BLE, EF, EF"],
        "a product has two operands, but this product has 3.\n  Write one spec for each of the two operands.",
    ),
    (["BE_x, EF ->> BF", *MESH, *SIZES], "explain.py: cannot read the equation 'BE_x, EF ->> BF'"),
    (["BLE_w, EF -> BLF", *MESH, *SIZES], "the mesh has no axis w.\n  The mesh has x, y and z."),
    (
        [EQUATION, *MESH, "--sizes", "B=512,L=1,E=18432,F=6"],
        "dimension F has size 6, which mesh axes y and z (size 4·4 = 16) do not divide.",
    ),
    (
        [EQUATION, *MESH, *SIZES, "--chip", "tpu-v9"],
        "explain.py: no chip is called 'tpu-v9'.\n  Did you mean 'tpu-v4'?",
    ),
    ([EQUATION, *MESH, *SIZES, "--dtype", "float33"], "explain.py: no dtype is called 'float33'."),
    ([EQUATION, *MESH, *SIZES, "--lowering", "loop"], "explain.py: no lowering is called 'loop'."),
    ([EQUATION, *MESH, *SIZES, "--via", "BLE"], "the specs do not have the operands' dimensions."),
    ([EQUATION, "--mesh", "x=4,y", *SIZES], "argument --mesh: 'y' is not a name and a size, such as x=4."),
    (
        [EQUATION, "--mesh", "x=-4", *SIZES],
        "argument --mesh: x has size '-4', which is not a positive whole number of at most 18 digits.",
    ),
    (
        [EQUATION, "--mesh", "x=²", *SIZES],
        "argument --mesh: x has size '²', which is not a positive whole number of at most 18 digits.",
    ),
    (
        [EQUATION, *MESH, "--sizes", f"B={10**24}"],
        f"argument --sizes: B has size '{10**24}', which is not a positive whole number of at most 18 digits.",
    ),
    ([EQUATION, "--mesh", f"x={10**17}", *SIZES], f"the mesh x={10**17} is too large.\n  A mesh has fewer than 2^40"),
    ([EQUATION, *MESH, "--sizes", "B=512"], "dimension L has no size."),
    ([EQUATION, "--mesh", "x=4,x=2", *SIZES], "argument --mesh: 'x=4,x=2' gives two sizes to one name."),
    ([EQUATION, "--mesh", "x=0,y=1,z=1", *SIZES], "--mesh: x has size '0', which is not a positive whole number"),
    (
        [EQUATION, "--mesh", "x=4,y=4,z=4,Z=4", *SIZES],
        "--mesh: mesh axes are named by a lowercase letter and then letters, digits or _, not 'Z'.",
    ),
    ([EQUATION, *MESH, "--sizes", "B=512,l=1"], "--sizes: a dimension is one capital letter, not 'l'."),
    ([EQUATION, *MESH, "--sizes", "B=-8"], "--sizes: B has size '-8', which is not a positive whole number of at most"),
    ([EQUATION, *MESH], "explain.py: the following arguments are required: --sizes"),
    ([EQUATION, *MESH, *SIZES, "--svg", "a.png"], "explain.py: argument --svg: 'a.png' does not end in .svg."),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_message_and_exit_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert "usage" not in err


def _plan() -> gspmd.Plan:
    sizes, mesh = {"B": 512, "L": 1, "E": 18432, "F": 73728}, {"x": 4, "y": 4, "z": 4}
    return gspmd.plan(EQUATION, sizes, mesh)


@pytest.mark.parametrize("gradients", [True, False])
def test_the_plan_is_drawn_into_a_file(run, tmp_path, gradients):
    file, flags = tmp_path / "plan.svg", [] if gradients else ["--no-gradients"]
    code, out, _ = run(EQUATION, *MESH, *SIZES, *flags, "--svg", str(file))
    assert code == 0
    assert out == run(EQUATION, *MESH, *SIZES, *flags)[1]
    assert file.read_text(encoding="utf-8") == _plan().figure(gradients=gradients).svg


def test_the_plan_is_drawn_as_png(run, tmp_path):
    pytest.importorskip("resvg_py")
    code, _, _ = run(EQUATION, *MESH, *SIZES, "--json", "--png", str(tmp_path / "plan.png"))
    assert code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_before_the_plan(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # messages shorten long paths
    files = ["--svg", "/nowhere/a.svg", "--png", "none/plan.png"]
    code, out, err = run(EQUATION, *MESH, *SIZES, *files)
    assert (code, out) == (2, "")
    assert err == (
        "explain.py: --svg /nowhere/a.svg: there is no folder '/nowhere'.\n"
        "--png none/plan.png: there is no folder 'none'.\n"
    )


def test_a_picture_that_fails_takes_nothing_else_with_it(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    files = ["--svg", str(tmp_path / "plan.svg"), "--png", str(tmp_path / "plan.png")]
    code, out, err = run(EQUATION, *MESH, *SIZES, *files)
    assert (code, out) == (2, run(EQUATION, *MESH, *SIZES)[1])
    assert (err.count("explain.py: "), "explain.py: cannot draw a PNG without resvg." in err) == (1, True)
    assert (tmp_path / "plan.svg").exists()


def test_without_resvg_a_png_names_its_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    code, out, err = run(EQUATION, *MESH, *SIZES, "--png", str(tmp_path / "plan.png"))
    assert (code, out) == (2, run(EQUATION, *MESH, *SIZES)[1])
    assert err == (
        "explain.py: cannot draw a PNG without resvg.\n  Install it with pip install 'gspmd[png]', or save an .svg.\n"
    )


def test_without_unicode(explain, monkeypatch):
    out = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert explain.main([EQUATION, *MESH, *SIZES]) == 0
    out.flush()
    assert b"-- all-gather yz ---->  BLE_x                   4.42 MB  53.2 us" in out.buffer.getvalue()


def test_the_script_is_short():
    assert len(SCRIPT.read_text().splitlines()) < 20
