"""Disturbed runs of two processes: `python pairs.py TASK FOLDER ...` prints their results as JSON.

The processes are forked from one that has imported everything and has not started JAX, so that a start is fast.

    python pairs.py faults FOLDER STAGE:PROCESS ...     raise an error in one of the two, at a stage of the run
    python pairs.py flags FOLDER FLAGS FLAGS            train with these flags, one string for each process
    python pairs.py texts FOLDER                        train on different files with the same name
    python pairs.py late FOLDER SECONDS                 train, kill, and resume while one process compiles for so long
    python pairs.py kills FOLDER KILLS SEED             kill either at random moments, resume, and compare the losses
    python pairs.py call FOLDER FUNCTION ...            call functions of this file in both, once they are joined
    python pairs.py arrivals FOLDER CASE ...            join in spite of an obstacle (`ARRIVALS`)
"""

import json
import os
import random
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax

from gspmd.commands import flags, main, runner, train
from gspmd.training import checkpoints, processes
from gspmd.training.checkpoints import newest
from gspmd.training.processes import arrival, watch
from gspmd.training.reporting import metrics
from gspmd.training.run import loop
from gspmd.training.syntax import Processes

SIZES = "[model]\nembed = 16\nlayers = 1\nheads = 8\nkv_heads = 8\nhead_size = 4\nfeed_forward = 32\n"
FLAGS = ["--config", "small.toml", "--platform", "cpu", "--devices", "8", "--data", "a.txt", "--length", "16"]
FLAGS += ["--batch", "8", "--validation-every", "0", "--sample-bytes", "0", "--final-validation-batches", "1"]
# Seconds until two processes that hang are ended.
LIMIT = 600


class Fault(Exception):
    """An error that nothing expects."""


@dataclass
class End:
    """The end of a process.

    Attributes:
        code: exit code; minus the number of the signal that killed it.
        out, error: its standard output and error.
        after: seconds since its disturbance or, without one, since its start.
    """

    code: int
    out: str
    error: str
    after: float = field(default=0.0)


class Pair:
    """Two processes with tasks, joined or not.

    Args:
        folder: where they run.
        tasks: the function that each runs; it returns the exit code.
        caches: the folder of the compiled programs of each, beside `folder`.
    """

    def __init__(self, folder: Path, tasks: Sequence[Callable[[], int]], caches=("compiled", "compiled")):
        self.folder, self.began = folder, time.monotonic()
        for file in ("fault", "joined-0", "joined-1"):
            (folder / file).unlink(missing_ok=True)
        self.children = [self._fork(which, tasks[which], caches[which]) for which in (0, 1)]

    def _fork(self, which: int, task: Callable[[], int], cache: str) -> int:
        child = os.fork()
        if child:
            return child
        try:
            os.chdir(self.folder)
            for name, descriptor in (("out", 1), ("error", 2)):
                os.dup2(os.open(f"{name}-{which}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            jax.config.update("jax_compilation_cache_dir", str(self.folder / cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            join = processes.join

            def joined(given: str) -> None:
                join(given)
                (self.folder / f"joined-{which}").touch()

            processes.join = joined
            code = task()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(99)

    def ends(self, since: float | None = None) -> list[End]:
        """Wait for both; those that hang are killed, with code -SIGKILL."""
        codes: dict[int, tuple[int, float]] = {}
        while len(codes) < 2:
            for which, child in enumerate(self.children):
                if which in codes:
                    continue
                if time.monotonic() - self.began > LIMIT:
                    os.kill(child, signal.SIGKILL)
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[which] = os.waitstatus_to_exitcode(status), time.time()
            time.sleep(0.02)
        if since is None and (self.folder / "fault").exists():
            since = float((self.folder / "fault").read_text())
        texts = [[(self.folder / f"{name}-{which}").read_text() for name in ("out", "error")] for which in (0, 1)]
        return [End(codes[which][0], *texts[which], codes[which][1] - (since or 0)) for which in (0, 1)]

    def running(self, which: int) -> bool:
        return os.waitid(os.P_PID, self.children[which], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def trained(flags: Sequence[str], where: str, which: int, prepare: Callable[[], None] = lambda: None) -> int:
    """Train in one of two processes."""
    prepare()
    sys.argv = ["gspmd", "train", *flags, "--distributed", f"{where},processes=2,process={which}"]
    return main.main(sys.argv[1:])


def trainings(flags: Sequence[str], others: Sequence[str] | None = None, **prepare) -> list[Callable[[], int]]:
    """Start two processes that train: with the same flags, or the second with others."""
    where, given = address(), (flags, flags if others is None else others)
    ready = [prepare.get(f"process_{which}", lambda: None) for which in (0, 1)]
    return [lambda which=which: trained(given[which], where, which, ready[which]) for which in (0, 1)]


# -- faults ------------------------------------------------------------------------------------------------------------


def raising(stage: str) -> Callable[..., None]:
    def fault(*_: object, **__: object) -> None:
        Path("fault").write_text(str(time.time()))  # in the folder where both run
        raise Fault(f"the fault at {stage}")

    return fault


def at_the_end(fault: Callable[..., None]) -> None:
    fit = train.fit

    def ended(*given, **options):
        fit(*given, **options)
        fault()

    train.fit = ended


def in_the_second_step(fault: Callable[..., None]) -> None:
    row, steps = loop._Run._row, []

    def counted(run, figures):
        steps.append(1)
        return row(run, figures) if len(steps) < 2 else fault()

    loop._Run._row = counted


#: Stage of a run -> what makes it raise.
STAGES = {
    "reading": lambda fault: setattr(flags, "parse", fault),
    "building": lambda fault: setattr(train, "make_program", fault),
    "compiling": lambda fault: setattr(loop._Run, "_compile", fault),
    "stepping": in_the_second_step,
    "saving": lambda fault: setattr(checkpoints.Checkpoints, "save", fault),
    "writing": lambda fault: setattr(checkpoints.Checkpoints, "_complete", fault),
    "validating": lambda fault: setattr(loop._Run, "validate", fault),
    "ending": at_the_end,
}


def faults(folder: Path, cases: Sequence[str]) -> dict[str, list[End]]:
    found = {}
    for case in cases:
        stage, which = case.split(":")
        flags = [*FLAGS, "--steps", "6", "--save-every", "3", "--out", f"fault-{stage}-{which}"]
        inject = {f"process_{which}": lambda stage=stage: STAGES[stage](raising(stage))}
        found[case] = Pair(folder, trainings(flags, **inject)).ends()
    return found


# -- one compiles, and the other does not ------------------------------------------------------------------------------


def late(folder: Path, seconds: float) -> list[list[End]]:
    """Kill two processes with separate caches of programs, and resume after the second one has lost its programs."""

    def slow() -> None:
        lower_and_compile = jax.stages.Lowered.compile

        def slower(self, *given, **options):
            made = lower_and_compile(self, *given, **options)
            time.sleep(seconds)
            return made

        jax.stages.Lowered.compile = slower

    flags, caches = [*FLAGS, "--steps", "12", "--save-every", "6"], ("compiled-0", "compiled-1")
    begun = Pair(folder, trainings([*flags, "--out", "late"]), caches)
    while newest(folder / "late") is None and begun.running(0):
        time.sleep(0.01)
    os.kill(begun.children[1], signal.SIGKILL)
    first = begun.ends(time.time())
    shutil.rmtree(folder / "compiled-1")
    again = Pair(folder, trainings([*flags, "--resume", "--out", "late"], process_1=slow), caches)
    return [first, again.ends()]


# -- kills -------------------------------------------------------------------------------------------------------------


def losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metrics.read(out) if "loss" in row]


def kills(folder: Path, wanted: int, seed: int) -> list[dict]:
    """Kill either of two joined processes at random moments, and compare the losses with those of whole runs."""
    draw, flags = random.Random(seed), [*FLAGS, "--steps", "120", "--save-every", "10"]
    for name in ("whole", "again"):  # the second finds its programs
        began = time.monotonic()
        assert [end.code for end in Pair(folder, trainings([*flags, "--out", name])).ends()] == [0, 0]
    takes, whole = time.monotonic() - began, losses(folder / "whole")
    assert losses(folder / "again") == whole
    done, runs = [], 0
    while len(done) < wanted:
        runs += 1
        out, over = folder / f"killed-{runs}", False
        while not over:
            resume = ["--resume"] if newest(out) is not None else []
            pair = Pair(folder, trainings([*flags, *resume, "--out", str(out)]))
            while not all((folder / f"joined-{which}").exists() for which in (0, 1)):
                time.sleep(0.01)
            if over := len(done) >= wanted:
                last = pair.ends()
                assert [(end.code, end.error) for end in last] == [(0, ""), (0, "")], last
                break
            which = draw.randrange(2)
            time.sleep(draw.uniform(0, takes))
            if not (pair.running(0) and pair.running(1)):  # it was quicker
                ends = pair.ends()
                assert [end.code for end in ends] == [0, 0], ends
                break
            os.kill(pair.children[which], signal.SIGKILL)
            ends = pair.ends(time.time())
            if ends[1 - which].code == 0:  # all was done, and the processes were about to end
                break
            here = losses(out) if (out / "metrics.jsonl").exists() else []
            same = here == whole[: len(here)]
            done.append({
                "process": which, "step": len(here), "saved": newest(out), "same": same,
                "ends": [asdict(end) for end in ends],
            })  # fmt: skip
            line = f"kill {len(done)}: process {which} at step {len(here)}, over after {ends[1 - which].after:.1f} s, "
            print(f"{line}{newest(out)} is saved, {same=}", file=sys.stderr, flush=True)
        assert losses(out) == whole, out
    return done


# -- functions that both call ------------------------------------------------------------------------------------------


def compare() -> None:
    mine = {"batch": 8, "optimizer": {"learning_rate": 0.1 * (1 + processes.index())}}
    processes.compare(lambda: mine | processes.environment())


def agree() -> None:
    """Check functions that need no device: texts, meetings, and the first process's word."""
    for _ in range(2):
        texts = processes.gathered(f"text {processes.index()}")
        processes.meet("a test")
        print(texts, processes.told(lambda: f"said by {processes.index()}"))
    processes.compare(lambda: {"batch": 8} | processes.environment())


def interrupted() -> None:
    """Interrupt the second process while it waits for the first one."""
    if processes.first():
        time.sleep(LIMIT)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    processes.meet("a test")


def call(folder: Path, name: str) -> list[End]:
    where = address()

    def task(which: int) -> int:
        def joined(_: Sequence[str]) -> None:
            processes.join(f"{where},processes=2,process={which}")
            globals()[name]()

        return runner.guarded(joined, [])

    return Pair(folder, [lambda: task(0), lambda: task(1)]).ends()


# -- what may be in the way of joining ---------------------------------------------------------------------------------

#: Case -> the arguments of both about the processes at their address, and the signal that one gets while they wait.
ARRIVALS: dict[str, tuple[str, str, tuple[int, int] | None]] = {
    "0-interrupted": ("processes=3,process=0", "processes=3,process=1", (0, signal.SIGINT)),
    "1-interrupted": ("processes=3,process=0", "processes=3,process=1", (1, signal.SIGINT)),
    "1-terminated": ("processes=3,process=0", "processes=3,process=1", (1, signal.SIGTERM)),
    "1-killed": ("processes=3,process=0", "processes=3,process=1", (1, signal.SIGKILL)),
    "0-early": ("processes=3,process=0", "processes=3,process=1", None),
    "1-early": ("processes=3,process=0", "processes=3,process=1", None),
    "two-first": ("processes=2,process=0", "processes=2,process=0", None),
    "two-second": ("processes=3,process=1", "processes=3,process=1", None),
    "other-number": ("processes=2,process=0", "processes=3,process=1", None),
    "missing": ("processes=3,process=0", "processes=3,process=1", None),
    "no-first": ("processes=3,process=1", "processes=3,process=2", None),
}


def arrivals(folder: Path, name: str) -> list[End]:
    """Let two processes join, with short waits; in the case of two second ones this process is the first."""
    where, (*given, disturbed) = address(), ARRIVALS[name]
    for file in ("came-0", "came-1"):
        (folder / file).unlink(missing_ok=True)
    short = name in ("missing", "no-first", "0-early")
    arrival.TELL, arrival.LIMIT = (0.5, 1.5) if short else (60.0, 120.0)
    watch._GRACE = 0.2

    def task(which: int) -> int:
        start = watch.Watch.start

        def started(made: watch.Watch) -> None:
            start(made)
            (folder / f"came-{which}").touch()

        def join(_: Sequence[str]) -> None:
            processes.expect(f"{where},{given[which]}")
            if name in ("1-early", "two-first") and which == 1:
                while not (folder / "came-0").exists():
                    time.sleep(0.01)
            if name == f"{which}-early":
                raise KeyboardInterrupt
            processes.join(f"{where},{given[which]}")

        watch.Watch.start = started
        return runner.guarded(join, [])

    pair = Pair(folder, [lambda: task(0), lambda: task(1)])
    if name == "two-second":
        here = watch.Watch(0, 3, {}, arrival.door(Processes(where, 3, 0)), where)
        os._exit, ended = lambda code: sys.exit(), os._exit  # of the watch's thread only
        here.start()
        here.join()
        os._exit = ended
    if disturbed:
        which, number = disturbed
        while not all((folder / f"came-{each}").exists() for each in (0, 1)):
            time.sleep(0.01)
        os.kill(pair.children[which], number)
        return pair.ends(time.time())
    if name == "two-first":  # the first of them waits for the second process
        while pair.running(1):
            time.sleep(0.01)
        os.kill(pair.children[0], signal.SIGINT)
    return pair.ends(time.time())


def run(task: str, folder: Path, rest: Sequence[str]) -> object:
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    (folder / "b.txt").write_text("".join(f"other line {number}\n" for number in range(2000)))
    (folder / "small.toml").write_text(SIZES)
    match task:
        case "faults":
            return faults(folder, rest)
        case "flags":
            return Pair(folder, trainings(*([*FLAGS, *shlex.split(each)] for each in rest))).ends()
        case "texts":
            (elsewhere := folder / "elsewhere").mkdir(exist_ok=True)
            (elsewhere / "small.toml").write_text(SIZES)
            shutil.copy(folder / "b.txt", elsewhere / "a.txt")
            flags = [*FLAGS, "--steps", "4", "--out", str(folder / "texts")]
            return Pair(folder, trainings(flags, process_1=lambda: os.chdir(elsewhere))).ends()
        case "late":
            return late(folder, float(rest[0]))
        case "kills":
            return kills(folder, int(rest[0]), int(rest[1]))
        case "arrivals":
            return {name: arrivals(folder, name) for name in rest}
        case "call":
            return {name: call(folder, name) for name in rest}


if __name__ == "__main__":
    result = run(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:])
    print(json.dumps(result, default=asdict))
