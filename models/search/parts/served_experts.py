"""The expert layers of a served model: rows sorted by expert, of which none is dropped."""

from __future__ import annotations

from collections.abc import Iterator

from gspmd.annotate import Spec
from gspmd.annotate.equation import Equation
from gspmd.ops._plan import plan
from gspmd.search import Term

from .dropless import Dropless


class ServedExperts(Dropless):
    """The expert layers as a model is served: every row of the batch is a group, and rows take the place of slots.

    The statistics of training are not asked for, and so not computed.
    """

    def terms(self) -> Iterator[Term]:
        """Tokens to groups and back, the router, rows to experts and back."""
        yield self._regrouped()
        yield self._routed()
        yield from self._through()

    def _logits(self, groups: Spec, router: Spec) -> float:
        costs, logits = self.costs, Spec(tuple("GLX"), (groups.axes_of("G"), (), ()))
        noisy = costs.config.moe.noisy
        pair = ((router, router), (logits, logits)) if noisy else (router, logits)
        sizes = {dim: costs.sizes[dim] for dim in "GEX"} | {"L": self.tokens}
        equation = Equation.product(groups, *pair)
        return plan(equation, sizes, costs.mesh, "float32", costs.chip, lowering="blocking").seconds
