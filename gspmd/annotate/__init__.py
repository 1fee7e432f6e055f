"""What a string means: specs, equations, and the calls that place arrays by them."""

from gspmd.annotate.equation import Equation, Operand, Term, parse_equation, parse_via
from gspmd.annotate.errors import Fault, LayoutError, PlanError, SpecError, report
from gspmd.annotate.spec import OPEN, Spec, mesh_sizes

__all__ = ["OPEN", "Equation", "Fault", "LayoutError", "Operand", "PlanError", "Spec", "SpecError", "Term",
           "mesh_sizes", "parse_equation", "parse_via", "report"]
