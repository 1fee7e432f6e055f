"""A search that a page asks for: its parts are those of `gspmd search`, and the layout that it finds can be used."""

import json
import re
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gspmd.commands.page.tasks import LongTasks
from gspmd.commands.search import shown
from gspmd.commands.search.settings import parse
from gspmd.commands.search.slice import Slice
from gspmd.layouts import Layout
from gspmd.page.tasks import Tasks
from gspmd.search.answers import Space, find
from gspmd.search.answers.document import remarks
from gspmd.search.answers.frontier import SEEN, frontier
from gspmd.search.answers.presets import picks_of
from gspmd.search.answers.why import why
from gspmd_models.search.phases import problem_of
from gspmd_models.search.workload import Workload

CONFIGS = Path(__file__).parents[2] / "configs"
SHOWN = {"config": "tiny", "layout": "megatron-1d", "mesh": "y=2", "batch": "16", "length": "64"}
ASKED = SHOWN | {"topology": "tpu-v5p:2x1x1", "lines": "ffn.hidden = B_yLF"}


@pytest.fixture(scope="module")
def tasks():
    made = LongTasks(CONFIGS)
    made.warm()
    return made


@pytest.fixture(scope="module")
def searched(tasks):
    """The parts of an answer, each once, and the texts about progress."""
    notes = []
    status, last = tasks.run("search", ASKED, notes.append)
    assert status == 200
    assert "token" in last, last
    parts = {name: part for note in notes for name, part in note.items() if name != "said"}
    return json.loads(json.dumps(parts | last)), [note["said"] for note in notes if "said" in note]


@pytest.fixture(scope="module")
def finding():
    """The answer of the functions themselves."""
    argv = ["--config", "tiny", "--batch", "16", "--length", "64"]
    settings, target = parse(argv), Slice.named("tpu-v5p:2x1x1")
    sizes = 16, 64, "bfloat16"
    workload = Workload(
        replace(settings.model, remat="full"), target.chip, *sizes, phase="train", microbatches=1,
        update=settings.update, fixed=(), weights="dtype", cache="dtype", source_length=0,
    )  # fmt: skip
    return find([Space(partial(problem_of, workload, {"y": 2}))], 0.9 * target.chip.hbm_bytes)


def test_the_parts_are_those_of_the_search(searched, finding):
    parts, said = searched
    found = parts["found"]
    best, answer = finding.best, finding.answer
    assert (found["seconds"], found["bytes"], found["bound"]) == (answer.seconds, answer.bytes, finding.bound)
    lines = {f"{line.section}.{line.key}".lstrip("."): line.text for line in best.phase.lines(answer.picks)}
    assert found["lines"] == lines
    assert found["proof"] == finding.proof
    costs = dict(remarks(best, answer))
    rows = {row["key"]: row for row in parts["lines"]}
    assert {key: row["spec"] for key, row in rows.items()} == lines
    for line in best.phase.lines(answer.picks):
        row = rows[f"{line.section}.{line.key}".lstrip(".")]
        if "said" in row:
            assert row["seconds"] == costs[line.choice].seconds
            assert row["more"] == costs[line.choice].more
    comments = re.findall(r"# (.*)", parts["toml"].partition("[mesh]")[2])
    assert [row.get("said") or f"with {row['with']}" for row in rows.values() if len(row) > 2] == comments
    assert all(row["next"]["spec"] in row["said"] for row in rows.values() if "said" in row)
    points = [(each.answer.bytes, each.answer.seconds) for each in frontier(best)]
    assert [(each["bytes"], each["seconds"]) for each in parts["frontier"]["points"]] == points
    assert any(text.startswith("seconds against bytes: 1 of") for text in said)


def test_the_shown_layout_is_priced_in_the_same_space(searched, finding):
    layout = Layout.load("megatron-1d").override({"ffn.hidden": "B_yLF"})
    mesh = {"x": 1, "y": 2, "z": 1}
    placed = picks_of(finding.best, finding.best.unlimited_search, layout.resolved(finding.best.sizes, mesh))
    priced = searched[0]["found"]["shown"]
    assert (priced["seconds"], priced["bytes"]) == (placed.seconds, placed.bytes)
    assert priced["lines"]["ffn.hidden"] == "B_yLF"
    assert priced["seconds"] > searched[0]["found"]["seconds"]


def test_the_figure_has_every_point_that_is_not_far_slower_than_the_fastest(searched):
    parts = searched[0]
    drawn, points = parts["frontier"]["figure"], parts["frontier"]["points"]
    near = [each for each in points if each["seconds"] <= SEEN * points[-1]["seconds"]]
    assert len(near) >= 2
    for point in near:
        assert f'data-bytes="{point["bytes"]!r}" data-seconds="{point["seconds"]!r}"' in drawn
    assert drawn.count('class="point"') == len(near) + 2
    assert 'data-name="shown"' in drawn
    assert "<script" not in drawn


def test_why_is_the_table_of_the_command(tasks, searched, finding):
    parts = searched[0]
    row = next(row for row in parts["lines"] if row["key"] == "ffn.w_in")
    status, answer = tasks.run("why", {"token": parts["token"]} | row["next"])
    assert status == 200
    wanted = why(finding.best, row["next"]["key"], row["next"]["spec"])
    assert [(each["name"], each["found"], each["asked"]) for each in answer["terms"][:-1]] == wanted.terms
    assert (answer["terms"][-1]["found"], answer["terms"][-1]["asked"]) == (wanted.best.seconds, wanted.answer.seconds)
    assert answer["held"]["asked"] == wanted.answer.bytes
    assert [tuple(each) for each in answer["lines"]] == wanted.lines
    printed = " ".join(_printed(shown.reasons(wanted)[0]).split())
    for name, figures in [
        *((each["name"], each["said"]) for each in answer["terms"]),
        ("memory", answer["held"]["said"]),
    ]:
        assert " │ ".join([name, *figures]) in printed
    assert answer["title"] in printed


def _printed(sheet) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(sheet)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"key": "ffn.w_im", "spec": "EF"}, "no line of the search is called 'ffn.w_im'"),
        ({"key": "ffn.w_in", "spec": "E_yF_y"}, "y"),
        ({"key": "ffn.w_in", "spec": "E_yFV"}, "ffn.w_in cannot be"),
        ({"key": "ffn.w_in", "spec": "EF", "token": "77"}, "this search is no longer kept"),
    ],
)
def test_a_question_that_is_none_has_one_message(tasks, searched, asked, message):
    _, answer = tasks.run("why", {"token": searched[0]["token"]} | asked)
    assert message in answer["fault"]["message"]


def test_the_layout_that_was_found_can_be_used(searched, tmp_path):
    parts = searched[0]
    (tmp_path / "found.toml").write_text(parts["toml"])
    own = "\n".join(f"{key} = {spec}" for key, spec in parts["found"]["lines"].items())
    asked = SHOWN | {"layout": "", "own": own, "mesh": parts["found"]["mesh"], "remat": parts["found"]["remat"]}
    _, used = Tasks(CONFIGS).run("layout", asked)
    _, loaded = Tasks(CONFIGS, tmp_path).run("layout", asked | {"own": "", "layout": "found.toml"})
    for name in ("totals", "rows", "kinds", "memory", "lines"):
        assert used[name] == loaded[name]
    (tmp_path / "layout.toml").write_text(used["toml"])
    assert Layout.load(tmp_path / "layout.toml").table == Layout.load(tmp_path / "found.toml").table
    _, changed = Tasks(CONFIGS).run("layout", asked | {"lines": "ffn.hidden = BLF_y"})
    assert (
        next(line for line in changed["lines"] if line["key"] == "ffn.hidden")["base"]
        == parts["found"]["lines"]["ffn.hidden"]
    )
    assert changed["totals"]["seconds"] != used["totals"]["seconds"]
    assert "--layout layout.toml" in changed["command"]
    assert "--model.remat full" in changed["command"]


@pytest.mark.parametrize(
    "line", ['ffn.w_in = EF"\\nbase = "/etc/passwd', "[base] = x", 'base = "x"', "ffn.w_in = ../x", "F.w = \x7f"]
)
def test_lines_that_no_search_writes_are_refused(line):
    status, answer = Tasks(CONFIGS).run("layout", SHOWN | {"layout": "", "own": line})
    assert status == 400, answer
    assert "is not one that a search writes" in answer["refused"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"topology": "tpu-v5p:9x9x9x9"}, "there is no topology"),
        ({"topology": "--out"}, "there is no topology"),
        ({"topology": ""}, "there is no topology"),
        ({"topology": "tpu-v5p:2x2x1"}, "has 2 devices, and tpu-v5p:2x2x1 has 4"),
        ({"batch": "--out=/tmp/x"}, "batch is '--out=/tmp/x'"),
        ({"config": "../tiny"}, "no config is called"),
        ({"lines": "ffn.hidden = B_qLF"}, "q"),
        ({"remat": "much"}, "much"),
    ],
)
def test_a_search_that_is_none_has_one_message(tasks, changed, message):
    status, answer = LongTasks(CONFIGS).run("search", ASKED | changed)
    assert status == 200
    assert message in answer["fault"]["message"]


def test_the_command_is_in_the_file(searched):
    text = searched[0]["toml"]
    command = "gspmd search --config tiny --topology tpu-v5p:2x1x1 --mesh y=2 --batch 16 --length 64"
    assert f"# found with    {command} --microbatches 1 --remat full" in text
