"""The lowering, the chip, the devices and the manual mesh axes that are in force where a program is traced.

`gspmd.lowering` and the other `with` blocks here set JAX user contexts, which are part of jit's cache key: no program
that was traced under other settings is run by mistake.
"""

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

_default = jax.make_user_context(default_value="auto")
_chip = jax.make_user_context(default_value=None)
_on_no_axes = jax.make_user_context(default_value=False)

# -- the lowering and the chip -----------------------------------------------------------------------------------------


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
    """Return the lowering in force."""
    return _default.value


def checked(name: str) -> str:
    """Return a lowering's name, if there is one of that name.

    Raises:
        PlanError: there is none.
    """
    if not isinstance(name, str) or name not in LOWERINGS:
        raise PlanError(
            f"no lowering is called {shown(name)}.\n  {suggestion(str(name), LOWERINGS)}Known: {', '.join(LOWERINGS)}."
        )
    return name


def resolve(name: str | None) -> str:
    """Return the lowering that is asked for: an argument, else the default in force."""
    return checked(current() if name is None else name)


# -- the devices -------------------------------------------------------------------------------------------------------


def device_kind() -> str:
    """Return JAX's name of the devices that a program is traced for; empty where the mesh in force has none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def is_tpu() -> bool:
    """Return whether the devices are TPUs."""
    return device_kind().startswith("TPU")


def is_host() -> bool:
    """Return whether the devices are host devices: CPU cores, which have no links and no matrix unit."""
    return device_kind() == "cpu"


# -- manual mesh axes --------------------------------------------------------------------------------------------------


def on_no_axes() -> AbstractContextManager:
    """Allow calls in a shard_map over all mesh axes, where pieces are whole arrays: they are planned on no axis."""
    return _on_no_axes(True)


def check_all_manual() -> None:
    """Check that a call in a shard_map over all mesh axes stands in `on_no_axes`.

    Raises:
        PlanError: it does not.
    """
    if not _on_no_axes.value:
        raise PlanError(
            "cannot plan inside another shard_map: its mesh axes are already manual, so arrays there are pieces.\n"
            "  Call gspmd outside of the shard_map, or use jax.lax collectives inside it."
        )
