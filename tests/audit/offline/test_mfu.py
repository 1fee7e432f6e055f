"""The arithmetic of benchmarks/mfu.py against MaxText's definition and its published logs."""

import re
from importlib import import_module
from math import prod
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def mfu(benchmarks):
    """benchmarks/mfu.py as a module."""
    return import_module("mfu")


@pytest.mark.parametrize(
    ("run", "causal", "teraflops", "tokens"),
    [
        ("mixtral-8x7b-v6e", False, 302.311, 3645.203),
        ("llama-3.1-405b-v6e", False, 392.454, 149.482),
        ("llama-3.1-405b-v5p", True, 314.530, 124.618),
    ],
)
def test_flops_of_a_token_are_those_of_published_logs(mfu, run, causal, teraflops, tokens):
    """Lines `TFLOP/s/device: ..., Tokens/s/device: ...` of the READMEs of tpu-recipes, to the last digit printed."""
    config, length = mfu.config_of(mfu.RUNS[run]), mfu.RUNS[run].length
    assert mfu.flops_per_token(config, length, causal) == pytest.approx(teraflops * 1e12 / tokens, rel=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_a_step_are_those_of_maxtext(mfu, causal):
    """`calculate_tflops_training_per_device`, written out: products forward, times three for both passes."""
    run = mfu.RUNS["mixtral-8x7b-v6e"]
    config, rows, length = mfu.config_of(run), run.rows, run.length
    wide, narrow = config.heads * config.head_size, config.kv_heads * config.head_size
    tokens, scores = rows * length, 4 * rows * length**2 * wide
    experts = 2 * tokens * config.embed * (config.moe.experts + 3 * 2 * config.feed_forward)  # the router, and k = 2
    attention = 2 * tokens * config.embed * (2 * wide + 2 * narrow) + (scores / 2 if causal else scores)
    forward = config.layers * (experts + attention) + 2 * tokens * config.embed * config.vocabulary
    found = mfu.mfu(config, length, tokens / 13.484, 918e12, causal)  # a step of 13.484 s
    assert found == pytest.approx(3 * forward / 13.484 / 918e12, rel=1e-9)


def test_commands_are_the_ones_that_are_compiled(mfu):
    """Chips, batch and length of every run, as `gspmd compile` reads them from the command that the page shows."""
    for run in mfu.RUNS.values():
        settings = mfu.settings_of(run)
        assert (settings.phase, settings.batch, settings.length) == ("train", run.chips * run.rows, run.length)
        target = mfu.topology(settings.topology)
        assert prod(target.shape) == run.chips
        assert target.num_devices == mfu.command.mesh_of(settings, target).devices.size


def test_planned_bytes_follow_korthikanti(mfu):
    """Parameters, gradients and Adam's state on one device of t · p, and what selective recomputation keeps."""
    model = import_module("megatron_memory").Megatron(layers=4, hidden=256, heads=8, tensor=4, stages=2, microbatches=8)
    found, (parameters, activations) = mfu.planned_bytes(model), mfu.formulas(model)
    assert found["state"] == pytest.approx(parameters, rel=0.02)  # norms and biases are on all of t
    assert found["selective"] == pytest.approx(activations, rel=0.02)  # two statistics of norms in float32


def test_the_lines_that_the_page_names_compute_what_it_says():
    root = Path(__file__).parents[3]
    # Instructions that are no products may have any line, such as that of the loop over layers.
    named = set(re.findall(r"(?<!other of )`(\w+\.py):(\d+)`", (root / "docs" / "mfu.md").read_text()))
    assert len(named) >= 6
    for file, line in named:
        text = (root / "models" / file).read_text().splitlines()[int(line) - 1]
        assert re.search(r"\b(einsum|attention|expert_layer)\(", text), (
            f"docs/mfu.md names {file}:{line}: {text.strip()}"
        )
