"""The search against an exhaustive one: every placement of every operand, without bounds, hints or limits."""

import random
from itertools import permutations, product
from math import inf, prod

import pytest

import gspmd
from gspmd import Spec
from gspmd.annotate import parse_equation
from gspmd.collectives.chips import chip
from gspmd.collectives.cost import einsum_seconds
from gspmd.collectives.moves import move
from gspmd.collectives.plan import Step, total_cost

V4 = chip("tpu-v4")
CASES = 60


@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}, {"x": 3, "y": 2}, {"x": 4, "y": 2}], ids=str)
def test_products(mesh):
    rng = random.Random(0)
    for _ in range(CASES):
        equation, sizes = _random_product(rng, mesh, members=1)
        _agree(equation, sizes, mesh)


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 4, "y": 2}], ids=str)
def test_groups(mesh):
    rng = random.Random(1)
    for _ in range(CASES // 2):
        equation, sizes = _random_product(rng, mesh, members=2)
        _agree(equation, sizes, mesh)


@pytest.mark.parametrize("sizes", [{"B": 4, "L": 64}, {"B": 64, "L": 2048}, {"B": 2, "L": 1}], ids=str)
@pytest.mark.parametrize(
    "equation", ["BLE_xy, E_xF_y -> BLF_yx", "BLF_y, F_yE_x -> BLE_xy", "BLE_x, EF_y -> BLF_xy", "BLE_xy, EF -> BLF_yx"]
)
@pytest.mark.parametrize("mesh", [{"x": 2, "y": 4}, {"x": 2, "y": 2}], ids=str)
def test_batch_and_length_do_the_same(equation, sizes, mesh):
    _agree(equation, {**sizes, "E": 512, "F": 2048}, mesh)


@pytest.mark.parametrize(
    "equation",
    [
        "BE_xyz, E_xF_yz -> BF_yzx",
        "BF_yz, F_yzE_x -> BE_xyz",
        "B_xE_yz, E_xF_yz -> B_xF_yz",
        "B_xyzE, E_xF_yz -> B_xyzF",
        "BE_xy, EF_z -> BF_z",
        "BE_x, E_yzF -> B_yF_zx",
    ],
)
@pytest.mark.parametrize("tokens", [64, 1 << 20])
def test_three_axes(equation, tokens):
    _agree(equation, {"B": tokens, "E": 512, "F": 2048}, {"x": 2, "y": 2, "z": 4})


def _agree(equation: str, sizes, mesh) -> None:
    plan = gspmd.plan(equation, sizes, mesh, dtype="float32")
    parsed = parse_equation(equation)
    shared = parsed.operands[0].specs[0]
    pairs = list(zip(parsed.operands[1].specs, parsed.outputs))
    assert total_cost(plan.steps) == _exhaustive(shared, pairs, sizes, mesh), f"{equation} {sizes} {mesh}\n{plan}"


def _exhaustive(shared: Spec, pairs, sizes, mesh) -> tuple[int, int, int]:
    """The least cost of bringing the shared operand anywhere, and every partner to where it fits."""
    best = (inf, inf, inf)
    for held in _placements(shared, sizes, mesh):
        total = total_cost(move(shared, held, sizes, mesh, 4, V4))
        for partner, output in pairs:
            ways = [_cost(held, partner, right, output, sizes, mesh) for right in _placements(partner, sizes, mesh)]
            total = tuple(map(sum, zip(total, min(filter(None, ways), default=(inf, inf, inf)))))
        best = min(best, total)
    return best


def _placements(source: Spec, sizes, mesh) -> list[Spec]:
    """Every spec on this mesh that divides the sizes, owing no more than the source does."""
    found = []
    for places in product([*source.dims, "-", "+"], repeat=len(mesh)):
        held = {d: [a for a, p in zip(mesh, places) if p == d] for d in source.dims}
        partial = tuple(a for a, p in zip(mesh, places) if p == "+")
        if set(partial) <= set(source.partial) and all(sizes[d] % _parts(held[d], mesh) == 0 for d in held):
            found += [Spec(source.dims, order, partial) for order in product(*map(permutations, held.values()))]
    return found


def _cost(left: Spec, partner: Spec, right: Spec, output: Spec, sizes, mesh) -> tuple[int, int, int] | None:
    """Of one partner's move, the local einsum and the way to the output; None where the two do not fit each other."""
    where = {**dict(zip(left.dims, left.axes)), **dict(zip(right.dims, right.axes))}
    alike = all(left.axes_of(d) == right.axes_of(d) for d in left.dims if d in right.dims)
    roles = [a for axes in where.values() for a in axes] + [*left.partial, *right.partial]
    if not alike or len(roles) != len(set(roles)):
        return None
    owed = {a for d, axes in where.items() if d not in output.dims for a in axes} | {*left.partial, *right.partial}
    dims = [d for d in output.dims if d in where]
    result = Spec(dims, tuple(where[d] for d in dims), tuple(owed))
    if not set(output.partial) <= owed:
        return None
    einsum = _einsum(left, right, result, where, sizes, mesh)
    return total_cost((*move(partner, right, sizes, mesh, 4, V4), einsum, *move(result, output, sizes, mesh, 4, V4)))


def _einsum(left: Spec, right: Spec, result: Spec, where, sizes, mesh) -> Step:
    local = {d: sizes[d] // _parts(axes, mesh) for d, axes in where.items()}
    flops = prod(local.values()) * (1 if set(result.dims) == set(local) else 2)
    touched = 4 * sum(prod(local[d] for d in spec.dims) for spec in (left, right, result))
    return Step("einsum", (), 0, einsum_seconds(flops, touched, "float32", V4), left, result)


def _parts(axes, mesh) -> int:
    return prod(mesh[a] for a in axes)


def _random_product(rng: random.Random, mesh, members: int) -> tuple[str, dict[str, int]]:
    shared = _random_spec(rng, _letters(rng, "ABC"), mesh, mesh)
    partners, outputs = [], []
    for _ in range(members):
        partner = _random_spec(rng, _letters(rng, "BCD"), mesh, mesh)
        union = list(dict.fromkeys(shared.dims + partner.dims))
        dims = rng.sample(union, rng.randint(0, len(union)))
        made = [a for a in mesh if a in {*shared.partial, *partner.partial} or len(dims) < len(union)]
        partners.append(partner)
        outputs.append(_random_spec(rng, dims, mesh, made))
    right, out = (f"({', '.join(map(str, specs))})" if members > 1 else str(specs[0]) for specs in (partners, outputs))
    return f"{shared}, {right} -> {out}", {d: _parts(mesh, mesh) * rng.choice([1, 6, 1 << 10]) for d in "ABCD"}


def _letters(rng: random.Random, letters: str) -> list[str]:
    return rng.sample(letters, rng.randint(1, 2))


def _random_spec(rng: random.Random, dims, mesh, owed) -> Spec:
    held, partial = {d: [] for d in dims}, []
    for axis in rng.sample(list(mesh), len(mesh)):
        place = rng.choice([*dims, "", *("+" if axis in owed else "")])
        if place == "+":
            partial.append(axis)
        elif place:
            held[place].append(axis)
    return Spec(tuple(dims), tuple(map(tuple, held.values())), tuple(partial))
