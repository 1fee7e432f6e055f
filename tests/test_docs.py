"""Every code block of README.md and docs/ runs as printed, and every link leads somewhere; see tests/pages.py."""

import os
import re
import subprocess
import sys

import pytest

from gspmd import host
from tests.pages import READ_ONLY, ROOT, blocks_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {page: blocks_of(page.read_text()) for page in PAGES}


def _pages(when: str) -> list:
    found = [page for page in PAGES if any(block.is_run and block.when == when for block in BLOCKS[page][0])]
    return pytest.mark.parametrize("page", found, ids=lambda page: page.name)


def _run(page, *options: str) -> None:
    """Runs a page in a process like a user's: with none of what this suite sets, and on the CPU alone."""
    ours = {"XLA_FLAGS", "NPROC", "JAX_DISABLE_MOST_OPTIMIZATIONS", *host.WITHOUT_TPU}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    path = os.pathsep.join([os.path.dirname(sys.executable), environment["PATH"]])
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUTF8": "1", "PATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pages", *options, str(page)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


@_pages("fast")
def test_blocks_run(page):
    _run(page)


@pytest.mark.slow
@_pages("slow")
def test_slow_blocks_run(page):
    _run(page, "--slow")


def test_every_block_is_run_or_says_why_not():
    for page, (blocks, faults) in BLOCKS.items():
        assert not faults, f"{page.name}: {faults}"
        for block in blocks:
            if block.when != "fast":
                print(f"{page.name}:{block.line}: {block.when}, {block.reason}")
    assert sum(block.is_run for blocks, _ in BLOCKS.values() for block in blocks) >= 20


PAGE = """\
```python
print(1)
```

```
{shown}
```
{between}
{fence}
left
```
"""


@pytest.mark.parametrize(
    ("shown", "between", "fence", "fault"),
    [
        ("1", "", "```text", ""),
        ("...", "<!-- run never: it costs too much -->", "```sh", ""),
        ("2", "", "```text", "and prints"),
        ("1", "Words.", "```", "a block of no language"),
        ("1", "", "```bash", "a block of bash"),
        ("1", "<!-- run never -->", "```sh", "cannot read the comment above it"),
        ("1", "", "```sh", "exit code 127"),
        ("1", "", "```python", "NameError: name 'left' is not defined"),
        ("1", "", "```toml", "TOMLDecodeError"),
    ],
)
def test_what_does_not_run_is_found(shown, between, fence, fault, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(shown=shown, between=between, fence=fence))
    if not fault:
        _run(page)
    else:
        with pytest.raises(AssertionError) as error:
            _run(page)
        assert fault in str(error.value)


def test_a_block_may_print_something_else_since_a_release_of_jax():
    since = "```python\nprint(1)\n```\n\n```\n1\n```\n\nSince JAX {}:\n\n```\n2\n```\n"
    for release, shown in (("0.1", "2\n"), ("99", "1\n")):
        blocks, faults = blocks_of(since.format(release))
        assert [block.shown for block in blocks] == [shown]
        assert not faults


def test_blocks_stand_alone_and_sessions_go_on(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n```python\n>>> y = 2\n\n```\n```python\n>>> y\n2\n\n```\n")
    _run(page)
    page.write_text("```python\nx = 1\n```\n```python\nassert x\n```\n")
    with pytest.raises(AssertionError, match="NameError: name 'x' is not defined"):
        _run(page)


def test_links_of_the_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_read_only_languages_are_not_run():
    blocks, faults = blocks_of("".join(f"```{language}\nx\n```\n" for language in READ_ONLY))
    assert len(blocks) == len(READ_ONLY)
    assert not faults
    assert not any(block.is_run for block in blocks)


def test_write_keeps_what_a_block_that_fails_should_have_printed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        PAGE.format(shown="2", between="", fence="```text") + "```python\nprint(1); boom\n```\n```\n3\n```\n"
    )
    with pytest.raises(AssertionError, match="NameError"):
        _run(page, "--write")
    assert "```\n1\n```" in page.read_text()
    assert "boom\n```\n```\n3\n```" in page.read_text()


def test_a_block_may_be_a_file_of_those_below(tmp_path):
    page, saved = tmp_path / "page.md", "<!-- saved as one.py -->\n```python\n{}\n```\n"
    page.write_text(saved.format("ONE = 1") + "```python\nfrom one import ONE\nprint(ONE)\n```\n```\n1\n```\n")
    _run(page)
    assert [block.is_run for block in blocks_of(page.read_text())[0]] == [False, True]
