"""Blocks with weights of their own: the logits and texts of stacked ones, and the bytes of their plan."""

from dataclasses import replace
from importlib.util import find_spec

import jax
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.audit import compile_offline, topology
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd_models.decoding import cache, for_serving, serving_program
from gspmd_models.parameters import parameters

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11]]
EXPERTS = MoEConfig(experts=8, router="top-k", k=2, every=2, offset=0, dispatch="dropless")
SHAPES = {
    "serial, int8": ({"layers": 3, "kv_heads": 4}, True),
    "experts in every second block": ({"layers": 4, "moe": EXPERTS}, False),
    "a first block without experts": ({"layers": 3, "moe": replace(EXPERTS, every=1, dense_layers=(0,))}, False),
    "sliding windows": ({"layers": 4, "layer_kinds": ("sliding", "full"), "sliding_window": 5}, False),
    "parallel, int8": ({"layers": 2, "kv_heads": 1, "block": "parallel"}, True),
}


def made(settings, int8, config, make_mesh):
    layout = Layout.load("weight-stationary-2d").phase("decode")
    mesh, settings = make_mesh({"x": 2, "y": 2, "z": 2}), for_serving(config(**settings))
    layout = layout.resolved(settings.sizes(8, 1), mesh)
    model = models.build(settings, layout, mesh, jax.random.key(0))
    return models.quantize(model) if int8 else model, mesh


def test_the_weights_of_each_of_any_number_of_layers_are_by_themselves(config):
    apart = config(layers=4, stacked=False)
    assert [[*each] for each in apart.weight_stacks(2)] == [[0], [1]]
    assert [*map(len, apart.weight_stacks())] == [1] * 4


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", SHAPES)
def test_texts_and_weights_are_those_of_stacked_blocks(name, config, make_mesh, monkeypatch):
    model, mesh = made(*SHAPES[name], config, make_mesh)
    apart = models.unstack(model)
    rows, values, stacks = parameters(apart.config, apart.layout), models.arrays(apart), models.arrays(model)
    assert list(values) == list(rows)
    assert not apart.config.stacked
    places = {number: (place, at) for place, each in enumerate(model.config.stacks()) for at, number in enumerate(each)}
    for path, value in values.items():
        assert value.shape == rows[path].shape
        assert value.sharding.is_equivalent_to(jax.NamedSharding(mesh, rows[path].spec.partition_spec()), value.ndim)
        if path.startswith("blocks."):
            _, number, rest = path.split(".", 2)
            place, at = places[int(number)]
            np.testing.assert_array_equal(value[0], stacks[f"blocks.{place}.{rest}"][at])
    with jax.set_mesh(mesh):
        layout, ends = Layout.load("weight-stationary-2d"), {"tokens": 6, "seed": 3}
        texts, others = (models.Generator(each, layout, chunk=2)(PROMPTS, **ends).texts for each in (model, apart))
        monkeypatch.setattr(cache, "is_gpu", lambda: True)  # each layer's keys have an array of their own
        held = models.abstract_cache(apart.config, apart.layout, mesh, 8, 16, "float32")
        assert [len(each) for each in held.keys] == [1] * apart.config.layers
        on_gpus = models.Generator(apart, layout, chunk=2)(PROMPTS, **ends).texts
    assert texts == others == on_gpus


def test_only_stacked_decoders_are_unstacked_and_arrays_are_freed_if_asked(config, make_mesh):
    model, _ = made({"layers": 2}, False, config, make_mesh)
    apart = models.unstack(model, free=True)
    assert all(value.is_deleted() == path.startswith("blocks.") for path, value in models.arrays(model).items())
    assert not any(value.is_deleted() for value in models.arrays(apart).values())
    with pytest.raises(ValueError, match="are not stacked"):
        models.unstack(apart)
    with pytest.raises(ValueError, match="blocks of an encoder–decoder are stacked"):
        replace(models.ModelConfig(encoder_layers=2), stacked=False)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed")
def test_on_a_tpu_weights_are_loaded_ahead_and_a_step_sends_its_plan():
    target, layout = topology("tpu-v5e:2x4"), Layout.load("megatron-1d")
    mesh = target.mesh({"x": 1, "y": 8, "z": 1})
    sizes = {"embed": 4096, "layers": 4, "heads": 32, "kv_heads": 8, "head_size": 128, "feed_forward": 14336}
    seconds, loaded = {}, {}
    for stacked in (True, False):
        settings = models.ModelConfig(**sizes, vocabulary=8192, stacked=stacked)
        program = serving_program(settings, layout, mesh, "decode", batch=8, room=512, weights="int8")
        with gspmd.lowering("blocking"):
            report = compile_offline(
                program.step, *program.arguments, topology=target, donate_argnums=(program.donated,),
                auto_layout_argnums=(program.stored,),
            )  # fmt: skip
        assert report.ledger.wire_bytes == report.plan.wire_bytes > 0
        assert report.ledger.compare(report.plan).agrees
        seconds[stacked] = report.timeline.step_seconds
        loaded[stacked] = sum(span.bytes * span.times for span in report.timeline.spans if span.category == "copy")
    matrices = 4 * 3 * 4096 * 14336 // 8
    assert loaded[False] > 0.8 * matrices > loaded[True]
    assert seconds[False] < 0.75 * seconds[True]
