"""The compilation that a page asks for: what `gspmd compile` does, for the page's layout, with ledger and timeline."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.text import Text

from gspmd import host
from gspmd.audit import Report, topology
from gspmd.commands import compile as offline
from gspmd.commands.search.slice import Slice
from gspmd.display.tables import Sheet
from gspmd.display.units import mesh_text
from gspmd.page.equation import inline
from gspmd.page.layout import LayoutAnswer, LayoutRequest, Shelf

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class CompileRequest(LayoutRequest):
    """A request to compile the page's layout for a slice."""

    topology: str = ""


def compiled(request: CompileRequest, shelf: Shelf, tell: Tell) -> dict[str, Any]:
    """Compile the training step of a request, and return the report.

    Raises:
        NotationError, ConfigError: the request names something that does not exist or does not fit, or a chip whose
            compiler is not installed.
    """
    shown = LayoutAnswer(request, shelf)
    name = Slice.named(request.topology).name
    host.keep_compiled(False)  # JAX cannot read back programs compiled for devices that are not attached.
    say = lambda text: tell({"said": text})  # noqa: E731
    with TemporaryDirectory() as folder:
        if shown.own:
            layout = str(Path(folder, "found.toml"))
            Path(layout).write_text(shown.document(shown.own), encoding="utf-8")
        else:
            layout = shelf.layouts()[request.layout]
        argv = ["--config", str(shelf.path(request.config)), "--topology", name, "--phase", "train"]
        argv += ["--mesh", mesh_text(shown.mesh), "--batch", f"{shown.batch}", "--length", f"{shown.length}"]
        argv += ["--microbatches", f"{shown.microbatches}"]
        argv += ["--dtype", str(shown.subject.dtype)]
        settings = offline.parse(argv)
        # Typed texts are passed as values, and never among the flags.
        changes = tuple(f"{key}={text}" for key, text in shown.changes.items())
        sharding = replace(settings.sharding, layout=layout, set=changes, lowering=request.lowering or None)
        settings = replace(settings, sharding=sharding, model=shown.model)
        report = offline.compiled(settings, topology(name), tell=say)
    return report_record(report)


def report_record(report: Report) -> dict[str, Any]:
    """Return a report as plain data, with its tables as `gspmd compile` prints them."""
    line = report.timeline
    facts = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in report.summary().columns]
    answer: dict[str, Any] = {
        "topology": report.topology.name,
        "fits": report.fits,
        "reason": report.reason,
        "figures": json.loads(report.to_json()),
        "summary": [list(row) for row in zip(*facts, strict=True)],
        "warnings": [*line.warnings] if line else [],
        "notes": [*line.notes] if line else [],
    }
    if report.ledger and line:
        comparison = report.ledger.compare(report.plan)
        answer["comparison"] = {
            "agrees": comparison.agrees,
            "totals": sheet_record(comparison.table()),
            "steps": sheet_record(comparison.steps_table()) if comparison.differing else None,
        }
        answer["timeline"] = {"table": sheet_record(line.table()), "figure": inline(line.figure())}
    return answer


def sheet_record(sheet: Sheet) -> dict[str, Any]:
    """Return a table as plain data.

    >>> from gspmd.display.tables import Column
    >>> table = Sheet("bytes", (Column("kind"), Column("sent", "right")))
    >>> table.add("[red]all-gather[/]", "8 kB")
    >>> sheet_record(table)["rows"]
    [{'cells': ['all-gather', '8 kB'], 'total': False}]
    """
    return {
        "title": Text.from_markup(sheet.title).plain,
        "columns": [{"name": each.name, "number": each.justify == "right"} for each in sheet.columns],
        "rows": [
            {"cells": [Text.from_markup(cell).plain for cell in cells], "total": total} for cells, total in sheet.rows
        ],
    }
