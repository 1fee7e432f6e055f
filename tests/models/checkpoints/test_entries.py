"""Entries of each family's config.json, changed one by one: the logits of transformers, or a refusal."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from gspmd_models.checkpoints import CheckpointError, load, model_config
from gspmd_models.checkpoints.config import described, known_entries, written
from gspmd_models.checkpoints.families import FAMILIES
from gspmd_models.checkpoints.families.entries import IGNORED, INACTIVE
from tests.models.checkpoints.cases import FIRST, LENGTH
from tests.models.checkpoints.conftest import close, logits_of
from tests.models.checkpoints.published import PUBLISHED

ABSENT = object()

#: Entries that some family or some release has, which are set where a file has none of them.
ADDED: dict[str, list[Any]] = {
    "is_causal": [True, False, None],
    "use_bidirectional_attention": [True, False],
    "sliding_window": [None, 4, 7, 64],
    "use_sliding_window": [True, False],
    "layer_types": [
        *(["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention", "sliding_attention"]),
        *(["full_attention"] * 4, ["chunked_attention"] * 3 + ["full_attention"]),
        *(["chunked_attention"] * 4, ["chunked_attention", "full_attention"] * 2),
    ],
    "max_window_layers": [0, 28],
    "attention_chunk_size": [None, 2, 4, 64],
    "no_rope_layers": [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]],
    "moe_layers": [[0, 2], [3], [0], [0, 1, 2, 3], [3, 1], [1, 2]],
    "interleave_moe_layer_step": [1, 4],
    "rope_theta": [200.0, "1", 0],
    "rope_scaling": [
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "default"},
        {"rope_type": "default", "rope_theta": 200.0, "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"full_attention": {"rope_type": "default", "rope_theta": 200.0}},
    ],
    "partial_rotary_factor": [0.5, 0.25, 1.0, 0.01],
    "original_max_position_embeddings": [4, 64],
    "head_dim": [4, 8, None],
    "hidden_activation": ["gelu", "relu", None],
    "num_experts": [5, 4],
    "num_local_experts": [5, 4],
    "logit_scale": [0.5, 1.0],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "use_qk_norm": [True, False],
    "qk_layernorm": [True, False],
    "tie_word_embeddings": [True, False],
    "hidden_size": [24, 48, 96],
    "n_inner": [40, 20],
    "pruned_heads": [{}, {"0": [1]}],
    "per_layer_config": [None, {"0": {"hidden_act": "relu"}}],
    "quantization_config": [None, {"quant_method": "gptq", "bits": 4}],
    "model_type": ["llama", "bloom"],
    "num_hidden_layers": [1],
    "attention_multiplier": [0.5, 1],
    "residual_multiplier": [0.5],
    "embedding_multiplier": [2],
    "logits_scaling": [2.0],
    "use_parallel_residual": [True, False],
    "use_qkv_bias": [True, False],
    "rotary_pct": [0.5, 1.0],
    "rotary_emb_base": [200.0],
    "new_decoder_architecture": [True, False],
    "multi_query": [True, False],
    "parallel_attn": [False],
    "alibi": [True],
    "bias": [True],
    "num_kv_heads": [12, 3],
    "num_ln_in_parallel_attn": [1, 2, 3],
    "pretraining_tp": [2],
    "router_jitter_noise": [0.5],
    "decoder_sparse_step": [2, 3],
    "mlp_only_layers": [[0], [0, 1], [7]],
    "first_k_dense_replace": [2],
}

WRONG: tuple[Any, ...] = (ABSENT, None, "x", -1, 0, 1.5, True, False, [], {}, [1])


def changes(entries: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every entry with every wrong value and some other right ones, and the entries that the file does not have."""
    for key, value in entries.items():
        if key in ("architectures", "dtype", "transformers_version"):  # architectures are in test_config
            continue
        others = [2 * value, value // 2] if isinstance(value, int) and not isinstance(value, bool) else []
        others += [2 * value] if isinstance(value, float) else []
        others += [not value] if isinstance(value, bool) else []
        others += ["silu", "swish", "gelu", "gelu_new", "gelu_fast", "relu"] if "act" in key else []
        for other in (*WRONG, *others, *ADDED.get(key, [])):
            if type(other) is int and isinstance(value, float):  # which transformers would refuse for its type
                other = float(other)
            if type(other) is not type(value) or other != value:
                yield key, other
        if isinstance(value, dict):
            yield from ((key, value | {inner: other}) for inner in value for other in (None, "x", 0, 2.5))
            yield from ((key, {name: value[name] for name in value if name != inner}) for inner in value)
    yield from ((key, value) for key, values in ADDED.items() if key not in entries for value in values)


FULL, SLIDING = "full_attention", "sliding_attention"
SWITCHED = [
    {"use_sliding_window": switch, "sliding_window": size, **layers}
    for switch in (True, False)
    for size in (3, LENGTH, None)
    for layers in ({}, {"max_window_layers": 0}, {"max_window_layers": 1}, {"max_window_layers": 2})
]
NAMED = [
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": first, "layer_types": kinds}
    for first in (0, 28)
    for kinds in ([FULL] * 2, [SLIDING] * 2, [FULL, SLIDING])
]
ALWAYS = [
    {"sliding_window": size, **others}
    for size in (3, LENGTH, None)
    for others in ({}, {"use_sliding_window": False}, {"max_window_layers": 28}, {"layer_types": [FULL] * 2})
]

#: Name of a case to the entries of its sliding window, together.
WINDOWS = {
    "mistral": ALWAYS,
    "mixtral": ALWAYS,
    "ministral": [
        {"sliding_window": size, **kinds}
        for size in (3, LENGTH)
        for kinds in ({}, {"layer_types": [FULL] * 3}, {"layer_types": [SLIDING, FULL, FULL]})
    ],
    "phi3": ALWAYS,
    "starcoder2": ALWAYS,
    "qwen2": SWITCHED + NAMED,
    "qwen3": SWITCHED + NAMED,
    "qwen3-moe": SWITCHED,
}


def placed(name: str, value: Any) -> str:
    return f"{name}={'absent' if value is ABSENT else json.dumps(value)}"


def ours(folder: Path, placing, tokens: np.ndarray) -> np.ndarray:
    """Our logits of a checkpoint, on one device."""
    layout, mesh = placing("replicated")
    model, _ = load(folder, layout, mesh, "float32")
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(model)(tokens.astype(np.int32))[0])[..., : model.config.vocabulary]


def form(folder: Path) -> tuple:
    """All that the logits of a short text depend on beside the tensors."""
    found = described(folder)
    config = found.config
    if config.positions != "learned":
        config = dataclasses.replace(config, context_length=None)
    return found.family.title, config, tuple(found.factors.items())


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "with images" not in name])
def test_a_changed_entry_is_read_or_is_one_message(name, tmp_path):
    entries = PUBLISHED[name][0]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    found = described(tmp_path)
    refused = []
    for key, value in changes(written(found.family, found.config, 4096, "bfloat16")):
        changed = {name: other for name, other in {**entries, key: value}.items() if other is not ABSENT}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        try:
            model_config(tmp_path)
        except CheckpointError as error:
            refused += [key for fault in error.faults if key in fault]
    assert {found.family.options["embed"].keys[0], "tie_word_embeddings", "is_causal"} <= {*refused}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_what_a_family_reads_is_not_called_ignored(family):
    read = {key for option in family.options.values() for key in option.keys} | {*family.length, *family.inactive}
    assert not read & {*IGNORED, *family.ignored_entries, *INACTIVE}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_a_changed_entry_gives_the_logits_of_transformers_or_is_refused(
    name, reference, placing, from_folder, tmp_path
):
    wanted = reference(name)
    folder = tmp_path / "changed"
    shutil.copytree(wanted.directory, folder)
    entries = json.loads((folder / "config.json").read_text())
    same, faults = form(folder), []
    assert not entries.keys() - known_entries(described(folder).family)
    for key, value in changes(entries):
        changed = {name: other for name, other in {**entries, key: value}.items() if other is not ABSENT}
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            now = form(folder)
            got = wanted.logits if now == same else ours(folder, placing, wanted.tokens)
        except CheckpointError:
            continue
        try:
            theirs = logits_of(from_folder(folder), wanted.tokens)
        except Exception as error:  # transformers refuses: the entry changed nothing here, which is no loss
            faults += [] if now == same else [f"{placed(key, value)}: {type(error).__name__} {error}"]
            continue
        try:
            close(got, theirs)
        except AssertionError:
            faults.append(f"{placed(key, value)}: other logits")
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_transformers(name, reference, placing, from_folder, tmp_path):
    wanted, folder = reference(name), tmp_path / "changed"
    shutil.copytree(wanted.directory, folder)
    kept = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in kept.items() if key not in ("layer_types", "max_window_layers")}
    seen = {}
    for entries in WINDOWS[name]:
        (folder / "config.json").write_text(json.dumps(kept | entries))
        config = model_config(folder)
        kinds = tuple(map(config.layer_kind, range(config.layers))), config.sliding_window
        if kinds not in seen:
            seen[kinds] = ours(folder, placing, wanted.tokens)
        close(seen[kinds], logits_of(from_folder(folder), wanted.tokens))
    assert max(np.abs(got - wanted.logits).max() for got in seen.values()) > 1e-2, "no window changes anything"
