"""Entries of config.json that no family reads: some have no effect, and others must have a certain value.

If an entry is in none of these tables and the family does not read it, it is refused with an error that names it. Such
an entry may change the results of the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

_ABOUT_THE_FILE = frozenset({
    "architectures", "model_type", "transformers_version", "transformers.js_config", "_name_or_path", "name_or_path",
    "_model_name_or_path", "auto_map", "custom_pipelines", "_commit_hash", "_from_auto", "tokenizer_class",
    "model_max_length", "max_sequence_length", "is_llama_config", "unsloth_version", "unsloth_fixed",
})  # fmt: skip

#: Entries about precision, and about how attention and experts are computed, which the caller chooses here.
_PRECISION = frozenset({
    "dtype", "torch_dtype", "use_bfloat16", "torchscript", "_attn_implementation", "attn_implementation",
    "_attn_implementation_autoset", "_attn_implementation_internal", "_flash_attn_2_enabled",
    "_experts_implementation", "experts_implementation", "_experts_implementation_internal", "flash_attn",
    "flash_rotary", "fused_dense", "pretraining_tp", "chunk_size_feed_forward",
})  # fmt: skip

_TRAINING = frozenset({
    "initializer_range", "init_std", "initializer_factor", "gradient_checkpointing", "attention_dropout", "attn_pdrop",
    "embd_pdrop", "resid_pdrop", "attention_probs_dropout_prob", "hidden_dropout_prob", "hidden_dropout", "dropout",
    "dropout_rate", "activation_dropout",
    "classifier_dropout", "encoder_layerdrop", "decoder_layerdrop", "router_aux_loss_coef", "router_z_loss_coef",
    "router_jitter_noise", "output_router_logits", "aux_loss_alpha", "embedding_dropout", "residual_dropout",
})  # fmt: skip

#: Entries about outputs besides the logits, and about heads for tasks other than causal language modeling.
_OUTPUTS = frozenset({
    "use_cache", "cache_implementation", "return_dict", "output_hidden_states", "output_attentions",
    "_output_attentions", "num_labels",
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "tf_legacy_loss",
    "is_decoder", "tie_encoder_decoder", "_num_labels", "n_special", "predict_special_tokens",
    "cross_attention_hidden_size", "encoder_no_repeat_ngram_size",
})  # fmt: skip

#: Fields of `transformers.GenerationConfig`. The caller decides how to sample, and bos_token_id and eos_token_id are
#: read with the tokenizer.
_GENERATION = frozenset({
    "bos_token_id", "eos_token_id", "sep_token_id", "unk_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "early_stopping",
    "max_time", "do_sample", "num_beams", "num_beam_groups", "diversity_penalty", "penalty_alpha", "temperature",
    "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "output_scores", "prefix",
    "generation_config",
})  # fmt: skip

IGNORED = _ABOUT_THE_FILE | _PRECISION | _TRAINING | _OUTPUTS | _GENERATION
"""Entries that do not change the logits of any family."""

IGNORED_BY_DECODERS = frozenset({"pad_token_id", "decoder_start_token_id"})
"""Entries that do not change the logits of a decoder-only model."""

INACTIVE: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),  # transformers reads null as false, and then lets every token attend to later ones
    "use_bidirectional_attention": (False, None),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "attention_chunk_size": (None,),
    "rope_interleaved": (False,),
    "use_mrope": (False, None),
    "quantization_config": (None, {}),
}
"""A mapping from an entry to the values with which it has no effect in any family. The first value is the default."""

BIASES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
}
"""A mapping from an entry about biases to the values that mean "no bias", for families without such biases."""

STACKS: Mapping[bool, Mapping[str, tuple[Any, ...]]] = {
    False: {"is_encoder_decoder": (False,)},
    True: {"is_encoder_decoder": (True,)},
}
"""Mappings from an entry to its only allowed value, for families with an encoder (True) and without one (False)."""

REMEDIES = {
    "quantization_config": "a quantization of weights that is not supported (mxfp4 and fp8 in blocks of 128 by 128 "
    "are); use a checkpoint whose weights are not quantized"
}
"""Remedies for entries that need more than a different value."""


def is_read_packed(value: Any) -> bool:
    """Return whether a quantization_config describes weights that are converted when they are read (`packed`)."""
    if not isinstance(value, dict):
        return False
    method = value.get("quant_method")
    blocks = method == "fp8" and value.get("fmt", "e4m3") == "e4m3" and value.get("weight_block_size") == [128, 128]
    return method == "mxfp4" or blocks


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number in the range of a float, and not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole(value: Any) -> bool:
    """Return whether a JSON value is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def in_json(value: Any, most: int = 60) -> str:
    """Format a value of config.json for a message, shortening it if it is long."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]} …"
