"""Decoder-only language models in Flax NNX, with every tensor sharded by a layout.

Reading order: config, parameters, attention, feed_forward, experts, blocks, transformer, objective, decoding,
shapes, step. `models.step` has to be imported by name: it imports the libraries of training.
"""

from models.config import ModelConfig
from models.decoding import generate
from models.objective import batch_spec, loss
from models.parameters import gradient_specs, optimizer_specs, parameter_specs
from models.shapes import abstract, abstract_batch, abstract_key, abstract_tokens, activation_specs
from models.transformer import Transformer, arrays, build, with_arrays

__all__ = [
    "ModelConfig",
    "Transformer",
    "abstract",
    "abstract_batch",
    "abstract_key",
    "abstract_tokens",
    "activation_specs",
    "arrays",
    "batch_spec",
    "build",
    "generate",
    "gradient_specs",
    "loss",
    "optimizer_specs",
    "parameter_specs",
    "with_arrays",
]
