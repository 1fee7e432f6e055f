"""Reductions that XLA:GPU merges, or moves behind a loop, because only the sum of their results is used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gspmd
from gspmd.tracing import trace
from gspmd.tracing.compilers import GPU


def reduced(x, w):
    return gspmd.einsum("BE_x, E_xF -> BF", x, w, lowering="blocking")


def scattered(x, w):
    return gspmd.einsum("BE_x, E_xF -> B_xF", x, w, lowering="blocking")


def in_two(x, w, v):
    first = reduced(x, w)
    return first + reduced(x * 2, v), first


def narrow(x, w):
    return reduced(x.astype("bfloat16"), w.astype("bfloat16"))


def converted_in_two(x, w, v):
    first = narrow(x, w)
    return first.astype(jnp.float32) + narrow(x * 2, v).astype(jnp.float32), first


def over(axis, x, w):
    """A reduction over one of two mesh axes, with a result that is alike for both."""
    x = gspmd.reshard(x, f"BE_xy -> BE_{axis}", lowering="blocking")
    w = gspmd.reshard(w, f"E_xyF -> E_{axis}F", lowering="blocking")
    return gspmd.einsum(f"BE_{axis}, E_{axis}F -> BF", x, w, lowering="blocking")


PROGRAMS = {
    "a sum": (lambda x, w, v: reduced(x, w) + reduced(x * 2, v), 1),
    "a sum of scattered ones": (lambda x, w, v: scattered(x, w) + scattered(x * 2, v), 1),
    "a sum in a loop": (
        lambda x, w, v: jax.lax.map(lambda by: reduced(x * by, w) + reduced(x + by, v), jnp.ones(3)),
        1,
    ),
    "a sum of which one part is used again": (in_two, 0),
    "a sum of converted parts": (lambda x, w, v: converted_in_two(x, w, v)[0], 1),
    "a sum of which a converted part is used again": (converted_in_two, 0),
    "a chain of three": (lambda x, w, v: reduced(x, w) + reduced(x * 2, v) + reduced(x * 3, v), 2),
    "a chain from behind": (lambda x, w, v: reduced(x, w) + (reduced(x * 2, v) + reduced(x * 3, v)), 2),
    "a tree of four": (
        lambda x, w, v: (reduced(x, w) + reduced(x * 2, v)) + (reduced(x * 3, v) + reduced(x * 4, w)),
        3,
    ),
    "a chain whose middle is used again": (
        lambda x, w, v: ((middle := reduced(x, w) + reduced(x * 2, v)) + reduced(x * 3, v), middle),
        1,
    ),
    "a slice between": (lambda x, w, v: reduced(x, w)[:4] + reduced(x * 2, v)[:4], 0),
    "a product": (lambda x, w, v: reduced(x, w) * reduced(x * 2, v), 0),
    "a sum with something else": (lambda x, w, v: reduced(x, w) + 1 + (v * 0).sum(), 0),
}


@pytest.mark.parametrize(("program", "merged"), PROGRAMS.values(), ids=PROGRAMS)
def test_only_reductions_whose_sum_alone_is_used_are_merged_and_only_for_gpus(make_mesh, monkeypatch, program, merged):
    with jax.set_mesh(make_mesh({"x": 4})):
        x, w, v = (
            gspmd.annotate(jax.ShapeDtypeStruct(shape, "float32"), spec)
            for shape, spec in (((8, 16), "BE_x"), ((16, 32), "E_xF"), ((16, 32), "E_xF"))
        )
        plan = gspmd.trace(program, x, w, v)
        monkeypatch.setattr(trace, "compiler_in_use", lambda: GPU)
        on_gpus = gspmd.trace(program, x, w, v)
    kinds = ("all-reduce", "reduce-scatter")
    shared = [each for each in on_gpus.shared if each.step.kind in kinds]
    assert not plan.shared
    assert len(shared) == merged
    assert len([*on_gpus.entries, *on_gpus.shared]) == len(plan.entries)


@pytest.mark.parametrize(("other", "merged"), {"x": 1, "y": 0}.items())
def test_reductions_over_different_axes_are_not_merged(make_mesh, monkeypatch, other, merged):
    with jax.set_mesh(make_mesh({"x": 2, "y": 2})):
        x = gspmd.annotate(jax.ShapeDtypeStruct((8, 16), "float32"), "BE_xy")
        w = gspmd.annotate(jax.ShapeDtypeStruct((16, 32), "float32"), "E_xyF")
        monkeypatch.setattr(trace, "compiler_in_use", lambda: GPU)
        plan = gspmd.trace(lambda x, w: over("x", x, w) + over(other, x * 2, w), x, w)
    assert len([each for each in plan.shared if each.step.kind == "all-reduce"]) == merged


def test_rows_that_are_added_in_a_sum_do_not_part_its_reductions(make_mesh, monkeypatch):
    """Gradients of three look-ups: the rows of few tokens are gathered, and the sums of many are reduced."""

    def loss(table, *texts):
        return sum((gspmd.ops.embed(text, table, "B_xL, VE -> B_xLE") ** 2).sum() for text in texts)

    with jax.set_mesh(make_mesh({"x": 4})):
        table = gspmd.annotate(jax.ShapeDtypeStruct((256, 32), "float32"), "VE")
        texts = [gspmd.annotate(jax.ShapeDtypeStruct((8, length), "int32"), "B_xL") for length in (256, 2, 256)]
        monkeypatch.setattr(trace, "compiler_in_use", lambda: GPU)
        with gspmd.lowering("blocking"):
            plan = gspmd.trace(jax.grad(loss), table, *texts)
    steps = (*plan.entries, *plan.shared)
    assert sum(each.trips for each in steps if each.step.kind == "all-reduce" and each.dtype == "f32") == 2
    assert [each.step.kind for each in plan.shared] == ["all-reduce"]


# -- sums of a loop's trips --------------------------------------------------------------------------------------------


def loop(added, trips=3, shape=(8, 32), uses=lambda total: 0.0):
    """A program that adds something up in a loop: the sum, and what else a trip makes of it."""

    def program(x, w, v):
        def trip(total, by):
            return added(total, x * by, w, v), uses(total)

        return lax.scan(trip, jnp.zeros(shape), jnp.ones(trips))

    return program


def two_loops(x, w, v):
    def outer(total, by):
        return lax.scan(lambda inner, more: (inner + reduced(x * (by + more), w), None), total, jnp.ones(5))[0], None

    return lax.scan(outer, jnp.zeros((8, 32)), jnp.ones(3))[0]


def rows(total, x, w, v):
    """Add to one row of several, by a slice that is read and written."""
    row = lax.dynamic_index_in_dim(total, 0, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, row + reduced(x, w)[0], 0, 0)


def whole(total, x, w, v):
    """Add to the only row, as to one of several."""
    row = lax.dynamic_index_in_dim(total, 0, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, row + reduced(x, w), 0, 0)


LOOPS = {
    "its trips": (loop(lambda total, x, w, v: total + reduced(x, w)), [1]),
    "a sum of two": (loop(lambda total, x, w, v: total + (reduced(x, w) + reduced(x * 2, v))), [1]),
    "two, one after the other": (loop(lambda total, x, w, v: total + reduced(x, w) + reduced(x * 2, v)), [3, 3]),
    "a slice that is whole": (loop(whole, shape=(1, 8, 32)), [1]),
    "another dtype": (loop(lambda total, x, w, v: total + narrow(x, w)), [1]),
    "another shape": (loop(lambda total, x, w, v: total + reduced(x, w).T.T), [1]),
    "a product with something": (loop(lambda total, x, w, v: total + reduced(x, w) * 2), [3]),
    "a sum that is used in the loop": (loop(lambda total, x, w, v: total + reduced(x, w), uses=jnp.sum), [3]),
    "a part that is kept": (loop(lambda total, x, w, v: total * 0.5 + reduced(x, w)), [3]),
    "rows of each device": (loop(lambda total, x, w, v: total + jnp.sum(scattered(x, w))), [3]),
    "a row of several": (loop(rows), [3]),
    "one trip": (loop(lambda total, x, w, v: total + reduced(x, w), trips=1), [1]),
    "two loops": (two_loops, [1]),
}


@pytest.mark.parametrize(("program", "trips"), LOOPS.values(), ids=LOOPS)
def test_a_loop_that_only_adds_reductions_up_has_one_behind_it_and_only_on_gpus(make_mesh, monkeypatch, program, trips):
    with jax.set_mesh(make_mesh({"x": 4})):
        x, w, v = (
            gspmd.annotate(jax.ShapeDtypeStruct(shape, "float32"), spec)
            for shape, spec in (((8, 16), "BE_x"), ((16, 32), "E_xF"), ((16, 32), "E_xF"))
        )
        everywhere = gspmd.trace(program, x, w, v)
        monkeypatch.setattr(trace, "compiler_in_use", lambda: GPU)
        on_gpus = gspmd.trace(program, x, w, v)
    kinds = ("all-reduce", "reduce-scatter")
    sent = [each for each in on_gpus.entries if each.step.kind in kinds and each.dtype in ("f32", "bf16")]
    assert [each.trips for each in sent if not is_total(each)] == trips
    assert not any(each.is_behind_loop for each in everywhere.entries)
    assert on_gpus.flops == everywhere.flops


def is_total(step):
    """Whether a step reduces a scalar."""
    return step.step.wire_bytes <= 8


def test_reductions_that_are_converted_and_added_are_one_in_the_wider_dtype(make_mesh, monkeypatch):
    with jax.set_mesh(make_mesh({"x": 4})):
        x, w = (
            gspmd.annotate(np.ones(shape, "float32"), spec) for shape, spec in (((8, 16), "BE_x"), ((16, 32), "E_xF"))
        )

        def program(x, w):
            return narrow(x, w).astype("float32") + narrow(x * 2, w).astype("float32")

        apart = gspmd.trace(program, x, w)
        monkeypatch.setattr(trace, "compiler_in_use", lambda: GPU)
        merged = gspmd.trace(program, x, w)
    assert [each.dtype for each in apart.entries if each.step.kind == "all-reduce"] == ["bf16", "bf16"]
    assert [each.dtype for each in merged.entries if each.step.kind == "all-reduce"] == ["f32"]
    assert merged.wire_bytes == apart.wire_bytes
