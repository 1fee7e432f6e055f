"""Rematerialization by name: no choice changes a gradient, and each keeps the bytes that are predicted."""

import dataclasses
import io
import re

import jax
import numpy as np
import pytest
from rich.console import Console

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd.training.toml import ConfigError, from_mapping, to_mapping
from gspmd_models.config import REMATS, LatentConfig
from gspmd_models.remat.prediction import predicted, show_remat
from tests.models.conftest import put

BATCH, LENGTH, SIZES = 16, 32, {"embed": 32, "head_size": 4, "feed_forward": 128, "activation": "gelu"}


def place(preset, make_mesh, devices=8):
    layout = Layout.load(preset)
    return layout, make_mesh(layout.mesh_for(devices))


@pytest.mark.parametrize(("remat", "read"), [(True, "full"), (False, "none"), ("dots", "dots")])
def test_settings_from_before_there_were_names_are_read(remat, read):
    assert from_mapping(models.ModelConfig, {"remat": remat}).remat == read
    assert to_mapping(models.ModelConfig(remat=remat))["remat"] == read


def test_another_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="remat is 'selectiv'; it must be one of none, full, dots-except-hidden"):
        models.ModelConfig(remat="selectiv")
    with pytest.raises(ConfigError, match="remat must be one of 'none', 'full', 'dots-except-hidden', 'dots'"):
        from_mapping(models.ModelConfig, {"remat": "some"})


def test_nothing_has_a_name_to_move_it_by_without_recomputation():
    with pytest.raises(ValueError, match="offload moves activations by their names, and under remat none they have"):
        models.ModelConfig(remat="none", offload=True)


@pytest.mark.slow
def test_the_kernel_of_tpus_is_predicted(config, make_mesh, monkeypatch):
    """`selective` and `none` keep a float32 for each query and head besides; nothing else is computed again."""
    layout, mesh = place("megatron-1d", make_mesh)
    monkeypatch.setattr("gspmd.ops._attention.blocks.LARGEST", 64)
    found = []
    for kind in ("cpu", "TPU v5p"):
        jax.clear_caches()
        monkeypatch.setattr("gspmd.lowerings.in_force.device_kind", lambda kind=kind: kind)
        found.append({row.remat: row for row in predicted(config(**SIZES, layers=3), layout, mesh, BATCH, 128)})
    jax.clear_caches()
    in_blocks, by_kernel = found
    statistic = 4 * (BATCH * 128 // mesh.shape["x"]) * 8 // (mesh.shape["y"] * mesh.shape["z"])
    for remat in REMATS:
        kept = by_kernel[remat].layer_bytes - in_blocks[remat].layer_bytes
        assert kept == (statistic if remat in ("none", "selective") else 0)
        assert by_kernel[remat].flops == in_blocks[remat].flops


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_kept_bytes_follow_korthikanti(config, make_mesh, dtype):
    """Per layer and token: section 4's list less dropout's masks, which are not there, plus two float32 statistics.

    With heads · head_size = E and F = 4E, as there, selective keeps 34 - 2 = 32 bytes per element of the residual
    stream in bfloat16: 2 inputs of norms, 2 results, q, k, v, attention's result (2 bytes each), and F twice.
    """
    layout, mesh = place("megatron-1d", make_mesh)  # batch over x, heads and F over y and z
    rows = predicted(config(**SIZES, layers=3), layout, mesh, BATCH, LENGTH, dtype)
    rows = {row.remat: row for row in rows}
    tokens, width = BATCH * LENGTH // mesh.shape["x"], 2 if dtype == "bfloat16" else 4
    shards = mesh.shape["y"] * mesh.shape["z"]
    stream, heads, hidden = (tokens * 32 * width // by for by in (1, shards, shards))
    statistics = 2 * tokens * 4
    assert rows["selective"].layer_bytes == 4 * stream + 4 * heads + 2 * 4 * hidden + statistics
    assert rows["dots"].layer_bytes == 2 * stream + 3 * heads + 4 * hidden + statistics
    assert rows["dots-except-hidden"].layer_bytes == 2 * stream + 3 * heads + statistics
    assert rows["full"].layer_bytes == stream
    kept = [rows[remat].layer_bytes for remat in ("none", "selective", "dots", "dots-except-hidden", "full")]
    assert kept == sorted(kept, reverse=True)
    # full: all products but the last; dots: attention's two. Those that its gradient repeats anyhow are in none too.
    forward = 2 * tokens * 3 * (4 * 32 * 32 + 2 * 32 * 128) // shards
    core = 2 * 2 * tokens * LENGTH * 32 * 3 // shards
    last = 2 * tokens * 3 * 32 * 128 // shards  # the result of w_out is the next block's input
    assert rows["none"].flops == rows["selective"].flops == 0
    assert rows["dots"].flops == core
    assert rows["dots-except-hidden"].flops == core + 2 * tokens * 3 * 32 * 128 // shards
    assert rows["full"].flops == forward + core - last


def of_choice(settings, layout, mesh, lowering, tokens, values=None):
    """The compiled loss and gradients of a model, and what they are."""
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        model = models.abstract(settings, layout, mesh)
        run = jax.jit(
            jax.value_and_grad(lambda values, ids, key: models.loss(models.with_arrays(model, values), ids, key=key)[0])
        )
        batch = models.abstract_batch(layout, mesh, *tokens) if values is None else put(tokens, layout, mesh)
        program = run.lower(models.arrays(model) if values is None else values, batch, jax.random.key(1)).compile()
        return program, values and program(values, batch, jax.random.key(1))


def same_gradients(config, make_mesh, tokens, preset, lowering, choices, devices=8, offload=False, **changes):
    layout, mesh = place(preset, make_mesh, devices)
    settings = config(**SIZES | changes, remat="none")
    values = models.arrays(models.build(settings, layout, mesh, jax.random.key(0)))
    (wanted, gradients), *others = (
        of_choice(dataclasses.replace(settings, **how), layout, mesh, lowering, tokens, values)[1]
        for how in ({"remat": "none"}, *({"remat": remat, "offload": offload} for remat in choices))
    )
    for remat, (found, each) in zip(choices, others):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=remat)
        for path, gradient in each.items():
            np.testing.assert_allclose(gradient, gradients[path], rtol=1e-4, atol=1e-6, err_msg=f"{remat} {path}")


def test_gradients_are_those_of_none(config, make_mesh, tokens):
    same_gradients(config, make_mesh, tokens, "replicated", "blocking", ("selective", "dots"), devices=1)


def test_gradients_with_activations_on_the_host_are_those_of_none(config, make_mesh, tokens):
    same_gradients(config, make_mesh, tokens, "zero-3", "blocking", ("dots-except-hidden",), devices=2, offload=True)


@pytest.mark.parametrize("kinds", [("full", "sliding", "sliding"), ("sliding", "full", "sliding")])
def test_what_the_host_keeps_is_all_but_statistics(config, make_mesh, kinds):
    """The same bytes are kept, on the host or on the device, if blocks repeat after a first one, or do not repeat."""
    layout, mesh = place("megatron-1d", make_mesh)
    settings = config(**SIZES, layers=3, sliding_window=8, layer_kinds=kinds, norm="layer")
    moved, kept = (
        predicted(dataclasses.replace(settings, offload=offload), layout, mesh, BATCH, LENGTH, "bfloat16")
        for offload in (True, False)
    )
    statistics = 3 * 2 * 2 * 4 * BATCH * LENGTH // mesh.shape["x"]  # two for each norm
    for one, other in zip(moved, kept, strict=True):
        assert one.bytes + one.host_bytes == other.bytes
        assert one.flops == other.flops
        assert other.host_bytes == 0
        on_device = {"none": other.bytes, "full": 0}
        assert one.bytes == on_device.get(one.remat, statistics)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_input_of_a_single_block_is_on_the_host_too(config, make_mesh, layers):
    layout, mesh = Layout.load("replicated"), make_mesh({"x": 1, "y": 1, "z": 1})
    model = models.abstract(config(layers=layers, offload=True), layout, mesh)
    with jax.set_mesh(mesh):
        run = jax.grad(lambda values, ids: models.loss(models.with_arrays(model, values), ids)[0])
        program = jax.make_jaxpr(run)(models.arrays(model), models.abstract_batch(layout, mesh, 2, 8))
    assert re.search(rf"<host>\[{layers},2,8,", str(program))


def test_the_table_of_choices_says_what_is_in_host_memory(config, make_mesh):
    layout, mesh = place("megatron-1d", make_mesh)
    said = {}
    for offload in (False, True):
        console = Console(file=io.StringIO(), width=140)
        show_remat(console, config(**SIZES, layers=3, offload=offload), layout, mesh, BATCH, LENGTH)
        said[offload] = console.file.getvalue()
    assert "in host memory" not in said[False]
    assert re.search(r"full +│ +0 B │ +0 B │ +98\.3 kB", said[True])  # three inputs [16 / 2, 32, 32] of float32


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("preset", "lowering", "changes"),
    [
        ("zero-3", "xla", {}),
        ("weight-stationary-2d", "looped", {"block": "parallel", "kv_heads": 1}),
        ("gshard", "blocking", {"moe": MoEConfig(experts=8, every=1)}),
        ("gshard", "looped", {"moe": MoEConfig(experts=8, every=1), "norm": "layer"}),
    ],
)
def test_no_choice_changes_a_gradient(config, make_mesh, tokens, preset, lowering, changes, offload):
    same_gradients(config, make_mesh, tokens, preset, lowering, REMATS[1:], offload=offload, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "lowering", "choices"),
    [("megatron-1d", "blocking", ("none", "selective", "dots", "full")), ("data-parallel", "xla", ("selective",))],
)
def test_compiled_programs_keep_what_is_predicted(config, make_mesh, preset, lowering, choices):
    """Measured as the difference between six layers and two."""
    layout, mesh = place(preset, make_mesh)
    rows = {row.remat: row for row in predicted(config(**SIZES, layers=6), layout, mesh, 16, 128)}
    whole = []
    for remat in choices:
        sizes = []
        for layers in (6, 2):
            settings = config(**SIZES, layers=layers, remat=remat)
            program, _ = of_choice(settings, layout, mesh, lowering, (16, 128))
            sizes.append(program.memory_analysis().temp_size_in_bytes)
        whole.append(sizes[0])
        assert (sizes[0] - sizes[1]) / 4 == pytest.approx(rows[remat].layer_bytes, rel=0.05), remat
    assert whole == sorted(whole, reverse=True)


@pytest.mark.slow
def test_selective_sends_no_keys_round_again(config, make_mesh):
    """The gradient of attention round a ring reads what it gave, which is kept with it."""
    layout, mesh = Layout.load("context-parallel"), make_mesh({"x": 1, "y": 4, "z": 1})
    rows = {row.remat: row for row in predicted(config(**SIZES), layout, mesh, 2, 16)}
    assert rows["selective"].flops == 0 < rows["dots"].flops


AGAIN = r"\b(?:remat2?|checkpoint)\["
"""The primitive of what is computed again, as jaxprs print it."""


def test_blocks_whose_kinds_do_not_repeat_are_computed_again_one_by_one(config, make_mesh):
    """Layers that repeat after others are computed again in their loop."""
    layout, mesh = Layout.load("replicated"), make_mesh({"x": 1, "y": 1, "z": 1})

    def again(**changes):
        settings = config(layers=4, sliding_window=4, **changes)
        model = models.abstract(settings, layout, mesh)
        with jax.set_mesh(mesh):
            run = jax.grad(lambda values, ids: models.loss(models.with_arrays(model, values), ids)[0])
            return str(jax.make_jaxpr(run)(models.arrays(model), models.abstract_batch(layout, mesh, 2, 8)))

    kinds = ("sliding", "sliding", "full", "sliding")
    assert len(re.findall(AGAIN, again(layer_kinds=kinds, remat="full"))) >= 4
    assert not re.findall(AGAIN, again(layer_kinds=kinds, remat="none"))
    assert 2 <= len(re.findall(AGAIN, again(layer_kinds=("full", "sliding", "sliding", "sliding"), remat="full"))) < 4


def test_blocks_whose_kinds_do_not_repeat_keep_as_much_as_others(config, make_mesh):
    """The table has their rows too: all layers keep what as many alike do."""
    layout, mesh = Layout.load("replicated"), make_mesh({"x": 1, "y": 1, "z": 1})
    alone, alike = (
        predicted(config(layers=4, sliding_window=8, layer_kinds=kinds), layout, mesh, 2, 16)
        for kinds in (("sliding", "sliding", "full", "sliding"), ("sliding",))
    )
    assert [row.layers for row in alone] == [4] * len(REMATS)
    for one, other in zip(alone, alike, strict=True):
        assert (one.remat, one.bytes, one.layer_bytes) == (other.remat, other.bytes, other.layer_bytes)
        assert one.flops == other.flops


@pytest.mark.parametrize("preset", [pytest.param("replicated", marks=pytest.mark.slow), "megatron-1d"])
def test_blocks_before_those_that_repeat_keep_as_much_as_others(config, make_mesh, preset):
    """A full layer before sliding ones, or a dense one before experts, is outside of the loop, and in the table too."""
    layout, mesh = place(preset, make_mesh, 1 if preset == "replicated" else 8)
    kinds = ("full", "sliding", "sliding", "sliding")
    ahead, alike = (
        predicted(config(**SIZES, layers=4, sliding_window=8, layer_kinds=each), layout, mesh, BATCH, 16)
        for each in (kinds, ("sliding",))
    )
    for one, other in zip(ahead, alike, strict=True):
        assert (one.layers, other.layers) == (3, 4)
        assert (one.remat, one.bytes, one.layer_bytes) == (other.remat, other.bytes, other.layer_bytes)
        assert one.first_bytes == one.layer_bytes
    if preset == "replicated":
        sizes = {**SIZES, "feed_forward": 64}
        moe = MoEConfig(experts=4, router="top-k", every=1)
        first = dataclasses.replace(moe, dense_layers=(0,), dense_feed_forward=128)
        mixed, experts = (
            predicted(config(**sizes, layers=3, moe=each), layout, mesh, BATCH, 16) for each in (first, moe)
        )
        for one, of_experts, other in zip(mixed, experts, alike, strict=True):
            assert (one.first_bytes, one.layer_bytes) == (other.layer_bytes, of_experts.layer_bytes)
            assert one.bytes == other.layer_bytes + 2 * of_experts.layer_bytes


def test_keys_and_values_made_of_latents_are_kept_with_other_products(config, make_mesh):
    """They are as wide as the heads, and computed again where hidden activations are."""
    layout, mesh = Layout.load("replicated"), make_mesh({"x": 1, "y": 1, "z": 1})
    latent = LatentConfig(rank=12, rotary=8, values=16)
    settings = config(layers=2, head_size=20, latent=latent, activation="gelu")
    rows = {row.remat: row for row in predicted(settings, layout, mesh, 2, 16)}
    expanded, hidden = settings.heads * (12 + 16), settings.feed_forward
    assert rows["dots"].layer_bytes - rows["dots-except-hidden"].layer_bytes == 4 * 2 * 16 * (expanded + hidden)
    again = 2 * 2 * 2 * 16 * (settings.heads * latent.rank * (12 + 16) + settings.embed * hidden)
    assert rows["dots-except-hidden"].flops - rows["dots"].flops == again


def test_microbatches_keep_less_at_a_time_and_compute_as_much_again(config, make_mesh):
    layout, mesh = place("zero-1", make_mesh, 2)
    whole, parts = (
        {row.remat: row for row in predicted(config(layers=3), layout, mesh, BATCH, LENGTH, microbatches=count)}
        for count in (1, 4)
    )
    assert 4 * parts["full"].bytes == whole["full"].bytes
    for remat in REMATS:  # A few arrays without a batch are kept too, such as masks.
        assert 4 * parts[remat].bytes == pytest.approx(whole[remat].bytes, rel=0.01)
        assert parts[remat].flops == whole[remat].flops
