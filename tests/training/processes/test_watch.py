"""The other processes: one that is lost ends this one with one message, and one that is done does not."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gspmd.training.processes import native, watch


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def watched(monkeypatch):
    """A function of index and number of processes: a watch, what it ended with, and the other ends of connections."""
    codes, opened = [], []

    def exit_(code):
        codes.append(code)
        raise Ended

    def make(index, count):
        peers = list(range(1, count)) if index == 0 else [0]
        pairs = {peer: socket.socketpair() for peer in peers}
        opened.extend(end for pair in pairs.values() for end in pair)
        made = watch.Watch(index, count, {peer: pair[0] for peer, pair in pairs.items()})
        made.advice = lambda: " Step 4 is saved."
        return made, codes, {peer: pair[1] for peer, pair in pairs.items()}

    monkeypatch.setattr(watch.os, "_exit", exit_)
    monkeypatch.setattr(watch, "_BEAT", 0.05)
    monkeypatch.setattr(watch, "_GRACE", 0.2)
    yield make
    for end in opened:
        end.close()


def run(made):
    with pytest.raises(Ended):
        made.run()


def test_a_process_that_ends_without_a_word_is_named_and_the_others_are_told(watched, capsys):
    made, codes, others = watched(0, 3)
    others[2].close()
    run(made)
    assert codes == [1]
    said = capsys.readouterr().err
    assert said == (
        "The run failed: process 2 of 3 ended without a word: it was killed, or ran out of memory. Step 4 is saved.\n"
    )
    assert others[1].recv(1 << 10).endswith(b"end\0")


def test_a_machine_that_is_lost_is_noticed_by_its_silence(watched, capsys, monkeypatch):
    monkeypatch.setattr(watch, "_SILENCE", 0.3)
    made, codes, others = watched(1, 2)
    began = time.monotonic()
    run(made)
    assert 0.3 <= time.monotonic() - began < 30
    assert (codes, others[0].recv(5)) == ([1], b"beat\0")
    assert "process 0 of 2 has been silent for 0 seconds. Step 4" in capsys.readouterr().err


def test_a_process_that_fails_says_why_once(watched, capsys):
    made, codes, others = watched(0, 2)
    others[1].sendall(b"beat\0fai")
    others[1].sendall(b"led OSError: no room\0")
    run(made)
    assert codes == [1]
    assert capsys.readouterr().err == "Process 1 of 2 failed: OSError: no room Step 4 is saved.\n"


def test_what_all_processes_find_wrong_is_not_said_again(watched, capsys):
    made, codes, others = watched(0, 2)
    others[1].sendall(b"failed ConfigError: the same\0")
    made.fail("ConfigError: the same")
    made.run()
    assert (codes, capsys.readouterr().err) == ([], "")
    assert others[1].recv(1 << 10) == b"end\0"


def test_a_process_that_is_done_is_not_lost(watched, capsys):
    made, codes, others = watched(0, 2)
    others[1].sendall(b"done\0")
    others[1].close()
    made.start()
    time.sleep(0.3)
    made.leave()
    made.join(5)
    assert not made.is_alive()
    assert (codes, capsys.readouterr().err) == ([], "")


def test_others_end_quietly_when_they_are_told_to(watched, capsys):
    made, codes, others = watched(1, 2)
    others[0].sendall(b"end\0")
    run(made)
    assert (codes, capsys.readouterr().err) == ([1], "")


def test_the_message_of_a_process_that_is_alone_is_its_own(watched, capsys):
    made, _, others = watched(1, 2)
    others[0].close()
    made.fail("OSError: no room")
    assert capsys.readouterr().err == "OSError: no room\n"


def test_what_libraries_write_is_kept_apart_and_shown_if_they_abort():
    code = f"""
import os, runpy, sys
keep_apart = runpy.run_path({str(Path(native.__file__))!r})["keep_apart"]
keep_apart(lambda: print("asked", file=sys.stderr, flush=True))
os.write(1, b"connected\\n")
os.write(2, b"F1 the runtime is gone\\n")
print("shown")
os.abort()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == "shown\n"
    assert ended.stderr == "asked\nA library ended the process. It said:\nconnected\nF1 the runtime is gone\n\n"
