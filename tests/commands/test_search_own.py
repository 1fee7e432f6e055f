"""`gspmd search --model`: what it writes trains to one loss curve and compiles as planned; exit codes; refusals."""

import importlib
import json
from importlib import util

import jax
import jax.numpy as jnp
import pytest

import gspmd
from gspmd.commands import compile as compiling
from gspmd.commands import train
from gspmd.commands.search import run
from gspmd.layouts import Layout
from gspmd.search import buckets
from gspmd.training import OptimizerConfig
from gspmd.training.model import Own
from gspmd.training.step import Update, abstract_program, jit_step
from tests.commands.test_own_model import flags, folder  # noqa: F401
from tests.training.model.test_own import Tiny

SLICE = ["--topology", "tpu-v5e:4x2"]
needs_libtpu = pytest.mark.skipif(util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")


def asked(name, *more):
    return ["--model", f"{name}:Tiny", "--layout", "tiny.toml", "--batch", "8", "--length", "16", *more]


def losses(folder, name, out, *more):  # noqa: F811
    assert train.run(flags(name, "--out", out, *more)) == 0
    rows = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


# So small a model is whole on every device where memory is not scarce; with little of it much is sharded.
@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("topology", "memory", "mesh", "count"),
    [
        ("tpu-v5e:4x2", "3.3e-6", {"x": 4, "y": 2}, 1),
        ("tpu-v5e:4x2", "1e-5", {"x": 4, "y": 2}, 2),
        ("tpu-v5e:2x2", "6e-6", {"x": 2, "y": 2}, 2),
        ("tpu-v5e:2x1", "0.9", {"x": 2}, 1),
        ("tpu-v5e:1x1", "0.9", {"x": 1}, 1),
    ],
)
def test_what_is_found_trains_to_one_curve_and_compiles_as_planned(
    folder, capsys, make_mesh, topology, memory, mesh, count  # noqa: F811
):  # fmt: skip
    here, name = folder
    named = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    given = ["--topology", topology, "--memory", memory, "--mesh", named, "--microbatches", str(count)]
    assert run(asked(name, *given, "--dtype", "float32", "--out", "found.toml")) == 0
    assert "Planned, not compiled: --compile 3 asks the compiler." in capsys.readouterr().out
    text = (here / "found.toml").read_text()
    assert text.startswith(f"# Tiny: a layout for training on {topology}, found by exact search.\n")
    assert f"# mesh       {named}: " in text
    assert " is more than 0.05% faster by the plan" in text
    assert "; next " in text or topology == "tpu-v5e:1x1"
    used = next(line for line in text.splitlines() if line.startswith("# to be used"))
    assert used.endswith(
        f"gspmd train --model {name}:Tiny --layout found.toml --mesh {named} --batch 8 --length 16 "
        f"--microbatches {count} --dtype float32"
    )
    layout = Layout.load("found.toml")
    assert layout.axes == tuple(mesh)
    if memory != "0.9":
        assert layout["mixer.w_in"] != "EF" or layout.optimizer("mixer.w_in") != "EF"

    found = losses(here, name, "runs/found", "--layout", "found.toml", "--mesh", named, "--microbatches", str(count))
    alone = losses(here, name, "runs/alone", "--mesh", "x=1,y=1", "--devices", "1")
    assert found == pytest.approx(alone, rel=1e-4)

    real, update = make_mesh(mesh), Update(OptimizerConfig(), 4, count)
    with jax.set_mesh(real), gspmd.lowering(layout.lowering):
        step, *arguments = abstract_program(Own(Tiny(), jnp.float32), update, 8, 16)(layout, real)
        made = jit_step(step, arguments[0])
        comparison = gspmd.ledger(made.lower(*arguments).compile()).compare(gspmd.trace(made, *arguments))
    assert comparison.agrees, str(comparison)


@pytest.mark.slow
def test_every_mesh_of_the_slice_is_searched_and_the_layout_printed(folder, capsys):  # noqa: F811
    here, name = folder
    (here / "run.toml").write_text(
        f'[model]\nclass = "{name}:Tiny"\nembed = 32\n[sharding]\nlayout = "tiny.toml"\n'
        "[training]\nbatch = 8\nlength = 16\nmicrobatches = 2\n"
    )
    given = ["--config", "run.toml", *SLICE, "--model.layers", "3", "--phase", "train"]
    assert run(given) == 0
    said = capsys.readouterr().out
    assert (
        "# proved     no layout on 2 meshes is more than 0.05% faster by the plan; "
        "in 2 to 8 microbatches, none is more than 2.00% faster" in said
    )
    assert "# step       batch 8, length 16, bfloat16" in said
    assert "gspmd train --config run.toml --model.layers 3 --layout FILE --mesh " in said
    assert " a step, no layout costs less than " in said
    (here / "found.toml").write_text(said[: said.rindex("\n\n")])
    assert Layout.load("found.toml")["mixer.w_in"]
    assert run([*given, "--microbatches", "2"]) == 0
    assert "# step       batch 8, length 16 in 2 microbatches, bfloat16" in capsys.readouterr().out


@pytest.mark.slow
def test_a_line_is_asked_about_and_memory_drawn_against_seconds(folder, capsys):  # noqa: F811
    here, name = folder
    files = ["--json", "found.json", "--frontier", "found.png", "--out", "found.toml"]
    assert run(asked(name, *SLICE, *files, "--why", "mixer.w_in=E_xF", "--why", "mixer.w_im=EF")) == 2
    said = capsys.readouterr()
    assert "mixer.w_in = E_xF: " in said.out
    assert "no line of the search is called 'mixer.w_im'" in said.err
    figures = json.loads((here / "found.json").read_text())
    assert figures["why"][0]["lines"]["mixer.w_in"] == "E_xF"
    assert figures["why"][0]["seconds"] >= figures["seconds"]
    assert figures["frontier"][-1]["seconds"] <= figures["seconds"]
    assert (here / "found.png").stat().st_size > 10_000
    # The same search by the function, which is exact where the command's answer is within a two-thousandth.
    program = abstract_program(Own(Tiny(), jnp.bfloat16), Update(OptimizerConfig(), 4), 8, 16)
    found = gspmd.search(program, "tiny.toml", figures["mesh"], chip="tpu-v5e")
    assert figures["seconds"] == pytest.approx(found.seconds, rel=6e-4)


def test_lines_that_are_given_stay(folder):  # noqa: F811
    _, name = folder
    given = ["--mesh", "x=4,y=2", "--fixed", "mixer.w_in=E_xF", "--fixed", "mixer.hidden=BLF_y", "--out", "found.toml"]
    assert run(asked(name, *SLICE, *given)) == 0
    layout = Layout.load("found.toml")
    assert (layout["mixer.w_in"], layout["mixer.hidden"]) == ("E_xF", "BLF_y")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--phase", "decode", "--stages", "--remat", "full", "--weights", "int8"],
         "--stages, --remat, --weights int8, --phase decode: only for the models that come with gspmd; leave them"),
        (["--why", "a"], "--why reads KEY=SPEC, such as ffn.w_in=EF_x, not 'a'."),
        (["--layout", ""], "--layout is empty; give it a value, or leave it out."),
        (["--layout", "megatron-1d"], "Tiny needs a layout file: the preset 'megatron-1d' has no lines mixer."),
        (["--layout", "auto"], "no layout is called 'auto'."),
        (["--microbatches", "3"], "3 microbatches do not divide a batch of 8; choose a divisor."),
        (["--batch", "0"], "batch must be positive, but is 0."),
        (["--memory", "2"], "--memory is the fraction of memory that may be used"),
        (["--mesh", "x=4"], "--mesh x=4 has 4 devices, and tpu-v5e:4x2 has 8; --topology names another slice."),
        (["--out", "found.png"], "--out writes a TOML file, whose name ends in .toml, not 'found.png'."),
        (["--out", "no/found.toml"], "--out no/found.toml: there is no folder 'no'."),
        (["--fixed", "mixer.w_in"], "--fixed reads KEY=SPEC, such as ffn.w_in=EF_x, not 'mixer.w_in'."),
        (["--fixed", "mixer.w_inn=EF"], "Did you mean 'mixer.w_in'?"),
        (["--fixed", "mixer.w_in=E_zF"], "cannot fix mixer.w_in = 'E_zF': the mesh has no axis z."),
        (["--fixed", "mixer.w_in=FE"], "cannot fix mixer.w_in = 'FE': its dimensions must be EF."),
        (["--topology", "tpu-v5e:3x3x3x3"], "tpu-v5e"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_one_message(folder, capsys, more, message):  # noqa: F811
    _, name = folder
    assert run(asked(name, *SLICE, *more)) == 2
    assert message in capsys.readouterr().err


def test_a_layout_that_training_refuses_is_refused(folder, capsys):  # noqa: F811
    here, name = folder
    layout = here / "tiny.toml"
    layout.write_text(layout.read_text() + '[dimensions]\nP = "positions"\n')
    assert run(asked(name, *SLICE)) == 2
    assert "dimension P is learned positions in every layout.\n  Take another letter." in capsys.readouterr().err


def test_adapters_of_a_file_are_refused(folder, capsys):  # noqa: F811
    here, name = folder
    (here / "run.toml").write_text(f'[model]\nclass = "{name}:Tiny"\n[lora]\nrank = 4\n')
    assert run(["--config", "run.toml", *SLICE]) == 2
    said = capsys.readouterr().err
    assert "leave [lora] out, or freeze parameters." in said
    assert "its lines come from a layout file; give --layout FILE, of which only dimensions are used." in said


def test_nothing_fits(folder, capsys):  # noqa: F811
    _, name = folder
    assert run(asked(name, *SLICE, "--memory", "1e-6")) == 1
    said = capsys.readouterr().err
    assert "No layout fits tpu-v5e:4x2: the smallest, on mesh " in said
    assert "Otherwise use a larger --memory" in said


def test_an_interrupt_writes_the_best_so_far(folder, monkeypatch, capsys):  # noqa: F811
    finding, solved = importlib.import_module("gspmd.search.answers.finding"), []
    first = finding.Candidate.solve

    def solve(candidate):
        if solved:
            raise KeyboardInterrupt
        solved.append(candidate)
        return first(candidate)

    monkeypatch.setattr(finding.Candidate, "solve", solve)
    _, name = folder
    assert run(asked(name, *SLICE, "--out", "found.toml")) == 130
    assert "Interrupted. The best layout so far is written to found.toml" in capsys.readouterr().err
    Layout.load("found.toml")


def test_a_mesh_that_lacks_the_axis_of_a_given_line_is_left_out_and_said(folder, capsys):  # noqa: F811
    _, name = folder
    assert run(asked(name, *SLICE, "--fixed", "mixer.w_in=EF_y", "--microbatches", "1")) == 0
    why = "cannot fix mixer.w_in = 'EF_y': the mesh has no axis y"
    proof = f"no layout on this mesh (x=8 cannot be searched: {why}) is more than"
    assert proof in capsys.readouterr().out


def test_a_mesh_whose_lines_have_too_many_combinations_is_left_out(folder, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("gspmd.search.buckets.LARGEST", 200)
    buckets._eliminated.cache_clear()  # another test may have searched problems of these shapes
    _, name = folder
    assert run(asked(name, *SLICE, "--microbatches", "1")) == 0
    said = capsys.readouterr().out
    assert "no layout on this mesh (x=4,y=2 cannot be searched: the lines mixer.stream, " in said
    assert "combinations, more than the 2e+02 that can be searched) is more than" in said


@pytest.mark.slow
@needs_libtpu
def test_what_is_found_is_compiled_for_the_slice(folder, capfd):  # noqa: F811
    here, name = folder
    given = [*SLICE, "--batch", "64", "--length", "64"]
    assert run(asked(name, *given, "--mesh", "x=4,y=2", "--memory", "1e-4", "--out", "found.toml")) == 0
    assert run(asked(name, *given, "--mesh", "x=4,y=2", "--compile", "1", "--microbatches", "1")) == 0
    assert "compiled for the slice, the fastest first" in capfd.readouterr().out
    compiled = ["--model", f"{name}:Tiny", "--layout", "found.toml", "--mesh", "x=4,y=2", "--json", "figures.json"]
    assert compiling.run([*compiled, *given]) == 0
    assert json.loads((here / "figures.json").read_text())["fits"]
