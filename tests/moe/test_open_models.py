"""Routers against those of transformers: the experts and gates of each token."""

import numpy as np
import pytest

from gspmd.moe import MoEConfig, route

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[interop]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[interop]'")

E, X, L = 6, 12, 40
COMMON = {"hidden_size": E, "num_experts_per_tok": 4, "num_attention_heads": 2}
DEEPSEEK = COMMON | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
CASES = {
    "DeepSeek-V3": (
        "deepseek_v3.DeepseekV3TopkRouter",
        DEEPSEEK | {"n_routed_experts": X, "norm_topk_prob": True},
        {"scores": "sigmoid", "expert_groups": 4, "kept_groups": 2, "choice_bias": True, "gate_factor": 2.5},
    ),
    "GLM-4.5": (
        "glm4_moe.Glm4MoeTopkRouter",
        DEEPSEEK | {"n_routed_experts": X, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        {"scores": "sigmoid", "choice_bias": True, "gate_factor": 2.5, "renormalize": False},
    ),
    "DeepSeek-V2": (
        "deepseek_v2.DeepseekV2TopkRouter",
        DEEPSEEK | {"n_routed_experts": X, "topk_method": "group_limited_greedy"},
        {"expert_groups": 4, "kept_groups": 2, "group_best": 1, "gate_factor": 2.5, "renormalize": False},
    ),
    "Qwen2-MoE": ("qwen2_moe.Qwen2MoeTopKRouter", COMMON | {"num_experts": X}, {"renormalize": False}),
    "gpt-oss": ("gpt_oss.GptOssTopKRouter", COMMON | {"num_local_experts": X}, {}),
    "Llama 4": (
        "llama4.Llama4Router",
        COMMON | {"num_local_experts": X, "num_experts_per_tok": 1},
        {"k": 1, "scores": "sigmoid", "renormalize": False, "gate_inputs": True},
    ),
}


def of_transformers(name: str, entries: dict, x: np.ndarray, draw: np.random.Generator):
    """Return the router's logits [L, X], its gates [L, X], 0 where it does not choose, and its bias of the choice."""
    module, _, kind = name.partition(".")
    library = getattr(getattr(transformers.models, module), f"modeling_{module}")
    config = next(getattr(library, each) for each in dir(library) if each.endswith(("Config", "TextConfig")))
    made = getattr(library, kind)(config(**entries))
    bias = getattr(made, "e_score_correction_bias", None)
    with torch.no_grad():
        for value in [*made.parameters(), *([] if bias is None else [bias])]:
            value.copy_(torch.tensor(draw.standard_normal(value.shape)))
        results = made(torch.tensor(x))
    logits = x @ made.weight.detach().numpy().T
    logits += made.bias.detach().numpy() if getattr(made, "bias", None) is not None else 0
    if len(results) == 2:  # Llama 4: gates of all experts
        return logits, results[0].numpy(), None
    _, gates, chosen = (each.numpy() for each in results)
    whole = np.zeros_like(logits)
    np.put_along_axis(whole, chosen, gates, axis=-1)
    return logits, whole, None if bias is None else bias.numpy()


@pytest.mark.parametrize("name", CASES)
def test_a_router_is_that_of_transformers(name):
    draw = np.random.default_rng(0)
    kind, entries, settings = CASES[name]
    logits, wanted, bias = of_transformers(kind, entries, draw.standard_normal((L, E)).astype(np.float32), draw)
    config = MoEConfig(experts=X, router="top-k", dispatch="dropless", **{"k": 4, **settings})
    routing = route(logits[None], config, bias=bias)
    found = np.zeros_like(wanted)
    np.put_along_axis(found, np.asarray(routing.expert[0]), np.asarray(routing.gate[0]), axis=-1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
