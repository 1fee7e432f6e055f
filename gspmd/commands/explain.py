"""An equation on a mesh: its plan, drawn as the papers draw it, with the plans of its gradients.

    gspmd explain "BLE_xyz, E_xF_yz -> BLF_yzx" --mesh x=4,y=4,z=4 --sizes B=512,L=1,E=18432,F=73728 --svg plan.svg

Nothing runs and nothing is compiled: no device of the mesh is needed.
"""

import argparse
import sys
from collections.abc import Sequence

import gspmd
from gspmd.annotate.errors import shown
from gspmd.commands import pictures
from gspmd.display.console import console
from gspmd.lowerings.in_force import LOWERINGS
from gspmd.planner import drawing
from gspmd.reading import WHOLE, whole_number


def run(argv: Sequence[str], script: str = "") -> int:
    """Print the plan and write its pictures; return the exit code.

    It is 2 for bad input, which gets one message on stderr, and if a picture cannot be written, which gets one for each
    file after the plan.

    Args:
        argv: the flags.
        script: the file in scripts/ that runs it instead, for the help and the messages.
    """
    parser = _parser(script or "gspmd explain")
    options = parser.parse_args(argv)
    try:
        plan = gspmd.plan(
            options.equation,
            options.sizes,
            options.mesh,
            dtype=options.dtype,
            chip=options.chip,
            lowering=options.lowering,
            via=options.via,
        )
        data = plan.to_json(gradients=options.gradients)
    except (gspmd.SpecError, gspmd.PlanError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(data)
    else:
        drawing.show(plan, console(), gradients=options.gradients)
    faults = pictures.write(plan.figure(gradients=options.gradients), options) if pictures.asked(options) else []
    for fault in faults:
        print(f"{parser.prog}: {fault}", file=sys.stderr)
    return 2 if faults else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")  # The message, without the usage before it.


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("equation", help='an equation, such as "BLE_xyz, E_xF_yz -> BLF_yzx"')
    parser.add_argument("--mesh", type=_numbers, required=True, help="sizes of the mesh axes, such as x=4,y=4,z=4")
    parser.add_argument("--sizes", type=_numbers, required=True, help="sizes of the dimensions, such as B=512,E=18432")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of every operand (default: %(default)s)")
    parser.add_argument("--chip", default="tpu-v4", help="chip, a row of chips.toml (default: %(default)s)")
    parser.add_argument("--lowering", default="auto", help=f"one of {', '.join(LOWERINGS)} (default: %(default)s)")
    parser.add_argument("--via", help='specs of the operands in the local einsum, such as "BLE_x, E_xF_yz"')
    parser.add_argument("--no-gradients", dest="gradients", action="store_false", help="leave the gradients out")
    parser.add_argument("--json", action="store_true", help="print plain data instead of the figure")
    pictures.add_flags(parser, "the plan")
    return parser


def _numbers(text: str) -> dict[str, int]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    for name, equals, size in pairs:
        if not (name.strip() and equals):
            raise argparse.ArgumentTypeError(f"{shown(name + equals + size)} is not a name and a size, such as x=4.")
        if whole_number(size) is None:
            raise argparse.ArgumentTypeError(f"{name.strip()} has size {shown(size.strip())}, which is not {WHOLE}.")
    names = [name.strip() for name, *_ in pairs]
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} gives a size twice.")
    return {name: int(n) for name, (*_, n) in zip(names, pairs)}
