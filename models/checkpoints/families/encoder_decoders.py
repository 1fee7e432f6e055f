"""Families of encoder–decoders: M2M-100, NLLB-MoE, T5 and Switch Transformers.

Paths of the encoder's parameters begin with `encoder.`. Paths of the decoder's parameters have no prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import ModelConfig
from .entries import in_json, is_whole
from .family import Agreement, Family, Option, Stored
from .parallel import GELU
from .serial import FIXED, ROUTED, without

#: The number of key/value heads if there are as many as query heads.
_ALL_HEADS = lambda fields: fields["heads"]  # noqa: E731

_FIXED = without(FIXED, "positions", "encoder_layers", "start_token")


def _m2m_attention(path: str, at: str) -> dict[str, Stored]:
    rows = {f"{path}.w_o": Stored(f"{at}.out_proj.weight", "E(HD)"), f"{path}.b_o": Stored(f"{at}.out_proj.bias", "E")}
    for name, dims in {"q": "(HD)", "k": "(KD)", "v": "(KD)"}.items():
        rows[f"{path}.w_{name}"] = Stored(f"{at}.{name}_proj.weight", f"{dims}E")
        rows[f"{path}.b_{name}"] = Stored(f"{at}.{name}_proj.bias", dims)
    return rows


def _m2m_norm(path: str, name: str) -> dict[str, Stored]:
    return {f"{path}.norm": Stored(f"{name}.weight", "E"), f"{path}.norm_bias": Stored(f"{name}.bias", "E")}


def _m2m_feed_forward(path: str, at: str) -> dict[str, Stored]:
    return {
        f"{path}.w_in": Stored(f"{at}fc1.weight", "FE"),
        f"{path}.b_in": Stored(f"{at}fc1.bias", "F"),
        f"{path}.w_out": Stored(f"{at}fc2.weight", "EF"),
        f"{path}.b_out": Stored(f"{at}fc2.bias", "E"),
    }


def _m2m_stack(path: str, stack: str) -> dict[str, Stored]:
    """Return the table of the tensors that a stack of M2M-100 and a stack of NLLB-MoE have in common.

    All paths of parameters in the table begin with `path`.
    """
    layer = f"model.{stack}.layers.{{N}}"
    return {
        **_m2m_norm(f"{path}attention", f"{layer}.self_attn_layer_norm"),
        **_m2m_attention(f"{path}attention", f"{layer}.self_attn"),
        **_m2m_norm(f"{path}output", f"model.{stack}.layer_norm"),
    }


def _m2m_dense(path: str, stack: str) -> dict[str, Stored]:
    """Return the table of the feed-forward layers' tensors in a stack of M2M-100."""
    layer = f"model.{stack}.layers.{{N}}"
    return _m2m_norm(f"{path}ffn", f"{layer}.final_layer_norm") | _m2m_feed_forward(f"{path}ffn", f"{layer}.")


def _nllb_mixed(path: str, stack: str) -> dict[str, Stored]:
    """Return the table of the feed-forward layers' tensors in a stack of NLLB-MoE; some layers have experts."""
    layer = f"model.{stack}.layers.{{N}}"
    return {
        **_m2m_norm(f"{path}ffn", f"{layer}.ff_layer_norm"),
        **_m2m_feed_forward(f"{path}ffn", f"{layer}.ffn."),
        **_m2m_norm(f"{path}moe", f"{layer}.ff_layer_norm"),
        f"{path}moe.router": Stored(f"{layer}.ffn.router.classifier.weight", "XE"),
        **_m2m_feed_forward(f"{path}moe", f"{layer}.ffn.experts.expert_{{X}}."),
    }


def _same_sizes(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Add a fault for each size that differs between encoder and decoder, or that has no entry for the decoder."""
    for name, key in {"feed_forward": "decoder_ffn_dim", "heads": "decoder_attention_heads"}.items():
        if key not in json:
            faults.append(f"{key} is missing.")
        elif json[key] != fields[name] or isinstance(json[key], bool):
            other = key.replace("decoder", "encoder")
            faults.append(f"{key} is {in_json(json[key])}, and {other} is {fields[name]}; they must be equal.")
    return {}


def _written_sizes(config: ModelConfig) -> dict[str, Any]:
    return {"decoder_ffn_dim": config.feed_forward, "decoder_attention_heads": config.heads}


M2M_100 = Family(
    title="M2M-100",
    architecture="M2M100ForConditionalGeneration",
    model_type="m2m_100",
    options={
        "vocabulary": Option("vocab_size"),
        "embed": Option(("d_model", "hidden_size")),
        "encoder_layers": Option(("encoder_layers", "num_hidden_layers")),
        "layers": Option("decoder_layers"),
        "heads": Option(("encoder_attention_heads", "num_attention_heads")),
        "feed_forward": Option("encoder_ffn_dim"),
        "activation": Option("activation_function", "relu", GELU),
        "tied": Option("tie_word_embeddings", True),
        "start_token": Option("decoder_start_token_id", 2, null=2),
    },
    derived={"kv_heads": _ALL_HEADS, "head_size": lambda fields: fields["embed"] // fields["heads"]},
    fixed=_FIXED
    | {
        "norm": "layer",
        "norm_bias": True,
        "norm_epsilon": 1e-5,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "positions": "sinusoidal",
        "position_offset": 2,  # fairseq numbers positions from the padding token's id plus 1, which is 2
    },
    tensors={
        "embedding.table": Stored("model.shared.weight", "VE"),
        **_m2m_stack("encoder.", "encoder"),
        **_m2m_dense("encoder.", "encoder"),
        **_m2m_stack("", "decoder"),
        **_m2m_dense("", "decoder"),
        **_m2m_norm("cross", "model.decoder.layers.{N}.encoder_attn_layer_norm"),
        **_m2m_attention("cross", "model.decoder.layers.{N}.encoder_attn"),
        "output.table": Stored("lm_head.weight", "VE"),
    },
    inactive={"pad_token_id": (1,), "scale_embedding": (True,)},
    rope_base=None,
    scale_embedding=True,
    agreement=Agreement(("decoder_ffn_dim", "decoder_attention_heads"), _same_sizes, _written_sizes),
    copies=("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
    ignored=(r"model\.(encoder|decoder)\.embed_positions\.weights",),
)
"""M2M-100, and NLLB without experts.

Source: Fan et al. 2020, *Beyond English-Centric Multilingual Machine Translation* (arXiv 2010.11125).
Differs: transformers and fairseq count no position for a padding token inside a text. Here padding is only at the end.
"""


def _read_nllb(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Read the blocks that have experts; encoder and decoder must have the same fraction of such blocks."""
    _same_sizes(json, fields, faults)
    steps = {key: json.get(key, 4) for key in ("encoder_sparse_step", "decoder_sparse_step")}
    wrong = [key for key, step in steps.items() if not is_whole(step) or step < 1]
    must = "it must be a whole number n, if every nth block has experts"
    faults += [f"{key} is {in_json(steps[key])}; {must}." for key in wrong]
    encoder, decoder = steps.values()
    if encoder != decoder and not wrong:
        fact = f"encoder_sparse_step is {in_json(encoder)}, and decoder_sparse_step {in_json(decoder)}"
        faults.append(f"{fact}; here both stacks must have the same share of experts.")
    return {"moe.every": encoder}


def _written_nllb(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {**_written_sizes(config), **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), config.moe.every)}


NLLB_MOE = Family(
    title="NLLB-MoE",
    architecture="NllbMoeForConditionalGeneration",
    model_type="nllb-moe",
    options={**M2M_100.options, "moe.experts": Option("num_experts", 128)},
    derived={**M2M_100.derived, "moe.offset": lambda fields: fields["moe.every"] - 1},  # the last block of each period
    fixed=without(M2M_100.fixed, "moe") | ROUTED | {"moe.router": "top-k", "moe.k": 2, "moe.renormalize": True},
    tensors={
        "embedding.table": Stored("model.shared.weight", "VE"),
        **_m2m_stack("encoder.", "encoder"),
        **_nllb_mixed("encoder.", "encoder"),
        **_m2m_stack("", "decoder"),
        **_nllb_mixed("", "decoder"),
        **_m2m_norm("cross", "model.decoder.layers.{N}.cross_attention_layer_norm"),
        **_m2m_attention("cross", "model.decoder.layers.{N}.cross_attention"),
        "output.table": Stored("lm_head.weight", "VE"),
    },
    inactive={
        **M2M_100.inactive,
        "router_bias": (False,),
        "router_dtype": ("float32",),
        "second_expert_policy": ("all",),  # the others draw at random, even in evaluation
        "moe_eval_capacity_token_fraction": (1.0,),  # an expert has room for every token
    },
    # These entries say how tokens are dropped, which never happens here, and how padding, which is never read, is
    # computed.
    ignored_entries=(
        "expert_capacity",
        "normalize_router_prob_before_dropping",
        "batch_prioritized_routing",
        "router_ignore_padding_tokens",
    ),
    rope_base=None,
    scale_embedding=True,
    agreement=Agreement(
        keys=("decoder_ffn_dim", "decoder_attention_heads", "encoder_sparse_step", "decoder_sparse_step"),
        read=_read_nllb,
        write=_written_nllb,
        fields=("moe.every",),
    ),
    output_dropout=("moe_token_dropout", 0.2),
    copies=M2M_100.copies,
    ignored=M2M_100.ignored,
)
"""NLLB-MoE, which is M2M-100 with two experts for each token in every nth block.

Source: NLLB Team 2022, *No Language Left Behind* (arXiv 2207.04672), section 6.2.
Differs: transformers 5 sends the first choice of every token to expert 1 and the second choice to expert 0, whichever
    experts were chosen. Fairseq, transformers 4 and this table send the token to the chosen experts.
"""


def _t5_attention(path: str, at: str) -> dict[str, Stored]:
    dims = {"q": "(HD)E", "k": "(KD)E", "v": "(KD)E", "o": "E(HD)"}
    return {f"{path}.w_{name}": Stored(f"{at}.{name}.weight", each) for name, each in dims.items()}


def _t5_stack(path: str, stack: str, dense: str, last: int) -> dict[str, Stored]:
    """Return the table of the encoder's or the decoder's tensors, without cross-attention and experts.

    Args:
        path: the beginning of the paths of the stack's parameters.
        stack: the name of the stack in the checkpoint.
        dense: the name of the dense feed-forward layers in the checkpoint.
        last: the index of the feed-forward layer within a block.
    """
    block = f"{stack}.block.{{N}}"
    feed_forward = f"{block}.layer.{last}.{dense}"
    first = f"{stack}.block.0.layer.0.SelfAttention"
    return {
        f"{path}relative": Stored(f"{first}.relative_attention_bias.weight", "RH"),
        f"{path}attention.norm": Stored(f"{block}.layer.0.layer_norm.weight", "E"),
        **_t5_attention(f"{path}attention", f"{block}.layer.0.SelfAttention"),
        f"{path}ffn.norm": Stored(f"{block}.layer.{last}.layer_norm.weight", "E"),
        f"{path}ffn.w_in": Stored(f"{feed_forward}.wi.weight", "FE", gated=f"{feed_forward}.wi_1.weight"),
        f"{path}ffn.w_gate": Stored(f"{feed_forward}.wi_0.weight", "FE"),
        f"{path}ffn.w_out": Stored(f"{feed_forward}.wo.weight", "EF"),
        f"{path}output.norm": Stored(f"{stack}.final_layer_norm.weight", "E"),
    }


def _t5_tensors(dense: str) -> dict[str, Stored]:
    return {
        "embedding.table": Stored("shared.weight", "VE"),
        **_t5_stack("encoder.", "encoder", dense, 1),
        **_t5_stack("", "decoder", dense, 2),
        "cross.norm": Stored("decoder.block.{N}.layer.1.layer_norm.weight", "E"),
        **_t5_attention("cross", "decoder.block.{N}.layer.1.EncDecAttention"),
        "output.table": Stored("lm_head.weight", "VE"),
    }


_T5_OPTIONS = {
    "vocabulary": Option("vocab_size"),
    "embed": Option(("d_model", "hidden_size")),
    "encoder_layers": Option(("num_layers", "num_hidden_layers")),
    "layers": Option(
        "num_decoder_layers", lambda fields: fields["encoder_layers"], null=lambda fields: fields["encoder_layers"]
    ),
    "heads": Option(("num_heads", "num_attention_heads")),
    "head_size": Option(("d_kv", "head_dim")),
    "feed_forward": Option("d_ff"),
    "relative_buckets": Option("relative_attention_num_buckets", 32),
    "relative_distance": Option("relative_attention_max_distance", 128),
    "norm_epsilon": Option("layer_norm_epsilon", 1e-6),
    "tied": Option("tie_word_embeddings", True),
    "start_token": Option("decoder_start_token_id", 0, null=0),
}

_T5_FIXED = without(_FIXED, "relative_buckets", "relative_distance") | {
    "positions": "relative",
    "attention_scale": 1.0,
}

#: Attention with relative positions sets no limit on the length of a text.
_T5_IGNORED = ("pad_token_id", "n_positions", "output_past")

#: Names of activations in `feed_forward_proj`; `gated-gelu`, as in T5 1.1, means the tanh form of gelu.
_PROJECTIONS = {
    **GELU,
    "gated-gelu": "geglu",
    "gated-gelu_new": "geglu",
    "gated-silu": "swiglu",
}

#: In old files the decoder's first block has a table for cross-attention too, which transformers does not read.
_UNREAD = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)

_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _same_activation(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Add a fault for each entry that contradicts `feed_forward_proj`; transformers would follow such an entry."""
    named = json.get("feed_forward_proj", "relu")
    gate, _, kind = named.rpartition("-")
    wanted = {"is_gated_act": bool(gate), "dense_act_fn": "gelu_new" if named == "gated-gelu" else kind}
    for key, value in wanted.items():
        if key in json and json[key] != value:
            fact = f"{key} is {in_json(json[key])}"
            faults.append(f"{fact}; with feed_forward_proj {in_json(named)} it must be {in_json(value)}.")
    return {}


T5 = Family(
    title="T5",
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    options=_T5_OPTIONS | {"activation": Option("feed_forward_proj", "relu", _PROJECTIONS)},
    derived={"kv_heads": _ALL_HEADS},
    fixed=_T5_FIXED,
    tensors=_t5_tensors("DenseReluDense"),
    ignored_entries=_T5_IGNORED,
    rope_base=None,
    length=(),
    agreement=Agreement(("is_gated_act", "dense_act_fn"), _same_activation, lambda config: {}),
    root_scaled=("scale_decoder_outputs", "tie_word_embeddings"),
    copies=_COPIES,
    ignored=_UNREAD,
)
"""T5 1.0 and 1.1, and FLAN-T5 and ByT5, which have the same form.

Source: Raffel et al. 2020, *Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer*
    (arXiv 1910.10683), section 2.1.
Differs: T5 divides tied logits by √E. Here the last norm is multiplied by this factor, 1/√E, when a checkpoint is read,
    and divided by it when a checkpoint is written.
"""


def _experts(path: str, stack: str, last: int) -> dict[str, Stored]:
    layer = f"{stack}.block.{{N}}.layer.{last}"
    return {
        f"{path}moe.norm": Stored(f"{layer}.layer_norm.weight", "E"),
        f"{path}moe.router": Stored(f"{layer}.mlp.router.classifier.weight", "XE"),
        f"{path}moe.w_in": Stored(f"{layer}.mlp.experts.expert_{{X}}.wi.weight", "FE"),
        f"{path}moe.w_out": Stored(f"{layer}.mlp.experts.expert_{{X}}.wo.weight", "EF"),
    }


def _sparse_step(json: Mapping[str, Any], stack: str, layers: int, faults: list[str]) -> int:
    """Return the number n such that every nth block of a stack has experts, or 0 on a fault.

    The number is computed as in transformers.
    """
    key = f"num_sparse_{stack}_layers"
    sparse = json.get(key, 3)
    if not is_whole(sparse) or not 0 <= sparse <= layers:
        must = f"it must be a whole number, at most the number of layers ({layers})"
        faults.append(f"{key} is {in_json(sparse)}; {must}.")
        return 0
    step = layers // sparse if sparse else layers
    given = json.get(f"{stack}_sparse_step", step)
    if given != step:
        must = f"with {key} {sparse} (of {layers} layers) it must be {step}"
        faults.append(f"{stack}_sparse_step is {in_json(given)}; {must}.")
    return step


def _read_experts(json: Mapping[str, Any], fields: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Read the blocks that have experts; encoder and decoder must have the same fraction of such blocks."""
    encoder = _sparse_step(json, "encoder", fields["encoder_layers"], faults)
    decoder = _sparse_step(json, "decoder", fields["layers"], faults)
    if encoder != decoder and encoder and decoder:
        faults.append(
            f"1 of {encoder} blocks of the encoder has experts, and 1 of {decoder} of the decoder "
            "(num_sparse_encoder_layers, num_sparse_decoder_layers); here both stacks must have the same share."
        )
    capacity = json.get("expert_capacity", 64)
    if not is_whole(capacity) or capacity < 1:
        faults.append(f"expert_capacity is {in_json(capacity)}; it must be a whole number of tokens.")
    return {"moe.every": encoder}


#: A capacity that no sequence exceeds, so that the model in a written checkpoint drops no token.
_NEVER_FULL = 2**20


def _written_experts(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {
        "num_sparse_encoder_layers": config.encoder_layers // config.moe.every,
        "num_sparse_decoder_layers": config.layers // config.moe.every,
        "expert_capacity": _NEVER_FULL,
    }


SWITCH = Family(
    title="Switch Transformers",
    architecture="SwitchTransformersForConditionalGeneration",
    model_type="switch_transformers",
    options=_T5_OPTIONS
    | {
        "activation": Option("dense_act_fn", "relu", GELU),
        "moe.experts": Option(("num_experts", "num_local_experts"), 8),
    },
    derived={
        "kv_heads": _ALL_HEADS,
        "moe.offset": lambda fields: min(1, fields["moe.every"] - 1),  # the second block of each period
    },
    fixed=without(_T5_FIXED, "moe") | ROUTED | {"moe.router": "switch", "moe.k": None, "moe.renormalize": True},
    tensors=_t5_tensors("mlp") | _experts("encoder.", "encoder", 1) | _experts("", "decoder", 2),
    inactive={"router_bias": (False,), "router_type": ("tokens_masked",), "is_gated_act": (False,)},
    ignored_entries=(
        *_T5_IGNORED,
        "feed_forward_proj",
        "router_dtype",
        "router_ignore_padding_tokens",
        "add_router_probs",
    ),
    rope_base=None,
    length=(),
    agreement=Agreement(
        keys=(
            "num_sparse_encoder_layers",
            "num_sparse_decoder_layers",
            "encoder_sparse_step",
            "decoder_sparse_step",
            "expert_capacity",
        ),
        read=_read_experts,
        write=_written_experts,
        fields=("moe.every",),
    ),
    root_scaled=("tie_word_embeddings",),
    copies=_COPIES,
    ignored=_UNREAD,
)
"""Switch Transformers.

Source: Fedus et al. 2021, *Switch Transformers* (arXiv 2101.03961).
Differs: experts here are dropless. In transformers an expert takes the first `expert_capacity` tokens of a sequence,
    and further tokens are dropped. Logits are the same if no token is dropped. To train with a capacity, set
    moe.dispatch to sort, and set moe.capacity_factor to expert_capacity · experts / tokens of a group.
"""
