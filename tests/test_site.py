"""The site: a strict build of the pages and of the reference, in which every public name stands."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
REFERENCE = sorted(path.stem for path in (ROOT / "docs" / "api").glob("*.md"))
OUTSIDE = {"gspmd": "gspmd", "models": "gspmd_models", "checkpoints": "gspmd_models.checkpoints"}
PACKAGES = {name: f"gspmd.{name}" for name in REFERENCE} | OUTSIDE


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_of_the_reference_is_listed():
    listed = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in REFERENCE if f": api/{name}.md\n" not in listed] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", REFERENCE)
def test_every_public_name_has_its_entry(site, page):
    package = importlib.import_module(PACKAGES[page])
    text = (site / "api" / page / "index.html").read_text()
    public = [name for name in getattr(package, "__all__", ()) if name != "__version__"]
    missing = [
        name
        for name in public
        if not isinstance(value := getattr(package, name), ModuleType)
        and callable(value)
        and f'id="{package.__name__}.{name}"' not in text
        and f"<code>{package.__name__}.{name}</code>" not in text
    ]
    assert missing == []


@pytest.mark.slow
def test_links_that_leave_the_pages_lead_to_the_site_or_to_the_code(site):
    home, page, plans = ((site / path).read_text() for path in ("index.html", "page/index.html", "plans/index.html"))
    assert 'href="notation/"' in home
    assert 'href="contributing/"' in home
    assert 'href="https://github.com/gspmd/gspmd/tree/main/configs"' in page
    assert 'href="https://github.com/gspmd/gspmd/blob/main/gspmd/hardware/chips.toml"' in plans
