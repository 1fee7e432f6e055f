"""Plans of whole steps of prefill and decode on TPUs in bfloat16, to the byte."""

from importlib.util import find_spec

import jax
import pytest

import gspmd
import gspmd_models as models
from gspmd.audit import compile_offline, topology
from gspmd.layouts import Layout
from gspmd_models.config import LatentConfig
from gspmd_models.decoding import serving_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"),
]
SIZES = {"embed": 4096, "layers": 2, "heads": 16, "head_size": 256, "feed_forward": 8192, "vocabulary": 8192}


@pytest.mark.parametrize(
    ("preset", "phase", "block", "kv_heads"),
    [
        ("weight-stationary-2d", "decode", "parallel", 1),
        ("weight-stationary-2d", "decode", "serial", 16),
        ("megatron-1d", "decode", "serial", 8),
        ("weight-stationary-2d", "prefill", "parallel", 1),
    ],
)
def test_what_is_planned_is_sent(preset, phase, block, kv_heads):
    hold(preset, phase, models.ModelConfig(**SIZES, kv_heads=kv_heads, block=block))


def hold(preset, phase, settings):
    """Assert that the program of a phase sends what is planned, on eight chips."""
    ledger, plan = compiled(preset, phase, settings)
    comparison = ledger.compare(plan)
    assert ledger.wire_bytes == plan.wire_bytes > 0
    assert comparison.agrees, comparison


def compiled(preset, phase, settings):
    """The ledger of the program of a phase on eight chips, and its plan."""
    target, layout = topology("tpu-v4:2x2x2"), Layout.load(preset)
    mesh = target.mesh(layout.mesh_for(8) if preset == "megatron-1d" else {"x": 2, "y": 2, "z": 2})
    lengths = {"length": 64} if phase == "prefill" else {}
    program = serving_program(settings, layout, mesh, phase, batch=64, room=512, **lengths)
    with gspmd.lowering("blocking"):
        report = compile_offline(
            program.step, *program.arguments, topology=target, donate_argnums=(program.donated,),
            auto_layout_argnums=(program.stored,),
        )  # fmt: skip
        with jax.set_mesh(mesh):
            plan = gspmd.trace(program.step, *program.arguments)
    return report.ledger, plan


LATENT = models.ModelConfig(**SIZES, kv_heads=16, latent=LatentConfig(rank=512, query_rank=1024, rotary=64, values=128))
SLIDING = models.ModelConfig(
    **SIZES, kv_heads=8, layer_kinds=("sliding", "full"), sliding_window=128, norms="both", score_softcap=50.0
)


@pytest.mark.parametrize(
    ("preset", "phase", "settings"),
    [
        ("megatron-1d", "decode", LATENT),
        ("weight-stationary-2d", "prefill", LATENT), ("weight-stationary-2d", "decode", SLIDING),
        ("megatron-1d", "decode", SLIDING),
    ],
)  # fmt: skip
def test_what_is_planned_is_sent_by_latent_attention_and_over_rings(preset, phase, settings):
    hold(preset, phase, settings)


def test_sums_of_two_latents_that_the_compiler_merges_are_named():
    """libtpu scatters the sums of 1,024 and of 576 columns together, padded, and sends the rest after them."""
    ledger, plan = compiled("weight-stationary-2d", "decode", LATENT)
    comparison = ledger.compare(plan)
    assert plan.wire_bytes < ledger.wire_bytes < 1.02 * plan.wire_bytes
    assert not comparison["gone"]
    assert not comparison["the compiler's choice"]
    assert all("models/latent.py" in entry.source or not entry.source for entry in comparison["not planned"])
