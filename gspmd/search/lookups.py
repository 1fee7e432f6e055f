"""Costs of looking up rows in a table (an embedding), as arrays over the placements of ids, table and rows.

During the lookup, a mesh axis may be unused, or may shard a dimension that it also shards in the spec of the ids, the
table or the rows; see `gspmd.ops.embed`. One such decision for every mesh axis makes a *joint placement*. The lookup
runs in the joint placement whose moves take the fewest seconds. A tensor's *outer* placement is its spec outside of the
lookup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gspmd.annotate.spec import Spec
from gspmd.planner.graph.placements import fitting, placements, sequences
from gspmd.planner.steps import Environment
from gspmd.search.moves import MoveCosts, at_every


@dataclass(frozen=True)
class LookupPrices:
    """A lookup, or the gradient of its table, with its cost for every placement of its tensors.

    Attributes:
        environment: mesh, chip and the sizes of all dimensions.
        ids, rows: the placements of the ids before the lookup, and of the rows after it. Those at the same index form a
            pair.
        tables: the placements of the table before the lookup.
        widths: bytes per element of ids, table, rows and, if there are any, scales of the table's rows.
        backward: whether this is the gradient of the table. The gradient moves to the table's placement, as a partial
            sum over those mesh axes for which the table's spec is `reduced`.
    """

    environment: Environment
    ids: Sequence[Spec]
    rows: Sequence[Spec]
    tables: Sequence[Spec]
    widths: Sequence[int]
    backward: bool

    def seconds(self, name: str) -> np.ndarray:
        """Return an array of the seconds of moving "ids", "rows" or "table", indexed by [pair, table].

        The seconds of the table include those of its scales.
        """
        total, places = self._best
        if name in ("ids", "rows"):
            found = np.take_along_axis(self._costs(name), places, axis=1)
        else:
            costs = self._costs("table") + (self._costs("scales") if "scales" in self._tensors else 0.0)
            found = np.take_along_axis(costs.T, places, axis=0)
        return np.where(np.isinf(total), np.inf, found)

    @cached_property
    def leaving(self) -> np.ndarray:
        """The seconds of those first steps of the table's move that may be hoisted out of a loop.

        The array is indexed by [pair, table].
        """
        tensor, before, after = self.ends("table")
        return at_every(tensor.hoisted, before, after)

    def ends(self, name: str) -> tuple[MoveCosts, np.ndarray, np.ndarray]:
        """Return the costs of moving "ids", "table" or "rows", and the placements before and after the move.

        The placements are two arrays, both indexed by [pair, table].
        """
        tensor, fixed, free, comes = self._tensors[name]
        at = free[self._best[1]]
        given = np.broadcast_to(fixed[None, :] if name == "table" else fixed[:, None], at.shape)
        return (tensor, given, at) if comes else (tensor, at, given)

    @cached_property
    def _joint(self) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
        """The dimensions of ids and table, and two arrays of the mesh axes that shard them in the joint placements.

        Both arrays are indexed by [joint placement, dimension]. The first has indices of sequences of mesh axes, and
        the second has bit masks.
        """
        dims = (*self.ids[0].dims, *self.tables[0].dims)
        counts, sizes = tuple(size for _, size in self.environment.mesh), dict(self.environment.sizes)
        rows, _, _ = placements(len(counts), tuple(fitting(sizes[dim], counts) for dim in dims), [])
        return dims, rows, sequences(len(counts)).mask[rows]

    @cached_property
    def _tensors(self) -> dict[str, tuple[MoveCosts, np.ndarray, np.ndarray, bool]]:
        """For each tensor: its move costs, outer and joint placements, and whether it moves from outer to joint."""
        vocabulary, tokens = self.tables[0].dims[:1], self.ids[0].dims
        (id_bytes, table_bytes, row_bytes, *scale), backward = self.widths, self.backward
        held = [each.cotangent if backward else each for each in self.tables]
        scales = [each.without(each.dims[1]) for each in self.tables]
        found = {}
        for name, outside, width, summed in (
            ("ids", self.ids, id_bytes, ()),
            ("table", held, table_bytes, tokens if backward else ()),
            ("rows", self.rows, row_bytes, () if backward else vocabulary),
            *(("scales", scales, each, ()) for each in scale),
        ):
            tensor = MoveCosts(self.environment, outside[0].dims, width)
            comes = name in ("ids", "scales") or backward == (name == "rows")
            found[name] = tensor, tensor.numbers(outside), self._nodes(tensor, summed), comes
        return found

    def _nodes(self, tensor: MoveCosts, summed: Sequence[str]) -> np.ndarray:
        dims, rows, masks = self._joint
        columns = [dims.index(dim) for dim in summed]
        partial = np.bitwise_or.reduce(masks[:, columns], axis=1) if columns else 0
        return tensor.nodes([rows[:, dims.index(dim)] for dim in tensor.dims], partial)

    @cached_property
    def _best(self) -> tuple[np.ndarray, np.ndarray]:
        """The seconds of all moves in the cheapest joint placement, and the index of this joint placement.

        Both are arrays indexed by [pair, table].
        """
        pairs = self._costs("ids") + self._costs("rows")
        tables = self._costs("table") + (self._costs("scales") if "scales" in self._tensors else 0.0)
        refused, other = self._elsewhere(self.rows), self._elsewhere(self.tables)
        seconds, places = np.empty((len(pairs), len(tables))), np.empty((len(pairs), len(tables)), int)
        for number, (row, odd) in enumerate(zip(pairs, refused)):
            sums = np.where(odd & other, np.inf, row + tables)
            places[number], seconds[number] = sums.argmin(axis=1), sums.min(axis=1)
        return seconds, places

    def _costs(self, name: str) -> np.ndarray:
        """Return an array of the seconds of one tensor's moves, indexed by [outer placement, joint placement]."""
        tensor, outside, joint, comes = self._tensors[name]
        if comes:
            return tensor.between(outside, joint, by="sources")
        return tensor.between(joint, outside, by="targets").T

    def _elsewhere(self, specs: Sequence[Spec]) -> np.ndarray:
        """Return an array of bit masks of mesh axes, indexed by [spec, joint placement].

        A bit mask has the axes that shard a dimension in the joint placement, and do not shard it in the spec.
        """
        dims, _, masks = self._joint
        axes, found = [axis for axis, _ in self.environment.mesh], []
        for spec in specs:
            held = {dim: sum(1 << axes.index(a) for a in spec.axes_of(dim) if a in axes) for dim in spec.dims}
            found.append(sum(masks[:, n] & ~held.get(dim, 0) for n, dim in enumerate(dims)))
        return np.stack(found)
