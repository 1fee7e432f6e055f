"""Beam search of decoder-only models: the texts of whole passes, whatever the layout, and what it is not given with."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd
import gspmd_models as models
from gspmd.annotate import Spec
from gspmd_models.decoding import GenerationError
from gspmd_models.decoding.beams import check_beams, likeliest
from tests.models.decoding import whole
from tests.models.decoding.whole import Machine

DECODER = replace(
    whole.TRANSLATOR, encoder_layers=0, start_token=0, positions="rotary", position_offset=0, norm="rms",
    norm_bias=False,
)  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [5, 4, 3, 2]]
STOP = (57, 16)


@pytest.fixture(scope="module")
def alone():
    """One device."""
    return Machine(DECODER, chunk=4, burst=3)


@pytest.mark.parametrize("penalty", [1.0, pytest.param(-2.0, marks=pytest.mark.slow)])
def test_beams_find_the_texts_of_whole_passes(penalty, alone):
    """Texts have different lengths: stop tokens end some, and searches end at different steps."""
    texts = alone.texts(PROMPTS, 12, beams=4, stop=STOP, length_penalty=penalty)
    assert texts == [whole.search(DECODER, prompt, 12, 4, None, STOP, penalty) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("weight-stationary-2d", {}),
        pytest.param("megatron-1d", {"cache.attention.key": "B_xT_yzKD"}, marks=pytest.mark.slow),
        pytest.param("zero-3", {}, marks=pytest.mark.slow),
    ],
)
def test_beams_of_a_text_lie_on_one_device(preset, changes, alone):
    """Three beams, which no number of devices divides: rows are added until each device has whole groups of them."""
    machine = Machine(DECODER, preset, 8, changes=changes)
    with jax.set_mesh(machine.mesh):
        sizes = machine.generator.batch(PROMPTS, 12, beams=3).sizes
        where = machine.generator.abstract_cache(sizes, sizes.rows).keys[0]
    assert where.sharding.shard_shape(where.shape)[1] % 3 == 0
    assert machine.texts(PROMPTS, 12, beams=3, stop=STOP) == alone.texts(PROMPTS, 12, beams=3, stop=STOP)


@pytest.mark.parametrize(("spec", "count"), [("B_xV_yz", 5), ("BV_xyz", 12)])
def test_the_likeliest_tokens_are_found_without_gathering_the_logits(spec, count, make_mesh):
    """Parts of 8 tokens have fewer than 12. Of n parts, n · (count + 1) and n · count numbers of a row are gathered."""
    mesh = make_mesh({"x": 2, "y": 2, "z": 2})
    logits = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    logits[0, 40:44] = 9.0  # ties
    with jax.set_mesh(mesh), gspmd.lowering("blocking"):
        run = jax.jit(lambda x: likeliest(x, Spec.parse(spec), count))
        placed = gspmd.annotate(logits, spec)
        plan, ledger = gspmd.trace(run, placed), gspmd.ledger(run.lower(placed).compile(), mesh)
        found, tokens = map(np.asarray, run(placed))
    assert ledger.compare(plan).agrees
    assert ledger.wire_bytes == plan.wire_bytes < 4 * logits.size * 7 // 8 * (1 if count < 8 else 4)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(tokens, order)
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(jnp.asarray(logits))), order, axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_logits_that_are_no_numbers_are_an_error(alone):
    values = dict(models.arrays(alone.model))
    values["blocks.0.ffn.w_out"] = values["blocks.0.ffn.w_out"].at[0, 1, 2].set(np.nan)
    with (
        jax.set_mesh(alone.mesh),
        pytest.raises(GenerationError, match=r"search text 1 with beams: .*\n.*w_out has NaN or"),
    ):
        models.Generator(models.with_arrays(alone.model, values))(PROMPTS, 4, beams=2)


def test_what_does_not_go_with_beams_is_said_together(alone):
    with jax.set_mesh(alone.mesh), pytest.raises(GenerationError) as error:
        alone.generator(PROMPTS, 4, beams=65, samples=2, seed=1, length_penalty=float("nan"), n_best=9)
    assert str(error.value) == (
        "cannot search with beams:\n"
        "  beams is 65; it must be from 0 to 64 (0 draws tokens instead)\n"
        "  length_penalty is nan; it must be a finite number\n"
        "  samples is 2, but beam search draws no samples; set n_best for more texts of a prompt\n"
        "  sampling is set, but beam search draws no tokens; leave out sampling and seed"
    )
    with pytest.raises(
        GenerationError, match=r"length_penalty is 2\.0, but there are no beams; set beams, or leave it"
    ):
        check_beams(0, 2.0, 1, False, 64, 0)
    with pytest.raises(GenerationError, match=r"n_best is 3; it must be at least 1, and at most beams \(2\)"):
        check_beams(2, 1.0, 1, False, 64, 0, 3)
    with pytest.raises(GenerationError, match="n_best is 2, but there are no beams; set beams, or samples to draw"):
        check_beams(0, 1.0, 1, False, 64, 0, 2)
    with pytest.raises(GenerationError, match="all 2 tokens of the vocabulary end a text; at least one must continue"):
        check_beams(2, 1.0, 1, False, 2, 2)


@pytest.mark.slow
def test_a_step_reorders_the_cache_in_place():
    """With 8 layers, temporaries grow by one of them, as in a decode step on CPUs."""
    machine = Machine(replace(DECODER, layers=8, head_size=64), "weight-stationary-2d", 8)
    found = []
    with jax.set_mesh(machine.mesh):
        for room in (64, 1024):
            sizes = machine.generator.batch(PROMPTS[:2], 12, beams=4, cache_length=room).sizes
            memory = machine.generator._beams(sizes, 4, 1.0, (2,), 16).memory_analysis()
            found.append((memory.temp_size_in_bytes, memory.alias_size_in_bytes))
    (small, short), (large, long) = found
    assert large - small < (long - short) / 4
