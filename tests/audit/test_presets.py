"""Planned is compiled for a training step of every preset, which sends what it sent before."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from gspmd.annotate import LayoutError
from gspmd.layouts import Layout, presets
from gspmd.moe import MoEConfig
from gspmd_models.config import LatentConfig
from tests.audit import golden, steps

UNEXPLAINED = ("rewritten", "gone", "the compiler's choice", "not planned")

TOP2, ONEHOT = MoEConfig(experts=8, router="gshard"), MoEConfig(experts=8, dispatch="onehot", groups=16)
MODELS = [
    {"block": "parallel"},
    {"block": "parallel", "activation": "gelu", "moe": None},
    {"layers": 2},  # one repeat: the compiler unrolls the loop, and nothing is recomputed
    {"layers": 2, "block": "parallel", "moe": TOP2},
    {"activation": "gelu", "tied": False},
    {"kv_heads": 2, "moe": TOP2},
    {"kv_heads": 1, "block": "parallel"},
    {"kv_heads": 4, "tied": False, "moe": None},
    {"moe": ONEHOT, "activation": "relu"},
    {"remat": False, "moe": replace(TOP2, every=1)},
    {"remat": False, "block": "parallel", "tied": False, "kv_heads": 4},
]
# A pipeline takes as long to compile as all others.
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "pipeline" else name for name in presets()]
MESHES = [(2, 2, 2), (4, 2, 1), (8, 1, 1)]


@cache
def built(name):
    """The step that both tests of a preset look at, compiled once."""
    return steps.training(name)


def hold(step):
    """Planned and compiled bytes by kind and axes are equal, and every step is there as it was planned."""
    comparison = step.ledger.compare(step.plan)
    planned, compiled = step.plan.by_kind_and_axes(), step.ledger.by_kind_and_axes()
    assert {key: sent for key, (_, sent) in compiled.items()} == {k: sent for k, (_, sent) in planned.items() if sent}
    assert comparison.agrees
    assert {verdict: comparison[verdict] for verdict in UNEXPLAINED} == dict.fromkeys(UNEXPLAINED, ())
    assert not step.ledger.notes


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_planned_is_compiled(name):
    hold(built(name))


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", NAMES)
def test_golden_ledger(name):
    assert not (difference := golden.difference(name, built(name).ledger)), difference


def test_every_preset_has_a_golden_ledger_and_nothing_else_does():
    assert {path.stem for path in golden.GOLDEN.iterdir()} == set(presets())


def test_a_changed_ledger_is_shown_line_by_line_with_the_command_that_rewrites_it():
    ledger = built("gshard").ledger
    fewer = replace(ledger, entries=tuple(entry for entry in ledger.entries if entry.kind != "all-to-all"))
    shown = golden.difference("gshard", fewer)
    assert "python -m tests.audit.golden\n" in shown
    assert "-all-to-all" in shown
    assert "+all-to-all" not in shown


def test_moved_lines_of_code_change_no_golden_ledger():
    ledger = built("gshard").ledger
    moved = replace(ledger, entries=tuple(replace(entry, source="elsewhere.py:7") for entry in ledger.entries))
    assert golden.text(moved) == golden.text(ledger)


def fitting(name, mesh, first):
    """The first of the models, from a given one on, that a preset can place on a mesh, and its number; None if none."""
    for number in (*range(first, len(MODELS)), *range(first)):
        config = replace(steps.SMALL, **MODELS[number])
        try:
            Layout.load(name).check(config.sizes(steps.BATCH, steps.LENGTH), mesh)
        except LayoutError:
            continue
        return number, config
    return None


def cases():
    """Every preset on every mesh, the models and the types of axes in turn; a pipeline needs another axis."""
    names = [name for name in presets() if name != "pipeline"]
    for at, (number, name) in product(range(len(MESHES)), enumerate(names)):
        mesh, kind = dict(zip("xyz", MESHES[at])), tuple(steps.AXIS_TYPES)[(at + number) % 2]
        if found := fitting(name, mesh, (at + number * len(MESHES)) % len(MODELS)):
            model, config = found
            yield pytest.param(
                name, config, mesh, kind, id=f"{name}-{'x'.join(map(str, MESHES[at]))}-{kind}-model{model}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "mesh", "kind"), list(cases()))
def test_what_is_planned_is_compiled_for_other_models_and_meshes(name, config, mesh, kind):
    hold(steps.training(name, config, mesh=mesh, axis_type=kind))


PAIRED = {"block": "parallel", "parallel_norms": 2, "norm": "layer", "norm_bias": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("weight-stationary-2d", {"moe": None, "activation": "gelu", "kv_heads": 1}),
        ("megatron-1d", {"moe": None, "tied": False}),
        ("weight-gathered-xyz", {"moe": None, "qkv_bias": True, "ffn_bias": True}),
        ("gshard", {"moe": replace(TOP2, every=2)}),
    ],
)
def test_what_is_planned_is_compiled_for_parallel_blocks_with_two_norms(name, changes):
    hold(steps.training(name, replace(steps.SMALL, **PAIRED, **changes)))


LATENT = {"head_size": 16, "latent": LatentConfig(rank=24, query_rank=16, rotary=8, values=8), "moe": None}
KINDS = {"layer_kinds": ("sliding", "full"), "sliding_window": 5, "local_rope_base": 100.0, "moe": None}

CHUNKS = {
    "layer_kinds": ("chunked", "unrotated"), "attention_chunk": 5, "qk_norm": "rotated", "query_growth": 0.5,
    "growth_interval": 4, "moe": None,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "lowering"),
    [
        ("weight-stationary-2d", LATENT, "blocking"),
        ("megatron-1d", {**LATENT, "latent": replace(LATENT["latent"], query_rank=0), "remat": False}, "blocking"),
        ("context-parallel", LATENT, "blocking"),
        ("weight-gathered-xyz", {**LATENT, "norms": "both"}, "blocking"),
        ("zero-3", {**KINDS, "qk_norm": "all", "norms": "after"}, "blocking"),
        ("megatron-sequence", {**KINDS, "qk_norm": "all", "norms": "both", "sinks": True}, "looped"),
        ("weight-stationary-2d", {**KINDS, "score_softcap": 3.0, "logit_softcap": 5.0, "sinks": True}, "blocking"),
        ("context-parallel", {**KINDS, "layer_kinds": ("sliding", "unrotated"), "local_rope_base": None}, "blocking"),
        ("context-parallel", CHUNKS, "looped"),
        ("weight-stationary-2d", CHUNKS, "blocking"),
        ("data-parallel", {"positions": "learned", "context_length": 64, "moe": None}, "blocking"),
        ("weight-gathered-xy", {"positions": "alibi", "embedding_norm": True, "moe": None}, "blocking"),
        ("gshard", {"layer_kinds": ("full", "unrotated"), "norms": "after"}, "blocking"),
    ],
)
def test_what_is_planned_is_compiled_for_kinds_of_attention(name, changes, lowering):
    hold(steps.training(name, replace(steps.SMALL, **changes), lowering=lowering))
