"""The step: the update of plain optax, whatever the layout of the optimizer's state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gspmd
from gspmd.annotate import Spec, SpecError
from gspmd.training.config import OptimizerConfig
from gspmd.training.optimizer import adamw, schedule
from gspmd.training.state import abstract, abstract_initial, initial, shardings
from gspmd.training.step import Microbatches, Moves, jit_step, make_step, plan_moves

CONFIG = OptimizerConfig(learning_rate=0.1, clip=0.5)


def loss(params, batch, key):
    value = jnp.mean((params["w"] - batch) ** 2) + jnp.sum(params["b"] ** 2)
    return value, {"noise": jax.random.uniform(key)}


def begin():
    return {"w": jnp.arange(32.0).reshape(8, 4) / 10, "b": jnp.ones(8)}


def by_hand(steps):
    """The same updates, written with optax alone."""
    params, rates = begin(), schedule(CONFIG, steps)
    transform = optax.chain(
        optax.clip_by_global_norm(CONFIG.clip),
        optax.adamw(rates, CONFIG.beta1, CONFIG.beta2, CONFIG.epsilon, weight_decay=CONFIG.weight_decay),
    )
    state, losses = transform.init(params), []
    for _ in range(steps):
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(params, jnp.ones((8, 4)), jax.random.key(0))
        updates, state = transform.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return params, losses


def train(mesh, parameters, optimizer, steps=5):
    """Losses and parameters of the step under test; moves are plain constraints that count their calls."""
    moved = []

    def reshard(x, equation):
        moved.append(str(equation))
        target = equation.outputs[0].partition_spec()
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, target))

    params = jax.device_put(begin(), shardings(parameters, mesh))
    transform = adamw(CONFIG, steps)
    state = initial(params, transform, mesh, optimizer)
    moves = plan_moves(parameters, optimizer, reshard)
    step = jit_step(make_step(loss, transform, schedule(CONFIG, steps), limit=CONFIG.clip, moves=moves), state)
    losses = []
    for _ in range(steps):
        state, figures = step(state, jnp.ones((8, 4)), jax.random.key(0))
        losses.append(float(figures["loss"]))
    return state, losses, moved


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("parameters", "optimizer", "moves"),
    [
        ({"w": "EF", "b": "E"}, {"w": "EF", "b": "E"}, set()),
        ({"w": "E_xF_y", "b": "E_x"}, {"w": "E_xF_y", "b": "E_x"}, set()),
        ({"w": "EF", "b": "E"}, {"w": "E_xyF", "b": "E_x"}, {"EF -> E_xyF", "E_xyF -> EF", "E -> E_x", "E_x -> E"}),
        ({"w": "E_xF", "b": "E"}, {"w": "E_xF_y", "b": "E"}, {"E_xF -> E_xF_y", "E_xF_y -> E_xF"}),
    ],
)
def test_updates_are_those_of_optax(make_mesh, parameters, optimizer, moves):
    parse = lambda specs: {name: Spec.parse(spec) for name, spec in specs.items()}  # noqa: E731
    state, losses, moved = train(make_mesh({"x": 4, "y": 2}, "auto"), parse(parameters), parse(optimizer))
    params, wanted = by_hand(5)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, params)
    assert set(moved) == moves


def test_state_stays_where_it_was_placed(make_mesh):
    mesh = make_mesh({"x": 4, "y": 2}, "auto")
    parameters = {"w": Spec.parse("EF"), "b": Spec.parse("E")}
    optimizer = {"w": Spec.parse("E_xyF"), "b": Spec.parse("E_x")}
    state, _, _ = train(mesh, parameters, optimizer)
    moments = state.optimizer[0].mu
    assert moments["w"].sharding.shard_shape((8, 4)) == (1, 4)
    assert moments["b"].sharding.shard_shape((8,)) == (2,)
    assert state.params["w"].sharding.is_fully_replicated


def test_metrics_name_rate_and_norm(make_mesh):
    mesh = make_mesh({"x": 2}, "auto")
    transform = adamw(CONFIG, 10)
    params = jax.device_put(begin(), jax.sharding.NamedSharding(mesh, jax.P()))
    step = make_step(loss, transform, schedule(CONFIG, 10), limit=CONFIG.clip, moves=Moves())
    state, figures = step(initial(params, transform, mesh), jnp.ones((8, 4)), jax.random.key(0))
    gradients = jax.grad(lambda params: loss(params, jnp.ones((8, 4)), jax.random.key(0))[0])(params)
    assert float(figures["gradient_norm"]) == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-6)
    assert float(figures["learning_rate"]) == pytest.approx(0.1)
    assert int(state.step) == 1


def test_each_step_draws_its_own_numbers(make_mesh):
    mesh = make_mesh({"x": 2}, "auto")
    transform = adamw(CONFIG, 10)
    params = jax.device_put(begin(), jax.sharding.NamedSharding(mesh, jax.P()))
    step = make_step(loss, transform, schedule(CONFIG, 10))
    state = initial(params, transform, mesh)
    state, first = step(state, jnp.ones((8, 4)), jax.random.key(0))
    _, second = step(state, jnp.ones((8, 4)), jax.random.key(0))
    assert float(first["noise"]) != float(second["noise"])


def test_abstract_state_has_shapes_and_places_only(make_mesh):
    mesh = make_mesh({"x": 2}, "auto")
    state = initial(jax.device_put(begin(), jax.sharding.NamedSharding(mesh, jax.P())), adamw(CONFIG, 1), mesh)
    leaf = abstract(state).params["w"]
    assert (leaf.shape, leaf.dtype, leaf.sharding) == ((8, 4), jnp.float32, state.params["w"].sharding)


def test_the_first_state_is_known_before_it_is_made(make_mesh):
    mesh = make_mesh({"x": 4, "y": 2})
    parameters = shardings({"w": Spec.parse("E_xF"), "b": Spec.parse("E")}, mesh)
    optimizer = {"w": Spec.parse("E_xyF"), "b": Spec.parse("E_x")}
    params, transform = jax.device_put(begin(), parameters), adamw(CONFIG, 1)
    with jax.set_mesh(mesh):
        made = abstract(initial(params, transform, mesh, optimizer))
        assert abstract_initial(abstract(params), transform, mesh, optimizer) == made
    assert made.optimizer[0].mu["w"].sharding.spec == jax.P(("x", "y"), None)


def test_each_device_splits_its_own_sequences(make_mesh, axis_type):
    tokens = np.arange(24).reshape(8, 3)
    with jax.set_mesh(make_mesh({"x": 2}, axis_type)):
        parts = Microbatches(2, Spec.parse("B_xL")).split(gspmd.annotate(tokens, "B_xL"))
        assert parts.sharding.spec == jax.P(None, "x", None)
    np.testing.assert_array_equal(parts, tokens.reshape(2, 2, 2, 3).swapaxes(0, 1).reshape(2, 4, 3))


def test_microbatches_that_do_not_divide_are_one_error(make_mesh):
    with jax.set_mesh(make_mesh({"x": 2})), pytest.raises(SpecError) as error:
        Microbatches(3, Spec.parse("B_xL")).split(gspmd.annotate(np.ones((8, 3)), "B_xL"))
    assert str(error.value) == (
        "cannot split a batch of 8 sequences over 2 devices ('B_xL') into 3 microbatches.\n"
        "  Each device splits its own sequences into microbatches, so use a batch that is a multiple of 6."
    )


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_the_mean_over_microbatches_is_that_of_the_whole_batch(make_mesh, kind):
    """The gradients are partial until they reach the optimizer, or are not."""
    mesh, batch = make_mesh({"x": 2, "y": 2}, kind), np.arange(64.0, dtype=np.float32).reshape(8, 8) % 5
    own = {"w": Spec.parse("E_yF"), "b": Spec.parse("E")}
    transform, figures = adamw(CONFIG, 5), []
    for count, w in ((1, own["w"]), (2, Spec.parse("E_yF reduced-x"))):

        def mean(params, batch, key, w=w):
            scaled = gspmd.einsum("B_xE, E -> B_xE", batch, params["b"])
            hidden = gspmd.einsum(f"B_xE, {w} -> B_xF", scaled, params["w"])
            return gspmd.reshard(hidden * hidden, "B_xF -> ") / hidden.shape[0], {}

        with jax.set_mesh(mesh):
            state = initial(jax.device_put(begin(), shardings(own, mesh)), transform, mesh)
            moves = plan_moves(own, own, gspmd.reshard, loss=own | {"w": w})
            split = Microbatches(count, Spec.parse("B_xE"))
            step = make_step(mean, transform, schedule(CONFIG, 5), moves=moves, microbatches=split)
            found = jax.jit(step)(state, gspmd.annotate(batch, "B_xE"), jax.random.key(0))[1]
        figures.append([float(found["loss"]), float(found["gradient_norm"])])
    np.testing.assert_allclose(*figures, rtol=1e-6)


def test_a_step_is_compiled_with_the_options_given(make_mesh):
    mesh, transform = make_mesh({"x": 2}, "auto"), adamw(CONFIG, 10)
    params = jax.device_put(begin(), jax.sharding.NamedSharding(mesh, jax.P()))
    state = initial(params, transform, mesh)
    step = make_step(loss, transform, schedule(CONFIG, 10), limit=CONFIG.clip, moves=Moves())
    told = jit_step(step, state, {"xla_cpu_fastest": "true"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_cpu_fastest'"):
        told.lower(state, jnp.ones((8, 4)), jax.random.key(0)).compile()
