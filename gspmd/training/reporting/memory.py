"""The memory of one device: parameters, gradients, optimizer state and activations, by formula and as compiled."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gspmd import host
from gspmd.annotate.errors import listed
from gspmd.display.tables import Column, Sheet
from gspmd.display.units import amount_of_bytes
from gspmd.training.state import TrainState
from gspmd.training.toml import ConfigError

_COLUMNS = (
    Column("what"),
    Column("whole", "right", goes=2),
    Column("shares", "right", goes=1),
    Column("per parameter", "right", goes=3),
    Column("on one device", "right"),
)


def device_bytes(tree: Any) -> int:
    """Return the bytes that arrays, or shapes with shardings, take on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def check(doing: str, parts: Mapping[str, Any], devices: Sequence[jax.Device], remedy: str) -> None:
    """Raise an error if arrays that are not made yet would not fit into the memory of a device.

    Without this check, arrays on fake CPU devices could make the machine swap.

    Args:
        doing: the first words of the error message.
        parts: the arrays, or shapes with shardings, by name.
        devices: the devices of this process.
        remedy: the last words of the error message.

    Raises:
        ConfigError: the arrays do not fit; the message states the bytes of each part on one device, and the device's
            memory.
    """
    taken, room = {name: device_bytes(part) for name, part in parts.items()}, host.memory(devices)
    if room is not None and sum(taken.values()) > room:
        held = listed([f"{amount_of_bytes(count)} of {name}" for name, count in taken.items()])
        each = f"each of {len(devices)} devices" if len(devices) > 1 else "the device"
        share = ", its share of this machine's memory" if host.is_fake(devices) else ""
        fact = f"it takes {held} on {each}, which has {amount_of_bytes(room)}{share}."
        raise ConfigError(doing, [f"{fact} {remedy}"])


def table(state: TrainState, gradients: Any, compiled: Any) -> Sheet:
    """Build a table of the memory of one device in a training step.

    Parameters, gradients and optimizer state follow ZeRO's formulas. With P parameters in float32 and Adam, whose state
    has two moments, a device holds

        4·P/p + 4·P/g + 8·P/o bytes

    where p, g and o are the numbers of shards of parameters, gradients and optimizer state in the layout. All three are
    1 for data parallelism. Over d devices, o = d for ZeRO-1, g = o = d for ZeRO-2, and p = g = o = d for ZeRO-3. The
    remaining memory of the compiled program is taken by activations and other intermediate values.

    Args:
        state: the training state, or its shapes.
        gradients: the shapes and shardings of all gradients before the optimizer's update.
        compiled: the compiled step, whose first argument is the state; None if there is no compiled step.

    Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), section 3 and figure 1.
    """
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    sheet = Sheet("Memory in a training step", _COLUMNS)
    parts = {"parameters": state.params, "gradients": gradients, "optimizer state": state.optimizer}
    for name, tree in parts.items():
        whole, held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)), device_bytes(tree)
        shares = f"1/{whole / held:.3g}" if held and whole > held else "all"
        sheet.add(name, amount_of_bytes(whole), shares, f"{held / count:.3g} B", amount_of_bytes(held))
    known = device_bytes(parts)
    stats = compiled.memory_analysis() if compiled is not None else None
    if stats is None:  # Some backends do not say.
        sheet.add("all but activations", "", "", f"{known / count:.3g} B", amount_of_bytes(known), total=True)
        return sheet
    taken = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    taken += stats.temp_size_in_bytes
    rest = max(0, taken - known)
    sheet.add("activations and the like", "", "", "", amount_of_bytes(rest))
    sheet.add("all, as compiled", "", "", "", amount_of_bytes(taken), total=True)
    return sheet
