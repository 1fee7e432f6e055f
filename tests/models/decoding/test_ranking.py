"""Layouts ranked for serving: figures against the formula by hand, what does not fit, and the programs they are of."""

import jax
import pytest

import gspmd
from gspmd.annotate import LayoutError
from gspmd.hardware.chips import chip
from gspmd.layouts import Layout
from gspmd_models.decoding import GenerationError, rank_serving, serving_layouts, serving_program

SIZES = {"batch": 8, "room": 32}


@pytest.fixture
def mesh(make_mesh):
    return make_mesh({"x": 2, "y": 2, "z": 2})


def ranked(config, layouts, mesh, phase="decode", **options):
    return rank_serving(config, layouts, mesh, phase, **{**SIZES, "lowerings": ["blocking"], **options})


def test_seconds_are_those_of_the_plan_and_of_the_attention_where_the_cache_lies(config, mesh):
    settings, v4 = config(kv_heads=1, block="parallel"), chip("tpu-v4")
    layout = next(each for each in serving_layouts(["weight-stationary-2d"]) if "B_zLH_yxD B_zTKD" in each.name)
    (served,) = ranked(settings, [layout], mesh, dtype="float32")
    program = serving_program(settings, layout, mesh, "decode", dtype="float32", **SIZES)
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        plan = gspmd.trace(program.step, *program.arguments)
    # of 2 layers: 4 of 8 rows, 2 of 8 heads, 32 positions and their own; keys and values [4, 32, 1, D] are read
    size = settings.head_size
    operations, moved = 4 * 4 * 1 * 2 * 33 * size, 2 * 4 * 32 * 1 * size * 4
    assert served.attention == pytest.approx(2 * max(operations / v4.flops("float32"), moved / v4.hbm_bandwidth))
    assert served.seconds == pytest.approx(plan.seconds + served.attention)
    assert served.collectives + served.products == pytest.approx(plan.seconds)
    assert served.wire_bytes == plan.wire_bytes


def test_the_fastest_comes_first_and_what_does_not_fit_last_with_the_reason(config, mesh):
    found = ranked(config(kv_heads=1), serving_layouts(["weight-stationary-2d"]), mesh, batch=2)
    assert [served.seconds for served in found] == sorted(served.seconds for served in found)
    fits = [served for served in found if not served.reason]
    assert fits[0].seconds < fits[-1].seconds
    whole = next(served for served in found if "B_xyzTKD" in served.name)
    assert "dimension B" in whole.reason
    assert "does not fit: " in str(whole)
    large = ranked(config(kv_heads=1), [Layout.load("replicated")], mesh, room=2**31)
    assert "weights and cache take" in large[0].reason


def test_int8_weights_are_held_in_a_byte_each(config, mesh):
    layout = next(each for each in serving_layouts(["weight-stationary-2d"]) if "B_xyzLHD B_xyzTKD" in each.name)
    wide, narrow = (ranked(config(kv_heads=1), [layout], mesh, weights=dtype)[0] for dtype in ("float32", "int8"))
    assert wide.held_bytes > 2 * narrow.held_bytes  # the cache, float32 scales and norms are as large


def test_an_int8_cache_is_held_and_read_as_a_byte_and_a_share_of_its_scale(config, mesh):
    """Two layers of one head: keys and values of 8 rows by 32 positions, with batch and length over 8 devices."""
    settings, v4 = config(kv_heads=1), chip("tpu-v4")
    layout = next(each for each in serving_layouts(["weight-stationary-2d"]) if "B_zLH_yxD B_zT_xyKD" in each.name)
    options = {"room": 2**14, "dtype": "bfloat16"}
    wide, narrow = (ranked(settings, [layout], mesh, cache=cache, **options)[0] for cache in (None, "int8"))
    entries, size = 2 * 2 * 8 * 2**14 // 8, settings.head_size
    assert wide.held_bytes - narrow.held_bytes == entries * (2 * size - (size + 4))
    assert narrow.attention == pytest.approx(entries * (size + 4) / v4.hbm_bandwidth)


def test_only_a_refusal_of_the_sizes_counts_as_not_fitting(config, mesh, monkeypatch):
    layout = Layout.load("weight-stationary-2d")
    with pytest.raises(LayoutError, match="E_xF_yq"):
        ranked(config(), [layout.override({"ffn.w_in": "E_xF_yq"})], mesh)
    with pytest.raises(GenerationError, match="phase is 'decoding'; it must be encode, prefill or decode"):
        ranked(config(), [layout], mesh, phase="decoding")
    with pytest.raises(GenerationError, match=r"needs room for \d+, but room is 32"):
        ranked(config(), [layout], mesh, phase="prefill", length=64)

    def broken(*given, **options):
        raise ValueError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr("gspmd_models.decoding.ranking.serving_program", broken)
        with pytest.raises(ValueError, match="a fault of ours"):
            ranked(config(), [layout], mesh)
    monkeypatch.setattr(gspmd, "trace", broken)
    with pytest.raises(ValueError, match="a fault of ours"):
        ranked(config(), [layout], mesh)


def test_a_prefill_may_gather_what_a_decode_step_keeps_in_its_place(config, mesh):
    gathered = serving_program(
        config(), Layout.load("weight-stationary-2d"), mesh, "prefill", length=8,
        prefill=Layout.load("weight-gathered-xyz"), **SIZES,
    )  # fmt: skip
    assert gathered.layout["ffn.w_in"] == "E_xF_yz"
    assert gathered.layout["ffn.hidden"] == "B_xyzLF"
    assert gathered.tokens == 64
