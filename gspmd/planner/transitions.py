"""Every single step between the placements of a tensor, as numpy arrays; what one costs is not known here.

    slice               F     -> F_yz              what is replicated, onto the minor end of a dimension
    all-gather          F_xyz -> F_x               minor axes off a dimension
    reduce-scatter      F_x partialsum-yz -> F_xyz what is owed, onto the minor end of a dimension
    all-reduce          F partialsum-xy -> F partialsum-x
    all-to-all          B_wE_xy -> B_wxyE          minor axes of a dimension to the minor end of another, in their order
    collective-permute  B_xyE_z -> B_wE_yx         any placement with pieces of the same shape that owes the same sums

Axes come in any order where a step puts them. A permute moves data along the axes that change dimension or stride.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

from gspmd.annotate.errors import PlanError
from gspmd.planner.placements import Axes, Nodes

KINDS = ("slice", "reduce-scatter", "all-reduce", "all-gather", "all-to-all", "collective-permute")
_MOST = 1 << 26  # permutes: about 1 GB of memory
_CHUNK = 1 << 21  # arcs that are worked on together, so that a large graph needs no more memory


class Arcs:
    """Steps by the placement where they end (or, of a graph turned round, begin), and the code of what each costs."""

    def __init__(self, here: np.ndarray, there: np.ndarray, code: np.ndarray, count: int, in_order: bool = False):
        if not in_order:
            # numpy sorts 16-bit numbers by radix
            order = np.argsort(there.astype(np.uint16) if count <= 1 << 16 else there, kind="stable")
            here, there, code = here[order], there[order], code[order]
        self.here, self.code = here.astype(np.int32), code.astype(np.int32)
        first = np.concatenate([[True], there[1:] != there[:-1]]) if len(there) else np.zeros(0, bool)
        self._starts = np.flatnonzero(first)
        self._counts = np.diff(np.append(self._starts, len(there)))
        self._heads = there[self._starts]
        self._row = np.full(count, -1)
        self._row[self._heads] = np.arange(len(self._heads))

    def of(self, there: int) -> slice:
        """The arcs of one placement."""
        row = self._row[there]
        return slice(0, 0) if row < 0 else slice(self._starts[row], self._starts[row] + self._counts[row])

    def relax(self, costs: np.ndarray, prices: np.ndarray, changed: np.ndarray) -> np.ndarray:
        """Lower, in place, what placements cost to what they cost by one more step from one of those that changed.

        Returns:
            Which of them have become cheaper.
        """
        lowered = np.zeros(len(costs), bool)
        if len(self._starts):
            due = np.flatnonzero(np.logical_or.reduceat(changed[self.here], self._starts))
            for rows in np.array_split(due, 1 + self._counts[due].sum() // _CHUNK):
                self._relax(rows, costs, prices, lowered)
        return lowered

    def _relax(self, rows: np.ndarray, costs: np.ndarray, prices: np.ndarray, lowered: np.ndarray) -> None:
        if not len(rows):
            return
        counts, heads = self._counts[rows], self._heads[rows]
        starts = np.cumsum(counts) - counts
        arcs = slice(None)
        if len(rows) < len(self._heads):
            arcs = np.repeat(self._starts[rows] - starts, counts) + np.arange(counts.sum())
        reached = np.minimum.reduceat(costs[self.here[arcs]] + prices[self.code[arcs]], starts)
        cheaper = reached < costs[heads]
        heads, reached = heads[cheaper], reached[cheaper]
        costs[heads], lowered[heads] = reached, True


class Graph:
    """The placements of a tensor and the steps between them.

    Attributes:
        nodes: the placements.
        coming, going: the steps by where they end, and by where they begin, but for permutes.
        permutes: the same either way, since a permute can be undone by one.
        arcs: how many steps there are.
        codes: what there is to price: the number of a kind, the axes as a mask, and the number of parts of the buffer.
    """

    def __init__(self, sizes: Axes, allowed: Sequence[frozenset[int]], partial: int):
        self.nodes = Nodes(sizes, allowed, partial)
        self._masks = 1 << len(sizes)
        self._parts, self._level = np.unique(self.nodes.parts, return_inverse=True)
        here, there, code = (np.concatenate(arrays) for arrays in zip(*self._minor_axes(), self._all_reduces(partial)))
        count = len(self.nodes)
        self.coming = Arcs(here, there, code, count)
        self.going = Arcs(there, here, code, count)
        self.permutes = self._permutes()
        present = np.zeros(len(KINDS) * self._masks * len(self._parts), bool)
        present[self.coming.code] = present[self.permutes.code] = True
        self.codes = [(int(number), *self.meaning(int(number))) for number in np.flatnonzero(present)]
        self.size = len(present)
        self.arcs = len(self.coming.code) + len(self.going.code) + len(self.permutes.code)

    def meaning(self, code: int) -> tuple[str, int, int]:
        """The kind, the axes as a mask, and the number of parts of the buffer."""
        step, level = divmod(code, len(self._parts))
        kind, mask = divmod(step, self._masks)
        return KINDS[kind], mask, int(self._parts[level])

    def kinds(self, codes: np.ndarray) -> np.ndarray:
        """The numbers of kinds, in the order of KINDS."""
        return codes // (self._masks * len(self._parts))

    def _code(self, kind: str, mask: np.ndarray, holder: np.ndarray) -> np.ndarray:
        """`holder` is the end of the step where a device holds more."""
        return (KINDS.index(kind) * self._masks + mask) * len(self._parts) + self._level[self.nodes.used[holder]]

    def _minor_axes(self):
        """Steps that put axes on the minor end of a dimension or take them off: one at either end has them there."""
        nodes, order = self.nodes, self.nodes.sequences
        length = order.length[nodes.rows]
        full, d, j = np.nonzero(length[:, :, None] >= np.arange(1, nodes.count + 1))
        j += 1
        row = nodes.rows[full, d]
        rest, group = order.prefix[row, j], order.suffix[row, j]
        on = nodes.on
        bare_key = nodes.keys[full] + on[d, rest] - on[d, row]
        bare, mask = nodes.find(bare_key), order.mask[group]
        yield full, bare, self._code("all-gather", mask, bare)
        yield bare, full, self._code("slice", mask, bare)
        with_partial = nodes.find(bare_key + nodes.partial_keys[mask])
        some = with_partial >= 0
        yield with_partial[some], full[some], self._code("reduce-scatter", mask[some], bare[some])
        for other in range(nodes.rows.shape[1]):
            apart = d != other
            start, held = full[apart], nodes.rows[full[apart], other]
            grown = order.joined(held, group[apart])
            end = nodes.find(bare_key[apart] + on[other, grown] - on[other, held])
            some = end >= 0
            yield start[some], end[some], self._code("all-to-all", mask[apart][some], start[some])

    def _all_reduces(self, partial: int):
        """Settle any of what is owed."""
        nodes = self.nodes
        node, mask = np.nonzero((nodes.partial[:, None] & ~np.arange(self._masks)) != nodes.partial[:, None])
        whole = (nodes.partial[node] & mask) == mask
        node, mask = node[whole], mask[whole]
        settled = nodes.find(nodes.keys[node] - nodes.partial_keys[mask])
        return node, settled, self._code("all-reduce", mask, node)

    def _permutes(self) -> Arcs:
        """Between placements with pieces of the same shape; those of one shape stand together."""
        nodes = self.nodes
        parts = self._level[nodes.sequences.mask[nodes.rows]]
        shape = nodes.partial
        for column in parts.T:  # numbered anew each time: products of many dimensions would outgrow 64 bits
            shape = np.unique(shape * len(self._parts) + column, return_inverse=True)[1]
        order = np.argsort(shape, kind="stable")
        _, first, counts = np.unique(shape[order], return_index=True, return_counts=True)
        _refuse_too_many(int((counts.astype(float) ** 2).sum()), nodes.sizes)
        many = np.repeat(counts, counts)  # of a placement in order: how many have its shape
        there = np.repeat(order, many)
        within = np.arange(len(there)) - np.repeat(np.cumsum(many) - many, many)
        here = order[np.repeat(np.repeat(first, counts), many) + within]
        mask = np.zeros(len(here), np.int32)
        for axis, place in enumerate(self._places().T):
            mask |= (place[here] != place[there]).astype(np.int32) << axis
        return Arcs(here, there, self._code("collective-permute", mask, here), len(nodes), in_order=True)

    def _places(self) -> np.ndarray:
        """Dimension and stride of every axis, by placement; 0 where it is on none."""
        nodes = self.nodes
        strides = np.zeros((len(nodes.sequences.axes), nodes.count), int)
        for row, axes in enumerate(nodes.sequences.axes):
            stride = 1
            for axis in reversed(axes):
                strides[row, axis] = stride
                stride *= nodes.sizes[axis]
        apart = (nodes.parts.max() + 1) * np.arange(nodes.rows.shape[1])
        found = strides[nodes.rows]
        return np.where(found, found + apart[:, None], 0).sum(axis=1)


def _refuse_too_many(permutes: int, sizes: Axes) -> None:
    if permutes > _MOST:
        listed = ", ".join(map(str, sizes))
        raise PlanError(
            f"cannot plan on {len(sizes)} mesh axes (of sizes {listed}): for this tensor {permutes:,} permutes\n"
            f"  would have to be compared, and {_MOST:,} are the most.\n"
            "  Make one mesh axis of two that are always used together."
        )


_graphs: WeakValueDictionary = WeakValueDictionary()


def graph(sizes: Axes, allowed: tuple[frozenset[int], ...], partial: int) -> Graph:
    """The graph of a tensor, by the sizes of the mesh axes and what may stand where; its sizes matter no further.

    It is shared while somebody holds it.
    """
    key = sizes, allowed, partial
    found = _graphs.get(key)
    if found is None:
        found = _graphs[key] = Graph(sizes, allowed, partial)
    return found
