"""Specs of arrays with one entry per group, in which only G is sharded."""

from dataclasses import dataclass
from functools import lru_cache

import jax

from gspmd.annotate.errors import Fault, LayoutError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import context


@dataclass(frozen=True)
class GroupedSpecs:
    """Specs of the layer's per-group arrays. Only G is sharded, over the same mesh axes in every array."""

    axes: tuple[str, ...]

    def per_group(self, dims: str) -> Spec:
        """Return the spec of an array with dimension G before `dims`; if `axes` is x, `per_group("LX")` is "G_xLX"."""
        return Spec(("G", *dims), (self.axes, *((),) * len(dims)))

    @property
    def groups(self) -> Spec:
        """The spec of the tokens [G, L, E]."""
        return self.per_group("LE")

    @property
    def dispatched(self) -> Spec:
        """The spec of the tokens in their slots [G, X, C, E]."""
        return self.per_group("XCE")

    def random(self) -> jax.P | None:
        """Return the sharding for random numbers that are drawn per group.

        Under Auto axes this is None, because the compiler infers the sharding.
        """
        return jax.P(self.groups.partition_spec()[0]) if context().explicit else None


@lru_cache
def places_of(groups: Spec, dispatched: Spec) -> GroupedSpecs:
    """Return the per-group specs of a layout, given the layout's specs of tokens and of slots.

    Raises:
        LayoutError: a spec shards a dimension other than G, or the two specs do not shard G in the same way.
    """
    places = GroupedSpecs(groups.axes_of("G") if "G" in groups.dims else ())
    faults = []
    if groups != places.groups:
        faults.append(_not_whole(groups, "tokens", "GLE"))
    if dispatched != places.dispatched:
        faults.append(_not_whole(dispatched, "slots", str(places.dispatched)))
    if faults:
        raise report(LayoutError, "cannot route tokens by this layout", faults)
    return places


def _not_whole(spec: Spec, what: str, wanted: str) -> Fault:
    fact = f"the device that routes a group must have all {what} of it."
    remedy = f"Write '{wanted}': only G may be sharded, over the same mesh axes for tokens and slots."
    return Fault(str(spec), 0, len(str(spec)), fact, remedy)
