"""The schedule of a Pallas kernel on a TPU: the cycles of each part of its loop, counted in the compiler's dump.

A TPU core executes one bundle of instructions per cycle, in order. HLO has no estimate of a kernel's cycles. But the
compiler's dump of the final schedule ("final_bundles") lists every bundle, with the branches and the trip count of the
loop.
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
"""Number of bundles from a branch to the first bundle that the branch may skip. The bundles in between, the delay
slots, always run."""
_STAGES = 2
"""Number of additional iterations of the loop, beyond one per step of the grid. The additional iterations fill and
drain the pipeline of transfers."""


@dataclass(frozen=True)
class KernelSchedule:
    """The schedule of a kernel on one core: numbers of instruction bundles in the parts of its loop over the grid.

    Attributes:
        trips: number of iterations of the loop.
        step: number of bundles that every iteration executes.
        block: number of additional bundles in iterations that compute matrix products.
        row: number of additional bundles in iterations that begin or end a sum.
        outside: number of bundles before and after the loop.
    """

    trips: int
    step: int
    block: int
    row: int
    outside: int

    @classmethod
    def read(cls, text: str) -> "KernelSchedule | None":
        """Parse a dump; return None unless the kernel is a single loop with branches that skip parts of its body."""
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
        """Return the predicted time, in seconds, of a kernel that does the given work.

        The result is at least the time of the kernel's products at the chip's peak rate, and at least the time of its
        bytes at the chip's memory bandwidth.

        The schedule does not contain the time spent waiting for transfers. Only the limit by memory bandwidth accounts
        for such waits.
        """
        cores = max(1, round(work.steps / max(1, self.trips - _STAGES)))
        products = max(work.blocks * self.block / cores / chip.clock, work.flops / chip.flops("bfloat16"))
        rest = ((work.steps * self.step + work.rows * self.row) / cores + self.outside) / chip.clock
        return max(products + rest, work.bytes / chip.hbm_bandwidth)


def least_seconds(work: KernelWork, chip: Chip) -> float:
    """Return a lower bound on a kernel's time in seconds, from the chip's peak rate and memory bandwidth alone."""
    return max(work.flops / chip.flops("bfloat16"), work.bytes / chip.hbm_bandwidth)
