"""Lower bounds on what every assignment of mesh axes costs one product, all worked out at once in numpy.

A bound leaves out what it cannot know cheaply, never adds: the einsum's operations at full speed, what must at least be
received over all links together, and the hops along every axis that has to leave its place.
"""

from collections.abc import Iterable
from itertools import product
from math import prod

import numpy as np

from gspmd.annotate.spec import Spec
from gspmd.collectives.cost import hops
from gspmd.collectives.problem import Member, Setting, Tensor, wider

FREE, OWED, THEIRS = "-", "+", "*"
"""Where an axis stands when on no dimension: replicated, or owing a partial sum, the shared tensor's or the partner's.

A product is linear in one owed sum, so at most one of the two still owes it.
"""


class Bounds:
    """Lower bounds, in picoseconds, of every assignment of mesh axes for one member."""

    def __init__(self, setting: Setting, shared: Tensor, member: Member, pinned: Spec | None, twins=()):
        self.setting, self.shared, self.member = setting, shared, member
        self.sizes, self.mesh = dict(setting.sizes), dict(setting.mesh)
        self.axes = tuple(self.mesh)
        partner = member.partner
        self.dims = tuple(dict.fromkeys(shared.spec.dims + (partner.spec.dims if partner else ())))
        options = [self._options(axis, pinned) for axis in self.axes]
        rows = list(product(*options))
        self.table = np.array(rows, dtype="U1").reshape(len(rows), len(self.axes))  # one empty row on one device
        self.table = self.table[self._divides() & self._consistent()]
        self.table = self.table[self._canonical(twins)]
        self._measure()

    def _options(self, axis: str, pinned: Spec | None) -> list[str]:
        """Where an axis may stand; pins leave one place to the tensors they name."""
        places = [dim for dim in self.dims if self.sizes[dim] % self.mesh[axis] == 0] + [FREE]
        places += [OWED] * (axis in self.shared.spec.partial)
        partner = self.member.partner
        places += [THEIRS] * (partner is not None and axis in partner.spec.partial)
        for spec, owed in ((pinned, OWED), (self.member.pinned, THEIRS)):
            if spec is not None:
                held = place_of(spec, axis, owed)
                places = [place for place in places if place == held or (place not in spec.dims and held == FREE)]
        return places

    def _divides(self) -> np.ndarray:
        good = np.ones(len(self.table), bool)
        for dim in self.dims:
            good &= self.sizes[dim] % self._spread([dim]).astype(np.int64) == 0
        return good

    def _canonical(self, twins) -> np.ndarray:
        """Of two dimensions that play the same part, the second gets axes only where the first cannot take them all."""
        good = np.ones(len(self.table), bool)
        for first, second in twins:
            spread = self._spread([second])
            good &= (spread == 1) | (self.sizes[first] % (spread * self._spread([first])).astype(np.int64) != 0)
        return good

    def _consistent(self) -> np.ndarray:
        """The target's partial sums must come about: from a summed dimension, or from one that was owed already."""
        good = np.ones(len(self.table), bool)
        summed = [dim for dim in self.dims if dim not in self.member.target.spec.dims] + [OWED, THEIRS]
        for axis in self.member.target.spec.partial:
            good &= np.isin(self.table[:, self.axes.index(axis)], summed)
        return good

    def _spread(self, places: Iterable[str]) -> np.ndarray:
        """Into how many parts the axes standing on these places cut, per assignment."""
        counts = np.array([self.mesh[axis] for axis in self.axes], dtype=float)
        return np.where(np.isin(self.table, list(places)), counts, 1.0).prod(axis=1)

    def _measure(self) -> None:
        chip = self.setting.chip
        bare = chip.is_switch or chip.nodes(self.mesh) > 1  # hops that a node cuts short are none to count on
        self.latency = {
            axis: chip.hop_seconds * (0 if bare else hops(size, chip)) for axis, size in self.mesh.items()
        }
        own = self._move_bound(self.shared, OWED)
        rest = self._compute_bound() + self._result_bound()
        if self.member.partner is not None:
            rest = rest + self._move_bound(self.member.partner, THEIRS)
        own, rest = (np.floor(seconds * 1e12).astype(np.int64) for seconds in (own, rest))
        self.shared_bound, self.best_rest, self.rows = {}, {}, {}
        shared_dims = set(self.shared.spec.dims)
        for row, mine, other in zip(self.table.tolist(), own.tolist(), rest.tolist()):
            key = tuple(self._seen_by_shared(axis, place, shared_dims) for axis, place in zip(self.axes, row))
            self.shared_bound.setdefault(key, mine)
            self.best_rest[key] = min(other, self.best_rest.get(key, other))
            self.rows.setdefault(key, []).append((other, tuple(row)))

    def _seen_by_shared(self, axis: str, place: str, dims: set[str]) -> str:
        return place if place in dims or place == OWED else FREE

    def completions(self, key: tuple) -> list[tuple[int, tuple]]:
        """The assignments that agree with the shared tensor's, cheapest bound first."""
        return sorted(self.rows[key])

    def _move_bound(self, tensor: Tensor, owed: str) -> np.ndarray:
        """What a device must at least receive of its target piece, and the hops of every axis that leaves its place."""
        whole = prod(self.sizes[dim] for dim in tensor.spec.dims) * tensor.itemsize
        target = whole / self._spread(tensor.spec.dims)
        leaving, changing, latency, least = [], [], np.zeros(len(self.table)), np.full(len(self.table), float(whole))
        for i, axis in enumerate(self.axes):
            held = place_of(tensor.spec, axis, owed)
            gone = self.table[:, i] != held
            if held != FREE:
                latency += gone * self.latency[axis]
            leaving.append(gone & (held in tensor.spec.dims))
            stands = np.isin(self.table[:, i], tensor.spec.dims)
            changing.append(leaving[-1] & stands)
            least = np.where(stands | (held in tensor.spec.dims), least / self.mesh[axis], least)
        return np.maximum(self._received(target, leaving), self._exchanged(least, changing)) + latency

    def _received(self, target: np.ndarray, leaving: list[np.ndarray]) -> np.ndarray:
        """Seconds of receiving all of `target` bytes but a device's own part, over the rings of the axes that leave."""
        gone = np.array(leaving, bool).reshape(len(self.axes), len(self.table)).T
        counts = np.array([self.mesh[axis] for axis in self.axes], dtype=float)
        parts = np.where(gone, counts, 1.0).prod(axis=1)
        return target * (1 - 1 / parts) / self._rate(gone)

    def _exchanged(self, least: np.ndarray, changing: list[np.ndarray]) -> np.ndarray:
        """Seconds of bringing axes from one dimension to another, by all-to-all, or gathered and sliced.

        `least` is the smallest piece on the way, cut by the axes of both ends.
        """
        chip, slowest = self.setting.chip, np.zeros(len(self.table))
        if chip.is_switch or chip.nodes(self.mesh) > 1:
            return slowest
        for axis, moved in zip(self.axes, changing):
            size = self.mesh[axis]
            way = min(size / 8, (size - 1) / (2 * chip.torus))
            slowest = np.maximum(slowest, moved * way)
        return slowest * least / chip.link_bandwidth

    def _rate(self, used: np.ndarray) -> np.ndarray:
        """Bytes per second at most of collectives over these axes; an axis that does not close halves its own."""
        chip = self.setting.chip
        if chip.is_switch:
            return np.full(len(used), chip.egress_bandwidth)
        rings = np.clip(used.sum(axis=1), 1, chip.torus)
        cut = chip.nodes(self.mesh) > 1  # what is left of an axis on one node may close
        closes = np.array([cut or chip.wraps(self.mesh[axis]) for axis in self.axes], bool)
        return 2 * chip.link_bandwidth * rings * np.where((used & closes).any(axis=1), 1.0, 0.5)

    def _compute_bound(self) -> np.ndarray:
        if self.member.partner is None:
            return np.zeros(len(self.table))
        points = prod(self.sizes[dim] for dim in self.dims)
        factor = 2 if any(dim not in self.member.target.spec.dims for dim in self.dims) else 1
        return factor * points / self._spread(self.dims) / self.setting.chip.flops(wider(self.shared, self.member))

    def _result_bound(self) -> np.ndarray:
        target = self.member.target
        kept = [dim for dim in self.dims if dim in target.spec.dims]
        whole = prod(self.sizes[dim] for dim in kept) * target.itemsize
        result = whole / self._spread(kept)
        wanted = whole / prod(self.mesh[axis] for dim in kept for axis in target.spec.axes_of(dim))
        latency, owed, spare = np.zeros(len(self.table)), np.ones(len(self.table)), np.ones(len(self.table))
        leaving, settling, changing, least = [], [], [], np.full(len(self.table), float(whole))
        for i, axis in enumerate(self.axes):
            place, aim = self.table[:, i], place_of(target.spec, axis)
            leaves = np.isin(place, kept) & (place != aim)
            settled = ~np.isin(place, kept) & (place != FREE) & (aim != OWED)
            latency += (leaves | settled) * self.latency[axis]
            owed *= np.where(settled, self.mesh[axis], 1)
            leaving.append(leaves)
            changing.append(leaves & (aim in kept))
            least = np.where(np.isin(place, kept) | (aim in kept), least / self.mesh[axis], least)
            settling.append(settled)
            if aim in kept:
                spare *= np.where(place == FREE, self.mesh[axis], 1)
        settling = np.array(settling, bool).reshape(len(self.axes), len(self.table)).T
        scattered = result / spare * (1 - 1 / owed) / self._rate(settling)
        moved = np.maximum(self._received(wanted, leaving), self._exchanged(least, changing))
        return np.maximum(scattered, moved) + latency


def place_of(spec: Spec, axis: str, owed: str = OWED) -> str:
    """The dimension that an axis shards, or what it is when on none; `owed` says whose sum an owed one is."""
    if axis in spec.partial:
        return owed
    return next((dim for dim, axes in zip(spec.dims, spec.axes) if axis in axes), FREE)
