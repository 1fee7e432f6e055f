"""What the pages print is what the code does."""

import doctest
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["plans.md", "looped.md"])
def test_examples_of_the_pages_run(page):
    found = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert found.attempted > 0
    assert found.failed == 0


def test_readme_opens_with_an_example_and_its_printed_plan():
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (_, code), (_, printed) = blocks[0], blocks[1]
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "README.md", "exec"), {})
    assert out.getvalue() == printed


def test_links_of_the_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
