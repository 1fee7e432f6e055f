"""Collectives in forms that the TPU compiler keeps; it would rewrite some of them if they were written plainly.

These rules were found by compiling for v4 to v6e with jax 0.10.2 (libtpu 0.0.42). `python
benchmarks/ledgers.py` shows the differences that remain. Each rule says what the compiler does, and what is written
instead:

- The compiler turns many gathers and reduce-scatters over all devices of a slice into all-reduces, with twice the bytes
  (`hardware.links.stays_whole`). Two collectives, one over the major mesh axes and one over the minor mesh axis, send
  the planned bytes and are compiled as written. If there is a single mesh axis, the two collectives run over groups of
  devices along it.
- The compiler sends a collective over several torus axes round a single ring through all their devices. If few bytes
  are sent, one collective per axis is faster, because the same bytes take fewer hops. If many bytes are sent, putting
  the parts in order costs more than that saves. A gather of many bytes is emitted as permutes round all axes at the
  same time (`blocking.torus`).
- A reduce-scatter of two-byte elements along the last dimension is kept if the size of its shards is a multiple of 256,
  two rows of lanes. If the size is any other multiple of 128, the compiler uses an all-reduce. If the scattered
  dimension is first and the other dimensions are flattened, the compiler keeps the reduce-scatter for these sizes too.
  Moving the dimension to the front takes about as long as the additional bytes of an all-reduce would. A reduce-scatter
  into narrower shards is kept if another dimension fills the lanes.
- The compiler pads a reduce-scatter along the first dimension, and sends the data that cross the borders of shards by
  permutes. If the shards have a separate dimension, the collective is kept, at no cost. But then the compiler also
  rewrites a product whose rows are split in this way. If the rows fill the lanes and the columns do not (16 columns of
  keys), it first transposes the other operand, however large. A barrier between the product and the shards prevents
  this.
- The compiler decomposes an all-to-all that cuts one dimension and joins the parts along another, but only after it has
  chosen the order in memory. For `[1, X, 1, E]`, one slot for each expert, it pads every row to a tile, and removes the
  padding by sums over dimensions of size 1. For rows `[X, E]`, cut and joined along the first dimension, it pads
  nothing.
- Rows of several experts arrive from one device after the other. If these rows are transposed, the compiler copies them
  twice, since the rows of one expert from one device do not fill a tile. A gather of rows by constant indices moves
  each row once.
- Dimensions of size 1 (`L` of `[B, 1, E]`) prevent the compiler from keeping any of these forms. So these dimensions
  are dropped before a collective and added again after it.
- If the size of the shards of a gather along the last dimension is not a multiple of 128, the compiler reorders the
  result. This costs less if the shards have a separate dimension, unless another dimension fills the lanes.
"""

from collections.abc import Mapping, Sequence
from math import log, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gspmd.hardware.chips import chip_of_device
from gspmd.hardware.links import LARGEST_WHOLE, gathers_round_each_axis, stays_whole
from gspmd.lowerings import in_force
from gspmd.lowerings.blocking import torus

LANES = 128
_TILE = 8  # Rows of a tile; the compiler also rewrites shards that are not whole tiles.
_PACKED = 16  # Rows of a tile of two-byte numbers.
SMALL = 2**20  # Bytes that two links of a v4 send in about the time of 12 hops.

CollectivePart = tuple[tuple[str, ...], int, list[list[int]] | None]
"""One of the parts into which a collective is split: its mesh axes, the number of devices in a group, and the groups.

The groups are lists of positions along the axis, or None if each group has all positions along the axes.
"""


def zero_after(x: jax.Array) -> jax.Array | int:
    """Return a zero that is computed from `x`; an operation that adds this zero to an index waits for `x`.

    A barrier would not work, because the compiler drops barriers before it orders instructions. But the compiler does
    not notice that the bits of this number are always zero. On devices other than TPUs the result is a constant.
    """
    if not in_force.is_tpu():
        return 0

    def zero(x: jax.Array) -> jax.Array:
        x = lax.optimization_barrier(x)  # otherwise the compiler moves the slice into the product that makes `x`
        first = jnp.real(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()))
        bits = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.uint32)
        return (lax.shift_right_logical(bits, jnp.uint32(31)) & jnp.uint32(2)).astype(jnp.int32)

    # A batch has one zero. If each element of the batch had its own, the waiting array would be sliced and sent element
    # by element.
    made = jax.custom_batching.custom_vmap(zero)
    made.def_vmap(lambda size, batched, x: (made(x), False))
    return made(lax.stop_gradient(x))


class OverSlices(NamedTuple):
    """The parts of a collective over several slices: one part over the network, and the other parts within a slice.

    Attributes:
        between: the part over the network, or None if all devices of a group are in one slice.
        inside: the parts within a slice, from major to minor.
        sizes: a pair for each axis: the number of slices along the axis, and the number of devices along the axis
            within a slice. For example, ((2, 4), (1, 8)) is for two axes, the first of which spans two slices.
    """

    between: CollectivePart | None
    inside: list[CollectivePart]
    sizes: list[tuple[int, int]]

    @property
    def parts(self) -> list[CollectivePart]:
        """All parts in the order of a reduce-scatter.

        The part over the network comes last, because the fewest bytes are left then.
        """
        return [*self.inside, *([self.between] if self.between else [])]

    @property
    def in_order(self) -> bool:
        """Whether the axes that span several slices are the minor axes, so that shards arrive in their final order."""
        away = [number for number, (outer, _) in enumerate(self.sizes) if outer > 1]
        near = [number for number, (_, inner) in enumerate(self.sizes) if inner > 1]
        return not away or not near or max(near) < min(away)


def all_gather(
    x: jax.Array,
    axes: tuple[str, ...],
    dimension: int,
    mesh: Mapping[str, int],
    whole_bytes: int = 0,
    after: Sequence[jax.Array] = (),
) -> jax.Array:
    """Gather a dimension over mesh axes, which are listed from major to minor.

    A gather that is split into several collectives runs over the minor axes first.

    A large gather sends permutes round each axis of a 3D torus (`blocking.torus`) where that is allowed. Such a gather
    waits until all arrays in `after` are computed. Without this wait the compiler would start permutes as early as
    possible. The permutes of several gathers would then share the links, and the blocks of all gathers would be held at
    the same time. In this way a layer of PaLM 540B, for 256 prompts on 64 TPU v4, waited 147 ms for links instead of
    33 ms.

    Over several slices the gather runs over the network first, so that the network carries each byte once, and then
    within the slices. If the axes that span several slices are not the minor axes, the shards are put in order at the
    end.

    Args:
        x: the shard.
        axes: the mesh axes.
        dimension: the dimension to gather.
        mesh: the sizes of all mesh axes.
        whole_bytes: bytes of the whole tensor, if only part of the tensor is gathered (`gathers_round_each_axis`).
        after: arrays that must be computed before the gather starts, if it goes round each axis of a torus.
    """
    along = _cut_along(x, axes, dimension, mesh, whole_bytes)
    if along is not None:
        return _gather_round_each_axis(x, axes, dimension, along, mesh, after)
    kind, gathered = "all-gather", x.nbytes * prod(mesh[axis] for axis in axes)
    over = _over_slices(axes, mesh, kind, gathered)
    if over is None:
        return _gather(x, _parts(axes, mesh, kind, gathered), dimension)
    if over.between is None or over.in_order:
        return _gather(x, over.parts, dimension)
    names, _, groups = over.between
    pieces = lax.all_gather(x, names, axis=0, tiled=False, axis_index_groups=groups)
    pieces = _gather(pieces, over.inside, dimension + 1)
    leading, trailing = x.shape[:dimension], x.shape[dimension:]
    outer, inner = zip(*over.sizes)
    number, at = len(outer), len(leading)
    # From [*outer, *leading, *inner, *trailing] to [*leading, outer, inner, outer, inner, ..., *trailing].
    pieces = pieces.reshape(*outer, *leading, *inner, *trailing)
    pieces = jnp.moveaxis(pieces, range(number), range(at, at + 2 * number, 2))
    return pieces.reshape(*leading, -1, *trailing[1:])


def reduce_scatter(x: jax.Array, axes: tuple[str, ...], dimension: int, mesh: Mapping[str, int]) -> jax.Array:
    """Reduce-scatter a dimension over mesh axes, which are listed from major to minor.

    A reduce-scatter that is split into several collectives runs over the major axes first. Over several slices it is
    the reverse of a gather: the shards are put in order, and scattered within the slices and then over the network.
    """
    kind = "reduce-scatter"
    over = _over_slices(axes, mesh, kind, x.nbytes)
    if over is None:
        return _scatter_in_parts(x, _parts(axes, mesh, kind, x.nbytes), dimension)
    if over.between is None or over.in_order:
        return _scatter_in_parts(x, over.parts, dimension)
    names, slices, groups = over.between
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    pieces = x.reshape(*before, *(size for pair in over.sizes for size in pair), -1, *after)
    number, at = len(over.sizes), len(before)
    pieces = jnp.moveaxis(pieces, range(at, at + 2 * number, 2), range(number)).reshape(slices, *before, -1, *after)
    pieces = _scatter_in_parts(pieces, over.inside, dimension + 1)
    piece = lax.psum_scatter(pieces, names, scatter_dimension=0, tiled=True, axis_index_groups=groups)
    return piece.reshape(*before, -1, *after)


def all_reduce(x: jax.Array, axes: tuple[str, ...], mesh: Mapping[str, int]) -> jax.Array:
    """All-reduce over mesh axes.

    Over several slices, a large array is reduce-scattered within each slice, reduced over the network, and gathered
    within each slice. The compiler would do the same, but would pad the shards, and would reduce a whole slice twice.
    """
    over = _over_slices(axes, mesh, "reduce-scatter", x.nbytes)
    if over is None or over.between is None or not over.inside or x.nbytes < SMALL:
        return lax.psum(x, axes)
    group = prod(inner for _, inner in over.sizes)
    divided = [place for place, size in enumerate(x.shape) if size % group == 0]
    if not divided:
        return lax.psum(x, axes)
    dimension = max(divided, key=lambda place: x.shape[place])
    gather = _over_slices(axes, mesh, "all-gather", x.nbytes)
    assert gather is not None
    names, _, groups = over.between
    piece = _scatter_in_parts(x, over.inside, dimension)
    return _gather(lax.psum(piece, names, axis_index_groups=groups), gather.inside, dimension)


def goes_round_each_axis(
    x: jax.Array, axes: tuple[str, ...], dimension: int, mesh: Mapping[str, int], whole_bytes: int
) -> bool:
    """Return whether `all_gather` sends this gather as permutes round each axis of a torus."""
    return _cut_along(x, axes, dimension, mesh, whole_bytes) is not None


def _cut_along(
    x: jax.Array, axes: tuple[str, ...], dimension: int, mesh: Mapping[str, int], whole_bytes: int
) -> int | None:
    """Return the dimension along which a gather round each axis of a torus cuts its shards.

    The result is None for a gather that does not go round each axis.
    """
    chip, numbers = in_force.chip_of_devices(), [mesh[axis] for axis in axes]
    if chip is None or in_force.slices() > 1:
        return None
    if not gathers_round_each_axis(axes, mesh, x.nbytes * prod(numbers), chip, whole_bytes):
        return None
    wide = [place for place, size in enumerate(x.shape) if size > 1 or place == dimension]
    sizes, at = [x.shape[place] for place in wide], wide.index(dimension)
    along = torus.cut_along(sizes, x.dtype.itemsize, at, len([number for number in numbers if number > 1]))
    return None if along is None else wide[along]


def _gather_round_each_axis(
    x: jax.Array,
    axes: tuple[str, ...],
    dimension: int,
    along: int,
    mesh: Mapping[str, int],
    after: Sequence[jax.Array],
) -> jax.Array:
    shape = list(x.shape)
    wide = [place for place, size in enumerate(shape) if size > 1 or place == dimension]
    shape[dimension] *= prod(mesh[axis] for axis in axes)
    x = x.reshape([x.shape[place] for place in wide])
    zero = sum(zero_after(each) for each in after if each.size)
    return torus.gather(x, axes, wide.index(dimension), wide.index(along), mesh, zero).reshape(shape)


def _gather(x: jax.Array, parts: Sequence[CollectivePart], dimension: int) -> jax.Array:
    """Gather by one collective for each of `parts`, which are listed from major to minor; the minor part runs first."""
    shape = list(x.shape)
    wide = [place for place, size in enumerate(shape) if size > 1 or place == dimension]
    x, at = x.reshape([shape[place] for place in wide]), wide.index(dimension)
    for names, _, groups in reversed(parts):
        if at == x.ndim - 1 and x.shape[at] % LANES and max(x.shape[:-1], default=LANES) < LANES:
            pieces = lax.all_gather(x, names, axis=0, tiled=False, axis_index_groups=groups)
            x = jnp.moveaxis(pieces, 0, -2).reshape(*x.shape[:-1], -1)
        else:
            x = lax.all_gather(x, names, axis=at, tiled=True, axis_index_groups=groups)
    shape[dimension] = x.shape[at]
    return x.reshape(shape)


def _scatter_in_parts(x: jax.Array, parts: Sequence[CollectivePart], dimension: int) -> jax.Array:
    for number, part in enumerate(parts):
        x = _scatter(x, part, dimension, number)
    return x


def _over_slices(axes: tuple[str, ...], mesh: Mapping[str, int], kind: str, size: int) -> OverSlices | None:
    """Return the parts of a collective over several slices, or None if the collective is not split.

    A collective on one slice is not split. The same holds if one axis of the collective extends both over slices and
    within each slice, and another axis extends over slices too. JAX cannot name the groups of such parts, so the
    compiler decides.

    Args:
        axes: mesh axes of the collective, from major to minor.
        mesh: sizes of all mesh axes.
        kind: `"all-gather"` or `"reduce-scatter"`.
        size: bytes per device of the input or of the output, whichever is larger.
    """
    across = in_force.across_slices()
    wide = [axis for axis in axes if mesh[axis] > 1]
    away = [axis for axis in wide if across.get(axis, 1) > 1]
    mixed = next((axis for axis in away if across[axis] < mesh[axis]), None)
    if not across or (mixed and len(away) > 1):
        return None
    within = {axis: number // across[axis] for axis, number in mesh.items()}
    sizes = [(across[axis], within[axis]) for axis in wide]
    if not mixed:
        between = (tuple(away), prod(across[axis] for axis in away), None) if away else None
        near = tuple(axis for axis in wide if axis not in away)
        return OverSlices(between, _parts(near, within, kind, size) if near else [], sizes)
    # The positions along an axis that is both over slices and within them are numbered slice by slice.
    inner, at = within[mixed], wide.index(mixed)
    whole = inner < prod(within.values()) or _stays_whole(kind, inner, size)
    minor = 1 if whole else _ring(inner)  # like `_parts`, two parts if the collective is over all devices
    along = [
        ((mixed,), parts, _groups(mesh[mixed], parts, stride))
        for parts, stride in ((inner // minor, minor), (minor, 1))
        if parts > 1
    ]
    others = [
        (tuple(names), prod(mesh[axis] for axis in names), None) for names in (wide[:at], wide[at + 1 :]) if names
    ]
    inside = [*others[: bool(at)], *along, *others[bool(at) :]]
    return OverSlices(((mixed,), across[mixed], _groups(mesh[mixed], across[mixed], inner)), inside, sizes)


def _groups(places: int, parts: int, stride: int) -> list[list[int]]:
    """Cut the positions along an axis into groups of `parts` positions that are `stride` apart.

    >>> _groups(8, 2, 2)
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    numbers = [range(first, first + parts * stride, stride) for first in range(places) if first // stride % parts == 0]
    return [list(each) for each in numbers]


def all_to_all(
    x: jax.Array, axes: tuple[str, ...], split: int, concat: int, mesh: Mapping[str, int], dims: tuple[str, ...] = ()
) -> jax.Array:
    """Exchange parts of a dimension over mesh axes, like `jax.lax.all_to_all` with `tiled=True`.

    The parts get a separate first dimension, and are exchanged row by row. libtpu 0.0.42 by itself would reorder parts
    of the last dimension: on a v5e, bfloat16 [4, 8, 8192] would take 107 µs, and takes 8 µs in rows. Two kinds of parts
    are left to libtpu, which is as fast for them: parts that are not whole rows of lanes, and parts that arrive along
    the last dimension.

    For slots of experts, whose dimensions are GXCE, the memory order is known on both sides (`slots_to_all`). If only
    two dimensions are longer than 1, as in the residual of a decoding step, the array is exchanged as a matrix. If more
    dimensions are longer than 1, dropping dimensions of size 1 gains nothing: cut along the last dimension, [16, 1, 64,
    128] takes 17.2 µs, and [16, 64, 128] takes 20.6 µs.
    """
    if dims == tuple("GXCE") and {split, concat} == {0, 1}:
        return slots_to_all(x, axes, split, mesh)
    wide = [place for place, size in enumerate(x.shape) if size > 1 or place in (split, concat)]
    if len(wide) == 2 < x.ndim:
        rows = x.reshape([x.shape[place] for place in wide])
        rows = all_to_all(rows, axes, wide.index(split), wide.index(concat), mesh)
        return jnp.expand_dims(rows, [place for place in range(x.ndim) if place not in wide])
    parts = prod(mesh[axis] for axis in axes)
    last = x.ndim - 1
    if concat == last or (split == last and x.shape[last] // parts % LANES):
        return lax.all_to_all(x, axes, split_axis=split, concat_axis=concat, tiled=True)
    pieces = jnp.moveaxis(x.reshape(*x.shape[:split], parts, -1, *x.shape[split + 1 :]), split, 0)
    pieces = jnp.moveaxis(_exchanged(pieces, axes), 0, concat)
    return pieces.reshape(*pieces.shape[:concat], -1, *pieces.shape[concat + 2 :])


def slots_to_all(x: jax.Array, axes: tuple[str, ...], split: int, mesh: Mapping[str, int]) -> jax.Array:
    """Exchange slots of experts, `[G, X, C, E]`.

    If `split` is 1, slots are sent to their experts; if `split` is 0, the experts' results are sent back. Before and
    after the exchange, slots are stored expert by expert, as dispatch gathers them and as products read them.
    """
    parts, (groups, experts, *rest) = prod(mesh[axis] for axis in axes), x.shape
    x = x.swapaxes(0, 1)
    if split:
        pieces = _reordered(_exchanged(x.reshape(parts, experts // parts, groups, *rest), axes))
        return pieces.reshape(experts // parts, parts * groups, *rest).swapaxes(0, 1)
    pieces = _exchanged(_reordered(x.reshape(experts, parts, groups // parts, *rest)), axes)
    return pieces.reshape(parts * experts, groups // parts, *rest).swapaxes(0, 1)


def _exchanged(pieces: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Send part i of `[parts, ..., E]` to device i, and replace this part by the one that device i sends."""
    rows = pieces.reshape(-1, pieces.shape[-1])
    return lax.all_to_all(rows, axes, split_axis=0, concat_axis=0, tiled=True).reshape(pieces.shape)


def _reordered(pieces: jax.Array) -> jax.Array:
    """Swap the first two dimensions of `[X, parts, G, C, E]` by a gather of rows."""
    first, second, *rest, width = pieces.shape
    if first == 1 or second == 1:
        return pieces.swapaxes(0, 1)
    order = jnp.arange(prod(pieces.shape[:-1]), dtype=jnp.int32).reshape(first, second, -1).swapaxes(0, 1)
    rows = pieces.reshape(-1, width).at[order.reshape(-1)].get(mode="promise_in_bounds", unique_indices=True)
    return rows.reshape(second, first, *rest, width)


def _parts(axes: tuple[str, ...], mesh: Mapping[str, int], kind: str, size: int) -> list[CollectivePart]:
    """Return the parts of a collective on one slice, from major to minor.

    A collective over all devices has two parts, unless the compiler keeps it whole. A small collective over some of the
    devices has one part for each axis. Every other collective has one part.
    """
    wide = [axis for axis in axes if mesh[axis] > 1]
    group = prod(mesh[axis] for axis in wide)
    if group < prod(mesh.values()) and len(wide) > 1 and size < SMALL:
        return [((axis,), mesh[axis], None) for axis in wide]
    if group < prod(mesh.values()) or _stays_whole(kind, group, size):
        return [(axes, group, None)]
    if len(wide) > 1:
        return [(tuple(wide[:-1]), group // mesh[wide[-1]], None), ((wide[-1],), mesh[wide[-1]], None)]
    minor = _ring(group)
    if minor in (1, group):
        return [(axes, group, None)]
    parts = ((group // minor, minor), (minor, 1))
    return [((wide[0],), devices, _groups(group, devices, stride)) for devices, stride in parts]


def _stays_whole(kind: str, group: int, size: int) -> bool:
    chip = in_force.chip_of_devices()
    return group <= LARGEST_WHOLE[kind] if chip is None else stays_whole(kind, group, size, chip)


def _ring(devices: int) -> int:
    """Return the likely size of one ring of the torus, a divisor of `devices`.

    On a 2D torus it is the divisor nearest to the square root of `devices`, and on a 3D torus the divisor nearest to
    the cube root of `devices`.
    """
    chip = chip_of_device(in_force.device_kind())
    side = log(devices) / (chip.torus if chip and chip.torus else 3)
    return min((n for n in range(1, devices + 1) if devices % n == 0), key=lambda n: abs(log(n) - side))


def _scatter(x: jax.Array, part: CollectivePart, dimension: int, number: int) -> jax.Array:
    shape = list(x.shape)
    wide = [place for place, size in enumerate(shape) if size > 1 or place == dimension]
    x, at = x.reshape([shape[place] for place in wide]), wide.index(dimension)
    shape[dimension] //= part[1]
    if _leads(x, at, part[1]):
        front = jnp.moveaxis(x, at, 0)
        piece = _in_front(front.reshape(front.shape[0], -1), part)
        return jnp.moveaxis(piece.reshape(-1, *front.shape[1:]), 0, at).reshape(shape)
    own = at == 0 and (x.ndim == 2 or x.shape[-1] >= LANES or number > 0)
    return (_in_front(x, part) if own else _in_place(x, part, at)).reshape(shape)


def _in_place(x: jax.Array, part: CollectivePart, dimension: int) -> jax.Array:
    axes, _, groups = part
    return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True, axis_index_groups=groups)


def _in_front(x: jax.Array, part: CollectivePart) -> jax.Array:
    """Reduce-scatter along the first dimension; the shards get a separate dimension, and fill whole tiles."""
    axes, parts, groups = part
    size, rest = x.shape[0] // parts, x.shape[1:]
    # The compiler replaces a reduce-scatter by an all-reduce and a slice if rows do not fill tiles, or if the product
    # before it is laid out with another dimension in front of the shards, as heads are. To lay out a small tensor anew
    # takes about a microsecond, where the all-reduce takes several more. A large one would be read and written once
    # more, although the compiler mostly scatters it as it is.
    if x.ndim > 2 and (x.shape[-2] % _TILE or x.nbytes < SMALL):
        rest = (prod(rest),)
    in_tiles = size % _TILE == 0 or size * prod(rest) % (_TILE * LANES)
    x = lax.optimization_barrier(x) if x.shape[-1] < LANES <= x.shape[0] else x
    pieces = x.reshape(parts, size, *rest) if in_tiles else x.reshape(parts, -1, LANES)
    piece = lax.psum_scatter(pieces, axes, scatter_dimension=0, tiled=False, axis_index_groups=groups)
    return piece.reshape(size, *rest)


def _leads(x: jax.Array, dimension: int, parts: int) -> bool:
    """Return whether the scattered dimension must be moved to the front.

    That is so if the dimension is the last one and the compiler would replace the reduce-scatter by an all-reduce.
    """
    if x.dtype.itemsize > 2 or dimension != x.ndim - 1 or x.ndim == 1:
        return False
    size = x.shape[-1] // parts
    if size % LANES == 0:
        return size % (2 * LANES) > 0
    return size % _PACKED > 0 or max(x.shape[:-1]) < LANES
