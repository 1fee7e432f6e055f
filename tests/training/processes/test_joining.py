"""Two processes that are joined: they agree, meet, and end together with the text of whatever fault comes up in one."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.references.volume import SEED

PAIRS = Path(__file__).with_name("pairs.py")
ROOT = Path(__file__).parents[3]
STAGES = ("reading", "building", "compiling", "stepping", "saving", "writing", "validating", "ending")
# Seconds from a fault in one process to the end of both: about 4 on a machine that has nothing else to do. It is less
# than the 30 that Gloo and the watch wait for a process that says nothing.
SOON = 25


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A function of a task of pairs.py and its arguments: what has become of two processes."""
    folder = tmp_path_factory.mktemp("pairs")

    def run(task, *given):
        command = [sys.executable, str(PAIRS), task, str(folder), *map(str, given)]
        ended = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        assert ended.returncode == 0, ended.stderr
        print(ended.stderr, file=sys.stderr)
        return json.loads(ended.stdout)

    return run


def codes(ends):
    return [end["code"] for end in ends]


@pytest.mark.slow
def test_they_agree_compare_and_can_be_interrupted(pairs):
    found = pairs("call", "agree", "compare", "interrupted")
    first, second = found["agree"]
    assert (codes(found["agree"]), first["error"], second["error"]) == ([0, 0], "", "")
    assert first["out"] == "['text 0', 'text 1'] said by 0\n" * 2
    assert second["out"] == "[] said by 0\n" * 2
    first, second = found["compare"]
    assert codes(found["compare"]) == [2, 2]
    assert first["error"].startswith("ConfigError: cannot train: the processes have different settings.\n")
    assert first["error"].count("\n") == 2
    assert "  optimizer.learning_rate is 0.1 in process 0, but 0.2 in process 1 (on " in first["error"]
    assert second["error"] == ""
    # A process that waits for another one can be interrupted; the first one says it.
    first, second = found["interrupted"]
    assert codes(found["interrupted"]) == [130, 130]
    assert (first["error"], second["error"]) == ("Process 1 of 2 failed: Interrupted before the run began.\n", "")


@pytest.mark.slow
def test_whoever_waits_for_the_others_hears_what_has_become_of_them(pairs):
    """Before all have met: a third process never comes, or two are the same one."""
    names = "0-interrupted", "1-interrupted", "1-terminated", "1-killed", "0-early", "1-early"
    found = pairs("arrivals", *names, "two-first", "two-second", "other-number", "missing", "no-first")
    said = {name: [re.sub(r"127.0.0.1:\d+", "HERE", end["error"]) for end in ends] for name, ends in found.items()}
    interrupted, told = (
        "Interrupted before the run began.\n",
        "Process 1 of 3 failed: Interrupted before the run began.\n",
    )
    for name, number, lines in (
        ("0-interrupted", 130, [f"\n{interrupted}", ""]),
        ("1-interrupted", 130, [told, ""]),
        ("1-terminated", 143, [told, ""]),
        ("1-early", 130, [told, ""]),
    ):
        assert (codes(found[name]), said[name]) == ([number, number], lines), name
    lost = "The run failed: process 1 of 3 ended without a word: it was killed, or ran out of memory.\n"
    assert (codes(found["1-killed"]), said["1-killed"]) == ([1, -9], [lost, ""])
    for name in names:
        assert name == "0-early" or max(end["after"] for end in found[name]) < SOON, name
    # Nobody waits yet for a first one that has not come.
    waiting, absent = (
        "Waiting for process 0 of 3 at HERE, for at most 2 seconds: Connection refused.\n",
        "process 0 did not listen there within 2 seconds: Connection refused.\n",
    )
    joining = "ConfigError: cannot join the processes at HERE as process {} of {}:\n  "
    assert codes(found["0-early"]) == [130, 2]
    assert said["0-early"] == [f"\n{interrupted}", f"{waiting}{joining.format(1, 3)}{absent}"]
    assert said["no-first"] == [f"{waiting}{joining.format(each, 3)}{absent}" for each in (1, 2)]
    assert codes(found["missing"]) == [1, 1]
    assert said["missing"] == [
        "Waiting for process 2 of 3 at HERE, for at most 2 seconds.\n"
        "The run failed: process 0 has waited for process 2 of 3 at HERE for 2 seconds.\n",
        "",
    ]
    # Two processes that are one.
    assert (codes(found["two-first"])[1], codes(found["two-second"])) == (2, [2, 2])
    assert re.fullmatch(
        f"{joining.format(0, 2)}port [0-9]+ is in use on this machine: is another process process=0 too\\? Number the "
        "processes from 0 to 1, or name another port\\.\n",
        said["two-first"][1],
    )
    assert said["two-second"] == ["", ""]  # the first one says it
    assert codes(found["other-number"]) == [2, 2]
    number = "process 1 was given 3 as the number of processes, but process 0 was given 2; "
    number += "give all of them the same number."
    assert said["other-number"] == [f"The run failed: {number}\n", ""]


def assert_over(ends, stage, process):
    """Both are over soon, and the first one has said the fault, once."""
    text = f"Fault: the fault at {stage}\n"
    assert codes(ends) == [1, 1], ends
    assert ends[0]["error"].count(text) == 1, ends
    assert ends[0]["error"].startswith("Process 1 of 2 failed: Traceback" if process else "Traceback"), ends
    assert ends[1]["error"] == "", ends
    assert max(end["after"] for end in ends) < SOON, ends


def test_a_fault_ends_both(pairs):
    for case, ends in pairs("faults", "reading:1", "building:0").items():
        stage, process = case.split(":")
        assert_over(ends, stage, int(process))


@pytest.mark.slow
def test_a_fault_at_any_stage_in_either_ends_both_with_its_text(pairs):
    cases = [f"{stage}:{process}" for stage in STAGES for process in (0, 1)]
    for case, ends in pairs("faults", *cases).items():
        stage, process = case.split(":")
        assert_over(ends, stage, int(process))
        # Where a step is saved, the fault is followed by how to go on.
        if stage in ("validating", "ending"):
            assert re.search(r"Step [36] is saved\. To go on: ", ends[0]["error"]), ends


@pytest.mark.slow
def test_flags_of_one_process_are_a_fault_of_both(pairs):
    usual = "--steps 4 --out flags"
    for flags, said in (
        ((usual, f"{usual} --steps many"), "'many'"),
        ((f"{usual} --steps many", usual), "'many'"),
        ((f"{usual} --steps many",) * 2, "'many'"),
        ((usual, f"{usual} --batch 16 --learning-rate 0.1"), "training.batch is 8 in process 0, but 16 in process 1"),
        ((usual, f"{usual} --data b.txt"), 'training.data is ["a.txt"] in process 0, but ["b.txt"] in process 1'),
    ):
        ends = pairs("flags", *flags)
        assert codes(ends) == [2, 2], flags
        assert ends[0]["error"].count(said) == 1, flags
        assert ends[1]["error"] == "", flags


@pytest.mark.slow
def test_texts_of_one_name_that_differ_are_refused(pairs):
    first, second = pairs("texts")
    assert first["code"] == 2
    assert first["error"].startswith("ConfigError: cannot train: the processes have read different texts.\n  text is ")
    assert second["error"] == ""


@pytest.mark.slow
def test_a_process_that_compiles_is_waited_for_by_one_that_has_its_programs(pairs):
    # Gloo alone waits for 30 seconds. A process is killed, and has lost its programs as it starts again.
    killed, again = pairs("late", 35)
    assert killed[0]["code"] == 1
    assert [(end["code"], end["error"]) for end in again] == [(0, ""), (0, "")]


@pytest.mark.slow
def test_kills_at_random_moments_cost_no_step(pairs):
    seed = random.Random(SEED).randrange(2**32)
    kills = pairs("kills", 4, seed)
    assert len(kills) == 4
    for kill in kills:
        process, ends = kill["process"], kill["ends"]
        assert codes(ends)[process] == -9
        assert codes(ends)[1 - process] == 1, kill
        said = ends[1 - process]["error"]
        assert said.startswith(f"The run failed: process {process} of 2 ended without a word"), kill
        assert said.count("\n") == 1, kill
        assert ends[1 - process]["after"] < 60, kill
        assert kill["same"], kill
