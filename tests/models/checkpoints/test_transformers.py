"""Checkpoints of transformers give its logits in any layout, its greedy text, and come back to it."""

import inspect
from dataclasses import replace

import jax
import numpy as np
import pytest

import gspmd_models as models
from gspmd.moe.config import MoEConfig
from gspmd_models.checkpoints import load, save
from tests.models.checkpoints.cases import CASES, DECODED, FIRST, LAYOUTS, LENGTH
from tests.models.checkpoints.conftest import close, logits_of
from tests.models.checkpoints.small import tensors, write


def logits(model: models.Transformer, mesh: jax.sharding.Mesh, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, L, V] of a placed model."""
    spec = model.layout.spec("embedding.tokens").partition_spec()
    ids = jax.device_put(tokens.astype(np.int32), jax.sharding.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda weights, ids: models.with_arrays(model, weights)(ids)[0])
        return np.asarray(program(models.arrays(model), ids))[..., : model.config.vocabulary]


@pytest.mark.turns(5)
@pytest.mark.parametrize(("name", "preset"), FIRST.items())
def test_a_checkpoint_of_each_family_gives_the_logits_of_transformers_and_goes_back(
    name, preset, reference, placing, from_folder, tmp_path
):
    wanted = reference(name)
    layout, mesh = placing(preset, LAYOUTS.get(preset))
    model, _ = load(wanted.directory, layout, mesh, "float32")
    close(logits(model, mesh, wanted.tokens), wanted.logits)
    save(model, tmp_path / "out")
    close(logits_of(from_folder(tmp_path / "out"), wanted.tokens), wanted.logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_in_bfloat16_a_checkpoint_is_as_near_to_transformers_as_that_rounds(name, reference, placing, from_folder):
    """Within 2% of the logits in float32, or nearer to them than transformers in bfloat16, by root mean square.

    With experts, two scores that round to one send a token to another expert here or there, by luck.
    """
    wanted = reference(name)
    layout, mesh = placing("replicated")
    model, _ = load(wanted.directory, layout, mesh, "bfloat16")
    theirs = logits_of(from_folder(wanted.directory).bfloat16(), wanted.tokens)
    size = lambda x: float(np.sqrt(np.mean(np.square(x))))  # noqa: E731
    ours, other = (size(each - wanted.logits) for each in (logits(model, mesh, wanted.tokens), theirs))
    assert ours <= (1.2 if model.config.moe is None else 2) * other
    if model.config.moe is None:
        assert ours <= max(2e-2 * size(wanted.logits), other)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [3, 6, 8])
def test_alibi_of_falcon_is_that_of_transformers(heads, transformers, placing, from_folder, monkeypatch, tmp_path):
    """With its own biases, which it rounds to bfloat16: those of up to 8 heads are exact, up to 256 tokens."""
    import torch

    falcon = transformers.models.falcon.modeling_falcon
    monkeypatch.setattr(falcon, "build_alibi_tensor", inspect.unwrap(falcon.build_alibi_tensor))
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads}
    theirs = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=True, initializer_range=0.3))
    theirs.save_pretrained(tmp_path)
    (layout, mesh), ids = placing("replicated"), np.random.default_rng(1).integers(0, 50, (2, 60))
    wanted = logits_of(from_folder(tmp_path), ids)
    close(logits(load(tmp_path, layout, mesh, "float32")[0], mesh, ids), wanted)


def test_transformers_has_one_exponent_for_all_mpts(transformers, monkeypatch):
    """Once it reads `alibi_bias_max`, `mpt_biases` in conftest.py and the note in the docs are not needed."""
    module = transformers.models.mpt.modeling_mpt
    original = inspect.unwrap(module.MptModel.build_mpt_alibi_tensor)  # behind every correction of conftest.py
    monkeypatch.setattr(module.MptModel, "build_mpt_alibi_tensor", original)
    ids, found = np.arange(9)[None], []
    for most in (8, 16):
        entries = CASES["mpt"][1] | {"attn_config": {"alibi_bias_max": most}, "initializer_range": 1.0}
        transformers.set_seed(0)
        found.append(logits_of(transformers.MptForCausalLM(transformers.MptConfig(**entries)).eval(), ids))
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_two_tables_that_config_json_calls_one_are_two_for_transformers_as_well(placing, from_folder, tmp_path):
    folder, (layout, mesh) = write(tmp_path, tensors(), tie_word_embeddings=True), placing("replicated")
    ids = np.random.default_rng(1).integers(0, 48, (2, 9))
    close(logits(load(folder, layout, mesh, "float32")[0], mesh, ids), logits_of(from_folder(folder), ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text_are_those_of_transformers_in_any_layout(name, reference, placing):
    wanted = reference(name, 64)
    for preset, padding in {"replicated": {}, **LAYOUTS}.items():
        layout, mesh = placing(preset, padding)
        model, _ = load(wanted.directory, layout, mesh, "float32")
        got = logits(model, mesh, wanted.tokens)
        close(got, wanted.logits)
        np.testing.assert_array_equal(got.argmax(-1)[:, wanted.prompt - 1 : -1], wanted.tokens[:, wanted.prompt :])
        if preset in DECODED:
            with jax.set_mesh(mesh):
                generate, greedy = models.Generator(model), models.Sampling(temperature=0)
                texts = generate(wanted.tokens[:, : wanted.prompt].tolist(), 64, sampling=greedy).texts
            assert texts == wanted.tokens[:, wanted.prompt :].tolist()


def _with_images(transformers, name: str):
    """Return a small model of texts and images by transformers."""
    seen = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {key: value for key, value in CASES["mistral"][1].items() if key != "sliding_window"}
    if name == "Llava":
        vision = transformers.CLIPVisionConfig(**seen, image_size=28, patch_size=14)
        text = transformers.LlamaConfig(**sizes)
    elif name == "Gemma3":
        vision = transformers.SiglipVisionConfig(**seen, image_size=28, patch_size=14)
        text = transformers.Gemma3TextConfig(**CASES["gemma3"][1])
    else:
        vision = transformers.PixtralVisionConfig(**seen, head_dim=8, image_size=28, patch_size=14)
        text = transformers.MistralConfig(**sizes, sliding_window=4)
    config = getattr(transformers, f"{name}Config")(vision_config=vision, text_config=text, tie_word_embeddings=False)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


@pytest.mark.turns(1)
@pytest.mark.parametrize("name", ["Mistral3", "Llava", "Gemma3"])
def test_the_text_part_of_a_model_with_images_has_the_logits_of_transformers(
    name, transformers, placing, from_folder, tmp_path
):
    transformers.set_seed(0)
    theirs = _with_images(transformers, name)
    for value in theirs.parameters():
        value.data += 0.2 * value.new_empty(value.shape).normal_()
    theirs.save_pretrained(tmp_path)
    layout, mesh = placing("replicated")
    model, report = load(tmp_path, layout, mesh, "float32")
    assert "the part for images is not" in str(report)
    ids = np.random.default_rng(0).integers(11, 50, (2, 9))  # 10 stands for a part of an image
    close(logits(model, mesh, ids), logits_of(theirs, ids))


_IMAGES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
    "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
}  # fmt: skip


@pytest.mark.slow
def test_the_text_part_of_llama_4_with_images_has_the_logits_of_transformers(transformers, placing, tmp_path):
    """A model with a part for images, as transformers writes it: names of tensors, and entries in a table inside."""
    import torch

    torch.manual_seed(0)
    text = CASES["llama4"][1]
    config = transformers.Llama4Config(text_config=text, vision_config=_IMAGES, image_token_index=49)
    theirs = transformers.Llama4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for path, value in theirs.language_model.named_parameters():
            value.copy_((1.0 if path.endswith("norm.weight") else 0.0) + 0.25 * torch.randn_like(value))
    theirs.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 49, (8, LENGTH))
    layout, mesh = placing("replicated")
    model, report = load(tmp_path, layout, mesh, "float32")
    # its text model alone: the whole one of transformers 5.24 fails without an image
    close(logits(model, mesh, tokens), logits_of(theirs.language_model, tokens))
    assert "the part for images is not" in report.remark


def own(placing, **changes) -> tuple[models.Transformer, jax.sharding.Mesh]:
    """A fresh model of our own."""
    sizes = {"embed": 24, "layers": 2, "heads": 12, "kv_heads": 3, "head_size": 8, "feed_forward": 40, "vocabulary": 50}
    layout, mesh = placing("weight-stationary-2d", LAYOUTS["weight-stationary-2d"])
    return models.build(models.ModelConfig(**(sizes | changes)), layout, mesh, jax.random.key(0)), mesh


DROPLESS = MoEConfig(experts=5, every=1, router="top-k", k=3, dispatch="dropless")
SWITCH = MoEConfig(experts=5, every=1, router="switch", dispatch="dropless")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        pytest.param({}, "Llama", id="the default"),
        pytest.param({"tied": False, "qkv_bias": True}, "Qwen2", id="untied"),
        pytest.param({"moe": DROPLESS}, "Mixtral", id="experts"),
        pytest.param({"moe": replace(DROPLESS, router="gshard", k=None)}, "Mixtral", id="gshard"),
        pytest.param({"moe": SWITCH, "qk_norm": True}, "Qwen3Moe", id="switch"),
        pytest.param({"activation": "geglu", "scale_embedding": False}, "Gemma", id="geglu"),
        pytest.param({"block": "parallel", "norm": "layer", "rotary_pairs": "neighbours"}, "Cohere", id="parallel"),
    ],
)
def test_a_model_of_our_own_is_one_of_transformers(changes, kind, placing, from_folder, tmp_path):
    model, mesh = own(placing, **changes)
    save(model, tmp_path / "out")
    theirs = from_folder(tmp_path / "out")
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    tokens = np.random.default_rng(0).integers(0, 50, (8, LENGTH))
    close(logits_of(theirs, tokens), logits(model, mesh, tokens))
