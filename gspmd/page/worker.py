"""A separate process that computes answers, and that is ended if an answer takes too long.

The processes exchange lines of JSON. The worker answers one line after the other, with the tasks of a class that the
server names. The worker ends as soon as its input is closed, even if the worker is still computing when the page ends.
Notes may come before an answer: messages about progress, and parts of the answer that are already known.
"""

import json
import os
import pkgutil
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import Any

_MODULE = "gspmd.page.worker"
_NOTE = "note "
"""The beginning of a line that contains a note."""


class TooLong(RuntimeError):
    """The error for an answer that took longer than allowed; the process has been ended."""


class Ended(RuntimeError):
    """The error for a process that ended without an answer, perhaps because it had too little memory."""


class Worker:
    """A process that answers requests one at a time; it is started when it is needed, and restarted if it has ended.

    Args:
        tasks: the class whose tasks the process runs, as `module:name`; it is called with the folders.
        folders: the folders of the config files and of the user's layouts, for a process that plans layouts.
    """

    def __init__(self, tasks: str, *folders: Path):
        self._tasks, self._folders = tasks, folders
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._lock, self._closed = Lock(), False

    def start(self) -> None:
        """Start the process before a request, so that it can already import the libraries that it needs."""
        with self._lock:
            self._start()

    def ask(
        self, task: str, given: Mapping[str, Any], seconds: float, tell: Callable[[str], object] = lambda note: None
    ) -> tuple[int, str]:
        """Return the HTTP status of a request, and the answer as JSON.

        Args:
            task: the name of a task.
            given: the JSON object of the request.
            seconds: the maximum time that the answer may take, not counting the start of the process.
            tell: a function that is called with each note about progress, as JSON.

        Raises:
            TooLong: the answer took longer than `seconds`.
            Ended: the process ended without an answer, or the page is about to end.
        """
        with self._lock:
            process = self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([task, given]) + "\n")
                process.stdin.flush()
                last = monotonic() + seconds
                answer = self._answers.get(timeout=seconds)
                while answer is not None and answer.startswith(_NOTE):
                    tell(answer.removeprefix(_NOTE))
                    answer = self._answers.get(timeout=max(0.0, last - monotonic()))
            except queue.Empty:
                self._stop()
                raise TooLong(f"the answer took more than {seconds:g} seconds, and was given up.") from None
            except OSError:
                answer = None
            if answer is None:
                self._stop()
                raise Ended("the process that computes answers has ended; it may have run out of memory.")
            status, _, body = answer.partition(" ")
            return int(status), body

    def interrupt(self) -> None:
        """End the process; the pending answer is lost, and the next request starts a new process."""
        process = self._process
        if process is not None:  # The lock is not taken: a thread that waits for an answer holds it.
            _kill(process)

    def close(self) -> None:
        """End the process, and start no new one."""
        self._closed = True
        self.interrupt()
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[str]:
        if self._closed:
            raise Ended("the page is shutting down.")
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        # Modules are imported from where this process finds them, and never from the current folder.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        # Nothing runs on a device, and a TPU or GPU belongs to the program that trains.
        environment |= {"JAX_PLATFORMS": "cpu"}
        argv = [sys.executable, "-P", "-m", _MODULE, self._tasks, *map(str, self._folders)]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment,
            start_new_session=True,  # an interrupt of the terminal is for the page, which ends this process
        )  # fmt: skip
        self._answers = queue.Queue()
        Thread(target=_read, args=(self._process, self._answers), daemon=True).start()
        ready = self._answers.get()
        if ready is None:
            self._stop()
            raise Ended("the process that computes answers does not start.")
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):  # What was not written is lost with the process.
                        stream.close()


def _kill(process: "subprocess.Popen[str]") -> None:
    """End a process and the processes that it started, which form a process group of their own."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read(process: subprocess.Popen[str], answers: "queue.Queue[str | None]") -> None:
    """Pass on the lines that a process writes, and None at their end."""
    assert process.stdout is not None
    with suppress(ValueError):  # The output has been closed.
        for line in process.stdout:
            answers.put(line)
    answers.put(None)


def main() -> None:
    """Answer the requests on standard input until it is closed."""
    # Libraries that print would spoil the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[str] = queue.Queue()
    Thread(target=_listen, args=(requests,), daemon=True).start()
    tasks = pkgutil.resolve_name(sys.argv[1])(*map(Path, sys.argv[2:]))
    tasks.warm()
    answers.write("ready\n")

    def tell(note: Mapping[str, Any]) -> None:
        answers.write(f"{_NOTE}{json.dumps(note)}\n")
        answers.flush()

    while True:
        answers.flush()
        task, given = json.loads(requests.get())
        status, answer = tasks.run(task, given, tell)
        answers.write(f"{status} {json.dumps(answer)}\n")


def _listen(requests: "queue.Queue[str]") -> None:
    """Read the requests; end the process as soon as standard input is closed."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
