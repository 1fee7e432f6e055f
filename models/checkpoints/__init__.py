"""Public checkpoints: read safetensors, config.json and tokenizer.json for any mesh and layout, and write these files.

Reading order: files, families/, config, sources, loading, special, steps, rendering, chat, text, generation, saving.
"""

from .config import model_config
from .files import CheckpointError
from .generation import GenerationConfig, sampling
from .loading import LoadReport, load
from .saving import save
from .text import TextStream, Tokenizer, byte_tokenizer, keep_tokenizer, tokenizer

__all__ = [
    "CheckpointError",
    "GenerationConfig",
    "LoadReport",
    "TextStream",
    "Tokenizer",
    "byte_tokenizer",
    "keep_tokenizer",
    "load",
    "model_config",
    "sampling",
    "save",
    "tokenizer",
]
