"""Families with layer norms, serial or parallel: StarCoder 2, StableLM, GPT-NeoX and Falcon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .entries import in_json, is_whole
from .family import Agreement, Family, Option, Stored, fused
from .parallel import GELU
from .serial import ATTENTION, ENDS, FEED_FORWARD, FIXED, LAYER, OPTIONS, SILU, SIZES, kv_heads, without
from .window import Window

if TYPE_CHECKING:
    from ...config import ModelConfig

_FIXED = FIXED | {"norm": "layer", "norm_bias": True}
_QKV = ("attention.w_q", "attention.w_k", "attention.w_v")
_QKV_BIASES = ("attention.b_q", "attention.b_k", "attention.b_v")


def norm(path: str, name: str, paired: str = "") -> dict[str, Stored]:
    """Return the stored forms of a norm's scale and bias; `paired` is the norm's name in a block with two norms."""
    kinds = {"": "weight", "_bias": "bias"}
    return {
        f"{path}{ours}": Stored(f"{name}.{theirs}", "E", paired=f"{paired}.{theirs}" if paired else "")
        for ours, theirs in kinds.items()
    }


def feed_forward(into: str, out: str) -> dict[str, Stored]:
    """Return the stored forms of a feed-forward layer without a gate."""
    return {
        "ffn.w_in": Stored(f"{into}.weight", "FE"),
        "ffn.b_in": Stored(f"{into}.bias", "F"),
        "ffn.w_out": Stored(f"{out}.weight", "EF"),
        "ffn.b_out": Stored(f"{out}.bias", "E"),
    }


def fused_attention(name: str, out: str) -> dict[str, Stored]:
    """Return the stored forms of attention in which queries, key and value of a group of heads follow each other."""
    return {
        **fused(f"{name}.weight", "(K(QD|D|D))E", *_QKV),
        **fused(f"{name}.bias", "(K(QD|D|D))", *_QKV_BIASES),
        "attention.w_o": Stored(f"{out}.weight", "E(HD)"),
        "attention.b_o": Stored(f"{out}.bias", "E"),
    }


_NORMS = {
    **norm("attention.norm", f"{LAYER}.input_layernorm"),
    **norm("ffn.norm", f"{LAYER}.post_attention_layernorm"),
    **norm("output.norm", "model.norm"),
}

STARCODER2 = Family(
    title="StarCoder 2",
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    options=SIZES
    | {
        "kv_heads": kv_heads(2),
        "activation": Option("hidden_act", "gelu_pytorch_tanh", GELU),
        "norm_epsilon": Option("norm_epsilon", 1e-5),
        "tied": Option("tie_word_embeddings", True),
        "qkv_bias": Option("use_bias", True),
        "out_bias": Option("use_bias", True),
        "ffn_bias": Option("use_bias", True),
    },
    fixed=without(_FIXED, "qkv_bias", "out_bias", "ffn_bias"),
    tensors=ENDS | ATTENTION | _NORMS | feed_forward(f"{LAYER}.mlp.c_fc", f"{LAYER}.mlp.c_proj"),
    inactive={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
    ignored_entries=(
        *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon"),
        *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
    ),
    window=Window(None),
)

STABLELM = Family(
    title="StableLM",
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    options=OPTIONS
    | {
        "kv_heads": kv_heads(32),
        "activation": Option("hidden_act", "silu", SILU),
        "norm_epsilon": Option("layer_norm_eps", 1e-5),
        "qkv_bias": Option("use_qkv_bias", False),
        "block": Option("use_parallel_residual", False, {False: "serial", True: "parallel"}),
    },
    fixed=without(_FIXED, "qkv_bias", "block"),
    tensors=ENDS | ATTENTION | FEED_FORWARD | _NORMS | norm("norm", f"{LAYER}.input_layernorm"),
    inactive={"qk_layernorm": (False,), "rotary_scaling_factor": (1.0,)},
    ignored_entries=("norm_eps", "rope_pct"),
    partial_rotary=0.25,
)

_NEOX = "gpt_neox.layers.{N}"

GPT_NEOX = Family(
    title="GPT-NeoX",
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    options=without(SIZES, "kv_heads", "head_size")
    | {
        "activation": Option("hidden_act", "gelu", GELU),
        "norm_epsilon": Option("layer_norm_eps", 1e-5),
        "tied": Option("tie_word_embeddings", False),
        "qkv_bias": Option("attention_bias", True),
        "out_bias": Option("attention_bias", True),
        "block": Option("use_parallel_residual", True, {True: "parallel", False: "serial"}),
    },
    derived={
        "kv_heads": lambda fields: fields["heads"],
        "head_size": lambda fields: fields["embed"] // fields["heads"],
        "parallel_norms": lambda fields: 2 if fields["block"] == "parallel" else 1,
    },
    fixed=without(_FIXED, "qkv_bias", "out_bias", "block", "parallel_norms") | {"ffn_bias": True},
    tensors={
        "embedding.table": Stored("gpt_neox.embed_in.weight", "VE"),
        "output.table": Stored("embed_out.weight", "VE"),
        **norm("norm", f"{_NEOX}.input_layernorm"),
        **norm("attention.norm", f"{_NEOX}.input_layernorm"),
        **norm("ffn.norm", f"{_NEOX}.post_attention_layernorm"),
        **norm("output.norm", "gpt_neox.final_layer_norm"),
        **fused_attention(f"{_NEOX}.attention.query_key_value", f"{_NEOX}.attention.dense"),
        **feed_forward(f"{_NEOX}.mlp.dense_h_to_4h", f"{_NEOX}.mlp.dense_4h_to_h"),
    },
    partial_rotary=0.25,
    rope_names=("rotary_emb_base", "rotary_pct"),
    ignored=(r".*\.rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias"),
)


def _read_heads(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Read the number of key/value heads, the number of norms, and the form of the block."""
    given = {key: json.get(key, default) for key, default in _FALCON.items()}
    heads, norms = given["num_kv_heads"], given["num_ln_in_parallel_attn"]
    for key in ("new_decoder_architecture", "multi_query", "parallel_attn"):
        if not isinstance(given[key], bool):
            faults.append(f"{key} is {in_json(given[key])}; it must be true or false.")
    for key in ("num_kv_heads", "num_ln_in_parallel_attn"):
        if given[key] is not None and not is_whole(given[key]):
            faults.append(f"{key} is {in_json(given[key])}; it must be a whole number, or null.")
    heads = fields["heads"] if heads is None else heads
    if given["new_decoder_architecture"]:
        norms = 2 if norms is None else norms
        if norms not in (1, 2):
            faults.append(f"num_ln_in_parallel_attn is {in_json(norms)}; it must be 1 or 2.")
        if given["parallel_attn"] is False:
            faults.append("parallel_attn is false, which new_decoder_architecture does not have.")
        return {"kv_heads": heads, "parallel_norms": norms, "block": "parallel"}
    if norms == 2:
        faults.append("num_ln_in_parallel_attn is 2, which needs new_decoder_architecture.")
    if not given["multi_query"] and heads != fields["heads"]:
        fact = f"num_kv_heads is {in_json(heads)}, and num_attention_heads is {fields['heads']}"
        faults.append(f"{fact}; fewer key/value heads need multi_query or new_decoder_architecture.")
    block = "parallel" if given["parallel_attn"] else "serial"
    return {"kv_heads": 1 if given["multi_query"] else fields["heads"], "parallel_norms": 1, "block": block}


def _written_heads(config: ModelConfig) -> dict[str, Any]:
    """Return the entries about heads, norms and the form of the block.

    They are in the newer form unless the blocks are serial. The newer form allows any numbers of heads and norms, but
    no serial block.
    """
    serial = config.block == "serial"
    heads = {"num_kv_heads": config.kv_heads, "num_ln_in_parallel_attn": None if serial else config.parallel_norms}
    multi_query = serial and config.kv_heads == 1
    return heads | {"new_decoder_architecture": not serial, "multi_query": multi_query, "parallel_attn": not serial}


def _no_groups(config: ModelConfig) -> list[str]:
    """Return the reason why a model cannot be written if it has serial blocks and groups of heads."""
    if config.block == "parallel" or config.kv_heads in (1, config.heads):
        return []
    return [f"kv_heads is {config.kv_heads}, but a serial block has 1 or {config.heads} of them"]


#: Entries that are read together, with their defaults.
_FALCON = {
    "new_decoder_architecture": False,
    "multi_query": True,
    "num_kv_heads": None,
    "num_ln_in_parallel_attn": None,
    "parallel_attn": True,
}
_H = "transformer.h.{N}"
_FOUR_TIMES = lambda fields: 4 * fields["embed"]  # noqa: E731

FALCON = Family(
    title="Falcon",
    architecture="FalconForCausalLM",
    model_type="falcon",
    options={
        "vocabulary": Option("vocab_size"),
        "embed": Option(("hidden_size", "n_embed")),
        "layers": Option("num_hidden_layers"),
        "heads": Option("num_attention_heads"),
        "feed_forward": Option("ffn_hidden_size", _FOUR_TIMES, null=_FOUR_TIMES),
        "activation": Option("activation", "gelu", GELU),
        "norm_epsilon": Option("layer_norm_epsilon", 1e-5),
        "tied": Option("tie_word_embeddings", True),
        "qkv_bias": Option("bias", False),
        "out_bias": Option("bias", False),
        "ffn_bias": Option("bias", False),
        "positions": Option("alibi", False, {False: "rotary", True: "alibi"}, null=False),
    },
    derived={
        "head_size": lambda fields: fields["embed"] // fields["heads"],
        "alibi_scaled": lambda fields: fields["positions"] == "alibi",
    },
    fixed=without(_FIXED, "qkv_bias", "out_bias", "ffn_bias", "parallel_norms", "block", "positions", "alibi_scaled"),
    tensors={
        "embedding.table": Stored("transformer.word_embeddings.weight", "VE"),
        "output.table": Stored("lm_head.weight", "VE"),
        **norm("norm", f"{_H}.input_layernorm", paired=f"{_H}.ln_attn"),
        **norm("attention.norm", f"{_H}.input_layernorm"),
        **norm("ffn.norm", f"{_H}.post_attention_layernorm", paired=f"{_H}.ln_mlp"),
        **norm("output.norm", "transformer.ln_f"),
        **fused_attention(f"{_H}.self_attention.query_key_value", f"{_H}.self_attention.dense"),
        **feed_forward(f"{_H}.mlp.dense_h_to_4h", f"{_H}.mlp.dense_4h_to_h"),
    },
    inactive={
        "apply_residual_connection_post_layernorm": (False,),
    },
    ignored_entries=("ff_factor",),
    default_length=2048,
    agreement=Agreement(
        tuple(_FALCON), _read_heads, _written_heads, ("kv_heads", "parallel_norms", "block"), reasons=_no_groups
    ),
)
