"""A run that is killed at any moment goes on as if it had not been: the same losses and the same state, bit for bit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kills.py")


@pytest.mark.slow
def test_every_resume_continues_the_losses_of_the_undisturbed_run(tmp_path):
    ran = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), "20", "0"], capture_output=True, text=True)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr[-3000:]
    kills, _, saving = map(int, re.search(r"(\d+) kills in (\d+) runs, (\d+) while saving", ran.stdout).groups())
    assert kills == 20
    assert saving >= 3
