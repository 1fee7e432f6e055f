"""All single steps between the placements of a tensor, which are the arcs of the planner's graph, without costs.

    slice               F     -> F_yz              adds axes to the minor end of a dimension
    all-gather          F_xyz -> F_x               removes minor axes from a dimension
    reduce-scatter      F_x partialsum-yz -> F_xyz sums, and shards the minor end of a dimension
    all-reduce          F partialsum-xy -> F partialsum-x
    all-to-all          B_wE_xy -> B_wxyE          moves minor axes to the minor end of another dimension, in order
    collective-permute  B_xyE_z -> B_wE_yx         changes to any placement with the same local shape and partial sum

A step may add axes in any order. A permute sends data along the axes whose dimension or stride changes.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

from gspmd.planner.graph.placements import MOST_PERMUTES, Axes, Nodes, numbered, too_many

KINDS = ("slice", "reduce-scatter", "all-reduce", "all-gather", "all-to-all", "collective-permute")
_CHUNK = 1 << 21  # arcs that are processed together, to bound the memory that a large graph needs


class Arcs:
    """Arcs, grouped by the node at their head, with the tail and the price code of each arc.

    In a reversed graph, head and tail are swapped.
    """

    def __init__(self, tail: np.ndarray, head: np.ndarray, code: np.ndarray, nodes: int, in_order: bool = False):
        if not in_order:
            # As 16-bit numbers if possible, which numpy sorts faster (radix sort).
            order = np.argsort(head.astype(np.uint16) if nodes <= 1 << 16 else head, kind="stable")
            tail, head, code = tail[order], head[order], code[order]
        self.tail, self.code = tail.astype(np.int32), code.astype(np.int32)
        first = np.concatenate([[True], head[1:] != head[:-1]]) if len(head) else np.zeros(0, bool)
        self._starts = np.flatnonzero(first)
        self._counts = np.diff(np.append(self._starts, len(head)))
        self._heads = head[self._starts]
        self._row = np.full(nodes, -1)
        self._row[self._heads] = np.arange(len(self._heads))

    def of(self, head: int) -> slice:
        """Return the slice of the arcs that end in a node."""
        row = self._row[head]
        return slice(0, 0) if row < 0 else slice(self._starts[row], self._starts[row] + self._counts[row])

    def relax(self, costs: np.ndarray, prices: np.ndarray, changed: np.ndarray) -> np.ndarray:
        """Lower costs in place along all arcs whose tail has changed, and return a mask of the costs that were lowered.

        cost(head) = min(cost(head), min over arcs of cost(tail) + price)

        Args:
            costs, changed: arrays [row, node]. An arc is relaxed in all rows if its tail has changed in any row.
            prices: the price of each code.
        """
        lowered = np.zeros(costs.shape, bool)
        if not len(self._starts):  # reduceat refuses an empty list of starts
            return lowered
        some = np.logical_or.reduce(changed, axis=0)
        due = np.logical_or.reduceat(some[self.tail], self._starts).nonzero()[0]
        chunks = 1 + len(costs) * int(self._counts[due].sum()) // _CHUNK
        for rows in [due] if chunks == 1 else np.array_split(due, chunks):
            if not len(rows):
                continue
            counts, heads = self._counts[rows], self._heads[rows]
            starts = counts.cumsum() - counts
            arcs = slice(None)
            if len(rows) < len(self._heads):
                arcs = (self._starts[rows] - starts).repeat(counts) + np.arange(counts.sum())
            best = np.minimum.reduceat(costs[:, self.tail[arcs]] + prices[self.code[arcs]], starts, axis=1)
            before = costs[:, heads]
            lowered[:, heads] = cheaper = best < before
            costs[:, heads] = np.where(cheaper, best, before)
        return lowered


class Graph:
    """The placements of a tensor and the steps between them; the arguments are the same as the arguments of `Nodes`.

    Attributes:
        nodes: the placements.
        coming: all arcs except permutes, grouped by the node at which they end.
        going: all arcs except permutes, grouped by the node at which they start.
        permutes: the permutes. They are the same in both directions, since every permute has an inverse.
        arcs: the number of arcs.
        codes: the steps to be priced, as tuples of four: the code, the kind, the axes as a bit mask, and a number of
            parts. This is the number of parts into which the tensor is cut before or after the step, whichever number
            is smaller.
        size: a number above all codes.
    """

    def __init__(self, sizes: Axes, allowed: Sequence[frozenset[int]], partial: int):
        self.nodes = Nodes(sizes, allowed, partial)
        self._masks = 1 << len(sizes)
        self._parts, self._level = np.unique(self.nodes.parts, return_inverse=True)
        tail, head, code = (np.concatenate(arrays) for arrays in zip(*self._minor_axes(), self._all_reduces()))
        self.coming, self.going = (Arcs(*ends, code, len(self.nodes)) for ends in ((tail, head), (head, tail)))
        self.permutes = self._permutes()
        self.size = len(KINDS) * self._masks * len(self._parts)
        present = np.zeros(self.size, bool)
        present[self.coming.code] = present[self.permutes.code] = True
        self.codes = [(code, *self.meaning(code)) for code in np.flatnonzero(present).tolist()]
        self.arcs = 2 * len(code) + len(self.permutes.code)

    def meaning(self, code: int) -> tuple[str, int, int]:
        """Return what a code stands for: the kind, the axes as a bit mask, and the number of parts, as in `codes`."""
        step, level = divmod(code, len(self._parts))
        kind, mask = divmod(step, self._masks)
        return KINDS[kind], mask, int(self._parts[level])

    def kinds(self, codes: np.ndarray) -> np.ndarray:
        """Return the kind of step that each price code stands for, as an index in KINDS."""
        return codes // (self._masks * len(self._parts))

    def _code(self, kind: str, mask: np.ndarray, holder: np.ndarray) -> np.ndarray:
        """Return the codes of steps.

        Args:
            kind: the kind of all steps.
            mask: the mesh axes of each step, as a bit mask.
            holder: the placement before or after each step, whichever has the larger shards.
        """
        return (KINDS.index(kind) * self._masks + mask) * len(self._parts) + self._level[self.nodes.used[holder]]

    def _minor_axes(self):
        """Yield the tails, heads and codes of all steps that add minor axes to a dimension or remove minor axes.

        In the code, `full` are the placements with these axes, and `bare` are the placements without these axes.
        """
        nodes, order, on = self.nodes, self.nodes.sequences, self.nodes.on
        length = np.array([len(axes) for axes in order.axes])[nodes.rows]
        full, d, j = np.nonzero(length[:, :, None] >= np.arange(1, nodes.count + 1))
        row = nodes.rows[full, d]
        rest, group = order.prefix[row, j + 1], order.suffix[row, j + 1]
        bare_key = nodes.keys[full] + on[d, rest] - on[d, row]
        bare, mask = nodes.find(bare_key), order.mask[group]
        yield full, bare, self._code("all-gather", mask, bare)
        yield bare, full, self._code("slice", mask, bare)
        summed = nodes.find(bare_key + nodes.partial_keys[mask])
        some = summed >= 0
        yield summed[some], full[some], self._code("reduce-scatter", mask[some], bare[some])
        for other in range(nodes.rows.shape[1]):
            apart = d != other
            start, held = full[apart], nodes.rows[full[apart], other]
            grown = order.joined(held, group[apart])
            end = nodes.find(bare_key[apart] + on[other, grown] - on[other, held])
            some = end >= 0
            yield start[some], end[some], self._code("all-to-all", mask[apart][some], start[some])

    def _all_reduces(self):
        """Return the tails, heads and codes of all all-reduces, each over some or all axes of a partial sum."""
        nodes, masks = self.nodes, np.arange(self._masks)
        node, mask = np.nonzero((nodes.partial[:, None] & masks == masks) & (masks > 0))
        settled = nodes.find(nodes.keys[node] - nodes.partial_keys[mask])
        return node, settled, self._code("all-reduce", mask, node)

    def _permutes(self) -> Arcs:
        """Return the permutes, which are arcs between placements with the same local shape and the same partial sum."""
        nodes, sequences = self.nodes, self.nodes.sequences
        shape = numbered([nodes.partial, *self._level[sequences.mask[nodes.rows]].T])
        order = np.argsort(shape, kind="stable")  # puts placements of the same shape together
        _, first, counts = np.unique(shape[order], return_index=True, return_counts=True)
        if (permutes := (counts.astype(float) ** 2).sum()) > MOST_PERMUTES:
            fact = f": for this tensor {int(permutes):,} permutes\n  would have to be compared, more than the limit"
            raise too_many(nodes.sizes, f"{fact} of {MOST_PERMUTES:,}.")
        many = np.repeat(counts, counts)  # for each placement in this order: the number of placements with its shape
        head = np.repeat(order, many)
        within = np.arange(len(head)) - np.repeat(np.cumsum(many) - many, many)
        tail = order[np.repeat(np.repeat(first, counts), many) + within]
        # First the stride of every axis by sequence, then, by placement, one number for both the dimension and the
        # stride of every axis; 0 if the axis shards no dimension.
        strides = np.zeros((len(sequences.axes), nodes.count), int)
        for row, axes in enumerate(sequences.axes):
            for rank, axis in enumerate(axes):
                strides[row, axis] = nodes.parts[sum(1 << minor for minor in axes[rank + 1 :])]
        apart, strides = (nodes.parts.max() + 1) * np.arange(nodes.rows.shape[1])[:, None], strides[nodes.rows]
        places = np.where(strides, strides + apart, 0).sum(axis=1)
        mask = np.zeros(len(tail), np.int32)
        for axis, place in enumerate(places.T):
            mask |= (place[tail] != place[head]).astype(np.int32) << axis
        return Arcs(tail, head, self._code("collective-permute", mask, tail), len(nodes), in_order=True)


_graphs: WeakValueDictionary = WeakValueDictionary()


def graph(sizes: Axes, allowed: tuple[frozenset[int], ...], partial: int) -> Graph:
    """Return the graph of a tensor.

    The graph depends on the sizes of a tensor only through the sets of mesh axes that divide each size. So tensors of
    different sizes can share a graph.
    """
    key = sizes, allowed, partial
    found = _graphs.get(key)
    if found is None:
        found = _graphs[key] = Graph(*key)
    return found
