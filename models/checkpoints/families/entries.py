"""Entries of config.json that no family reads: those that change nothing, and those that must have one value.

Whatever is in neither table, and not in a family's own, is refused by name: an entry that is not known here may well
change what the model computes.
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

#: Precision is the caller's choice here, and so is how attention and experts are computed.
_PRECISION = frozenset({
    "dtype", "torch_dtype", "use_bfloat16", "torchscript", "_attn_implementation", "attn_implementation",
    "_attn_implementation_autoset", "_attn_implementation_internal", "_flash_attn_2_enabled",
    "_experts_implementation", "experts_implementation", "_experts_implementation_internal", "flash_attn",
    "flash_rotary", "fused_dense", "pretraining_tp", "chunk_size_feed_forward",
})  # fmt: skip

_TRAINING = frozenset({
    "initializer_range", "gradient_checkpointing", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "hidden_dropout", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "aux_loss_alpha",
})  # fmt: skip

#: What a call returns beside the logits, and heads of tasks that a causal language model does not have.
_OUTPUTS = frozenset({
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "_output_attentions", "num_labels",
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "tf_legacy_loss",
    "is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size", "encoder_no_repeat_ngram_size",
})  # fmt: skip

#: Those of `transformers.GenerationConfig`. Here the caller says how to sample; bos_token_id and eos_token_id are read
#: with the tokenizer.
_GENERATION = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "early_stopping",
    "max_time", "do_sample", "num_beams", "num_beam_groups", "diversity_penalty", "penalty_alpha", "temperature",
    "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "output_scores", "prefix",
    "generation_config",
})  # fmt: skip

IGNORED = _ABOUT_THE_FILE | _PRECISION | _TRAINING | _OUTPUTS | _GENERATION
"""Entries that change no logits of any family here."""

INACTIVE: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),  # transformers takes null for false, and then lets every token attend to those after it
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "attention_chunk_size": (None,),
    "rope_interleaved": (False,),
    "use_mrope": (False, None),
    "quantization_config": (None, {}),
}
"""Entry to the values, its default first, under which it changes nothing in any family here."""

REMEDIES = {"quantization_config": "its weights are quantized; take a checkpoint with plain ones"}
"""Remedies of entries for which it does not help to say which value they should have."""


def is_number(value: Any) -> bool:
    """Return whether JSON has a number here that a float holds; true and false are none, though Python counts them."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_whole(value: Any) -> bool:
    """Return whether JSON has a whole number here."""
    return isinstance(value, int) and not isinstance(value, bool)


def in_json(value: Any, most: int = 60) -> str:
    """Return a value as config.json has it, cut where it is long, for a message."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]} …"
