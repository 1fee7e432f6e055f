"""Write the sharding as the papers write it; see what it costs; run it."""

from importlib import import_module

from gspmd import host

TYPE_CHECKING = False  # Type checkers treat this as typing.TYPE_CHECKING; importing typing takes longer than this file.
if TYPE_CHECKING:
    from typing import Any

    from gspmd import audit as audit
    from gspmd import layouts as layouts
    from gspmd import moe as moe
    from gspmd import ops as ops
    from gspmd import pipeline as pipeline
    from gspmd import search as search
    from gspmd import training as training
    from gspmd.annotate import LayoutError, PlanError, Spec, SpecError, annotate
    from gspmd.audit import Ledger, ledger
    from gspmd.layouts import Layout
    from gspmd.lowerings.in_force import lowering
    from gspmd.ops._einsum import einsum, reshard
    from gspmd.ops._plan import plan
    from gspmd.ops._show import show
    from gspmd.planner.plan import Plan
    from gspmd.tracing.trace import ProgramPlan, trace

# Everything is imported when it is first used, so that `import gspmd` takes no time. Every command begins with this
# import, and an interrupt during it ends in a traceback instead of one line.
_HOMES = {
    "Layout": "gspmd.layouts",
    "LayoutError": "gspmd.annotate",
    "Ledger": "gspmd.audit",
    "Plan": "gspmd.planner.plan",
    "PlanError": "gspmd.annotate",
    "ProgramPlan": "gspmd.tracing.trace",
    "Spec": "gspmd.annotate",
    "SpecError": "gspmd.annotate",
    "einsum": "gspmd.ops._einsum",
    "ledger": "gspmd.audit",
    "lowering": "gspmd.lowerings.in_force",
    "plan": "gspmd.ops._plan",
    "reshard": "gspmd.ops._einsum",
    "show": "gspmd.ops._show",
    "trace": "gspmd.tracing.trace",
}
_ROOMS = ("audit", "layouts", "moe", "ops", "pipeline", "search", "training")

host.quiet_libtpu()  # before JAX loads it in search of a TPU
host.skip_check_of_cuda()  # before JAX loads its plugin for CUDA

__all__ = [
    "Layout",
    "LayoutError",
    "Ledger",
    "Plan",
    "PlanError",
    "ProgramPlan",
    "Spec",
    "SpecError",
    "__version__",
    "annotate",
    "einsum",
    "ledger",
    "lowering",
    "plan",
    "reshard",
    "show",
    "trace",
]


def __getattr__(name: str) -> "Any":
    # The packages annotate and search are callable: each stands for the function of the same name.
    if name in _ROOMS or name == "annotate":
        return import_module(f"gspmd.{name}")
    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    elif name == "__version__":
        found = _version()
    else:
        raise AttributeError(f"module 'gspmd' has no attribute {name!r}", name=name, obj=import_module("gspmd"))
    globals()[name] = found
    return found


def _version() -> str:
    from importlib.metadata import version

    return version("gspmd")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "host"])
