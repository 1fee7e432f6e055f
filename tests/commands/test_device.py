"""benchmarks/device.py at sizes that a CPU takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_part_runs_and_operations_agree_with_float64(tmp_path):
    asked = [sys.executable, ROOT / "benchmarks" / "device.py", "--small", "--out", tmp_path, "--budget", "600"]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    failed = [row for row in rows if "failed" in row and not row["what"].startswith("cudnn")]  # there is no such card
    assert not failed
    assert {row["part"] for row in rows} == {
        "agreement",
        "products",
        "kernels",
        "training",
        "decoding",
        "attention",
        "experts",
        "grouped",
    }
    errors = {row["what"]: row["error"] for row in rows if row.get("dtype") == "float32" and "int8" not in row["what"]}
    assert len(errors) > 20
    assert max(errors.values()) < 2e-6
    assert (tmp_path / "table.md").read_text().count("| what |") == 8
