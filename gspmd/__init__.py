"""Write the sharding as the papers write it; see what it costs; run it."""

from gspmd.annotate import LayoutError, PlanError, Spec, SpecError, annotate
from gspmd.collectives.einsum import einsum, reshard
from gspmd.collectives.lowering import lowering
from gspmd.collectives.planning import Plan, plan
from gspmd.collectives.trace import trace

__all__ = ["LayoutError", "Plan", "PlanError", "Spec", "SpecError", "annotate", "einsum", "lowering", "plan", "reshard", "trace"]
