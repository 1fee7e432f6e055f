"""Pictures of README.md and docs: each carries how it was made, and its pages say the same (gspmd.display.images)."""

import re
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from tests.pages import ROOT

PICTURES = sorted((ROOT / "docs" / "images").glob("*.png"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def carried(picture: Path) -> dict[str, str]:
    """Return the texts that a picture carries."""
    with Image.open(picture) as image:
        return image.info


def pages_of(picture: Path) -> dict[str, str]:
    """Return the texts of the pages that show a picture, by name; commands over several lines are joined."""
    texts = {page.name: page.read_text() for page in PAGES}
    return {
        name: re.sub(r"\s+", " ", text.replace("\\\n", " ")) for name, text in texts.items() if picture.name in text
    }


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_of_this_version_or_its_page_says_of_which(picture):
    made = carried(picture)["Software"]
    pages = pages_of(picture)
    assert pages, "no page shows it"
    for name, text in pages.items():
        assert made == f"gspmd {VERSION}" or made in text, f"{name} shows a picture by {made}: draw it anew, or say so"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_the_figures_of_a_picture_are_those_of_its_pages(picture):
    figures = carried(picture)["Description"]
    assert NUMBER.search(figures)
    for name, text in pages_of(picture).items():
        there = set(NUMBER.findall(text))
        assert set(NUMBER.findall(figures)) <= there, f"{name} has other figures than its picture: {figures}"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_the_command_of_a_picture_is_on_its_page_or_in_the_script(picture):
    command = carried(picture)["Source"]
    script = re.search(r"benchmarks/\w+\.py", command)
    texts = [*pages_of(picture).values(), *([(ROOT / script[0]).read_text()] if script else [])]
    assert any(command in text for text in texts), command
