"""An interrupt ends every command in one line, with exit code 130, from the first import on."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gspmd.interruption import answering, interruptibly, is_left_working

ROOT = Path(__file__).parents[2]
EXPLAIN = ["BLE_xyz, E_xF_yz -> BLF_yzx", "--mesh", "x=4,y=4,z=4", "--sizes", "B=512,L=1,E=18432,F=73728"]
SAID = "\nInterrupted.\n"

_AT = """
import os, runpy, signal, sys
class At:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{number})
            raise ImportError("the interrupt came, and was taken for something else")
sys.meta_path.insert(0, At())
sys.argv[1:] = {flags!r}
runpy.{run}
"""
PACKAGE, SCRIPT = "run_module('gspmd', run_name='__main__')", "run_path({!r}, run_name='__main__')"


@pytest.mark.parametrize(
    ("module", "run", "flags", "number"),
    [
        ("gspmd.commands.explain", PACKAGE, ["explain", *EXPLAIN], "SIGINT"),
        ("rich.console", PACKAGE, ["--help"], "SIGINT"),
        ("numpy", PACKAGE, ["train"], "SIGINT"),
        ("gspmd.commands.train", PACKAGE, ["train"], "SIGTERM"),
        ("gspmd.commands.train", PACKAGE, ["train"], "SIGHUP"),
        ("jax", SCRIPT.format(str(ROOT / "scripts" / "generate.py")), ["--checkpoint", ".", "--prompt", "A"], "SIGINT"),
    ],
    ids=["explain", "help", "train", "terminated", "hung up", "script"],
)
def test_while_libraries_are_imported(module, run, flags, number):
    program = _AT.format(module=module, run=run, flags=flags, number=number)
    if number == "SIGHUP":  # which these tests may be run without
        program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL){program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.Signals[number], "", SAID)


def test_a_command_begins_without_a_library():
    """Before a command's first line nothing can be done about an interrupt, so it comes before all that takes time."""
    program = "import sys; before = set(sys.modules); import {}; print(*set(sys.modules) - before)"

    def imported(name: str) -> set[str]:
        given = [sys.executable, "-S", "-E", "-c", program.format(name)]
        return {*subprocess.run(given, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()}

    known = {name for name in imported("gspmd.__main__") if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in known} == {"gspmd"}
    # 5 ms with these; each of typing, pathlib, tempfile and hashlib takes as long again.
    mine = {"gspmd", "gspmd.host", "gspmd.interruption"}
    assert imported("gspmd.interruption") - imported("__future__, atexit, importlib, os, signal") == mine


@pytest.mark.parametrize(
    "given",
    [
        ["-m", "gspmd", "explain"],
        [str(ROOT / "scripts" / "explain.py")],
        ["-c", "import gspmd.__main__ as it; it.main()"],
    ],
    ids=["python -m gspmd", "a script", "gspmd"],
)
def test_from_the_first_line_on(given, tmp_path):
    """An interrupt that comes right after this package's first file of a command."""
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, os, signal\n"
        "usual = builtins.__import__\n"
        "def importing(name, *rest, **more):\n"
        "    if name == 'gspmd.commands.main':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return usual(name, *rest, **more)\n"
        "builtins.__import__ = importing\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *given], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", SAID)


def test_where_interrupts_are_ignored_they_stay_so():
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + _AT.format(
        module="gspmd.commands.explain", run=PACKAGE, flags=["explain", *EXPLAIN], number="SIGINT"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 1
    assert "taken for something else" in done.stderr


def test_whoever_calls_a_command_lives_on():
    """With flags of its own it is called from a program, a notebook say, which has more to do than this command."""
    call = (
        _AT.format(
            module="gspmd.commands.explain", run="run_module  # the call below, instead", flags=[], number="SIGINT"
        )
        + f"EXPLAIN = {EXPLAIN!r}"
        + """
from gspmd.commands.main import main
print(main(["explain", *EXPLAIN]), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "130 True\n", SAID)


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "Terminated", "HungUp"])
def test_threads_that_work_on_are_left_alone(raised):
    """XLA compiles in threads, which are in the middle of something when the interpreter takes itself down."""
    code = {"KeyboardInterrupt": 130, "Terminated": 143, "HungUp": 129}[raised]
    program = f"""
import sys, threading, time, types
from gspmd.interruption import HungUp, Terminated
def run(flags, script, settings):
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("printed", settings)
    raise {raised}
sys.modules["gspmd.commands.explain"] = types.SimpleNamespace(run=run)
sys.modules["gspmd.commands.explain_settings"] = types.SimpleNamespace(parse=lambda flags, script: "settings")
from gspmd.commands.main import main
sys.exit(main())
"""
    given = [sys.executable, "-c", program, "explain"]
    done = subprocess.run(given, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (code, "printed settings\n", SAID)


@pytest.mark.parametrize(
    "inside",
    [
        "gc.callbacks[:] = [lambda stage, info: stage == 'stop' and interrupt()]; gc.collect(); gc.callbacks.clear()",
        "type('Held', (), {'__del__': interrupt})()",
        "kept = weakref.ref(type('Held', (), {})(), interrupt)",
    ],
    ids=["a callback of the garbage collector", "a finalizer", "the callback of a weak reference"],
)
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupt_is_not_lost_in(inside, number, code):
    """Python lets no exception leave these, and prints it."""
    program = f"""
import gc, signal, sys, time, types, weakref
from gspmd.commands import main
from gspmd.interruption import Terminated

def interrupt(*_):
    signal.raise_signal(signal.{number})

def terminate(*_):
    raise Terminated

def run(flags, file, settings):
    signal.signal(signal.SIGTERM, terminate)
    {inside}
    try:
        time.sleep(30)
    except Terminated:
        return 143

main.import_module = lambda name: types.SimpleNamespace(run=run, parse=str, read=lambda *_: ("settings", 0))
sys.argv = ["gspmd", "train"]
sys.exit(main.main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert (done.returncode, done.stderr) == (code, SAID if number == "SIGINT" else "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "flags"),
    [
        (PACKAGE, ["explain", *EXPLAIN]),
        (SCRIPT.format("scripts/generate.py"), ["--checkpoint", "nowhere", "--prompt", "x"]),
    ],
    ids=["explain", "generate"],
)
def test_at_any_moment(run, flags):
    """A command that has ended keeps its own exit code."""
    # Until the interpreter has started, and has imported this, nothing can be done.
    program = "import runpy, sys; import gspmd.commands.main; print('begun', flush=True); "
    given = [sys.executable, "-c", program + f"sys.argv[1:] = {flags!r}; runpy.{run}"]
    began = time.perf_counter()
    whole = subprocess.run(given, capture_output=True, text=True, cwd=ROOT, timeout=300)
    seconds = time.perf_counter() - began
    for share in (0.1, 0.4, 0.7, 0.9):
        with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout.readline() == "begun\n"
            time.sleep(max(0.1, share * seconds))
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=300)
        assert process.returncode in (130, whole.returncode), err
        assert "Traceback" not in err
        assert process.returncode != 130 or "Interrupted" in err.splitlines()[-1]


@pytest.mark.slow
def test_these_tests_pass_in_the_background_of_a_script():
    """There SIGINT is ignored, and under nohup SIGHUP."""
    files = ["tests/commands/test_interrupts.py", "tests/training/run/test_signals.py"]
    flags = ["-q", "-p", "no:cacheprovider", "-n", "0"]
    ignoring = f"trap '' INT HUP; exec {sys.executable} -m pytest {' '.join([*flags, *files])}"
    done = subprocess.run(["bash", "-c", ignoring], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


def test_an_interrupt_is_answered_while_a_compiler_works():
    """A C function that lets other threads run, as compilers do, for seconds."""
    ended = []

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"words", b"salt", 3_000_000)
        ended.append(True)

    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        interruptibly(work)
    assert not ended
    assert is_left_working()
    limit = time.monotonic() + 60
    while is_left_working():  # Otherwise it would take the time of the next test.
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert ended


def test_what_a_compiler_returns_or_raises_is_passed_on():
    assert interruptibly(divmod, 7, 2) == (3, 1)
    assert interruptibly(int, "11", base=2) == 3
    with pytest.raises(ZeroDivisionError):
        interruptibly(divmod, 7, 0)


def test_a_program_waits_for_its_compiler():
    """Only a command ends its process after an interrupt; a program would go on beside the compiler."""
    assert answering(threading.current_thread) is threading.current_thread()


@pytest.mark.parametrize("left", [True, False])
def test_a_command_does_not_take_down_a_compiler_that_works(left):
    """A run that was saved when it was interrupted has exit code 0, and its compiler may still work in a thread."""
    work = "time.sleep(600)" if left else "None"
    program = f"""
import atexit, os, signal, sys, threading, time, types
from gspmd.interruption import answering
atexit.register(print, "taken down")
def run(flags, script, settings):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        answering(lambda: {work})
        time.sleep(60)
    except KeyboardInterrupt:
        print("saved")
    return 0
sys.modules["gspmd.commands.explain"] = types.SimpleNamespace(run=run)
sys.modules["gspmd.commands.explain_settings"] = types.SimpleNamespace(parse=lambda flags, script: "settings")
from gspmd.commands.main import main
sys.exit(main())
"""
    given = [sys.executable, "-c", program, "explain"]
    done = subprocess.run(given, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n" if left else "saved\ntaken down\n", "")
