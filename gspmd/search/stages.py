"""The fastest split of layers into consecutive stages of a pipeline, each on its own submesh.

A pipeline of B microbatches takes Σ t_i + (B - 1) · max t_j, where stage i takes t_i for one microbatch. For a fixed
t_max, the longest time that a stage may take, the fewest Σ t_i is found by dynamic programming from the last stage.
t_max is one of the given seconds. All of them are tried, the smallest first, until no larger one can be better.

Source: Zheng et al. 2022, Alpa (arXiv 2201.12023), section 5.2, equations 2 to 4.
Differs: every t_max is tried, not one in each interval of ε, so the answer is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class LayerRange:
    """A stage: consecutive layers on one submesh.

    Attributes:
        first, last: its first and its last layer, both included.
        submesh: the index of its submesh.
    """

    first: int
    last: int
    submesh: int


@dataclass(frozen=True)
class StageSplit:
    """Layers split into stages.

    Attributes:
        stages: the stages in the order of the layers.
        seconds: the seconds that all microbatches take through all stages.
    """

    stages: tuple[LayerRange, ...]
    seconds: float


class NoSplit(ValueError):
    """No split uses all devices, is allowed, and fits in memory."""


Fits = Callable[[LayerRange, int], bool]


def split(
    seconds: np.ndarray | Sequence,
    submesh_devices: Sequence[int],
    devices: int,
    microbatches: int,
    fits: Fits | None = None,
) -> StageSplit:
    """Split layers into stages, each on a submesh, so that all devices are used and the seconds are fewest.

    Args:
        seconds: [layers, layers, submeshes], the seconds that a stage of layers i to j on a submesh takes for one
            microbatch; `inf` if that is not possible. Entries below the diagonal are not read.
        submesh_devices: the number of devices of each submesh.
        devices: the number of all devices.
        microbatches: the number of microbatches, B.
        fits: a function of a stage and the number n of stages after it, which returns whether the stage fits in memory.
            In 1F1B a stage holds the inputs of n + 1 microbatches, or of all microbatches if there are fewer.

    Raises:
        NoSplit: there is no split that uses all devices, is allowed, and fits.
        ValueError: the shape of `seconds` is wrong, or a number is not positive.

    Example:
        >>> layers = np.array([3.0, 1.0, 1.0, 1.0])  # the first layer takes longer, and two devices halve it all
        >>> table = [[[layers[i : j + 1].sum() / n for n in (1, 2)] for j in range(4)] for i in range(4)]
        >>> split(table, (1, 2), devices=2, microbatches=4)
        StageSplit(stages=(LayerRange(first=0, last=3, submesh=1),), seconds=12.0)
        >>> split(np.array(table)[:, :, :1], (1,), devices=2, microbatches=4).stages
        (LayerRange(first=0, last=0, submesh=0), LayerRange(first=1, last=3, submesh=0))
    """
    given, sizes = np.asarray(seconds, float), tuple(submesh_devices)
    _check_shape(given, len(sizes))
    table = _upper(given)
    _check(table, sizes, devices, microbatches)
    space = _SplitSpace(table, sizes, devices, fits)
    best = _cheapest(space, microbatches)
    if best is None:
        raise NoSplit(_fault(space))
    return StageSplit(best, _seconds(table, best, microbatches))


@dataclass(frozen=True, eq=False)
class _SplitSpace:
    """The arguments of `split` that do not depend on the number of microbatches, and values derived from them."""

    table: np.ndarray
    sizes: tuple[int, ...]
    devices: int
    fits: Fits | None

    @property
    def layers(self) -> int:
        return len(self.table)

    @property
    def most_stages(self) -> int:
        return min(self.layers, self.devices // min(self.sizes))

    @cached_property
    def unit(self) -> int:
        """The unit in which devices are counted: the greatest common divisor of `devices` and all `sizes`."""
        return math.gcd(self.devices, *self.sizes)

    @cached_property
    def allowed(self) -> list[np.ndarray]:
        """Seconds of every stage, by the number of stages after it; infinite where the stage does not fit in memory."""
        if self.fits is None:
            return [self.table] * self.most_stages
        return [self._within(behind, self.fits) for behind in range(self.most_stages)]

    def _within(self, behind: int, fits: Fits) -> np.ndarray:
        found = self.table.copy()
        for first, last, submesh in np.argwhere(np.isfinite(found)).tolist():
            if not fits(LayerRange(first, last, submesh), behind):
                found[first, last, submesh] = math.inf
        return found


Stages = tuple[LayerRange, ...]


def _seconds(table: np.ndarray, stages: Stages, microbatches: int) -> float:
    paces = [float(table[each.first, each.last, each.submesh]) for each in stages]
    return math.fsum(paces) + (microbatches - 1) * max(paces)


def _cheapest(space: _SplitSpace, microbatches: int) -> Stages | None:
    """Find the cheapest split by trying every t_max; return None if there is no split."""
    best = free = _fewest(space, math.inf)
    if free is None:
        return None
    # However small t_max is, the sum is no smaller than without a limit on the stages.
    least, known = _seconds(space.table, free, 1), _seconds(space.table, free, microbatches)
    paces = np.unique(space.table[np.isfinite(space.table)])
    for pace in paces[_first_possible(space, paces) :]:
        if least + (microbatches - 1) * pace >= known:
            break
        found = _fewest(space, float(pace))
        assert found is not None  # a split exists from the first possible pace on
        if (seconds := _seconds(space.table, found, microbatches)) < known:
            best, known = found, seconds
    return best


def _first_possible(space: _SplitSpace, paces: np.ndarray) -> int:
    """Return the index of the smallest t_max for which a split exists; one also exists for every larger t_max."""
    low, high = 0, len(paces) - 1
    while low < high:
        middle = (low + high) // 2
        if _fewest(space, float(paces[middle])) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _fewest(space: _SplitSpace, pace: float) -> Stages | None:
    """Find the split with the fewest Σ t_i in which no stage takes longer than `pace`.

    F[k, d] is the fewest seconds of layers k and later on d devices. Each round of the loop allows one more stage.
    """
    layers, devices = space.layers, space.devices // space.unit
    fewest = np.full((layers + 1, devices + 1), math.inf)
    fewest[layers, 0] = 0.0
    picks: list[np.ndarray] = []
    best, count = math.inf, 0
    for allowed in space.allowed:
        table = np.where(allowed <= pace, allowed, math.inf)
        fewest, picked = _one_more(table, [size // space.unit for size in space.sizes], fewest)
        picks.append(picked)
        if fewest[0, devices] < best:
            best, count = float(fewest[0, devices]), len(picks)
    return tuple(_followed(space, picks[:count])) if count else None


def _one_more(table: np.ndarray, sizes: Sequence[int], behind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return F, as in `_fewest`, with one more stage in front, and an array of this stage's last layers and submeshes.

    Each entry of the array encodes a last layer and a submesh as one number.
    """
    layers, columns = len(table), behind.shape[1]
    fewest, picked = np.full_like(behind, math.inf), np.zeros(behind.shape, int)
    for submesh, size in enumerate(sizes):
        for first in range(layers if size < columns else 0):
            sums = table[first, first:, submesh, None] + behind[first + 1 :, : columns - size]
            last = sums.argmin(0)
            found = np.take_along_axis(sums, last[None], 0)[0]
            better = found < fewest[first, size:]
            fewest[first, size:][better] = found[better]
            picked[first, size:][better] = ((first + last) * len(sizes) + submesh)[better]
    return fewest, picked


def _followed(space: _SplitSpace, picks: Sequence[np.ndarray]) -> Iterator[LayerRange]:
    first, left = 0, space.devices // space.unit
    for picked in reversed(picks):
        last, submesh = divmod(int(picked[first, left]), len(space.sizes))
        yield LayerRange(first, last, submesh)
        first, left = last + 1, left - space.sizes[submesh] // space.unit


def _upper(table: np.ndarray) -> np.ndarray:
    """Return the table with infinite entries where the last layer of a stage would come before its first."""
    return np.where(np.triu(np.ones(table.shape[:2], bool))[..., None], table, math.inf)


def _check_shape(table: np.ndarray, submeshes: int) -> None:
    shape = table.shape
    if len(shape) != 3 or shape[0] != shape[1] or shape[2] != submeshes or not table.size:
        raise ValueError(
            f"seconds has shape {shape}, but the number of submeshes is {submeshes}.\n"
            "  Give [layers, layers, submeshes], of one layer and one submesh at least."
        )


def _check(table: np.ndarray, sizes: Sequence[int], devices: int, microbatches: int) -> None:
    if np.isnan(table).any() or (table < 0).any():
        raise ValueError("seconds are negative or not a number.\n  Give inf for a stage that is not possible.")
    if min(*sizes, devices, microbatches) < 1:
        raise ValueError(
            f"cannot split for {microbatches} microbatches, {devices} devices and submeshes of {list(sizes)}.\n"
            "  Give 1 or more of each."
        )


def _fault(space: _SplitSpace) -> str:
    """Return the reason why there is no split, with a remedy."""

    def possible(table: np.ndarray, fits: Fits | None) -> bool:
        return bool(_cheapest(_SplitSpace(table, space.sizes, space.devices, fits), 1))

    what = f"{space.layers} layers into stages on {space.devices} devices"
    offered = ", ".join(map(str, sorted({*space.sizes})))
    if not possible(_upper(np.zeros_like(space.table)), None):
        return (
            f"cannot split {what}: submeshes of {offered} devices do not add up to {space.devices} in any number of "
            "stages for which there are enough layers.\n"
            "  Offer a submesh with a different number of devices, such as all of them."
        )
    if possible(space.table, None):
        return (
            f"cannot split {what}: no split fits in memory.\n"
            "  Cut the batch into more microbatches, recompute more, or use more devices."
        )
    return (
        f"cannot split {what}: every split has a stage of infinite seconds.\n"
        "  Give seconds to stages on more of the submeshes."
    )
