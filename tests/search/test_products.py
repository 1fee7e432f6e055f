"""Products priced in every placement at once, against the planner's plan of each with its via."""

import random
from dataclasses import replace
from itertools import product as product_of
from itertools import takewhile
from math import prod

import numpy as np
import pytest

from gspmd.hardware.chips import CHIPS
from gspmd.ops._plan import plan
from gspmd.planner.graph.resharding import move
from gspmd.search.moves import Moves, environment_of, placements
from gspmd.search.products import Member, Operand, Passes, Product

CASES = 40
MESHES = ({"x": 2, "y": 4, "z": 2}, {"x": 4, "y": 2}, {"x": 8}, {"x": 4, "y": 1, "z": 4})
KINDS = {
    "gated": ("BLE", [("EF", "BLF", 2)], ""),
    "plain": ("BLF", [("FE", "BLE", 1)], ""),
    "heads": ("BLE", [("EHD", "BLHD", 1), ("EKD", "BLKD", 2)], "D"),
    "experts": ("GXCE", [("XEF", "GXCF", 1)], "C"),
}


def product(rng: random.Random, kind: str, dtypes: tuple[str, str, str]):
    left, members, whole = KINDS[kind]
    mesh = rng.choice(MESHES)
    sizes = {dim: rng.choice((8, 32, 96)) for dim in "BLEFHKDGXC"}

    def operand(dims, dtype):
        return Operand(tuple(dims), dtype, placements(dims, sizes, mesh, whole))

    made = [Member(operand(w, dtypes[1]), operand(r, dtypes[2]), copies, whole) for w, r, copies in members]
    environment = environment_of(sizes, mesh, CHIPS[rng.choice(("tpu-v4", "tpu-v5e", "h100"))])
    return Product(environment, operand(left, dtypes[0]), made, Passes(1, 1, 1)), sizes, mesh


def planned(found: Product, sizes, mesh, left: int, weights, results, via: int, dtypes):
    """The seconds of the plan of one placement, forward and backward."""
    pins, of = found.via(via), [joint.member for joint in found.members]
    many = [member.copies for member in of]
    spread = lambda specs: ", ".join(str(spec) for spec, count in zip(specs, many) for _ in range(count))  # noqa: E731
    group = "({})" if sum(many) > 1 else "{}"
    ws, rs = (
        [getattr(m, n).options[i] for m, i in zip(of, picks)] for n, picks in (("weight", weights), ("result", results))
    )
    equation = f"{found.left.options[left]}, {group.format(spread(ws))} -> {group.format(spread(rs))}"
    pinned = f"{pins[0].specs[0]}, {group.format(spread([pin.specs[1] for pin in pins]))}"
    used = {dim: size for dim, size in sizes.items() if dim in equation}
    operands = [dtypes[0], *[dtypes[1]] * sum(many)]
    chip = found.environment.chip
    made = plan(equation, used, mesh, operands, chip, lowering="blocking", via=pinned)
    return made.seconds + sum(each.seconds for each in made.gradients)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_placement_costs_what_its_plan_says(kind):
    rng = random.Random(kind)
    dtypes = ("bfloat16",) * 3
    for _ in range(CASES // 8):
        found, sizes, mesh = product(rng, kind, dtypes)
        for _ in range(8):
            left, via = rng.randrange(len(found.left.options)), rng.randrange(len(found.vias))
            weights, results = (
                [rng.randrange(len(getattr(joint.member, name).options)) for joint in found.members]
                for name in ("weight", "result")
            )
            told = found.seconds_of_left[left, via]
            told += sum(found.seconds_of_weight(n)[pick, via] for n, pick in enumerate(weights))
            told += sum(found.seconds_of_result(n)[pick, via] for n, pick in enumerate(results))
            wanted = planned(found, sizes, mesh, left, weights, results, via, dtypes)
            assert told == pytest.approx(wanted, rel=1e-9, abs=2e-11)


def test_a_loop_takes_once_what_comes_before_a_move_enlarges_its_tensor():
    rng, found = random.Random(0), {True: 0, False: 0}
    for mesh in MESHES:
        sizes, chip = {"V": 96, "E": 32}, CHIPS["tpu-v4"]
        specs = placements("VE", sizes, mesh)
        tensor = Moves(environment_of(sizes, mesh, chip), ("V", "E"), "bfloat16")
        table = tensor.hoisted(tensor.numbers(specs), tensor.numbers(specs))
        for _ in range(100):
            before, after = rng.randrange(len(specs)), rng.randrange(len(specs))
            wanted = 0.0
            for step in move(specs[before], specs[after], sizes, mesh, 2, chip):
                if prod(step.after.local_shape(sizes, mesh)) != prod(step.before.local_shape(sizes, mesh)):
                    break
                wanted += step.seconds
            assert table[before, after] == pytest.approx(wanted, abs=1e-11)  # picoseconds are rounded
            found[wanted > 0] += 1
    assert min(found.values()) > 50


def test_what_two_moves_have_in_common_are_their_first_steps():
    rng, found = random.Random(0), {True: 0, False: 0}
    for mesh in MESHES:
        sizes, chip = {"B": 16, "L": 8, "E": 96}, CHIPS["tpu-v4"]
        specs = placements("BLE", sizes, mesh)
        tensor = Moves(environment_of(sizes, mesh, chip), tuple("BLE"), "bfloat16")
        every = range(len(specs))
        sources, ends, others = ([rng.choice(every) for _ in range(9)] for _ in range(3))
        numbers = tensor.numbers(specs)
        table = tensor.shared(numbers[sources], numbers[ends], numbers[others])
        for at, (source, end, other) in zip(np.ndindex(table.shape), product_of(sources, ends, others)):
            chains = (move(specs[source], specs[to], sizes, mesh, 2, chip) for to in (end, other))
            common = takewhile(lambda pair: pair[0] == pair[1], zip(*chains))
            wanted = sum(step.seconds for step, _ in common)
            assert table[at] == pytest.approx(wanted, abs=1e-11)  # picoseconds are rounded
            found[wanted > 0] += 1
    assert min(found.values()) > 50


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loop_takes_once_is_no_part_of_what_it_repeats(kind):
    rng = random.Random(kind)
    plain, *_ = product(rng, kind, ("bfloat16",) * 3)
    members = [joint.member for joint in plain.members]
    same = [replace(each, weight=replace(each.weight, invariant=True)) for each in members]
    found = Product(plain.environment, plain.left, same, plain.passes)
    for number in range(len(members)):
        whole, once = plain.seconds_of_weight(number), found.seconds_once(number)
        assert np.allclose(found.seconds_of_weight(number) + once, whole, rtol=1e-12)
        assert (once >= 0).all()
        assert (once <= whole + 1e-15).all()


def test_vias_are_all_joint_placements():
    """Each mesh axis on one of the dimensions or on none, in every order, of one mesh axis and four dimensions."""
    sizes, mesh = dict.fromkeys("BLEF", 8), {"x": 8}
    operands = {dims: Operand(tuple(dims), "float32", placements(dims, sizes, mesh)) for dims in ("BLE", "EF", "BLF")}
    member = Member(operands["EF"], operands["BLF"])
    found = Product(environment_of(sizes, mesh, CHIPS["tpu-v4"]), operands["BLE"], [member])
    vias = {", ".join(map(str, found.via(n)[0].specs)) for n in range(len(found.vias))}
    assert vias == {"BLE, EF", "B_xLE, EF", "BL_xE, EF", "BLE_x, E_xF", "BLE, EF_x"}
    assert [found.number(found.via(n)) for n in range(len(found.vias))] == list(range(len(found.vias)))


def test_what_does_not_divide_is_no_placement():
    specs = placements("EF", {"E": 12, "F": 5}, {"x": 2, "y": 4})
    assert [str(spec) for spec in specs] == ["EF", "E_xF", "E_yF"]


def test_an_option_of_a_mesh_without_axes():
    sizes = dict.fromkeys("BLEF", 8)
    operands = {
        dims: Operand(tuple(dims), "float32", placements(dims, sizes, {"x": 1})) for dims in ("BLE", "EF", "BLF")
    }
    member = Member(operands["EF"], operands["BLF"])
    found = Product(environment_of(sizes, {"x": 1}, CHIPS["tpu-v4"]), operands["BLE"], [member], Passes(1, 1, 1))
    assert found.seconds_of_left.tolist() == [[0.0]]
    assert np.isfinite(found.seconds_of_result(0)).all()
