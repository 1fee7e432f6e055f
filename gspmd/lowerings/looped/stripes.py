"""Stripes of a routine: the dimension that is cut, and the possible sizes. `cost` has the costs of stripes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gspmd.planner.spans import CollectiveSpan, cut, settling
from gspmd.planner.steps import Routine, Step

STRIPES = (2, 4)

FULL_STRIPE = 128
"""The minimum size of a stripe, which is the number of rows that fill the lanes of a vector register."""


def stripe_dim(
    routine: Routine,
    gathers: Mapping[int, CollectiveSpan],
    scatters: Mapping[int, CollectiveSpan],
    local: Callable[[str], int],
) -> str | None:
    """Return the longest dimension that can be cut into stripes, or None.

    All collectives of the routine on tensors with this dimension must be ones that can be looped.

    Args:
        routine: the routine to run.
        gathers: the gathers that can run stripe by stripe, indexed by the number of their move.
        scatters: the reduce-scatters that can run stripe by stripe, indexed by the number of their output.
        local: a function that returns the size of a dimension on one device.
    """
    striping, einsum = _Striping(routine, gathers, scatters), routine.products[0].einsum
    dims = dict.fromkeys((*einsum.before.dims, *(einsum.other.dims if einsum.other else ())))
    return max(filter(striping.allows, dims), key=local, default=None)


def stripes(size: int, *, thin: bool) -> Iterator[tuple[int, ...]]:
    """Yield ways to cut a dimension of size `size` into equal stripes, each way as the sizes of its stripes.

    Stripes have at least the size `FULL_STRIPE`, unless `thin` is set. If the first and the last stripe were thinner
    than the others, more could overlap, but compilers do not schedule programs that way.
    """
    for number in STRIPES:
        if size // number >= (1 if thin else FULL_STRIPE):
            yield tuple(length for _, length in cut(size, number))


@dataclass(frozen=True)
class _Striping:
    routine: Routine
    gathers: Mapping[int, CollectiveSpan]
    scatters: Mapping[int, CollectiveSpan]

    def allows(self, dim: str) -> bool:
        """Return whether a dimension can be cut into stripes.

        No collective may change the sharding of the dimension. Every gathered operand and every product must have the
        dimension.
        """
        return all(self._stays(dim, *each) for each in self._chains()) and self._everywhere(dim)

    def _chains(self) -> Iterator[tuple[tuple[Step, ...], CollectiveSpan | None, tuple[str, ...]]]:
        """Yield every chain of steps, the collectives in it that can be looped, and the dimensions of its tensor."""
        for number, move in enumerate(self.routine.moves):
            yield move.steps, self.gathers.get(number), move.spec.dims
        for number, output in enumerate(self.routine.outputs):
            dims = self.routine.products[output.products[0]].spec.dims
            yield settling(self.routine, number), self.scatters.get(number), dims

    def _stays(self, dim: str, steps: tuple[Step, ...], span: CollectiveSpan | None, dims: tuple[str, ...]) -> bool:
        if dim not in dims:
            return True
        alone = not any(step.is_collective for step in steps if span is None or step not in span.steps)
        return alone and all(step.before.axes_of(dim) == step.after.axes_of(dim) for step in steps)

    def _everywhere(self, dim: str) -> bool:
        """Return whether stripes of the dimension can be computed one by one.

        All gathered operands and all products must have the dimension, with the same sharding. If an output is a sum of
        several products, no steps may follow these products. If an output lacks the dimension, no collective may follow
        its product, except for a reduce-scatter that can be looped. If an output has the dimension, it must have the
        same dimensions as its products.
        """
        moves = [self.routine.moves[n].spec.dims for n in self.gathers]
        products, outputs = self.routine.products, self.routine.outputs
        inside = all(dim in p.einsum.before.dims or (p.einsum.other and dim in p.einsum.other.dims) for p in products)
        single = all(len(o.products) == 1 or not self._steps_of(o.products) for o in outputs)
        pieces = [spec for p in products for spec in (p.einsum.before, p.einsum.other) if spec and dim in spec.dims]
        alike = len({spec.axes_of(dim) for spec in pieces}) == 1
        # If stripes are summands of an output, its reduction must run once, after all are added up.
        settled = any(
            step.is_collective
            for number, o in enumerate(outputs)
            if dim not in o.spec.dims and number not in self.scatters
            for step in self._steps_of(o.products)
        )
        made = [(o.spec.dims, products[p].einsum.after.dims) for o in outputs for p in o.products]
        broadcast = any(dim in wanted and set(wanted) != set(dims) for wanted, dims in made)
        return inside and single and alike and not settled and not broadcast and all(dim in dims for dims in moves)

    def _steps_of(self, products: Sequence[int]) -> list[Step]:
        return [step for p in products for step in self.routine.products[p].steps]
