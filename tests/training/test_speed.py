"""Tokens per second and the MFU, against the chips' published peaks."""

from types import SimpleNamespace

import jax
import pytest

from gspmd.hardware.chips import CHIPS
from gspmd.training.reporting.speed import Speed, describe_peak, peak_flops
from gspmd_models import ModelConfig

CARD = SimpleNamespace(device_kind=CHIPS["h200"].device_kinds[0], platform="gpu")


def test_the_peak_is_that_of_all_chips():
    assert peak_flops([CARD] * 8, "bfloat16") == 8 * CHIPS["h200"].bf16_flops
    assert peak_flops([CARD], "float32") == CHIPS["h200"].float32_flops
    assert describe_peak([CARD] * 8, "bfloat16").endswith("FLOP/s per device in bfloat16 (h200)")


def test_fake_devices_and_unknown_chips_have_no_peak():
    unknown = SimpleNamespace(device_kind="TPU v99", platform="tpu")
    for devices in (jax.devices(), jax.devices()[:1], [unknown]):
        assert peak_flops(devices, "bfloat16") is None
    assert describe_peak(jax.devices(), "bfloat16").endswith("fake devices share the cores of one host")
    assert describe_peak([unknown], "bfloat16") == "unknown, and so is the MFU: chips.toml has no 'TPU v99'"
    assert Speed(1000, 1e12, None).figures(2.0) == {"tokens_per_second": 500.0}


def test_the_mfu_of_a_published_run():
    """PaLM 540B: 46.2% of 6144 TPU v4 at 238.3 thousand tokens per second, attention counted (PaLM, section 4.1)."""
    palm = ModelConfig(
        vocabulary=256_000, embed=18_432, layers=118, heads=48, kv_heads=1, head_size=256, feed_forward=73_728,
        block="parallel",
    )  # fmt: skip
    tokens = 2048 * 2048
    speed = Speed(tokens, tokens * palm.flops_per_token(2048), 6144 * CHIPS["tpu-v4"].bf16_flops)
    assert speed.figures(tokens / 238_300)["mfu"] == pytest.approx(0.462, abs=0.002)
