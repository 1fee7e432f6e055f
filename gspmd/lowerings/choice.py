"""The choice of a lowering: only the one that is chosen is imported."""

from gspmd.lowerings.call import Call, Passes
from gspmd.planner.unknown import is_unknown


def lower(call: Call) -> Passes:
    """Make a program of a call. A lowering is one such function."""
    name = call.context.lowering
    if is_unknown(call.context.mesh):
        from gspmd.lowerings.unknown import lower
    elif name == "xla":
        from gspmd.lowerings.xla.lowering import lower
    elif name == "blocking":
        from gspmd.lowerings.blocking.lowering import lower
    else:
        from gspmd.lowerings.looped.lowering import lower
    return lower(call)
