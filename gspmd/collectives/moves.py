"""The cheapest chain of collectives that brings a tensor from one spec to another.

A uniform-cost search over placements. From any placement the actions are those that bring some axis nearer to where the
target has it: slice, reduce-scatter and all-reduce what is replicated or partial, exchange or gather minor axes,
permute where only the order is wrong. Slicing early and gathering late falls out of the costs.
"""

import heapq
from collections.abc import Iterator, Mapping
from itertools import chain, takewhile
from math import prod

from gspmd.annotate.errors import PlanError
from gspmd.annotate.spec import Spec
from gspmd.collectives.chips import Chip
from gspmd.collectives.cost import collective_seconds, hops, wire_bytes
from gspmd.collectives.plan import Step, picoseconds

Axes = tuple[str, ...]
Placement = tuple[tuple[Axes, ...], frozenset[str]]
"""The axes of every dimension, and the axes whose sum is still owed."""
Path = tuple[tuple[str, Axes, Placement, Placement], ...]
"""Actions: kind, axes, from where, to where."""


def move(
    src: Spec,
    dst: Spec,
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    itemsize: int,
    chip: Chip,
    operand: str = "",
) -> tuple[Step, ...]:
    """Plan the collectives that bring a tensor from `src` to `dst`.

    Args:
        src: the spec it has.
        dst: the spec it shall have; the same dimensions (their order is the caller's concern), partial sums a subset.
        sizes: size of each dimension of the whole tensor.
        mesh: size of each mesh axis.
        itemsize: bytes per element on the wire.
        chip: whose links the seconds are for.
        operand: how the steps name the tensor.

    Returns:
        The steps, cheapest in seconds, then in bytes, then in number.

    Raises:
        PlanError: the target owes a partial sum that the source does not, or the sizes divide on no way there.
    """
    return move_within(None, src, dst, sizes, mesh, itemsize, chip, operand)


def move_within(
    limit: int | None, src: Spec, dst: Spec, sizes, mesh, itemsize: int, chip: Chip, operand: str = ""
) -> tuple[Step, ...] | None:
    """`move`, or None as soon as it is certain to take more than `limit` picoseconds."""
    if src == dst:
        return ()
    src, dst = src.without_trivial(mesh), dst.without_trivial(mesh)
    shape = tuple([sizes[dim] for dim in src.dims])
    target = Spec(src.dims, tuple([dst.axes_of(dim) for dim in src.dims]), dst.partial)
    key = (src, target, shape, tuple(mesh.items()), itemsize, chip, operand)
    if key not in _known:
        steps = _search(limit, src, target, shape, mesh, itemsize, chip, operand)
        if steps is None:
            return None
        if len(_known) >= 1 << 16:
            _known.clear()
        _known[key] = steps
    return _known[key]


_known: dict[tuple, tuple[Step, ...]] = {}  # an answer, not a bound: a search that hit its limit leaves nothing here


def _search(
    limit: int | None,
    src: Spec,
    dst: Spec,
    shape: tuple[int, ...],
    mesh: Mapping[str, int],
    itemsize: int,
    chip: Chip,
    operand: str,
) -> tuple[Step, ...] | None:
    if not set(dst.partial) <= set(src.partial):
        owed = ", ".join(sorted(set(dst.partial) - set(src.partial)))
        raise PlanError(f"cannot move '{src}' to '{dst}'\n  nothing makes the partial sum over mesh axis {owed}.")
    problem = _Problem(dst, shape, mesh, itemsize, chip)
    start = (src.axes, frozenset(src.partial))
    path = straight(problem, start) or cheapest(problem, start, limit)
    return None if path is None else tuple(problem.step(src.dims, *edge, operand) for edge in path)


def cheapest(problem: "_Problem", start: Placement, limit: int | None = None) -> Path | None:
    """Best-first search; ties go to fewer bytes, fewer steps, the order of the actions. None beyond the limit."""
    queue: list = [(0, 0, 0, 0, 0, start, ())]
    done, pushed = set(), 0
    while queue:
        least, sent, steps, _, seconds, here, path = heapq.heappop(queue)
        if limit is not None and least > limit:
            return None
        if here == problem.target:
            return path
        if here in done:
            continue
        done.add(here)
        for kind, axes, there in problem.actions(here):
            if there not in done and problem.divides(there):
                price, bytes_ = problem.price(kind, axes, here, there)
                pushed += 1
                reached = seconds + price
                entry = (
                    reached + problem.ahead(there),
                    sent + bytes_,
                    steps + 1,
                    pushed,
                    reached,
                    there,
                    (*path, (kind, axes, here, there)),
                )
                heapq.heappush(queue, entry)
    raise PlanError(
        f"no chain of collectives from {start[0]} to {problem.goal} divides the sizes {problem.shape} evenly."
    )


def straight(problem: "_Problem", start: Placement) -> Path | None:
    """The answer where there is nothing to search, None elsewhere.

    No axis changes its dimension or its order, and at most one dimension is gathered, one reduce-scattered. Then slices
    come first, what sums second, what gathers last.
    """
    axes, partial = start
    gathers, arrivals = [], []
    for d, (held, wanted) in enumerate(zip(axes, problem.goal)):
        kept = _common_prefix(held, wanted)
        leaving, arriving = held[kept:], wanted[kept:]
        if (leaving and arriving) or any(axis in problem.home for axis in leaving):
            return None
        if leaving:
            gathers.append((d, leaving))
        if arriving:
            arrivals.append((d, arriving))
    scatters = [(d, group) for d, group in arrivals if any(axis in partial for axis in group)]
    if len(gathers) > 1 or len(scatters) > 1 or any(not set(group) <= partial for _, group in scatters):
        return None
    path, here = [], start
    for d, group in arrivals:
        if (d, group) not in scatters:
            here = _extend(path, "slice", group, (_put(here[0], d, here[0][d] + group), here[1]), here)
    for d, group in scatters:
        here = _extend(
            path, "reduce-scatter", group, (_put(here[0], d, here[0][d] + group), here[1] - set(group)), here
        )
    if owed := here[1] - problem.keep:
        if scatters:  # one all-reduce of everything, and slices, may be cheaper: it runs on the links of all its axes
            return None
        here = _extend(
            path, "all-reduce", tuple(axis for axis in problem.mesh if axis in owed), (here[0], here[1] - owed), here
        )
    for _, group in gathers:
        here = _extend(path, "all-gather", group, (problem.goal, here[1]), here)
    return tuple(path) if all(problem.divides(there) for *_, there in path) else None


def _extend(path: list, kind: str, axes: Axes, there: Placement, here: Placement) -> Placement:
    path.append((kind, axes, here, there))
    return there


class _Problem:
    """The target of one search, and what an action on the way costs."""

    def __init__(self, target: Spec, shape: tuple[int, ...], mesh: dict[str, int], itemsize: int, chip: Chip):
        self.goal = target.axes
        self.home = {axis: d for d, axes in enumerate(target.axes) for axis in axes}
        self.keep = frozenset(target.partial)
        self.target = (self.goal, self.keep)
        self.shape, self.mesh, self.chip = shape, mesh, chip
        self.whole = prod(shape) * itemsize
        self.local: dict[Placement, int] = {}
        self.prices: dict[tuple, tuple[int, int]] = {}
        self.target_bytes = self.local_bytes(self.target)
        self.rate = chip.egress_bandwidth if chip.is_switch else 2 * chip.link_bandwidth * chip.torus
        latency = 0 if chip.is_switch or chip.nodes(mesh) > 1 else chip.hop_seconds
        self.latency = {axis: int(1e12 * latency * hops(size, chip)) for axis, size in mesh.items()}

    def ahead(self, placement: Placement) -> int:
        """Picoseconds that the rest of the way takes at least: what has to be received, and every axis out of place."""
        growth = self.target_bytes - self.local_bytes(placement)
        wait = int(1e12 * growth / self.rate) if growth > 0 else 0
        for d, held in enumerate(placement[0]):
            for axis in held:
                if self.home.get(axis) != d:
                    wait += self.latency[axis]
        for axis in placement[1] - self.keep:
            wait += self.latency[axis]
        return wait

    def local_bytes(self, placement: Placement) -> int:
        if placement not in self.local:
            self.local[placement] = self.whole // prod([self.mesh[axis] for axes in placement[0] for axis in axes])
        return self.local[placement]

    def divides(self, placement: Placement) -> bool:
        for size, axes in zip(self.shape, placement[0]):
            if axes and size % prod([self.mesh[axis] for axis in axes]):
                return False
        return True

    def price(self, kind: str, axes: Axes, here: Placement, there: Placement) -> tuple[int, int]:
        """Picoseconds and wire bytes."""
        buffer = max(self.local_bytes(here), self.local_bytes(there))
        key = (kind, axes, buffer)
        if key not in self.prices:
            seconds = collective_seconds(kind, axes, self.mesh, buffer, self.chip)
            self.prices[key] = picoseconds(seconds), wire_bytes(kind, prod([self.mesh[axis] for axis in axes]), buffer)
        return self.prices[key]

    def step(
        self, dims: tuple[str, ...], kind: str, axes: Axes, here: Placement, there: Placement, operand: str
    ) -> Step:
        buffer = max(self.local_bytes(here), self.local_bytes(there))
        sent = wire_bytes(kind, prod(self.mesh[axis] for axis in axes), buffer)
        seconds = collective_seconds(kind, axes, self.mesh, buffer, self.chip)
        before, after = (Spec(dims, place[0], tuple(sorted(place[1]))) for place in (here, there))
        return Step(kind, axes, sent, seconds, before, after, operand)

    def actions(self, here: Placement) -> Iterator[tuple[str, Axes, Placement]]:
        """Every action that can be on a cheapest path: its kind, its axes, where it leads.

        A slice that stands in order costs nothing and shrinks all that follows, so where there is one it is the only
        action.
        """
        for d, (held, wanted) in enumerate(zip(here[0], self.goal)):
            if held == wanted[: len(held)] and (group := self._sliceable(here, wanted[len(held) :])):
                yield "slice", group, (_put(here[0], d, held + group), here[1])
                return
        yield from self._split(here)
        yield from self._settle(here)
        yield from self._leave(here)
        yield from self._reorder(here)

    def _sliceable(self, here: Placement, wanted: Axes) -> Axes:
        """The leading axes of `wanted` over which the tensor is replicated."""
        axes, partial = here
        return tuple(takewhile(lambda axis: axis not in partial and not any(axis in held for held in axes), wanted))

    def _split(self, here: Placement) -> Iterator[tuple[str, Axes, Placement]]:
        """Slice what is replicated, reduce-scatter what is partial, onto the dimension that wants it."""
        axes, partial = here
        placed = frozenset(chain(*axes))
        for d, wanted in enumerate(self.goal):
            for kind, ready in (
                ("slice", [axis for axis in wanted if axis not in placed and axis not in partial]),
                ("reduce-scatter", [axis for axis in wanted if axis in partial]),
            ):
                for count in range(len(ready), 0, -1):
                    group = tuple(ready[:count])
                    yield kind, group, (_put(axes, d, axes[d] + group), partial - set(group))

    def _settle(self, here: Placement) -> Iterator[tuple[str, Axes, Placement]]:
        """All-reduce what is partial and wanted nowhere, or everything partial where scattering cannot be had."""
        axes, partial = here
        owed = partial - self.keep
        for group in {frozenset(axis for axis in owed if axis not in self.home), owed} - {frozenset()}:
            yield "all-reduce", tuple(axis for axis in self.mesh if axis in group), (axes, partial - group)

    def _leave(self, here: Placement) -> Iterator[tuple[str, Axes, Placement]]:
        """Take minor axes off a dimension: gather them, or exchange them for a split of where they belong."""
        axes, partial = here
        for d, held in enumerate(axes):
            settled = _common_prefix(held, self.goal[d])
            for start in range(settled, len(held)):
                group, rest = held[start:], _put(axes, d, held[:start])
                yield "all-gather", group, (rest, partial)
                homes = {self.home.get(axis, d) for axis in group}
                if len(homes) == 1 and (home := homes.pop()) != d:
                    yield "all-to-all", group, (_put(rest, home, rest[home] + group), partial)

    def _reorder(self, here: Placement) -> Iterator[tuple[str, Axes, Placement]]:
        """Permute: within a dimension, so that what stays is major in the wanted order and what leaves is minor; or
        straight to the target where every device already holds a piece of the right size."""
        axes, partial = here
        for d, held in enumerate(axes):
            stays = tuple(axis for axis in self.goal[d] if axis in held)
            leaves = sorted((axis for axis in held if axis not in self.goal[d]), key=self._exit_order)
            ordered = stays + tuple(leaves)
            if ordered != held:
                yield "collective-permute", _changed(held, ordered), (_put(axes, d, ordered), partial)
        goal = (self.goal, partial)
        if axes != self.goal and partial == self.keep and self._same_pieces(axes):
            moved = {axis for held, wanted in zip(axes, self.goal) if held != wanted for axis in _changed(held, wanted)}
            yield "collective-permute", tuple(axis for axis in self.mesh if axis in moved), goal

    def _same_pieces(self, axes: tuple[Axes, ...]) -> bool:
        count = lambda names: prod(self.mesh[axis] for axis in names)  # noqa: E731
        return all(count(held) == count(wanted) for held, wanted in zip(axes, self.goal))

    def _exit_order(self, axis: str) -> tuple[int, int]:
        home = self.home.get(axis)
        return (-1, 0) if home is None else (home, self.goal[home].index(axis))


def _put(axes: tuple[Axes, ...], d: int, held: Axes) -> tuple[Axes, ...]:
    return (*axes[:d], held, *axes[d + 1 :])


def _common_prefix(held: Axes, wanted: Axes) -> int:
    count = 0
    while count < min(len(held), len(wanted)) and held[count] == wanted[count]:
        count += 1
    return count


def _changed(held: Axes, wanted: Axes) -> Axes:
    """The axes along which a permute moves data."""
    settled = _common_prefix(held, wanted)
    return tuple(dict.fromkeys((*held[settled:], *wanted[settled:])))
