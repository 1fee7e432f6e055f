"""Whatever is public prints anywhere: without Unicode, on narrow terminals, in notebooks; and it is copied and sent."""

import copy
import pickle
import re
import sys
from collections.abc import Callable
from html import unescape
from importlib.util import find_spec
from io import BytesIO, TextIOWrapper

import pytest

import gspmd
from gspmd.annotate import parse_equation
from gspmd.audit import Parting, Report, Topology, Verification, timeline, topology
from gspmd.audit.hlo import Array, parse
from gspmd.audit.offline import memory
from gspmd.display import console as printing
from gspmd.display.printed import Printed
from gspmd.hardware.chips import CHIPS
from gspmd.layouts import rank
from gspmd.tracing.program_plan import of_equation
from tests.references.hlo import HLO

SIZES, MESH = {"B": 64, "L": 128, "E": 1024, "F": 4096}, {"x": 4}
NAMES = (
    "Topology", "Spec", "Equation", "SpecError", "PlanError", "Layout", "Ranking", "Ranked", "Chip", "Plan", "Step",
    "ProgramPlan", "PlannedStep", "Ledger", "Entry", "Comparison", "Difference", "Timeline", "Report that fits",
    "Report", "Verification", "Parting",
)  # fmt: skip


@pytest.fixture(scope="module")
def objects() -> dict:
    """One of each public kind that is printed."""
    plan = gspmd.plan("BLE_x, E_xF -> BLF", SIZES, MESH, lowering="blocking")
    program = of_equation(plan)
    ledger = gspmd.ledger(HLO, MESH)
    module = parse(HLO)
    line = timeline(module, "tpu-v4", MESH)
    parting = Parting("looped", "value['größe']", 1.0, 0.5, 1e-5, (0, 1))
    buffer = memory.AllocatedArray(
        "argument", "params.w_in", Array("bf16", (8, 128)), 2048, "more chips, or fewer bits"
    )
    here = find_spec("libtpu") is not None
    chips = topology("tpu-v4:2x2x1") if here else Topology("tpu-v4:2x2x1", CHIPS["tpu-v4"], (2, 2, 1), ())
    held = chips, MESH, False, 7 * 10**10, 0, 2048, CHIPS["tpu-v4"].hbm_bytes
    try:
        gspmd.Spec.parse("B_xLE").local_shape((6, 2, 2), MESH)
    except gspmd.SpecError as error:
        raised = error
    ranking = rank(["megatron-1d", "zero-3"], sizes=SIZES, mesh=MESH)
    return {
        "Topology": chips,
        "Spec": gspmd.Spec.parse("B_xLE"),
        "Equation": parse_equation("BLE_x, E_xF -> BLF"),
        "SpecError": raised,
        "PlanError": gspmd.PlanError("size 4·4 = 16 does not divide"),
        "Layout": gspmd.Layout.load("megatron-1d"),
        "Ranking": ranking,
        "Ranked": ranking[0],
        "Chip": CHIPS["tpu-v4"],
        "Plan": plan,
        "Step": plan.steps[0],
        "ProgramPlan": program,
        "PlannedStep": program.entries[0],
        "Ledger": ledger,
        "Entry": ledger.entries[0],
        "Comparison": ledger.compare(program),
        "Difference": ledger.diff(gspmd.ledger(HLO.replace("bf16", "f32"), MESH)),
        "Timeline": line,
        "Report that fits": Report(*held[:2], True, *held[3:], program, ledger, line, module, HLO, (buffer,), 1.5),
        "Report": Report(*held, program, None, None, None, "", (buffer, buffer), 1.5, "Used 65.2 GB of 34.4 GB"),
        "Verification": Verification("größe", ("xla", "looped"), 3, (parting,), (("looped", "BE_x -> BE"),)),
        "Parting": parting,
    }


EACH = pytest.mark.parametrize("name", NAMES)

# Names and amounts that are there however narrow the terminal is.
SHOWN = {
    "Layout": ["megatron-1d", "w_in", "EF_yz"],
    "Ranking": ["megatron-1d", "zero-3", "12.6 MB"],
    "Chip": ["hbm_bandwidth", "1.2 TB/s", "network_seconds"],
    "ProgramPlan": ["all-gather", "18.9 MB"],
    "Ledger": ["jit_train_step", "all-gather", "6.14 kB", "the compiler"],
    "Comparison": ["all-gather", "18.9 MB", "6.14 kB", "1 × 12.6 MB", "the compiler"],
    "Difference": ["all-gather", "1 × 6.14 kB", "1 × 12.3 kB", "matrix products"],
    "Timeline": ["jit_train_step", "all-gather", "3.07 µs", "2.07 µs", "step"],
    "Report": ["70 GB", "34.4 GB", "params.w_in", "2 × 2.05 kB"],
    "Report that fits": ["34.4 GB", "6.14 kB", "all-gather", "3.07 µs"],
}


def _said(monkeypatch, encoding: str, shown: Callable[[], str]) -> str:
    """Return what `print` writes to a standard output of this encoding; `shown` is made while that stands there."""
    out = TextIOWrapper(BytesIO(), encoding=encoding, newline="\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        print(shown())
        out.flush()
    return out.buffer.getvalue().decode(encoding)


@EACH
@pytest.mark.parametrize("show", [str, repr])
def test_without_unicode_every_character_has_a_plain_one(name, show, monkeypatch, objects):
    whole, plain = (_said(monkeypatch, each, lambda: show(objects[name])) for each in ("utf-8", "ascii"))
    assert len(plain) == len(whole)
    lost = {before for before, after in zip(whole, plain) if after == "?" != before}
    assert lost <= {"ö", "ß"}


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", SHOWN)
def test_narrow_terminals_keep_names_and_amounts(name, columns, monkeypatch, objects):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(objects[name]).splitlines()
    if isinstance(objects[name], Printed):  # the others are lines of text, which a terminal folds itself
        assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert [word for word in SHOWN[name] if word not in text] == []
    assert "…" not in text


@pytest.mark.parametrize("name", [*SHOWN, "Plan"])
def test_what_is_printed_is_shown_in_a_notebook_too(name, objects):
    html = objects[name]._repr_html_()
    assert html.startswith('<div class="gspmd-printed"><style>')
    assert [word for word in SHOWN.get(name, ["all-gather", "18.9 MB"]) if word not in _words(html)] == []


def _words(html: str) -> str:
    """Return the text of HTML, without its style."""
    return " ".join(unescape(re.sub("<[^>]*>", " ", re.sub("<style>.*?</style>", "", html, flags=re.S))).split())


def test_every_kind_is_here(objects):
    assert tuple(objects) == NAMES


@EACH
@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))],
                         ids=["copy", "deepcopy", "pickle"])  # fmt: skip
def test_copies_say_the_same(name, made, objects):
    given = objects[name]
    if name.startswith("Report"):
        pytest.importorskip("libtpu")  # a copy's topology has its devices from there
    again = made(given)
    assert type(again) is type(given)
    assert (str(again), repr(again)) == (str(given), repr(given))
    if name not in ("SpecError", "PlanError", "Plan", "Ranking", "Ranked"):  # these are equal to nothing but themselves
        assert again == given


def test_a_console_speaks_without_unicode_and_as_wide_as_its_reader_reads(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    for stderr in (False, True):
        out = TextIOWrapper(BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stderr" if stderr else "stdout", out)
        console = printing.console(120, stderr=stderr)
        assert console.width == 120
        console.print("4 × 2 µs …")
        out.flush()
        assert out.buffer.getvalue() == b"4 x 2 us ~\n"
    monkeypatch.setenv("COLUMNS", "60")
    assert printing.console(120).width == 60
