"""Rules for attention heads: no device may need key heads of two groups of query heads in part."""

from collections.abc import Iterator
from math import prod

from gspmd.annotate import Fault, Spec
from gspmd.layouts.rules.given import GivenSizes
from gspmd.layouts.rules.line import Line
from gspmd.ops._attention.heads import share


def parted_groups(line: Line, query: Spec, key: Spec, given: GivenSizes) -> Iterator[Fault]:
    """Yield a fault where query heads are split so that a device has parts of two groups, each with its own key head.

    Args:
      line: that of attention.query.
      query, key: the specs; K lies over the first of the mesh axes of H.
      given: sizes and mesh; nothing is known to be wrong without H and K.
    """
    heads, key_heads = given.sizes.get("H", 0), given.sizes.get("K", 0)
    wanted, held = (spec.without_trivial(given.mesh).axes_of(dim) for spec, dim in ((query, "H"), (key, "K")))
    parts, key_parts = (prod(given.mesh.get(axis, 1) for axis in axes) for axes in (wanted, held))
    if (
        not {*wanted, *held} <= given.mesh.keys()
        or not key_heads
        or heads % key_heads
        or heads % parts
        or key_heads % key_parts
        or wanted[: len(held)] != held
    ):
        return  # no sizes, or a fault of another rule
    if share(wanted[len(held) :], key_heads // key_parts, given.mesh) is None:
        fact = (
            f"a device has {heads // parts} of {heads} query heads, and {heads // key_heads} share each of the "
            f"{key_heads} key heads ('{key}' in attention.key): some device would need parts of two groups."
        )
        remedy = f"Shard H over mesh axes whose size divides {key_heads}, or is a multiple of it, or leave it whole."
        yield line.at_dim(query, "H", fact, remedy)
