"""The lowering in force: the default inside a `with gspmd.lowering(...)`."""

from contextlib import AbstractContextManager

import jax

from gspmd.annotate.errors import PlanError, shown, suggestion
from gspmd.hardware.chips import Chip
from gspmd.planner.overlap import SCHEDULES

LOWERINGS = (
    "auto",
    "xla",
    "blocking",
    "looped",
    *(f"looped:{name}" for name, each in SCHEDULES.items() if each.is_public),
)

_default = jax.make_user_context(default_value="auto")  # part of jit's cache key, so no stale program
_chip = jax.make_user_context(default_value=None)


def lowering(name: str) -> AbstractContextManager:
    """Set the default lowering of `gspmd.einsum` and `gspmd.reshard` inside a `with` block.

    Args:
        name: `"xla"` annotates, and the compiler chooses the collectives; `"blocking"` runs the plan's own collectives
            in a shard_map; `"looped"` runs gathers and reduce-scatters inside the einsums, by the cheapest schedule,
            and `"looped:<schedule>"` by `halves` or `paired`; `"auto"` is, equation by equation, the
            cheaper of blocking and looped by the cost model, and blocking on devices that chips.toml does not list.

    Raises:
        PlanError: unknown name.

    Example:
        >>> with lowering("xla"):
        ...     current()
        'xla'
    """
    return _default(checked(name))


def planned_for(chip: Chip) -> AbstractContextManager:
    """Plan with a chip's figures inside a `with` block, on meshes whose devices are not known."""
    return _chip(chip)


def chip_in_force() -> Chip | None:
    """Return the chip of `planned_for`; None outside."""
    return _chip.value


def current() -> str:
    """The lowering in force."""
    return _default.value


def checked(name: str) -> str:
    """A lowering's name, if it is one."""
    if not isinstance(name, str) or name not in LOWERINGS:
        raise PlanError(
            f"no lowering is called {shown(name)}.\n  {suggestion(str(name), LOWERINGS)}Known: {', '.join(LOWERINGS)}."
        )
    return name


def resolve(name: str | None) -> str:
    """The lowering that is asked for: an argument, else the default in force."""
    return checked(current() if name is None else name)
