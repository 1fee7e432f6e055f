"""The families of OpenAI: GPT-2, with learned positions, and gpt-oss, with attention sinks and experts."""

from __future__ import annotations

from .family import Family, Option, Stored, fused
from .mixtures import EXPERTS
from .parallel import GELU
from .serial import ATTENTION, ENDS, FIXED, LAYER, OPTIONS, SILU, kv_heads, without
from .window import Window

_BLOCK = "transformer.h.{N}"
_FOUR_TIMES = lambda fields: 4 * fields["embed"]  # noqa: E731

GPT_2 = Family(
    title="GPT-2",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    options={
        "vocabulary": Option("vocab_size", 50257),
        "embed": Option(("n_embd", "hidden_size"), 768),
        "layers": Option(("n_layer", "num_hidden_layers"), 12),
        "heads": Option(("n_head", "num_attention_heads"), 12),
        "feed_forward": Option("n_inner", _FOUR_TIMES, null=_FOUR_TIMES),
        "activation": Option("activation_function", "gelu_new", GELU),
        "norm_epsilon": Option("layer_norm_epsilon", 1e-5),
        "tied": Option("tie_word_embeddings", True),
    },
    derived={
        "kv_heads": lambda fields: fields["heads"],
        "head_size": lambda fields: fields["embed"] // fields["heads"],
    },
    fixed=FIXED
    | {
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "positions": "learned",
    },
    tensors={
        "embedding.table": Stored("transformer.wte.weight", "VE"),
        "embedding.positions": Stored("transformer.wpe.weight", "PE"),
        "attention.norm": Stored(f"{_BLOCK}.ln_1.weight", "E"),
        "attention.norm_bias": Stored(f"{_BLOCK}.ln_1.bias", "E"),
        **fused(f"{_BLOCK}.attn.c_attn.weight", "E(HD|KD|KD)", "attention.w_q", "attention.w_k", "attention.w_v"),
        **fused(f"{_BLOCK}.attn.c_attn.bias", "(HD|KD|KD)", "attention.b_q", "attention.b_k", "attention.b_v"),
        "attention.w_o": Stored(f"{_BLOCK}.attn.c_proj.weight", "(HD)E"),
        "attention.b_o": Stored(f"{_BLOCK}.attn.c_proj.bias", "E"),
        "ffn.norm": Stored(f"{_BLOCK}.ln_2.weight", "E"),
        "ffn.norm_bias": Stored(f"{_BLOCK}.ln_2.bias", "E"),
        "ffn.w_in": Stored(f"{_BLOCK}.mlp.c_fc.weight", "EF"),
        "ffn.b_in": Stored(f"{_BLOCK}.mlp.c_fc.bias", "F"),
        "ffn.w_out": Stored(f"{_BLOCK}.mlp.c_proj.weight", "FE"),
        "ffn.b_out": Stored(f"{_BLOCK}.mlp.c_proj.bias", "E"),
        "output.norm": Stored("transformer.ln_f.weight", "E"),
        "output.norm_bias": Stored("transformer.ln_f.bias", "E"),
        "output.table": Stored("lm_head.weight", "VE"),
    },
    inactive={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    ignored_entries=("reorder_and_upcast_attn", "n_ctx", "output_past"),
    rope_base=None,
    length=("n_positions", "max_position_embeddings"),
    default_length=1024,
    renamed=(
        (r"(?!transformer\.|lm_head\.)(.*)", r"transformer.\1"),
    ),  # the first published files hold the model without its output
)
"""Source: Radford et al. 2019, *Language Models are Unsupervised Multitask Learners*, section 2.3."""

GPT_OSS = Family(
    title="gpt-oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    options=without(OPTIONS, "activation")
    | {
        "kv_heads": kv_heads(8),
        "head_size": Option("head_dim", 64),
        "norm_epsilon": Option("rms_norm_eps", 1e-5),
        "activation": Option("hidden_act", "silu", dict.fromkeys(SILU, "swiglu_clamped")),
        "qkv_bias": Option("attention_bias", True),
        "out_bias": Option("attention_bias", True),
        "moe.experts": Option(("num_local_experts", "num_experts"), 128),
        "moe.k": Option(("num_experts_per_tok", "experts_per_token"), 4),
    },
    fixed=without(EXPERTS, "qkv_bias", "out_bias", "ffn_bias", "sinks", "moe.router_bias")
    | {"ffn_bias": True, "sinks": True, "moe.router_bias": True, "moe.renormalize": True},
    tensors=ENDS
    | ATTENTION
    | {
        "attention.sinks": Stored(f"{LAYER}.self_attn.sinks", "H"),
        "moe.norm": Stored(f"{LAYER}.post_attention_layernorm.weight", "E"),
        "moe.router": Stored(f"{LAYER}.mlp.router.weight", "XE"),
        "moe.router_bias": Stored(f"{LAYER}.mlp.router.bias", "X"),
        # the columns of gate and input alternate
        **fused(f"{LAYER}.mlp.experts.gate_up_proj", "XE(F(1|1))", "moe.w_gate", "moe.w_in"),
        **fused(f"{LAYER}.mlp.experts.gate_up_proj_bias", "X(F(1|1))", "moe.b_gate", "moe.b_in"),
        "moe.w_out": Stored(f"{LAYER}.mlp.experts.down_proj", "XFE"),
        "moe.b_out": Stored(f"{LAYER}.mlp.experts.down_proj_bias", "XE"),
    },
    inactive={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    ignored_entries=("initial_context_length",),
    rope_base=150000.0,
    default_rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    window=Window(128, layered=True, pattern=2),
)
"""Source: OpenAI 2025, *gpt-oss-120b & gpt-oss-20b Model Card* (arXiv 2508.10925), section 2."""
