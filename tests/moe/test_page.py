"""The example of docs/moe.md runs."""

import re
from pathlib import Path


def test_example_runs():
    page = (Path(__file__).parents[2] / "docs" / "moe.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found = {}
    exec(code, found)
    assert found["slots"].shape == (4, 8, 40, 64)
    assert found["y"].shape == (4, 128, 64)
