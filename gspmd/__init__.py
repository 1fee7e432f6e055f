"""Write the sharding as the papers write it; see what it costs; run it."""

from gspmd.annotate import LayoutError, PlanError, Spec, SpecError
from gspmd.collectives.einsum import einsum, reshard
from gspmd.collectives.lowering import lowering
from gspmd.collectives.planning import plan

__all__ = ["LayoutError", "PlanError", "Spec", "SpecError", "annotate", "einsum", "lowering", "plan", "reshard"]
