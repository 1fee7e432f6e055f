"""The other processes: one that is lost ends this one with one message, and one that is done does not."""

import errno
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gspmd.training.processes import native, watch

LOST = "The run failed: process 1 of 2 ended without a word: it was killed, or ran out of memory."


class Ended(BaseException):
    """Raised where the process would end."""


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
    monkeypatch.setattr(watch, "_ANSWER", 0.5)
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
    assert others[1].recv(1 << 10).endswith(b"end 1\0")


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
    others[1].sendall(b"led 1 1 OSError: no room\0")
    run(made)
    assert codes == [1]
    assert capsys.readouterr().err == "Process 1 of 2 failed: OSError: no room\n"


def test_an_error_that_nobody_expected_is_followed_by_how_to_go_on(watched, capsys):
    made, codes, others = watched(0, 2)
    others[1].sendall(b"failed 1 0 Traceback:\nKeyError: 3\0")
    run(made)
    assert codes == [1]
    assert capsys.readouterr().err == "Process 1 of 2 failed: Traceback:\nKeyError: 3\nStep 4 is saved.\n"


def test_the_first_fault_to_arrive_is_said_and_the_end_of_who_told_it_is_no_loss(watched, capsys):
    made, codes, others = watched(0, 3)
    others[1].sendall(b"failed 1 1 OSError: no room\0")
    others[2].sendall(b"failed 1 0 RuntimeError: peer closed\0")
    others[1].close()
    run(made)
    assert codes == [1]
    assert capsys.readouterr().err == "Process 1 of 3 failed: OSError: no room\n"


def test_a_loss_goes_before_an_error_that_it_has_caused(watched, capsys):
    made, codes, others = watched(0, 3)
    others[2].sendall(b"failed 1 0 RuntimeError: peer closed\0")
    others[1].close()
    run(made)
    assert codes == [1]
    assert capsys.readouterr().err.startswith("The run failed: process 1 of 3 ended without a word")


@pytest.mark.parametrize(("lost", "said"), [
    (False, "RuntimeError: mine Step 4 is saved.\n"),
    (True, f"{LOST} Step 4 is saved.\n"),
])  # fmt: skip
def test_an_error_that_may_be_due_to_a_loss_waits_for_it(watched, capsys, monkeypatch, lost, said):
    monkeypatch.setattr(watch, "_SETTLE", 600 if lost else 0.1)
    made, codes, others = watched(0, 2)
    failing = threading.Thread(target=made.fail, args=("RuntimeError: mine",), kwargs={"sure": False}, daemon=True)
    failing.start()
    if lost:  # its connections close after those of the collective that has failed
        time.sleep(0.1)
        others[1].close()
        run(made)
    else:
        failing.join(300)
        assert not failing.is_alive()
        assert others[1].recv(1 << 10) == b"end 1\0"
    assert capsys.readouterr().err == said
    assert codes == [1] * lost


def test_what_all_processes_find_wrong_is_said_once(watched, capsys):
    made, codes, others = watched(0, 2)
    others[1].sendall(b"failed 2 1 ConfigError: the same\0")
    made.fail("ConfigError: the same", 2)
    made.start()  # only now, or a slow machine would say the other one's fault first
    time.sleep(0.5)  # beyond the time that it may wait
    assert (codes, capsys.readouterr().err) == ([], "ConfigError: the same\n")
    assert b"end 2\0" in others[1].recv(1 << 10)
    assert made.is_alive()  # as the process ends, nothing more is said
    made.leave()


class Slow:
    """A connection that takes a long message in pieces, between which other threads run."""

    def __init__(self, connection):
        self.fileno, self.recv, self._send = connection.fileno, connection.recv, connection.sendall

    def sendall(self, words):
        for at in range(0, len(words), 1000):
            self._send(words[at : at + 1000])
            time.sleep(0.002)


def test_a_fault_is_told_at_once_whole_and_said_by_the_first_process(watched, capsys, monkeypatch):
    monkeypatch.setattr(watch, "_BEAT", 0.001)  # beats go out on the same connection
    monkeypatch.setattr(watch, "_ANSWER", 600)
    made, codes, others = watched(1, 2)
    made._peers = {0: Slow(made._peers[0])}
    made.start()
    message = "OSError: " + "no room " * 10_000
    failing = threading.Thread(target=made.fail, args=(message, 2), daemon=True)
    failing.start()
    words = b""
    while b"room \0" not in words:
        words += others[0].recv(1 << 16)
    assert f"failed 2 1 {message}".encode() in words.split(b"\0")
    with pytest.raises(Ended):
        made._hear(0, "end 2")
    assert (codes, capsys.readouterr().err) == ([2], "")
    made.leave()


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
    others[0].sendall(b"end 1\0")
    run(made)
    assert (codes, capsys.readouterr().err) == ([1], "")


@pytest.fixture
def at_the_door(watched, monkeypatch):
    """A watch of the first of three processes at its door, and a function that comes in with a greeting."""
    monkeypatch.setattr(watch, "_GRACE", 0.0)
    door, callers = socket.create_server(("127.0.0.1", 0)), []
    made = watch.Watch(0, 3, {}, door, "here:1")

    def come(words):
        callers.append(socket.create_connection(door.getsockname()))
        callers[-1].sendall(words)
        return callers[-1]

    yield made, come
    for each in (door, *callers, *made._peers.values()):
        each.close()


def test_a_fault_is_told_to_those_that_come_later(at_the_door, capsys):
    made, come = at_the_door
    watching = threading.Thread(target=lambda: run(made), daemon=True)
    watching.start()
    stranger = come(b"GET / HTTP/1.1\r\n" * 10)
    assert stranger.recv(10) == b""
    first = come(b"here 3 1\0failed 2 1 ConfigError: the same\0")
    assert first.recv(8, socket.MSG_WAITALL) == b"welcome\0"
    while b"end 2\0" not in first.recv(1 << 10):
        pass
    watching.join(0.3)
    assert watching.is_alive()  # it stays
    second = come(b"here 3 2\0")
    watching.join(60)
    assert not watching.is_alive()
    assert second.recv(1 << 10).split(b"\0")[:2] == [b"welcome", b"end 2"]
    assert capsys.readouterr().err == "Process 1 of 3 failed: ConfigError: the same\n"
    assert not made.complete.is_set()


def test_all_go_on_together_once_they_are_there(at_the_door):
    made, come = at_the_door
    made.start()
    callers = [come(b"here 3 2\0"), come(b"here 3 1\0")]
    assert made.complete.wait(60)
    for caller in callers:
        words = b""
        while b"\0go\0" not in words:
            words += caller.recv(1 << 10)
    made.leave()
    made.join(60)


def test_a_connection_that_cannot_be_taken_is_tried_again(at_the_door):
    made, come = at_the_door
    door, refused = made._door, [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]

    class Full:
        fileno, close = door.fileno, door.close

        def accept(self):
            if refused:
                raise refused.pop()
            return door.accept()

    made._door = Full()
    made.start()
    callers = [come(b"here 3 2\0"), come(b"here 3 1\0")]
    assert made.complete.wait(10)
    assert (len(callers), refused) == (2, [])
    made.leave()
    made.join(60)


def test_an_error_of_the_watch_itself_ends_all(watched, capsys):
    made, codes, others = watched(0, 2)

    def broken():
        raise KeyError("advice")

    made.advice = broken
    others[1].close()
    run(made)
    assert codes == [1]
    said = capsys.readouterr().err
    assert said.startswith("The run failed: process 0 cannot watch the others:\nTraceback")
    assert said.endswith("KeyError: 'advice'\n")


@pytest.mark.parametrize("line", [b"failed", b"failed 1", b"failed one 1 no", b"end", b"end soon", b"end 99999999999"])
def test_a_line_that_is_none_is_passed_over(watched, capsys, line):
    made, codes, others = watched(0, 2)
    others[1].sendall(line + b"\0failed 1 1 OSError: no room\0")
    run(made)
    assert (codes, capsys.readouterr().err) == ([1], "Process 1 of 2 failed: OSError: no room\n")


def test_a_caller_that_is_no_process_is_hung_up_on(at_the_door, monkeypatch):
    monkeypatch.setattr(watch, "_PROMPT", 0.2, raising=False)
    made, come = at_the_door
    made.start()
    for words in (b"here 3 7\0", b"here 3 3\0", b"", b"here 3"):
        stranger = come(words)
        stranger.settimeout(10)
        assert stranger.recv(10) == b"", words
    assert made.is_alive()
    made.leave()
    made.join(60)


def test_an_interrupt_while_a_fault_is_being_said_ends_the_process_once_it_is_said(at_the_door, monkeypatch):
    made, _ = at_the_door
    saying, go_on, codes = threading.Event(), threading.Event(), []

    def slow(message):
        saying.set()
        go_on.wait(60)

    def exit_(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(watch, "_say", slow)
    monkeypatch.setattr(watch.os, "_exit", exit_)
    threading.Thread(target=made._end, args=("a fault", 2), kwargs={"stay": True}, daemon=True).start()
    assert saying.wait(60)
    ended = []

    def fail():
        with pytest.raises(Ended):
            made.fail("Interrupted", 130)
        ended.append(True)

    failing = threading.Thread(target=fail, daemon=True)
    failing.start()
    failing.join(0.3)
    assert codes == []
    go_on.set()
    failing.join(5)
    assert (ended, codes) == ([True], [2])


def test_the_message_of_a_process_that_is_alone_is_its_own(watched, capsys):
    made, _, others = watched(1, 2)
    others[0].close()
    made.fail("OSError: no room")
    assert capsys.readouterr().err == "OSError: no room\n"


def test_what_libraries_write_is_kept_apart_and_shown_if_they_abort():
    code = f"""
import os, runpy, sys
keep_apart = runpy.run_path({str(Path(native.__file__))!r})["keep_apart"]
keep_apart(lambda said: print("asked:", said, file=sys.stderr, flush=True))
os.write(1, b"connected\\n")
os.write(2, b"F1 the runtime is gone\\n")
print("shown")
os.abort()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == "shown\n"
    assert ended.stderr == "asked: A library ended the process. It said:\nconnected\nF1 the runtime is gone\n\n"
