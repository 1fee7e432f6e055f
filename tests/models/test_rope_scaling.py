"""Scalings of the rotary embedding: which fit, and the angles of texts of several lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd.training.toml import from_mapping
from gspmd_models import ModelConfig
from gspmd_models.context import lengths_in
from gspmd_models.rope_scaling import SCALINGS, RopeScaling
from gspmd_models.rotary import angles_at, cos_sin, turns


def drawn(kind: str, draw: np.random.Generator) -> tuple[ModelConfig, dict]:
    """A random model with a scaling, and the entries of transformers that say the same."""
    size = int(draw.choice([6, 8, 12, 24, 64, 128]))
    rotary = size if draw.random() < 0.5 else int(2 * draw.integers(2, size // 2 + 1))
    base, original = float(draw.choice([100.0, 1e4, 5e5])), int(draw.integers(3, 9000))
    factor = float(draw.uniform(1, 40))
    theirs = {"rope_type": kind, "rope_theta": base, "factor": factor, "partial_rotary_factor": rotary / size + 1e-9}
    ours = {"kind": kind, "factor": factor} | ({} if kind == "linear" else {"original_length": original})
    if kind in ("llama3", "yarn"):
        low, high = float(draw.uniform(0.5, 2)), float(draw.uniform(2.5, 40))
        ours |= {"low_frequency": low, "high_frequency": high}
        names = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
        theirs |= dict(zip(names, (low, high)))
    if kind == "yarn":
        ours["truncate"] = theirs["truncate"] = bool(draw.integers(2))
    if kind == "longrope":
        for which in ("short", "long"):
            ours[f"{which}_factors"] = tuple(draw.uniform(0.5, 9, rotary // 2).tolist())
            theirs[f"{which}_factor"] = list(ours[f"{which}_factors"])
    if kind in ("yarn", "longrope") and draw.integers(2):
        ours["attention_factor"] = theirs["attention_factor"] = float(draw.uniform(0.5, 2))
    theirs["original_max_position_embeddings"] = original
    config = ModelConfig(head_size=size, rotary_size=rotary, rope_base=base, rope_scaling=RopeScaling(**ours))
    return config, theirs


@pytest.mark.parametrize("kind", SCALINGS)
def test_angles_of_rows_of_several_lengths_are_those_of_each_length(kind):
    draw = np.random.default_rng(1)
    for _ in range(10):
        config, entries = drawn(kind, draw)
        original = entries["original_max_position_embeddings"]
        lengths = np.array([2, original, original + 1, 2 * original + 3])
        at = np.stack([np.linspace(0, length - 1, 5).astype(np.int32) for length in lengths])
        given = jnp.broadcast_to(jnp.asarray(lengths)[:, None], at.shape)
        found = angles_at(jnp.asarray(at), config, given)
        for row, length in enumerate(lengths):
            wanted = cos_sin(at[row], turns(config, int(length)))
            # Turns of dynamic scaling are rounded to float32.
            tolerance = 2e-6 + (4e-7 * length if kind == "dynamic" else 0)
            for got, exact in zip(found, wanted):
                np.testing.assert_allclose(got[row], exact[0], atol=tolerance)


def test_every_token_of_a_packed_row_has_the_length_of_its_text():
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 3, 3]])
    assert lengths_in(segments).tolist() == [[2, 2, 3, 3, 3, 1], [1, 1, 4, 4, 4, 4]]


def test_yarn_of_gpt_oss_is_as_published():
    scaling = RopeScaling("yarn", factor=32.0, original_length=4096, truncate=False)
    found = turns(ModelConfig(head_size=64, rope_base=150_000.0, rope_scaling=scaling))
    assert f"{found.factor:.4f}" == "1.3466"
    plain = 150_000.0 ** (-np.arange(32) / 32) / (2 * np.pi)
    # From pair 8.09 to pair 17.40 (32 turns and 1 turn in 4096 tokens), frequencies fall to a thirty-second.
    ramp = np.clip((np.arange(32) - 8.0928) / (17.3980 - 8.0928), 0, 1)
    np.testing.assert_allclose(found.per_position, plain * (1 - ramp * 31 / 32), rtol=1e-4)


def test_a_settings_file_gives_a_scaling():
    table = {"rope_scaling": {"kind": "longrope", "short_factors": [1.0, 2.0], "long_factors": [2.0, 4.0]}}
    config = from_mapping(ModelConfig, table | {"head_size": 4})
    assert config.rope_scaling == RopeScaling("longrope", short_factors=(1.0, 2.0), long_factors=(2.0, 4.0))
    assert RopeScaling("llama3").high_frequency == 4.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "ntk"}, "kind is 'ntk'; it must be one of llama3, linear, dynamic, yarn, longrope"),
        ({"kind": "linear", "truncate": False}, "linear scaling has no truncate (given: False); leave it out"),
        ({"kind": "linear", "factor": 0.0}, "factor is 0.0; it must be positive"),
        (
            {"kind": "yarn", "low_frequency": 4.0, "high_frequency": 1.0},
            "low_frequency is 4.0, and high_frequency is 1",
        ),
        ({"kind": "yarn", "attention_factor": -1.0}, "attention_factor is -1.0; it must be positive"),
        ({"kind": "longrope", "short_factors": (1.0,)}, "short_factors has length 1, and long_factors 0"),
        ({"kind": "longrope", "short_factors": (1.0,), "long_factors": (0.0,)}, "long_factors has 0.0; all of them"),
        ({"kind": "dynamic", "factor": 0.5}, "factor is 0.5; for dynamic it must be at least 1"),
        ({"kind": "dynamic", "original_length": 1}, "original_length is 1; it must be at least 2"),
    ],
)
def test_a_scaling_that_does_not_fit_is_refused(fields, words):
    with pytest.raises(ValueError, match="cannot scale rotary wavelengths") as error:
        RopeScaling(**fields)
    assert words in str(error.value)


def test_a_scaling_that_does_not_fit_its_model_is_refused():
    long = RopeScaling("longrope", short_factors=(1.0,) * 3, long_factors=(1.0,) * 3)
    with pytest.raises(ValueError, match="rope_scaling has 3 short_factors and long_factors, but a head has 8 rotated"):
        ModelConfig(rope_scaling=long)
    with pytest.raises(ValueError, match="a head has only one rotated pair"):
        ModelConfig(head_size=2, rope_scaling=RopeScaling("dynamic"))


def test_angles_are_refused_where_the_length_of_the_text_is_not_known():
    config = ModelConfig(rope_scaling=RopeScaling("dynamic"))
    with pytest.raises(AssertionError, match="dynamic scaling needs the length"):
        turns(config)
    with pytest.raises(AssertionError, match="dynamic scaling needs the lengths"):
        angles_at(jax.numpy.zeros((1, 1), "int32"), config)
