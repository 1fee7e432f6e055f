"""Pipelines on a mesh of stages alone, or of stages and data: what a stage computes is planned on no axis."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate import PlanError
from gspmd.ops import rms_norm
from gspmd.pipeline import Schedule, Stages, pipelined
from tests.pipeline.test_pipelined import LAYERS, drawn, plain, sends

SPECS = {"table": "EF"}, {"a": "RN_pEF", "b": "RN_pFE"}


def chunk(w, x, batch, number):
    squares = []
    for number in range(LAYERS):
        hidden = jnp.tanh(gspmd.einsum("BE, EF -> BF", x, w["a"][number]))
        x = x + gspmd.einsum("BF, FE -> BE", hidden, w["b"][number])
        squares.append(gspmd.reshard(x**2, "BE -> "))
    return x, sum(squares) * 1e-3, {"squares": jnp.stack(squares)}


STAGES = Stages(
    first=lambda shared, batch: gspmd.einsum("BE, EF -> BF", batch, shared["table"]),
    chunk=chunk,
    last=lambda shared, x, batch: gspmd.reshard(gspmd.einsum("BE, FE -> BF", x, shared["table"]) ** 3, "BF -> "),
)


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("name", "stages", "rounds", "microbatches", "data", "axis_type", "lowering"),
    [
        ("1f1b", 2, 2, 4, {"d": 2}, "explicit", "blocking"),
        ("zero-bubble", 2, 1, 3, {"d": 2}, "explicit", "xla"),
        ("gpipe", 2, 1, 2, {}, "auto", "xla"),
        pytest.param("1f1b", 4, 1, 5, {"d": 2}, "explicit", "looped", marks=pytest.mark.slow),
        pytest.param("gpipe", 2, 2, 4, {"d": 2, "e": 2}, "explicit", "blocking", marks=pytest.mark.slow),
        pytest.param("zero-bubble", 4, 1, 3, {}, "auto", "blocking", marks=pytest.mark.slow),
        pytest.param("1f1b", 4, 2, 4, {}, "explicit", "auto", marks=pytest.mark.slow),
        pytest.param("1f1b", 1, 2, 2, {"d": 1}, "explicit", "blocking", marks=pytest.mark.slow),
    ],
)
def test_stages_need_no_other_axis(make_mesh, name, stages, rounds, microbatches, data, axis_type, lowering):
    host, beside = drawn(stages, rounds, microbatches), int(np.prod([*data.values()], dtype=int))
    (wanted, squares), gradients = jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))(*host)
    schedule, along = Schedule.of(name, stages, microbatches, rounds), "".join(data)
    loss = pipelined(STAGES, schedule, axis="p", stream="BE", shared={"table": "EF"}, data=tuple(data))

    def moved(end, tree):
        """Weights on their way in, or gradients on their way out; as they are without data."""
        before, after = (f" {word}-{along}" if data and word else "" for word in end)
        return jax.tree.map(lambda spec, x: gspmd.reshard(x, f"{spec}{before} -> {spec}{after}"), SPECS, tree)

    def step(*given):
        *weights, batches = given
        typed = moved(("", "reduced"), tuple(weights))
        (value, figures), found = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*typed, batches)
        return value, figures, moved(("partialsum", ""), found)

    with jax.set_mesh(make_mesh({"p": stages} | data, axis_type)), gspmd.lowering(lowering):
        arrays = jax.tree.map(lambda spec, x: gspmd.annotate(x, spec), SPECS, host[:2])
        arrays += (gspmd.annotate(host[2], f"MB_{along}E" if data else "MBE"),)
        program, plan = jax.jit(step).lower(*arrays).compile(), gspmd.trace(step, *arrays)
        value, figures, found = program(*arrays)
        ledger = gspmd.ledger(program)
        forward = jax.jit(loss)(*moved(("", "reduced"), arrays[:2]), arrays[2])
    np.testing.assert_allclose([value, forward[0]], wanted / beside, rtol=1e-4)
    for each in (figures, forward[1]):
        np.testing.assert_allclose(np.asarray(each["squares"]).reshape(-1), squares / beside, rtol=1e-5)
    for (path, gradient), each in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(found), strict=True):
        assert np.linalg.norm(beside * each - gradient) <= 3e-6 * np.linalg.norm(gradient), path
    comparison = ledger.compare(plan)
    assert comparison.agrees, str(comparison)
    assert not comparison.differing, str(comparison)
    for counted in (ledger, plan):  # a permute for each slot, and each weight's gradient is reduced over the data once
        count = Counter({key: count for key, (count, _) in counted.by_kind_and_axes().items()})
        if lowering != "looped":  # which sums over the stages in hops
            assert count["collective-permute", ("p",)] == (sends(schedule) if stages > 1 else 0)
        assert count["all-reduce", tuple(data)] == (3 if beside > 1 else 0)


def test_a_shard_map_of_a_callers_own_stays_refused(make_mesh):
    """Before a pipeline and behind one, by the same jitted function as in its stages."""
    called = jax.jit(lambda x: gspmd.einsum("BE, EF -> BF", x, jnp.eye(8)))
    stages = Stages(
        first=lambda shared, batch: called(batch),
        chunk=lambda w, x, batch, number: (x * w[0], 0.0, {}),
        last=lambda shared, x, batch: gspmd.einsum("BE -> ", x),
    )
    with jax.set_mesh(make_mesh({"p": 2})):
        x, w = gspmd.annotate(np.ones((2, 4, 8), "float32"), "MBE"), gspmd.annotate(np.ones((1, 2), "float32"), "RN_p")
        loss = pipelined(stages, Schedule.of("1f1b", 2, 2), axis="p", stream="BE", shared={})
        for _ in range(2):
            with pytest.raises(PlanError, match="cannot plan inside another shard_map"):
                jax.shard_map(called, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(x[0])
            assert jax.grad(lambda w: loss({}, w, x)[0])(w)[0].tolist() == [32, 32]


@pytest.mark.parametrize("lowering", ["blocking", "xla"])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("sizes", [{"p": 2}, {"p": 2, "x": 2}])
@pytest.mark.parametrize("place", ["einsum", "norm", "stream", "shared"])
def test_stages_leave_no_dimension_to_the_compiler(make_mesh, sizes, axis_type, lowering, place):
    computed = {
        "einsum": lambda x: gspmd.einsum("BE, EF -> BF_?", x, jnp.eye(8)),
        "norm": lambda x: rms_norm(x, jnp.ones(8), "BE_?", "E"),
    }
    stages = Stages(
        first=lambda shared, batch: computed.get(place, lambda x: x)(batch),
        chunk=lambda w, x, batch, number: (x, 0.0, {}),
        last=lambda shared, x, batch: jnp.sum(x),
    )
    text, whole = ("BF_?", "BF") if place == "einsum" else ("BE_?", "BE")
    stream, shared = text if place == "stream" else "BE", {"table": text} if place == "shared" else {}

    def run(x):
        return pipelined(stages, Schedule.of("1f1b", 2, 2), axis="p", stream=stream, shared=shared)({}, {}, x)

    with jax.set_mesh(make_mesh(sizes, axis_type)), gspmd.lowering(lowering), pytest.raises(PlanError) as error:
        run(gspmd.annotate(np.ones((2, 4, 8), "float32"), "MBE"))
    assert str(error.value) == (
        f"'{text}' leaves a dimension to the compiler, which cannot place it inside a shard_map, and the stages"
        f" of a pipeline run in one.\n  Name its mesh axes, or leave it unsharded: '{whole}'."
    )
