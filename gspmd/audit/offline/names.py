"""Names of TPU slices and of nodes of GPUs, such as `tpu-v4:4x4x4`, `tpu-v5p:4x8x8*4` and `h100:16x8`."""

import re
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt, prod
from typing import NamedTuple

from gspmd.annotate.errors import PlanError, shown, suggestion
from gspmd.hardware.chips import CHIPS, Chip, not_another

POD_CHIPS = {"tpu-v3": 1024, "tpu-v4": 4096, "tpu-v5e": 256, "tpu-v5p": 8960, "tpu-v6e": 256, "tpu7x": 9216}
"""Number of chips in a full pod, which is the largest slice that exists. The compiler would describe larger slices too.

Source: pod sizes in the Google Cloud documentation, 'TPU v3', 'TPU v4' and so on."""

SEARCHED_GPUS = 24_576
"""The largest number of GPUs for which `shapes` yields a shape. The name of a topology may ask for more GPUs.

Source: the number of GPUs of the cluster that trained Llama 3, 24K H100 (Llama Team 2024, *The Llama 3 Herd of Models*,
§3.3.1)."""

MOST_DEVICES = 2**18
"""The largest number of devices that a name may ask for, which is ten times `SEARCHED_GPUS`, rounded up to a power of
two. Each device is a Python object, so an absurdly large number of devices would fill the memory."""

SPELLINGS = {"a100-80gb": "a100", "h100-80gb": "h100"}
"""Additional names of GPUs, with the names that chips.toml uses for them."""

CORES = {"tpu-v3": 2, "tpu7x": 2}
"""Number of JAX devices per chip, for chips that are more than one device (see `libtpu.py`)."""


def shapes(chip: Chip, slices: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a chip's slices, from the smallest slice to a full pod.

    Each shape has twice as many chips as the shape before, and is as close to a cube as possible. For a GPU, the shapes
    are parts of a node, followed by 1, 2, 4, ... nodes with up to `SEARCHED_GPUS` GPUs. If a topology has several
    slices, all its slices together have at most `MOST_DEVICES` devices.

    Args:
        chip: a TPU or a GPU.
        slices: number of slices of each topology.

    Example:
        >>> list(shapes(CHIPS["tpu-v6e"]))
        [(2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
        >>> list(shapes(CHIPS["h100"]))[:6]
        [(1,), (2,), (4,), (8,), (2, 8), (4, 8)]
    """
    if chip.is_switch:
        node, nodes = chip.node_devices, 2
        yield from ((1 << power,) for power in range((node - 1).bit_length()))
        yield (node,)
        while nodes * node <= SEARCHED_GPUS:
            yield nodes, node
            nodes *= 2
        return
    shape = [2, 2, 1][: chip.torus]
    most = min(POD_CHIPS[chip.name], MOST_DEVICES // (slices * CORES.get(chip.name, 1)))
    while prod(shape) <= most:
        yield tuple(sorted(shape) if 1 not in shape else shape)
        shape[shape.index(min(shape))] *= 2


class Named(NamedTuple):
    """The parsed name of a topology.

    Attributes:
        chip: the figures of one device. If there are several slices, each slice counts as a node.
        shape: for TPUs, the number of chips along each torus axis of one slice. For GPUs, the number of GPUs per node;
            if there are several nodes, the number of nodes comes first.
        slices: number of TPU slices, which are connected by the data-centre network.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def cores(self) -> int:
        """Number of JAX devices per chip."""
        return CORES.get(self.chip.name, 1)

    @property
    def name(self) -> str:
        """The canonical name of the topology."""
        several = f"*{self.slices}" if self.slices > 1 else ""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}{several}"


def read_name(name: str) -> Named:
    """Parse the name of a topology.

    Example:
        >>> [read_name(name).shape for name in ("tpu-v4:4x4x8", "h100:16x8", "h100:1x8", "h100:4")]
        [(4, 4, 8), (16, 8), (8,), (4,)]
        >>> several = read_name("tpu-v5p:4x8x8*4")
        >>> several.slices, several.chip.node_devices
        (4, 256)

    Raises:
        PlanError: `name` is not a string, or no such topology exists.
    """
    if not isinstance(name, str):
        fact = "it is not a string"
        raise PlanError(f"there is no topology {shown(name)}: {fact}.\n  Write 'tpu-v4:4x4x4' or 'h100:16x8'.")
    head, _, tail = name.strip().lower().partition(":")
    tail, times, number = "".join(tail.split()).partition("*")
    chip = _chip(head)
    if chip is None:
        gpus = not_another(head, _gpus())
        near = suggestion(head, gpus) or suggestion(f"tpu-{_plain(head)}", POD_CHIPS) if head and gpus else ""
        raise PlanError(_no_such(name, f"no chip is called {shown(head)}" if head else "it names no chip", near))
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8})*", tail):
        fact = f"{shown(tail)} is not a shape" if tail else "it has no shape"
        raise PlanError(_no_such(name, fact, f"Did you mean {_example(chip)!r}? "))
    if times and not re.fullmatch(r"[1-9]\d{0,8}", number):
        fact = f"{shown(number)} is not a number of slices" if number else "it has no number of slices after '*'"
        raise PlanError(_no_such(name, fact, f"Did you mean '{chip.name}:{tail}*2'? "))
    shape, slices = tuple(map(int, tail.split("x"))), int(number or 1)
    if chip.is_switch:
        if times:
            fact = "only TPUs come in slices; for GPUs the first number is the number of nodes"
            raise PlanError(_no_such(name, fact, f"Did you mean {_nodes_near(chip, slices * prod(shape))!r}? "))
        if fact := _impossible_nodes(chip, shape):
            raise PlanError(_no_such(name, fact, f"Did you mean {_nodes_near(chip, prod(shape))!r}? "))
        return Named(chip, shape[1:] if shape[0] == 1 and len(shape) == 2 else shape)
    if fact := _impossible(chip, shape):
        raise PlanError(_no_such(name, fact, f"Did you mean {_example(chip)!r}? "))
    in_slice = prod(shape) * CORES.get(chip.name, 1)
    if slices * in_slice > MOST_DEVICES:
        fact = f"gspmd describes at most {MOST_DEVICES:,} devices, but this has {slices * in_slice:,}"
        raise PlanError(_no_such(name, fact, f"Did you mean '{chip.name}:{tail}*{MOST_DEVICES // in_slice}'? "))
    return Named(replace(chip, node_devices=in_slice) if slices > 1 else chip, shape, slices)


def _chip(head: str) -> Chip | None:
    named = {_plain(spelled): row for row in CHIPS.values() for spelled in (row.name, *row.device_kinds)}
    named |= {_plain(spelled): CHIPS[chip] for spelled, chip in SPELLINGS.items()}
    return named.get(_plain(head)) or named.get(_plain(head).removeprefix("v"))


def _gpus() -> list[str]:
    return [name for name, row in CHIPS.items() if row.is_switch]


def _impossible_nodes(chip: Chip, shape: tuple[int, ...]) -> str:
    """Return the reason why nodes of GPUs with the given shape do not exist, or an empty string if they may exist.

    If there are several nodes, all GPUs of each node must be used, because plans assume `Chip.node_devices` GPUs in
    every node.
    """
    node, sizes = chip.node_devices, "x".join(map(str, shape))
    if len(shape) > 2:
        return f"GPUs come as nodes x GPUs of a node, and {sizes} has {len(shape)} dimensions"
    if shape[-1] > node:
        return f"a node of {chip.name} has {node} GPUs, but {sizes} uses {shape[-1]} of one node"
    if len(shape) == 2 and shape[0] > 1 and shape[1] != node:
        return f"a node of {chip.name} has {node} GPUs, but {sizes} uses only {shape[1]} of each node"
    if (count := prod(shape)) > MOST_DEVICES:
        return f"gspmd describes at most {MOST_DEVICES:,} GPUs, but {sizes} has {count:,}"
    return ""


def _nodes_near(chip: Chip, gpus: int) -> str:
    """Return the name of the smallest topology with at least `gpus` GPUs.

    If no topology has so many GPUs, return the name of the largest topology.
    """
    gpus = min(gpus, MOST_DEVICES // chip.node_devices * chip.node_devices)
    if gpus <= chip.node_devices:
        return f"{chip.name}:{gpus}"
    return f"{chip.name}:{-(-gpus // chip.node_devices)}x{chip.node_devices}"


def _impossible(chip: Chip, shape: tuple[int, ...]) -> str:
    """Return the reason why a TPU slice with the given shape does not exist, or an empty string if it may exist.

    The compiler may describe a slice that does not exist.
    """
    pod, sizes = POD_CHIPS[chip.name], "x".join(map(str, shape))
    side = isqrt(pod)
    if len(shape) != chip.torus:
        return f"{chip.name} is a {chip.torus}D torus, and {sizes} has {len(shape)} dimension{'s' * (len(shape) > 1)}"
    if chip.torus == 2 and max(shape) > side:
        return f"a {chip.name} pod is {side}x{side}, and {sizes} is not a part of it"
    return f"a {chip.name} pod has {pod} chips, but {sizes} has {prod(shape)}" if prod(shape) > pod else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower()).removeprefix("tpu").removeprefix("nvidia")


def _example(chip: Chip) -> str:
    return f"{chip.name}:{chip.node_devices if chip.is_switch else 'x'.join('4' * chip.torus)}"


def _no_such(name: str, fact: str, hint: str) -> str:
    tpus, gpus = (", ".join(_example(CHIPS[chip]) for chip in chips) for chips in (POD_CHIPS, _gpus()))
    return f"there is no topology {shown(name)}: {fact}.\n  {hint}Known: {tpus}, {gpus}, and other sizes."
