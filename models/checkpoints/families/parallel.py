"""Families of parallel blocks, in which attention and feed-forward read one layer norm and their outputs are summed."""

from __future__ import annotations

from .family import Family, Option, Stored
from .serial import ATTENTION, ENDS, FEED_FORWARD, FIXED, LAYER, OPTIONS, SIZES, without

#: Names, in transformers, of activations without a gate; the tanh approximation of gelu has several.
GELU = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}

PARALLEL = without(FIXED, "norm_bias", "qkv_bias", "out_bias", "ffn_bias", "output_bias", "rotary_pairs") | {
    "block": "parallel",
    "norm": "layer",
}

_FOUR_TIMES = lambda fields: 4 * fields["embed"]  # noqa: E731

_GPTJ = "transformer.h.{N}"

GPTJ = Family(
    title="GPT-J",
    architecture="GPTJForCausalLM",
    model_type="gptj",
    options={
        "vocabulary": Option("vocab_size"),
        "embed": Option(("n_embd", "hidden_size")),
        "layers": Option(("n_layer", "num_hidden_layers")),
        "heads": Option(("n_head", "num_attention_heads")),
        "feed_forward": Option("n_inner", _FOUR_TIMES, null=_FOUR_TIMES),
        "rotary_size": Option("rotary_dim", 64),
        "activation": Option("activation_function", "gelu_new", GELU),
        "norm_epsilon": Option("layer_norm_epsilon", 1e-5),
        "tied": Option("tie_word_embeddings", False),
    },
    derived={
        "kv_heads": lambda fields: fields["heads"],
        "head_size": lambda fields: fields["embed"] // fields["heads"],
    },
    fixed=PARALLEL
    | {
        "norm_bias": True,
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": True,
        "output_bias": True,
        "rotary_pairs": "neighbours",
    },
    tensors={
        "embedding.table": Stored("transformer.wte.weight", "VE"),
        "norm": Stored(f"{_GPTJ}.ln_1.weight", "E"),
        "norm_bias": Stored(f"{_GPTJ}.ln_1.bias", "E"),
        "attention.w_q": Stored(f"{_GPTJ}.attn.q_proj.weight", "(HD)E"),
        "attention.w_k": Stored(f"{_GPTJ}.attn.k_proj.weight", "(KD)E"),
        "attention.w_v": Stored(f"{_GPTJ}.attn.v_proj.weight", "(KD)E"),
        "attention.w_o": Stored(f"{_GPTJ}.attn.out_proj.weight", "E(HD)"),
        "ffn.w_in": Stored(f"{_GPTJ}.mlp.fc_in.weight", "FE"),
        "ffn.b_in": Stored(f"{_GPTJ}.mlp.fc_in.bias", "F"),
        "ffn.w_out": Stored(f"{_GPTJ}.mlp.fc_out.weight", "EF"),
        "ffn.b_out": Stored(f"{_GPTJ}.mlp.fc_out.bias", "E"),
        "output.norm": Stored("transformer.ln_f.weight", "E"),
        "output.norm_bias": Stored("transformer.ln_f.bias", "E"),
        "output.table": Stored("lm_head.weight", "VE"),
        "output.bias": Stored("lm_head.bias", "V"),
    },
    inactive={"rotary": (True,), "scale_attn_weights": (True,)},
    rope_base=None,
    length=("n_positions", "max_position_embeddings"),
)

PHI = Family(
    title="Phi",
    architecture="PhiForCausalLM",
    model_type="phi",
    options=SIZES
    | {
        "activation": Option("hidden_act", "gelu_new", GELU),
        "norm_epsilon": Option("layer_norm_eps", 1e-5),
        "tied": Option("tie_word_embeddings", False),
    },
    fixed=PARALLEL
    | {
        "norm_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "output_bias": True,
        "rotary_pairs": "halves",
    },
    tensors=without(ENDS, "output.norm")
    | without(ATTENTION, "attention.norm", "attention.w_o", "attention.b_o")
    | {
        "norm": Stored(f"{LAYER}.input_layernorm.weight", "E"),
        "norm_bias": Stored(f"{LAYER}.input_layernorm.bias", "E"),
        "attention.w_o": Stored(f"{LAYER}.self_attn.dense.weight", "E(HD)"),
        "attention.b_o": Stored(f"{LAYER}.self_attn.dense.bias", "E"),
        "ffn.w_in": Stored(f"{LAYER}.mlp.fc1.weight", "FE"),
        "ffn.b_in": Stored(f"{LAYER}.mlp.fc1.bias", "F"),
        "ffn.w_out": Stored(f"{LAYER}.mlp.fc2.weight", "EF"),
        "ffn.b_out": Stored(f"{LAYER}.mlp.fc2.bias", "E"),
        "output.norm": Stored("model.final_layernorm.weight", "E"),
        "output.norm_bias": Stored("model.final_layernorm.bias", "E"),
        "output.bias": Stored("lm_head.bias", "V"),
    },
    inactive={"qk_layernorm": (False,)},
    partial_rotary=0.5,
)

COHERE = Family(
    title="Cohere",
    architecture="CohereForCausalLM",
    model_type="cohere",
    options=without(OPTIONS, "norm_epsilon")
    | {
        "norm_epsilon": Option("layer_norm_eps", 1e-5),
        "tied": Option("tie_word_embeddings", True),
        "qkv_bias": Option("attention_bias", False),
        "out_bias": Option("attention_bias", False),
    },
    fixed=PARALLEL | {"norm_bias": False, "ffn_bias": False, "output_bias": False, "rotary_pairs": "neighbours"},
    tensors=ENDS
    | without(ATTENTION, "attention.norm")
    | without(FEED_FORWARD, "ffn.norm")
    | {"norm": Stored(f"{LAYER}.input_layernorm.weight", "E")},
    inactive={"use_qk_norm": (False, None)},
    rope_base=500000.0,
    logit_scale=0.0625,
)
