"""The names of the lowerings, which settings and layouts can read without importing JAX."""

from gspmd.annotate.errors import PlanError, shown, suggestion

# Schedules are repeated here from the public `SCHEDULES` of planner/overlap.py, which imports numpy.
LOWERINGS = ("auto", "xla", "blocking", "looped", "looped:halves", "looped:paired")


def checked(name: str) -> str:
    """Check that `name` is the name of a lowering, and return `name`.

    Raises:
        PlanError: `name` is not a lowering.
    """
    if not isinstance(name, str) or name not in LOWERINGS:
        raise PlanError(
            f"no lowering is called {shown(name)}.\n  {suggestion(str(name), LOWERINGS)}Known: {', '.join(LOWERINGS)}."
        )
    return name
