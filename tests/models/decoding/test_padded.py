"""Texts of models whose heads and vocabulary are padded: drawn, searched and in int8, they are those of one device."""

from dataclasses import replace

import jax
import pytest

import gspmd_models as models
from gspmd_models import Sampling
from tests.models.decoding import whole
from tests.models.decoding.whole import Machine

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [5, 4, 3, 256]]
PADDED = {"padding.H": 16, "padding.V": 8}
DECODER = replace(
    whole.TRANSLATOR, encoder_layers=0, start_token=0, positions="rotary", position_offset=0, norm="rms",
    norm_bias=False, vocabulary=257, heads=14, kv_heads=2, head_size=20,
)  # fmt: skip
"""Channels of w_o have 280 numbers, and 320 with padding: neither has a scale of least error."""
WHOLE = {"attention.w_k": "EKD", "attention.w_v": "EKD", "attention.key": "B_xLKD", "attention.query": "B_xLH_yzD"}
LAYOUTS = {
    "megatron-1d": PADDED | {f"serving.{key}": line for key, line in WHOLE.items()},
    "weight-stationary-2d": PADDED,
    "zero-3": {"padding.V": 8},
}


def texts(machine, model=None, **options):
    if model is not None:
        machine.generator = models.Generator(model, machine.generator.layout, chunk=4, burst=3, **options.pop("how"))
    drawn = machine.texts(PROMPTS, 10, samples=3, sampling=Sampling(temperature=2.0), seed=5)
    assert {token for text in drawn for token in text} <= {*range(257)}
    return machine.texts(PROMPTS, 10), drawn, machine.texts(PROMPTS, 10, beams=4) if not options else None


@pytest.fixture(scope="module")
def alone():
    return texts(Machine(DECODER, chunk=4, burst=3))


@pytest.mark.turns(1)
@pytest.mark.parametrize("preset", LAYOUTS)
def test_texts_are_those_without_padding(preset, alone):
    assert texts(Machine(DECODER, preset, 8, changes=LAYOUTS[preset], chunk=4, burst=3)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [18, 20])
def test_texts_with_int8_weights_and_cache_are_those_without_padding(head_size):
    """With a head size of 18 only the padded w_o has wide channels, which must not change its scales."""
    found = []
    for preset, devices, changes in (("replicated", 1, {}), ("megatron-1d", 8, LAYOUTS["megatron-1d"])):
        machine = Machine(replace(DECODER, head_size=head_size), preset, devices, changes=changes)
        with jax.set_mesh(machine.mesh):
            small = models.quantize(machine.model)
        found.append(texts(machine, small, how={"int8": True}))
    assert found[0] == found[1]
