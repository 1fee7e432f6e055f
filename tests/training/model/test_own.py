"""A custom model in the builder of steps: its specs, its settings of the state, and what is wrong with it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
from gspmd.annotate import LayoutError
from gspmd.layouts import Layout
from gspmd.training import ConfigError, OptimizerConfig
from gspmd.training.model import Constant, Kept, Normal, Own, Parameter, mean, next_tokens
from gspmd.training.step import Update, abstract_program, building, jit_step

LAYOUT = """
[mesh]
axes = ["x", "y"]
factor = ["x", "y"]
[embedding]
tokens = "B_xL"
table = "VE"
[mixer]
stream = "B_xLE"
w_in = "EF_y"
hidden = "B_xLF_y"
w_out = "F_yE"
norm = "E"
[output]
logits = "B_xLV_y"
"""


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Tokens through one hidden layer a step of a scan."""

    embed: int = 16
    layers: int = 2

    def sizes(self, batch, length):
        return {"B": batch, "L": length, "V": 256, "E": self.embed, "F": 32}

    def parameters(self, layout):
        return {
            "table": Parameter("embedding.table", "VE", Normal(0.1)),
            "blocks.w_in": Parameter("mixer.w_in", "EF", Normal(0.2), self.layers),
            "blocks.w_out": Parameter("mixer.w_out", "FE", Normal(0.2), self.layers, float32=True),
            "norm": Parameter("mixer.norm", "E", Constant(1.0)),
        }

    def loss(self, layout, params, tokens, key, train):
        at, output = layout.section("mixer"), layout.section("output")
        equation = layout.section("embedding").equation("tokens, table -> mixer.stream")
        inputs, labels = next_tokens(layout, tokens)
        x = gspmd.ops.embed(inputs, params["table"], equation)

        def block(x, w):
            h = jax.nn.relu(at.einsum("stream, w_in -> hidden", x, w["w_in"]))
            return x + at.einsum("hidden, w_out -> stream", h, w["w_out"].astype(x.dtype)), None

        x, _ = jax.lax.scan(block, x, params["blocks"])
        x = at.rms_norm("stream, norm", x, params["norm"])
        logits = output.einsum("mixer.stream, embedding.table -> logits", x, params["table"])
        each = gspmd.ops.cross_entropy(logits, labels, output.spec("logits"))
        entropy = mean(each, output.spec("logits").without("V"))
        return entropy, {"cross_entropy": entropy}


@pytest.fixture
def layout(tmp_path):
    (tmp_path / "tiny.toml").write_text(LAYOUT)
    return Layout.load(tmp_path / "tiny.toml")


def program(layout, mesh, model=None, dtype="bfloat16", **update):
    update = Update(OptimizerConfig(**update.pop("optimizer", {})), 10, **update)
    return abstract_program(Own(model or Tiny(), dtype), update, 8, 16)(layout, mesh)


def traced(layout, mesh, model):
    """Build an update, and trace it."""
    with jax.set_mesh(mesh):
        step, *arguments = program(layout, mesh, model)
        return jax.eval_shape(step, *arguments)


def test_specs_of_optimizer_and_gradients_are_those_of_the_line(layout, make_mesh):
    layout = layout.override({"optimizer.mixer.w_in": "E_xF_y", "gradients.mixer.w_in": "EF_y partialsum-x"})
    subject = Own(Tiny())
    assert str(subject.rows(layout)["blocks.w_in"].spec) == "NEF_y"
    assert str(subject.optimizer_specs(layout)["blocks.w_in"]) == "NE_xF_y"
    assert subject.gradient_specs(layout)["blocks.w_in"].partial == ("x",)
    assert subject.for_loss(layout, 1)["mixer.w_in"] == "EF_y reduced-x"
    assert subject.for_loss(layout, 4)["embedding.table"] == "VE"
    mesh = make_mesh({"x": 2, "y": 2})
    step, state, tokens, key = program(layout, mesh, dtype="float32")
    moments = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.optimizer) if leaf.shape == (2, 16, 32)}
    assert moments == {str(jax.P(None, "x", "y"))}
    with jax.set_mesh(mesh):
        made = jit_step(step, state)
        plan = gspmd.trace(made, state, tokens, key)
        comparison = gspmd.ledger(made.lower(state, tokens, key).compile()).compare(plan)
    assert any(each.kind == "reduce-scatter" and set(each.axes) == {"x"} for each in plan.steps), str(plan)
    assert comparison.agrees, str(comparison)


@pytest.mark.parametrize(
    ("computed", "operation"),
    [(lambda w: w[::-1], "in the operation rev"), (jnp.cumsum, "in an operation of the model")],
    ids=["reversed", "added up"],
)
def test_a_partial_sum_that_jax_cannot_differentiate_is_named(layout, make_mesh, computed, operation):
    """JAX has no rule for partial sums in these, nor JAX 0.10 in `-w`, which state-space models compute."""

    class Computed(Tiny):
        def loss(self, layout, params, *given, **more):
            return super().loss(layout, params | {"norm": computed(params["norm"])}, *given, **more)

    mesh = make_mesh({"x": 2, "y": 2})
    traced(layout, mesh, Computed())
    with pytest.raises(gspmd.PlanError, match=f"no rule for partial sums {operation}") as error:
        traced(layout.override({"gradients.mixer.norm": "E partialsum-x"}), mesh, Computed())
    assert str(error.value).endswith("without partialsum-. It is one of: norm.")


def test_matrices_are_stored_and_computed_as_the_settings_say(layout, make_mesh):
    mesh = make_mesh({"x": 2, "y": 2})
    _, state, _, _ = program(
        layout, mesh, parameter_dtype="bfloat16", optimizer={"moments": "int8", "moments_block": 16}
    )
    dtypes = {path: str(leaf.dtype) for path, leaf in state.params.items()}
    assert dtypes == {"table": "bfloat16", "blocks.w_in": "bfloat16", "blocks.w_out": "float32", "norm": "float32"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.optimizer)} >= {"int8", "uint8", "float32"}
    with pytest.raises(ConfigError, match=r"blocks of 32 values, but a device has 16 of blocks.w_in's 32"):
        program(layout, mesh, optimizer={"moments": "int8"})
    seen = {}

    class Watching(Tiny):
        def loss(self, layout, params, tokens, key, train):
            seen.update(jax.tree.map(lambda leaf: str(leaf.dtype), params), tokens=jax.typeof(tokens), train=train)
            return super().loss(layout, params, tokens, key, train)

    traced(layout, mesh, Watching())
    assert seen["blocks"] == {"w_in": "bfloat16", "w_out": "float32"}
    assert (seen["table"], seen["norm"], seen["train"]) == ("bfloat16", "float32", True)
    assert seen["tokens"].shape == (8, 17)
    assert seen["tokens"].sharding.spec == jax.P("x", None)


def test_what_is_frozen_has_no_state_and_stays(layout, make_mesh):
    mesh, subject = make_mesh({"x": 2, "y": 2}), Own(Tiny())
    update = Update(OptimizerConfig(), 10, frozen=("mixer.w_*", "norm"))
    assert subject.trained(layout, update.frozen) == ("table",)
    values = subject.initial(layout, mesh, jax.random.key(0))
    with jax.set_mesh(mesh):
        state = building.initial_state(subject, layout, values, update, mesh)
        before = {path: np.asarray(leaf) for path, leaf in state.params.items()}
        tokens = gspmd.annotate(jnp.arange(8 * 17, dtype=jnp.int32).reshape(8, 17), "B_xL")
        state, _ = jax.jit(building.training_step(subject, layout, update))(state, tokens, jax.random.key(1))
    changed = {path for path, leaf in state.params.items() if (np.asarray(leaf) != before[path]).any()}
    assert changed == {"table"}
    with pytest.raises(
        ConfigError, match=re.escape("frozen has 'mixer.w_i', which matches no parameter. Did you mean")
    ):
        subject.trained(layout, ("mixer.w_i",))


def test_initial_values_do_not_depend_on_the_layout(layout, make_mesh):
    one = Own(Tiny()).initial(layout, make_mesh({"x": 1, "y": 1}), jax.random.key(0))
    many = Own(Tiny()).initial(layout, make_mesh({"x": 2, "y": 4}), jax.random.key(0))
    for path, value in one.items():
        np.testing.assert_array_equal(value, many[path])
    assert (one["blocks.w_in"][0] != one["blocks.w_in"][1]).all()


def changed(name, answer):
    """The model with another answer to one of its methods."""
    return type("Tiny", (Tiny,), {name: lambda self, *args: answer(getattr(Tiny, name)(self, *args))})()


def only(fault):
    return f"cannot use the model Tiny:\n  {fault}"


SCALAR = jnp.float32(1)


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("sizes", lambda found: [],
         "sizes must return letters with whole numbers above 0, such as {'B': 8, 'E': 64}, but returned []."),
        ("sizes", lambda found: found | {"F": 0}, "parameter 'blocks.w_in' has dimension F: sizes must give"),
        ("sizes", lambda found: found | {"F": 0.5}, "sizes must return letters"),
        ("sizes", lambda found: {"B": 1, "L": 1, "V": 256, "E": 16},
         "parameter 'blocks.w_in' has dimension F: sizes returns no size for F; add one, such as 'F': 256."),
        ("parameters", lambda found: {"positions": Parameter("mixer.w_in", "LF", Normal(1.0))},
         "parameter 'positions' has dimension L: sizes must give a size that does not depend"),
        ("parameters", lambda found: {}, "parameters must return a mapping of paths to Parameter, but returned {}."),
        ("parameters", lambda found: found | {"blocks.w-in": 1}, "a parameter's path must be names joined by dots"),
        ("parameters", lambda found: {"w": 3}, "parameter 'w' must be a gspmd.training.model.Parameter, but it is 3."),
        ("parameters", lambda found: {"w": Parameter("mixer.w_in", "NEF", Normal(1.0))},
         "parameter 'w' has dims 'NEF': write letters, without N, which layers= adds."),
        ("loss", lambda found: found[0], "loss must return a scalar and a mapping of figures, but returned an array"),
        ("loss", lambda found: (jnp.ones(3), found[1]), "loss must return a float32 scalar, but returned an array f"),
        ("loss", lambda found: (found[0].astype(jnp.float16), found[1]),
         "loss must return a float32 scalar, but returned an array float16[]."),
        ("loss", lambda found: (found[0], {"entropy": found[0]}),
         "the figures of loss must have 'cross_entropy', but have 'entropy'."),
        ("loss", lambda found: (found[0], {}), "the figures of loss must have 'cross_entropy', but have none."),
        ("loss", lambda found: (found[0], found[1] | {"many": jnp.ones(2)}),
         "figure 'many' of loss must be a scalar, but it is an array float32[2]."),
        ("loss", lambda found: (found[0], found[1] | {"loss": SCALAR}), "every step has a figure 'loss' already"),
    ],
)  # fmt: skip
def test_what_a_model_answers_wrongly_is_one_line(layout, make_mesh, name, answer, message):
    with pytest.raises(ConfigError) as error:
        traced(layout, make_mesh({"x": 2, "y": 2}), changed(name, answer))
    assert str(error.value).startswith(only(message))


def test_an_initialiser_of_another_shape_is_named(layout, make_mesh):
    wrong = {"w": Parameter("mixer.w_in", "EF", lambda key, shape: jnp.ones(3), 2)}
    with pytest.raises(ConfigError) as error:
        Own(changed("parameters", lambda found: wrong)).initial(layout, make_mesh({"x": 1, "y": 1}), jax.random.key(0))
    assert str(error.value) == only("the initialiser of 'w' returned an array float32[3], not shape (16, 32).")
    wrong = {"w": Parameter("mixer.w_in", "EF", 0.1)}
    with pytest.raises(ConfigError) as error:
        Own(changed("parameters", lambda found: wrong)).initial(layout, make_mesh({"x": 1, "y": 1}), jax.random.key(0))
    fact = "the initialiser of 'w' is 0.1, not a function of a key and a shape; "
    assert str(error.value) == only(f"{fact}write Normal(deviation) or Constant(value).")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixer.w_in": "F_yE"}, "'blocks.w_in' has dimensions E and F, but its line mixer.w_in = 'F_yE' has F and E."),
        ({"pipeline.layers": "N_x"}, "it splits layers into stages.\n  Leave [pipeline] out."),
        ({"padding.F": 64}, "it pads F.\n  Leave [padding] out."),
        ({"mixer.w_in": "EF_xy"}, "Use a size that is a multiple of 6 (30 or 36), or leave F unsharded: 'EF'."),
    ],
)  # fmt: skip
def test_layouts_that_a_model_cannot_take(tmp_path, change, message):
    text = LAYOUT.replace('w_in = "EF_y"', 'w_in = "F_yE"') if change.get("mixer.w_in") == "F_yE" else LAYOUT
    (tmp_path / "tiny.toml").write_text(text)
    with pytest.raises(LayoutError) as error:
        Own(Tiny()).check(Layout.load(tmp_path / "tiny.toml").override(change), {"x": 3, "y": 2}, 12, 16)
    assert message in str(error.value)


def test_a_layout_that_lacks_lines_names_all_of_them(tmp_path):
    (tmp_path / "tiny.toml").write_text(LAYOUT.replace('w_in = "EF_y"\n', "").replace('tokens = "B_xL"\n', ""))
    layout = Layout.load(tmp_path / "tiny.toml")
    with pytest.raises(LayoutError) as error:
        Own(Tiny()).rows(layout)
    assert str(error.value).endswith(
        ":\n  parameter 'blocks.w_in' has no line 'mixer.w_in' in the layout.\n"
        '  Add w_in = "EF" to [mixer], with the mesh axes that shard it.'
    )
    (tmp_path / "tiny.toml").write_text(LAYOUT.replace('w_in = "EF_y"\n', 'w_im = "EF_y"\n'))
    with pytest.raises(LayoutError, match=r"Did you mean 'mixer\.w_im'\? Otherwise add w_in = \"EF\" to \[mixer\]"):
        Own(Tiny()).rows(Layout.load(tmp_path / "tiny.toml"))
    with pytest.raises(
        LayoutError,
        match=r"its spec is the line 'embedding.tokens' of layout .*:\n  the layout does not write embedding.tokens",
    ):
        Own(Tiny()).batch_spec(layout)


def test_what_a_model_keeps_needs_its_line(layout):
    keeping = type("Tiny", (Tiny,), {"kept": lambda self: {"state": Kept("mixer.state", "BF")}})
    with pytest.raises(LayoutError) as error:
        Own(keeping()).kept(layout, 2, 4)
    assert str(error.value) == (
        f"cannot place what Tiny keeps by layout '{layout.name}':\n  'state' has no line 'mixer.state' in the layout.\n"
        '  Add state = "BF" to [mixer], with the mesh axes that shard it.'
    )


def test_flops_are_the_models_own_or_six_for_a_parameter(layout):
    count = 256 * 16 + 2 * 2 * 16 * 32 + 16
    assert Own(Tiny()).flops_per_token(layout, 16) == 6 * count
    told = type("Told", (Tiny,), {"flops_per_token": lambda self, length: 7.0 * length})
    assert Own(told()).flops_per_token(layout, 16) == 112.0


def test_a_batch_may_have_a_line_of_its_own(tmp_path, make_mesh):
    (tmp_path / "tiny.toml").write_text(LAYOUT.replace("[mixer]", '[mixer]\ntexts = "B_xyL"'))
    of_own = type("Tiny", (Tiny,), {"batch_line": "mixer.texts"})
    layout, mesh = Layout.load(tmp_path / "tiny.toml"), make_mesh({"x": 2, "y": 2})
    _, _, tokens, _ = program(layout, mesh, of_own())
    assert tokens.sharding.spec == jax.P(("x", "y"), None)
    wrong = type("Tiny", (Tiny,), {"batch_line": "mixer.hidden"})
    with pytest.raises(LayoutError, match=r"dimensions B and L, but its line mixer\.hidden = 'B_xLF_y' has others\."):
        Own(wrong()).batch_spec(layout)


def test_sizes_may_be_shares_of_a_length_that_a_batch_has(layout):
    chunked = type("Tiny", (Tiny,), {"sizes": lambda self, b, l: Tiny.sizes(self, b, l) | {"C": l // 8}})
    assert Own(chunked()).rows(layout)
    assert Own(chunked()).sizes(8, 16)["C"] == 2
    with pytest.raises(ConfigError, match="sizes must return letters with whole numbers above 0"):
        Own(chunked()).sizes(8, 4)
