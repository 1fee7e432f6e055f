"""A run that is killed at any moment goes on as if it had not been: the same losses and the same state, bit for bit."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspmd.training.checkpoints import newest
from gspmd.training.reporting import metrics

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_resume_continues_the_losses_of_the_undisturbed_run(tmp_path):
    script = Path(__file__).with_name("kills.py")
    ran = subprocess.run([sys.executable, str(script), str(tmp_path), "20", "0"], capture_output=True, text=True)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr[-3000:]
    kills, _, saving = map(int, re.search(r"(\d+) kills in (\d+) runs, (\d+) while saving", ran.stdout).groups())
    assert kills == 20
    assert saving >= 3


@pytest.mark.slow
def test_a_killed_command_goes_on_likewise(tmp_path):
    """Kill a user's run in the middle: experts and a router with noise on 8 devices."""
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    flags = ["--config", str(ROOT / "configs" / "tiny.toml"), "--platform", "cpu", "--devices", "8", "--data", "a.txt"]
    flags += ["--steps", "16", "--save-every", "1", "--sample-bytes", "0", "--final-validation-batches", "1"]
    flags += ["--model.moe.router", "gshard"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"), "PYTHONPATH": str(ROOT)}

    def start(*more):
        command = [sys.executable, str(ROOT / "scripts" / "train_moe.py"), *more]
        return subprocess.Popen(command, cwd=tmp_path, env=os.environ | cache, stdout=subprocess.DEVNULL)

    with start(*flags, "--out", "whole") as whole:
        assert whole.wait() == 0
    with start(*flags, "--out", "killed") as killed:
        while (newest(tmp_path / "killed") or 0) < 3 and killed.poll() is None:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    with start("--resume", "--out", "killed", "--devices", "8") as resumed:
        assert resumed.wait() == 0
    whole, killed = ([row for row in metrics.read(tmp_path / name) if "loss" in row] for name in ("whole", "killed"))
    for row in (*whole, *killed):
        del row["tokens_per_second"]
    assert whole == killed
