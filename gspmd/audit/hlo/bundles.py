"""The schedule of a Pallas kernel on a TPU: cycles by part of its loop, from the bundles that the compiler prints.

A core executes one bundle of instructions in each cycle, in order. HLO has no cycle estimate for a kernel, but the
compiler's dump of its final schedule ("final_bundles") has every bundle, with branches and the trip count of the loop.
"""

import re
from dataclasses import dataclass

from gspmd.hardware.chips import Chip
from gspmd.ops.interface.kernels import KernelWork

_BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) +(L[HBE]|P[BF]|CT)?: ", re.MULTILINE)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\(!?%\w+\) )?target = \$region(\d+)")
_TRIPS = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test \*/")
_DELAY = 5
"""Number of bundles from a branch to the first bundle that it may skip; those in between (delay slots) always run."""
_STAGES = 2
"""Number of trips that the loop makes beyond the steps of the grid, to fill and drain the pipeline of transfers."""


@dataclass(frozen=True)
class KernelSchedule:
    """Numbers of instruction bundles of a kernel on one core, by part of its loop over the grid.

    Attributes:
        trips: number of iterations of the loop.
        step: bundles of every iteration.
        block: additional bundles of iterations with matrix products.
        row: additional bundles of iterations that begin or end a sum.
        outside: bundles before and after the loop.
    """

    trips: int
    step: int
    block: int
    row: int
    outside: int

    @classmethod
    def read(cls, text: str) -> "KernelSchedule | None":
        """Read a dump; return None unless it is a single loop with branches that skip parts of its body."""
        found = list(_BUNDLE.finditer(text))
        ends = [each.start() for each in found[1:]] + [len(text)]
        bundles = {int(each[1], 16): text[each.start() : end] for each, end in zip(found, ends)}
        loops, trips = [int(each[1], 16) for each in found if each[2] == "LB"], _TRIPS.findall(text)
        begins: dict[int, int] = {}
        for address, bundle in bundles.items():
            for region in _REGION.findall(bundle):
                begins.setdefault(int(region), address)
        branches = [(at, begins.get(int(to[1]))) for at, bundle in bundles.items() if (to := _BRANCH.search(bundle))]
        back = [at for at, to in branches if to is not None and to <= at]
        if len(loops) != 1 or len(back) != 1 or len(trips) != 1:
            return None
        within = [(at, to) for at, to in branches if loops[0] <= at < back[0]]
        skipped = [(at + _DELAY, to) for at, to in within if to is not None]
        if len(skipped) < len(within):
            return None
        innermost = [
            (start, end)
            for start, end in skipped
            if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in skipped)
        ]
        parts = {True: 0, False: 0}
        for start, end in innermost:
            parts[any("vmatmul" in bundles[at] for at in range(start, end) if at in bundles)] += end - start
        body = back[0] + _DELAY - loops[0]
        return cls(int(trips[0]), body - sum(parts.values()), parts[True], parts[False], len(bundles) - body)

    def seconds(self, work: KernelWork, chip: Chip) -> float:
        """Return the predicted seconds of a kernel that does this work.

        The result is at least the time of the kernel's products at the chip's peak, and of its bytes at the chip's
        bandwidth.

        The schedule does not contain waits for transfers: only the limit by bandwidth accounts for them.
        """
        cores = max(1, round(work.steps / max(1, self.trips - _STAGES)))
        products = max(work.blocks * self.block / cores / chip.clock, work.flops / chip.flops("bfloat16"))
        rest = ((work.steps * self.step + work.rows * self.row) / cores + self.outside) / chip.clock
        return max(products + rest, work.bytes / chip.hbm_bandwidth)


def least_seconds(work: KernelWork, chip: Chip) -> float:
    """Return a lower bound on a kernel's seconds without its schedule, from peak and bandwidth."""
    return max(work.flops / chip.flops("bfloat16"), work.bytes / chip.hbm_bandwidth)
