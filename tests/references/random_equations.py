"""Random equations on random meshes, and their results on one device: the draws of the property tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm, prod

import jax
import numpy as np
from hypothesis import strategies as st

import gspmd
from gspmd.annotate import Equation, Operand, Term, parse_equation
from gspmd.planner.overlap import SCHEDULES

MESHES = (
    (1,),
    (2,),
    (3,),
    (4,),
    (5,),
    (6,),
    (7,),
    (8,),
    (1, 1),
    (2, 2),
    (3, 2),
    (2, 3),
    (4, 2),
    (2, 4),
    (2, 2, 2),
    (4, 1, 2),
    (4, 2, 1),
    (1, 3, 2),
)
LETTERS = "BEFH"
LOWERINGS = ("blocking", "xla", "looped", *(f"looped:{schedule}" for schedule in SCHEDULES), "auto")
SUMMED = 3  # a case is kept small: no dimension is longer than the least possible, times this


@dataclass(frozen=True)
class Case:
    """One draw: everything that is needed to run a failing example again."""

    equation: str
    sizes: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    axis_type: str
    lowering: str
    via: str | None = None


# -- drawing ----------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw) -> Case:
    """Return a mesh, its axis type, a lowering, an equation, and sizes that its specs divide."""
    shape = draw(st.sampled_from(MESHES))
    mesh = dict(zip("xyz", shape))
    axis_type = draw(st.sampled_from(("explicit", "auto")))
    form = draw(st.sampled_from((_product, _group, _sum, _move)))
    equation = form(_Drawing(draw, mesh, axis_type == "explicit"))
    lowering = draw(st.sampled_from(LOWERINGS))
    pins = _pins(draw, equation, mesh) if lowering != "xla" and len(equation.terms) == 1 else None
    sizes = _sizes(draw, equation, mesh, pins or [])
    via = None if pins is None else str(Equation((_like(equation, pins),), (pins[0],))).partition(" ->")[0]
    return Case(str(equation), tuple(sizes.items()), tuple(mesh.items()), axis_type, lowering, via)


def _pins(draw, equation: Equation, mesh: Mapping[str, int]) -> list[gspmd.Spec] | None:
    """Draw a via for operands without partial sums: each mesh axis shards one dimension, or is gathered."""
    specs = [spec for operand in equation.operands for spec in operand.specs]
    if len(specs) < 2 or any(spec.partial for spec in (*specs, *equation.outputs)) or draw(st.booleans()):
        return None
    axes = dict.fromkeys(_union(*specs), ())
    for axis in draw(st.permutations(list(mesh))):
        dim = draw(st.sampled_from([*axes, ""]))
        axes |= {dim: (*axes[dim], axis)} if dim else {}
    return [gspmd.Spec(spec.dims, tuple(axes[dim] for dim in spec.dims)) for spec in specs]


def _like(equation: Equation, specs: Sequence[gspmd.Spec]) -> Term:
    """Return a term of these specs, grouped as that of an equation."""
    held = iter(specs)
    return Term(tuple(Operand(tuple(next(held) for _ in o.specs), o.group) for o in equation.operands))


@dataclass(frozen=True)
class _Drawing:
    draw: object
    mesh: Mapping[str, int]
    partial: bool

    def dims(self, letters: str = LETTERS) -> str:
        return "".join(self.draw(st.permutations([d for d in letters if self.draw(st.booleans())])))

    def spec(self, dims: str, owed: Sequence[str] = ()) -> gspmd.Spec:
        """Return a spec of these dimensions; the axes `owed` may have partial sums."""
        axes, partial = {dim: [] for dim in dims}, []
        for axis in self.draw(st.permutations(list(self.mesh))):
            place = self.draw(st.sampled_from([*dims, "", *(["+", "+"] if self.partial and axis in owed else [])]))
            if place == "+":
                partial.append(axis)
            elif place:
                axes[place].append(axis)
        return gspmd.Spec(tuple(dims), tuple(tuple(axes[dim]) for dim in dims), tuple(partial))

    def operand(self, dims: str) -> gspmd.Spec:
        return self.spec(dims, tuple(self.mesh))

    def output(self, dims: str, terms: Sequence[Sequence[gspmd.Spec]]) -> gspmd.Spec:
        """Return a result's spec, which may be a partial sum over an axis.

        In every term an operand is a partial sum over that axis, or a dimension is summed.
        """
        owed = [axis for axis in self.mesh if all(_makes(axis, dims, term) for term in terms)]
        return self.spec(dims, owed)


def _makes(axis: str, dims: str, term: Sequence[gspmd.Spec]) -> bool:
    return any(axis in spec.partial or not set(spec.dims) <= set(dims) for spec in term)


def _product(drawing: _Drawing) -> Equation:
    left, right = drawing.operand(drawing.dims()), drawing.operand(drawing.dims())
    output = drawing.output(drawing.dims(_union(left, right)), [[left, right]])
    return Equation((Term((Operand((left,)), Operand((right,)))),), (output,))


def _move(drawing: _Drawing) -> Equation:
    source = drawing.operand(drawing.dims())
    keeps_all = drawing.draw(st.booleans())
    dims = "".join(drawing.draw(st.permutations(source.dims))) if keeps_all else drawing.dims("".join(source.dims))
    return Equation((Term((Operand((source,)),)),), (drawing.output(dims, [[source]]),))


def _group(drawing: _Drawing) -> Equation:
    shared = drawing.operand(drawing.dims())
    members = [drawing.operand(drawing.dims()) for _ in range(drawing.draw(st.integers(2, 3)))]
    outputs = tuple(drawing.output(drawing.dims(_union(shared, member)), [[shared, member]]) for member in members)
    operands = [Operand((shared,)), Operand(tuple(members), True)]
    return Equation((Term(tuple(drawing.draw(st.permutations(operands)))),), outputs, True)


def _sum(drawing: _Drawing) -> Equation:
    dims = drawing.dims(LETTERS[:3])
    terms = [_term(drawing, dims) for _ in range(drawing.draw(st.integers(2, 3)))]
    output = drawing.output(dims, [[o.specs[0] for o in term.operands] for term in terms])
    return Equation(tuple(terms), (output,))


def _term(drawing: _Drawing, dims: str) -> Term:
    """Return one or two operands that together have all of `dims`, and perhaps others."""
    left, right = set(drawing.dims()), set(drawing.dims())
    if drawing.draw(st.booleans()):
        specs = [left | set(dims)]
    else:
        specs = [left | (set(dims) - right), right]
    ordered = ["".join(drawing.draw(st.permutations(sorted(spec)))) for spec in specs]
    return Term(tuple(Operand((drawing.operand(each),)) for each in ordered))


def _union(*specs: gspmd.Spec) -> str:
    return "".join(dict.fromkeys(dim for spec in specs for dim in spec.dims))


def _sizes(draw, equation: Equation, mesh: Mapping[str, int], pins: Sequence[gspmd.Spec]) -> dict[str, int]:
    """Return the least size of every dimension that divides evenly everywhere, times a small number."""
    specs = [spec for operand in equation.operands for spec in operand.specs] + [*equation.outputs, *pins]
    owed = prod(mesh[axis] for axis in {axis for spec in equation.outputs for axis in spec.partial})
    sizes = {}
    for dim in sorted({dim for spec in specs for dim in spec.dims}):
        parts = [prod(mesh[axis] for axis in spec.axes_of(dim)) for spec in specs if dim in spec.dims]
        summed = any(dim not in spec.dims for spec in equation.outputs)
        sizes[dim] = lcm(*parts, owed if summed else 1) * draw(st.integers(1, SUMMED))
    return sizes


# -- checking ---------------------------------------------------------------------------------------------------------


def check(case: Case) -> None:
    """Check that values and gradients equal numpy's exactly.

    Results must be sharded as the equation says, and replicas must be equal.
    """
    equation, sizes = parse_equation(case.equation), dict(case.sizes)
    specs = [spec for operand in equation.operands for spec in operand.specs]
    rng = np.random.default_rng(0)
    summands = [
        _integers(rng, [dict(case.mesh)[a] for a in spec.partial] + [sizes[d] for d in spec.dims]) for spec in specs
    ]
    cotangents = [_integers(rng, [sizes[d] for d in spec.dims]) for spec in equation.outputs]
    wholes = [x.sum(tuple(range(len(spec.partial)))) for x, spec in zip(summands, specs)]
    mesh = _mesh(case)
    with jax.set_mesh(mesh):
        placed = [place(x, spec, mesh) for x, spec in zip(summands, specs)]
        duals = [
            place(x, spec.without_partial(), mesh, reduced=spec.partial)
            for x, spec in zip(cotangents, equation.outputs)
        ]
        results, gradients = jax.jit(_value_and_gradients, static_argnums=(0, 1))(equation, case, placed, duals)
    for result, spec, want in zip(results, equation.outputs, values(equation, wholes), strict=True):
        np.testing.assert_array_equal(whole(result, spec, mesh), want, err_msg="value")
    wanted = gradients_of(equation, wholes, cotangents)
    for number, (gradient, spec, want) in enumerate(zip(gradients, specs, wanted, strict=True), 1):
        message = f"gradient of operand {number}"
        np.testing.assert_array_equal(whole(gradient, spec.without_partial(), mesh), want, err_msg=message)


def _integers(rng, shape: Sequence[int]) -> np.ndarray:
    return rng.integers(-3, 4, size=shape).astype(np.float32)


def _mesh(case: Case) -> jax.sharding.Mesh:
    names, shape = zip(*case.mesh)
    kind = jax.sharding.AxisType.Explicit if case.axis_type == "explicit" else jax.sharding.AxisType.Auto
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: prod(shape)])


def _value_and_gradients(equation: Equation, case: Case, operands, cotangents):
    def compute(*flat):
        held = iter(flat)
        nested = [tuple(next(held) for _ in o.specs) if o.group else next(held) for o in equation.operands]
        results = gspmd.einsum(equation, *nested, lowering=case.lowering, via=case.via)
        return results if equation.group else (results,)

    results, transpose = jax.vjp(compute, *operands)
    return results, transpose(tuple(cotangents))


def values(equation: Equation, wholes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the results of the equation on one device."""
    held, sums = iter(wholes), [0] * len(equation.outputs)
    for term in equation.terms:
        operands = [[(spec, next(held)) for spec in operand.specs] for operand in term.operands]
        for n, (pair, output) in enumerate(zip(_pairs(operands), equation.outputs)):
            sums[n] = sums[n] + _einsum([x for _, x in pair], [spec.dims for spec, _ in pair], output.dims)
    return sums


def gradients_of(
    equation: Equation, wholes: Sequence[np.ndarray], cotangents: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the cotangent of every operand, from those of the results."""
    gradients, first = [np.zeros_like(x) for x in wholes], 0
    for term in equation.terms:
        operands = []
        for operand in term.operands:
            operands.append([(spec, first + i) for i, spec in enumerate(operand.specs)])
            first += len(operand.specs)
        for pair, output, cotangent in zip(_pairs(operands), equation.outputs, cotangents):
            for own in range(len(pair)):
                spec, number = pair[own]
                others = [(s.dims, wholes[n]) for i, (s, n) in enumerate(pair) if i != own]
                arrays, dims = [cotangent, *(x for _, x in others)], [output.dims, *(d for d, _ in others)]
                gradients[number] = gradients[number] + _into(arrays, dims, spec.dims, wholes[number].shape)
    return gradients


def _pairs(operands: list[list]) -> list[tuple]:
    return list(product(*operands))


def _einsum(arrays: Sequence[np.ndarray], dims: Sequence[Sequence[str]], out: Sequence[str]) -> np.ndarray:
    letters = ",".join("".join(d) for d in dims) + "->" + "".join(out)
    return np.einsum(letters, *(x.astype(np.float64) for x in arrays))


def _into(arrays, dims, out: Sequence[str], shape: tuple[int, ...]) -> np.ndarray:
    """Return an einsum whose result may have dimensions that no operand has: along those it is constant."""
    known = [dim for dim in out if any(dim in d for d in dims)]
    got = _einsum(arrays, dims, known)
    return np.broadcast_to(np.expand_dims(got, [i for i, dim in enumerate(out) if dim not in known]), shape)


# -- arrays on a mesh, by the definition of the notation ---------------------------------------------------------------


def place(x: np.ndarray, spec: gspmd.Spec, mesh: jax.sharding.Mesh, reduced: Sequence[str] = ()) -> jax.Array:
    """Return an array of pieces.

    For a partial sum, `x` has a leading dimension of summands for each of its mesh axes.
    """
    partition = spec.partition_spec()
    if reduced:
        partition = jax.P(*partition.partitions, reduced=set(reduced))
    pieces = [jax.device_put(x[_index(spec, at, mesh, x.shape)], device) for at, device in _devices(mesh)]
    shape = x.shape[len(spec.partial) :]
    return jax.make_array_from_single_device_arrays(shape, jax.NamedSharding(mesh, partition), pieces)


def whole(x: jax.Array, spec: gspmd.Spec, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Return the array that the pieces make up; replicas must agree, and partial sums are added."""
    pieces = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    lifted = np.full([*(mesh.shape[a] for a in spec.partial), *x.shape], np.nan)
    for at, device in _devices(mesh):
        index = _index(spec, at, mesh, lifted.shape)
        before = lifted[index]
        assert pieces[device].shape == before.shape, f"a piece of '{spec}' has shape {pieces[device].shape}"
        assert np.all(np.isnan(before) | (before == pieces[device])), f"replicas of '{spec}' differ"
        lifted[index] = pieces[device]
    return lifted.sum(tuple(range(len(spec.partial))))


def _devices(mesh: jax.sharding.Mesh):
    for at, device in np.ndenumerate(mesh.devices):
        yield dict(zip(mesh.axis_names, at)), device


def _index(spec: gspmd.Spec, at: Mapping[str, int], mesh, shape: Sequence[int]) -> tuple:
    """Return the slices of a device's piece in the whole: x is major in `E_xy`; for a partial sum, its own summand."""
    index = [at[axis] for axis in spec.partial]
    for size, axes in zip(shape[len(spec.partial) :], spec.axes):
        length = size // prod(mesh.shape[axis] for axis in axes)
        position = 0
        for axis in axes:
            position = position * mesh.shape[axis] + at[axis]
        index.append(slice(position * length, (position + 1) * length))
    return tuple(index)
