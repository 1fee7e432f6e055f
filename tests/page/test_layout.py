"""A layout's answer: its numbers are those of `gspmd.trace`; its file and its command are the layout."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import gspmd
from gspmd.display.units import amount_of_bytes, amount_of_seconds
from gspmd.hardware.chips import CHIPS
from gspmd.layouts import Layout
from gspmd.lowerings.in_force import planned_for
from gspmd.page.layout import Shelf
from gspmd.page.tasks import Tasks
from gspmd.reading import read_toml
from gspmd.training import OptimizerConfig
from gspmd.training.step import Update, abstract_program
from gspmd.training.toml import from_mapping
from gspmd_models import ModelConfig
from gspmd_models.step import Language

CONFIGS = Path(__file__).parents[2] / "configs"
ASKED = {
    "config": "tiny",
    "layout": "megatron-1d",
    "mesh": "x=2,y=2",
    "batch": "16",
    "length": "64",
    "dtype": "float32",
}


def _run(given, folder: Path | None = None) -> dict:
    status, answer = Tasks(CONFIGS, folder).run("layout", given)
    assert status == 200, answer
    return json.loads(json.dumps(answer))


def _traced(layout: Layout, microbatches: int = 1):
    model = from_mapping(ModelConfig, read_toml(CONFIGS / "tiny.toml")["model"])
    subject, mesh = Language(model, jnp.dtype("float32")), layout.complete_mesh({"x": 2, "y": 2})
    layout = layout.resolved(subject.sizes(16, 64), mesh)
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Explicit,) * len(mesh))
    with jax.sharding.use_abstract_mesh(abstract), gspmd.lowering("auto"), planned_for(CHIPS["tpu-v5p"]):
        step, *given = abstract_program(subject, Update(OptimizerConfig(), 1000, microbatches), 16, 64)(
            layout, abstract
        )
        return gspmd.trace(step, *given), given[0].params, mesh


@pytest.mark.parametrize("lines", ["", "ffn.w_in = E_xF_y\nffn.w_gate = E_xF_y"])
def test_the_numbers_are_those_of_the_trace(lines):
    answer = _run(ASKED | {"lines": lines})
    changes = dict(line.split(" = ") for line in lines.splitlines())
    plan, params, mesh = _traced(Layout.load("megatron-1d").override(changes))
    totals = answer["totals"]
    assert totals["seconds"] == plan.seconds - plan.hidden_seconds
    assert totals["wire_bytes"] == plan.wire_bytes
    assert totals["flops"] == plan.flops
    assert totals["said_seconds"] == amount_of_seconds(totals["seconds"])
    assert totals["said_wire_bytes"] == amount_of_bytes(plan.wire_bytes)
    assert sum(row["seconds"] for row in answer["rows"]) == pytest.approx(totals["seconds"])
    assert sum(row["wire_bytes"] for row in answer["rows"]) == plan.wire_bytes
    assert sum(row["flops"] for row in answer["rows"]) == plan.flops
    sent = {}
    for (kind, axes), (count, wire) in plan.by_kind_and_axes().items():
        sent[f"{kind} {''.join(axes)}".rstrip()] = count, wire
    found = {row["name"]: (row["count"], row["wire_bytes"]) for row in answer["kinds"]}
    assert {name: each for name, each in found.items() if name in sent} == sent
    by_hand = sum(
        4 * leaf.size // leaf.sharding.num_devices * leaf.sharding.num_devices
        // (leaf.size // jnp.prod(jnp.array(leaf.sharding.shard_shape(leaf.shape)))).item()
        for leaf in jax.tree.leaves(params)
    )  # fmt: skip
    assert answer["memory"][0] == {"what": "parameters", "bytes": by_hand, "said_bytes": amount_of_bytes(by_hand)}
    assert answer["capacity"]["bytes"] == CHIPS["tpu-v5p"].hbm_bytes
    assert answer["mesh"] == ",".join(f"{axis}={size}" for axis, size in mesh.items())


def test_the_figure_is_that_of_the_layout():
    mesh = {"x": 2, "y": 2, "z": 1}
    model = from_mapping(ModelConfig, read_toml(CONFIGS / "tiny.toml")["model"])
    sizes = Language(model, jnp.dtype("float32")).sizes(16, 64)
    layout = Layout.load("megatron-1d").override({"ffn.hidden": "B_xLF"}).resolved(sizes, mesh)
    assert layout.figure().body in _run(ASKED | {"lines": "ffn.hidden = B_xLF"})["figure"]


def test_every_equation_names_its_lines():
    rows = {row["equation"]: row["lines"] for row in _run(ASKED)["rows"]}
    product = next(equation for equation in rows if equation.startswith("B_xLE, (EF_yz, EF_yz)"))
    assert rows[product] == ["ffn.residual", "ffn.w_in, ffn.w_gate", "ffn.hidden"]
    assert rows[f"gradient of {product}"] == rows[product]
    loss = next(equation for equation in rows if equation.startswith("B_xLE, V_yzE"))
    assert set(", ".join(rows[loss]).split(", ")) >= {"output.table", "output.logits"}


def test_the_file_is_the_layout(tmp_path):
    lines = "ffn.w_in = E_xF_y\noptimizer.ffn.w_out = F_{y,z,x}E\ndecode.ffn.hidden = BLF"
    answer = _run(ASKED | {"lines": lines, "lowering": "blocking"})
    (tmp_path / "layout.toml").write_text(answer["toml"])
    loaded = Layout.load(tmp_path / "layout.toml")
    changes = dict(line.split(" = ") for line in lines.splitlines())
    wanted = Layout.load("megatron-1d").override(changes).lowered("blocking")
    assert loaded.table == wanted.table
    assert loaded.overrides == wanted.overrides
    assert loaded.lowerings["default"] == "blocking"
    changed = {line["key"]: line["spec"] for line in answer["lines"] if line["spec"] != line["base"]}
    assert changed["ffn.w_in"] == "E_xF_y"
    assert set(changed) == {"ffn.w_in", "optimizer.ffn.w_out", "decode.ffn.hidden"}


def test_the_command_has_every_choice():
    answer = _run(ASKED | {"lines": "ffn.w_in = E_xF_y", "microbatches": "2", "lowering": "looped"})
    assert answer["command"] == (
        "gspmd train --config tiny --layout megatron-1d --mesh x=2,y=2,z=1 --batch 16 --length 64 --microbatches 2 "
        "--lowering looped --set ffn.w_in=E_xF_y"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": "../tiny"}, "no config is called '../tiny'"),
        ({"config": "/etc/passwd"}, "no config is called"),
        ({"layout": "/etc/passwd"}, "no layout is called '/etc/passwd'"),
        ({"layout": "../x.toml"}, "no layout is called"),
        ({"layout": "megatron-2d"}, "Did you mean 'megatron-1d'?"),
        ({"lines": "ffn.w_im = EF"}, "ffn.w_im"),
        ({"lines": "ffn.w_in = E_qF"}, "E_qF"),
        ({"mesh": "q=2"}, "cannot use layout 'megatron-1d' on this mesh"),
        ({"batch": "0"}, "batch is '0'"),
        ({"batch": "3"}, "dimension B"),
        ({"chip": "tpu"}, "no chip is called 'tpu'"),
    ],
)
def test_a_fault_has_one_message(changed, message):
    assert message in _run(ASKED | changed)["fault"]["message"]


def test_a_line_without_a_spec_is_refused():
    status, answer = Tasks(CONFIGS).run("layout", ASKED | {"lines": "ffn"})
    assert (status, answer) == (
        400,
        {"refused": "the line 'ffn' of a layout is not KEY = SPEC, such as ffn.w_in = E_xF_y."},
    )


def test_only_files_of_the_folder_are_offered(tmp_path):
    folder = tmp_path / "layouts"
    folder.mkdir()
    (folder / "mine.toml").write_text('base = "megatron-1d"\n[ffn]\nw_in = "E_xF_y"\n')
    (folder / "second.toml").write_text('base = "mine.toml"\n')
    secret = tmp_path / "secret.toml"
    secret.write_text('base = "zero-3"\n')
    os.symlink(secret, folder / "link.toml")
    (folder / "based.toml").write_text('base = "../secret.toml"\n')
    (folder / "chain.toml").write_text('base = "based.toml"\n')
    offered = set(Shelf(CONFIGS, folder).layouts()) - set(Shelf(CONFIGS).layouts())
    assert offered == {"mine.toml", "second.toml"}
    answer = _run(ASKED | {"layout": "second.toml"}, folder)
    assert next(line["spec"] for line in answer["lines"] if line["key"] == "ffn.w_in") == "E_xF_y"
    for name in ("link.toml", "based.toml", "chain.toml"):
        assert "no layout is called" in _run(ASKED | {"layout": name}, folder)["fault"]["message"]


def test_configs_that_name_a_class_are_not_offered(tmp_path):
    (tmp_path / "own.toml").write_text('[model]\nclass = "os:system"\n')
    (tmp_path / "tiny.toml").write_text((CONFIGS / "tiny.toml").read_text())
    assert set(Shelf(tmp_path).configs()) == {"tiny"}


@pytest.mark.parametrize(("changed", "kept"), [
    ({}, 32 * (16 // 2) * 64 * 4096 * 4),  # under remat full every block keeps its input, B_xLE in float32
    ({"microbatches": "2"}, 32 * (8 // 2) * 64 * 4096 * 4),  # those of one microbatch at a time
])  # fmt: skip
def test_what_blocks_keep_is_that_of_one_microbatch(changed, kept):
    status, answer = Tasks(CONFIGS).run("kept", ASKED | {"config": "llama-3.1-8b", "remat": "full"} | changed)
    assert status == 200
    assert answer["kept"] == {"bytes": kept, "said_bytes": amount_of_bytes(kept)}
    # The state as the page lists it: four arrays like the parameters, of which Adam has two.
    total = kept + sum(row["bytes"] for row in _run(ASKED | {"config": "llama-3.1-8b"})["memory"])
    assert answer["all"] == {"bytes": total, "said_bytes": amount_of_bytes(total)}


def test_a_model_whose_activations_are_in_host_memory_is_shown_under_every_remat(tmp_path):
    """Under remat none, activations have no names and stay on the device."""
    table = (CONFIGS / "llama-3.1-8b.toml").read_text()
    assert "[model]\n" in table
    (tmp_path / "moved.toml").write_text(table.replace("[model]\n", "[model]\noffload = true\n"))
    kept = {}
    for remat in ("full", "none"):
        status, answer = Tasks(tmp_path).run("kept", ASKED | {"config": "moved", "remat": remat})
        assert status == 200
        kept[remat] = answer["kept"]["bytes"]
    assert kept["full"] == 0 < kept["none"]


@pytest.mark.parametrize("config", ["tiny", "llama-3.1-8b"])
@pytest.mark.parametrize("spare", [0, -1000])
def test_memory_beyond_that_of_the_chip_is_said(config, spare, monkeypatch):
    asked = ASKED | {"config": config, "remat": "full"}
    has = Tasks(CONFIGS).run("kept", asked)[1]["all"]["bytes"] + spare
    monkeypatch.setattr("gspmd.page.layout.chip", lambda name: replace(CHIPS[name], hbm_bytes=has))
    answer = Tasks(CONFIGS).run("kept", asked)[1]
    assert (answer["over"], answer["capacity"]) == ("1 kB" if spare else "", has)
    assert ("kept" in answer) == (config != "tiny")  # Where it is not predicted, the rest alone may be too much.


def test_what_is_kept_is_not_predicted_for_every_model():
    assert Tasks(CONFIGS).run("kept", ASKED)[1]["reason"].startswith("not predicted for stages")
    assert Tasks(CONFIGS).run("kept", ASKED | {"lines": "ffn.w_in = E_qF"})[1]["fault"]["kind"] == "LayoutError"
