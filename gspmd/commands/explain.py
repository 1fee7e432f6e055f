"""`gspmd explain`: plan an equation, and draw its plan and the plans of its gradients."""

import argparse
import sys
from collections.abc import Sequence

import gspmd
from gspmd.commands import pictures
from gspmd.commands.explain_settings import parse
from gspmd.commands.messages import told
from gspmd.display.console import console
from gspmd.display.progress import Progress
from gspmd.planner import drawing


def run(argv: Sequence[str], script: str = "", settings: argparse.Namespace | None = None) -> int:
    """Print the plan and write its pictures; return the exit code of the command.

    The exit code is 2 for bad input, with one message on stderr. The exit code is also 2 if pictures cannot be written.
    If it is known in advance that they cannot be written, nothing is planned; a full disk is reported after the plan.

    Args:
        argv: the flags.
        script: if a file in scripts/ was started instead of `gspmd`, its name, for help and messages.
        settings: the settings, if the flags have been parsed already.
    """
    options = settings or parse(argv, script)
    if faults := [*pictures.faults_of(options)]:
        print(f"{options.prog}: {faults[0]}", *faults[1:], sep="\n", file=sys.stderr)
        return 2
    try:
        # On six mesh axes it may take half a minute. Programs that read the output need no progress.
        terminal = console(stderr=True)
        with Progress(terminal if terminal.is_terminal else None, "Planning"):
            plan, data = _planned(options)
    except (gspmd.SpecError, gspmd.PlanError) as error:
        print(f"{options.prog}: {told(error).partition(': ')[2]}", file=sys.stderr)
        return 2
    if options.json:
        print(data)
    else:
        drawing.show(plan, console(), gradients=options.gradients)
    faults = pictures.write(plan.figure(gradients=options.gradients), options) if pictures.asked(options) else []
    for fault in faults:
        print(f"{options.prog}: {fault}", file=sys.stderr)
    return 2 if faults else 0


def _planned(options: argparse.Namespace) -> tuple[gspmd.Plan, str]:
    """Return the plan, and the JSON of the plan, which has the plans of the gradients if flags ask for them."""
    given = {name: getattr(options, name) for name in ("dtype", "chip", "lowering", "via")}
    plan = gspmd.plan(options.equation, options.sizes, options.mesh, **given)
    return plan, plan.to_json(gradients=options.gradients)
