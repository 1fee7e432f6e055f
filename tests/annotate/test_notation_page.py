"""The examples of docs/notation.md run as tests, and its grammar is the one in the code."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "notation.md"


def test_examples_run():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried >= 12
    assert failed == 0
