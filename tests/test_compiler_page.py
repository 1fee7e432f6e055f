"""The programs of docs/compiler.md print what the page says they do: each is a fault, until it is mended."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import jax
import pytest

from tests.pages import blocks_of

PAGE = Path(__file__).parents[1] / "docs" / "compiler.md"
BLOCKS = [block for block in blocks_of(PAGE.read_text())[0] if block.language == "python"]


def test_every_program_has_its_output():
    assert len(BLOCKS) == 7
    assert all(block.shown for block in BLOCKS)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_fault_is_as_the_page_says(number):
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(BLOCKS[number].code, f"docs/compiler.md, program {number + 1}", "exec"), {})
    assert out.getvalue() == BLOCKS[number].shown, f"JAX {jax.__version__} has mended it? Then say so on the page"
