"""Transformers in Flax NNX, decoder-only models and encoder–decoders, with every tensor sharded by a layout.

Reading order: config, vectors, parameters, attention, feed_forward, experts, blocks, transformer, objective, decoding,
unstacked, shapes, step. The module `gspmd_models.step` is not imported here, because it imports the libraries of
training. Import it by name.

This folder is installed as `gspmd_models`, since many projects have their own `models`. Imports within the folder are
relative, so that it works under both names.
"""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.layouts.initial import abstract_key

    from .config import ModelConfig
    from .decoding import (
        Cache,
        Generator,
        Sampling,
        abstract_cache,
        decode_step,
        empty_cache,
        encode_step,
        prefill_step,
    )
    from .objective import loss
    from .parameters import gradient_specs, optimizer_specs, parameter_specs
    from .placement import batch_spec
    from .quantization import quantize
    from .shapes import abstract, abstract_batch, abstract_source, abstract_tokens, activation_specs
    from .transformer import Transformer, arrays, build, with_arrays
    from .unstacked import unstack

__all__ = [
    "Cache",
    "Generator",
    "ModelConfig",
    "Sampling",
    "Transformer",
    "abstract",
    "abstract_batch",
    "abstract_cache",
    "abstract_key",
    "abstract_source",
    "abstract_tokens",
    "activation_specs",
    "arrays",
    "batch_spec",
    "build",
    "decode_step",
    "empty_cache",
    "encode_step",
    "gradient_specs",
    "loss",
    "optimizer_specs",
    "parameter_specs",
    "prefill_step",
    "quantize",
    "unstack",
    "with_arrays",
]

_HOMES = {
    "gspmd.layouts.initial": "abstract_key",
    ".config": "ModelConfig",
    ".decoding": "Cache Generator Sampling abstract_cache decode_step empty_cache encode_step prefill_step",
    ".objective": "loss",
    ".parameters": "gradient_specs optimizer_specs parameter_specs",
    ".placement": "batch_spec",
    ".quantization": "quantize",
    ".shapes": "abstract abstract_batch abstract_source abstract_tokens activation_specs",
    ".transformer": "Transformer arrays build with_arrays",
    ".unstacked": "unstack",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
