"""BLOOM and MPT, whose position information is ALiBi: biases that make scores fall with distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .entries import IGNORED, in_json, is_number, is_whole
from .family import Agreement, Family, Option, Stored, fused
from .layer_norms import feed_forward, fused_attention, norm
from .serial import FIXED, without

if TYPE_CHECKING:
    from ...config import ModelConfig

_FIXED = FIXED | {"norm": "layer", "positions": "alibi"}

#: Fields that no entry of these families sets, because they follow from other sizes.
_DERIVED = {
    "kv_heads": lambda fields: fields["heads"],
    "head_size": lambda fields: fields["embed"] // fields["heads"],
    "feed_forward": lambda fields: 4 * fields["embed"],
}

_H = "transformer.h.{N}"

BLOOM = Family(
    title="BLOOM",
    architecture="BloomForCausalLM",
    model_type="bloom",
    options={
        "vocabulary": Option("vocab_size"),
        "embed": Option(("hidden_size", "n_embed")),
        "layers": Option(("n_layer", "num_hidden_layers")),
        "heads": Option(("n_head", "num_attention_heads")),
        "norm_epsilon": Option("layer_norm_epsilon", 1e-5),
        "tied": Option("tie_word_embeddings", True),
    },
    derived=_DERIVED,
    fixed=_FIXED
    | {
        "norm_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "activation": "gelu",
        "embedding_norm": True,
    },
    tensors={
        "embedding.table": Stored("transformer.word_embeddings.weight", "VE"),
        "output.table": Stored("lm_head.weight", "VE"),
        **norm("embedding.norm", "transformer.word_embeddings_layernorm"),
        **norm("attention.norm", f"{_H}.input_layernorm"),
        **norm("ffn.norm", f"{_H}.post_attention_layernorm"),
        **norm("output.norm", "transformer.ln_f"),
        **fused_attention(f"{_H}.self_attention.query_key_value", f"{_H}.self_attention.dense"),
        **feed_forward(f"{_H}.mlp.dense_h_to_4h", f"{_H}.mlp.dense_4h_to_h"),
    },
    inactive={"apply_residual_connection_post_layernorm": (False,), "n_inner": (None,)},
    ignored_entries=(
        *("slow_but_exact", "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
        *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
    ),
    rope_base=None,
    length=("seq_length",),
    renamed=((r"(?!transformer\.|lm_head\.)(.*)", r"transformer.\1"),),  # files of models without logits
)
"""Source: BigScience Workshop 2022, *BLOOM: A 176B-Parameter Open-Access Multilingual Language Model* (arXiv
2211.05100), section 3.2."""


#: Entries of MPT's `attn_config`, each with the only supported value, which is the default.
_OF_ATTENTION = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}

#: Entries of MPT's `attn_config` that are read, with the field that each sets, and its default.
_READ_OF_ATTENTION = {
    "alibi_bias_max": ("alibi_max", 8),
    "clip_qkv": ("qkv_clip", None),
    "softmax_scale": ("attention_scale", None),
}
_IGNORED_OF_ATTENTION = IGNORED | {"attn_impl", "is_encoder_decoder"}


def _read_attention(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Read the table `attn_config`; return the fields that it sets."""
    table = json.get("attn_config")
    if not isinstance(table, dict | None):
        faults.append(f"attn_config is {in_json(table)}; it must be an object.")
        return {}
    table = table or {}
    for key in table:
        if key not in (*_OF_ATTENTION, *_READ_OF_ATTENTION) and key not in _IGNORED_OF_ATTENTION:
            faults.append(
                f"attn_config has {key}, which is not known for MPT; delete it if the model's class in transformers "
                "does not read it."
            )
    for key, only in _OF_ATTENTION.items():
        if (value := table.get(key, only)) != only or isinstance(value, bool) != isinstance(only, bool):
            faults.append(f"{key} of attn_config is {in_json(value)}, which is not supported; {in_json(only)} is.")
    found: dict[str, Any] = {}
    for key, (name, default) in _READ_OF_ATTENTION.items():
        given: Any = table.get(key, default)
        if given is None and default is None:
            found[name] = None
        elif (is_number(given) if default is None else is_whole(given)) and given > 0:
            found[name] = float(given)
        else:
            kind = "number" if default is None else "whole number"
            faults.append(f"{key} of attn_config is {in_json(given)}; it must be a positive {kind}.")
    return found


def _written_attention(config: ModelConfig) -> dict[str, Any]:
    most = round(config.alibi_max)  # transformers accepts no other value
    read = {"alibi_bias_max": most, "clip_qkv": config.qkv_clip, "softmax_scale": config.attention_scale}
    return {"attn_config": {**_OF_ATTENTION, **read}}


def _no_whole_exponent(config: ModelConfig) -> list[str]:
    """Return the reason why a model cannot be written if its `alibi_max` is not a whole number."""
    if config.alibi_max == round(config.alibi_max):
        return []
    return [f"alibi_max is {config.alibi_max}, which is not a whole number"]


_B = "transformer.blocks.{N}"

MPT = Family(
    title="MPT",
    architecture="MptForCausalLM",
    model_type="mpt",
    aliases=("MPTForCausalLM",),
    options={
        "vocabulary": Option("vocab_size"),
        "embed": Option(("d_model", "hidden_size")),
        "layers": Option(("n_layers", "num_hidden_layers")),
        "heads": Option(("n_heads", "num_attention_heads")),
        "norm_epsilon": Option("layer_norm_epsilon", 1e-5),
        "tied": Option("tie_word_embeddings", True),
    },
    derived=_DERIVED,
    fixed=without(_FIXED, "alibi_max", "qkv_clip", "attention_scale") | {"activation": "gelu_exact"},
    tensors={
        "embedding.table": Stored("transformer.wte.weight", "VE"),
        "output.table": Stored("lm_head.weight", "VE"),
        "attention.norm": Stored(f"{_B}.norm_1.weight", "E"),
        **fused(f"{_B}.attn.Wqkv.weight", "(HD|KD|KD)E", "attention.w_q", "attention.w_k", "attention.w_v"),
        "attention.w_o": Stored(f"{_B}.attn.out_proj.weight", "E(HD)"),
        "ffn.norm": Stored(f"{_B}.norm_2.weight", "E"),
        "ffn.w_in": Stored(f"{_B}.ffn.up_proj.weight", "FE"),
        "ffn.w_out": Stored(f"{_B}.ffn.down_proj.weight", "EF"),
        "output.norm": Stored("transformer.norm_f.weight", "E"),
    },
    inactive={
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    },
    ignored_entries=(
        "learned_pos_emb",  # ALiBi replaces position vectors
        *("emb_pdrop", "embedding_fraction", "init_config", "init_device"),
        *("tokenizer_name", "verbose"),
    ),
    agreement=Agreement(
        ("attn_config",),
        _read_attention,
        _written_attention,
        tuple(name for name, _ in _READ_OF_ATTENTION.values()),
        reasons=_no_whole_exponent,
    ),
    rope_base=None,
    length=("max_seq_len",),
    default_length=2048,
)
"""Source: MosaicML 2023, *Introducing MPT-7B: A New Standard for Open-Source, Commercially Usable LLMs*, and the
configuration of transformers."""
