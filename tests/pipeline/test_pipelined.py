"""A pipeline is the layers one after the other: value, gradients and figures, and it sends what its plan says."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate import PlanError
from gspmd.pipeline import Schedule, Stages, pipelined
from gspmd.pipeline.split import split

EMBED, HIDDEN, BATCH, LAYERS = 8, 16, 4, 2
STREAM = "BE_x"
SPECS = {"a": "RN_pEF_x", "b": "RN_pF_xE"}
CASES = [  # schedule, stages, rounds, microbatches, type of axes, lowering
    ("1f1b", 2, 2, 4, "explicit", "blocking"),
    ("1f1b", 2, 1, 1, "explicit", "blocking"),  # whose last two ticks compute one chunk again from one input
    pytest.param("zero-bubble", 2, 1, 2, "explicit", "blocking", marks=pytest.mark.slow),  # each tick on its own
    pytest.param("1f1b", 4, 1, 5, "explicit", "blocking", marks=pytest.mark.slow),
    pytest.param("gpipe", 2, 1, 3, "auto", "blocking", marks=pytest.mark.slow),
    pytest.param("gpipe", 4, 2, 4, "explicit", "looped", marks=pytest.mark.slow),
    pytest.param("1f1b", 3, 1, 2, "explicit", "xla", marks=pytest.mark.slow),
    pytest.param("zero-bubble", 2, 2, 4, "auto", "blocking", marks=pytest.mark.slow),
    pytest.param("1f1b", 1, 2, 3, "auto", "looped", marks=pytest.mark.slow),
]


def layer(x, w):
    hidden = jnp.tanh(gspmd.einsum("BE_x, EF_x -> BF_x", x, w["a"]))
    y = x + gspmd.einsum("BF_x, F_xE -> BE_x", hidden, w["b"])
    return y, gspmd.reshard(y**2, "BE_x -> ")


def chunk(w, x, batch, number):
    x, squares = jax.lax.scan(layer, x, w)
    return x, jnp.sum(squares) * 1e-3, {"squares": squares}


def chunk_without_a_loop(w, x, batch, number):
    squares = []
    for number in range(LAYERS):
        x, square = layer(x, jax.tree.map(lambda each, at=number: each[at], w))
        squares.append(square)
    return x, sum(squares) * 1e-3, {"squares": jnp.stack(squares)}


STAGES = Stages(
    first=lambda shared, batch: gspmd.einsum("BE, EF_x -> BF_x", batch, shared["table"]),
    chunk=chunk,
    last=lambda shared, x, batch: gspmd.reshard(
        gspmd.einsum("BE_x, FE_x -> BF_x", x, shared["table"]) ** 3, "BF_x -> "
    ),
)


def drawn(stages, rounds, microbatches, layers=LAYERS):
    draw = np.random.default_rng(0).normal
    shared = {"table": draw(size=(EMBED, EMBED)) / 3}
    weights = {"a": draw(size=(rounds, layers * stages, EMBED, HIDDEN)) / 3}
    weights["b"] = draw(size=(rounds, layers * stages, HIDDEN, EMBED)) / 3
    return jax.tree.map(np.float32, (shared, weights, draw(size=(microbatches, BATCH, EMBED))))


def plain(shared, weights, batches):
    """The same in plain code: all layers of the first round, then those of the next."""
    losses, figures = [], []
    for x in batches:
        x, squares = x @ shared["table"], []
        for w_in, w_out in zip(*(weights[name].reshape(-1, *weights[name].shape[2:]) for name in "ab")):
            x = x + jnp.tanh(x @ w_in) @ w_out
            squares.append(jnp.sum(x**2))
        losses.append(jnp.sum((x @ shared["table"].T) ** 3) + sum(squares) * 1e-3)
        figures.append(jnp.stack(squares))
    return sum(losses) / len(losses), sum(figures) / len(figures)


def computed_plainly(dtype, host):
    """Value and gradients of the plain code in this dtype."""
    with jax.enable_x64(dtype is np.float64):
        cast = jax.tree.map(dtype, host)
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))(*cast))


def prepared(schedule, host, stages=STAGES):
    """The pipeline's loss, and its arguments on the mesh in force."""
    shared, weights, batches = host
    on_mesh = {"table": gspmd.annotate(shared["table"], "EF_x")}
    placed = {name: gspmd.annotate(weights[name], spec) for name, spec in SPECS.items()}
    specs = {"table": gspmd.Spec.parse("EF_x")}
    return pipelined(stages, schedule, axis="p", stream=STREAM, shared=specs), (
        on_mesh,
        placed,
        gspmd.annotate(batches, "MBE"),
    )


def sends(schedule):
    """One permute for each slot; what is sent last is not taken, and not sent where its tick stands in no loop."""
    last = {kind: len(ticks) for kinds, ticks in schedule.phases() for kind in kinds if kind != "weights"}
    slots = sum(kind != "weights" for tick in schedule.ticks for kind in tick)
    return slots - sum(length == 1 for length in last.values())


@pytest.mark.parametrize(("name", "stages", "rounds", "microbatches", "axis_type", "lowering"), CASES)
def test_value_and_gradients_are_those_of_plain_code(
    make_mesh, name, stages, rounds, microbatches, axis_type, lowering
):
    host = drawn(stages, rounds, microbatches)
    (wanted, squares), gradients = computed_plainly(np.float64, host)
    _, rounded = computed_plainly(np.float32, host)
    mesh = make_mesh({"p": stages, "x": 2}, axis_type)
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        computed = replace(STAGES, chunk=chunk_without_a_loop) if name == "zero-bubble" else STAGES
        loss, arrays = prepared(Schedule.of(name, stages, microbatches, rounds), host, computed)
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        lowered = run.lower(*arrays)
        program = lowered.compile()
        (value, figures), found = program(*arrays)
        comparison = gspmd.ledger(program).compare(gspmd.trace(run, *arrays))
    calls = Counter(re.findall(r"call @(gspmd_\w+)\(", lowered.as_text()))
    assert set(calls.values()) == {1}, "the compiler for TPUs fails at a shard_map in a function with two callers"
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(figures["squares"]).reshape(-1), squares, rtol=1e-5)
    for (path, gradient), each, plainly in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(found), jax.tree.leaves(rounded)
    ):
        # By the norm: single numbers are sums of far larger terms, in another order. It rounds as plain code does,
        # which is off by up to 3.2e-6 behind sixteen layers.
        least = 1e-6 * np.linalg.norm(gradient)
        assert np.linalg.norm(each - gradient) <= max(least, 1.5 * np.linalg.norm(plainly - gradient)), path
    if lowering != "xla" and stages > 1:  # of one stage the compiler knows what is masked, and leaves some of it out
        assert comparison.agrees, str(comparison)
        assert all(row.verdict == "shared" for row in comparison.differing), str(comparison)
    over_stages = [entry for entry in gspmd.ledger(program).entries if "p" in entry.axes]
    permutes = sum(entry.count for entry in over_stages if entry.kind == "collective-permute")
    in_hops = 2 * (stages - 1) if lowering == "looped" else 0  # the sums of the table's gradient and of the loss
    assert permutes == (sends(Schedule.of(name, stages, microbatches, rounds)) + in_hops if stages > 1 else 0)
    assert {entry.kind for entry in over_stages} <= {"collective-permute", "all-gather", "all-reduce"}
    assert sum(entry.count for entry in over_stages if entry.kind != "collective-permute") <= 2  # table, and loss


@pytest.mark.parametrize(
    ("name", "rounds", "microbatches", "layers"),
    [
        ("1f1b", 1, 2, 1),
        pytest.param("1f1b", 2, 4, 2, marks=pytest.mark.slow),
        pytest.param("gpipe", 1, 3, 2, marks=pytest.mark.slow),
        pytest.param("zero-bubble", 1, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_pipelines_side_by_side_reduce_each_gradient_once(make_mesh, name, rounds, microbatches, layers):
    """Over d, besides the figures and the loss, which is the mean over d of sums over B."""
    host = drawn(2, rounds, microbatches, layers)
    (wanted, squares), gradients = jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))(*host)
    moves = ({"table": "EF_x"}, SPECS), ({"table": "E_dF_x"}, {"a": "RN_pE_dF_x", "b": "RN_pF_xE_d"})

    def step(*given):
        *weights, batches = given
        typed = jax.tree.map(lambda spec, w: gspmd.reshard(w, f"{spec} -> {spec} reduced-d"), moves[0], tuple(weights))
        (value, figures), found = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*typed, batches)
        settled = lambda before, after, g: gspmd.reshard(g, f"{before} partialsum-d -> {after}")  # noqa: E731
        return value, figures, jax.tree.map(settled, *moves, found)

    with jax.set_mesh(make_mesh({"p": 2, "d": 2, "x": 2})), gspmd.lowering("blocking"):
        computed = replace(STAGES, chunk=chunk_without_a_loop) if name == "zero-bubble" else STAGES
        schedule, specs = Schedule.of(name, 2, microbatches, rounds), {"table": "EF_x"}
        loss = pipelined(computed, schedule, axis="p", stream=STREAM, shared=specs, data=("d",))
        arrays = {"table": gspmd.annotate(host[0]["table"], "EF_x")}, prepared(schedule, host)[1][1]
        arrays += (gspmd.annotate(host[2], "MB_dE"),)
        program, plan = jax.jit(step).lower(*arrays).compile(), gspmd.trace(step, *arrays)
        value, figures, found = program(*arrays)
        ledger = gspmd.ledger(program)
    comparison = ledger.compare(plan)
    assert not comparison.differing, str(comparison)
    for counted in (ledger, plan):
        over = Counter()
        for (kind, axes), (count, _) in counted.by_kind_and_axes().items():
            over[kind if kind == "reduce-scatter" else "others", axes] += count if "d" in axes else 0
        assert +over == {("reduce-scatter", ("d",)): 3, ("others", ("d",)): 1, ("others", ("d", "p")): 1}
    np.testing.assert_allclose(value, wanted / 2, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(figures["squares"]).reshape(-1), squares / 2, rtol=1e-5)
    for (path, gradient), each in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(found), strict=True):
        assert np.linalg.norm(2 * each - gradient) <= 3e-6 * np.linalg.norm(gradient), path


def test_weights_of_pipelines_side_by_side_are_reduced_there(make_mesh):
    with jax.set_mesh(make_mesh({"p": 2, "d": 2, "x": 2})):
        schedule = Schedule.of("1f1b", 2, 2)
        _, arrays = prepared(schedule, drawn(2, 1, 2))
        loss = pipelined(STAGES, schedule, axis="p", stream=STREAM, shared={"table": "EF_x"}, data="d")
        with pytest.raises(PlanError) as error:
            loss(*arrays)
        elsewhere = pipelined(STAGES, schedule, axis="p", stream=STREAM, shared={"table": "EF_x"}, data="data")
        with pytest.raises(PlanError, match="the mesh has no axis data for pipelines side by side"):
            elsewhere(*arrays)
    assert str(error.value) == (
        "cannot run pipelines side by side along d: weights must be reduced over these axes, "
        "and one is reduced over none.\n"
        "  Use the same Explicit axes for the weights as in data=, for example with "
        "gspmd.reshard(w, 'NEF -> NEF reduced-x')."
    )


@pytest.mark.slow
def test_the_forward_pass_alone(make_mesh):
    host = drawn(2, 2, 4)
    with jax.set_mesh(make_mesh({"p": 2, "x": 2})):
        loss, arrays = prepared(Schedule.of("1f1b", 2, 4, 2), host)
        value, figures = jax.jit(loss)(*arrays)
    wanted, squares = plain(*host)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(figures["squares"]).reshape(-1), squares, rtol=1e-5)


@pytest.mark.slow
def test_memory_of_1f1b_stays_where_that_of_gpipe_grows_with_microbatches(make_mesh):
    """Compare the compiler's bytes for eight more microbatches, in inputs of a chunk, [B, E/2] on one device."""
    with jax.set_mesh(make_mesh({"p": 2, "x": 2})):

        def temporary(name, microbatches):
            loss, arrays = prepared(Schedule.of(name, 2, microbatches), drawn(2, 1, microbatches))
            program = jax.jit(jax.grad(lambda *each: loss(*each)[0], argnums=(0, 1))).lower(*arrays).compile()
            return program.memory_analysis().temp_size_in_bytes

        grown = {name: temporary(name, 16) - temporary(name, 8) for name in ("1f1b", "gpipe")}
    held = BATCH * EMBED // 2 * 4
    table = 8 * 2 * 4 * 4 * 4  # the schedule's own numbers: for each tick and stage four integers, in two kinds of rows
    assert grown["1f1b"] <= table
    assert grown["gpipe"] >= 8 * held


def test_a_split_backward_pass_computes_nothing_twice(make_mesh):
    """The plan of one more microbatch has as many products, and gradients of weights wait for no stage."""
    with jax.set_mesh(make_mesh({"p": 2, "x": 2})), gspmd.lowering("blocking"):

        def flops(name, microbatches):
            stages = replace(STAGES, chunk=chunk_without_a_loop)
            loss, arrays = prepared(Schedule.of(name, 2, microbatches), drawn(2, 1, microbatches), stages)
            return gspmd.trace(jax.grad(lambda *each: loss(*each)[0], argnums=(0, 1)), *arrays).flops

        whole, split = ([flops(name, microbatches) for microbatches in (5, 6)] for name in ("1f1b", "zero-bubble"))
    assert split[1] - split[0] == whole[1] - whole[0]
    assert split[0] < whole[0]


def test_a_mesh_without_the_stages(make_mesh):
    def refused(sizes, stages):
        loss = pipelined(STAGES, Schedule.of("1f1b", stages, 2), axis="p", stream=STREAM, shared={})
        with jax.set_mesh(make_mesh(sizes)), pytest.raises(PlanError) as error:
            loss({}, {}, jnp.zeros((2, 4, 8)))
        return str(error.value)

    assert refused({"x": 2}, 2) == "the mesh has no axis p for the stages of a pipeline.\n  It has x."
    assert refused({"p": 2, "x": 2}, 4) == (
        "a schedule of 4 stages cannot run on mesh axis p, which has 2 devices.\n  Make the schedule of 2 stages."
    )


def test_gradients_of_narrow_weights_are_added_in_float32(make_mesh):
    """Adding 1/512 to 1/2 in bfloat16 gives 1/2."""
    stages = Stages(
        first=lambda shared, batch: batch,
        chunk=lambda w, x, batch, number: (x * w[0].astype(jnp.float32), 0.0, {}),
        last=lambda shared, x, batch: gspmd.einsum("E -> ", x),
    )
    with jax.set_mesh(make_mesh({"p": 1, "x": 1})):
        loss = pipelined(stages, Schedule.of("1f1b", 1, 512), axis="p", stream="E", shared={})
        x = gspmd.annotate(np.ones((512, 1), np.float32), "ME")
        w = gspmd.annotate(jnp.ones((1, 1, 1), jnp.bfloat16), "RN_pE")
        slope = jax.jit(jax.grad(lambda w: loss({}, w, x)[0]))(w)
    assert (slope.dtype, float(slope[0, 0, 0])) == (jnp.bfloat16, 1.0)


@pytest.mark.parametrize("asked", ["by default", "by a call"])
@pytest.mark.parametrize(
    ("schedule", "axis_type", "reason"),
    [
        (
            "1f1b",
            "auto",
            "lowering 'xla' cannot run under Auto mesh axes in a shard_map, and the stages of a pipeline run in one",
        ),
        (
            "zero-bubble",
            "explicit",
            "cannot split a backward pass: an operation has lowering 'xla'.\n  Use 'blocking', or an",
        ),
    ],
)
def test_what_lowering_xla_cannot_run(schedule, axis_type, reason, asked, make_mesh):
    def by_a_call(w, x, batch, number):
        y = gspmd.einsum("BE_x, EF_x -> BF_x", x, w["a"][0], lowering="xla")
        return gspmd.einsum("BF_x, F_xE -> BE_x", y, w["b"][0]), 0.0, {}

    stages = STAGES if asked == "by default" else replace(STAGES, chunk=by_a_call)
    with jax.set_mesh(make_mesh({"p": 2, "x": 2}, axis_type)):
        loss, arrays = prepared(Schedule.of(schedule, 2, 2), drawn(2, 1, 2), stages)
        gradients = jax.grad(lambda *given: loss(*given)[0], argnums=(0, 1))
        with gspmd.lowering("xla" if asked == "by default" else "blocking"), pytest.raises(PlanError) as error:
            jax.eval_shape(gradients, *arrays)
    assert str(error.value).startswith(reason)


def test_random_draws_may_be_split(make_mesh):
    """JAX draws in a region of Auto axes, as lowering 'xla' multiplies in; these are taken apart all the same."""

    def f(w, x):
        y = w * x * jax.random.uniform(jax.random.key(0), x.shape, out_sharding=jax.P("x"))
        return y, jnp.sin(y)

    with jax.set_mesh(make_mesh({"x": 2})):
        w, x = (gspmd.annotate(np.arange(4, dtype="float32") + n, "B_x") for n in (1, 2))
        halves = split(f, w, x)
        early, kept = halves.first(w, x)
        for got, want in zip((early, halves.rest(w, kept)), f(w, x)):
            np.testing.assert_array_equal(got, want)
