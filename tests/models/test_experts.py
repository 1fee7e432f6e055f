"""Layers of experts in a model: those that every token uses, and the forms of dispatch, on any layout."""

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd_models.experts import shared_section
from gspmd_models.parameters import parameters
from tests.models.conftest import put

SHARED = MoEConfig(experts=8, every=2, router="gshard", dispatch="dropless", shared=2, dropout=0.2)


def test_shared_experts_are_parameters_of_their_own(config):
    sizes = config(moe=SHARED)
    alone = config(moe=MoEConfig(experts=8, every=2, router="gshard"))
    rows = parameters(sizes, Layout.load("gshard"))
    assert sizes.num_parameters == sum(np.prod(row.shape, dtype=int) for row in rows.values())
    width = 2 * sizes.feed_forward
    assert rows["blocks.1.moe.shared.w_in"].shape == (1, sizes.embed, width)
    added = 3 * sizes.embed * width
    assert sizes.num_parameters - alone.num_parameters == added
    assert sizes.num_active_parameters - alone.num_active_parameters == added


MIXED = MoEConfig(
    experts=8, every=1, router="top-k", k=1, renormalize=False, shared=1, shared_width=40, shared_mix=True
)


def test_shared_experts_may_have_another_width(config):
    sizes = config(moe=MIXED)
    layout = Layout.load("gshard")
    assert parameters(sizes, layout)["blocks.0.moe.shared.w_out"].shape == (2, 40, sizes.embed)
    padded = parameters(sizes, layout.override({"padding.F": 16}))
    assert padded["blocks.0.moe.shared.w_out"].shape == (2, 48, sizes.embed)
    assert sizes.num_parameters == sum(np.prod(row.shape, dtype=int) for row in parameters(sizes, layout).values())


def test_shared_experts_lie_as_a_dense_layer_unless_the_layout_says_otherwise():
    layout = Layout.load("switch-expert-model")
    specs = shared_section(layout)
    assert (specs.w_in, specs.w_gate, specs.hidden, specs.w_out) == ("EF_y", "EF_y", "B_zxLF_y", "F_yE")
    into = "residual, (w_in, w_gate) -> (hidden, hidden)"
    assert (str(specs.via(into)), str(specs.via("hidden, w_out -> residual"))) == (
        str(layout.ffn.via(into)),
        layout["ffn.out_via"],
    )
    other = shared_section(layout.override({"moe.shared_in": "EF", "moe.shared_in_via": "B_zxLE, EF"}))
    assert (other.w_in, other.w_gate, other.w_out) == ("EF", "EF", "F_yE")
    assert str(other.via(into)) == "B_zxLE, (EF, EF)"


def test_shared_experts_are_added_to_the_others(config, one_device, tokens):
    """If the other experts answer 0, the shared ones are a dense layer."""
    moe = MoEConfig(experts=8, every=1, shared=1)
    dense, mixed = one_device(config()), one_device(config(moe=moe))
    values = models.arrays(mixed)
    for path in ("w_in", "w_gate", "w_out"):
        values[f"blocks.0.moe.shared.{path}"] = models.arrays(dense)[f"blocks.0.ffn.{path}"]
    values["blocks.0.moe.w_out"] = jax.numpy.zeros_like(values["blocks.0.moe.w_out"])
    values |= {k.replace("ffn", "moe"): v for k, v in models.arrays(dense).items() if k.endswith("ffn.norm")}
    values |= {k: v for k, v in models.arrays(dense).items() if "ffn" not in k}
    with jax.set_mesh(jax.make_mesh((1, 1, 1), ("x", "y", "z"))):
        ids = put(tokens, dense.layout, jax.sharding.get_mesh())
        losses = [models.loss(m, ids, train=False)[0] for m in (dense, models.with_arrays(mixed, values))]
    np.testing.assert_allclose(*losses, rtol=1e-6)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("moe", "name", "lowering"),
    [
        pytest.param(SHARED, "gshard", "blocking", marks=SLOW),
        pytest.param(SHARED, "switch-expert-model", "looped", marks=SLOW),
        pytest.param(MIXED, "weight-stationary-2d", "blocking"),  # whose residual is sharded along E
        pytest.param(MIXED, "weight-stationary-2d", "xla", marks=SLOW),
        pytest.param(MIXED, "switch-expert-model", "looped", marks=SLOW),
    ],
)
def test_a_layout_never_changes_a_loss(config, one_device, placed, make_mesh, tokens, moe, name, lowering):
    """With shared experts, biases, no token lost, expert dropout, and recomputation."""
    alone = one_device(config(moe=moe, ffn_bias=True))
    layout = Layout.load(name)
    mesh, whole = make_mesh(layout.mesh_for(8)), make_mesh(layout.mesh_for(1))
    found = []
    for model, on in ((alone, whole), (placed(alone, layout, mesh), mesh)):
        with jax.set_mesh(on), gspmd.lowering(lowering):
            run = lambda values, ids, m=model: models.loss(  # noqa: E731
                models.with_arrays(m, values), ids, key=jax.random.key(3), train=True
            )
            ids = put(tokens, model.layout, on)
            (value, _), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(models.arrays(model), ids)
            found.append((value, jax.tree.map(np.asarray, gradients)))
    (loss, gradients), (wanted, wanted_gradients) = found[1], found[0]
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    for path, gradient in wanted_gradients.items():
        np.testing.assert_allclose(gradients[path], gradient, rtol=2e-3, atol=2e-5, err_msg=path)
