"""A compilation that a page asks for has the tables of the report, and a chip without a compiler has a reason."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from gspmd.annotate import PlanError
from gspmd.commands.page.compiling import sheet_record
from gspmd.commands.page.tasks import LongTasks
from gspmd.display.tables import Column, Sheet
from gspmd.hardware.chips import CHIPS
from gspmd.page import layout
from gspmd.page.tasks import Tasks

CONFIGS = Path(__file__).parents[2] / "configs"
SHOWN = {"config": "tiny", "layout": "megatron-1d", "mesh": "x=2,y=2", "batch": "16", "length": "64", "chip": "tpu-v5e"}


def test_a_table_of_gspmd_keeps_its_cells():
    sheet = Sheet("[bold]sent[/]", (Column("kind"), Column("bytes", "right")))
    sheet.add("[red]all-gather[/]", "8 kB")
    sheet.add("all", "8 kB", total=True)
    assert sheet_record(sheet) == {
        "title": "sent",
        "columns": [{"name": "kind", "number": False}, {"name": "bytes", "number": True}],
        "rows": [{"cells": ["all-gather", "8 kB"], "total": False}, {"cells": ["all", "8 kB"], "total": True}],
    }


def test_the_reason_why_nothing_can_be_compiled_is_told(monkeypatch):
    def refuse(name, chip):
        raise PlanError(f"cannot describe {name!r}: libtpu is not installed.")

    monkeypatch.setattr(layout, "require_libtpu", refuse)
    _, answer = Tasks(CONFIGS).run("layout", SHOWN)
    assert answer["uncompiled"] == "cannot describe 'tpu-v5e': libtpu is not installed."
    monkeypatch.setattr(layout, "require_libtpu", lambda name, chip: None)
    assert layout.compiler_fault(CHIPS["tpu-v5e"]) == ""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"topology": "tpu-v5e:7x77x7"}, "there is no topology"),
        ({"topology": "--json=/tmp/x"}, "there is no topology"),
        ({"layout": "/etc/passwd"}, "no layout is called"),
        ({"batch": "--hlo=/tmp/x"}, "batch is '--hlo=/tmp/x'"),
        ({"lowering": "--hlo"}, "--hlo"),
    ],
)
def test_a_compilation_that_is_none_has_one_message(changed, message):
    status, answer = LongTasks(CONFIGS).run("compile", SHOWN | {"topology": "tpu-v5e:2x2"} | changed)
    assert status == 200
    assert message in answer["fault"]["message"]


@pytest.mark.slow
def test_the_report_is_that_of_the_command(tmp_path, capsys):
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    from gspmd.commands import compile as command

    tasks, notes = LongTasks(CONFIGS), []
    tasks.warm()
    status, answer = tasks.run(
        "compile", SHOWN | {"topology": "tpu-v5e:2x2", "lines": "ffn.w_in = E_xF_y"}, notes.append
    )
    assert status == 200
    answer = json.loads(json.dumps(answer))
    assert {"said": "compiling"} in notes
    capsys.readouterr()
    flags = ["--config", "tiny", "--topology", "tpu-v5e:2x2", "--phase", "train", "--mesh", "x=2,y=2"]
    flags += ["--batch", "16", "--length", "64"]
    flags += ["--layout", "megatron-1d", "--set", "ffn.w_in=E_xF_y", "--json", os.fspath(tmp_path / "a.json")]
    settings = command.parse(flags)
    report = command.compiled(settings, command.topology(settings.topology), tell=lambda text: None)
    figures = json.loads(report.to_json())
    assert {**answer["figures"], "compile_seconds": 0} == {**figures, "compile_seconds": 0}
    comparison = report.ledger.compare(report.plan)
    assert answer["comparison"]["agrees"] == comparison.agrees
    printed = _printed(comparison.table())
    for row in answer["comparison"]["totals"]["rows"]:
        assert " │ ".join(cell for cell in row["cells"]) in printed or row["total"]
    assert len(answer["comparison"]["totals"]["rows"]) == len(comparison.totals) + 1
    assert answer["timeline"]["table"] == sheet_record(report.timeline.table())
    assert report.timeline.figure().body in answer["timeline"]["figure"]
    assert ["machine", "4 tpu-v5e devices, mesh x=2 y=2 z=1"] in answer["summary"]


def _printed(sheet) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(sheet)
    return " ".join(Text.from_ansi(captured.get()).plain.split())
