"""Two processes of four devices each: the losses of one process of eight, whatever becomes of one of the two."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gspmd.training.checkpoints import newest
from gspmd.training.reporting import metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SIZES = "[model]\nembed = 16\nlayers = 1\nheads = 8\nkv_heads = 8\nhead_size = 4\nfeed_forward = 32\n"
FLAGS = ["--config", "small.toml", "--platform", "cpu", "--devices", "8", "--data", "a.txt", "--length", "16"]
FLAGS += ["--batch", "8", "--steps", "240", "--save-every", "20", "--validation-every", "0", "--sample-bytes", "0"]
FLAGS += ["--final-validation-batches", "1"]
# After a process is gone; the rest must be over long before.
LIMIT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of runs: with a text, settings, and programs once they are compiled."""
    path = tmp_path_factory.mktemp("processes")
    (path / "a.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    (path / "small.toml").write_text(SIZES)
    return path


def start(folder, *flags, before=()):
    command = [*before, sys.executable, str(ROOT / "scripts" / "train_moe.py"), *flags]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "PYTHONPATH": str(ROOT)}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | cache, **pipes)


def start_two(folder, *flags):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    at = [f"{address},processes=2,process={process}" for process in (0, 1)]
    return [start(folder, *flags, "--distributed", where) for where in at]


def end(run, limit=300):
    """Return what a process has said on stdout and stderr once it is over, but for JAX's start, if that is slow."""
    try:
        out, error = run.communicate(timeout=limit)
        return out, re.sub(r"Starting JAX … .*\n", "", error)
    finally:
        run.kill()


def losses(out):
    return [row["loss"] for row in metrics.read(out) if "loss" in row]


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The losses of two processes, which were held against those of one."""
    one = start(folder, *FLAGS, "--out", "one")
    assert end(one)[1] == ""
    runs = start_two(folder, *FLAGS, "--out", "two")
    said = [end(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert "8 fake host devices sharing" in said[0][0]
    assert ", in 2 processes" in said[0][0]
    # What libraries say of their connections is not shown, and the second process says nothing.
    assert "Gloo" not in said[0][0]
    assert (said[0][1], said[1]) == ("", ("", ""))
    assert (folder / "two" / "loss.png").exists()
    found = losses(folder / "two")
    assert len(found) == 240
    np.testing.assert_allclose(found, losses(folder / "one"), rtol=1e-4)
    return found


def test_two_processes_train_an_encoder_decoder_on_packed_pairs(folder):
    """Rows are named arrays: each process has its part of every one of them."""
    texts = [f"a line of text {number}" * (1 + number % 3) for number in range(300)]
    (folder / "pairs.tsv").write_text("".join(f"{text}\t{text[::-1]}\n" for text in texts))
    sizes = f"{SIZES}vocabulary = 358\nencoder_layers = 1\nstart_token = 257\n"
    (folder / "two.toml").write_text(sizes)
    flags = [*FLAGS, "--config", "two.toml", "--data", "pairs.tsv", "--objective", "pairs", "--pack", "--steps", "6"]
    flags += ["--source-length", "96", "--length", "96", "--layout", "zero-3"]
    runs = [start(folder, *flags, "--out", "pairs-one")]
    assert end(runs[0])[1] == ""
    runs += start_two(folder, *flags, "--out", "pairs-two")
    said = [end(run) for run in runs[1:]]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    found = [metrics.read(folder / out) for out in ("pairs-one", "pairs-two")]
    for name in ("loss", "predicted", "fill"):
        one, two = ([row[name] for row in rows if name in row] for rows in found)
        assert len(one) == 6
        np.testing.assert_allclose(two, one, rtol=1e-4)


def disturb(folder, process, number, at, *flags):
    """Send a signal to one of two processes once a step is saved; return exit codes and what was said."""
    runs = start_two(folder, *flags)
    while (newest(folder / "run") or 0) < at and all(run.poll() is None for run in runs):
        time.sleep(0.01)
    runs[process].send_signal(number)
    began = time.monotonic()
    said = [end(run, LIMIT) for run in runs]
    print(f"signal {number} to process {process}: both are over after {time.monotonic() - began:.1f} s")
    return [run.returncode for run in runs], said


def test_whatever_becomes_of_a_process_the_run_goes_on_as_if_it_had_not_been(folder, undisturbed):
    again = ["--resume", "--out", "run", "--devices", "8", "--platform", "cpu"]
    gone = (
        "The run failed: process {} of 2 ended without a word: it was killed, or ran out of memory. Step {} is saved."
    )
    go_on = "--resume --out {} --distributed 127.0.0.1:"
    begun = [*FLAGS, "--out", "run"]
    for process, at, flags in ((1, 20, begun), (0, 60, again)):
        codes, said = disturb(folder, process, signal.SIGKILL, at, *flags)
        assert codes[process] == -signal.SIGKILL
        assert codes[1 - process] == 1
        lines = said[1 - process][1].splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(gone.format(process, newest(folder / "run")))
        assert go_on.format(folder / "run") in lines[0]
        assert losses(folder / "run") == undisturbed[: len(losses(folder / "run"))]
    # SIGTERM to one of them: both save the step, and count as done.
    codes, said = disturb(folder, 1, signal.SIGTERM, 80, *again)
    assert codes == [0, 0]
    assert said[0][1].startswith(f"\nInterrupted after step {newest(folder / 'run')}. To go on: ")
    assert said[1][1] == ""
    runs = start_two(folder, *again)
    assert [end(run)[1] for run in runs] == ["", ""]
    assert losses(folder / "run") == undisturbed


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_open_mpi_starts_a_run_that_changes_its_layout(folder, undisturbed):
    launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    flags = ["--out", "mpi", "--distributed", "auto", "--relayout", "50=zero-3:x=2,y=2,z=2"]
    run = start(folder, *FLAGS, *flags, before=launch)
    _, said = end(run)
    assert (run.returncode, said) == (0, "")
    np.testing.assert_allclose(losses(folder / "mpi"), undisturbed, rtol=1e-4)


def test_a_fault_is_one_message_of_the_first_process(folder):
    runs = start_two(folder, *FLAGS, "--layout", "zero-33", "--out", "none")
    said = [end(run) for run in runs]
    assert [run.returncode for run in runs] == [2, 2]
    assert said[0][1].startswith("LayoutError: no layout is called 'zero-33'.")
    assert said[1] == ("", "")
