"""Where the arrays of a group lie: over the mesh axes of G, each group whole."""

from dataclasses import dataclass
from functools import lru_cache

import jax

from gspmd.annotate.errors import Fault, LayoutError, report
from gspmd.annotate.spec import Spec
from gspmd.lowerings.program import context


@dataclass(frozen=True)
class Places:
    """Where the layer's group-local arrays lie: over the mesh axes of G, each group whole."""

    axes: tuple[str, ...]

    def per_group(self, dims: str) -> Spec:
        """The spec of an array whose first dimension is G: `per_group("LX")` is "G_xLX"."""
        return Spec(("G", *dims), (self.axes, *((),) * len(dims)))

    @property
    def groups(self) -> Spec:
        """The tokens."""
        return self.per_group("LE")

    @property
    def dispatched(self) -> Spec:
        """The tokens in their slots."""
        return self.per_group("XCE")

    def random(self) -> jax.P | None:
        """Placement to draw random numbers of the groups in; under Auto axes the compiler finds it."""
        return jax.P(self.groups.partition_spec()[0]) if context().explicit else None


@lru_cache
def places_of(groups: str, dispatched: str) -> Places:
    """The places of a layout, from its specs of the tokens and of their slots.

    Raises:
        LayoutError: groups, or their slots, would not be whole on a device.
    """
    groups, dispatched = Spec.parse(groups), Spec.parse(dispatched)
    places = Places(groups.axes_of("G") if "G" in groups.dims else ())
    faults = []
    if groups != places.groups:
        faults.append(_not_whole(groups, "tokens", "GLE"))
    if dispatched != places.dispatched:
        faults.append(_not_whole(dispatched, "slots", str(places.dispatched)))
    if faults:
        raise report(LayoutError, "cannot route tokens by this layout", faults)
    return places


def _not_whole(spec: Spec, what: str, wanted: str) -> Fault:
    fact = f"the {what} of a group have to lie whole on the device that routes it."
    remedy = f"Write it '{wanted}', with mesh axes on G alone, the same ones for tokens and slots."
    return Fault(str(spec), 0, len(str(spec)), fact, remedy)
