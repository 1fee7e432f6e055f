"""Texts depend on their prompts, seeds and settings alone: not on the batch, chunks, bursts or layouts."""

import re
import weakref
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order

import gspmd_models as models
from gspmd import LayoutError
from gspmd.layouts import Layout
from gspmd.moe import MoEConfig
from gspmd_models.decoding import GenerationError, for_serving, make_batch
from tests.references.models import TINY

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [5, 4, 3, 2]]
CONFIG = replace(TINY, kv_heads=4)


class Machine:
    """A model of CONFIG, or of a changed one, in a layout on some devices, and its generator."""

    def __init__(self, preset, devices, prefill=None, changes=None, config=CONFIG, **options):
        layout = Layout.load(preset).override(changes or {})
        shape = layout.mesh_for(devices)
        self.mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), devices=jax.devices()[:devices])
        self.model = models.build(config, layout.resolved({}, self.mesh), self.mesh, jax.random.key(0))
        self.generator = models.Generator(self.model, layout, prefill and Layout.load(prefill), **options)

    def texts(self, prompts, tokens=6, **options):
        """The texts; a temperature is one of the options."""
        sampling = models.Sampling(temperature=options.pop("temperature", 1.0))
        with jax.set_mesh(self.mesh):
            return self.generator(prompts, tokens, sampling=sampling, **options).texts


@pytest.fixture(scope="module")
def alone():
    """One device."""
    return Machine("replicated", 1)


@pytest.fixture(scope="module")
def drawn(alone):
    """Two samples of each prompt, each read by itself, with the seeds 3 to 8."""
    return alone.texts([prompt for prompt in PROMPTS for _ in range(2)], seed=3)


def test_a_text_is_the_same_in_another_batch_layout_and_chunk(drawn):
    eight = Machine("weight-stationary-2d", 8, "weight-gathered-xyz", chunk=3, burst=2)
    assert eight.texts(PROMPTS, samples=2, seed=3) == drawn
    assert len({tuple(text) for text in drawn}) == len(drawn)


@pytest.mark.parametrize("layout", ["replicated", "weight-stationary-2d"])
def test_a_window_may_be_longer_than_all_texts(drawn, layout):
    """A cache then has room for fewer tokens than a window, and texts are those of attention to all tokens."""
    devices = 1 if layout == "replicated" else 8
    assert (
        Machine(layout, devices, config=replace(CONFIG, sliding_window=64)).texts(PROMPTS, samples=2, seed=3) == drawn
    )
    # Not stacked, so that both have the same weights: stacks of other layers would be drawn otherwise.
    both = {"sliding_window": 64, "layer_kinds": ("sliding", "full"), "stacked": False}
    full = {"layer_kinds": ("full", "full"), "stacked": False}
    with_window, without = (Machine(layout, devices, config=replace(CONFIG, **changes)) for changes in (both, full))
    assert with_window.texts(PROMPTS, seed=3) == without.texts(PROMPTS, seed=3)


def test_texts_reach_the_last_learned_position():
    """The chunk of a prompt is padded beyond the positions that there are, which is no text."""
    config = replace(CONFIG, positions="learned", context_length=19)
    texts = Machine("replicated", 1, config=config).texts([[1, 2] * 9], tokens=1)
    assert [len(text) for text in texts] == [1]


def test_a_shared_prompt_is_read_once_and_copied(alone, drawn):
    with jax.set_mesh(alone.mesh):
        assert alone.generator.batch(PROMPTS, 6, samples=2).sizes.prefill_rows == 3
    assert alone.texts(PROMPTS, samples=2, seed=3) == drawn


def test_greedy_tokens_are_those_of_full_passes(alone):
    text = PROMPTS[0] + alone.texts(PROMPTS[:1], tokens=5, temperature=0)[0]
    with jax.set_mesh(alone.mesh):
        logits = np.asarray(jax.jit(lambda ids: alone.model(ids)[0])(np.array([text], np.int32)))
    assert logits[0, 6:-1].argmax(axis=-1).tolist() == text[7:]


def test_a_stop_token_ends_a_text_and_so_does_the_caller(alone, drawn):
    """The rows beside it go on; what the caller ends is noticed one burst later."""
    stop, prompts = drawn[0][2], [prompt for prompt in PROMPTS for _ in range(2)]
    cut = [text[: text.index(stop)] if stop in text else text for text in drawn]
    alone.generator.burst = 2
    ended, found = set(), [[] for _ in drawn]
    with jax.set_mesh(alone.mesh):
        bursts = alone.generator.stream(prompts, 6, seed=3, stop=[stop], ended=ended)
        for burst in bursts:
            ended |= {5}
            found = [text + new for text, new in zip(found, burst.tokens)]
            last = burst
    assert found[:5] == cut[:5]
    assert found[5] == drawn[5][: len(found[5])]
    assert len(found[5]) < 6
    assert all(last.ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "prefill", "changes"),
    [
        ("megatron-1d", None, {"ffn.residual": "B_xL_yzE", "attention.residual": "B_xL_yzE"}),
        ("weight-stationary-2d", None, {"cache.attention.key": "B_xT_yzKD"}),
        ("zero-3", "data-parallel", {}),
        ("zero-3", None, {"prefill.attention.key": "BLKD", "decode.attention.key": "BLKD",
                          "cache.attention.key": "B_xyzTKD"}),
        ("weight-stationary-1d", "weight-gathered-xy", {"attention.query": ("B_xyzLHD", "B_yzLH_xD", "BLH_xyzD"),
                                                        "attention.key": ("B_xyzLKD", "B_yzLKD", "BLKD")}),
    ],
)  # fmt: skip
def test_texts_are_the_same_in_every_layout(preset, prefill, changes, drawn):
    machine = Machine(preset, 8, prefill, changes, chunk=4, burst=5)
    assert machine.texts(PROMPTS, samples=2, seed=3) == drawn
    machine.generator.chunk = 128  # a prompt of one chunk attends to itself alone
    assert machine.texts(PROMPTS, samples=2, seed=3) == drawn


@pytest.mark.slow
def test_experts_drop_nothing_whatever_the_batch():
    """Capacity for a quarter of the tokens in evaluation; decoded, a text is the same alone and in any batch."""
    moe = MoEConfig(router="gshard", evaluation_capacity_factor=0.25, groups=2)
    config = replace(CONFIG, moe=moe)
    texts = Machine("gshard", 8, config=config, chunk=2).texts(PROMPTS, samples=2, seed=3)
    alone = Machine("replicated", 1, config=config)
    assert [alone.texts([prompt], seed=3 + 2 * at)[0] for at, prompt in enumerate(PROMPTS)] == texts[::2]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt to continue; give at least one"),
        ([[]], {}, "cannot continue an empty prompt; give at least one token"),
        ([[1], []], {}, "cannot continue an empty prompt (prompt 2 of 2); give at least one token"),
        ([[1, 64]], {}, "token 64 is not in the model's vocabulary, 0 to 63"),
        ([[1]], {"tokens": 0}, "tokens is 0; it must be at least 1"),
        (
            [[1, 2]],
            {"tokens": 2**20},
            "a prompt of 2 tokens and 1048576 more need 1048577 positions, but there are at most 1048576; shorten them",
        ),
        ([[1]], {"samples": 0}, "samples is 0; it must be at least 1"),
        ([[1]], {"chunk": 0}, "chunk is 0; it must be at least 1"),
        (
            [[1, 2, 3]],
            {"cache_length": 2},
            "a prompt of 3 tokens and 5 more need a cache of 7 tokens, but it has room for 2; shorten them, or raise "
            "cache_length",
        ),
    ],
)
def test_what_cannot_be_continued_is_said(prompts, options, message, alone):
    given = {"tokens": 5} | options
    with pytest.raises(GenerationError) as error:
        make_batch(CONFIG, Layout.load("replicated"), None, alone.mesh, prompts, **given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "prompt", "tokens", "words"),
    [
        ({"context_length": 8}, 3, 5, ""),
        (
            {"context_length": 8}, 3, 6,
            "a prompt of 3 tokens and 6 more make a text of 9, but the model was made for at most 8",
        ),
        ({"sliding_window": 8}, 3, 70, ""),
    ],
)  # fmt: skip
def test_a_text_is_no_longer_than_the_model_is_right_for(changes, prompt, tokens, words, alone):
    config = replace(CONFIG, **changes)
    given = Layout.load("replicated"), None, alone.mesh, [[1], [1] * prompt]
    if not words:
        assert make_batch(config, *given, tokens).texts == 2
        return
    with pytest.raises(GenerationError, match=re.escape(words)):
        make_batch(config, *given, tokens)
    with jax.set_mesh(alone.mesh), pytest.raises(GenerationError, match=re.escape(words)):
        models.Generator(models.abstract(config, Layout.load("replicated"), alone.mesh)).batch(given[-1], tokens)


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (-1, "seed is -1; it must be at least 0"),
        (2**32 - 1, "seed is 4294967295, and the last of 4 texts has seed 4294967298; a seed must be less than 2**32"),
    ],
)
def test_seeds_that_would_be_those_of_other_texts_are_refused(seed, words, alone):
    with jax.set_mesh(alone.mesh), pytest.raises(GenerationError) as error:
        alone.generator.stream(PROMPTS[:2], 1, samples=2, seed=seed)
    assert str(error.value) == words


def test_settings_of_sampling_are_checked_together():
    with pytest.raises(GenerationError) as error:
        models.Sampling(temperature=-1, top_k=-1, top_p=0, min_p=2)
    assert str(error.value) == (
        "cannot sample:\n"
        "  temperature is -1; it must be a finite number that is not negative (0 takes the likeliest token)\n"
        "  top_k is -1; it must not be negative (0 keeps all tokens)\n"
        "  top_p is 0; it must be greater than 0, and at most 1 (1 keeps all tokens)\n"
        "  min_p is 2; it must be between 0 (all tokens) and 1"
    )


def test_a_temperature_by_which_logits_overflow_is_refused():
    with pytest.raises(GenerationError, match=r"temperature is 1e-37; logits divided by it may be more"):
        models.Sampling(temperature=1e-37)
    assert not models.Sampling(temperature=1e-30).greedy


def test_experts_that_choose_tokens_cannot_generate():
    config = replace(CONFIG, moe=MoEConfig(router="expert-choice"))
    with pytest.raises(GenerationError) as error:
        for_serving(config)
    assert str(error.value) == (
        "router expert-choice cannot generate text: its experts choose among all tokens of a group, so what it learned "
        "depends on tokens that are not generated yet. Train with another router to generate."
    )


def test_rows_are_the_fewest_that_the_mesh_divides(make_mesh):
    mesh, whole = make_mesh({"x": 2, "y": 2, "z": 2}), Layout.load("data-parallel")
    sizes = lambda layout, prompts, **options: make_batch(CONFIG, layout, None, mesh, prompts, 4, **options).sizes  # noqa: E731
    assert sizes(whole, PROMPTS).rows == 8
    assert sizes(whole, PROMPTS, samples=3).rows == 16
    queries, keys = ("B_xyzLHD", "B_yzLH_xD", "BLH_xyzD"), ("B_xyzLKD", "B_yzLKD", "BLKD")
    both = {"attention.query": queries, "attention.key": keys}
    of_phases = {f"{phase}.{key}": specs for phase in ("prefill", "decode") for key, specs in both.items()}
    several = Layout.load("weight-stationary-2d").override(of_phases)
    assert sizes(several, PROMPTS[:1]).rows == 1
    assert sizes(several, PROMPTS).decode["attention.query"] == "BLH_xyzD"
    assert sizes(several, PROMPTS, samples=4).decode["attention.query"] == "B_yzLH_xD"
    shared = sizes(several, PROMPTS[:1], samples=8)
    assert (shared.rows, shared.prefill_rows, shared.decode["attention.query"]) == (8, 8, "B_xyzLHD")
    long = sizes(several.override({"cache.attention.key": "BT_xyzKD"}), PROMPTS)
    assert (long.rows, long.room, long.chunk) == (3, 16, 16)
    short = sizes(several.override({"cache.attention.key": "BT_xyzKD"}), PROMPTS, samples=4)
    assert (short.rows, short.prefill_rows) == (12, 3)


def test_a_shared_prompt_takes_as_many_rows_as_the_mesh_divides(make_mesh):
    """One row for each part of the cache would be 4, which 8 devices do not divide in the prefill."""
    mesh = make_mesh({"x": 4, "y": 1, "z": 2})
    layouts = Layout.load("weight-stationary-2d"), Layout.load("weight-gathered-x")
    batch = make_batch(CONFIG, *layouts, mesh, [[1, 2, 3]], 4, samples=12)
    assert batch.sizes.rows >= 12
    assert batch.sizes.rows >= batch.sizes.prefill_rows


def test_few_programs_serve_all_lengths(alone):
    with jax.set_mesh(alone.mesh):
        found = {size: alone.generator.batch([[1] * size], 5).sizes for size in (4, 5, 6, 16, 33, 40)}
    assert {size: (sizes.chunk, sizes.room) for size, sizes in found.items()} == {
        4: (16, 16), 5: (16, 16), 6: (16, 16), 16: (16, 20), 33: (32, 40), 40: (40, 48),
    }  # fmt: skip


@pytest.fixture(scope="module")
def faulty(alone):
    """A function (changes of arrays by path, int8) -> a generator of the model of `alone` with them."""

    def make(changes, *, int8=False, dtype=None):
        values = {path: changes.get(path, lambda x: x)(x) for path, x in models.arrays(alone.model).items()}
        model = models.with_arrays(alone.model, values)
        with jax.set_mesh(alone.mesh):
            return models.Generator(models.quantize(model) if int8 else model, burst=4)

    return make


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_an_error_that_names_them(value, int8, temperature, faulty, alone):
    """The scale of an int8 channel keeps what is not finite, since rounded weights would look sound."""
    weight = "blocks.0.ffn.w_out"
    generate = faulty({weight: lambda x: x.at[1, 2, 3].set(value)}, int8=int8)
    with jax.set_mesh(alone.mesh), pytest.raises(GenerationError) as error:
        generate(PROMPTS, 6, sampling=models.Sampling(temperature=temperature))
    assert str(error.value) == (
        "cannot continue text 1 after 0 new tokens: the model's logits are NaN.\n"
        f"  {weight.replace('w_', 's_') if int8 else weight} has NaN or infinity: "
        "use a model whose weights are finite."
    )


def test_tokens_before_the_one_that_cannot_be_drawn_are_given():
    """The embedding of one token is NaN, which the first text comes to after some others, and no other text does."""
    machine = Machine("replicated", 1, config=replace(CONFIG, tied=False), burst=4)
    texts = machine.texts(PROMPTS, 12)
    others = {token for given in (*PROMPTS, *texts[1:]) for token in given}
    at = next(at for at, token in enumerate(texts[0]) if at > 1 and token not in {*others, *texts[0][:at]})
    values = models.arrays(machine.model)
    values["embedding.table"] = values["embedding.table"].at[texts[0][at]].set(np.nan)
    machine.generator.model, bursts = models.with_arrays(machine.model, values), []
    with jax.set_mesh(machine.mesh), pytest.raises(GenerationError) as error:
        bursts.extend(machine.generator.stream(PROMPTS, 12))
    assert not any(burst.ended[0] for burst in bursts)
    found = [[token for burst in bursts for token in burst.tokens[text]] for text in range(3)]
    assert found[0] == texts[0][: at + 1]
    assert [text[: len(part)] for text, part in zip(texts, found)] == found
    assert str(error.value).startswith(f"cannot continue text 1 after {at + 1} new tokens: the model's logits are NaN")
    assert "embedding.table has NaN or infinity" in str(error.value)


def test_finite_weights_whose_products_overflow_are_an_error_too(faulty, alone):
    generate = faulty({path: lambda x: x * 1e38 for path in ("blocks.0.ffn.w_in", "blocks.0.ffn.w_gate")})
    with jax.set_mesh(alone.mesh), pytest.raises(GenerationError) as error:
        generate(PROMPTS[:1], 6)
    assert str(error.value).endswith(
        "\n  Its weights are finite, so the NaN comes from computing in float32: check the model."
    )


def test_a_layout_that_pads_otherwise_is_refused(alone):
    layout = alone.model.layout.override({"padding.F": 96})
    with jax.set_mesh(alone.mesh), pytest.raises(LayoutError, match="would have different shapes"):
        models.Generator(alone.model, layout)([[1, 2]], 2)


@pytest.mark.slow
def test_weights_are_held_once_in_the_order_that_the_compiler_chose(drawn, monkeypatch):
    """Pretend that it chose transposed query projections: no text changes, and no weight is left behind.

    Every program is compiled once, and a second batch moves nothing.
    """
    compiled, original = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args: compiled.append(args) or original(*args))

    def turned(weights):
        orders = {path: Order((0, 2, 1, 3)) if path.endswith("w_q") else Order.AUTO for path in weights}
        return {path: Format(orders[path], x.sharding) for path, x in weights.items()}

    monkeypatch.setattr("gspmd_models.decoding.generator.any_order", turned)
    machine = Machine("megatron-1d", 2, chunk=3)
    before = {path: weakref.ref(x) for path, x in models.arrays(machine.model).items()}
    machine.model = None
    assert machine.texts(PROMPTS, samples=2, seed=3) == drawn
    after = models.arrays(machine.generator.model)
    kept = {path: before[path]() is x for path, x in after.items()}
    assert [path for path in kept if not kept[path]] == ["blocks.0.attention.w_q"]
    assert before["blocks.0.attention.w_q"]() is None
    weight = after["blocks.0.attention.w_q"]
    assert weight.format.layout.major_to_minor == (0, 2, 1, 3)
    assert len(compiled) == 4  # an empty cache, a chunk, the copy of shared prompts, the loop
    machine.texts(PROMPTS, samples=2, seed=4)
    assert len(compiled) == 4
    assert models.arrays(machine.generator.model)["blocks.0.attention.w_q"] is weight
