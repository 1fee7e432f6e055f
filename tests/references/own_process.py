"""Checks in separate processes, which XLA may end: the failures, and the checks that end a process.

A process runs one check after the other and reports the result of each. If it dies, the check that it was running has
failed, and another process continues with the next.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Check = tuple[str, list[Any]]
"""A function of tests/references, such as `random_operations:check_seed`, and arguments that JSON can hold."""


def faults(checks: Sequence[Check], each: int = 50, seconds: float = 1800) -> list[str]:
    """Return the failures of checks, including a death of their process; `each` of them share a process."""
    found, at = [], 0
    while at < len(checks):
        answers, died = _answers(checks[at : at + each], seconds)
        found += [f"{checks[at + n]}: {answer}" for n, answer in enumerate(answers) if answer]
        at += len(answers)
        if died:
            found.append(f"{checks[at]}: {died}")
            at += 1
    return found


def _answers(checks: Sequence[Check], seconds: float) -> tuple[list[str], str]:
    """Return the answer of a process to each check, empty where it passes; and how the process ended, if it is not
    done.
    """
    command = [sys.executable, "-m", "tests.references.own_process"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    given = json.dumps(checks)
    try:
        done = subprocess.run(
            command, input=given, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
        ended, out, err = f"the process ended with {done.returncode}", done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:  # its output is bytes, whatever was asked for
        ended = f"no answer within {seconds} s"
        out, err = ((text or b"").decode(errors="replace") for text in (error.stdout, error.stderr))
    answers = [json.loads(line) for line in out.splitlines() if line.startswith('"') and line.endswith('"')]
    fatal = next((line for line in err.splitlines() if "Check failed" in line), err[-2000:])
    return answers, "" if len(answers) == len(checks) else f"{ended}: {fatal}"


def main() -> None:
    """Run the checks on the standard input, and print a line for each."""
    from importlib import import_module

    import jax

    from gspmd import host

    host.use_host_devices(8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for name, arguments in json.load(sys.stdin):
        module, function = name.split(":")
        try:
            getattr(import_module(f"tests.references.{module}"), function)(*arguments)
            answer = ""
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:2000]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
