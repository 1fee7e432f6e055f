"""An interrupt ends every command in one line, with exit code 130, from the first import on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPLAIN = ["BLE_xyz, E_xF_yz -> BLF_yzx", "--mesh", "x=4,y=4,z=4", "--sizes", "B=512,L=1,E=18432,F=73728"]
SAID = "\nInterrupted.\n"

_AT = """
import os, runpy, signal, sys
class At:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
            raise ImportError("the interrupt came, and was taken for something else")
sys.meta_path.insert(0, At())
sys.argv[1:] = {flags!r}
runpy.{run}
"""
PACKAGE, SCRIPT = "run_module('gspmd', run_name='__main__')", "run_path({!r}, run_name='__main__')"


@pytest.mark.parametrize(
    ("module", "run", "flags"),
    [
        ("gspmd.commands.explain", PACKAGE, ["explain", *EXPLAIN]),
        ("rich.console", PACKAGE, ["--help"]),
        ("numpy", PACKAGE, ["train"]),
        ("jax", SCRIPT.format(str(ROOT / "scripts" / "generate.py")), []),
    ],
    ids=["explain", "help", "train", "script"],
)
def test_while_libraries_are_imported(module, run, flags):
    program = _AT.format(module=module, run=run, flags=flags)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", SAID)


def test_a_command_begins_without_a_library():
    """Before a command's first line nothing can be done about an interrupt."""
    program = "import sys; before = set(sys.modules); import gspmd.commands.main; print(*set(sys.modules) - before)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    libraries = {name.partition(".")[0] for name in shown.split()} - sys.stdlib_module_names
    assert libraries == {"gspmd"}


def test_where_interrupts_are_ignored_they_stay_so():
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + _AT.format(
        module="gspmd.commands.explain", run=PACKAGE, flags=["explain"]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 1
    assert "taken for something else" in done.stderr


def test_whoever_calls_a_command_lives_on():
    """With flags of its own it is called from a program, a notebook say, which has more to do than this command."""
    call = (
        _AT.format(module="gspmd.commands.explain", run="run_module  # the call below, instead", flags=[])
        + """
from gspmd.commands.main import main
print(main(["explain"]), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "130 True\n", SAID)


def test_threads_that_work_on_are_left_alone():
    """XLA compiles in threads, which are in the middle of something when the interpreter takes itself down."""
    program = """
import sys, threading, time, types
def run(flags, script):
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("printed", flags)
    raise KeyboardInterrupt
sys.modules["gspmd.commands.explain"] = types.SimpleNamespace(run=run)
from gspmd.commands.main import main
sys.exit(main())
"""
    given = [sys.executable, "-c", program, "explain"]
    done = subprocess.run(given, capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (130, "printed []\n", SAID)


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

def interrupt(*_):
    signal.raise_signal(signal.{number})

class Terminated(KeyboardInterrupt):
    number = signal.SIGTERM

def terminate(*_):
    raise Terminated

def run(flags, file):
    signal.signal(signal.SIGTERM, terminate)
    {inside}
    try:
        time.sleep(30)
    except Terminated:
        return 143

main.import_module = lambda name: types.SimpleNamespace(run=run)
sys.argv = ["gspmd", "train"]
sys.exit(main.main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
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
