"""Write the sharding as the papers write it; see what it costs; run it."""

from gspmd import host
from gspmd.annotate import LayoutError, PlanError, Spec, SpecError, annotate
from gspmd.audit.ledger import Ledger, ledger
from gspmd.collectives.einsum import einsum, reshard
from gspmd.collectives.lowering import lowering
from gspmd.collectives.planning import Plan, plan
from gspmd.collectives.trace import ProgramPlan, trace
from gspmd.layouts import Layout

host.quiet_libtpu()  # before JAX loads it in search of a TPU

__all__ = [
    "Layout",
    "LayoutError",
    "Ledger",
    "Plan",
    "PlanError",
    "ProgramPlan",
    "Spec",
    "SpecError",
    "annotate",
    "einsum",
    "ledger",
    "lowering",
    "plan",
    "reshard",
    "trace",
]
