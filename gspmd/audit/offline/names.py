"""Names of TPU slices, such as `tpu-v4:4x4x4`: their meaning, and the slices that exist."""

import re
from collections.abc import Iterator
from math import isqrt, prod

from gspmd.annotate.errors import PlanError, shown, suggestion
from gspmd.hardware.chips import CHIPS, Chip

POD_CHIPS = {"tpu-v3": 1024, "tpu-v4": 4096, "tpu-v5e": 256, "tpu-v5p": 8960, "tpu-v6e": 256, "tpu7x": 9216}
"""Number of chips of the largest slice that exists (Google Cloud documentation, 'TPU v3', 'TPU v4', ...: pod size). The
compiler describes larger ones too."""

CORES = {"tpu-v3": 2, "tpu7x": 2}
"""Number of devices of one chip, if it is not one (see `libtpu.py`)."""


def shapes(chip: Chip) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a chip's slices from the smallest to a pod, doubling in size, each as near a cube as
    possible.

    Example:
        >>> list(shapes(CHIPS["tpu-v6e"]))
        [(2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    """
    shape = [2, 2, 1][: chip.torus]
    while prod(shape) <= POD_CHIPS[chip.name]:
        yield tuple(sorted(shape) if 1 not in shape else shape)
        shape[shape.index(min(shape))] *= 2


def read_name(name: str) -> tuple[Chip, tuple[int, ...]]:
    """Return the chip of a slice, and the number of chips along each torus axis.

    Raises:
        PlanError: the slice does not exist.
    """
    if not isinstance(name, str):
        raise PlanError(f"there is no topology {shown(name)}: it is no text.\n  Write 'tpu-v4:4x4x4'.")
    head, _, tail = name.strip().lower().partition(":")
    chip = _chip(head)
    if chip is None:
        hint = suggestion(f"tpu-{_plain(head)}", POD_CHIPS) if head else ""
        raise PlanError(_no_such(name, f"no TPU is called {shown(head)}" if head else "it lacks a chip", hint))
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", tail):
        fact = f"{shown(tail)} is no shape" if tail else "it lacks a shape"
        raise PlanError(_no_such(name, fact, f"Did you mean {_example(chip)!r}? "))
    shape = tuple(map(int, tail.split("x")))
    if fact := _impossible(chip, shape):
        raise PlanError(_no_such(name, fact, f"Did you mean {_example(chip)!r}? "))
    return chip, shape


def _chip(head: str) -> Chip | None:
    named = {_plain(spelled): CHIPS[chip] for chip in POD_CHIPS for spelled in (chip, *CHIPS[chip].device_kinds)}
    return named.get(_plain(head)) or named.get(_plain(head).removeprefix("v"))


def _impossible(chip: Chip, shape: tuple[int, ...]) -> str:
    """Return why no such slice exists, though the compiler would describe one; empty if it may exist."""
    pod, sizes = POD_CHIPS[chip.name], "x".join(map(str, shape))
    side = isqrt(pod)
    if len(shape) != chip.torus:
        return f"{chip.name} is a {chip.torus}D torus, and {sizes} has {len(shape)} dimension{'s' * (len(shape) > 1)}"
    if chip.torus == 2 and max(shape) > side:
        return f"a {chip.name} pod is {side}x{side}, and {sizes} is no part of it"
    return f"a {chip.name} pod has {pod} chips, and {sizes} takes {prod(shape)}" if prod(shape) > pod else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower()).removeprefix("tpu")


def _example(chip: Chip) -> str:
    return f"{chip.name}:{'x'.join('4' * chip.torus)}"


def _no_such(name: str, fact: str, hint: str) -> str:
    known = ", ".join(_example(CHIPS[chip]) for chip in POD_CHIPS)
    return f"there is no topology {shown(name)}: {fact}.\n  {hint}Known: {known}, and other sizes."
