"""Combinations of data, model, expert and context parallelism: one device's losses, and the planned bytes."""

import pytest

from benchmarks.combinations import REFUSED, ROWS, TRAINED, Outcome, line, outcome


def rows(refused):
    """Return the rows that train, or those that do not."""
    for number, row in enumerate(ROWS):
        if (row.reason != "") == refused:
            yield pytest.param(row, id=f"{number}-{row.name}")


@pytest.mark.slow
@pytest.mark.parametrize("row", [*rows(refused=False)])
def test_a_combination_trains_as_one_device_does_and_sends_what_was_planned(row):
    found = outcome(row)
    assert found.fell > 0.5, "there is nothing to compare in a curve that does not fall"
    assert found.is_green, found


@pytest.mark.parametrize("row", [*rows(refused=True)])
def test_a_combination_that_cannot_be_is_refused_with_the_reason(row):
    assert row.reason in outcome(row).refused


def test_the_page_has_every_row(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "combinations.md").read_text()
    assert TRAINED in page
    assert REFUSED in page
    told = [row.split("|")[1:4] for row in page[page.index(TRAINED) :].splitlines() if row.startswith("| ")]
    wanted = [line(row, Outcome()).split("|")[1:4] for row in ROWS]
    assert sorted(told) == sorted(
        [*wanted, *(head.split("|")[1:4] for text in (TRAINED, REFUSED) for head in text.split("\n"))]
    )
    assert "**" not in page[page.index(TRAINED) :], "a row is red, or sends what was not planned"
