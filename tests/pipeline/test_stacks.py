"""Stacks of blocks one after the other in the same stages: value, gradients and figures are those of plain code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate import PlanError
from gspmd.pipeline import Schedule, Stages, pipelined

EMBED, HIDDEN, BATCH, LAYERS, LENGTHS = 8, 16, 4, 2, (6, 5, 3)
SPECS = {"a": "RN_pEF_x", "b": "RN_pF_xE"}


def layer(x, w, y):
    """A product of x; after another stack, with the mean of its output y [B, T, E], which has another length."""
    hidden = jnp.tanh(gspmd.einsum("BLE_x, EF_x -> BLF_x", x, w["a"]))
    added = gspmd.einsum("BLF_x, F_xE -> BLE_x", hidden, w["b"])
    if y is not None:
        added = added * jnp.mean(y, axis=1, keepdims=True)
    x = x + added
    return x, gspmd.reshard(x**2, "BLE_x -> ")


def chunk(in_loop):
    def run(shared, w, x, batch, number, y=None):
        if in_loop:
            x, squares = jax.lax.scan(lambda x, w: layer(x, w, y), x, w)
        else:  # a split backward pass is split between layers
            found = []
            for each in range(LAYERS):
                x, square = layer(x, jax.tree.map(lambda leaf, at=each: leaf[at], w), y)
                found.append(square)
            squares = jnp.stack(found)
        x = gspmd.einsum("BLE_x, EF_x -> BLF_x", x, shared["mix"])  # as layers of a stack share a table of positions
        return x, jnp.sum(squares) * 1e-3, {"squares": squares}

    return run


def stack_of(number, count, in_loop):
    def first(shared, batch):
        return gspmd.einsum("BLE, EF_x -> BLF_x", batch[number], shared["table"])

    def last(shared, x, batch):
        out = gspmd.einsum("BLE_x, FE_x -> BLF_x", x, shared["table"])
        return gspmd.reshard(out**2, "BLF_x -> ")

    return Stages(first, chunk(in_loop), last if number == count - 1 else None, chunk_reads_shared=True)


def plain(shared, weights, batches):
    losses, figures = [], []
    for number in range(batches[0].shape[0]):
        y, loss, squares = None, 0.0, []
        for source, w in zip(batches, weights):
            x, found = source[number] @ shared["table"], []
            rows = [each.reshape(-1, LAYERS, *each.shape[2:]) for each in (w["a"], w["b"])]
            for w_in, w_out in zip(*rows):
                for a, b in zip(w_in, w_out):
                    added = jnp.tanh(x @ a) @ b
                    x = x + (added if y is None else added * jnp.mean(y, axis=1, keepdims=True))
                    found.append(jnp.sum(x**2))
                x = x @ shared["mix"]
            y, loss = x, loss + sum(found) * 1e-3
            squares.append(jnp.stack(found))
        losses.append(loss + jnp.sum((y @ shared["table"].T) ** 2))
        figures.append(squares)
    mean = jax.tree.map(lambda *each: sum(each) / len(each), *figures)
    return sum(losses) / len(losses), mean


def drawn(stages, rounds, microbatches, count):
    draw = np.random.default_rng(0).normal
    # small weights, and an orthogonal product after each chunk, so that many layers do not magnify rounding
    shared = {"table": draw(size=(EMBED, EMBED)) / 3, "mix": np.linalg.qr(draw(size=(EMBED, EMBED)))[0]}
    of = lambda *shape: draw(size=(rounds, LAYERS * stages, *shape)) / 8  # noqa: E731
    weights = tuple({"a": of(EMBED, HIDDEN), "b": of(HIDDEN, EMBED)} for _ in range(count))
    batches = tuple(draw(size=(microbatches, BATCH, length, EMBED)) for length in LENGTHS[:count])
    return jax.tree.map(np.float32, (shared, weights, batches))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "stages", "rounds", "microbatches", "axis_type"),
    [
        ("1f1b", 2, 2, 1, 3, "explicit"),
        pytest.param("gpipe", 2, 2, 2, 4, "auto", marks=pytest.mark.slow),
        pytest.param("zero-bubble", 2, 2, 1, 3, "explicit", marks=pytest.mark.slow),
        pytest.param("1f1b", 2, 4, 2, 4, "explicit", marks=pytest.mark.slow),
        pytest.param("1f1b", 3, 2, 1, 2, "auto", marks=pytest.mark.slow),
        pytest.param("gpipe", 2, 1, 2, 2, "explicit", marks=pytest.mark.slow),
    ],
)
def test_value_gradients_and_figures_are_those_of_plain_code(
    make_mesh, name, count, stages, rounds, microbatches, axis_type
):
    host = drawn(stages, rounds, microbatches, count)
    (wanted, squares), gradients = jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))(*host)
    with jax.set_mesh(make_mesh({"p": stages, "x": 2}, axis_type)), gspmd.lowering("blocking"):
        made = [stack_of(number, count, name != "zero-bubble") for number in range(count)]
        shared = {"table": "EF_x", "mix": "EF_x"}
        schedule = Schedule.of(name, stages, microbatches, rounds)
        loss = pipelined(made, schedule, axis="p", stream=["BLE_x"] * count, shared=shared)
        arrays = (
            {path: gspmd.annotate(host[0][path], spec) for path, spec in shared.items()},
            tuple({path: gspmd.annotate(w[path], spec) for path, spec in SPECS.items()} for w in host[1]),
            tuple(gspmd.annotate(x, "MBLE") for x in host[2]),
        )
        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        program = run.lower(*arrays).compile()
        (value, figures), found = program(*arrays)
        comparison = gspmd.ledger(program).compare(gspmd.trace(run, *arrays))
        alone, _ = jax.jit(loss)(*arrays)
    np.testing.assert_allclose([value, alone], [wanted] * 2, rtol=1e-4)
    for each, of_stack in zip(figures, squares, strict=True):
        np.testing.assert_allclose(np.asarray(each["squares"]).reshape(-1), of_stack, rtol=1e-5)
    for (path, gradient), each in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(found), strict=True):
        assert np.linalg.norm(each - gradient) <= 5e-6 * np.linalg.norm(gradient), path
    if stages > 1:  # of one stage the compiler knows what is masked, and leaves some of it out
        assert comparison.agrees, str(comparison)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "forward"])
def test_what_a_stage_takes_of_another_stack_was_sent_in_the_tick_before(name):
    for stages, microbatches, rounds, count in [(1, 1, 1, 2), (2, 3, 1, 2), (4, 2, 1, 3), (2, 4, 2, 2), (3, 6, 3, 2)]:
        schedules = Schedule.of(name, stages, microbatches, rounds).in_stacks(count)
        at = {}
        for number, schedule in enumerate(schedules):
            assert (schedule.stack, schedule.stacks, len(schedule.ticks)) == (number, count, len(schedules[0].ticks))
            for tick, kinds in enumerate(schedule.ticks):
                for kind, slot in kinds.items():
                    for stage, work in enumerate(slot):
                        if work:
                            place = (number * rounds + work.round) * stages + stage
                            assert at.setdefault((kind, place, work.microbatch), tick) == tick
        every, trains = count * rounds * stages, name != "forward"
        assert len(at) == every * microbatches * (1 + trains + (name == "zero-bubble"))
        for microbatch in range(microbatches):
            for place in range(1, every):
                forward, back = (
                    [at.get((kind, each, microbatch), 0) for each in (place - 1, place)]
                    for kind in ("forward", "backward")
                )
                assert forward[1] == forward[0] + 1
                assert not trains or back[0] == back[1] + 1
            assert not trains or at["backward", every - 1, microbatch] >= at["forward", every - 1, microbatch]
        assert all(schedule.bubble == Schedule.of(name, stages, microbatches, rounds).bubble for schedule in schedules)


def test_a_spec_for_each_stack():
    stages = [stack_of(number, 2, True) for number in range(2)]
    with pytest.raises(PlanError, match="the number of stacks is 2, but stream= has 1 of their specs"):
        pipelined(stages, Schedule.of("1f1b", 2, 2), axis="p", stream="BLE_x", shared={})


def test_the_last_stack_alone_has_a_loss():
    schedule, (first, last) = Schedule.of("1f1b", 2, 2), (stack_of(number, 2, True) for number in range(2))
    with pytest.raises(PlanError, match=r"stack 1 of 1 has no last\(\) to compute the loss"):
        pipelined(first, schedule, axis="p", stream="BLE_x", shared={})
    with pytest.raises(PlanError, match=r"stack 1 of 2 has last\(\), but a stack follows it"):
        pipelined([last, last], schedule, axis="p", stream=["BLE_x"] * 2, shared={})


def test_every_stack_has_weights():
    stages = [stack_of(number, 2, True) for number in range(2)]
    loss = pipelined(stages, Schedule.of("1f1b", 1, 2), axis="p", stream=["BLE_x"] * 2, shared={})
    for weights in ({"a": jnp.ones(2)}, (jnp.ones(2),)):
        with pytest.raises(PlanError, match="cannot run 2 stacks with weights"):
            loss({}, weights, ())
