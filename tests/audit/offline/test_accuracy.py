"""docs/accuracy.md has the figures of the pages that it sums up."""

import re
from importlib import import_module
from pathlib import Path
from statistics import median

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "accuracy.md"


@pytest.fixture(scope="module")
def accuracy(benchmarks):
    """benchmarks/accuracy.py as a module."""
    return import_module("accuracy")


def test_the_page_is_what_the_benchmark_writes(accuracy):
    page, found = PAGE.read_text(), accuracy.rows()
    for name, lines in (("kinds", accuracy.kinds(found)), ("rows", accuracy.table(found))):
        begin, end = accuracy.MARKS[name]
        assert page.partition(begin)[2].partition(end)[0].strip() == "\n".join(lines)


def test_no_row_of_a_page_is_left_out(accuracy):
    """Whatever came out: each ratio that a page shows in its own table is a row here."""
    found = accuracy.rows()
    shown = {
        "gpus.md": re.findall(r"\| \*\*(\d\.\d\d)\*\* \|", PAGE.with_name("gpus.md").read_text()),
        "mfu.md": re.findall(
            r"^\| (?:llama|mixtral|dense).* \| \d\.\d\d \| \*\*", PAGE.with_name("mfu.md").read_text(), re.M
        ),
    }
    measured = [row for row in found if row.page == "gpus.md#simulated-and-measured"]
    assert len(shown["gpus.md"]) == sum(row.page.startswith("gpus.md") for row in found) - len(measured)
    assert len(shown["mfu.md"]) == sum(row.page.startswith("mfu.md") for row in found)
    of_tpu7x = PAGE.with_name("plans.md").read_text().partition("<!-- microbenchmarks: ")[2].partition("<!-- end of")[0]
    assert len(re.findall(r"^\| (?:product|gather)", of_tpu7x, re.M)) == sum("TPU7x" in row.kind for row in found) > 0
    gpus = PAGE.with_name("gpus.md").read_text()
    tables = (
        gpus.partition(f"<!-- {kind}: ")[2].partition(f"<!-- end of {kind}")[0] for kind in ("training", "decoding")
    )
    assert len(measured) == sum(len(re.findall(r"^\| .*\d \|", table, re.M)) for table in tables) > 10


def test_a_ratio_is_of_seconds(accuracy):
    """More tokens a second are fewer seconds."""
    for row in accuracy.rows():
        wanted, got = (float(re.match(r"[\d.,]+", text)[0].replace(",", "")) for text in (row.published, row.predicted))
        if "tokens/s" in row.published:
            assert row.ratio == pytest.approx(wanted / got)
        elif row.published.split()[1] == row.predicted.split()[1]:
            assert row.ratio == pytest.approx(got / wanted, abs=0.012)  # pages round
    by_kind = [row.ratio for row in accuracy.rows() if row.kind == "decoding, TPU"]
    assert f"| decoding, TPU | {len(by_kind)} | **{median(by_kind):.2f}** |" in PAGE.read_text()
