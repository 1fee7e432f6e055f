"""The difference of two ledgers: what changed, and nothing else."""

import jax
import pytest

import gspmd
from gspmd.audit import Entry, Ledger
from gspmd.audit.ledgers.changes import Change
from gspmd.audit.ledgers.ledger import difference

MESH = {"x": 4, "y": 2}
GATHER = Entry("all-gather", ("x",), 3, 288, "f32")
REDUCE = Entry("all-reduce", ("x", "y"), 1, 64, "bf16")


def ledger(*entries: Entry, flops: int = 128, name: str = "jit_step") -> Ledger:
    return Ledger(entries, flops, MESH, name)


def test_equal_ledgers_do_not_differ():
    found = ledger(GATHER, REDUCE).diff(ledger(REDUCE, GATHER))
    assert not found
    assert found.rows == ()
    assert str(found) == "no difference: 352 B sent\n"


def test_what_asked_and_in_which_order_of_axes_is_no_difference():
    other = Entry("all-reduce", ("y", "x"), 1, 64, "bf16", "model.py:9", "A -> B", "step1.all-reduce.x.y", "r.3", True)
    assert not difference(ledger(REDUCE), ledger(other))


def test_one_of_three_is_gone_one_is_new_and_one_has_grown():
    scatter = Entry("reduce-scatter", ("y",), 2, 1000, "f32")
    longer = Entry("all-gather", ("x",), 6, 576, "f32")
    found = difference(ledger(GATHER, REDUCE), ledger(longer, scatter, flops=256, name="jit_other"))
    assert found
    assert found.rows == (
        Change("reduce-scatter", ("y",), "f32", (0, 0), (2, 1000)),
        Change("all-gather", ("x",), "f32", (3, 288), (6, 576)),
        Change("all-reduce", ("x", "y"), "bf16", (1, 64), (0, 0)),
    )
    assert (found.wire_bytes, found.flops, found.names) == ((352, 1576), (128, 256), ("jit_step", "jit_other"))


def test_only_what_changed_is_listed():
    found = difference(ledger(GATHER, REDUCE), ledger(GATHER))
    assert [row.kind for row in found.rows] == ["all-reduce"]


def test_entries_that_are_alike_are_summed():
    one = Entry("all-gather", ("x",), 1, 96, "f32")
    assert not difference(ledger(GATHER), ledger(one, one, one))


@pytest.mark.parametrize(
    "other",
    [
        Entry("all-gather", ("x",), 3, 288, "bf16"),  # another dtype, and as many bytes
        Entry("all-gather", ("y",), 3, 288, "f32"),
        Entry("reduce-scatter", ("x",), 3, 288, "f32"),
        Entry("all-gather", ("x",), 1, 288, "f32"),  # as many bytes at once
    ],
)
def test_what_is_a_difference(other):
    assert difference(ledger(GATHER), ledger(other))


def test_operations_alone_are_a_difference():
    found = difference(ledger(GATHER), ledger(GATHER, flops=256))
    assert found
    assert found.rows == ()
    assert "× 2" in str(found)


def test_an_empty_ledger():
    assert not difference(ledger(flops=0), ledger(flops=0))
    assert "gone" in str(difference(ledger(GATHER), ledger()))


def test_it_is_readable():
    scatter = Entry("reduce-scatter", ("y",), 2, 1000, "f32")
    twice = Entry("all-reduce", ("x", "y"), 2, 128, "bf16")
    text = str(difference(ledger(GATHER, REDUCE, name="before"), ledger(twice, scatter, name="")))
    lines = [line for line in text.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert rows == [
        ["reduce-scatter", "y", "f32", "none", "2 × 500 B", "new"],
        ["all-gather", "x", "f32", "3 × 96 B", "none", "gone"],
        ["all-reduce", "xy", "bf16", "1 × 64 B", "2 × 64 B", "× 2"],
        ["all sent", "", "", "352 B", "1.13 kB", "× 3.2"],
        ["matrix products", "", "", "128 FLOP", "128 FLOP", "="],
    ]
    assert text.splitlines()[0].strip() == "from before to a program: what one device sends"


def test_of_two_compiled_programs(make_mesh):
    mesh = make_mesh(MESH)
    with jax.set_mesh(mesh):
        x = gspmd.annotate(jax.ShapeDtypeStruct((8, 16), "float32"), "BE_xy")
        whole, part = (
            gspmd.ledger(jax.jit(lambda x, move=move: gspmd.reshard(x, move)).lower(x).compile())
            for move in ("BE_xy -> BE", "BE_xy -> BE_x")
        )
    assert whole.diff(part).rows == (
        Change("all-gather", ("x", "y"), "f32", (1, 448), (0, 0)),  # 512 * 7 / 8
        Change("all-gather", ("y",), "f32", (0, 0), (1, 64)),  # 128 / 2
    )
    assert not whole.diff(whole)
