"""The folder of a run is one run's at a time, whatever becomes of that."""

import subprocess
import sys

import pytest

from gspmd.training.run.folder import choose_out, released_after
from gspmd.training.toml import ConfigError

HOLD = """
import sys
from gspmd.training.run.folder import choose_out
choose_out(sys.argv[1], resume=False)
print("held", flush=True)
sys.stdin.read()
"""


def test_another_run_is_refused_until_the_first_is_gone(tmp_path):
    """It ends without a word, as by SIGKILL: nothing of it stays in the way."""
    out = str(tmp_path / "run")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, out], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for resume in (False, True):
            (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True, exist_ok=True) if resume else None
            with pytest.raises(ConfigError, match="another run writes there now") as error:
                choose_out(out, resume=resume)
            assert "Wait for its end, or choose another --out." in str(error.value)
        other.kill()
    with released_after(choose_out(out, resume=True)):
        pass


def test_a_process_may_go_on_with_its_own_run(tmp_path):
    for _ in range(2):
        with released_after(choose_out(str(tmp_path), resume=False)):
            assert not list(tmp_path.iterdir()), "it leaves no file behind"
