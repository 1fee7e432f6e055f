"""Plan an equation on a mesh, and draw the plan as a chain of specs and collectives, with the plans of its gradients.

    gspmd explain "BLE_xyz, E_xF_yz -> BLF_yzx" --mesh x=4,y=4,z=4 --sizes B=512,L=1,E=18432,F=73728 --svg plan.svg

Nothing runs and nothing is compiled: no device of the mesh is needed.
"""

import argparse
from collections.abc import Sequence

from gspmd.commands import pictures
from gspmd.commands.arguments import Parser, dimension_sizes, mesh_sizes
from gspmd.lowerings.names import LOWERINGS


def parse(argv: Sequence[str], script: str = "") -> argparse.Namespace:
    """Parse the flags; the attribute `prog` of the result is the name of the program in messages.

    Args:
        argv: the flags.
        script: the name of the file in scripts/ that runs the command, for help and messages.
    """
    parser = make_parser(script or "gspmd explain")
    return parser.parse_args(argv, argparse.Namespace(prog=parser.prog))


def make_parser(prog: str) -> Parser:
    """Return the parser of the flags, for a program of this name."""
    parser = Parser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("equation", help='an equation, such as "BLE_xyz, E_xF_yz -> BLF_yzx"')
    parser.add_argument("--mesh", type=mesh_sizes, required=True, help="sizes of the mesh axes, such as x=4,y=4,z=4")
    parser.add_argument(
        "--sizes", type=dimension_sizes, required=True, help="sizes of the dimensions, such as B=512,E=18432"
    )
    parser.add_argument("--dtype", default="bfloat16", help="dtype of every operand (default: %(default)s)")
    parser.add_argument("--chip", default="tpu-v4", help="chip, a row of chips.toml (default: %(default)s)")
    parser.add_argument("--lowering", default="auto", help=f"one of {', '.join(LOWERINGS)} (default: %(default)s)")
    parser.add_argument("--via", help='specs of the operands in the local einsum, such as "BLE_x, E_xF_yz"')
    parser.add_argument("--no-gradients", dest="gradients", action="store_false", help="leave the gradients out")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, in place of the chain")
    pictures.add_flags(parser, "the plan")
    return parser
