"""Slopes of ALiBi: those of the paper and of public programs, for every number of heads; and what models refuse."""

import numpy as np
import pytest

from gspmd.layouts import Layout
from gspmd_models import ModelConfig
from gspmd_models.alibi import slopes, slopes_of
from gspmd_models.vectors import padded_dimensions
from tests.models import plain


def test_slopes_of_eight_heads_are_those_that_the_paper_prints():
    assert slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    np.testing.assert_allclose(slopes(16), 2.0 ** -(np.arange(1, 17) / 2))


@pytest.mark.parametrize("most", [8.0, 16.0, 5.0])
def test_slopes_of_any_number_of_heads_are_those_of_the_powers_of_two_around_it(most):
    for heads in range(1, 130):
        np.testing.assert_allclose(slopes(heads, most), plain.alibi_slopes(heads, most), rtol=1e-12)


def test_slopes_of_padded_heads_stand_beside_the_real_ones():
    layout = Layout.load("megatron-1d").override({"padding.K": 4, "padding.H": 8})
    config = ModelConfig(heads=6, kv_heads=3, positions="alibi", alibi_scaled=True, head_size=16)
    found = slopes_of(config, padded_dimensions(config, layout)["H"])
    first = slopes(6) / 4
    assert found == (first[0], first[1], first[2], first[3], first[4], first[5], 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alibi_max": 4.0}, 'alibi_max is 4.0, but positions are rotary; set positions = "alibi"'),
        ({"alibi_scaled": True}, 'alibi_scaled is True, but positions are rotary; set positions = "alibi"'),
        ({"positions": "alibi", "alibi_max": 0.0}, "alibi_max is 0.0; it must be positive"),
        ({"positions": "alibi", "encoder_layers": 2}, "positions are alibi, which an encoder–decoder does not have"),
        ({"positions": "alibi", "layer_kinds": ("unrotated", "full")}, "positions are alibi; write 'full'"),
        ({"qkv_clip": -1.0}, "qkv_clip is -1.0; it must be positive, or be left out"),
        ({"embedding_norm": True, "encoder_layers": 2}, "embedding_norm and qkv_clip are only for decoder-only models"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValueError, match="this model cannot be built") as error:
        ModelConfig(**changes)
    assert words in str(error.value)
