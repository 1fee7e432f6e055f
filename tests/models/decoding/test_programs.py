"""Both programs of decoding: plans to the byte, one gather and one reduction a block, no copied cache."""

import jax
import pytest

import gspmd
import gspmd_models as models
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd_models.decoding import GenerationError, Sampling, decode_loop, make_batch, serving_program
from gspmd_models.decoding.cache import abstract_whole
from gspmd_models.decoding.loop import WrittenTexts


def programs(config, make_mesh, preset, prefill=None, changes=None, *, room=32, lowering="blocking"):
    """The mesh, and for prefill and decode the jitted step, which takes over the cache, with its abstract arguments."""
    layout = Layout.load(preset).override(changes or {})
    mesh = make_mesh(layout.mesh_for(8))
    with jax.set_mesh(mesh), gspmd.lowering(lowering):
        prompts = [[1] * 9] * 8
        batch = make_batch(
            config, layout, prefill and Layout.load(prefill), mesh, prompts, 2, chunk=8, cache_length=room
        )
        generator = models.Generator(models.abstract(config, batch.sizes.decode, mesh), layout)
        steps = generator.programs(batch.sizes)
    return mesh, batch.sizes, {
        name: (jax.jit(step, donate_argnums=len(given) - 1), given) for name, (step, given) in steps.items()
    }  # fmt: skip


def check_ledgers(found, lowering="blocking"):
    mesh, _, steps = found
    for step, given in steps.values():
        with jax.set_mesh(mesh), gspmd.lowering(lowering):
            plan, ledger = gspmd.trace(step, *given), gspmd.ledger(step.lower(*given).compile(), mesh)
        comparison = ledger.compare(plan)
        assert ledger.wire_bytes == plan.wire_bytes > 0
        assert comparison.agrees, comparison


def test_what_is_planned_is_sent_and_a_parallel_block_gathers_and_reduces_once(config, make_mesh):
    """The residual [8, 1, 32] of float32 is gathered over yz, and its sum reduced over yz, once in each of 2 blocks."""
    settings = config(block="parallel", kv_heads=1)
    found = programs(settings, make_mesh, "weight-stationary-2d", "weight-gathered-xyz")
    check_ledgers(found)
    mesh, _, steps = found
    step, given = steps["decode"]
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        plan = gspmd.trace(step, *given)
    blocks = [entry for entry in plan.entries if entry.trips == 2 and entry.step.axes == ("y", "z")]
    sent = {kind: [(entry.step.before, entry.step.after) for entry in blocks if entry.step.kind == kind]
            for kind in ("all-gather", "reduce-scatter")}  # fmt: skip
    assert [tuple(map(str, pair)) for pair in sent["all-gather"]] == [("BLE_xyz", "BLE_x")]
    assert [tuple(map(str, pair)) for pair in sent["reduce-scatter"]] == [("BLE_x partialsum-yz", "BLE_xyz")]


@pytest.mark.parametrize("phase", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_int8_weights_and_cache_are_sent_as_planned(phase, config, make_mesh):
    """Keys go to a cache over batch and length as int8, with their scales: a quarter of the bytes, and not one more."""
    changes = {f"{phase}.attention.query": "B_zLH_yxD", f"{phase}.attention.key": "B_zLKD"}
    layout = Layout.load("weight-stationary-2d").override(
        changes | {"decode.attention.key": "B_zLKD", "cache.attention.key": "B_zT_xyKD"}
    )
    mesh = make_mesh({"x": 2, "y": 2, "z": 2})
    program = serving_program(
        config(kv_heads=1), layout, mesh, phase, batch=8, room=16, length=8, dtype="float32", weights="int8",
        cache="int8",
    )  # fmt: skip
    weights, cache = program.arguments[program.stored], program.arguments[program.donated]
    assert {str(leaf.dtype) for leaf in (*cache.keys, *cache.values, weights["blocks.0.ffn.w_in"])} == {"int8"}
    assert {str(leaf.dtype) for leaf in (*cache.key_scales, *cache.value_scales)} == {"float32"}
    check_ledgers((mesh, None, {phase: (jax.jit(program.step, donate_argnums=program.donated), program.arguments)}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "prefill", "changes", "moe", "lowering"),
    [
        ("megatron-1d", None, {"cache.attention.key": "B_xT_yzKD"}, False, "blocking"),
        ("weight-stationary-1d", "weight-gathered-xy", {}, False, "looped"),
        ("weight-gathered-xyz", None, {}, False, "blocking"),
        ("gshard", None, {}, True, "blocking"),
        ("switch-expert-model", None, {}, True, "blocking"),
    ],
)
def test_what_is_planned_is_sent_in_other_layouts(preset, prefill, changes, moe, lowering, config, make_mesh):
    settings = config(moe=MoEConfig(router="gshard")) if moe else config()
    check_ledgers(programs(settings, make_mesh, preset, prefill, changes, lowering=lowering), lowering)


TWO = {"encoder_layers": 2, "positions": "relative", "attention_scale": 1.0}
OF_TWO_STACKS = [
    ("megatron-1d", None, {"cross.key": "BTK_yzD", "cache.cross.key": "B_xT_yzKD"}, None, "blocking"),
    ("weight-stationary-2d", "weight-gathered-xyz", {}, None, "blocking"),
    ("zero-3", None, {"encoder.ffn.hidden": "B_xyLF", "encoder.attention.query": "B_xyLHD"}, None, "blocking"),
    ("weight-stationary-1d", None, {}, None, "looped"),
    ("gshard", None, {}, MoEConfig(router="switch"), "blocking"),
    ("switch-expert-model", None, {}, MoEConfig(router="gshard"), "looped"),
]


@pytest.mark.turns(2)
@pytest.mark.parametrize("phase", ["encode", "prefill", "decode"])
@pytest.mark.parametrize(("preset", "prefill", "changes", "moe", "lowering"), OF_TWO_STACKS)
def test_what_is_planned_for_two_stacks_is_sent(preset, prefill, changes, moe, lowering, phase, config, make_mesh):
    settings, layout = config(**TWO, moe=moe, activation="relu"), Layout.load(preset).override(changes)
    mesh = make_mesh(layout.mesh_for(8))
    program = serving_program(
        settings, layout, mesh, phase, batch=8, room=16, length=8, source_length=24, dtype="float32",
        prefill=prefill and Layout.load(prefill),
    )  # fmt: skip
    donated = () if program.donated is None else program.donated
    check_ledgers((mesh, None, {phase: (jax.jit(program.step, donate_argnums=donated), program.arguments)}), lowering)


def test_each_cache_has_a_length_of_its_own(config, make_mesh):
    """Mesh axes divide the length of the cache that they shard, and not that of the other one."""
    layout = Layout.load("megatron-1d").override({"cross.key": "BTK_yzD", "cache.cross.key": "B_xT_yzKD"})
    mesh, made = make_mesh({"x": 2, "y": 2, "z": 2}), {"batch": 8, "length": 6, "dtype": "float32"}
    for phase in ("prefill", "decode"):
        serving_program(config(**TWO), layout, mesh, phase, room=18, source_length=24, **made)
        with pytest.raises(gspmd.LayoutError, match="T has size 26"):
            serving_program(config(**TWO), layout, mesh, phase, room=18, source_length=26, **made)
    own = Layout.load("megatron-1d").override({"cache.attention.key": "B_xT_yzKD", "cache.cross.key": "B_xTK_yD"})
    with pytest.raises(gspmd.LayoutError, match="T has size 18"):
        serving_program(config(**TWO), own, mesh, "decode", room=18, source_length=24, **made)


def test_a_program_that_encodes_needs_an_encoder_and_a_source(config, make_mesh):
    layout = Layout.load("megatron-1d")
    mesh, encoder = make_mesh(layout.mesh_for(8)), config(**TWO)
    program = serving_program(encoder, layout, mesh, "encode", batch=8, source_length=24)
    assert (program.tokens, program.donated, program.arguments[1].shape) == (8 * 24, None, (8, 24))
    for settings, given, fault in (
        (config(), {"phase": "encode"}, "the model is decoder-only, and encodes nothing"),
        (encoder, {"phase": "encode"}, "the model has an encoder, but source_length is 0; it must be at least 1"),
        (encoder, {"phase": "decode", "source_length": 24}, "room is 0; it must be at least 1"),
        (config(), {"phase": "forward", "room": 8}, "phase is 'forward'; it must be encode, prefill or decode"),
    ):
        with pytest.raises(GenerationError, match=fault):
            serving_program(settings, layout, mesh, batch=8, **given)


def temporary_bytes(config, make_mesh, room):
    """Temporary bytes of both steps and of the loop on one device, and the bytes of the cache there."""
    mesh, sizes, steps = programs(config, make_mesh, "weight-stationary-2d", room=room)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        found = [step.lower(*given).compile().memory_analysis() for step, given in steps.values()]
        _, (weights, each, cache) = steps["decode"]
        model = models.abstract(config, sizes.decode, mesh)
        others = [
            abstract_whole(mesh, shape, dtype) for shape, dtype in (((8,), "uint32"), ((8,), "bool"), ((), "int32"))
        ]
        loop = jax.jit(decode_loop(model, Sampling(temperature=0), (), 4), donate_argnums=1)
        found.append(loop.lower(weights, WrittenTexts(cache, each, each), *others).compile().memory_analysis())
    held = sum(leaf.dtype.itemsize * leaf.size // 8 for leaf in jax.tree.leaves(cache) if leaf.ndim > 1)
    assert all(memory.alias_size_in_bytes >= held for memory in found)
    return [memory.temp_size_in_bytes for memory in found], held


@pytest.mark.slow
def test_no_program_copies_the_cache(config, make_mesh):
    """XLA:CPU copies the layer that a scan reads, one of 8; a copy of the cache would be all of it, or half of it.

    Heads are wide, so that the scores of a chunk, which grow with the cache too, are small beside it.
    """
    settings = config(layers=8, block="parallel", kv_heads=2, head_size=64)
    (small, short), (large, long) = (temporary_bytes(settings, make_mesh, room) for room in (64, 1024))
    for before, after in zip(small, large):
        assert after - before < (long - short) / 4
