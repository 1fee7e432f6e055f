"""What a string means: specs, equations, and the calls that place arrays by them."""

from gspmd.annotate.arrays import annotate, spec_of
from gspmd.annotate.equation import Equation, Operand, Term, Via, parse_equation, parse_via
from gspmd.annotate.errors import Fault, LayoutError, PlanError, SpecError, report
from gspmd.annotate.fit import mesh_sizes
from gspmd.annotate.gshard import mesh_split, replicate, shard, split
from gspmd.annotate.nodes import OPEN
from gspmd.annotate.spec import Spec

__all__ = [
    "OPEN",
    "Equation",
    "Fault",
    "LayoutError",
    "Operand",
    "PlanError",
    "Spec",
    "SpecError",
    "Term",
    "Via",
    "annotate",
    "mesh_sizes",
    "mesh_split",
    "parse_equation",
    "parse_via",
    "replicate",
    "report",
    "shard",
    "spec_of",
    "split",
]
