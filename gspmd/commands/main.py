"""`gspmd COMMAND ...`: which commands there are, and how one is started."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

from rich.text import Text

import gspmd
from gspmd.display.console import console

#: Command -> what it does. Each is a module of this package with `run(argv, script) -> exit code`.
COMMANDS = {
    "explain": "what an equation will do on a mesh, drawn as the papers draw it",
    "train": "train a Mixture-of-Experts language model on text, every tensor placed by a layout",
    "generate": "continue prompts with a public checkpoint or a trained run, in any layout",
    "export": "write a trained run as a public checkpoint, which transformers loads",
    "compile": "ask the TPU compiler whether a model fits on a slice, and what it will cost",
}
_EXAMPLES = (
    'gspmd explain "BLE_xyz, E_xF_yz -> BLF_yzx" --mesh x=4,y=4,z=4 --sizes B=512,L=1,E=18432,F=73728',
    "gspmd train --config tiny",
    'gspmd generate --checkpoint runs/001 --prompt "def "',
    "gspmd compile --config palm-8b --layout weight-stationary-2d --topology tpu-v4:4x4x4",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or list them; return the exit code: 2 for a command that there is not.

    Args:
        argv: the command and its flags; those of this process if not given.
    """
    name, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    if name in COMMANDS:
        return _run(name, flags)
    if name in ("", "-h", "--help"):
        console().print(_overview(), soft_wrap=True)
        return 0
    if name == "--version":
        print(f"gspmd {gspmd.__version__}")
        return 0
    near = difflib.get_close_matches(name, [*COMMANDS, "--help", "--version"], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    print(f"gspmd: there is no command {name!r}.{hint} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
    return 2


def script(name: str, file: str) -> int:
    """Run a command for the file in scripts/ that stands for it, with the flags of this process.

    Args:
        name: the command.
        file: the script's name.
    """
    return _run(name, sys.argv[1:], file)


def _run(name: str, flags: Sequence[str], file: str = "") -> int:
    try:
        command = import_module(f"gspmd.commands.{name}")
    except ModuleNotFoundError as error:
        if error.name != "gspmd_models":  # it is installed with gspmd; a checkout alone does not have it by that name
            raise
        print(f"{error}. Install gspmd first; in a checkout: pip install -e .", file=sys.stderr)
        return 2
    return command.run(flags, file)


def _overview() -> Text:
    width = max(map(len, COMMANDS))
    rows = [Text.assemble("  gspmd ", (name.ljust(width), "bold cyan"), f"  {does}") for name, does in COMMANDS.items()]
    title = Text.assemble(("gspmd", "bold"), f" {gspmd.__version__}: {gspmd.__doc__[0].lower()}{gspmd.__doc__[1:]}")
    examples = [Text(f"  {line}", style="dim") for line in _EXAMPLES]
    closing = "gspmd COMMAND --help lists a command's flags; gspmd --version prints the version."
    return Text("\n").join([title, Text(), *rows, Text(), *examples, Text(), Text(closing)])
