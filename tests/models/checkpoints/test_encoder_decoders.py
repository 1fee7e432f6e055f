"""Encoder–decoders of transformers give its logits in any layout, and come back to it."""

import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import gspmd_models as models
from gspmd_models.checkpoints import CheckpointError, load, model_config, save, tokenizer
from gspmd_models.checkpoints.config import described, known_entries
from tests.models.checkpoints.cases import ENCODER_DECODERS, LAYOUTS
from tests.models.checkpoints.conftest import close
from tests.models.checkpoints.test_entries import ABSENT, changes, form, placed

SOURCE, TARGET = 40, 38  # tokens, more than the distance beyond which all keys of T5 are in one bucket


@dataclass(frozen=True)
class Pairs:
    """A checkpoint that transformers has written, and what its own model makes of sources and targets.

    Attributes:
        directory: the checkpoint.
        inputs: the arguments of our model: tokens [B, L], source [B, T] and source_segments [B, T], 0 for padding.
        logits: [B, L, V].
        dropout: the share of the experts' outputs that training drops.
    """

    directory: Path
    inputs: dict[str, np.ndarray]
    logits: np.ndarray
    dropout: float = 0.0


def theirs(model: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Logits [B, L, V] of a model of transformers."""
    import torch

    ids, mask, tokens = (torch.tensor(inputs[name]) for name in ("source", "source_segments", "tokens"))
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens).logits.numpy()


@pytest.fixture(scope="session")
def pairs(transformers, tmp_path_factory):
    """A function (name of a case) -> its Pairs."""

    @functools.cache
    def make(name: str) -> Pairs:
        import torch

        kind, entries = ENCODER_DECODERS[name]
        config = getattr(transformers, f"{kind}Config")(**entries)
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
        if name.endswith("untied"):
            model.lm_head.weight = torch.nn.Parameter(torch.empty(50, 24))
        base = getattr(model, "model", model)
        with torch.no_grad():
            for path, value in model.named_parameters():
                one = 1.0 if path.endswith("norm.weight") else 0.0
                value.copy_(one + 0.25 * torch.randn_like(value))
            for stack in (base.encoder, base.decoder):
                stack.embed_tokens.weight.copy_(base.shared.weight)
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        draw = np.random.default_rng(0).integers
        inputs = {"tokens": draw(2, 50, (8, TARGET)), "source": draw(2, 50, (8, SOURCE))}
        inputs["source_segments"] = (np.arange(SOURCE) < SOURCE - 4 * np.arange(8)[:, None]).astype(np.int64)
        return Pairs(directory, inputs, theirs(model, inputs), getattr(config, "moe_token_dropout", 0.0))

    return make


def logits(model: models.Transformer, mesh: jax.sharding.Mesh, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Logits [B, L, V] of a placed model."""
    tokens = model.layout.spec("embedding.tokens")
    specs = {name: tokens if name == "tokens" else tokens.with_axes("L", ()) for name in inputs}
    placed = {
        name: jax.device_put(value.astype(np.int32), jax.NamedSharding(mesh, specs[name].partition_spec()))
        for name, value in inputs.items()
    }
    with jax.set_mesh(mesh):
        program = jax.jit(lambda weights, tokens, **more: models.with_arrays(model, weights)(tokens, **more)[0])
        return np.asarray(program(models.arrays(model), **placed))[..., : model.config.vocabulary]


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


#: Every case on one device and in three layouts on eight, but for these slow.
FAST = {
    "m2m-100": "weight-gathered-xy",
    "nllb-moe": "megatron-1d",
    "t5": "megatron-1d",
    "t5-1.1-untied": "replicated",
    "switch": "replicated",
}
PLACED = {"replicated": {}, **{name: padding | {"K": 4} for name, padding in LAYOUTS.items()}}


@pytest.mark.turns(1)
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        pytest.param(name, preset, marks=() if FAST.get(name) == preset else pytest.mark.slow)
        for name in ENCODER_DECODERS
        for preset in PLACED
    ],
)
def test_a_checkpoint_gives_the_logits_of_transformers_and_goes_back(
    name, preset, pairs, placing, from_folder, tmp_path
):
    wanted = pairs(name)
    layout, mesh = placing(preset, PLACED[preset])
    model, _ = load(wanted.directory, layout, mesh, "float32")
    close(logits(model, mesh, wanted.inputs), wanted.logits)
    save(model, tmp_path / "out", length=1024)
    close(theirs(from_folder(tmp_path / "out"), wanted.inputs), wanted.logits)
    assert model_config(tmp_path / "out") == model.config
    back = tensors(tmp_path / "out")
    for path, value in tensors(wanted.directory).items():
        factor = 24**0.5 if name == "t5-1.1-unscaled" and path == "decoder.final_layer_norm.weight" else 1.0
        if ".experts." in path and ".fc2." in path:  # times what is kept of the experts' outputs
            factor = 1 - wanted.dropout
        np.testing.assert_allclose(back[path], factor * value, rtol=1e-6, atol=0, err_msg=path)


def test_transformers_computes_nllb_by_two_experts(transformers, monkeypatch):
    """Once it computes by the chosen experts, `nllb_experts` in conftest.py and the note in the docs are not needed."""
    import torch
    from transformers.models.nllb_moe import modeling_nllb_moe as nllb

    entries = ENCODER_DECODERS["nllb-moe-fourth"][1]
    torch.manual_seed(0)
    layer, x = nllb.NllbMoeSparseMLP(transformers.NllbMoeConfig(**entries), 40).eval(), torch.randn(1, 7, 24)
    first, gates, _ = layer.router(x[0])
    expert = [layer.experts[f"expert_{number}"](x[0]) for number in range(2)]
    two = (gates * first).sum(1, keepdim=True) * expert[1] + (gates * (1 - first)).sum(1, keepdim=True) * expert[0]
    with monkeypatch.context() as patch:
        patch.setattr(nllb.NllbMoeExperts, "forward", nllb.NllbMoeExperts.forward.__wrapped__)
        found = layer(x)[0]
    chosen = layer(x)[0]
    assert (chosen - two).abs().max() > 0.1
    assert torch.allclose(found, two, atol=1e-5) or torch.allclose(found, chosen, atol=1e-5)


def test_an_encoder_has_no_table_of_its_own(pairs, placing, tmp_path):
    wanted, name = pairs("t5"), "encoder.embed_tokens.weight"
    values = tensors(wanted.directory)
    shutil.copy(wanted.directory / "config.json", tmp_path)
    save_file(values | {name: values["shared.weight"]}, tmp_path / "model.safetensors")
    model, _ = load(tmp_path, *placing("replicated"), "float32")
    assert "encoder.embedding.table" not in models.arrays(model)
    save_file(values | {name: values["shared.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, *placing("replicated"), "float32")
    assert error.value.faults == (f"{name} differs from shared.weight, but a model here has only one embedding table.",)


def test_the_tokenizer_of_t5_ends_a_source_as_in_transformers(transformers, tmp_path):
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁a", "▁cat", "c", "a", "t", "s"]
    vocabulary = [(piece, -float(at)) for at, piece in enumerate(pieces)] + [("<extra_id_0>", 0.0)]
    wanted = transformers.T5Tokenizer(vocab=vocabulary, extra_ids=1)
    wanted.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    text, ours = "a cat <extra_id_0> cats", tokenizer(tmp_path)
    assert ours.encode(text) == wanted(text).input_ids
    assert ours.encode(text)[-1:] == [1]
    assert (ours.ends, ours.begin) == ({1}, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset"),
    [("m2m-100", "replicated"), ("nllb-moe", "megatron-1d"), ("t5", "megatron-1d"), ("switch", "replicated")],
)
def test_greedy_text_is_that_of_transformers(name, preset, pairs, placing, from_folder):
    wanted, (layout, mesh), count = pairs(name), placing(preset, PLACED[preset]), 64 if name == "nllb-moe" else 24
    model, _ = load(wanted.directory, layout, mesh, "float32")
    inputs = {**wanted.inputs, "tokens": np.full((8, 1), model.config.start_token)}
    sources = [row[:length].tolist() for row, length in zip(inputs["source"], inputs["source_segments"].sum(1))]
    with jax.set_mesh(mesh):
        texts = models.Generator(model)(None, count, sources=sources, sampling=models.Sampling(temperature=0)).texts
    own = from_folder(wanted.directory)
    for _ in range(count):
        best = theirs(own, inputs)[:, -1:].argmax(-1)
        inputs["tokens"] = np.concatenate([inputs["tokens"], best], axis=1)
    assert texts == inputs["tokens"][:, 1:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m2m-100", "nllb-moe", "t5", "switch"])
def test_a_changed_entry_gives_the_logits_of_transformers_or_is_refused(name, pairs, placing, from_folder, tmp_path):
    wanted, (layout, mesh) = pairs(name), placing("replicated")
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
            got = wanted.logits
            if now != same:
                got = logits(load(folder, layout, mesh, "float32")[0], mesh, wanted.inputs)
        except CheckpointError:
            continue
        try:
            close(got, theirs(from_folder(folder), wanted.inputs))
        except AssertionError:
            faults.append(f"{placed(key, value)}: other logits")
        except Exception as error:  # transformers refuses: the entry changed nothing here, which is no loss
            faults += [] if now == same else [f"{placed(key, value)}: {type(error).__name__} {error}"]
    assert not faults, "\n".join(faults)
