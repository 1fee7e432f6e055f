"""Random products, sums and moves whose operands conflict in sharding: the draws that test lowering `xla`.

Unlike those of random_equations.py, nearly every mesh axis shards something in every spec, so the operands of a product
seldom agree. In such cases XLA's partitioner has been wrong.
"""

from collections.abc import Sequence
from math import lcm, prod

import numpy as np

from gspmd.annotate import Equation, Operand, Spec, Term
from tests.references.random_equations import Case

Meshes = Sequence[tuple[int, ...]]
MESHES: Meshes = ((3, 2), (2, 3), (4, 2), (2, 2, 2), (8,), (5,), (3,))
FORMS = ("product", "product", "product", "product", "move", "group", "sum")


def draw(seed: int, form: str | None = None, meshes: Meshes = MESHES, lowerings: Sequence[str] = ("xla",)) -> Case:
    """Return the case of a seed; a failing one is run again by its number."""
    rng = np.random.default_rng(seed)
    mesh = dict(zip("xyz", meshes[rng.integers(len(meshes))]))
    axis_type = ("explicit", "auto")[rng.integers(2)]
    equation = _equation(rng, form or FORMS[rng.integers(len(FORMS))], tuple(mesh))
    sizes = {}
    for dim in sorted({dim for spec in equation.specs for dim in spec.dims}):
        parts = [prod(mesh[a] for a in spec.axes_of(dim)) for spec in equation.specs if dim in spec.dims]
        sizes[dim] = lcm(*parts) * int(rng.integers(1, 3))
    lowering = lowerings[rng.integers(len(lowerings))]
    return Case(str(equation), tuple(sizes.items()), tuple(mesh.items()), axis_type, lowering)


def _equation(rng, form: str, axes: tuple[str, ...]) -> Equation:
    one = lambda dims: Operand((_spec(rng, dims, axes),))  # noqa: E731
    left, right, third = (_dims(rng, "BLEF") for _ in range(3))
    if form == "move":
        kept = left if rng.integers(2) else _some(rng, left)
        return Equation((Term((one(left),)),), (_spec(rng, rng.permutation(list(kept)), axes),))
    if form == "group":
        members = [_spec(rng, dims, axes) for dims in (right, third)]
        outputs = tuple(_spec(rng, _some(rng, left + spec.dims), axes) for spec in members)
        return Equation((Term((one(left), Operand(tuple(members), True))),), outputs, True)
    if form == "sum":
        output = _some(rng, left)
        terms = [Term((one(left), one(right))), Term((one(_some(rng, left)), one(output)))]
        return Equation(tuple(terms), (_spec(rng, output, axes),))
    return Equation((Term((one(left), one(right))),), (_spec(rng, _some(rng, left + right), axes),))


def _dims(rng, letters: str) -> tuple[str, ...]:
    return tuple(str(d) for d in rng.permutation(list(letters))[: rng.integers(1, 5)])


def _some(rng, dims) -> tuple[str, ...]:
    dims = list(dict.fromkeys(dims))
    return tuple(str(d) for d in rng.permutation(dims)[: rng.integers(0, len(dims) + 1)])


def _spec(rng, dims, axes: tuple[str, ...]) -> Spec:
    held: dict[str, list[str]] = {str(dim): [] for dim in dims}
    for axis in rng.permutation(list(axes)):
        if held and rng.random() < 0.8:
            held[list(held)[rng.integers(len(held))]].append(str(axis))
    return Spec(tuple(held), tuple(map(tuple, held.values())))
